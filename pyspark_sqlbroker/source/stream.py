"""`spark.readStream.format("sqlbroker")`: what was archived, window by window, each row exactly
once.

An offset is a moment: everything archived before it has been read. It is taken from the archive's
horizon (`find_horizon`), before which no row can appear any more; so the rows between two offsets
are the same however often they are read, and a restarted query repeats its last window with the
same rows.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from importlib import import_module
from typing import Any

import pyspark
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType
from sqlalchemy import Connection

from faststream_sqlbroker.core.times import TICK, from_microseconds
from faststream_sqlbroker.exceptions import (
    NotSupportedError,
    SetupError,
    StoreError,
    TransientStoreError,
)
from pyspark_sqlbroker.databases import ArchiveDatabase, database_of
from pyspark_sqlbroker.horizon import find_horizon
from pyspark_sqlbroker.load.selection import Selection
from pyspark_sqlbroker.moments import FIRST
from pyspark_sqlbroker.source.options import Options
from pyspark_sqlbroker.source.scan import make_cuts, read_cut, wanted_fields

BEFORE = "archivedBefore"
"""The one entry of an offset."""

OLDEST = datetime(1000, 1, 1, tzinfo=timezone.utc)
"""Where a stream begins that reads every row, older ones, too."""

ROWS_A_PARTITION = 100_000
"""Rows of a micro-batch for each task."""

MOST_PARTITIONS = 16
"""Tasks of a micro-batch, where numPartitions does not say; each is a connection."""

ADMISSION = (4, 2)
"""The version of Spark that tells a source where a micro-batch starts and how much it may take."""

log = logging.getLogger("faststream_sqlbroker.spark")


@dataclass(frozen=True)
class Limits:
    """How much a window may hold.

    Attributes:
        rows: At most so many, but all of one moment; None is any number.
        seconds: At most so long, from its first row on; None is any length.
    """

    rows: int | None = None
    seconds: float | None = None


class StreamReader(DataSourceStreamReader):
    """One query's source. Spark asks it in the driver's Python, and reads in the executors'."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._fields = wanted_fields(schema, options.selection)
        self._first = options.start or OLDEST
        self._position: datetime | None = None
        self._empty = (OLDEST, OLDEST)
        self._told: str | None = None
        self._seen: datetime | None = None

    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Where a query without a checkpoint begins."""
        return to_offset(self._first)

    def latestOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """The end of the next window: the horizon, or less under a limit; the last end if nothing
        is new.
        """
        limits = Limits(self._options.max_rows, self._options.max_window)
        return to_offset(self._next(self._position or self._first, limits))

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> list[InputPartition]:
        """Cuts of the window.

        After a restart Spark calls it with an empty window, which tells where an earlier run ended.

        Raises:
            StoreError: rows of the window may have been pruned, and failOnDataLoss is not false.
            TransientStoreError: an earlier run planned the window by a server that was further
                ahead.
        """
        first = from_offset(start)
        last = from_offset(end)
        self._position = max(last, first, self._position or last)
        if last <= first:
            return []
        database = database_of(self._options.address)
        selection = self._options.selection.between(None if first == OLDEST else first, last)
        with database.connect() as connection:
            if self._seen is None or last > self._seen:
                self._need_horizon(database, connection, last)
            if self._options.fail_on_data_loss and first != self._first:
                self._refuse_gap(database, connection, first)
            number = self._options.num_partitions
            if number is None:
                most = MOST_PARTITIONS * ROWS_A_PARTITION
                number = (
                    1 + (count_rows(database, connection, selection, most) - 1) // ROWS_A_PARTITION
                )
            rows = selection.cut_by(database, "archived_at")
            cuts = database.predicates(connection, rows, number)
        return make_cuts(database, selection, self._fields, "archived_at", cuts)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of one cut as Arrow's record batches."""
        return read_cut(self._options, self._fields, partition)

    def commit(self, end: dict[str, str]) -> None:
        """Nothing: the archive keeps what was read."""

    def stop(self) -> None:
        """Nothing: no connection stays open between two calls."""

    def _next(self, start: datetime, limits: Limits, most: datetime | None = None) -> datetime:
        """Where the window that begins at `start` ends; `start` if it would hold no row."""
        database = database_of(self._options.address)
        with database.connect() as connection:
            horizon = self._horizon(database, connection)
            if most is not None:
                horizon = min(horizon, most)
            # A range below the horizon that was found empty stays empty: it is skipped.
            since = self._empty[1] if self._empty[0] <= start <= self._empty[1] else start
            end = window_end(database, connection, self._options.selection, since, horizon, limits)
        if end is None:
            if horizon > since:
                self._empty = (start, horizon)
            return start
        self._position = max(end, self._position or end)
        return end

    def _horizon(self, database: ArchiveDatabase, connection: Connection) -> datetime:
        options = self._options
        found = find_horizon(
            database, connection, safety_lag=options.safety_lag, primary=options.primary
        )
        if found.source != self._told:
            # Python shows warnings in the driver's log without any configuration.
            level = logging.WARNING if found.source == "safety lag" else logging.INFO
            log.log(level, "the stream's horizon is known by: %s; %s", found.source, found.detail)
            self._told = found.source
        self._seen = found.moment
        return found.moment

    def _need_horizon(
        self, database: ArchiveDatabase, connection: Connection, last: datetime
    ) -> None:
        """Check that this server is complete up to `last`.

        An earlier run may have planned the window by another server, and the checkpoint keeps the
        window's end.
        """
        horizon = self._horizon(database, connection)
        if horizon < last:
            raise TransientStoreError(
                f"the batch that is repeated ends at {last.isoformat()}, and this server is "
                f"complete up to {horizon.isoformat()} only: rows would be lost. Start the stream "
                "again when the server has come further, or with the URL and the safetyLag that it "
                "had before"
            )

    def _refuse_gap(
        self, database: ArchiveDatabase, connection: Connection, first: datetime
    ) -> None:
        """Check that rows of the window were not pruned before they were read.

        Pruning removes the oldest rows first: while a row from before the window is left, the
        window is complete. This does not notice that one of several queues was pruned alone, nor
        that rows were deleted from the middle.
        """
        if not anything_before(database, connection, self._options.selection, first):
            raise StoreError(
                f"no row of its queues archived before {first.isoformat()} is left, where the "
                "stream goes on: it has read such rows, so they were pruned up to there at least, "
                "and rows that it has not read may have gone too. If none have, or if that does "
                "not matter, go on with failOnDataLoss=false"
            )


def to_offset(moment: datetime) -> dict[str, str]:
    """A moment as Spark's offset; the same moment always makes the same text."""
    return {BEFORE: moment.astimezone(timezone.utc).isoformat(timespec="microseconds")}


def from_offset(offset: dict[str, str]) -> datetime:
    """The moment of an offset.

    Raises:
        SetupError: it is of another source.
    """
    try:
        return datetime.fromisoformat(offset[BEFORE])
    except (KeyError, TypeError, ValueError) as error:
        raise SetupError(
            f"the checkpoint's offset {offset!r} is not one of this source: take another folder"
        ) from error


def make_stream_reader(options: Options, schema: StructType) -> DataSourceStreamReader:
    """A reader as this version of Spark wants it.

    Raises:
        SetupError: a column or type that the table has not.
        NotSupportedError: the live table.
    """
    if options.kind != "archive":
        raise NotSupportedError(
            "the live table cannot be read as a stream: its rows change and go. Stream the archive "
            "(kind=archive), or read the live table with spark.read"
        )
    if release() < ADMISSION:
        return StreamReader(options, schema)
    module = import_module("pyspark_sqlbroker.source.admission")
    reader: DataSourceStreamReader = module.AdmittingReader(options, schema)
    return reader


def release() -> tuple[int, ...]:
    """Spark's version, of which the first two numbers matter."""
    return tuple(int(part) for part in pyspark.__version__.split(".")[:2])


def window_end(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    since: datetime,
    horizon: datetime,
    limits: Limits,
) -> datetime | None:
    """The first moment after the window of selected rows that begins at `since`; None if there is
    no row.

    It ends at `horizon` at the latest. Rows of one moment are never parted, so a moment with more
    rows than `limits.rows` makes a window of its own.
    """
    if since >= horizon:
        return None
    window = selection.between(FIRST if since == OLDEST else since, horizon)
    first = _moment(database, connection, window, 0)
    if first is None:
        return None
    end = horizon
    if limits.seconds is not None:
        end = min(end, first + max(timedelta(seconds=limits.seconds), TICK))
    if limits.rows is not None:
        over = _moment(database, connection, window, limits.rows)
        if over is not None:
            end = min(end, max(over, first + TICK))
    return end


def _moment(
    database: ArchiveDatabase, connection: Connection, window: Selection, skipped: int
) -> datetime | None:
    """When the row after `skipped` others was archived; an index serves it."""
    time = database.quote(window.time_column)
    found = database.scalar(
        connection,
        f"SELECT {database.microseconds(time)} {window.from_clause(database)} "
        f"ORDER BY {time} LIMIT 1 OFFSET {skipped}",
    )
    return None if found is None else from_microseconds(int(found))


def count_rows(
    database: ArchiveDatabase, connection: Connection, window: Selection, most: int
) -> int:
    """How many rows the window holds; counting ends at `most`, and begins at 1."""
    inner = f"SELECT 1 {window.from_clause(database)} LIMIT {most}"
    return max(int(database.scalar(connection, f"SELECT COUNT(*) FROM ({inner}) q")), 1)


def anything_before(
    database: ArchiveDatabase, connection: Connection, selection: Selection, moment: datetime
) -> bool:
    """Whether a row of the selected queues, in any state, was archived before `moment`."""
    # Queues may be pruned alone; a state cannot, but a dead letter that is retried goes.
    earlier = replace(selection, since=None, until=moment, states=None)
    inner = f"SELECT 1 {earlier.from_clause(database)} LIMIT 1"
    return bool(database.scalar(connection, f"SELECT COUNT(*) FROM ({inner}) q"))
