"""Rows of the archive: listed, and removed by id or by dropping partitions of PostgreSQL.

A partition of an archive that is partitioned by range of `archived_at` is locked against writers,
compared, and dropped, in one transaction.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from logging import getLogger

from sqlalchemy import Connection, MetaData, Table
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.schema.partitions import (
    LOCK_TIMEOUT,
    ArchivePartition,
    list_partitions,
)
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.lake.row_checksums import (
    RowChecksums,
    build_checksum_expressions,
    build_start_expression,
)
from pyspark_sqlbroker.lake.windows import ExportWindow
from pyspark_sqlbroker.load.selection import Selection
from pyspark_sqlbroker.moments import MIN_TIME

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


@dataclass(frozen=True)
class ArchiveRows:
    """The selected rows of an archive, on a connection in autocommit.

    Attributes:
        database: The database's dialect.
        connection: The connection to it.
        selection: The rows.
    """

    database: ArchiveDatabase
    connection: Connection
    selection: Selection

    def between(self, start: datetime, end: datetime) -> "ArchiveRows":
        """Return the rows among these that were archived in [start, end)."""
        return ArchiveRows(self.database, self.connection, self.selection.between(start, end))

    def count(self) -> int:
        """Count the rows."""
        from_clause = self.selection.build_from_clause(self.database)
        return int(self.database.fetch_scalar(self.connection, f"SELECT count(*) {from_clause}"))

    def list_ids(self, limit: int = NO_LIMIT) -> ArchiveRowIds:
        """List the oldest `limit` rows, or all if there are fewer; by default all.

        They are queried in pages of 100 000, of some 20 MB at most while a page is read; the result
        takes 16 bytes a row. A row that is added during the read may be left out.
        """
        rows = ArchiveRowIds()
        page = min(PAGE_ROWS, limit)
        while page and self._append(rows, page) == page:
            page = min(PAGE_ROWS, limit - len(rows.ids))
        return rows

    def list_window(self, window: ExportWindow) -> ArchiveRowIds:
        """List the rows of a window by their own times, which no index serves.

        Called if a listing by conditions on times disagrees with the count of the window. The rows
        come by one statement, streamed in pieces of at most 1000.
        """
        rows = ArchiveRowIds()
        start = build_start_expression(self.database, window.size)
        condition = f"{start} = {to_microseconds(window.start)}"
        self._run("BEGIN")  # PostgreSQL sends pieces in a transaction only
        try:
            self._append(rows, NO_LIMIT, condition)
        finally:
            with suppress(SQLAlchemyError):  # the first error says more
                self._run("ROLLBACK")
        return rows

    def _append(self, rows: ArchiveRowIds, limit: int, extra_condition: str = "") -> int:
        """Append the next rows after the last of `rows`, up to `limit`; return their number.

        Keyset paging: the last row's time and id are the position, so no page depends on an offset.
        `extra_condition` is more SQL for WHERE.
        """
        database = self.database
        id_ = database.quote("id")
        time = database.quote("archived_at")
        conditions = [
            clause
            for clause in (self.selection.build_condition(database), extra_condition)
            if clause
        ]
        if rows.ids:
            last_time = database.format_time(from_microseconds(rows.times[-1]))
            conditions.append(
                f"{time} >= {last_time} AND ({time} > {last_time} OR {id_} > {rows.ids[-1]})"
            )
        condition = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        previous_count = len(rows.ids)
        for row in self.connection.exec_driver_sql(
            f"SELECT {id_}, {database.build_microseconds(time)} FROM "
            f"{self.selection.get_table_name(database)}{condition} "
            f"ORDER BY {time}, {id_} LIMIT {limit}",
            execution_options={"stream_results": limit == NO_LIMIT},
        ):
            rows.ids.append(row[0])
            rows.times.append(row[1])
        return len(rows.ids) - previous_count

    def delete(self, rows: ArchiveRowIds) -> int:
        """Delete exactly `rows`, none that came later; return how many still existed.

        Each chunk is a transaction of `DELETE_CHUNK` rows, so that other sessions wait for
        milliseconds. The bounds of its times let a partitioned archive visit only the partitions of
        these times.
        """
        count = 0
        database = self.database
        time = database.quote("archived_at")
        for first in range(0, len(rows.ids), DELETE_CHUNK):
            ids = rows.ids[first : first + DELETE_CHUNK]
            times = rows.times[first : first + DELETE_CHUNK]
            low, high = (
                database.format_time(from_microseconds(bound)) for bound in (times[0], times[-1])
            )
            result = self.connection.exec_driver_sql(
                f"DELETE FROM {self.selection.get_table_name(database)} WHERE {time} >= {low} AND "
                f"{time} <= {high} "
                f"AND {database.quote('id')} IN ({', '.join(map(str, ids))})"
            )
            count += result.rowcount
        return count

    def find_partitions(self) -> list[ArchivePartition]:
        """List the partitions that may be dropped: their bounds are both points in time.

        The list is empty for a plain table, for another database than PostgreSQL, and if only some
        queues are selected, as a partition has rows of all queues.
        """
        if self.database.kind != "postgresql" or self.selection.queues is not None:
            return []
        archive = Table(self.selection.table, MetaData(), schema=self.selection.schema)
        return [
            partition
            for partition in list_partitions(self.connection, archive)
            # Bounds of other columns may look like dates, which have no time zone.
            if partition.start.tzinfo is not None and partition.start > MIN_TIME
        ]

    def drop_partition(self, partition: ArchivePartition, expected: RowChecksums) -> bool | None:
        """Drop a partition with exactly the expected rows.

        The drop gives up, with a warning, if a lock is not free within 2 seconds, as later
        statements wait behind it.

        Returns:
            True if the partition was dropped, False if its rows differ, None if no partition can be
            dropped.
        """
        try:
            with self.database.transaction(self.connection):
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
        columns = ", ".join(build_checksum_expressions(self.database, checksums=False))
        row = self.connection.exec_driver_sql(f"SELECT {columns} FROM {name}").one()
        return RowChecksums(*(int(value) for value in row))

    def _run(self, statement: str) -> None:
        self.connection.exec_driver_sql(statement)
