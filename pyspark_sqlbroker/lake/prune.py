"""Remove rows from the archive: rows that a verified export holds, and old rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pyspark.sql import SparkSession
from sqlalchemy import URL

from faststream_sqlbroker.core.times import Duration, parse_non_negative
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.partitions import ArchivePartition
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.removal import DELETE_CHUNK, ArchiveRowIds, ArchiveRows
from pyspark_sqlbroker.lake.row_checksums import NO_ROWS, RowChecksums, count_windows
from pyspark_sqlbroker.lake.verify import examine_lake
from pyspark_sqlbroker.lake.windows import (
    ExportWindow,
    Span,
    cut_spans,
    floor_to_window,
    subtract_spans,
)
from pyspark_sqlbroker.load.selection import ARCHIVE, select_rows
from pyspark_sqlbroker.moments import MIN_TIME
from pyspark_sqlbroker.store_errors import convert_store_errors, wrap_callback


@dataclass(frozen=True)
class PrunedWindow:
    """The result of a window of the export.

    Attributes:
        name: Such as 2026-03-01 or 2026-03-01T05, UTC.
        rows: Number of removed rows; in a dry run or a refusal, of existing rows.
        refused: Reason why the rows stay; None if they were removed, or would be.
    """

    name: str
    rows: int
    refused: str | None = None


@dataclass(frozen=True)
class PruneResult:
    """The result of a prune.

    Attributes:
        rows: Number of removed rows, including rows of refused windows that were dropped with a
            partition before; in a dry run, of rows that would be removed.
        windows: Windows of the export that had rows in the database; empty if the prune went by age
            alone.
        partitions: PostgreSQL's partitions that were dropped; in a dry run, that would be dropped.
        cutoff: Rows archived at or after this time were left alone; None if there was no
            `older_than`.
        dry_run: True if nothing was removed.
    """

    rows: int
    windows: tuple[PrunedWindow, ...]
    partitions: tuple[str, ...]
    cutoff: datetime | None
    dry_run: bool


@dataclass
class _PruneRun:
    """The work of a call of `prune_archive` with an export."""

    lake: Lake
    archive: ArchiveRows
    dry_run: bool
    on_window: Callable[[PrunedWindow], Any]
    results: dict[str, PrunedWindow] = field(default_factory=dict)
    partition_windows: dict[ArchivePartition, dict[str, RowChecksums]] = field(default_factory=dict)
    """Checksums in each partition, by name of window."""
    dropped: list[ArchivePartition] = field(default_factory=list)
    rows: int = 0
    damaged_windows: set[str] = field(default_factory=set)
    """Names of windows that differ in the lake from the verified state."""

    def count_dropped_rows(self, window: ExportWindow) -> int:
        """Count the rows of a window that were dropped with partitions.

        A partition may have rows of several windows, and a window rows in several partitions.
        """
        return sum(
            self.partition_windows.get(part, {}).get(window.name, NO_ROWS).rows
            for part in self.dropped
        )


@convert_store_errors(OSError)
def prune_archive(
    url: str | URL,
    *,
    exported: str | None = None,
    older_than: Duration | None = None,
    spark: SparkSession | None = None,
    table: str | None = None,
    schema: str | None = None,
    queues: Iterable[str] | None = None,
    source: str | None = None,
    dry_run: bool = False,
    on_window: Callable[[PrunedWindow], Any] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> PruneResult:
    """Remove rows from the archive: exported rows, old rows, or rows that are both.

    With `exported` a window's rows are removed only if the export has verified it, its files still
    have the SHA-256 and the rows that were committed, and every row of the window in the database
    is among them. A window with any other row is refused and named; the others are pruned. Rows
    that come while the prune runs stay. Rows are deleted by id, 5 000 a transaction. If
    PostgreSQL's archive is partitioned by range of `archived_at`, partitions that lie within such
    windows are locked against writers, compared once more, and dropped; if a lock is not free
    within 2 seconds, their rows are deleted like others. If the prune dies, run it again. The ids
    and times of a window are held in memory, at most 40 bytes a row: a day of 20 million rows takes
    0.8 GB.

    Without `exported`, all rows older than `older_than` are lost for ever.

    Args:
        url: SQLAlchemy URL of the database, of a user who may delete.
        exported: The path of an export of this archive.
        older_than: Only rows that were archived longer ago than this, by the database's clock;
            required without `exported`. With `exported`, only complete windows count.
        spark: Required with `exported`, to read the export's state and files.
        table: The archive table; None is that of the export, else message_archive.
        schema: Its schema; None is that of the export, else the connection's.
        queues: Only these queues; not with `exported`, which has its own.
        source: The name that the export was given for the database, see `export_archive`.
        dry_run: Remove nothing, and return what would be removed.
        on_window: Called after each window of an export; an error raised by it ends the prune and
            is raised unchanged.
        storage_options: See `export_archive`.

    Raises:
        SetupError: neither `exported` nor `older_than`, no session, or an export of something else.
        NotSupportedError: Spark Connect.
    """
    _check_options(exported, older_than, spark, queues)
    seconds = None if older_than is None else parse_non_negative("older_than", older_than)
    database = get_database(parse_address(url))
    with database.connect() as connection:
        cutoff = (
            None if seconds is None else database.get_time(connection) - timedelta(seconds=seconds)
        )
        if exported is None or spark is None:
            # Times before the year 1 have no counterpart in Python.
            selection = select_rows(
                ARCHIVE, table, schema, since=MIN_TIME, until=cutoff, queues=queues
            )
            rows = _prune_by_age(ArchiveRows(database, connection, selection), dry_run=dry_run)
            return PruneResult(rows, (), (), cutoff, dry_run)
        lake = Lake(spark, exported, storage_options)
        selection = lake.select(database, source, table, schema)
        archive = ArchiveRows(database, connection, selection)
        run = _PruneRun(lake, archive, dry_run, wrap_callback(on_window))
        partitions = _prune_exported(run, cutoff)
    windows = tuple(run.results[name] for name in sorted(run.results))
    return PruneResult(run.rows, windows, partitions, cutoff, dry_run)


def _check_options(
    exported: str | None,
    older_than: Duration | None,
    spark: SparkSession | None,
    queues: Iterable[str] | None,
) -> None:
    """Refuse combinations of options from which the rows to remove are not clear."""
    if exported is None and older_than is None:
        raise SetupError(
            "give exported= (the path of an export), older_than= (like '720h'), or both"
        )
    if exported is not None and (spark is None or queues is not None):
        raise SetupError(
            "exported= needs spark= and does not allow queues=: the export defines the queues"
        )


def _prune_by_age(archive: ArchiveRows, *, dry_run: bool) -> int:
    """Delete the selected rows, oldest first and a chunk at a time; return their number.

    Each chunk is a transaction, so that its locks are held briefly. A dry run only counts the rows.
    """
    if dry_run:
        return archive.count()
    deleted_count = 0
    while (rows := archive.list_ids(DELETE_CHUNK)).ids:
        deleted_count += archive.delete(rows)
    return deleted_count


def _prune_exported(run: _PruneRun, cutoff: datetime | None) -> tuple[str, ...]:
    """Remove the rows of exported windows, up to `cutoff`; return the names of dropped partitions.

    PostgreSQL's partitions are dropped first where all their rows may be removed; the remaining
    rows are deleted. A dry run only compares. The results of the windows are in `run.results`. Only
    complete windows are pruned, because a record has the checksums of a complete window.
    """
    spans: Sequence[Span] = run.lake.state.covered
    if cutoff is not None:
        spans = cut_spans(spans, None, floor_to_window(cutoff, run.lake.size))
    archive = run.archive
    windows = sorted(
        count_windows(archive.database, archive.connection, archive.selection, spans, run.lake.size)
    )
    if not run.dry_run:
        run.lake.table.sync()  # other programs may have written files, too
    run.damaged_windows = _find_damaged_windows(run.lake, windows)
    candidates = archive.find_partitions()
    # Drop partitions before rows are deleted: a row that goes with its partition costs no DELETE.
    if candidates and not run.dry_run:
        _drop_partitions(run, candidates, spans, windows)
    refused = [window for window in windows if not _prune_window(run, window)]
    gone = _select_covered(candidates, spans, refused) if run.dry_run else run.dropped
    return tuple(partition.name for partition in gone)


def _select_covered(
    partitions: list[ArchivePartition], spans: Sequence[Span], refused: Sequence[ExportWindow]
) -> list[ArchivePartition]:
    """Return the partitions whose rows are all in windows of the spans that are not refused."""
    excluded = [(window.start, window.end) for window in refused]
    removable = [part for span in spans for part in subtract_spans(span, excluded)]
    return [
        partition
        for partition in partitions
        if any(start <= partition.start and partition.end <= end for start, end in removable)
    ]


def _drop_partitions(
    run: _PruneRun,
    candidates: list[ArchivePartition],
    spans: Sequence[Span],
    windows: Sequence[ExportWindow],
) -> None:
    """Drop the partitions whose rows may all be removed.

    Such a partition lies within the exported spans and touches no refused window, which is one with
    a row that the lake lacks. After the first drop that fails, no other is tried.
    """
    refused = [window for window in windows if not _assign_partitions(run, window, candidates)]
    for partition in _select_covered(candidates, spans, refused):
        expected = sum(run.partition_windows.get(partition, {}).values(), RowChecksums())
        if (dropped := run.archive.drop_partition(partition, expected)) is None:
            return  # such as for a lock: each further try could block the archive again
        if dropped:
            run.dropped.append(partition)


def _assign_partitions(
    run: _PruneRun, window: ExportWindow, partitions: list[ArchivePartition]
) -> bool:
    """Note a window's checksums in each partition; return False for a refused window.

    The checksums of a partition are compared again under its lock before it is dropped.
    """
    rows, reason = _check_window(run, window)
    if reason is not None:
        return False
    for partition in partitions:
        if partition.start < window.end and partition.end > window.start:
            checksums = rows.select_between(partition.start, partition.end).checksums
            run.partition_windows.setdefault(partition, {})[window.name] = checksums
    return True


def _prune_window(run: _PruneRun, window: ExportWindow) -> bool:
    """Delete a window's rows that no drop has removed; return False for a refused window.

    A window is refused, and its rows stay, if the lake lacks one of them or its files are damaged.
    Rows are listed again here, because rows may have come since the partitions were compared.
    """
    rows, reason = _check_window(run, window)
    dropped = run.count_dropped_rows(window)
    count = len(rows.ids)
    if reason is None:
        if not run.dry_run:
            count = run.archive.delete(rows)
        result = PrunedWindow(window.name, dropped + count)
    else:
        suffix = f" ({dropped} more rows were dropped with a partition)" if dropped else ""
        result = PrunedWindow(window.name, count, reason + suffix)
    run.rows += result.rows if reason is None else dropped
    if result.rows or reason is not None:
        run.results[window.name] = result
        run.on_window(result)
    return reason is None


def _check_window(run: _PruneRun, window: ExportWindow) -> tuple[ArchiveRowIds, str | None]:
    """Return the window's rows in the database, and the reason to keep the rows, or None.

    Equal checksums prove that the lake has every row. Otherwise each row is searched in the lake.
    """
    rows = run.archive.between(window.start, window.end).list_ids()
    if not rows.ids:
        return rows, None
    if window.name in run.damaged_windows:
        return rows, "its files are missing or differ from the verified files"
    entry = run.lake.get_entry(window)
    if entry is not None and rows.checksums == entry.source:
        return rows, None
    # After a prune that died, or a retried dead letter, the database has fewer rows than at the
    # export: all of them must be in the lake.
    missing = rows.count_missing(run.lake.iter_identities(window))
    if not missing:
        return rows, None
    return rows, f"{missing} of its rows are not in the export: {window.repair_hint}"


def _find_damaged_windows(lake: Lake, windows: Sequence[ExportWindow]) -> set[str]:
    """Return the names of windows that differ in the lake from the verified state.

    Their files must have the bytes that were committed, or be another program's with the same
    contents; and the number and sums of their rows must be as recorded. Other windows are not
    pruned, because the database may have the only good copy of their rows.
    """
    examination = examine_lake(lake, set(windows).__contains__, windows, checksums=False)
    suspects = examination.list_suspect_files()
    damaged = {
        window.name
        for window in windows
        if any(file.may_hold(window.start, window.end) for file in suspects)
    }
    return damaged | {window.name for window in examination.differing}
