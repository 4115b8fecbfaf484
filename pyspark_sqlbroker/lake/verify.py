"""Compare a lake with its record, by file and by window, and with the database.

`verify_export` and repairs read all rows, a prune those of the windows that it removes. An export
looks for what others have done since, and reads rows only where the log shows a change.

Other programs may merge files and write them again. Their files count if the windows in them have
the figures that are recorded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import SparkSession
from sqlalchemy import URL

from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import database_of
from pyspark_sqlbroker.lake.delta import LOG, DataFile
from pyspark_sqlbroker.lake.entries import Entry
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.removal import list_rows, list_window
from pyspark_sqlbroker.lake.row_checksums import (
    NOTHING,
    RowChecksums,
    ask_windows,
    compute_windows,
)
from pyspark_sqlbroker.lake.windows import ExportWindow
from pyspark_sqlbroker.moments import FIRST, Moment, parse_moment
from pyspark_sqlbroker.store_errors import store_errors


@dataclass(frozen=True)
class VerifyResult:
    """What a lake holds, compared with what exports have recorded.

    Attributes:
        path: Where it is.
        files: How many were read.
        windows: How many were compared.
        rows: In the files that are not altered.
        damaged: Files that were altered or are missing, or in which another program has written
            rows without `id` or `archived_at`, by path, with what differs.
        differing: Windows whose rows in the files that are not altered are not those that were
            exported: how many are missing, the altered files that may have had them, and both
            figures.
        lacking: Windows of the lake of which the database has rows that the lake has not, and how
            many; empty if no database was asked.
        uncovered: Rows of the database that lie before the end of the lake's last window and in
            none of its windows: before the `since` of its first export, or in a gap. None if no
            database was asked.
    """

    path: str
    files: int
    windows: int
    rows: int
    damaged: Mapping[str, str]
    differing: Mapping[str, str]
    lacking: Mapping[str, str] = field(default_factory=dict)
    uncovered: int | None = None

    @property
    def intact(self) -> bool:
        """Whether nothing differs or lacks; `uncovered` does not count."""
        return not (self.damaged or self.differing or self.lacking)


@dataclass(frozen=True)
class Findings:
    """The same, as a repair and a prune need it.

    Attributes:
        files: Those that were looked at.
        altered: Other than they were committed, or missing, with what differs.
        nameless: With rows without `id` or `archived_at`, and how many.
        foreign: Of other programs, and not altered.
        found: Figures of each window in the files that are not altered.
        differing: Windows whose figures are not those that are recorded.
    """

    files: list[DataFile]
    altered: Mapping[str, str]
    nameless: Mapping[str, str]
    foreign: list[DataFile]
    found: Mapping[ExportWindow, RowChecksums]
    differing: tuple[ExportWindow, ...]

    def suspects(self) -> list[DataFile]:
        """List damaged files, and files of other programs in which a window differs."""
        doubtful = [one for one in self.foreign if _may_hold_any(one, self.differing)]
        damaged = {*self.altered, *self.nameless, *(one.path for one in doubtful)}
        return [one for one in self.files if one.path in damaged]


@dataclass(frozen=True)
class Changes:
    """What differs from what exports have committed.

    Attributes:
        files: Altered, missing, or written by another program with other rows, with what differs;
            `LOG` if the table has other rows than are recorded.
        windows: Names of the windows that are concerned.
        unknown: Altered files of which the record does not say what they had.
        proven: Files of other programs that have the rows of their windows.
    """

    files: Mapping[str, str]
    windows: frozenset[str]
    unknown: Sequence[DataFile] = ()
    proven: Sequence[DataFile] = ()

    def concern(self, window: ExportWindow) -> bool:
        """Whether a window may have rows in the lake that are not those that are recorded."""
        return window.name in self.windows or any(
            one.may_hold(window.start, window.end) for one in self.unknown
        )


@store_errors(OSError)
def verify_export(
    spark: SparkSession,
    path: str,
    *,
    url: str | URL | None = None,
    source: str | None = None,
    since: Moment | None = None,
    until: Moment | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> VerifyResult:
    """Read the files of a lake again and compare them with what exports have recorded.

    Every file is compared by size and SHA-256, and the figures of every window are computed anew
    from the files that are as they were committed, or that other programs have written in their
    place (OPTIMIZE).

    With `url` the database is asked, too, which rows it has in windows of the lake. It counts all
    rows of its archive by their windows, without the conditions on times that exports read by, and
    so reads an index on `archived_at` or the table from end to end.

    Args:
        spark: A session; not Spark Connect. No driver is needed.
        path: Of the lake.
        url: SQLAlchemy URL of the database, with any driver; None asks none.
        source: The name that the export was given for the database, see `export_archive`.
        since: Only windows that begin at or after this moment, and files that may have their rows.
        until: Only windows that have ended by this moment.
        storage_options: See `export_archive`.

    Raises:
        SetupError: nothing was exported to this path, or that of another database.
        StoreError: the database or the file system does not answer, or refuses.
        NotSupportedError: Spark Connect.
    """
    lake = Lake(spark, path, storage_options)
    lake.need_source()
    first = parse_moment("since", since)
    end = parse_moment("until", until)

    def is_wanted(window: ExportWindow) -> bool:
        return (first is None or window.start >= first) and (end is None or window.end <= end)

    bounded = first is not None or end is not None
    findings = examine(lake, is_wanted if bounded else None)
    compared = {*filter(is_wanted, lake.windows()), *findings.found}
    comparison = () if url is None else _compare_source(lake, findings, url, source, is_wanted)
    return VerifyResult(
        lake.folders.root,
        len(findings.files),
        len(compared),
        sum(one.rows for one in findings.found.values()),
        {**findings.altered, **findings.nameless},
        {one.name: _describe(lake, findings, one) for one in findings.differing},
        *comparison,
    )


def _compare_source(
    lake: Lake,
    findings: Findings,
    url: str | URL,
    name: str | None,
    is_wanted: Callable[[ExportWindow], bool],
) -> tuple[dict[str, str], int]:
    """`VerifyResult.lacking` and `VerifyResult.uncovered`."""
    database = database_of(parse_address(url))
    selection = lake.select(database, name, advice="give the URL of its database")
    end = max((end for _, end in lake.state.covered), default=FIRST)
    damaged = [one for one in findings.files if one.path in findings.altered]
    lacking = dict[str, str]()
    uncovered = 0
    nothing = Entry(NOTHING, NOTHING)
    with database.connect() as connection:
        database.need_table(connection, selection.table, selection.schema)
        counts = ask_windows(database, connection, selection, lake.size, checksums=False)
        for window in sorted(one for one in counts if one.start < end):
            if not lake.covers(window):
                uncovered += counts[window].rows
                continue
            recorded = lake.state.entries.get(window.name, nothing).source
            if counts[window] == recorded or not is_wanted(window):
                continue
            rows = list_rows(database, connection, selection.between(window.start, window.end))
            if rows.figures != counts[window]:  # rows came or went, or the conditions are wrong
                rows = list_window(database, connection, selection, window)
            if number := rows.count_lacking(lake.identities(window, damaged)):
                shortage = f"{number} of the {len(rows.ids)} rows that the database has"
                lacking[window.name] = f"{shortage} are not in the lake: {window.advice}"
    return lacking, uncovered


def _describe(lake: Lake, findings: Findings, window: ExportWindow) -> str:
    recorded = lake.figures_of(window)
    there = findings.found.get(window, NOTHING)
    problem = "its rows are others"
    if lake.entry(window) is None:
        problem = "no export has recorded it"
    elif there.rows < recorded.rows:
        problem = f"{recorded.rows - there.rows} of its {recorded.rows} rows are missing"
    files = [
        one.path
        for one in findings.files
        if one.path in findings.altered and one.may_hold(window.start, window.end)
    ]
    where = f", which may have been in {', '.join(files)}" if files else ""
    return f"{problem}{where}: the record says {recorded}; the files have {there}"


def examine(
    lake: Lake,
    is_wanted: Callable[[ExportWindow], bool] | None = None,
    windows: Iterable[ExportWindow] = (),
    *,
    checksums: bool = True,
) -> Findings:
    """Compare files and windows with the record.

    Args:
        lake: As it is loaded.
        is_wanted: Only these windows, and files that may have their rows; None takes all.
        windows: Wanted ones that may not be recorded.
        checksums: Whether contents of rows are compared, or counts only unless other programs have
            written.
    """
    known = {*lake.windows(), *windows}
    files = lake.files
    if is_wanted is not None:
        known = set(filter(is_wanted, known))
        files = [one for one in files if _may_hold_any(one, known)]
    altered = lake.altered(files)
    readable = [one for one in files if one.path not in altered]
    foreign = lake.foreign_of(readable)
    # Counts do not show what other programs have updated.
    full = checksums or bool(foreign)
    found = compute_windows(lake.read_files(readable), lake.size, checksums=full)
    if is_wanted is not None:
        found = {one: figures for one, figures in found.items() if is_wanted(one)}
    differing = tuple(_differing(lake, known, found))
    # No window has these rows, so no figures would show them.
    nameless = lake.nameless_of(foreign)
    return Findings(files, altered, nameless, foreign, found, differing)


def _may_hold_any(file: DataFile, windows: Iterable[ExportWindow]) -> bool:
    return any(file.may_hold(one.start, one.end) for one in windows)


def _differing(
    lake: Lake,
    known: Iterable[ExportWindow],
    found: Mapping[ExportWindow, RowChecksums],
) -> list[ExportWindow]:
    """List windows with figures other than the recorded ones, in order."""
    windows = sorted({*known, *found})
    return [one for one in windows if not found.get(one, NOTHING).matches(lake.figures_of(one))]


def find_changes(lake: Lake, checked_bytes: float) -> Changes:
    """Compare the table with the record; rows are read only where the log shows a change.

    Args:
        lake: As it is loaded.
        checked_bytes: See `Lake.altered`.
    """
    altered = lake.altered(lake.files, checked_bytes)
    bad = [one for one in lake.files if one.path in altered]
    good = [one for one in lake.files if one.path not in altered]
    foreign = lake.foreign_of(good)
    nameless = lake.nameless_of(foreign)
    rewritten = _differing_of(lake, good, foreign)
    problem = "another program has written it, and not with the rows that were exported"
    doubtful = {one.path: problem for one in foreign if _may_hold_any(one, rewritten)} | nameless
    windows = {one.name for one in [*lake.windows_of(altered), *rewritten]}
    files = altered | doubtful
    if not _all_recorded(lake):
        # Other programs remove and restore files.
        found = compute_windows(lake.read_files(good), lake.size, checksums=False)
        others = {one.name for one in _differing(lake, lake.windows(), found)} - windows
        if others:
            more = f" and of {len(others) - 1} more windows" if len(others) > 1 else ""
            files[LOG] = f"the table has other rows of {min(others)}{more} than are recorded"
            windows |= others
    proven = [one for one in foreign if one.path not in doubtful]
    return Changes(files, frozenset(windows), lake.foreign_of(bad), proven)


def _differing_of(
    lake: Lake, files: Sequence[DataFile], foreign: Sequence[DataFile]
) -> list[ExportWindow]:
    """List differing windows among those of foreign files."""
    if not foreign:
        return []
    spans = [lake.span_of(one) for one in foreign]
    near = [one for one in files if any(span is None or one.may_hold(*span) for span in spans)]
    found = compute_windows(lake.read_files(near), lake.size, checksums=True)
    touched = {
        window: found.get(window, NOTHING)
        for window in {*lake.windows(), *found}
        if any(one.may_hold(window.start, window.end) for one in foreign)
    }
    return _differing(lake, (), touched)


def _all_recorded(lake: Lake) -> bool:
    """Compare the number of rows in the log with the recorded number."""
    recorded = sum(lake.figures_of(one).rows for one in lake.windows())
    return sum(one.rows for one in lake.files) == recorded
