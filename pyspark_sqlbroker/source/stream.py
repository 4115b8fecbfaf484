"""`spark.readStream.format("sqlbroker")`: archived rows, window by window, each exactly once.

An offset is a point in time: everything archived before it has been read. It is the archive's
horizon (`find_horizon`), before which no row can appear any more. So the rows between two offsets
are always the same, and a restarted query repeats its last window with the same rows.
"""

import logging
import math
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
from pyspark_sqlbroker.databases import ArchiveDatabase, get_database
from pyspark_sqlbroker.horizon import find_horizon
from pyspark_sqlbroker.load.selection import Selection
from pyspark_sqlbroker.moments import MIN_TIME
from pyspark_sqlbroker.source.options import SourceOptions
from pyspark_sqlbroker.source.scan import build_partitions, read_partition, select_fields

OFFSET_KEY = "archivedBefore"
"""The one key of an offset."""

FIRST_START = datetime(1000, 1, 1, tzinfo=timezone.utc)
"""Start of a stream that reads every row, including older ones."""

ROWS_PER_PARTITION = 100_000
"""Rows of a micro-batch for each task."""

MAX_STREAM_PARTITIONS = 16
"""Maximum number of tasks of a micro-batch without numPartitions; each is a connection."""

LIMITS_VERSION = (4, 2)
"""Version of Spark that passes the start of a micro-batch and its limit of rows to a source."""

log = logging.getLogger("faststream_sqlbroker.spark")


@dataclass(frozen=True)
class WindowLimits:
    """Limits of a window.

    Attributes:
        rows: Maximum number of rows, but always all rows of one time; None is any number.
        seconds: Maximum length, from the window's first row on; None is any length.
    """

    rows: int | None = None
    seconds: float | None = None


class StreamReader(DataSourceStreamReader):
    """The source of a query; Spark plans in the driver's Python, and reads in the executors'."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        """Prepare the reader; nothing is queried yet.

        `_position` is the end of the last planned window. `_empty_range` is a span of time in which
        a search has found no row.
        """
        self._options = options
        self._fields = select_fields(schema, options.selection)
        self._first = options.start or FIRST_START
        self._position: datetime | None = None
        self._empty_range = (FIRST_START, FIRST_START)
        self._logged_source: str | None = None
        self._last_horizon: datetime | None = None

    def initialOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return the start of a query without a checkpoint."""
        return to_offset(self._first)

    def latestOffset(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        """Return the end of the next window, or the last end if there are no new rows.

        The end is the horizon, the time before which no row can appear any more, or less under a
        limit of rows or length.
        """
        limits = WindowLimits(self._options.max_rows, self._options.max_window)
        return to_offset(self._find_next_offset(self._position or self._first, limits))

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> list[InputPartition]:
        """Cut the window into partitions, which Spark's tasks read at the same time.

        After a restart Spark calls this with an empty window, which tells where an earlier run
        ended.

        Raises:
            StoreError: rows of the window may have been pruned, and failOnDataLoss is not false.
            TransientStoreError: an earlier run planned the window by a server that was further
                ahead.
        """
        first = from_offset(start)
        last = from_offset(end)
        # Before Spark 4.2 `latestOffset` gets no start, so remember how far the stream is.
        self._position = max(last, first, self._position or last)
        if last <= first:
            return []
        database = get_database(self._options.address)
        selection = self._options.selection.between(None if first == FIRST_START else first, last)
        with database.connect() as connection:
            if self._last_horizon is None or last > self._last_horizon:
                self._check_horizon(database, connection, last)
            if self._options.fail_on_data_loss and first != self._first:
                self._check_gap(database, connection, first)
            max_rows = MAX_STREAM_PARTITIONS * ROWS_PER_PARTITION
            number = self._options.num_partitions or math.ceil(
                count_window_rows(database, connection, selection, max_rows) / ROWS_PER_PARTITION
            )
            table_range = selection.build_table_range(database, "archived_at")
            conditions = database.build_predicates(connection, table_range, number)
        return build_partitions(database, selection, self._fields, "archived_at", conditions)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read the rows of a partition as Arrow record batches."""
        return read_partition(self._options, self._fields, partition)

    def _find_next_offset(
        self, start: datetime, limits: WindowLimits, latest: datetime | None = None
    ) -> datetime:
        """Return the end of the window that begins at `start`; `start` for an empty window.

        A window is the span of `archived_at` that a micro-batch reads. Its end never passes the
        horizon, nor `latest`.
        """
        database = get_database(self._options.address)
        with database.connect() as connection:
            horizon = self._find_horizon(database, connection)
            if latest is not None:
                horizon = min(horizon, latest)
            # A range without rows below the horizon stays empty, so do not search it again.
            since = (
                self._empty_range[1]
                if self._empty_range[0] <= start <= self._empty_range[1]
                else start
            )
            end = find_window_end(
                database, connection, self._options.selection, since, horizon, limits
            )
        if end is None:
            if horizon > since:
                self._empty_range = (start, horizon)
            return start
        self._position = max(end, self._position or end)
        return end

    def _find_horizon(self, database: ArchiveDatabase, connection: Connection) -> datetime:
        """Return the current horizon, and log the horizon's source after a change.

        The horizon is the time before which no row can be archived any more. Its source says how it
        was found: "safety lag" means that transactions could not be seen.
        """
        options = self._options
        horizon = find_horizon(
            database, connection, safety_lag=options.safety_lag, primary=options.primary
        )
        if horizon.source != self._logged_source:
            # Python shows warnings in the driver's log without any configuration.
            level = logging.WARNING if horizon.source == "safety lag" else logging.INFO
            log.log(level, "the stream finds its horizon by %s: %s", horizon.source, horizon.detail)
            self._logged_source = horizon.source
        self._last_horizon = horizon.time
        return horizon.time

    def _check_horizon(
        self, database: ArchiveDatabase, connection: Connection, last: datetime
    ) -> None:
        """Check that this server is complete up to `last`, the end of a repeated window.

        An earlier run may have planned the window by another server, and the checkpoint keeps the
        window's end.
        """
        horizon = self._find_horizon(database, connection)
        if horizon < last:
            raise TransientStoreError(
                f"the repeated batch ends at {last.isoformat()}, but this server is complete only "
                f"up to {horizon.isoformat()}, so rows would be lost. Start the stream again when "
                "the server has caught up, or with the previous url and safetyLag"
            )

    def _check_gap(
        self, database: ArchiveDatabase, connection: Connection, first: datetime
    ) -> None:
        """Check that rows of the window were not pruned before being read.

        Pruning removes the oldest rows first: while a row from before the window exists, the window
        is complete. `has_rows_before` says what this does not detect.
        """
        if not has_rows_before(database, connection, self._options.selection, first):
            raise StoreError(
                f"the stream continues at {first.isoformat()}, but the archive has no earlier row "
                "of its queues and states: the rows that it read were pruned, and unread rows may "
                "have been pruned too. If no unread row was pruned, or if that does not matter, "
                "continue with failOnDataLoss=false"
            )


def to_offset(time: datetime) -> dict[str, str]:
    """Convert a time to Spark's offset; the same time always gives the same text."""
    return {OFFSET_KEY: time.astimezone(timezone.utc).isoformat(timespec="microseconds")}


def from_offset(offset: dict[str, str]) -> datetime:
    """Parse the time of an offset.

    Raises:
        SetupError: the offset is of another source.
    """
    try:
        return datetime.fromisoformat(offset[OFFSET_KEY])
    except (KeyError, TypeError, ValueError) as error:
        raise SetupError(
            f"the checkpoint has an offset of another source, {offset!r}: use another checkpoint "
            "folder"
        ) from error


def make_stream_reader(options: SourceOptions, schema: StructType) -> DataSourceStreamReader:
    """Create a reader for this version of Spark.

    The class for newer versions imports names that older versions lack, so its module is imported
    here, by name.

    Raises:
        SetupError: a column or type that is not in the table.
        NotSupportedError: the live table.
    """
    if options.kind != "archive":
        raise NotSupportedError(
            "the live table cannot be read as a stream, because its rows change and disappear. "
            "Stream the archive (kind=archive), or read the live table with spark.read"
        )
    if get_spark_version() < LIMITS_VERSION:
        return StreamReader(options, schema)
    module = import_module("pyspark_sqlbroker.source.admission")
    reader: DataSourceStreamReader = module.LimitedStreamReader(options, schema)
    return reader


def get_spark_version() -> tuple[int, ...]:
    """Return Spark's version; only the first two numbers matter."""
    return tuple(int(part) for part in pyspark.__version__.split(".")[:2])


def find_window_end(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    since: datetime,
    horizon: datetime,
    limits: WindowLimits,
) -> datetime | None:
    """Return the first time after the window that begins at `since`; None without a selected
    row.

    The window ends at `horizon` at the latest, as later rows may still appear. Rows of one time are
    never separated, so a time with more rows than `limits.rows` makes a window of its own.
    """
    if since >= horizon:
        return None
    window = selection.between(MIN_TIME if since == FIRST_START else since, horizon)
    first = _find_row_time(database, connection, window, 0)
    if first is None:
        return None
    end = horizon
    if limits.seconds is not None:
        end = min(end, first + max(timedelta(seconds=limits.seconds), TICK))
    if limits.rows is not None:
        next_time = _find_row_time(database, connection, window, limits.rows)
        if next_time is not None:
            end = min(end, max(next_time, first + TICK))
    return end


def _find_row_time(
    database: ArchiveDatabase, connection: Connection, window: Selection, offset: int
) -> datetime | None:
    """Return the time of the row after `offset` rows, by an index; None if there is none.

    With `offset` 0 this is the window's first row.
    """
    time = database.quote(window.time_column)
    microseconds = database.fetch_scalar(
        connection,
        f"SELECT {database.build_microseconds(time)} {window.build_from_clause(database)} "
        f"ORDER BY {time} LIMIT 1 OFFSET {offset}",
    )
    return None if microseconds is None else from_microseconds(int(microseconds))


def count_window_rows(
    database: ArchiveDatabase, connection: Connection, window: Selection, max_count: int
) -> int:
    """Count the rows of the window, up to `max_count`, and return at least 1.

    The count only decides into how many tasks a micro-batch is cut, at least one.
    """
    inner = f"SELECT 1 {window.build_from_clause(database)} LIMIT {max_count}"
    return max(int(database.fetch_scalar(connection, f"SELECT COUNT(*) FROM ({inner}) q")), 1)


def has_rows_before(
    database: ArchiveDatabase, connection: Connection, selection: Selection, time: datetime
) -> bool:
    """Return True if a row of the selected queues was archived before `time`.

    Rows of every state count, unless only COMPLETED is selected. Within a state pruning removes the
    oldest rows first. This does not detect that one of several states or queues was pruned alone
    while others keep older rows, nor that rows were deleted from the middle.
    """
    # Dead letters leave also if they are redriven; COMPLETED rows only if pruned or erased.
    states = selection.states if selection.states == ("COMPLETED",) else None
    earlier = replace(selection, since=None, until=time, states=states)
    order = f"ORDER BY {database.quote(earlier.time_column)} DESC"
    inner = f"SELECT 1 {earlier.build_from_clause(database)} {order} LIMIT 1"
    return bool(database.fetch_scalar(connection, f"SELECT COUNT(*) FROM ({inner}) q"))
