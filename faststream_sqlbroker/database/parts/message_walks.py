"""Ranges of one index over messages that match a filter, in the index's order.

Filters that are not in the index are checked row by row. The position of the last row to check
is found in the index first, so that a statement reads a limited number of rows, however few of
them match.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    LargeBinary,
    Select,
    String,
    Table,
    Text,
    and_,
    case,
    cast,
    func,
    literal,
    literal_column,
    null,
    or_,
    select,
    text,
    tuple_,
    type_coerce,
)
from sqlalchemy.types import NullType

from faststream_sqlbroker.core.states import ARCHIVED_STATES, CLAIMABLE_STATES, MessageState
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.core.times import MAX_TIMESTAMP, MIN_TIMESTAMP
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.claimed_rows import REQUIRED_TIMES
from faststream_sqlbroker.schema.types import MYSQL, UtcTimestamp, clock, later

MAX_SCANNED = 20_000
"""Maximum rows that a page scans if an index does not contain all filters."""
STEP_SIZE = 2_000
"""Maximum rows of these that one statement scans, so that none lasts long: on a busy machine MySQL
reads some 12 000 rows a second that lie far apart.
"""
UNCOMPLETED_STATES = ARCHIVED_STATES - {MessageState.COMPLETED}
_UNCOMPLETED = "state <> 'COMPLETED'"
"""The condition of the archive's partial index."""
_CLAIMABLE = text("state IN ('PENDING', 'RETRYABLE')")
_LEASED = text("state = 'PROCESSING'")
_ONE: Any = literal_column("1")
_UNFILTERED_BY_QUEUE = frozenset({"all", "ended"})
"""Names of index ranges that a queue does not narrow."""
Position = Sequence[Any]
"""The values of the order columns of an index range in one row."""


@dataclass(frozen=True)
class IndexRange:
    """A range of an index of a table, in the order of the index."""

    name: str
    """Name in a cursor, for example "leased", or "ready" and a priority."""
    table: Table
    index: str | None
    where: Sequence[Any]
    order: Sequence[ColumnElement[Any]]
    descending: bool = False

    def select(self, dialect: DialectOperations, columns: Sequence[Any]) -> Select[Any]:
        """Select the rows of the range in index order."""
        statement = select(*columns).select_from(self.table).where(*self.where)
        statement = dialect.add_index_hint(statement, self.table, self.index, on_sqlite=True)
        return statement.order_by(*(c.desc() if self.descending else c.asc() for c in self.order))

    def build_after(
        self, position: Position, dialect: DialectOperations, *, inclusive: bool = False
    ) -> Any:
        """Return the condition that a row comes after `position`, or is there if `inclusive`.

        A position has the values of all order columns of a row; the first column that differs
        decides. Each form of the condition is for databases that seek to the position in the index
        only with this form, and otherwise read all rows before.
        """
        column = self.order[0]
        value = position[0]
        if len(self.order) == 1:
            # No OR: PostgreSQL's generic plans would not use it for the index range, and read on to
            # the end of the table.
            return _compare(column, value, descending=self.descending, inclusive=inclusive)
        if dialect.has_row_ranges:
            # The index seeks to the row. With an OR it would seek to the first column's value, and
            # many messages may be due at the same time.
            position_values = [
                literal(v, c.type) for c, v in zip(self.order, position, strict=True)
            ]
            return _compare(
                tuple_(*self.order),
                tuple_(*position_values),
                descending=self.descending,
                inclusive=inclusive,
            )
        edge = _compare(column, value, descending=self.descending, inclusive=True)
        after_value = _compare(column, value, descending=self.descending, inclusive=False)
        remaining_range = IndexRange("", self.table, None, (), self.order[1:], self.descending)
        # The first part is the index range; the second excludes rows at its edge.
        return and_(
            edge,
            or_(
                after_value, remaining_range.build_after(position[1:], dialect, inclusive=inclusive)
            ),
        )

    def build_until(self, position: Position, dialect: DialectOperations) -> Any:
        """Return the condition that a row comes before `position` or is there."""
        reversed_range = IndexRange("", self.table, None, (), self.order, not self.descending)
        return reversed_range.build_after(position, dialect, inclusive=True)


def _compare(column: Any, value: Any, *, descending: bool, inclusive: bool) -> Any:
    """Return the condition that `column` comes after `value` in the order of the index."""
    if descending:
        return column <= value if inclusive else column < value
    return column >= value if inclusive else column > value


def get_readable_columns(table: Table, names: Sequence[str], database: str) -> list[Any]:
    """Return the columns `names` of `table` in a form in which no value makes a row unreadable.

    Another program may have stored anything. Headers stay as stored. In SQLite, whose columns take
    any value, an invalid time counts as now if the time is required, and as NULL otherwise, as in a
    claim.
    """
    return [_get_readable_column(table.c[name], database).label(name) for name in names]


def _get_readable_column(column: Any, database: str) -> Any:
    """Return the column as an expression that gives a readable value for every row.

    Another program may have stored a value at which the driver would fail: that would make the
    whole page unreadable.
    """
    if column.name == "headers":
        # asyncpg and psycopg would decode jsonb with the engine's own `json_deserializer`.
        as_text = database == "postgresql"
        return cast(column, Text) if as_text else type_coerce(column, NullType())
    if database != "sqlite" or not isinstance(column.type, UtcTimestamp):
        return column
    is_in_range = column.between(
        literal_column(str(MIN_TIMESTAMP)), literal_column(str(MAX_TIMESTAMP))
    )
    is_time = and_(func.typeof(column) == "integer", is_in_range)
    other: Any = clock() if column.name in REQUIRED_TIMES else null()
    return type_coerce(case((is_time, column), else_=other), UtcTimestamp())


class RangeReader:
    """Reads the rows of an index range for a page."""

    def __init__(
        self,
        dialect: DialectOperations,
        index_range: IndexRange,
        position: Position | None,
        filters: Filters,
        conditions: Sequence[Any] = (),
    ) -> None:
        """Read after `position`, or from the start for None; add `conditions` to the filters.

        Filters that the index of the range contains are part of the range. The others are checked
        row by row, in steps of limited size.
        """
        self._dialect = dialect
        self._range = index_range
        self._after = [] if position is None else [index_range.build_after(position, dialect)]
        outside_index = _list_conditions(index_range, filters, dialect.name)
        self._conditions = [*to_unindexed(outside_index), *conditions]
        self.table = index_range.table
        self.order = [str(column.key) for column in index_range.order]
        self._read_count = 0
        c = index_range.table.c
        time_column = c.archived_at if filters.archived else c.created_at
        self._time_column = _get_readable_column(time_column, dialect.name)

    def _select_rows(self, *columns: Any) -> Select[Any]:
        return self._range.select(self._dialect, columns).where(*self._after)

    def read_rows(
        self, connection: Connection, names: Sequence[str], capacity: int, budget: int
    ) -> tuple[Sequence[Any], Position | None]:
        """Return up to `capacity` + 1 rows, and the position of the last scanned row.

        The additional row shows that another page follows. With filters that the index does not
        contain, at most `budget` rows are scanned, so there may be fewer matches although more
        follow. The position is None if no rows follow, or if nothing had to be filtered.
        """
        columns = get_readable_columns(self._range.table, names, self._dialect.name)
        if not self._conditions:
            return connection.execute(self._select_rows(*columns).limit(capacity + 1)).all(), None
        results: list[Any] = []
        scanned_to = None
        for select_matching, position in self.iter_steps(connection, budget):
            scanned_to = position
            statement = select_matching(*columns).limit(capacity + 1 - len(results))
            results += connection.execute(statement).all()
            if len(results) > capacity:
                break
        return results, scanned_to

    def iter_steps(
        self, connection: Connection, budget: int
    ) -> Iterator[tuple[Callable[..., Select[Any]], Position | None]]:
        """Yield steps of the range, `budget` rows in all, as a select and the step's last position.

        The select finds the matching rows of the step; a step has at most `STEP_SIZE` rows, so that
        no statement lasts long. The position is None where the range ends. The caller may stop
        early: each step is read only when it is requested.
        """
        remaining = max(budget, 1)
        while True:
            step = min(STEP_SIZE, remaining)
            end = self._find_step_end(connection, step)
            conditions = (
                self._conditions
                if end is None
                else [*self._conditions, self._range.build_until(end, self._dialect)]
            )
            yield lambda *columns, where=conditions: self._select_rows(*columns).where(*where), end
            if end is None:
                return
            self._read_count += step
            remaining -= STEP_SIZE
            if remaining <= 0:
                return
            self._after = [self._range.build_after(end, self._dialect)]

    def _find_step_end(self, connection: Connection, step: int) -> Position | None:
        """Return the position `step` rows ahead, or None if the range ends before.

        Read in the index alone, so that the number of rows of a step is limited, however few of
        them match the filters.
        """
        columns = get_readable_columns(self.table, self.order, self._dialect.name)
        row = connection.execute(self._select_rows(*columns).limit(1).offset(step - 1)).first()
        return None if row is None else tuple(row)

    def count_scanned(self, connection: Connection) -> int:
        """Return how many rows were scanned, after the range has ended.

        The caller subtracts them from the budget of the next range. Without filters beyond the
        index, no row is scanned in vain: 0.
        """
        if not self._conditions:
            return 0
        # The last step ended before its limit: count its rows in the index.
        counted = self._select_rows(literal_column("1").label("one")).limit(STEP_SIZE).subquery()
        counting = select(func.count()).select_from(counted)
        return self._read_count + int(connection.execute(counting).scalar_one())

    def get_time(self, connection: Connection, position: Position) -> datetime | None:
        """Return when the message at `position` was created or archived.

        A page that ends there shows how far the search has come. None if the row is gone.
        """
        statement = select(self._time_column).where(self._range.table.c.id == position[-1])
        timestamp: datetime | None = connection.execute(statement).scalar()
        return timestamp


def iter_index_ranges(
    connection: Connection, dialect: DialectOperations, filters: Filters
) -> Iterator[IndexRange]:
    """Yield the index ranges that contain all messages matching `filters`, each message once.

    The filters decide which index is used: a filter that the index contains need not be checked row
    by row. The caller reads one range after another.
    """
    if filters.archived:
        yield get_archive_range(dialect, filters)
        return
    c = dialect.tables.message.c
    if filters.queue is None:
        yield IndexRange("all", dialect.tables.message, None, (), (c.id,), descending=True)
    elif filters.key is not None:
        where = (c.queue == filters.queue, c.key == filters.key)
        yield IndexRange("key", dialect.tables.message, "key_index", where, (c.id,))
    else:
        yield from _iter_queue_ranges(connection, dialect, filters.queue, filters.state)


def _iter_queue_ranges(
    connection: Connection, dialect: DialectOperations, queue: str, state: MessageState | None
) -> Iterator[IndexRange]:
    """Yield the leased messages, then the waiting messages in the order of claims.

    No index contains both. The waiting messages are a range for each priority.
    """
    table = dialect.tables.message
    c = table.c
    mysql = dialect.name in MYSQL
    if state in {None, MessageState.PROCESSING}:
        lease_filter = text("lease_expires_at IS NOT NULL") if mysql else _LEASED
        queue_conditions = (c.queue == queue, lease_filter)
        yield IndexRange(
            "leased", table, "leased_index", queue_conditions, (c.lease_expires_at, c.id)
        )
    if state is None or state in CLAIMABLE_STATES:
        claimable = text("claimable = 1") if mysql else _CLAIMABLE
        for pair in dialect.find_ready_pairs(connection, [queue]):
            pair_conditions = (claimable, c.queue == queue, c.priority == pair.priority)
            name = f"ready {pair.priority}"
            yield IndexRange(name, table, "ready_index", pair_conditions, (c.next_attempt_at, c.id))


def get_archive_range(dialect: DialectOperations, filters: Filters) -> IndexRange:
    """Return the range of archived messages, the last archived first.

    Chooses the index that excludes most rows by the filters. The filters that it does not contain
    are checked row by row.
    """
    table = dialect.archive
    c = table.c
    where = list(_iter_time_conditions(c.archived_at, filters))
    index = "archived_index"
    if filters.ids:
        where.insert(0, c.id.in_(filters.ids))
        return IndexRange("all", table, None, where, (c.archived_at, c.id), descending=True)
    if filters.state in UNCOMPLETED_STATES:
        # Also with a queue: a queue may have many more COMPLETED messages.
        where.insert(0, match_ended_state(dialect, filters.state))
        return IndexRange(
            "ended", table, "uncompleted_index", where, (c.archived_at, c.id), descending=True
        )
    if filters.queue is not None:
        where.insert(0, c.queue == filters.queue)
        index = "archive_queue_index"
    return IndexRange("archive", table, index, where, (c.archived_at, c.id), descending=True)


def match_ended_state(dialect: DialectOperations, state: MessageState) -> ColumnElement[bool]:
    """Return the condition of archived messages in a state of `UNCOMPLETED_STATES`.

    A partial index contains only these. A database that does not conclude from the state that it
    may use the index gets the condition of the index, too.
    """
    # A literal, so that generic plans can use the partial index.
    of_state = literal_column("state") == literal_column(f"'{state.name}'")
    return of_state if dialect.knows_implied else and_(of_state, text(_UNCOMPLETED))


def _iter_time_conditions(column: Any, filters: Filters) -> Iterator[Any]:
    """Yield the conditions of the filters `since` and `until` on `column`."""
    if filters.since is not None:
        yield column >= _to_timestamp(filters.since)
    if filters.until is not None:
        yield column < _to_timestamp(filters.until)


def _to_timestamp(value: datetime | float) -> Any:
    """Return a time; a number is that many seconds ago by the database's clock."""
    if isinstance(value, datetime):
        return value
    return later(literal_column(str(-round(value * 1_000_000))))


def build_conditions(table: Table, filters: Filters, database: str) -> list[Any]:
    """Return all of `filters` as conditions for rows of `table` that are found by their ids.

    In a form that no index serves, so that the database does find them by their ids.
    """
    conditions = _list_conditions(IndexRange("all", table, None, (), ()), filters, database)
    if filters.archived:
        conditions += _iter_time_conditions(table.c.archived_at, filters)
    return to_unindexed(conditions)


def to_unindexed(conditions: list[Any]) -> list[Any]:
    """Return the same conditions in a form that no index serves.

    For rows that the statement finds in another way, such as by id. Trap: without fresh statistics
    PostgreSQL takes the index of a queue that it has not seen yet, or, from 17 on, of all waiting
    messages, and reads a million rows of it to find the few between two ids.
    """
    if not conditions:
        return []
    return [case((and_(*conditions), _ONE), else_=literal_column("0")) == _ONE]


def _list_conditions(index_range: IndexRange, filters: Filters, database: str) -> list[Any]:
    """Return the conditions of the filters that the index range does not contain already.

    The database checks these row by row.
    """
    c = index_range.table.c
    conditions = list(_iter_equal_conditions(index_range, filters))
    if filters.reason is not None and database in MYSQL:
        # Compared as bytes: as text, values that differ only in trailing spaces would be equal.
        conditions.append(cast(c.reason, LargeBinary) == filters.reason.encode())
    if filters.error is not None:
        conditions.append(_build_contains(c.last_error, filters.error, database))
    conditions += [
        _match_header(index_range, database, *header) for header in filters.headers.items()
    ]
    if not filters.archived:
        conditions += _iter_time_conditions(c.created_at, filters)
    return conditions


def _iter_equal_conditions(index_range: IndexRange, filters: Filters) -> Iterator[Any]:
    """Yield the filters that compare a column with a value.

    Except those that the index range contains already: its rows all have that value.
    """
    c = index_range.table.c
    if filters.state is not None and not _is_state_covered(index_range, filters.state):
        yield c.state == filters.state.name
    if filters.queue is not None and index_range.name in _UNFILTERED_BY_QUEUE:
        yield c.queue == filters.queue
    if filters.key is not None and index_range.name != "key":
        yield c.key == filters.key
    if filters.reason is not None:
        yield c.reason == filters.reason
    if filters.fingerprint is not None:
        yield c.error_fingerprint == filters.fingerprint


def _is_state_covered(index_range: IndexRange, state: MessageState) -> bool:
    """Return True if the index range contains only messages in `state`."""
    return index_range.name == "ended" or (
        index_range.name == "leased" and state is MessageState.PROCESSING
    )


def _build_contains(column: Any, part: str, database: str) -> Any:
    """Return the condition that the text of the column contains `part`, case-sensitively.

    LIKE would take "A" for "a" in SQLite.
    """
    if database == "sqlite":
        return func.instr(column, part) > 0
    return column.contains(part, autoescape=True)


def _match_header(index_range: IndexRange, database: str, name: str, value: str) -> Any:
    """Return the condition that the header `name` has this text, whatever characters the name has.

    The text may also be that of a JSON number, true or false.
    """
    headers = index_range.table.c.headers
    if database == "postgresql":
        return headers[name].as_string() == value
    if database in MYSQL:
        # The quoted name in a path is a JSON string itself.
        path = f"$.{json.dumps(name, ensure_ascii=False)}"
        extracted = func.json_extract(headers, path)
        # Compared as bytes: as text, values that differ only in trailing spaces would be equal.
        is_equal = cast(func.json_unquote(extracted), LargeBinary) == value.encode()
        return and_(func.json_type(extracted) != "NULL", is_equal)
    # Another program may have stored invalid JSON, which would raise an error. SQLite's paths
    # cannot express a quote.
    valid_headers = case((func.json_valid(headers) == 1, headers))
    entry = func.json_each(valid_headers).table_valued("key", "value", "type")
    # SQLite returns true as the number 1.
    logical = entry.c.type.in_(("true", "false"))
    entry_text = case((logical, entry.c.type), else_=cast(entry.c.value, String))
    return select(entry.c.key).where(entry.c.key == name, entry_text == value).exists()
