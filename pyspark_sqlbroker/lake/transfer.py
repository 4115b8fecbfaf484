"""Bring windows from the database into a lake: read many at once, stage, compare, commit."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger

from pyspark.sql import DataFrame
from sqlalchemy import URL, Connection

from faststream_sqlbroker.exceptions import ExportMismatchError
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.databases.base import MOST_PARTITIONS, PARTITION_BYTES, SMALL
from pyspark_sqlbroker.lake.entries import Entry, State
from pyspark_sqlbroker.lake.files import undo_on_error
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.row_checksums import NOTHING, RowChecksums, ask_windows, compute_windows
from pyspark_sqlbroker.lake.windows import ExportWindow, Span
from pyspark_sqlbroker.load.read import Snapshot, open_snapshot, scan
from pyspark_sqlbroker.load.selection import Selection

TYPICAL_ROW = 500
"""Bytes of a row while the database has no statistics."""

IDENTITY = ["id", "archived_at"]
"""What identifies a row of the archive: a retried dead letter is archived again, later."""

_ADVICE = (
    "Rows of closed windows are being changed: see who writes to the archive, then export again"
)

logger = getLogger("faststream_sqlbroker.spark")


@dataclass(frozen=True)
class Job:
    """Where windows come from, and where they go.

    Attributes:
        lake: To.
        database: From.
        url: Of the database, for snapshots.
        selection: Table and queues.
        checksums: Whether contents are compared, or counts only.
        options: Of JDBC.
    """

    lake: Lake
    database: ArchiveDatabase
    url: str | URL
    selection: Selection
    checksums: bool
    options: Mapping[str, str] | None


@dataclass(frozen=True)
class Batch:
    """Windows of one commit, in order.

    Attributes:
        windows: With rows in the database; there is one at least.
        rows: How many the database has.
        known: Whether the lake has rows of it; it is then one window.
        covered: The spans that are in the lake with this commit.
    """

    windows: tuple[ExportWindow, ...]
    rows: int
    known: bool
    covered: tuple[Span, ...] = ()


def lacking(job: Job, connection: Connection, window: ExportWindow) -> int:
    """How many rows of the database the lake lacks in a window."""
    selection = job.selection.between(window.start, window.end)
    there = scan(job.lake.session, job.database, connection, selection, "auto", None, job.options)
    return only(there, job.lake.read(window.start, window.end)).count()


def transfer(job: Job, connection: Connection, batch: Batch) -> dict[ExportWindow, Entry]:
    """Bring a batch into the lake by one commit.

    If it is not as the database has it, it is tried once more, window by window.

    Returns:
        For each window of the batch its record.

    Raises:
        ExportMismatchError: what was written is not what the database has, twice.
        ConcurrentLoadError: another process has committed since the batch was planned.
    """
    try:
        return _attempt(job, connection, batch)
    except ExportMismatchError as error:
        logger.warning("%s; it is read once more", error)
    done = dict[ExportWindow, Entry]()
    for one in batch.windows:
        covered = ((one.start, one.end),) if one != batch.windows[-1] else batch.covered
        done |= _attempt(job, connection, Batch((one,), batch.rows, batch.known, covered))
    return done


def _attempt(job: Job, connection: Connection, batch: Batch) -> dict[ExportWindow, Entry]:
    start = batch.windows[0].start
    end = batch.windows[-1].end
    selection = job.selection.between(start, end)
    size = job.lake.size
    kept = dict[ExportWindow, RowChecksums]()
    with one_moment(job, connection) as (asked, snapshot):
        frame = _rows(job, asked, selection, snapshot, batch.rows)
        if batch.known:
            frame = only(frame, job.lake.read(start, end))
        files, found = job.lake.stage(frame)
        with undo_on_error(job.lake.discard, files):
            full = ask_windows(job.database, asked, selection, size, checksums=job.checksums)
            if batch.known:
                there = scan(
                    job.lake.session, job.database, asked, selection, "auto", snapshot, job.options
                )
                ours = only(job.lake.read(start, end), there)
                kept = compute_windows(ours, size, checksums=job.checksums)
            entries = _compare(job, batch, found, full, kept)
    noted = {one.name: entry for one, entry in entries.items()}
    job.lake.commit(State(noted, batch.covered), files)
    return entries


def _compare(
    job: Job,
    batch: Batch,
    found: Mapping[ExportWindow, RowChecksums],
    full: Mapping[ExportWindow, RowChecksums],
    kept: Mapping[ExportWindow, RowChecksums],
) -> dict[ExportWindow, Entry]:
    """The records of the windows.

    What the lake had, with what was staged, must be what the database has, with what only the lake
    has.
    """
    entries = {}
    for window in sorted({*batch.windows, *found, *full, *kept}):
        before = job.lake.entry(window)
        had = NOTHING if before is None else before.lake
        ours = had + found.get(window, NOTHING)
        theirs = full.get(window, NOTHING) + kept.get(window, NOTHING)
        if not ours.matches(theirs):
            raise ExportMismatchError(window.name, str(theirs), str(ours), _ADVICE)
        if ours.rows:
            entries[window] = Entry(ours, full.get(window, NOTHING).counts)
    return entries


@contextmanager
def one_moment(job: Job, connection: Connection) -> Iterator[tuple[Connection, Snapshot | None]]:
    """A snapshot for all reads, on PostgreSQL; elsewhere None, as closed windows do not change."""
    if not job.database.shares_snapshots:
        yield connection, None
        return
    with open_snapshot(job.url) as snapshot:
        yield snapshot.connection, snapshot


def only(ours: DataFrame, theirs: DataFrame) -> DataFrame:
    """The rows of the first that are not among the second."""
    return ours.join(theirs.select(*IDENTITY), IDENTITY, "left_anti").select(*ours.columns)


def _rows(
    job: Job,
    connection: Connection,
    selection: Selection,
    snapshot: Snapshot | None,
    rows: int,
) -> DataFrame:
    """All rows of the span, in one partition for each file to write."""
    size = job.database.size(connection, selection.table, selection.schema)
    bytes_ = rows * (size.row_bytes or TYPICAL_ROW)
    cores = int(job.lake.session.sparkContext.defaultParallelism)
    wanted = 1 if rows <= SMALL else max(math.ceil(bytes_ / PARTITION_BYTES), cores)
    number = min(wanted, MOST_PARTITIONS)
    return scan(
        job.lake.session, job.database, connection, selection, number, snapshot, job.options
    )
