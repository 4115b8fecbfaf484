"""Remove rows from the archive: those that a verified export holds, and old ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pyspark.sql import SparkSession
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.times import Duration, seconds_or_zero
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import ArchiveDatabase, database_of
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.removal import (
    CHUNK,
    Partition,
    Partitions,
    Rows,
    delete_rows,
    list_oldest,
    list_rows,
)
from pyspark_sqlbroker.lake.row_checksums import (
    NOTHING,
    RowChecksums,
    ask_figures,
    count_windows,
)
from pyspark_sqlbroker.lake.verify import examine
from pyspark_sqlbroker.lake.windows import ExportWindow, Span, cut_spans, floor, without_spans
from pyspark_sqlbroker.load.selection import ARCHIVE, Selection, select_rows
from pyspark_sqlbroker.moments import FIRST
from pyspark_sqlbroker.store_errors import keep_errors, store_errors


@dataclass(frozen=True)
class PrunedWindow:
    """The result of one window of the export.

    Attributes:
        name: Such as 2026-03-01 or 2026-03-01T05, UTC.
        rows: How many were removed; in a dry run or a refusal, how many are there.
        refused: Why the rows stay; None if they were removed, or would be.
    """

    name: str
    rows: int
    refused: str | None = None


@dataclass(frozen=True)
class PruneResult:
    """What was removed, or would be.

    Attributes:
        rows: Removed, also those of refused windows that went with a partition before; of a dry run
            those that would be.
        windows: Those of the export that had rows in the database; none if it went by age alone.
        partitions: Of PostgreSQL, dropped as a whole; of a dry run those that would be.
        cutoff: What was archived at or after it was left alone; None if there was no `older_than`.
        dry_run: Whether nothing was removed.
    """

    rows: int
    windows: tuple[PrunedWindow, ...]
    partitions: tuple[str, ...]
    cutoff: datetime | None
    dry_run: bool


@dataclass
class _Work:
    lake: Lake
    database: ArchiveDatabase
    connection: Connection
    selection: Selection
    done: dict[str, PrunedWindow] = field(default_factory=dict)
    inside: dict[Partition, dict[str, RowChecksums]] = field(default_factory=dict)
    """What lies in each partition, by window."""
    dropped: list[Partition] = field(default_factory=list)
    rows: int = 0
    damaged: set[str] = field(default_factory=set)
    """Names of windows that the lake does not hold as they were verified."""

    def gone(self, window: ExportWindow) -> int:
        """Rows of a window that went with dropped partitions."""
        return sum(
            self.inside.get(part, {}).get(window.name, NOTHING).rows for part in self.dropped
        )


@store_errors(OSError)
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
    """Remove rows from the archive: those that an export holds, old ones, or those that are both.

    With `exported` a window's rows are removed only if the export has verified it, its files still
    have the SHA-256 and the rows that were committed, and every row that the database has in it
    is among them. A window with any other row is refused and named; the others go on. Rows that
    come while it runs stay. Rows are deleted by id, 5 000 a transaction. Where PostgreSQL's archive
    is partitioned by range of `archived_at`, partitions that lie within such windows are locked
    against writers, compared once more, and dropped; if a lock is not free within 2 seconds, their
    rows are deleted like others. If it dies, run it again. The ids and times of a window are held
    in memory, at most 40 bytes a row: a day of 20 million takes 0.8 GB.

    Without `exported`, all rows older than `older_than` are lost for ever.

    Args:
        url: SQLAlchemy URL of the database, of a user who may delete.
        exported: The path of an export of this archive.
        older_than: Only what was archived longer ago than this, by the database's clock; needed
            without `exported`. With it, whole windows count.
        spark: Needed with `exported`: reads its state and files.
        table: The archive table; None is that of the export, else message_archive.
        schema: Its schema; None is that of the export, else the connection's.
        queues: Only these; with `exported` it is the export's business.
        source: The name that the export was given for the database, see `export_archive`.
        dry_run: Remove nothing, tell what would be.
        on_window: Called after each window of an export; an error that it raises ends the prune,
            unchanged.
        storage_options: See `export_archive`.

    Returns:
        What was removed.

    Raises:
        SetupError: neither `exported` nor `older_than`, no session, or an export of something else.
        NotSupportedError: Spark Connect.
    """
    _check_options(exported, older_than, spark, queues)
    seconds = None if older_than is None else seconds_or_zero("older_than", older_than)
    database = database_of(parse_address(url))
    with database.connect() as connection:
        cutoff = None if seconds is None else database.now(connection) - timedelta(seconds=seconds)
        if exported is None or spark is None:
            # Times before the year 1 have no counterpart in Python.
            selection = select_rows(
                ARCHIVE, table, schema, since=FIRST, until=cutoff, queues=queues
            )
            rows = _expire(database, connection, selection, dry_run=dry_run)
            return PruneResult(rows, (), (), cutoff, dry_run)
        lake = Lake(spark, exported, storage_options)
        selection = lake.select(database, source, table, schema)
        work = _Work(lake, database, connection, selection)
        dropped = _prune(work, cutoff, dry_run=dry_run, tell=keep_errors(on_window))
    windows = tuple(work.done[name] for name in sorted(work.done))
    return PruneResult(work.rows, windows, dropped, cutoff, dry_run)


def _check_options(
    exported: str | None,
    older_than: Duration | None,
    spark: SparkSession | None,
    queues: Iterable[str] | None,
) -> None:
    if exported is None and older_than is None:
        raise SetupError(
            "give exported= (the path of an export), older_than= (like '720h'), or both"
        )
    if exported is not None and (spark is None or queues is not None):
        raise SetupError("with exported= give spark=, and no queues=: the export says which")


def _expire(
    database: ArchiveDatabase, connection: Connection, selection: Selection, *, dry_run: bool
) -> int:
    if dry_run:
        return ask_figures(database, connection, selection, checksums=False).rows
    gone = 0
    while (rows := list_oldest(database, connection, selection, CHUNK)).ids:
        gone += delete_rows(database, connection, selection, rows)
    return gone


def _prune(
    work: _Work,
    cutoff: datetime | None,
    *,
    dry_run: bool,
    tell: Callable[[PrunedWindow], Any],
) -> tuple[str, ...]:
    """Fill `work.done`; returns the partitions that were dropped."""
    spans: Sequence[Span] = work.lake.state.covered
    if cutoff is not None:
        spans = cut_spans(spans, None, floor(cutoff, work.lake.size))
    partitions = Partitions(work.database, work.connection, work.selection)
    with_rows = count_windows(work.database, work.connection, work.selection, spans, work.lake.size)
    windows = sorted(with_rows)
    if not dry_run:
        work.lake.table.sync()  # also what another program has written
    work.damaged = _damaged(work.lake, windows)
    parts = partitions.find()
    if not parts or dry_run:
        refused = [one for one in windows if not _finish(work, one, tell, dry_run=dry_run)]
        return tuple(part.name for part in parts if _covered(part, _without(spans, refused)))
    # Partitions go before rows are deleted: a row that goes with its partition costs no DELETE.
    _drop(work, partitions, parts, spans, windows)
    for window in windows:
        _finish(work, window, tell, dry_run=False)
    return tuple(part.name for part in work.dropped)


def _without(spans: Sequence[Span], refused: Sequence[ExportWindow]) -> list[Span]:
    taken = [(one.start, one.end) for one in refused]
    return [left for span in spans for left in without_spans(span, taken)]


def _drop(
    work: _Work,
    partitions: Partitions,
    parts: list[Partition],
    spans: Sequence[Span],
    windows: Sequence[ExportWindow],
) -> None:
    """Drop the partitions that lie within spans whose rows may all be removed."""
    refused = [window for window in windows if not _weigh(work, window, parts)]
    sure = _without(spans, refused)
    chosen = [part for part in parts if _covered(part, sure)]
    for part in chosen:
        expected = sum(work.inside.get(part, {}).values(), RowChecksums())
        if (dropped := partitions.drop(part, expected)) is None:
            return  # each further try could hold up the archive again
        if dropped:
            work.dropped.append(part)


def _weigh(work: _Work, window: ExportWindow, parts: list[Partition]) -> bool:
    """Whether a window's rows may be removed; notes which of them lie in which partition."""
    rows, refused = _check(work, window)
    if refused is not None:
        return False
    for part in parts:
        if part.start < window.end and part.end > window.start:
            figures = rows.between(part.start, part.end).figures
            work.inside.setdefault(part, {})[window.name] = figures
    return True


def _finish(
    work: _Work, window: ExportWindow, tell: Callable[[PrunedWindow], Any], *, dry_run: bool
) -> bool:
    """Remove the rows that went with no partition; returns whether the window may be removed."""
    rows, refused = _check(work, window)
    gone = work.gone(window)
    there = len(rows.ids)
    if refused is None:
        if not dry_run:
            there = delete_rows(work.database, work.connection, work.selection, rows)
        result = PrunedWindow(window.name, gone + there)
    else:
        before = f" ({gone} others went with a partition before)" if gone else ""
        result = PrunedWindow(window.name, there, refused + before)
    work.rows += result.rows if refused is None else gone
    if result.rows or refused is not None:
        work.done[window.name] = result
        tell(result)
    return refused is None


def _check(work: _Work, window: ExportWindow) -> tuple[Rows, str | None]:
    """The window's rows in the database, and why they may not be removed."""
    rows = list_rows(
        work.database, work.connection, work.selection.between(window.start, window.end)
    )
    if not rows.ids:
        return rows, None
    if window.name in work.damaged:
        return rows, "its files are missing or are not those that were verified"
    entry = work.lake.entry(window)
    if entry is not None and rows.figures == entry.source:
        return rows, None
    # After a prune that died, or a retried dead letter, the database has fewer: what it has must be
    # there.
    lacking = rows.count_lacking(work.lake.identities(window))
    if not lacking:
        return rows, None
    return rows, f"{lacking} of its rows are not in the export: {window.advice}"


def _damaged(lake: Lake, windows: Sequence[ExportWindow]) -> set[str]:
    """Names of windows that the lake does not hold as they were verified.

    Their files must have the bytes that were committed, or be another program's that have the same
    contents; and the rows in them must be as many as are recorded, with the same sums.
    """
    findings = examine(lake, set(windows).__contains__, windows, checksums=False)
    suspects = findings.suspects()
    damaged = {w.name for w in windows if any(one.may_hold(w.start, w.end) for one in suspects)}
    return damaged | {one.name for one in findings.differing}


def _covered(part: Partition, spans: Sequence[Span]) -> bool:
    """Whether every moment of a partition lies in one of the spans."""
    return any(start <= part.start and part.end <= end for start, end in spans)
