"""Export the archive to a Delta table: whole windows, each compared with the database before it
counts.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from logging import getLogger
from typing import Any, Literal

from pyspark.sql import SparkSession
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.checks import one_of, whole_number
from faststream_sqlbroker.core.loaded_windows import checked_lake
from faststream_sqlbroker.core.times import Duration, seconds_or_zero
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import database_of
from pyspark_sqlbroker.horizon import find_horizon
from pyspark_sqlbroker.lake.entries import Entry, State
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.records import Records, open_records
from pyspark_sqlbroker.lake.row_checksums import NOTHING, RowChecksums, count_windows
from pyspark_sqlbroker.lake.transfer import Batch, Job, lacking, transfer
from pyspark_sqlbroker.lake.verify import Changes, find_changes
from pyspark_sqlbroker.lake.windows import (
    LENGTHS,
    ExportWindow,
    Span,
    cut_spans,
    floor,
    merge_spans,
    plan_spans,
    without_spans,
)
from pyspark_sqlbroker.load.selection import ARCHIVE, describe_source, find_oldest, select_rows
from pyspark_sqlbroker.moments import Moment
from pyspark_sqlbroker.session import need_driver
from pyspark_sqlbroker.store_errors import keep_errors, store_errors

logger = getLogger("faststream_sqlbroker.spark")

CHECKED_BYTES = 256 << 20
"""Bytes of the latest files whose SHA-256 each export compares; the others' sizes only."""

ROWS_PER_COMMIT = 1_000_000
"""Rows that one commit takes at least, if there are so many."""


@dataclass(frozen=True)
class ExportedWindow:
    """The result of one window.

    Attributes:
        name: Such as 2026-03-01 or 2026-03-01T05, UTC.
        action: "exported"; "again" (rows had come since, and are in it now); "unchanged"; "left"
            (the database has fewer rows than the lake, which keeps them); "damaged" (a file of it
            was altered, or another program has changed its rows, so it is left as it is).
        rows: In the lake.
        number: 1 for the first window of this run.
        total: How many windows this run looks at.
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
        path: Where to.
        windows: Those that this run looked at and that have rows, in order.
        horizon: Windows that end later are not closed yet; by the database's clock.
        watermark: End of the windows that are in the lake without a gap; None if there are none.
        damaged: Files that were altered since they were written, or that another program has
            written with other rows, with what differs; `repair_export` exports their windows again.
    """

    path: str
    windows: tuple[ExportedWindow, ...]
    horizon: datetime
    watermark: datetime | None
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many rows were written."""
        return sum(one.rows for one in self.windows if one.action in ("exported", "again"))


@store_errors(OSError)
def export_archive(
    spark: SparkSession,
    url: str | URL,
    path: str,
    *,
    window: Literal["day", "hour"] = "day",
    since: Moment | None = None,
    until: Moment | None = None,
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
    a folder of the attempt, they are read back, compared with what the database itself counts and
    sums for each window, and only then committed, many windows at a time. A file next to the log,
    which the commit names, has the figures of all windows and the SHA-256 of each file. A process
    may die at any moment: a reader sees whole commits only, and a second run brings what is
    missing, each row once. Two exports may run at a time: of two that plan the same windows one
    commits, and the other plans again.

    Windows of the last `recheck`, and those between `since` and `until`, are compared with the
    database again: if it has rows that the lake lacks (a transaction that was open for longer than
    `safety_lag`) they are added, with a warning. Rows that the database has lost since, because
    they were pruned or retried, stay in the lake. Windows without rows cost nothing.

    Each run compares the sizes of all files with the log, the SHA-256 of the latest 256 MB, and the
    number of rows with what exports have recorded. Files that another program has written (Delta's
    OPTIMIZE) are read once, and count as the export's own if the figures of their windows are the
    same. Windows of files that were altered, or of which another program has changed or removed
    rows, are not exported again and not recorded for retention; the result and a warning name the
    files.

    Args:
        spark: A session with the JDBC driver (`build_session`); not Spark Connect.
        url: SQLAlchemy URL of the database; its password is written nowhere.
        path: Of the lake, on any file system that Spark writes to. One path holds one archive, with
            the same window, table and queues each time.
        window: The length of a window, "day" or "hour".
        since: From the window that this moment lies in; None goes on where the last export ended,
            or begins with the oldest row.
        until: Only windows that have ended by this moment; None takes all that are closed.
        table: The archive table.
        schema: Its schema; MySQL and MariaDB: its database.
        queues: Only these queues; None takes all.
        safety_lag: How long a transaction may last where open ones cannot be seen; see
            `find_horizon`.
        primary: URL of the primary, if `url` is a standby.
        source: A name for the database in the state, where it has several addresses (a standby, a
            fail-over); None takes host, port and name, or the path of SQLite's file.
            `prune_archive` needs the same.
        recheck: Windows that ended within this time before the horizon are compared again.
        verify: "checksums" compares counts, sums of ids and times, bytes and checksums of payloads
            and of all other columns; "counts" leaves the last three out, and spares the database
            reading every row.
        rows_per_commit: A commit takes whole windows until it has so many rows; those are read by
            one Spark job.
        record_as: A name for the lake. Each window that is in it is recorded in the database, for
            `Retention(unless_loaded_by=...)` of this name. Windows whose rows have changed since,
            or that have no record yet, are looked at again, whatever `recheck` and `since` say. It
            writes to `primary`, if that is given, and needs SELECT, INSERT and UPDATE on the
            policy state. Not with `queues`.
        message_table: The live table, with `record_as`: the policy state is named after it.
        on_window: Called after each window; an error that it raises ends the export, unchanged.
        options: More of Spark's JDBC options.
        storage_options: What deltalake needs to reach an object store, by its names (such as
            `aws_endpoint_url`), else AWS_* variables; Spark's own settings do not reach it. Where
            the session has no hadoop-aws, they are also for the files of `s3://` paths.

    Returns:
        What was done; windows appear in order.

    Raises:
        SetupError: an option is invalid, the session lacks the driver, or the path holds something
            else, such as the export of another database; `record_as` is the name of another
            lake.
        ExportMismatchError: twice in a row a window was not written as the database has it. The
            windows before it are in the lake, and the watermark stays before it.
        ConcurrentLoadError: other processes have committed each time that this one wanted to.
        StoreError: PostgreSQL: a commit took longer than an hour, after which the server ends its
            snapshot. Or a window could not be recorded; it is in the lake. Or the table cannot be
            read or written.
        NotSupportedError: Spark Connect.
    """
    one_of("window", window, tuple(LENGTHS))
    one_of("verify", verify, ("checksums", "counts"))
    back = seconds_or_zero("recheck", recheck)
    if checked_lake("record_as", record_as) is not None and queues is not None:
        raise SetupError(
            "record_as= needs an export of all queues, as retention compares whole windows: leave "
            "queues= out"
        )
    whole_number("rows_per_commit", rows_per_commit)
    selection = select_rows(ARCHIVE, table, schema, since=since, until=until, queues=queues)
    if selection.since is not None:
        selection = selection.between(floor(selection.since, window), selection.until)
    database = database_of(parse_address(url))
    need_driver(spark, database.jdbc_driver, database.kind)
    lake = Lake(spark, path, storage_options)
    job = Job(lake, database, url, selection, verify == "checksums", options)
    with database.connect() as connection:
        horizon = find_horizon(database, connection, safety_lag=safety_lag, primary=primary)
        logger.info(
            "windows up to %s are closed: %s (%s)", horizon.moment, horizon.source, horizon.detail
        )
        described = {**describe_source(database.address, selection, source), "window": window}
        lake.plan_again(lambda: lake.begin(described, secrets.token_hex(8)))
        lake.sweep()
        changes = _find_changes(lake)
        for name, problem in changes.files.items():
            logger.warning(
                "%s: %s; sqlbroker archive repair exports its windows again",
                lake.folders.path(name),
                problem,
            )
        with _records(lake, record_as, primary or url, message_table, schema) as records:
            run = Run(job, connection, records, rows_per_commit, changes, on_window)
            lake.plan_again(lambda: run.bring(_spans(run, window, horizon.moment, back)))
    done = tuple(run.done[name] for name in sorted(run.done))
    return ExportResult(
        lake.folders.root, done, horizon.moment, lake.state.watermark, changes.files
    )


def _find_changes(lake: Lake) -> Changes:
    """Look for changes of others, and take over their files with unchanged rows."""
    found = list[Changes]()

    def compare() -> None:
        found.append(find_changes(lake, CHECKED_BYTES))
        if found[-1].proven:
            lake.commit(State(), compared=found[-1].proven)

    lake.plan_again(compare)
    return found[-1]


def _records(
    lake: Lake, name: str | None, url: str | URL, message_table: str, schema: str | None
) -> AbstractContextManager[Records | None]:
    if name is None:
        return nullcontext()
    return open_records(name, lake.id, url, message_table, schema)


class Run:
    """The work of one call of `export_archive`; goes on where it was if it plans again.

    Attributes:
        job: Where from and where to.
        connection: To the database.
        records: Of the lake in the database; None if none are kept.
        done: What was done, by window.
    """

    def __init__(
        self,
        job: Job,
        connection: Connection,
        records: Records | None,
        rows_per_commit: int,
        changes: Changes,
        tell: Callable[[ExportedWindow], Any] | None,
    ) -> None:
        self.job = job
        self.connection = connection
        self.records = records
        self.done: dict[str, ExportedWindow] = {}
        self._rows_per_commit = rows_per_commit
        self._changes = changes
        self._tell = keep_errors(tell)
        self._total = 0
        if records is not None:
            records.hold(changes.windows)

    def is_whole(self, window: ExportWindow) -> bool:
        """Whether the lake has rows of a window, and none of its files was altered."""
        entry = self.job.lake.entry(window)
        return (
            entry is not None and bool(entry.lake.rows) and window.name not in self._changes.windows
        )

    def bring(self, spans: Sequence[Span]) -> None:
        """Export what the lake lacks of some spans.

        Raises:
            ConcurrentLoadError: another process has committed since the lake was loaded.
        """
        job = self.job
        # A process that died, or another program, may have left what is not on the disk yet.
        job.lake.table.sync()
        counts = count_windows(job.database, self.connection, job.selection, spans, job.lake.size)
        recorded = [one for one in self.job.lake.windows() if _inside(one, spans)]
        windows = sorted({*counts, *recorded})
        self._total = len({*self.done, *(one.name for one in windows)})
        strange = [one for one in windows if self._is_strange(one)]
        for one in strange:
            self._note(one, "damaged", Entry(NOTHING, NOTHING))
        taken = merge_spans((one.start, one.end) for one in strange)
        # A batch is read as one span, so what lies between two spans must not be within it.
        for span in spans:
            for part in without_spans(span, taken):
                self._bring_part(part, [one for one in windows if _inside(one, [part])], counts)

    def _is_strange(self, window: ExportWindow) -> bool:
        """Whether a window without a record may have rows in the lake: its record may be lost."""
        return self.job.lake.entry(window) is None and self._changes.concern(window)

    def _bring_part(
        self,
        span: Span,
        windows: Sequence[ExportWindow],
        counts: Mapping[ExportWindow, RowChecksums],
    ) -> None:
        waiting = list[ExportWindow]()
        rows = 0
        reached = span[0]
        for window in windows:
            known = self.job.lake.entry(window) is not None
            if not known:
                waiting.append(window)
                rows += counts[window].rows
            # No known window may lie within a batch either.
            if waiting and (known or rows >= self._rows_per_commit):
                end = waiting[-1].end
                self._bring(waiting, rows, cut_spans([span], reached, end))
                reached = end
                waiting = []
                rows = 0
            if known:
                self._look_again(window, counts.get(window, NOTHING))
        self._bring(waiting, rows, cut_spans([span], reached, None))

    def _bring(self, windows: list[ExportWindow], rows: int, covered: Sequence[Span]) -> None:
        """Bring windows of which the lake has no row; the commit covers these spans."""
        lake = self.job.lake
        if not windows:
            if any(without_spans(one, lake.state.covered) for one in covered):
                lake.commit(State(covered=tuple(covered)))
            return
        late = {one for one in windows if lake.covers(one)}
        for one in sorted(late):
            _warn_late(one, rows if len(windows) == 1 else None)
        batch = Batch(tuple(windows), rows, False, tuple(covered))
        entries = transfer(self.job, self.connection, batch)
        for one in sorted(entries):
            self._note(one, "again" if one in late else "exported", entries[one])

    def _look_again(self, window: ExportWindow, counts: RowChecksums) -> None:
        """A window that the lake has: bring the rows that came late."""
        lake = self.job.lake
        entry = lake.entry(window)
        if entry is None:
            return
        if window.name in self._changes.windows:
            self._note(window, "damaged", entry)
            return
        if counts == entry.source:
            self._note(window, "unchanged", entry)
            return
        late = lacking(self.job, self.connection, window) if counts.rows else 0
        if not late:
            self._note(window, "left", Entry(entry.lake, counts))
            return
        _warn_late(window, late)
        batch = Batch((window,), counts.rows, True)
        self._note(window, "again", transfer(self.job, self.connection, batch)[window])

    def _note(self, window: ExportWindow, action: str, entry: Entry) -> None:
        if self.records is not None and self.is_whole(window):
            self.records.write(window, entry.source)
        known = self.done.get(window.name)
        if known is not None and action in ("unchanged", "left"):
            return  # this run has exported it before it planned again
        number = len(self.done) + (known is None)
        found = ExportedWindow(
            window.name, action, entry.lake.rows, number, max(self._total, number)
        )
        self.done[window.name] = found
        self._tell(found)


def _spans(run: Run, window: str, horizon: datetime, recheck: float) -> list[Span]:
    """Which spans to look at, as the lake is now."""
    lake = run.job.lake
    selection = run.job.selection
    oldest = find_oldest(run.job.database, run.connection, selection)
    spans = plan_spans(lake.state.covered, window, selection, oldest, horizon, recheck)
    if run.records is not None:
        with_rows = [one for one in lake.windows() if run.is_whole(one)]
        spans += [(one.start, one.end) for one in run.records.lacking(with_rows)]
    return merge_spans(spans)


def _inside(window: ExportWindow, spans: Sequence[Span]) -> bool:
    return any(start <= window.start and window.end <= end for start, end in spans)


def _warn_late(window: ExportWindow, rows: int | None) -> None:
    logger.warning(
        "window %s: %s rows came after it was exported; it is exported again. A transaction was "
        "open for longer than safety_lag",
        window.name,
        "some" if rows is None else rows,
    )
