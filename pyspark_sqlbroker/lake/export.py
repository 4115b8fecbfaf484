"""Export the archive to a Delta table, in whole windows verified against the database."""

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from logging import getLogger
from typing import Any, Literal

from pyspark.sql import SparkSession
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.checks import check_choice, validate_integer
from faststream_sqlbroker.core.loaded_windows import validate_lake
from faststream_sqlbroker.core.times import Duration, parse_non_negative
from faststream_sqlbroker.exceptions import ExportMismatchError, SetupError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.horizon import find_horizon
from pyspark_sqlbroker.lake.entries import Entry, LakeState
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.records import WindowRecords, open_records
from pyspark_sqlbroker.lake.row_checksums import NO_ROWS, RowChecksums, count_windows
from pyspark_sqlbroker.lake.transfer import (
    TransferJob,
    WindowBatch,
    count_missing_rows,
    transfer_batch,
)
from pyspark_sqlbroker.lake.verify import LakeChanges, find_changes
from pyspark_sqlbroker.lake.windows import (
    WINDOW_LENGTHS,
    ExportWindow,
    Span,
    cut_spans,
    floor_to_window,
    merge_spans,
    plan_spans,
    subtract_spans,
)
from pyspark_sqlbroker.load.selection import ARCHIVE, describe_source, find_oldest, select_rows
from pyspark_sqlbroker.moments import TimeInput
from pyspark_sqlbroker.session import require_driver
from pyspark_sqlbroker.store_errors import convert_store_errors, wrap_callback

logger = getLogger("faststream_sqlbroker.spark")

CHECKED_BYTES = 256 << 20
"""Bytes of the latest files whose SHA-256 each export compares; of other files only the sizes are
compared.
"""

ROWS_PER_COMMIT = 1_000_000
"""Minimum number of rows of a commit, if there are so many."""


@dataclass(frozen=True)
class ExportedWindow:
    """The result of a window.

    Attributes:
        name: Such as 2026-03-01 or 2026-03-01T05, UTC.
        action: "exported"; "again" (rows had come since the last export, and are now in the lake);
            "unchanged"; "left" (the database has fewer rows than the lake, which keeps them);
            "damaged" (a file of the window was altered, or another program has changed its rows, so
            it is left as it is).
        rows: Number of its rows in the lake.
        number: 1 for the first window of this run.
        total: Number of windows that this run checks.
    """

    name: str
    action: str
    rows: int
    number: int
    total: int


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        path: Root of the lake.
        windows: The windows that this run checked and that have rows, in order.
        horizon: Windows that end later are not closed yet; by the database's clock.
        watermark: End of the windows that are in the lake without a gap; None if there are none.
        damaged: By path, files that were altered since they were written, or that another program
            has written with other rows, with the difference; `repair_export` exports their windows
            again.
    """

    path: str
    windows: tuple[ExportedWindow, ...]
    horizon: datetime
    watermark: datetime | None
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of rows that were written."""
        return sum(window.rows for window in self.windows if window.action in ("exported", "again"))


@convert_store_errors(OSError)
def export_archive(
    spark: SparkSession,
    url: str | URL,
    path: str,
    *,
    window: Literal["day", "hour"] = "day",
    since: TimeInput | None = None,
    until: TimeInput | None = None,
    table: str = "message_archive",
    schema: str | None = None,
    queues: Iterable[str] | None = None,
    safety_lag: Duration = "5m",
    primary: str | URL | None = None,
    source: str | None = None,
    recheck: Duration = "24h",
    verify: Literal["checksums", "counts"] = "checksums",
    rows_per_commit: int = ROWS_PER_COMMIT,
    record_as: str | None = None,
    message_table: str = "message",
    on_window: Callable[[ExportedWindow], Any] | None = None,
    options: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> ExportResult:
    """Write the closed windows of the archive that the lake lacks; compare each with the database.

    The lake is a Delta table: the archive's columns, `date` and, for hours, `hour` (UTC). Spark
    writes Parquet files (zstd, sorted by window, queue and id; the times as microseconds in UTC) to
    a folder of the attempt. The files are read back, compared with the database's own counts and
    sums for each window, and only then committed, many windows at a time. A file next to the log,
    which the commit names, contains the checksums of all windows and the SHA-256 of each file. A
    process may die at any moment: a reader sees complete commits only, and a second run adds the
    missing rows, each once. Two exports may run at a time: if both plan the same windows, one
    commits and the other plans again.

    Windows of the last `recheck`, and windows between `since` and `until`, are compared with the
    database again. If it has rows that the lake lacks (a transaction was open for longer than
    `safety_lag`), they are added, with a warning. Rows that were since pruned or retried stay in
    the lake. Windows without rows cost nothing.

    Each run compares the sizes of all files with the log, the SHA-256 of the latest 256 MB, and the
    number of rows with the exports' records. Files that another program has written (Delta's
    OPTIMIZE) are read once, and count as the export's own if the checksums of their windows are
    equal. Windows whose files were altered, or whose rows another program has changed or removed,
    are not exported again and not recorded for retention; the result and a warning name the files.

    Args:
        spark: A session with the JDBC driver (`build_session`); not Spark Connect.
        url: SQLAlchemy URL of the database; its password is not written anywhere.
        path: Root of the lake, on any file system that Spark writes to. One path holds one archive,
            with the same window, table and queues each time.
        window: Length of a window, "day" or "hour".
        since: Start with the window that contains this time; None continues after the last export,
            or starts at the oldest row.
        until: Only windows that end at or before this time; None takes all closed windows.
        table: The archive table.
        schema: Its schema; MySQL and MariaDB: its database.
        queues: Only these queues; None takes all.
        safety_lag: Longest duration of a transaction where open transactions cannot be seen; see
            `find_horizon`.
        primary: URL of the primary, if `url` is a standby.
        source: A name for the database in the state, where it has several addresses (a standby, a
            fail-over); None takes host, port and name, or the path of SQLite's file.
            `prune_archive` needs the same name.
        recheck: Windows that ended within this time before the horizon are compared again.
        verify: "checksums" compares counts, sums of ids and times, bytes and checksums of payloads
            and of all other columns; "counts" omits the last three, so that the database need not
            read every row.
        rows_per_commit: A commit takes whole windows until it has so many rows; one Spark job reads
            them.
        record_as: A name for the lake. Each window in the lake is recorded in the database, for
            `Retention(unless_loaded_by=...)` with this name. Windows whose rows have changed since,
            or that have no record yet, are checked again, whatever `recheck` and `since` say. The
            records are written to `primary`, if given, and need SELECT, INSERT and UPDATE on the
            policy state. Not with `queues`.
        message_table: The live table, with `record_as`: the policy state is named after it.
        on_window: Called after each window; an error raised by it ends the export and is raised
            unchanged.
        options: More of Spark's JDBC options.
        storage_options: Settings of deltalake for an object store, by its names (such as
            `aws_endpoint_url`); else AWS_* variables apply. Deltalake does not see Spark's own
            settings. If the session has no hadoop-aws, these settings are also used for the files
            of `s3://` paths.

    Returns:
        The result; windows appear in order.

    Raises:
        SetupError: an option is invalid, the session lacks the driver, or the path holds something
            else, such as the export of another database; `record_as` is the name of another
            lake.
        ExportMismatchError: a window as written differed from the database twice in a row. The
            other windows are in the lake, unless it would be the lake's first. The next export
            tries a new window again, and the watermark stays before it. A window that was exported
            before is compared again only within `recheck`, or with `since`. The log names each
            such window.
        ConcurrentLoadError: other processes committed during each try.
        StoreError: PostgreSQL: a commit took longer than an hour, after which the server ends its
            snapshot. Or a window could not be recorded; it is in the lake. Or the table cannot be
            read or written.
        NotSupportedError: Spark Connect.
    """
    check_choice("window", window, tuple(WINDOW_LENGTHS))
    check_choice("verify", verify, ("checksums", "counts"))
    recheck_seconds = parse_non_negative("recheck", recheck)
    if validate_lake("record_as", record_as) is not None and queues is not None:
        raise SetupError(
            "record_as= does not allow queues=, because retention compares whole windows: omit "
            "queues="
        )
    validate_integer("rows_per_commit", rows_per_commit)
    selection = select_rows(ARCHIVE, table, schema, since=since, until=until, queues=queues)
    if selection.since is not None:
        selection = selection.between(floor_to_window(selection.since, window), selection.until)
    database = get_database(parse_address(url))
    require_driver(spark, database.jdbc_driver, database.kind)
    lake = Lake(spark, path, storage_options)
    job = TransferJob(lake, database, url, selection, verify == "checksums", options)
    with database.connect() as connection:
        horizon = find_horizon(database, connection, safety_lag=safety_lag, primary=primary)
        logger.info(
            "windows up to %s are closed: %s (%s)", horizon.time, horizon.source, horizon.detail
        )
        source_description = {
            **describe_source(database.address, selection, source),
            "window": window,
        }
        lake.retry_on_conflict(lambda: lake.prepare(source_description, secrets.token_hex(8)))
        lake.sweep()
        changes = _find_changes(lake)
        for name, issue in changes.files.items():
            logger.warning(
                "%s: %s; run sqlbroker archive repair to export its windows again",
                lake.folders.get_full_path(name),
                issue,
            )
        with (
            nullcontext()
            if record_as is None
            else open_records(record_as, lake.id, primary or url, message_table, schema)
        ) as records:
            run = ExportRun(job, connection, records, rows_per_commit, changes, on_window)
            lake.retry_on_conflict(
                lambda: run.export_spans(_plan_spans(run, window, horizon.time, recheck_seconds))
            )
    windows = tuple(run.done[name] for name in sorted(run.done))
    return ExportResult(
        lake.folders.root, windows, horizon.time, lake.state.watermark, changes.files
    )


def _find_changes(lake: Lake) -> LakeChanges:
    """Find files that others have altered, and accept rewritten files with unchanged rows.

    Called before each export, which must not add rows to windows whose files are damaged.

    The SHA-256 of an accepted file is committed to the state, so that later exports need not
    compare its rows again.
    """
    results = list[LakeChanges]()

    def compare() -> None:
        """Compare the loaded lake, and commit the SHA-256 of accepted files."""
        results.append(find_changes(lake, CHECKED_BYTES))
        if results[-1].verified:
            lake.commit(LakeState(), compared=results[-1].verified)

    lake.retry_on_conflict(compare)
    return results[-1]


class ExportRun:
    """The work of a call of `export_archive`, continued after a conflict.

    Attributes:
        job: Source and target of the export.
        connection: A connection to the database.
        records: The lake's records in the database; None if no records are written.
        done: Results by name of window.
    """

    def __init__(
        self,
        job: TransferJob,
        connection: Connection,
        records: WindowRecords | None,
        rows_per_commit: int,
        changes: LakeChanges,
        on_window: Callable[[ExportedWindow], Any] | None,
    ) -> None:
        """Prepare the run, and stop retention from removing rows of damaged windows.

        Args:
            job: Source and target of the export.
            connection: A connection to the database.
            records: The lake's records in the database; None if no records are written.
            rows_per_commit: Rows after which a batch is committed; it may end earlier.
            changes: Files and windows that differ from the exports' commits.
            on_window: The user's callback; None calls nothing.
        """
        self.job = job
        self.connection = connection
        self.records = records
        self.done: dict[str, ExportedWindow] = {}
        self._rows_per_commit = rows_per_commit
        self._changes = changes
        self._notify = wrap_callback(on_window)
        self._total = 0
        self._failure: ExportMismatchError | None = None
        if records is not None:
            records.hold(changes.windows)

    def is_intact(self, window: ExportWindow) -> bool:
        """Return True if the lake has rows of a window, and all their files are unaltered.

        Only such windows are recorded for retention.
        """
        entry = self.job.lake.get_entry(window)
        return (
            entry is not None and bool(entry.lake.rows) and window.name not in self._changes.windows
        )

    def export_spans(self, spans: Sequence[Span]) -> None:
        """Export the rows of some spans that the lake lacks.

        A span is a stretch of whole windows. New windows are exported in batches; recorded windows
        are compared with the database. A window whose rows may be in an altered file, but that has
        no record, is skipped as damaged: exporting it could add its rows twice. After a conflict
        this is called again, and finds the windows that are exported already recorded.

        Raises:
            ConcurrentLoadError: another process has committed since the lake was loaded.
            ExportMismatchError: a window differed twice; raised after the other windows.
        """
        job = self.job
        self._failure = None
        # A process that died, or another program, may have left files that are not on the disk yet.
        job.lake.table.sync()
        counts = count_windows(job.database, self.connection, job.selection, spans, job.lake.size)
        recorded = [window for window in self.job.lake.list_windows() if _is_within(window, spans)]
        windows = sorted({*counts, *recorded})
        self._total = len({*self.done, *(window.name for window in windows)})
        skipped = [window for window in windows if self._may_have_unrecorded_rows(window)]
        for window in skipped:
            self._record(window, "damaged", Entry(NO_ROWS, NO_ROWS))
        skipped_spans = merge_spans((window.start, window.end) for window in skipped)
        # A batch is read as one span, so it must not contain windows between two spans.
        for span in spans:
            for part in subtract_spans(span, skipped_spans):
                self._export_part(
                    part, [window for window in windows if _is_within(window, [part])], counts
                )
        if self._failure is not None:
            raise self._failure

    def _may_have_unrecorded_rows(self, window: ExportWindow) -> bool:
        """Return True if the lake may have rows of a window without a record.

        Records may be lost with the file of the lake's state. Exporting such a window would add
        rows twice.
        """
        return self.job.lake.get_entry(window) is None and self._changes.may_affect(window)

    def _export_part(
        self,
        span: Span,
        windows: Sequence[ExportWindow],
        counts: Mapping[ExportWindow, RowChecksums],
    ) -> None:
        """Export the new windows of a span in batches, and recheck the recorded windows.

        The windows are visited in order. A batch ends before a recorded window, because it is read
        as one range of time, or once it has `rows_per_commit` rows. `counts` are the database's
        rows of each window.
        """
        pending = dict[ExportWindow, int]()
        exported_until = span[0]
        for window in windows:
            is_recorded = self.job.lake.get_entry(window) is not None
            if not is_recorded:
                pending[window] = counts[window].rows
            # No recorded window may lie within a batch either.
            if pending and (is_recorded or sum(pending.values()) >= self._rows_per_commit):
                end = max(pending).end
                self._export_windows(pending, cut_spans([span], exported_until, end))
                exported_until = end
                pending = {}
            if is_recorded:
                self._recheck(window, counts.get(window, NO_ROWS))
        self._export_windows(pending, cut_spans([span], exported_until, None))

    def _export_windows(self, windows: Mapping[ExportWindow, int], covered: Sequence[Span]) -> None:
        """Export windows of which the lake has no row, and mark `covered` as exported.

        A covered window is one that was exported, even without rows. If such a window has rows now,
        they came late. Without windows, only the covered spans are committed.
        """
        lake = self.job.lake
        if not windows:
            if any(subtract_spans(span, lake.state.covered) for span in covered):
                lake.commit(LakeState(covered=tuple(covered)))
            return
        late_windows = {window for window in windows if lake.is_covered(window)}
        for window in sorted(late_windows):
            _log_late_rows(window, windows[window])
        self._transfer(WindowBatch(windows, False, tuple(covered)), late_windows)

    def _transfer(self, batch: WindowBatch, late_windows: Collection[ExportWindow]) -> None:
        """Copy a batch into the lake; remember the first window that differs from the database.

        The other windows are exported, and the error is raised at the end. It is raised at once if
        the lake has no earlier window: later exports begin after its first window, and would pass
        over this one.
        """
        for window, result in transfer_batch(self.job, self.connection, batch):
            if isinstance(result, Entry):
                self._record(window, "again" if window in late_windows else "exported", result)
            elif any(start <= window.start for start, _ in self.job.lake.state.covered):
                # An export compares a window of an earlier export only within `recheck`.
                hint = f". Then {window.repair_hint}" if self.job.lake.is_covered(window) else ""
                logger.warning("%s%s. First the export goes on with other windows", result, hint)
                self._failure = self._failure or result
            else:
                raise result

    def _recheck(self, window: ExportWindow, counts: RowChecksums) -> None:
        """Compare a recorded window with the database's counts, and add rows that came late.

        Rows come late if their transaction was still open when the window was exported. Equal
        counts need no read. Otherwise the rows are compared: the database may also have fewer rows,
        after a prune or a retried dead letter, and the lake keeps them.
        """
        lake = self.job.lake
        entry = lake.get_entry(window)
        if entry is None:
            return
        if window.name in self._changes.windows:
            self._record(window, "damaged", entry)
            return
        if counts == entry.source:
            self._record(window, "unchanged", entry)
            return
        late_rows = count_missing_rows(self.job, self.connection, window) if counts.rows else 0
        if not late_rows:
            self._record(window, "left", Entry(entry.lake, counts))
            return
        _log_late_rows(window, late_rows)
        self._transfer(WindowBatch({window: counts.rows}, True), (window,))

    def _record(self, window: ExportWindow, action: str, entry: Entry) -> None:
        """Report the result of a window, and record an intact window for retention.

        After a conflict the windows are visited again; a window that this run has exported keeps
        that result.
        """
        if self.records is not None and self.is_intact(window):
            self.records.write(window, entry.source)
        previous = self.done.get(window.name)
        if previous is not None and action in ("unchanged", "left"):
            return  # this run has exported the window before a conflict
        number = len(self.done) + (previous is None)
        result = ExportedWindow(
            window.name, action, entry.lake.rows, number, max(self._total, number)
        )
        self.done[window.name] = result
        self._notify(result)


def _plan_spans(run: ExportRun, window: str, horizon: datetime, recheck: float) -> list[Span]:
    """Return the spans to check, for the current state of the lake.

    These are windows that the lake lacks, and exported windows of the last `recheck` seconds or
    from `since` on, which late rows may have joined. Windows without a record for retention are
    added, however old.
    """
    lake = run.job.lake
    selection = run.job.selection
    oldest = find_oldest(run.job.database, run.connection, selection)
    spans = plan_spans(lake.state.covered, window, selection, oldest, horizon, recheck)
    if run.records is not None:
        intact_windows = [window for window in lake.list_windows() if run.is_intact(window)]
        spans += [
            (window.start, window.end) for window in run.records.find_unrecorded(intact_windows)
        ]
    return merge_spans(spans)


def _is_within(window: ExportWindow, spans: Sequence[Span]) -> bool:
    """Return True if a span contains the whole window."""
    return any(start <= window.start and window.end <= end for start, end in spans)


def _log_late_rows(window: ExportWindow, rows: int) -> None:
    """Warn that rows were archived in an exported window."""
    logger.warning(
        "window %s: %s rows were archived after its export, so it is exported again: a "
        "transaction was open for longer than safety_lag",
        window.name,
        rows,
    )
