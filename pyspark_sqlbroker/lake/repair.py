"""Export damaged windows of a lake again, as long as the database has their rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pyspark.sql import SparkSession
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.times import to_microseconds
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.lake.delta import DataFile
from pyspark_sqlbroker.lake.entries import Entry, LakeState
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.row_checksums import (
    NO_ROWS,
    RowChecksums,
    build_window_start,
    compute_window_checksums,
    count_windows,
)
from pyspark_sqlbroker.lake.transfer import TransferJob, select_missing, share_snapshot
from pyspark_sqlbroker.lake.verify import LakeExamination, examine_lake
from pyspark_sqlbroker.lake.windows import ExportWindow, Span
from pyspark_sqlbroker.store_errors import convert_store_errors

_ChecksumsByWindow = Mapping[ExportWindow, RowChecksums]


@dataclass(frozen=True)
class RepairResult:
    """The result of a repair.

    Attributes:
        path: Root of the lake.
        windows: Number of rows of each repaired window, by name.
        unrepaired: Windows that stay damaged, with the reason, by name.
        files: Files that were taken out of the table: damaged files, and files of other programs.
    """

    path: str
    windows: Mapping[str, int] = field(default_factory=dict)
    unrepaired: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()


@convert_store_errors(OSError)
def repair_export(
    spark: SparkSession,
    url: str | URL,
    path: str,
    *,
    source: str | None = None,
    options: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> RepairResult:
    """Export windows of damaged files again, as long as the database has their rows.

    A window is repaired only if its rows in the database and in the intact files have exactly the
    checksums that its export has recorded. One commit takes damaged files out of the table and adds
    the rows again; a damaged file stays in the table while one of its windows cannot be repaired.
    The repair never drops a row from the lake's records: a window that is no longer in the database
    stays damaged, and `verify_export` names its missing rows.

    Files of other programs count as damaged if a window in them differs from the export.

    Args:
        spark: A session with the JDBC driver; not Spark Connect.
        url: SQLAlchemy URL of the database.
        path: Root of the lake.
        source: The name that the export was given for the database, see `export_archive`.
        options: More of Spark's JDBC options.
        storage_options: See `export_archive`.

    Raises:
        SetupError: nothing was exported to this path, or the export is of another database.
        ConcurrentLoadError: other processes committed during each try.
        NotSupportedError: Spark Connect.
    """
    lake = Lake(spark, path, storage_options)
    database = get_database(parse_address(url))
    selection = lake.select(database, source)
    repair = _RepairRun(
        TransferJob(lake, database, url, selection, checksums=True, options=options)
    )

    def repair_all() -> None:
        """Repair what is damaged in the lake as it is loaded now."""
        with database.connect() as connection:
            repair.run(connection)

    lake.retry_on_conflict(repair_all)
    return RepairResult(
        lake.folders.root,
        dict(sorted(repair.windows.items())),
        repair.unrepaired,
        tuple(repair.files),
    )


class _RepairRun:
    """The work of a call of `repair_export`, continued after a conflict.

    Attributes:
        windows: Number of rows of each repaired window, by name.
        unrepaired: Reasons why other windows stay damaged, by name.
        files: Files that were taken out of the table.
    """

    def __init__(self, job: TransferJob) -> None:
        """Prepare the repair; the results are kept here if a conflict makes it start again."""
        self.windows: dict[str, int] = {}
        self.unrepaired: dict[str, str] = {}
        self.files: list[str] = []
        self._job = job
        self._lake = job.lake

    def run(self, connection: Connection) -> None:
        """Examine the lake, and repair each damaged span by a separate commit.

        A span has all windows that share damaged files, which only one commit can replace. Called
        again after a commit of another process; spans that are repaired by then are intact.
        """
        findings = examine_lake(self._lake)
        suspects = findings.list_suspect_files()
        self.unrepaired = {}
        for span in _find_damaged_spans(self._lake, findings, suspects):
            self._repair_span(connection, _DamagedSpan(self._lake, findings, suspects, span))

    def _repair_span(self, connection: Connection, damaged: "_DamagedSpan") -> None:
        """Replace the suspect files of a span by rows of the database.

        A suspect file is altered, missing, or of another program with other rows. The rows of the
        intact files and the staged rows together must have the recorded checksums. Otherwise
        nothing is committed, and the windows stay damaged with a reason.
        """
        lake = self._lake
        counts, staged, staged_checksums = self._export(connection, damaged)
        checksums = {
            window: damaged.get_checksums(window) + staged_checksums.get(window, NO_ROWS)
            for window in damaged.expected
        }
        if issues := damaged.find_issues(checksums):
            lake.discard(staged)
            self.unrepaired |= issues
            return
        entries = {
            window.name: Entry(checksums[window], counts.get(window, NO_ROWS).counts)
            for window in damaged.incomplete
        }
        same_rows = damaged.has_same_rows(checksums)
        covered = tuple((window.start, window.end) for window in damaged.incomplete)
        lake.commit(LakeState(entries, covered), staged, damaged.removed_files, same_rows=same_rows)
        self.windows |= {window.name: checksums[window].rows for window in damaged.differing}
        self.files += [file.path for file in damaged.removed_files]

    def _export(
        self, connection: Connection, damaged: "_DamagedSpan"
    ) -> tuple[_ChecksumsByWindow, list[DataFile], _ChecksumsByWindow]:
        """Stage the database's rows of the windows that are incomplete in the intact files.

        Only rows that the intact files lack are staged, that is, written without a commit.

        Returns:
            The database's counts, the staged files, and the checksums of their rows.
        """
        job = self._job
        lake = job.lake
        starts = [to_microseconds(window.start) for window in damaged.incomplete]
        selection = job.selection.between(*damaged.span)
        with share_snapshot(job, connection) as (read_connection, snapshot):
            # Race: count before the rows are read. A row that comes in between is late then, and
            # not lost.
            counts = count_windows(
                job.database, read_connection, job.selection, [damaged.span], lake.size
            )
            database_rows = job.scan(read_connection, selection, snapshot)
            rows = select_missing(database_rows, damaged.intact_rows).where(
                build_window_start(lake.size).isin(starts)
            )
            return counts, *lake.stage(rows)


class _DamagedSpan:
    """A span of time whose windows are repaired together.

    Attributes:
        span: [start, end) of `archived_at`; no suspect file reaches beyond it.
        removed_files: Its suspect files, which the repair removes.
        intact_rows: The rows of the other files.
        expected: The expected checksums of its windows: the recorded ones, else those of all
            readable files.
        incomplete: Windows that are incomplete in the other files, or that have no record, in
            order.
        differing: The windows of `incomplete`, and windows with rows too many.
    """

    def __init__(
        self, lake: Lake, findings: LakeExamination, suspects: Iterable[DataFile], span: Span
    ) -> None:
        """Compare the span's windows in the intact files with the records.

        Windows that the intact files do not have completely must come from the database. A window
        without a record, such as after the loss of the lake's state, is expected to have the rows
        that all readable files have.
        """
        self.span = span
        self.removed_files = [file for file in suspects if file.may_hold(*span)]
        self.intact_rows = lake.read(*span, excluded=self.removed_files)
        self.expected: _ChecksumsByWindow = {
            window: findings.checksums[window]
            if lake.get_entry(window) is None
            else lake.get_checksums(window)
            for window in sorted({*lake.list_windows(), *findings.checksums})
            if span[0] <= window.start < span[1]
        }
        self._lake = lake
        self._findings = findings
        self._checksums = compute_window_checksums(self.intact_rows, lake.size, checksums=True)
        self.incomplete = [
            window
            for window in self.expected
            if lake.get_entry(window) is None or not self._is_complete(window)
        ]
        differing = {*self.incomplete, *findings.differing}
        self.differing = [window for window in self.expected if window in differing]

    def get_checksums(self, window: ExportWindow) -> RowChecksums:
        """Return the checksums of a window in the intact files."""
        return self._checksums.get(window, NO_ROWS)

    def _is_complete(self, window: ExportWindow) -> bool:
        """Return True if the intact files have all exported rows of a window."""
        return self.get_checksums(window).matches(self.expected[window])

    def find_issues(self, checksums: _ChecksumsByWindow) -> dict[str, str]:
        """Return the reasons why windows would stay damaged with the given checksums, by name.

        An empty result allows the commit. One window that cannot be restored blocks all windows of
        the span, because they share files.
        """
        mismatches = {
            window.name: f"the record says {self.expected[window]}; the database and the "
            f"intact files have {checksums[window]}"
            for window in self.incomplete
            if not self._is_complete(window)
            and not checksums[window].matches(self.expected[window])
        }
        reason = "it shares a file with a window that cannot be repaired"
        if unknown := self._count_unknown():
            reason = f"{unknown} rows of its files may belong to windows without a record"
        elif not mismatches:
            return {}
        windows = self.differing or [ExportWindow(self.span[0], self._lake.size)]
        return {window.name: mismatches.get(window.name, reason) for window in windows}

    def _count_unknown(self) -> int:
        """Count rows of altered files that may belong to windows without a record.

        Taking such files out of the table would lose these rows unnoticed. A file whose SHA-256 is
        recorded was written by an export, which recorded its windows. For another file only the
        number of rows is known: it may have had more rows than the recorded windows lack.
        """
        altered = [file for file in self.removed_files if file.path in self._findings.altered]
        missing = (
            self._lake.get_checksums(window).rows
            - self._findings.checksums.get(window, NO_ROWS).rows
            for window in self.expected
        )
        excess = sum(file.rows for file in altered) - sum(max(0, rows) for rows in missing)
        limit = sum(file.rows for file in self._lake.find_foreign_files(altered))
        return min(limit, max(0, excess))

    def has_same_rows(self, checksums: _ChecksumsByWindow) -> bool:
        """Return True if the commit only restores rows, so that streams may skip the commit.

        Rows that another program has added or changed are not restored but removed.
        """
        is_altered = all(file.path in self._findings.altered for file in self.removed_files)
        return is_altered and all(
            checksums[window].matches(self.expected[window]) for window in self.incomplete
        )


def _find_damaged_spans(
    lake: Lake, findings: LakeExamination, suspects: Iterable[DataFile]
) -> list[Span]:
    """Return the spans to repair, merged until no suspect file reaches into two spans.

    A suspect file is damaged, or of another program with other rows; a commit replaces it as a
    whole, and so needs all its windows. A file without times in the log may have rows of any
    window, so its span is that of all windows.
    """
    windows = sorted({*lake.list_windows(), *findings.checksums})
    parts = [(window.start, window.end) for window in findings.differing]
    for file in suspects:
        if (span := lake.get_file_span(file)) is not None:
            parts.append(span)
        elif windows:
            parts.append((windows[0].start, windows[-1].end))
    spans = list[Span]()
    for start, end in sorted(parts):
        if spans and start < spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans
