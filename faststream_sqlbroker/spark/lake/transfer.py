"""Bring one window from the database into a lake: read, stage, compare, move to its place."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger

from pyspark.sql import DataFrame
from sqlalchemy import URL, Connection

from faststream_sqlbroker.exceptions import ExportMismatchError, SetupError
from faststream_sqlbroker.spark.databases import Database
from faststream_sqlbroker.spark.lake.entries import Entry
from faststream_sqlbroker.spark.lake.lake import Lake
from faststream_sqlbroker.spark.lake.row_checksums import (
    NOTHING,
    RowChecksums,
    ask_figures,
    compute_figures,
)
from faststream_sqlbroker.spark.lake.windows import ExportWindow
from faststream_sqlbroker.spark.load.read import MOST_PARTITIONS, PARTITION_BYTES, SMALL, scan
from faststream_sqlbroker.spark.load.selection import Selection
from faststream_sqlbroker.spark.load.snapshot import Snapshot, open_snapshot

FILE_BYTES = 1 << 30
"""Bytes of the table for one file; zstd makes them four to eight times smaller."""

TYPICAL_ROW = 500
"""Bytes of a row while the database has no statistics."""

TRIES = 2
"""Attempts at one window: a row may change during the first."""

IDENTITY = ["id", "archived_at"]
"""What identifies a row of the archive: a retried dead letter is archived again, later."""

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
    database: Database
    url: str | URL
    selection: Selection
    checksums: bool
    options: Mapping[str, str] | None


def bring(
    job: Job, connection: Connection, window: ExportWindow
) -> tuple[str, Entry, RowChecksums]:
    """Export a window, if the lake lacks any of its rows.

    Returns:
        What was done; what the lake has; and counts of what the database has, all of which is in
        the lake.

    Raises:
        ExportMismatchError: what was written is not what the database has, twice.
        ConcurrentLoadError: another process writes to the lake.
        SetupError: there is a folder that the lake's state does not know.
    """
    selection = job.selection.between(window.start, window.end)
    entry = job.lake.entry(window)
    if entry is not None:
        counts = ask_figures(job.database, connection, selection, checksums=False)
        if counts == entry.source:
            return "unchanged", entry, counts
        late = _lacking(job, connection, window, selection).count() if counts.rows else 0
        if not late:
            return "left", entry, counts
        logger.warning(
            "window %s: %d rows came after it was exported; it is exported again. A transaction "
            "was open for longer than safety_lag",
            window.name,
            late,
        )
    elif job.lake.folders.exists(window.folder):
        raise SetupError(
            f"{job.lake.folders.path(window.folder)} is there and the export's state does not know "
            "it: move it away; an export never replaces what it does not know"
        )
    elif not ask_figures(job.database, connection, selection, checksums=False).rows:
        entry = job.lake.note_empty(window)
        return "exported", entry, entry.source
    action = "exported" if entry is None else "again"
    try:
        entry = _export(job, connection, window, selection)
    except Exception:
        job.lake.confirm()  # the likeliest cause: another run has removed our files
        raise
    return action, entry, entry.source


def _lacking(
    job: Job, connection: Connection, window: ExportWindow, selection: Selection
) -> DataFrame:
    """The rows of the database that the lake lacks."""
    there = scan(job.lake.session, job.database, connection, selection, "auto", None, job.options)
    return there.select(*IDENTITY).join(job.lake.read(window), IDENTITY, "left_anti")


def _export(job: Job, connection: Connection, window: ExportWindow, selection: Selection) -> Entry:
    expected = NOTHING
    shown = ""
    for _ in range(TRIES):
        with _one_moment(job, connection) as (asked, snapshot):
            counts = ask_figures(job.database, asked, selection, checksums=False)
            kept = _kept(job, asked, window, selection, snapshot)
            extra = NOTHING if kept is None else compute_figures(kept, checksums=job.checksums)
            folder = job.lake.write(window, _rows(job, asked, selection, snapshot, counts, kept))
            full = ask_figures(job.database, asked, selection, checksums=job.checksums)
        expected = full + extra
        found = compute_figures(job.lake.read_folder(folder), checksums=job.checksums)
        lost = _lost(job, window, folder)
        if found.matches(expected) and not lost:
            if not expected.rows:  # the last ones went since the first look
                return job.lake.note_empty(window)
            return job.lake.publish(window, folder, Entry(expected, full.counts))
        shown = f"{found}, without {lost} rows that the lake has" if lost else f"{found}"
        logger.warning("window %s: expected %s; found %s", window.name, expected, shown)
    advice = (
        "Rows of closed windows are being changed: see who writes to the archive, then export again"
    )
    raise ExportMismatchError(window.name, str(expected), shown, advice)


@contextmanager
def _one_moment(job: Job, connection: Connection) -> Iterator[tuple[Connection, Snapshot | None]]:
    """A snapshot for all reads, on PostgreSQL; elsewhere None, as closed windows do not change."""
    if not job.database.shares_snapshots:
        yield connection, None
        return
    with open_snapshot(job.url) as snapshot:
        yield snapshot.connection, snapshot


def _kept(
    job: Job,
    connection: Connection,
    window: ExportWindow,
    selection: Selection,
    snapshot: Snapshot | None,
) -> DataFrame | None:
    """Rows that the lake has and the database has lost; None if the window is new."""
    if job.lake.entry(window) is None:
        return None
    there = scan(
        job.lake.session, job.database, connection, selection, "auto", snapshot, job.options
    )
    return job.lake.read(window).join(there.select(*IDENTITY), IDENTITY, "left_anti")


def _lost(job: Job, window: ExportWindow, folder: str) -> int:
    """How many rows of the lake are not in a folder that is to replace them.

    Without a snapshot a row can go after `_kept` has found it in the database and before `_rows`
    reads it.
    """
    if job.lake.entry(window) is None:
        return 0
    written = job.lake.read_folder(folder).select(*IDENTITY)
    return job.lake.read(window).join(written, IDENTITY, "left_anti").count()


def _rows(
    job: Job,
    connection: Connection,
    selection: Selection,
    snapshot: Snapshot | None,
    counts: RowChecksums,
    kept: DataFrame | None,
) -> DataFrame:
    """All rows of the window, in one partition for each file to write."""
    size = job.database.size(connection, selection.table, selection.schema)
    bytes_ = counts.rows * (size.row_bytes or TYPICAL_ROW)
    cores = int(job.lake.session.sparkContext.defaultParallelism)
    wanted = 1 if counts.rows <= SMALL else max(math.ceil(bytes_ / PARTITION_BYTES), cores)
    number = min(wanted, MOST_PARTITIONS)
    frame = scan(
        job.lake.session, job.database, connection, selection, number, snapshot, job.options
    )
    if kept is not None:
        frame = frame.unionByName(kept.select(frame.columns))
    files = max(math.ceil(bytes_ / FILE_BYTES), 1)
    return frame.coalesce(files).sortWithinPartitions("queue", "id")
