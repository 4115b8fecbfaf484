"""Compare a lake with its records, by file and by window, and with the database.

`verify_export` and repairs read all rows, a prune only the rows of the windows that it removes. An
export searches for changes of other programs, and reads rows only where the log shows a change.

Other programs may merge files and rewrite them. Their files count if the windows in them have
the recorded checksums.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import SparkSession
from sqlalchemy import URL

from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.lake.delta import LOG, DataFile
from pyspark_sqlbroker.lake.entries import Entry
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.removal import ArchiveRows
from pyspark_sqlbroker.lake.row_checksums import (
    NO_ROWS,
    RowChecksums,
    compute_window_checksums,
    query_window_checksums,
)
from pyspark_sqlbroker.lake.windows import ExportWindow
from pyspark_sqlbroker.moments import MIN_TIME, TimeInput, parse_time
from pyspark_sqlbroker.store_errors import convert_store_errors


@dataclass(frozen=True)
class VerifyResult:
    """The contents of a lake, compared with the exports' records.

    Attributes:
        path: Root of the lake.
        files: Number of files that were read.
        windows: Number of windows that were compared.
        rows: Number of rows in the files that are not altered.
        damaged: By path, files that were altered or are missing, or in which another program has
            written rows without `id` or `archived_at`, with the difference.
        differing: By name, windows whose rows in the files that are not altered differ from the
            export: how many are missing, the altered files that may have had them, and both
                checksums.
        missing: By name, windows of the lake that lack rows of the database, with their number;
            empty if no database was queried.
        uncovered: Number of the database's rows that lie before the end of the lake's last window
            and in none of its windows: before the `since` of its first export, or in a gap. None if
            no database was queried.
    """

    path: str
    files: int
    windows: int
    rows: int
    damaged: Mapping[str, str]
    differing: Mapping[str, str]
    missing: Mapping[str, str] = field(default_factory=dict)
    uncovered: int | None = None

    @property
    def intact(self) -> bool:
        """True if nothing differs or is missing; `uncovered` does not count."""
        return not (self.damaged or self.differing or self.missing)


@dataclass(frozen=True)
class LakeExamination:
    """The comparison of a lake with the records, for verification, repair and prune.

    Attributes:
        files: The files that were checked.
        altered: By path, files that were altered since the commit or are missing, with the
            difference.
        unidentified: By path, files with rows without `id` or `archived_at`, with their number.
        foreign: Files of other programs that are not altered.
        checksums: Checksums of each window in the files that are not altered.
        differing: Windows whose checksums differ from the recorded ones.
    """

    files: list[DataFile]
    altered: Mapping[str, str]
    unidentified: Mapping[str, str]
    foreign: list[DataFile]
    checksums: Mapping[ExportWindow, RowChecksums]
    differing: tuple[ExportWindow, ...]

    def list_suspect_files(self) -> list[DataFile]:
        """Return damaged files, and files of other programs in which a window differs.

        A repair takes these files out of the table if it can restore their windows; a prune refuses
        windows that may have rows in them.
        """
        differing_files = [file for file in self.foreign if _may_hold_any(file, self.differing)]
        damaged = {*self.altered, *self.unidentified, *(file.path for file in differing_files)}
        return [file for file in self.files if file.path in damaged]


@dataclass(frozen=True)
class LakeChanges:
    """The differences between a lake and the exports' commits.

    Attributes:
        files: By path, files that are altered, missing, or written by another program with other
            rows, with the difference; `LOG` if the table has other rows than are recorded.
        windows: Names of the affected windows.
        unknown: Altered files without a record of their contents.
        verified: Files of other programs that have the rows of their windows.
    """

    files: Mapping[str, str]
    windows: frozenset[str]
    unknown: Sequence[DataFile] = ()
    verified: Sequence[DataFile] = ()

    def may_affect(self, window: ExportWindow) -> bool:
        """Return True if the lake's rows of a window may differ from the record.

        The contents of an unknown file cannot be told, only the range of times in the log.
        """
        return window.name in self.windows or any(
            file.may_hold(window.start, window.end) for file in self.unknown
        )


@convert_store_errors(OSError)
def verify_export(
    spark: SparkSession,
    path: str,
    *,
    url: str | URL | None = None,
    source: str | None = None,
    since: TimeInput | None = None,
    until: TimeInput | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> VerifyResult:
    """Read the files of a lake again and compare with the exports' records.

    Every file is compared by size and SHA-256. The checksums of every window are computed again
    from the files that are unaltered, or that other programs have written in their place
    (OPTIMIZE).

    With `url` the database's rows in windows of the lake are compared, too. The database counts all
    rows of its archive by window, without the conditions on times that exports read by, and so
    reads an index on `archived_at` or the table from end to end.

    Args:
        spark: A session; not Spark Connect. No driver is needed.
        path: Root of the lake.
        url: SQLAlchemy URL of the database, with any driver; None queries no database.
        source: The name that the export was given for the database, see `export_archive`.
        since: Only windows that begin at or after this time, and files that may have their rows.
        until: Only windows that end at or before this time.
        storage_options: See `export_archive`.

    Raises:
        SetupError: nothing was exported to this path, or the export is of another database.
        StoreError: the database or the file system does not answer, or refuses.
        NotSupportedError: Spark Connect.
    """
    lake = Lake(spark, path, storage_options)
    lake.require_source()
    first = parse_time("since", since)
    end = parse_time("until", until)

    def is_selected(window: ExportWindow) -> bool:
        """Return True if the whole window lies between since= and until=."""
        return (first is None or window.start >= first) and (end is None or window.end <= end)

    is_bounded = first is not None or end is not None
    findings = examine_lake(lake, is_selected if is_bounded else None)
    compared = {*filter(is_selected, lake.list_windows()), *findings.checksums}
    comparison = (
        () if url is None else _compare_with_database(lake, findings, url, source, is_selected)
    )
    return VerifyResult(
        lake.folders.root,
        len(findings.files),
        len(compared),
        sum(row_checksums.rows for row_checksums in findings.checksums.values()),
        {**findings.altered, **findings.unidentified},
        {
            window.name: _describe_difference(lake, findings, window)
            for window in findings.differing
        },
        *comparison,
    )


def _compare_with_database(
    lake: Lake,
    findings: LakeExamination,
    url: str | URL,
    name: str | None,
    is_selected: Callable[[ExportWindow], bool],
) -> tuple[dict[str, str], int]:
    """Compute `VerifyResult.missing` and `VerifyResult.uncovered`.

    Rows in the database of a window that no export has covered are only counted as uncovered. Only
    windows whose counts differ from the record are listed row by row. If the listing by the index
    on times disagrees with the counts, the rows are listed again by their computed window, which
    reads the whole table.
    """
    database = get_database(parse_address(url))
    selection = lake.select(database, name, hint="give the URL of its database")
    end = max((end for _, end in lake.state.covered), default=MIN_TIME)
    damaged = [file for file in findings.files if file.path in findings.altered]
    lacking = dict[str, str]()
    uncovered = 0
    no_entry = Entry(NO_ROWS, NO_ROWS)
    with database.connect() as connection:
        database.require_table(connection, selection.table, selection.schema)
        counts = query_window_checksums(database, connection, selection, lake.size, checksums=False)
        for window in sorted(window for window in counts if window.start < end):
            if not lake.is_covered(window):
                uncovered += counts[window].rows
                continue
            recorded = lake.state.entries.get(window.name, no_entry).source
            if counts[window] == recorded or not is_selected(window):
                continue
            archive = ArchiveRows(database, connection, selection)
            rows = archive.between(window.start, window.end).list_ids()
            # Rows came or went since then, or the conditions on times miss some.
            if rows.checksums != counts[window]:
                rows = archive.list_window(window)
            if missing := rows.count_missing(lake.iter_identities(window, damaged)):
                shortage = f"{missing} of the {len(rows.ids)} rows that the database has"
                lacking[window.name] = f"{shortage} are not in the lake: {window.repair_hint}"
    return lacking, uncovered


def _describe_difference(lake: Lake, findings: LakeExamination, window: ExportWindow) -> str:
    """Describe how a window in the files differs from its record, for `VerifyResult.differing`.

    If rows are missing, the altered files that may have had these rows are named.
    """
    recorded = lake.get_checksums(window)
    actual = findings.checksums.get(window, NO_ROWS)
    issue = "its rows differ from the record"
    if lake.get_entry(window) is None:
        issue = "no export has recorded it"
    elif actual.rows < recorded.rows:
        issue = f"{recorded.rows - actual.rows} of its {recorded.rows} rows are missing"
    files = [
        file.path
        for file in findings.files
        if file.path in findings.altered and file.may_hold(window.start, window.end)
    ]
    location = f", which may have been in {', '.join(files)}" if files else ""
    return f"{issue}{location}: the record says {recorded}; the files have {actual}"


def examine_lake(
    lake: Lake,
    is_selected: Callable[[ExportWindow], bool] | None = None,
    windows: Iterable[ExportWindow] = (),
    *,
    checksums: bool = True,
) -> LakeExamination:
    """Compare files and windows with the records, for a verification, a repair or a prune.

    A record has the checksums that a window's rows had after the last export, erasure or repair. A
    file is altered if it is missing, or its size or SHA-256 differs from the commit; a foreign file
    was written by another program.

    Args:
        lake: The loaded lake.
        is_selected: Only these windows, and files that may have their rows; None takes all.
        windows: Selected windows that may not be recorded.
        checksums: True to compare contents of rows; False for counts only, unless other programs
            have written.
    """
    all_windows = {*lake.list_windows(), *windows}
    files = lake.files
    if is_selected is not None:
        all_windows = set(filter(is_selected, all_windows))
        files = [file for file in files if _may_hold_any(file, all_windows)]
    altered = lake.find_altered_files(files)
    readable = [file for file in files if file.path not in altered]
    foreign = lake.find_foreign_files(readable)
    # Counts do not show updates of other programs.
    with_contents = checksums or bool(foreign)
    checksums_by_window = compute_window_checksums(
        lake.read_files(readable), lake.size, checksums=with_contents
    )
    if is_selected is not None:
        checksums_by_window = {
            window: sums for window, sums in checksums_by_window.items() if is_selected(window)
        }
    differing = tuple(_find_differing(lake, all_windows, checksums_by_window))
    # Rows without a time are in no window, so no checksums would show them.
    unidentified = lake.find_files_without_ids(foreign)
    return LakeExamination(files, altered, unidentified, foreign, checksums_by_window, differing)


def _may_hold_any(file: DataFile, windows: Iterable[ExportWindow]) -> bool:
    """Return True if the file may have rows of any of the windows."""
    return any(file.may_hold(window.start, window.end) for window in windows)


def _find_differing(
    lake: Lake,
    windows: Iterable[ExportWindow],
    checksums: Mapping[ExportWindow, RowChecksums],
) -> list[ExportWindow]:
    """Return the windows whose checksums differ from the records, in order.

    A window without a record differs if it has rows.
    """
    all_windows = sorted({*windows, *checksums})
    return [
        window
        for window in all_windows
        if not checksums.get(window, NO_ROWS).matches(lake.get_checksums(window))
    ]


def find_changes(lake: Lake, checked_bytes: float) -> LakeChanges:
    """Compare the table with the records; rows are read only where the log shows a change.

    Cheap enough to run before each export. Files that another program has written are read; if the
    rows of their windows are as recorded, the files are returned as verified.

    Args:
        lake: The loaded lake.
        checked_bytes: See `Lake.find_altered_files`.
    """
    altered = lake.find_altered_files(lake.files, checked_bytes)
    altered_files = [file for file in lake.files if file.path in altered]
    unaltered_files = [file for file in lake.files if file.path not in altered]
    foreign = lake.find_foreign_files(unaltered_files)
    unidentified = lake.find_files_without_ids(foreign)
    differing = _find_differing_foreign(lake, unaltered_files, foreign)
    issue = "another program wrote it, and its rows differ from the exported rows"
    differing_files = {
        file.path: issue for file in foreign if _may_hold_any(file, differing)
    } | unidentified
    windows = {window.name for window in [*lake.find_windows(altered), *differing]}
    files = altered | differing_files
    if not _has_recorded_row_count(lake):
        # Another program has removed or restored files, so count the rows of all windows.
        checksums = compute_window_checksums(
            lake.read_files(unaltered_files), lake.size, checksums=False
        )
        other_windows = {
            window.name for window in _find_differing(lake, lake.list_windows(), checksums)
        } - windows
        if other_windows:
            # No file can be named for rows that are gone, so the log stands for the table.
            suffix = (
                f" and of {len(other_windows) - 1} more windows" if len(other_windows) > 1 else ""
            )
            files[LOG] = f"the rows of {min(other_windows)}{suffix} differ from the record"
            windows |= other_windows
    verified = [file for file in foreign if file.path not in differing_files]
    return LakeChanges(files, frozenset(windows), lake.find_foreign_files(altered_files), verified)


def _find_differing_foreign(
    lake: Lake, files: Sequence[DataFile], foreign: Sequence[DataFile]
) -> list[ExportWindow]:
    """Return the windows in files of other programs whose rows differ from the records.

    A window may have rows in our own files, too, so those files are read as well.
    """
    if not foreign:
        return []
    spans = [lake.get_file_span(file) for file in foreign]
    overlapping = [
        file for file in files if any(span is None or file.may_hold(*span) for span in spans)
    ]
    checksums = compute_window_checksums(lake.read_files(overlapping), lake.size, checksums=True)
    affected = {
        window: checksums.get(window, NO_ROWS)
        for window in {*lake.list_windows(), *checksums}
        if any(file.may_hold(window.start, window.end) for file in foreign)
    }
    return _find_differing(lake, (), affected)


def _has_recorded_row_count(lake: Lake) -> bool:
    """Return True if the log has as many rows as are recorded.

    A cheap test for rows that another program has removed, or restored: it reads only the log.
    """
    recorded = sum(lake.get_checksums(window).rows for window in lake.list_windows())
    return sum(file.rows for file in lake.files) == recorded
