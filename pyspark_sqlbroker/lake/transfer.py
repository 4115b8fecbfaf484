"""Copy windows from the database into a lake: read many at once, stage, compare, commit."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Literal

from pyspark.sql import DataFrame
from sqlalchemy import URL, Connection

from faststream_sqlbroker.exceptions import ExportMismatchError
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.databases.base import MAX_AUTO_PARTITIONS, PARTITION_BYTES, SMALL_TABLE_ROWS
from pyspark_sqlbroker.lake.entries import Entry, LakeState
from pyspark_sqlbroker.lake.files import undo_on_error
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.row_checksums import (
    NO_ROWS,
    RowChecksums,
    compute_window_checksums,
    query_window_checksums,
)
from pyspark_sqlbroker.lake.windows import ExportWindow, Span
from pyspark_sqlbroker.load.read import Snapshot, open_snapshot, scan_rows
from pyspark_sqlbroker.load.selection import Selection

DEFAULT_ROW_BYTES = 500
"""Bytes of a row while the database has no statistics."""

IDENTITY_COLUMNS = ["id", "archived_at"]
"""Columns that identify a row of the archive: a retried dead letter is archived again, later."""

_HINT = (
    "Rows of closed windows are changing: find out what writes to the archive, then export again"
)

logger = getLogger("faststream_sqlbroker.spark")


@dataclass(frozen=True)
class TransferJob:
    """Source and target of a transfer.

    Attributes:
        lake: The target.
        database: The source.
        url: URL of the database, for snapshots.
        selection: Table and queues.
        checksums: True if contents are compared, False for counts only.
        options: Options of JDBC.
    """

    lake: Lake
    database: ArchiveDatabase
    url: str | URL
    selection: Selection
    checksums: bool
    options: Mapping[str, str] | None

    def scan(
        self,
        connection: Connection,
        selection: Selection,
        snapshot: Snapshot | None,
        number: int | Literal["auto"] = "auto",
    ) -> DataFrame:
        """Read rows of the database in `number` partitions, in the snapshot if there is one."""
        spark = self.lake.session
        return scan_rows(
            spark, self.database, connection, selection, number, snapshot, self.options
        )


@dataclass(frozen=True)
class WindowBatch:
    """Windows of a commit, in order.

    Attributes:
        windows: Windows with rows in the database, each with the number of its rows; at least one.
        is_exported: True if the lake has rows of the batch, which is then a single window.
        covered: The spans that the commit adds to the lake.
    """

    windows: Mapping[ExportWindow, int]
    is_exported: bool
    covered: tuple[Span, ...] = ()


def count_missing_rows(job: TransferJob, connection: Connection, window: ExportWindow) -> int:
    """Count the rows of a window that the database has and the lake lacks.

    Called when the counts differ, to tell rows that came late from rows that were pruned since.
    """
    selection = job.selection.between(window.start, window.end)
    rows = job.scan(connection, selection, None)
    return select_missing(rows, job.lake.read(window.start, window.end)).count()


def transfer_batch(
    job: TransferJob, connection: Connection, batch: WindowBatch
) -> Iterator[tuple[ExportWindow, Entry | ExportMismatchError]]:
    """Copy a batch into the lake by a single commit.

    A batch has the windows of one commit. If the written rows differ from the database, each window
    is tried once more, by itself, so that all but the differing windows are copied.

    Yields:
        Each window that is in the lake, with its record; and each window whose written rows
        differed from the database twice, with the error.

    Raises:
        ConcurrentLoadError: another process has committed since the batch was planned.
    """
    try:
        yield from _transfer_once(job, connection, batch).items()
    except ExportMismatchError as error:
        logger.warning("%s. First the export itself tries each window again, once", error)
    else:
        return
    for window, rows in batch.windows.items():
        # The rest of the span may have rows that came after its windows were counted, so the next
        # export looks at it again.
        part = WindowBatch({window: rows}, batch.is_exported, ((window.start, window.end),))
        try:
            yield from _transfer_once(job, connection, part).items()
        except ExportMismatchError as error:
            yield window, error


def _transfer_once(
    job: TransferJob, connection: Connection, batch: WindowBatch
) -> dict[ExportWindow, Entry]:
    """Copy a batch into the lake by a single commit, after the written rows were compared.

    The rows are read and counted in one snapshot where the database has snapshots. If the lake has
    rows of the window already, only the missing rows are staged, and rows that only the lake has
    are counted separately.
    """
    start = min(batch.windows).start
    end = max(batch.windows).end
    selection = job.selection.between(start, end)
    size = job.lake.size
    lake_only = dict[ExportWindow, RowChecksums]()
    with share_snapshot(job, connection) as (read_connection, snapshot):
        rows = sum(batch.windows.values())
        frame = _scan_rows(job, read_connection, selection, snapshot, rows)
        if batch.is_exported:
            frame = select_missing(frame, job.lake.read(start, end))
        files, staged = job.lake.stage(frame)
        with undo_on_error(job.lake.discard, files):
            database_checksums = query_window_checksums(
                job.database, read_connection, selection, size, checksums=job.checksums
            )
            if batch.is_exported:
                # Rows that were pruned from the database since stay in the lake.
                database_rows = job.scan(read_connection, selection, snapshot)
                lake_only_rows = select_missing(job.lake.read(start, end), database_rows)
                lake_only = compute_window_checksums(lake_only_rows, size, checksums=job.checksums)
            entries = _compare_checksums(job, batch, staged, database_checksums, lake_only)
    changes = {window.name: entry for window, entry in entries.items()}
    job.lake.commit(LakeState(changes, batch.covered), files)
    return entries


def _compare_checksums(
    job: TransferJob,
    batch: WindowBatch,
    staged: Mapping[ExportWindow, RowChecksums],
    database_checksums: Mapping[ExportWindow, RowChecksums],
    lake_only: Mapping[ExportWindow, RowChecksums],
) -> dict[ExportWindow, Entry]:
    """Return the new records of the windows, or raise an error if a window differs.

    Staged rows are written, but not committed yet. The lake's rows plus the staged rows must equal
    the database's rows plus the rows that only the lake has, such as pruned rows.
    """
    entries = {}
    for window in sorted({*batch.windows, *staged, *database_checksums, *lake_only}):
        entry = job.lake.get_entry(window)
        previous = NO_ROWS if entry is None else entry.lake
        total = previous + staged.get(window, NO_ROWS)
        expected = database_checksums.get(window, NO_ROWS) + lake_only.get(window, NO_ROWS)
        if not total.matches(expected):
            raise ExportMismatchError(window.name, str(expected), str(total), _HINT)
        if total.rows:
            entries[window] = Entry(total, database_checksums.get(window, NO_ROWS).counts)
    return entries


@contextmanager
def share_snapshot(
    job: TransferJob, connection: Connection
) -> Iterator[tuple[Connection, Snapshot | None]]:
    """Share a snapshot among all reads of a transfer (PostgreSQL).

    Rows and counts are then of the same moment, and can be compared. Elsewhere the snapshot is
    None: rows of a closed window do not change, unless they are removed.
    """
    if not job.database.shares_snapshots:
        yield connection, None
        return
    with open_snapshot(job.url) as snapshot:
        yield snapshot.connection, snapshot


def select_missing(rows: DataFrame, others: DataFrame) -> DataFrame:
    """Return the rows of `rows` without a match in the second frame.

    Rows match if id and `archived_at` are equal: a retried dead letter is archived again, later.
    """
    return rows.join(others.select(*IDENTITY_COLUMNS), IDENTITY_COLUMNS, "left_anti").select(
        *rows.columns
    )


def _scan_rows(
    job: TransferJob,
    connection: Connection,
    selection: Selection,
    snapshot: Snapshot | None,
    rows: int,
) -> DataFrame:
    """Scan all rows of the batch, in as many partitions as files are to be written.

    Each partition becomes a file. A batch of few rows takes one partition; otherwise the size of
    the rows and the number of cores decide.
    """
    size = job.database.estimate_size(connection, selection.table, selection.schema)
    total_bytes = rows * (size.row_bytes or DEFAULT_ROW_BYTES)
    cores = int(job.lake.session.sparkContext.defaultParallelism)
    needed = 1 if rows <= SMALL_TABLE_ROWS else max(math.ceil(total_bytes / PARTITION_BYTES), cores)
    return job.scan(connection, selection, snapshot, min(needed, MAX_AUTO_PARTITIONS))
