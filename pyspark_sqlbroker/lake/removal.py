"""Remove rows of the archive: by id in small transactions, or a partition of PostgreSQL as a whole.

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
from pyspark_sqlbroker.lake.row_checksums import RowChecksums, asked_figures, start_expression
from pyspark_sqlbroker.lake.windows import ExportWindow
from pyspark_sqlbroker.load.selection import Selection

CHUNK = 5_000
"""Rows in one transaction: few enough to take milliseconds, as others wait for its locks."""

PAGE = 100_000
"""Rows in one listing: drivers hold the whole result in memory, up to 175 bytes a row."""

NO_LIMIT = 1 << 62
"""Rows; more than there are."""

logger = getLogger("faststream_sqlbroker.spark")


@dataclass(frozen=True)
class Rows:
    """Rows that were found, in the order of `archived_at` and id; 16 bytes each.

    Attributes:
        ids: Their ids.
        times: Their `archived_at` as microseconds since 1970.
    """

    ids: "array[int]" = field(default_factory=lambda: array("q"))
    times: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def figures(self) -> RowChecksums:
        """Their number and sums."""
        return RowChecksums(len(self.ids), sum(self.ids), sum(self.times))

    def between(self, start: datetime, end: datetime) -> "Rows":
        """The rows archived in a span of time."""
        first = bisect_left(self.times, to_microseconds(start))
        last = bisect_left(self.times, to_microseconds(end))
        return Rows(self.ids[first:last], self.times[first:last])

    def count_lacking(self, pairs: Iterable[tuple[int, int]]) -> int:
        """How many of them are not among `pairs` of id and time; needs a byte a row."""
        found = bytearray(len(self.ids))
        for number, moment in pairs:
            first = bisect_left(self.times, moment)
            last = bisect_right(self.times, moment)
            place = bisect_left(self.ids, number, first, last)
            if place < last and self.ids[place] == number:
                found[place] = 1
        return found.count(0)


def list_rows(database: ArchiveDatabase, connection: Connection, selection: Selection) -> Rows:
    """The selected rows.

    They are asked for in pages of 100 000, of some 20 MB at most while one is read; what is kept
    takes 16 bytes a row. A row that is added during this may be left out; it is then not deleted.
    """
    rows = Rows()
    while _add(database, connection, selection, rows, PAGE) == PAGE:
        pass
    return rows


def list_window(
    database: ArchiveDatabase, connection: Connection, selection: Selection, window: ExportWindow
) -> Rows:
    """The selected rows of a window, found by their own times: no index serves it.

    They come by one statement, in pieces of at most 1000.
    """
    rows = Rows()
    chosen = f"{start_expression(database, window.size)} = {to_microseconds(window.start)}"
    connection.exec_driver_sql("BEGIN")  # PostgreSQL sends pieces in a transaction only
    try:
        _add(database, connection, selection, rows, NO_LIMIT, chosen)
    finally:
        with suppress(SQLAlchemyError):  # the first error tells more
            connection.exec_driver_sql("ROLLBACK")
    return rows


def list_oldest(
    database: ArchiveDatabase, connection: Connection, selection: Selection, number: int
) -> Rows:
    """The first `number` of the selected rows, or all there are."""
    rows = Rows()
    _add(database, connection, selection, rows, number)
    return rows


def _add(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    rows: Rows,
    number: int,
    chosen: str = "",
) -> int:
    """Append the next rows after `rows`, `number` at most; returns how many there were."""
    id_ = database.quote("id")
    time = database.quote("archived_at")
    conditions = [one for one in (selection.where(database), chosen) if one]
    if rows.ids:
        last = database.moment(from_microseconds(rows.times[-1]))
        conditions.append(f"{time} >= {last} AND ({time} > {last} OR {id_} > {rows.ids[-1]})")
    condition = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    before = len(rows.ids)
    for row in connection.exec_driver_sql(
        f"SELECT {id_}, {database.microseconds(time)} FROM {selection.name(database)}{condition} "
        f"ORDER BY {time}, {id_} LIMIT {number}",
        execution_options={"stream_results": number == NO_LIMIT},
    ):
        rows.ids.append(row[0])
        rows.times.append(row[1])
    return len(rows.ids) - before


def delete_rows(
    database: ArchiveDatabase, connection: Connection, selection: Selection, rows: Rows
) -> int:
    """Remove exactly `rows`, none that came later; returns how many were still there."""
    gone = 0
    time = database.quote("archived_at")
    for first in range(0, len(rows.ids), CHUNK):
        ids = rows.ids[first : first + CHUNK]
        times = rows.times[first : first + CHUNK]
        low, high = (database.moment(from_microseconds(moment)) for moment in (times[0], times[-1]))
        deleted = connection.exec_driver_sql(
            f"DELETE FROM {selection.name(database)} WHERE {time} >= {low} AND {time} <= {high} "
            f"AND {database.quote('id')} IN ({', '.join(map(str, ids))})"
        )
        gone += deleted.rowcount
    return gone


@dataclass(frozen=True)
class Partition:
    """A partition of the archive.

    Attributes:
        name: As SQL takes it.
        start: Its first moment.
        end: The first moment that does not belong to it.
    """

    name: str
    start: datetime
    end: datetime


class Partitions:
    """The partitions of one archive; none if it is a plain table or on another database."""

    def __init__(
        self, database: ArchiveDatabase, connection: Connection, selection: Selection
    ) -> None:
        self._database = database
        self._connection = connection
        self._selection = selection

    def find(self) -> list[Partition]:
        """The partitions whose begin and end are both moments."""
        if self._database.kind != "postgresql" or self._selection.queues is not None:
            return []
        archive = Table(self._selection.table, MetaData(), schema=self._selection.schema)
        return [
            Partition(one.name, one.start, one.end)
            for one in list_partitions(self._connection, archive)
            # Bounds of other columns may look like dates, which have no time zone.
            if one.start is not None and one.start.tzinfo is not None
        ]

    def drop(self, partition: Partition, expected: RowChecksums) -> bool | None:
        """Drop a partition if it has exactly the expected rows; None: no partition can be dropped.

        It gives up, with a warning, if a lock is not free within 2 seconds: what comes later waits
        behind it.
        """
        try:
            with self._transaction():
                self._run(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
                # Readers go on; no row can come between the look and the drop.
                self._run(f"LOCK TABLE {partition.name} IN SHARE ROW EXCLUSIVE MODE")
                if self._figures(partition.name) != expected:
                    return False
                self._run(f"DROP TABLE {partition.name}")
                return True
        except DBAPIError as error:
            problem = " ".join(str(error.orig).split())
            logger.warning(
                "partition %s cannot be dropped, so rows are deleted one by one: %s",
                partition.name,
                problem,
            )
            return None

    def _figures(self, name: str) -> RowChecksums:
        asked = ", ".join(asked_figures(self._database, checksums=False))
        row = self._connection.exec_driver_sql(f"SELECT {asked} FROM {name}").one()
        return RowChecksums(*(int(value) for value in row))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.begin(self._connection)
        try:
            yield
        except BaseException:
            with suppress(
                SQLAlchemyError
            ):  # the connection may be gone, and the first error tells why
                self._run("ROLLBACK")
            raise
        self._run("COMMIT")

    def _run(self, statement: str) -> None:
        self._connection.exec_driver_sql(statement)
