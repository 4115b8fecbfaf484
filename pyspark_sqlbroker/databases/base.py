"""A database's dialect for readers: quoted names, literals, times, sizes, partitions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import fmean
from typing import Any, ClassVar

from sqlalchemy import Connection, Insert, Table, inspect
from sqlalchemy.exc import SQLAlchemyError

from faststream_sqlbroker.core.times import MAX_TIMESTAMP, MIN_TIMESTAMP, from_microseconds
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.address import Address
from pyspark_sqlbroker.load.columns import Field
from pyspark_sqlbroker.store_errors import convert_store_errors

MAX_IDLE_SECONDS = 86_400
"""Seconds that a connection may be idle while Spark works."""


RANGE_TIME_COLUMN = "_archived_at"
"""The hidden column with the unconverted time."""

PARTITION_BYTES = 256 << 20
"""Bytes of the table for each partition, by the database's statistics."""

SMALL_TABLE_ROWS = 50_000
"""Number of rows up to which one connection is faster than opening a second one."""

MAX_AUTO_PARTITIONS = 64
"""Maximum number of partitions chosen by size; each is a connection to the database."""

BLOCKS = "_block"
"""Stands for the table's blocks in place of a column. Rows move between blocks, but not in a
snapshot.
"""

PROBE_ROWS = {"id": 50, "archived_at": 1000}
"""Number of rows at each end of a slice whose distance gives an estimate of the slice's rows. The
number of ids is small, as reading them may mean reading the table; a transaction may archive a
thousand rows at one time.
"""


@dataclass(frozen=True)
class TableSize:
    """Size of a table by the database's statistics, without reading the table.

    Attributes:
        rows: Estimated rows; 0 if the table is empty or was never analyzed.
        bytes: Bytes on disk, without indexes.
    """

    rows: int
    bytes: int

    @property
    def row_bytes(self) -> float:
        """Bytes of an average row."""
        return self.bytes / self.rows if self.rows else 0.0

    def choose_partitions(self, minimum: int) -> int:
        """Return the number of partitions to read the table in; at least `minimum` unless small."""
        if self.rows <= SMALL_TABLE_ROWS and self.bytes <= PARTITION_BYTES:
            return 1
        return min(max(math.ceil(self.bytes / PARTITION_BYTES), minimum), MAX_AUTO_PARTITIONS)


@dataclass(frozen=True)
class TableRange:
    """Rows of a table that are cut into ranges of a column.

    Attributes:
        name: The table.
        schema: Its schema.
        column: The column to cut by: "id" or "archived_at"; `BLOCKS` if a snapshot is held
            (PostgreSQL).
        where: A condition on `column` that all rows fulfil, "" for none.
    """

    name: str
    schema: str | None
    column: str
    where: str = ""


class ArchiveDatabase(ABC):
    """The SQL of a database; values are literals, as JDBC's subqueries take no parameters."""

    kind: ClassVar[str]
    jdbc_driver: ClassVar[str]
    native_timestamps: bool
    """True if JDBC reads timestamps as such; else they come as microseconds since 1970."""

    shares_snapshots: ClassVar[bool] = False
    """True if several connections can share a snapshot."""

    has_single_writer: ClassVar[bool] = False
    """True if only one connection can write at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def with_microseconds(self) -> "ArchiveDatabase":
        """Return a copy that lets JDBC read times as microseconds.

        Spark reads numbers exactly where it would shift old timestamps.
        """
        other = copy(self)
        other.native_timestamps = False
        return other

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """Open a connection; errors of database and Spark in the block become `StoreError`."""
        with convert_store_errors(), self.open() as connection:
            yield connection

    @contextmanager
    def open(self) -> Iterator[Connection]:
        """Open a connection in autocommit, closed at the end.

        Unlike `connect` this leaves errors as they are, for callers that tell them apart.
        """
        engine = self.address.create_engine()
        with engine.connect() as connection:
            # Statements contain literals; a % in one would be taken for a parameter.
            autocommit = connection.execution_options(no_parameters=True)
            self.configure_session(autocommit)
            yield autocommit

    def configure_session(self, connection: Connection) -> None:  # noqa: B027 - some need nothing
        """Set the options that readers rely on, as servers, databases and roles have other
        defaults.
        """

    @abstractmethod
    def begin(self, connection: Connection) -> None:
        """Begin a writing transaction that sees other commits, on a connection in autocommit."""

    @contextmanager
    def transaction(self, connection: Connection) -> Iterator[None]:
        """Run the block after `begin`: commit at the end, roll back after an error."""
        self.begin(connection)
        try:
            yield
            connection.exec_driver_sql("COMMIT")
        except BaseException:
            # The connection may be gone, and the first error says why.
            with suppress(SQLAlchemyError):
                connection.exec_driver_sql("ROLLBACK")
            raise

    def quote(self, name: str) -> str:
        """Quote `name` as an identifier, in double quotes if the database knows the standard."""
        return '"' + name.replace('"', '""') + '"'

    def quote_table(self, name: str, schema: str | None) -> str:
        """Return the quoted name of a table."""
        return self.quote(name) if schema is None else f"{self.quote(schema)}.{self.quote(name)}"

    @abstractmethod
    def format_text(self, value: str) -> str:
        """Format `value` as a literal that is safe for any content."""

    def build_in_condition(self, name: str, values: Sequence[str]) -> str:
        """Return the condition that a column of texts equals one of `values` (at least one)."""
        return f"{self.quote(name)} IN ({', '.join(self.format_text(value) for value in values)})"

    @abstractmethod
    def format_time(self, value: datetime) -> str:
        """Format an aware datetime as a literal to compare columns of timestamps with."""

    @abstractmethod
    def build_microseconds(self, expression: str) -> str:
        """Return SQL for a column of timestamps as exact microseconds since 1970 (UTC)."""

    def build_jdbc_column(self, field: Field) -> str:
        """Return SQL by which JDBC selects `field`; as microseconds if times are not native."""
        name = self.quote(field.name)
        if field.type == "timestamp" and not self.native_timestamps:
            return f"{self.build_microseconds(name)} AS {name}"
        return name

    def build_value(self, field: Field) -> str:
        """Return SQL by which Python's drivers select `field`: timestamps as microseconds."""
        name = self.quote(field.name)
        return self.build_microseconds(name) if field.type == "timestamp" else name

    def build_source_column(self, field: Field) -> str:
        """Return SQL by which `format("sqlbroker")` selects a column of `build_jdbc_column`."""
        return self.quote(field.name)

    def get_hidden_columns(self, column: str) -> dict[str, str]:
        """Return the columns (name → expression) that predicates need besides the fields.

        Spark puts the conditions of a range around a subquery, so the subquery must select a column
        that the conditions name. Such a column is not part of the result.
        """
        name = self.get_range_column(column)
        return {name: self.quote(column)} if name != column else {}

    def get_range_column(self, column: str) -> str:
        """Return the column to put conditions on where rows are cut by `column`.

        Times are compared unconverted, so that an index serves the conditions.
        """
        return (
            RANGE_TIME_COLUMN if column == "archived_at" and not self.native_timestamps else column
        )

    @abstractmethod
    def build_clock(self) -> str:
        """Return SQL for the database's clock as microseconds since 1970 (UTC)."""

    def get_time(self, connection: Connection) -> datetime:
        """Return the time of the database's clock."""
        return from_microseconds(int(self.fetch_scalar(connection, f"SELECT {self.build_clock()}")))

    def fetch_scalar(self, connection: Connection, statement: str) -> Any:
        """Return the only value of the only row of a statement without binds."""
        return connection.exec_driver_sql(statement).scalar()

    def register_functions(self, connection: Connection) -> None:  # noqa: B027 - most have all they need
        """Register the functions that the sums below use on `connection`."""

    @abstractmethod
    def build_insert_if_absent(self, table: Table) -> Insert:
        """Build an INSERT that skips existing rows, and waits for transactions with such rows."""

    def notify(self, connection: Connection, channel: str, queues: Iterable[str]) -> None:  # noqa: B027 - one does
        """Notify subscribers of due messages; without notifications subscribers poll."""

    @abstractmethod
    def build_exact_sum(self, expression: str) -> str:
        """Return SQL for the sum of whole numbers of any size, as text; "0" without rows."""

    @abstractmethod
    def build_length(self, column: str) -> str:
        """Return SQL for the bytes of a payload."""

    @abstractmethod
    def build_digest_sum(self, expression: str, *, text: bool) -> str:
        """Return SQL for the sum of the first 60 bits of each MD5, as text; `text` is hashed as
        UTF-8.
        """

    @abstractmethod
    def build_joined_text(self, expressions: Sequence[str]) -> str:
        """Return SQL that joins values by |: NULL becomes ~, other values follow an =."""

    def has_table(self, connection: Connection, name: str, schema: str | None) -> bool:
        """Return True if there is a table or view of that name."""
        return inspect(connection).has_table(name, schema=schema)

    def require_table(self, connection: Connection, name: str, schema: str | None) -> None:
        """Check that there is a table or view of that name.

        Raises:
            SetupError: there is none; the message says where it was searched.
        """
        if not self.has_table(connection, name, schema):
            location = f"the database {self.address.database!r}"
            location = location if schema is None else f"{location}, schema {schema!r}"
            raise SetupError(
                f"there is no table {name!r} in {location}: check the names of the table and its "
                "schema, and the user's rights"
            )

    @abstractmethod
    def estimate_size(self, connection: Connection, name: str, schema: str | None) -> TableSize:
        """Estimate the size of a table by the statistics."""

    def build_predicates(
        self, connection: Connection, rows: TableRange, max_count: int
    ) -> list[str]:
        """Return at most `max_count` conditions that together match every row once.

        Each condition becomes a partition of Spark, which one task reads.
        """
        return self._cut_range(connection, rows, max_count) if max_count > 1 else ["1=1"]

    def _cut_range(self, connection: Connection, rows: TableRange, number: int) -> list[str]:
        """Return two or more conditions that each match about the same number of rows.

        The values may have large gaps, so ranges of equal length would not do. The values are
        halved repeatedly into slices, and the rows of each slice are estimated from samples at both
        of its ends.

        Few rows are read: for times from an index; for ids from the table itself if its rows are in
        the order of ids (SQLite, MySQL, MariaDB), a hundred for each of some four slices a range.
        """

        def find_slice(low: int, high: int) -> ValueSlice | None:
            """Return the rows between two values, both included; None without rows."""
            bounds = f">= {self._format_bound(rows, low)}", f"<= {self._format_bound(rows, high)}"
            return self._estimate_slice(
                connection, rows, " AND ".join(f"{column} {bound}" for bound in bounds)
            )

        column = self.quote(rows.column)
        all_rows = self._estimate_slice(connection, rows, rows.where)
        slice_count = min(4 * number, 2 * number + 16)
        min_rows = PROBE_ROWS[rows.column]
        slices = (
            []
            if all_rows is None
            else split_into_slices(all_rows, slice_count, min_rows, find_slice)
        )
        return self._build_ranges(rows, compute_balanced_cuts(slices, number))

    def _estimate_slice(
        self, connection: Connection, rows: TableRange, where: str
    ) -> "ValueSlice | None":
        """Return the lowest and highest value of the matching rows, with their estimated number.

        The estimate extrapolates the density of `PROBE_ROWS` rows at each end; a slice with fewer
        rows is counted. None without rows.
        """
        column = self.quote(rows.column)
        value = column if rows.column == "id" else self.build_microseconds(column)
        source = (
            f"FROM {self.quote_table(rows.name, rows.schema)}{f' WHERE {where}' if where else ''}"
        )
        probe_rows = PROBE_ROWS[rows.column]
        suffixes = (
            "LIMIT 1",
            "DESC LIMIT 1",
            f"LIMIT 1 OFFSET {probe_rows}",
            f"DESC LIMIT 1 OFFSET {probe_rows}",
        )
        subqueries = ", ".join(
            f"(SELECT {value} {source} ORDER BY {column} {suffix})" for suffix in suffixes
        )
        low, high, later, earlier = connection.exec_driver_sql(f"SELECT {subqueries}").one()
        if None in (low, high):
            return None
        # `later` lies `probe_rows` rows after the lowest value, `earlier` before the highest.
        if None in (later, earlier):  # then there are few rows
            number = int(self.fetch_scalar(connection, f"SELECT count(*) {source}"))
            return ValueSlice(int(low), int(high), number)
        distances = [
            distance
            for distance in (int(later) - int(low), int(high) - int(earlier))
            if distance > 0
        ]
        density = fmean(probe_rows / distance for distance in distances) if distances else 0.0
        value_range = int(high) - int(low) + 1
        return ValueSlice(int(low), int(high), max(density * value_range, probe_rows + 1))

    def _build_ranges(self, rows: TableRange, cuts: Sequence[int]) -> list[str]:
        """Return the conditions of the ranges between the given cuts, as SQL.

        A cut is the first value of a range: an id, or a time in microseconds.
        """
        name = self.quote(self.get_range_column(rows.column))
        return build_ranges(name, [self._format_bound(rows, cut) for cut in cuts])

    def _format_bound(self, rows: TableRange, bound: int) -> str:
        """Format a bound of a range, an id or a time in microseconds, as SQL.

        Times are literals, because JDBC's session may parse texts differently from this one.
        """
        if rows.column == "id":
            return str(bound)
        # PostgreSQL has times outside of Python's range.
        return self.format_time(from_microseconds(min(max(bound, MIN_TIMESTAMP), MAX_TIMESTAMP)))


def build_ranges(column: str, cuts: Sequence[str]) -> list[str]:
    """Return conditions that split the values of `column` at the cuts.

    The first and the last range are open, so that each value, also one outside of the cuts, is in
    exactly one range.
    """
    if not cuts:
        return ["1=1"]
    first = f"{column} < {cuts[0]}"
    last = f"{column} >= {cuts[-1]}"
    middle = [f"{column} >= {low} AND {column} < {high}" for low, high in pairwise(cuts)]
    return [first, *middle, last]


def compute_even_cuts(low: int, high: int, number: int) -> list[int]:
    """Return cuts of [low, high] into `number` ranges of about the same length; no cut twice.

    A cut is the first value of a range, so the first range needs none. Short spans give fewer
    ranges.
    """
    span = high - low + 1
    return sorted({low + span * index // number for index in range(1, number)} - {low})


@dataclass(frozen=True)
class ValueSlice:
    """A part of a column's values.

    Attributes:
        low: The lowest existing value.
        high: The highest existing value.
        rows: Estimated number of rows.
    """

    low: int
    high: int
    rows: float


def split_into_slices(
    all_rows: ValueSlice,
    count: int,
    min_rows: int,
    find_slice: Callable[[int, int], ValueSlice | None],
) -> list[ValueSlice]:
    """Halve the slice with the most rows, again and again, into about `count` slices.

    A slice is a part of the ids or times. Halving finds gaps in the values, and where most rows
    are, with few queries.

    Args:
        all_rows: The slice of all rows.
        count: Number of slices to reach.
        min_rows: Slices of no more rows are not cut.
        find_slice: Returns the slice of the rows between two values, both included; None without
            rows.

    Returns:
        The slices in order; there are no rows between them.
    """
    slices = [all_rows]
    while slices and len(slices) < count:
        largest = max(slices, key=lambda slice_: slice_.rows if slice_.low < slice_.high else 0.0)
        if largest.low == largest.high or largest.rows <= min_rows:
            break
        middle = (largest.low + largest.high) // 2
        slices.remove(largest)
        halves = find_slice(largest.low, middle), find_slice(middle + 1, largest.high)
        slices += [half for half in halves if half is not None]
    return sorted(slices, key=lambda slice_: slice_.low)


def compute_balanced_cuts(slices: Sequence[ValueSlice], number: int) -> list[int]:
    """Return cuts of ordered slices into `number` ranges of about the same number of rows.

    A cut is the first value of a range. Each range is read by one task of Spark. Within a slice the
    rows count as evenly spread. Equal cuts are merged, so that there may be fewer ranges.
    """
    rows_per_range = sum(slice_.rows for slice_ in slices) / number
    rows_before = 0.0
    cuts: list[int] = []
    for slice_ in slices:
        while len(cuts) < number - 1 and rows_before + slice_.rows >= rows_per_range * (
            len(cuts) + 1
        ):
            fraction = (rows_per_range * (len(cuts) + 1) - rows_before) / slice_.rows
            cuts.append(slice_.low + math.ceil((slice_.high - slice_.low + 1) * fraction))
        rows_before += slice_.rows
    return list(dict.fromkeys(cuts))
