"""Remove rows of the archive: by id in small transactions, or by dropping partitions of PostgreSQL.

A partition of an archive that is partitioned by range of `archived_at` is locked against writers,
compared, and dropped, in one transaction.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from logging import getLogger

from sqlalchemy import Connection, MetaData, Table
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.schema.partitions import LOCK_TIMEOUT, list_partitions
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.lake.row_checksums import (
    RowChecksums,
    build_checksum_expressions,
    build_start_expression,
)
from pyspark_sqlbroker.lake.windows import ExportWindow
from pyspark_sqlbroker.load.selection import Selection

DELETE_CHUNK = 5_000
"""Rows in one transaction: few enough to take milliseconds, as other sessions wait for its locks.

"""

PAGE_ROWS = 100_000
"""Rows in one listing: drivers hold the complete result in memory, up to 175 bytes a row."""

NO_LIMIT = 1 << 62
"""A number of rows larger than any table."""

logger = getLogger("faststream_sqlbroker.spark")


@dataclass(frozen=True)
class ArchiveRowIds:
    """Ids and times of rows, in the order of `archived_at` and id; 16 bytes each.

    Attributes:
        ids: Their ids.
        times: Their `archived_at` as microseconds since 1970.
    """

    ids: "array[int]" = field(default_factory=lambda: array("q"))
    times: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def checksums(self) -> RowChecksums:
        """Their number and sums."""
        return RowChecksums(len(self.ids), sum(self.ids), sum(self.times))

    def select_between(self, start: datetime, end: datetime) -> "ArchiveRowIds":
        """Return the rows archived in [start, end); the rows are in the order of their times."""
        first = bisect_left(self.times, to_microseconds(start))
        last = bisect_left(self.times, to_microseconds(end))
        return ArchiveRowIds(self.ids[first:last], self.times[first:last])

    def count_missing(self, pairs: Iterable[tuple[int, int]]) -> int:
        """Count the rows that are not among `pairs` of id and time, in any order.

        The rows are in the order of time and id, so each pair is found by bisection. `pairs` are
        streamed, and a byte is kept for each row, so that a large window fits in memory.
        """
        is_found = bytearray(len(self.ids))
        for id_, time in pairs:
            first = bisect_left(self.times, time)
            last = bisect_right(self.times, time)
            index = bisect_left(self.ids, id_, first, last)
            if index < last and self.ids[index] == id_:
                is_found[index] = 1
        return is_found.count(0)


def list_rows(
    database: ArchiveDatabase, connection: Connection, selection: Selection
) -> ArchiveRowIds:
    """List the selected rows, to compare with the lake and to delete by id.

    They are queried in pages of 100 000, of some 20 MB at most while a page is read; the result
    takes 16 bytes a row. A row that is added during the read may be left out, and is then not
    deleted.
    """
    rows = ArchiveRowIds()
    while _append_rows(database, connection, selection, rows, PAGE_ROWS) == PAGE_ROWS:
        pass
    return rows


def list_window(
    database: ArchiveDatabase, connection: Connection, selection: Selection, window: ExportWindow
) -> ArchiveRowIds:
    """List the selected rows of a window by their own times, which no index serves.

    Called if a listing by conditions on times disagrees with the count of the window. The rows come
    by one statement, streamed in pieces of at most 1000.
    """
    rows = ArchiveRowIds()
    condition = f"{build_start_expression(database, window.size)} = {to_microseconds(window.start)}"
    connection.exec_driver_sql("BEGIN")  # PostgreSQL sends pieces in a transaction only
    try:
        _append_rows(database, connection, selection, rows, NO_LIMIT, condition)
    finally:
        with suppress(SQLAlchemyError):  # the first error says more
            connection.exec_driver_sql("ROLLBACK")
    return rows


def list_oldest(
    database: ArchiveDatabase, connection: Connection, selection: Selection, number: int
) -> ArchiveRowIds:
    """List the first `number` of the selected rows, or all if there are fewer."""
    rows = ArchiveRowIds()
    _append_rows(database, connection, selection, rows, number)
    return rows


def _append_rows(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    rows: ArchiveRowIds,
    limit: int,
    extra_condition: str = "",
) -> int:
    """Append the next rows after the last of `rows`, up to `limit`; return their number.

    Keyset paging: the last row's time and id are the position, so no page depends on an offset.
    `extra_condition` is more SQL for WHERE.
    """
    id_ = database.quote("id")
    time = database.quote("archived_at")
    conditions = [
        clause for clause in (selection.build_condition(database), extra_condition) if clause
    ]
    if rows.ids:
        last_time = database.format_time(from_microseconds(rows.times[-1]))
        conditions.append(
            f"{time} >= {last_time} AND ({time} > {last_time} OR {id_} > {rows.ids[-1]})"
        )
    condition = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    previous_count = len(rows.ids)
    for row in connection.exec_driver_sql(
        f"SELECT {id_}, {database.build_microseconds(time)} FROM "
        f"{selection.get_table_name(database)}{condition} "
        f"ORDER BY {time}, {id_} LIMIT {limit}",
        execution_options={"stream_results": limit == NO_LIMIT},
    ):
        rows.ids.append(row[0])
        rows.times.append(row[1])
    return len(rows.ids) - previous_count


def delete_rows(
    database: ArchiveDatabase, connection: Connection, selection: Selection, rows: ArchiveRowIds
) -> int:
    """Delete exactly `rows`, none that came later; return how many still existed.

    Each chunk is a transaction of `DELETE_CHUNK` rows, so that other sessions wait for
    milliseconds. The bounds of its times let a partitioned archive visit only the partitions of
    these times.
    """
    count = 0
    time = database.quote("archived_at")
    for first in range(0, len(rows.ids), DELETE_CHUNK):
        ids = rows.ids[first : first + DELETE_CHUNK]
        times = rows.times[first : first + DELETE_CHUNK]
        low, high = (
            database.format_time(from_microseconds(bound)) for bound in (times[0], times[-1])
        )
        result = connection.exec_driver_sql(
            f"DELETE FROM {selection.get_table_name(database)} WHERE {time} >= {low} AND {time} "
            f"<= {high} "
            f"AND {database.quote('id')} IN ({', '.join(map(str, ids))})"
        )
        count += result.rowcount
    return count


@dataclass(frozen=True)
class Partition:
    """A partition of the archive.

    Attributes:
        name: Quoted, as SQL takes it.
        start: Its first time.
        end: The first time after it.
    """

    name: str
    start: datetime
    end: datetime


class LockedPartitions:
    """The partitions of an archive; none for a plain table or another database."""

    def __init__(
        self, database: ArchiveDatabase, connection: Connection, selection: Selection
    ) -> None:
        self._database = database
        self._connection = connection
        self._selection = selection

    def find_partitions(self) -> list[Partition]:
        """List the partitions that may be dropped: their bounds are both points in time.

        The list is empty if only some queues are selected, as a partition has rows of all queues.
        """
        if self._database.kind != "postgresql" or self._selection.queues is not None:
            return []
        archive = Table(self._selection.table, MetaData(), schema=self._selection.schema)
        return [
            Partition(partition.name, partition.start, partition.end)
            for partition in list_partitions(self._connection, archive)
            # Bounds of other columns may look like dates, which have no time zone.
            if partition.start is not None and partition.start.tzinfo is not None
        ]

    def drop(self, partition: Partition, expected: RowChecksums) -> bool | None:
        """Drop a partition with exactly the expected rows.

        The drop gives up, with a warning, if a lock is not free within 2 seconds, as later
        statements wait behind it.

        Returns:
            True if the partition was dropped, False if its rows differ, None if no partition can be
            dropped.
        """
        try:
            with self._transaction():
                self._run(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
                # Race: readers go on, but no row can come between the comparison and the drop.
                self._run(f"LOCK TABLE {partition.name} IN SHARE ROW EXCLUSIVE MODE")
                if self._query_checksums(partition.name) != expected:
                    return False
                self._run(f"DROP TABLE {partition.name}")
                return True
        except DBAPIError as error:
            reason = " ".join(str(error.orig).split())
            logger.warning(
                "partition %s cannot be dropped, so its rows are deleted in batches: %s",
                partition.name,
                reason,
            )
            return None

    def _query_checksums(self, name: str) -> RowChecksums:
        """Count the rows of a partition and sum their ids and times."""
        columns = ", ".join(build_checksum_expressions(self._database, checksums=False))
        row = self._connection.exec_driver_sql(f"SELECT {columns} FROM {name}").one()
        return RowChecksums(*(int(value) for value in row))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run the block in a transaction: commit at the end, roll back after an error.

        The connection is in autocommit, as everywhere in the readers, so this sends the statements.
        """
        self._database.begin(self._connection)
        try:
            yield
        except BaseException:
            with suppress(
                SQLAlchemyError
            ):  # the connection may be gone, and the first error says why
                self._run("ROLLBACK")
            raise
        self._run("COMMIT")

    def _run(self, statement: str) -> None:
        self._connection.exec_driver_sql(statement)
