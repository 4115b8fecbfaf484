"""What readers need from a database: quoted names, literals, times, sizes, partitions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import fmean
from typing import Any, ClassVar

from sqlalchemy import Connection, Insert, Table, inspect

from faststream_sqlbroker.core.times import FIRST_MOMENT, LAST_MOMENT, from_microseconds
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.address import Address
from pyspark_sqlbroker.load.columns import Field
from pyspark_sqlbroker.store_errors import store_errors

LONGEST_WAIT = 86_400
"""Seconds that a connection may be idle while Spark works."""


MOMENT = "_archived_at"
"""The hidden column of the bare time."""

PARTITION_BYTES = 256 << 20
"""Bytes of the table for each partition, by the database's statistics."""

SMALL = 50_000
"""Rows. Up to here one connection is faster than opening a second one."""

MOST_PARTITIONS = 64
"""Partitions that are chosen by size; each is a connection to the database."""

BLOCKS = "_block"
"""In place of a column: the table's blocks. Rows move between them, but not in a snapshot."""

PROBE = {"id": 50, "archived_at": 1000}
"""Rows at each end of a slice by whose distance its rows are estimated. Of ids they are few, as
reading them may mean reading the table; a thousand may be archived by one transaction, at one
moment."""


@dataclass(frozen=True)
class Size:
    """What the database's statistics say of a table, without reading it.

    Attributes:
        rows: Estimated rows; 0 if it is empty or was never looked at.
        bytes: On disk, indexes left out.
    """

    rows: int
    bytes: int

    @property
    def row_bytes(self) -> float:
        """Bytes of an average row."""
        return self.bytes / self.rows if self.rows else 0.0

    def partitions(self, least: int) -> int:
        """In how many partitions to read the table; `least` are worth it if it is not small."""
        if self.rows <= SMALL and self.bytes <= PARTITION_BYTES:
            return 1
        return min(max(math.ceil(self.bytes / PARTITION_BYTES), least), MOST_PARTITIONS)


@dataclass(frozen=True)
class TableRange:
    """Rows of a table that are cut into ranges of one of its columns.

    Attributes:
        name: The table.
        schema: Its schema.
        column: What ranges are taken of: "id" or "archived_at"; `BLOCKS` where a snapshot is held
            (PostgreSQL).
        where: A condition on `column` that all rows fulfil, "" for none.
    """

    name: str
    schema: str | None
    column: str
    where: str = ""


class ArchiveDatabase(ABC):
    """One database's SQL; values are literals, because JDBC's subqueries take no parameters."""

    kind: ClassVar[str]
    jdbc_driver: ClassVar[str]
    native_timestamps: bool
    """Whether JDBC reads timestamps as such; else they come as microseconds since 1970."""

    shares_snapshots: ClassVar[bool] = False
    """Whether several connections can see one moment."""

    one_writer: ClassVar[bool] = False
    """Whether connections that write only wait for each other."""

    def __init__(self, address: Address) -> None:
        self.address = address

    def without_native_timestamps(self) -> "ArchiveDatabase":
        """The same database, whose times JDBC reads as microseconds."""
        other = copy(self)
        other.native_timestamps = False
        return other

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """As `open`; errors of the database and of Spark in the block become `StoreError`."""
        with store_errors(), self.open() as connection:
            yield connection

    @contextmanager
    def open(self) -> Iterator[Connection]:
        """A connection in autocommit, closed at the end."""
        engine = self.address.engine()
        with engine.connect() as connection:
            # Statements contain literals; a % in one would be taken for a parameter.
            bare = connection.execution_options(no_parameters=True)
            self.set_up(bare)
            yield bare

    def set_up(self, connection: Connection) -> None:  # noqa: B027 - some need nothing
        """Set what readers rely on, whatever the server, the database or the role has for a
        default.
        """

    @abstractmethod
    def begin(self, connection: Connection) -> None:
        """Begin a transaction that writes, on a connection in autocommit; others' commits show in
        it.
        """

    def quote(self, name: str) -> str:
        """`name` as an identifier, in double quotes where the database knows the standard."""
        return '"' + name.replace('"', '""') + '"'

    def table(self, name: str, schema: str | None) -> str:
        """The quoted name of a table."""
        return self.quote(name) if schema is None else f"{self.quote(schema)}.{self.quote(name)}"

    @abstractmethod
    def text(self, value: str) -> str:
        """`value` as a literal that no content can break out of."""

    def among(self, name: str, values: Sequence[str]) -> str:
        """The condition that a column of texts holds one of `values`, of which there is one at
        least.
        """
        return f"{self.quote(name)} IN ({', '.join(self.text(value) for value in values)})"

    @abstractmethod
    def moment(self, value: datetime) -> str:
        """An aware datetime as a literal to compare columns of timestamps with."""

    @abstractmethod
    def microseconds(self, expression: str) -> str:
        """A column of timestamps as microseconds since 1970 (UTC), exact."""

    def column(self, field: Field) -> str:
        """How JDBC selects `field`; timestamps as microseconds unless they are native."""
        name = self.quote(field.name)
        if field.type == "timestamp" and not self.native_timestamps:
            return f"{self.microseconds(name)} AS {name}"
        return name

    def value(self, field: Field) -> str:
        """How any of Python's drivers reads `field`: timestamps as microseconds."""
        name = self.quote(field.name)
        return self.microseconds(name) if field.type == "timestamp" else name

    def hidden(self, column: str) -> dict[str, str]:
        """What predicates on a `TableRange.column` need besides the fields: name → expression."""
        name = self.range_of(column)
        return {name: self.quote(column)} if name != column else {}

    def range_of(self, column: str) -> str:
        """The name of `column` where it is cut into ranges: of times the bare one, which an index
        serves.
        """
        return MOMENT if column == "archived_at" and not self.native_timestamps else column

    @abstractmethod
    def clock(self) -> str:
        """The database's clock as microseconds since 1970 (UTC)."""

    def now(self, connection: Connection) -> datetime:
        """The database's clock."""
        return from_microseconds(int(self.scalar(connection, f"SELECT {self.clock()}")))

    def scalar(self, connection: Connection, statement: str) -> Any:
        """The only value of the only row of a statement without binds."""
        return connection.exec_driver_sql(statement).scalar()

    def prepare(self, connection: Connection) -> None:  # noqa: B027 - most have all they need
        """Make `connection` know the functions of the sums below."""

    @abstractmethod
    def insert_new(self, table: Table) -> Insert:
        """An INSERT that skips existing rows; it waits for transactions that insert them."""

    def wake(self, connection: Connection, channel: str, queues: Iterable[str]) -> None:  # noqa: B027 - one does
        """Tell subscribers that something is due; where they cannot be told they poll."""

    @abstractmethod
    def exact_sum(self, expression: str) -> str:
        """The sum of whole numbers over the rows, of any size, as text; "0" without rows."""

    @abstractmethod
    def length(self, column: str) -> str:
        """The bytes of a payload."""

    @abstractmethod
    def digest_sum(self, expression: str, *, text: bool) -> str:
        """The sum of the first 60 bits of each row's MD5, as text; `text` is hashed as UTF-8."""

    @abstractmethod
    def joined(self, expressions: Sequence[str]) -> str:
        """Values of any type as one text: NULL is ~, the others follow an =, and | is between."""

    def has_table(self, connection: Connection, name: str, schema: str | None) -> bool:
        """Whether there is a table or view of that name."""
        return inspect(connection).has_table(name, schema=schema)

    def need_table(self, connection: Connection, name: str, schema: str | None) -> None:
        """Look for a table or view of that name.

        Raises:
            SetupError: there is none; says where it was looked for.
        """
        if not self.has_table(connection, name, schema):
            place = f"the database {self.address.database!r}"
            place = place if schema is None else f"{place}, schema {schema!r}"
            raise SetupError(
                f"there is no table {name!r} in {place}: check the names of the table and its "
                "schema, and the user's rights"
            )

    @abstractmethod
    def size(self, connection: Connection, name: str, schema: str | None) -> Size:
        """What the statistics say of a table."""

    def predicates(self, connection: Connection, rows: TableRange, number: int) -> list[str]:
        """At most `number` conditions that together take every row once."""
        return self._cut(connection, rows, number) if number > 1 else ["1=1"]

    def _cut(self, connection: Connection, rows: TableRange, number: int) -> list[str]:
        """As `predicates`, of two or more: of about the same number of rows, whatever gaps there
        are between the values.

        Few rows are read: of times from an index; of ids from the table itself where it lies in
        their order (SQLite, MySQL, MariaDB), a hundred for each of some four slices a range.
        """

        def look(low: int, high: int) -> Slice | None:
            ends = f">= {self._literal(rows, low)}", f"<= {self._literal(rows, high)}"
            return self._probe(connection, rows, " AND ".join(f"{column} {end}" for end in ends))

        column = self.quote(rows.column)
        full = self._probe(connection, rows, rows.where)
        wanted = min(4 * number, 2 * number + 16)
        least = PROBE[rows.column]
        slices = [] if full is None else cut_into_halves(full, wanted, least, look)
        return self._between(rows, deep_cuts(slices, number))

    def _probe(self, connection: Connection, rows: TableRange, where: str) -> "Slice | None":
        """The ends of the rows of a condition, and an estimate of their number; None of no row."""
        column = self.quote(rows.column)
        value = column if rows.column == "id" else self.microseconds(column)
        source = f"FROM {self.table(rows.name, rows.schema)}{f' WHERE {where}' if where else ''}"
        probe = PROBE[rows.column]
        ends = "LIMIT 1", "DESC LIMIT 1", f"LIMIT 1 OFFSET {probe}", f"DESC LIMIT 1 OFFSET {probe}"
        looks = ", ".join(f"(SELECT {value} {source} ORDER BY {column} {end})" for end in ends)
        low, high, later, earlier = connection.exec_driver_sql(f"SELECT {looks}").one()
        if None in (low, high):
            return None
        if None in (later, earlier):  # then they are few
            number = int(self.scalar(connection, f"SELECT count(*) {source}"))
            return Slice(int(low), int(high), number)
        distances = [one for one in (int(later) - int(low), int(high) - int(earlier)) if one > 0]
        density = fmean(probe / one for one in distances) if distances else 0.0
        length = int(high) - int(low) + 1
        return Slice(int(low), int(high), max(density * length, probe + 1))

    def _between(self, rows: TableRange, cuts: Sequence[int]) -> list[str]:
        """The ranges between values."""
        name = self.quote(self.range_of(rows.column))
        return ranges(name, [self._literal(rows, cut) for cut in cuts])

    def _literal(self, rows: TableRange, bound: int) -> str:
        """An id, or microseconds as a moment: JDBC's session need not read texts as this one
        writes them.
        """
        if rows.column == "id":
            return str(bound)
        # PostgreSQL has moments that Python has not.
        return self.moment(from_microseconds(min(max(bound, FIRST_MOMENT), LAST_MOMENT)))


def ranges(column: str, cuts: Sequence[str]) -> list[str]:
    """Half-open ranges of `column` between `cuts`, open at both ends: every value lies in exactly
    one.
    """
    if not cuts:
        return ["1=1"]
    first = f"{column} < {cuts[0]}"
    last = f"{column} >= {cuts[-1]}"
    middle = [f"{column} >= {low} AND {column} < {high}" for low, high in pairwise(cuts)]
    return [first, *middle, last]


def even_cuts(low: int, high: int, number: int) -> list[int]:
    """Where to cut [low, high] into `number` ranges of about the same length; no cut twice."""
    span = high - low + 1
    return sorted({low + span * part // number for part in range(1, number)} - {low})


@dataclass(frozen=True)
class Slice:
    """A part of a column's values.

    Attributes:
        low: The least that a row has.
        high: The greatest that a row has.
        rows: How many rows there are, estimated.
    """

    low: int
    high: int
    rows: float


def cut_into_halves(
    full: Slice, number: int, least: int, look: Callable[[int, int], Slice | None]
) -> list[Slice]:
    """Cut by halving the slice with most rows, again and again, into about `number` slices.

    Args:
        full: All rows.
        number: How many slices are wanted.
        least: Slices of no more rows are not cut.
        look: The slice of the rows from one value to another, which it may have.

    Returns:
        The slices in order; what lies between two of them has no rows.
    """
    slices = [full]
    while slices and len(slices) < number:
        deepest = max(slices, key=lambda part: part.rows if part.low < part.high else 0.0)
        if deepest.low == deepest.high or deepest.rows <= least:
            break
        middle = (deepest.low + deepest.high) // 2
        slices.remove(deepest)
        halves = look(deepest.low, middle), look(middle + 1, deepest.high)
        slices += [half for half in halves if half is not None]
    return sorted(slices, key=lambda part: part.low)


def deep_cuts(slices: Sequence[Slice], number: int) -> list[int]:
    """Where to cut slices in order into `number` ranges of about the same number of rows."""
    depth = sum(part.rows for part in slices) / number
    reached = 0.0
    cuts: list[int] = []
    for part in slices:
        while len(cuts) < number - 1 and reached + part.rows >= depth * (len(cuts) + 1):
            share = (depth * (len(cuts) + 1) - reached) / part.rows
            cuts.append(part.low + math.ceil((part.high - part.low + 1) * share))
        reached += part.rows
    return list(dict.fromkeys(cuts))
