"""Walks: ranges of one index over messages that match a filter, in the index's order.

Filters that the index does not know are checked row by row: the position of the last row that may
be looked at is found in the index first, so that a statement reads a limited number of rows,
however few of them match.
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
from faststream_sqlbroker.core.times import FIRST_MOMENT, LAST_MOMENT
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.claimed_rows import NEEDED_TIMES
from faststream_sqlbroker.schema.types import MYSQL, UtcTimestamp, clock, later

SCANNED = 20_000
"""Rows that a page looks at, at most, if an index does not know all filters."""
STEP = 2_000
"""Rows of these that one statement looks at, so that none lasts long: on a busy machine MySQL reads
some 12 000 rows a second that lie far apart."""
UNCOMPLETED_STATES = ARCHIVED_STATES - {MessageState.COMPLETED}
_UNCOMPLETED = "state <> 'COMPLETED'"
"""The condition of the archive's partial index."""
_CLAIMABLE = text("state IN ('PENDING', 'RETRYABLE')")
_LEASED = text("state = 'PROCESSING'")
_ONE: Any = literal_column("1")
_OF_ALL_QUEUES = frozenset({"all", "ended"})
"""Names of walks that a queue does not narrow."""
Position = Sequence[Any]
"""The values of a walk's order columns in one row."""


@dataclass(frozen=True)
class Walk:
    """A range of one index of a table, in the index's order."""

    name: str
    """Names it in a cursor: "leased", or "ready" and its priority, and so on."""
    table: Table
    index: str | None
    where: Sequence[Any]
    order: Sequence[ColumnElement[Any]]
    falling: bool = False

    def select(self, dialect: Operations, columns: Sequence[Any]) -> Select[Any]:
        """The rows of the range, in its order."""
        statement = select(*columns).select_from(self.table).where(*self.where)
        statement = dialect.use_index(statement, self.table, self.index, on_sqlite=True)
        return statement.order_by(*(c.desc() if self.falling else c.asc() for c in self.order))

    def beyond(self, position: Position, dialect: Operations, *, inclusive: bool = False) -> Any:
        """Whether a row comes after `position`; with `inclusive`, the row there, too."""
        column = self.order[0]
        value = position[0]
        if len(self.order) == 1:
            # No OR: PostgreSQL's generic plans take none for the range of an index, and then read
            # on to the end of the table.
            return _behind(column, value, falling=self.falling, inclusive=inclusive)
        if dialect.ranges_by_rows:
            # The index goes to the row. With an OR it goes to the first column's value, and of
            # messages that are due at the same moment there may be many.
            there = [literal(v, c.type) for c, v in zip(self.order, position, strict=True)]
            return _behind(
                tuple_(*self.order), tuple_(*there), falling=self.falling, inclusive=inclusive
            )
        edge = _behind(column, value, falling=self.falling, inclusive=True)
        further = _behind(column, value, falling=self.falling, inclusive=False)
        rest = Walk("", self.table, None, (), self.order[1:], self.falling)
        # The first part is the range of the index; the second leaves out rows at its edge.
        return and_(edge, or_(further, rest.beyond(position[1:], dialect, inclusive=inclusive)))

    def up_to(self, position: Position, dialect: Operations) -> Any:
        """Whether a row comes before `position` or is there."""
        backwards = Walk("", self.table, None, (), self.order, not self.falling)
        return backwards.beyond(position, dialect, inclusive=True)


def _behind(here: Any, there: Any, *, falling: bool, inclusive: bool) -> Any:
    if falling:
        return here <= there if inclusive else here < there
    return here >= there if inclusive else here > there


def shown_columns(table: Table, names: Sequence[str], database: str) -> list[Any]:
    """The columns `names` of `table`, so that no value makes a row unreadable.

    Another program may have stored anything: headers come as they are, and in SQLite, whose columns
    take any value, what is no time counts as now if it is needed, else as NULL, as for a claim.
    """
    return [_shown(table.c[name], database).label(name) for name in names]


def _shown(column: Any, database: str) -> Any:
    if column.name == "headers":
        # asyncpg and psycopg would decode jsonb with the engine's own `json_deserializer`.
        as_text = database == "postgresql"
        return cast(column, Text) if as_text else type_coerce(column, NullType())
    if database != "sqlite" or not isinstance(column.type, UtcTimestamp):
        return column
    known = column.between(literal_column(str(FIRST_MOMENT)), literal_column(str(LAST_MOMENT)))
    is_time = and_(func.typeof(column) == "integer", known)
    other: Any = clock() if column.name in NEEDED_TIMES else null()
    return type_coerce(case((is_time, column), else_=other), UtcTimestamp())


class Part:
    """What one walk gives to a page."""

    def __init__(
        self,
        dialect: Operations,
        walk: Walk,
        at: Position | None,
        filters: Filters,
        extra: Sequence[Any] = (),
    ) -> None:
        """Read on behind the position `at`; None: from the begin. `extra` are more conditions."""
        self._dialect = dialect
        self._walk = walk
        self._beyond = [] if at is None else [walk.beyond(at, dialect)]
        self._extra = [*_unindexed(walk, filters, dialect.name), *extra]
        self.table = walk.table
        self.order = [str(column.key) for column in walk.order]
        self._looked_at = 0
        c = walk.table.c
        moment = c.archived_at if filters.archived else c.created_at
        self._moment = _shown(moment, dialect.name)

    def _rows(self, *columns: Any) -> Select[Any]:
        return self._walk.select(self._dialect, columns).where(*self._beyond)

    def read(
        self, connection: Connection, names: Sequence[str], room: int, budget: int
    ) -> tuple[Sequence[Any], Position | None]:
        """Up to `room` + 1 rows; and the position of the last row that may be looked at, if there
        are rows behind it.
        """
        columns = shown_columns(self._walk.table, names, self._dialect.name)
        if not self._extra:
            return connection.execute(self._rows(*columns).limit(room + 1)).all(), None
        found: list[Any] = []
        end = None
        for rows, at in self.steps(connection, budget):
            end = at
            statement = rows(*columns).limit(room + 1 - len(found))
            found += connection.execute(statement).all()
            if len(found) > room:
                break
        return found, end

    def steps(
        self, connection: Connection, budget: int
    ) -> Iterator[tuple[Callable[..., Select[Any]], Position | None]]:
        """Stretches of the walk, `budget` rows in all: a select of the matching rows in it, and the
        position of its last row; None: the walk ends there.
        """
        left = max(budget, 1)
        while True:
            step = min(STEP, left)
            end = self._end(connection, step)
            conditions = (
                self._extra if end is None else [*self._extra, self._walk.up_to(end, self._dialect)]
            )
            yield lambda *columns, where=conditions: self._rows(*columns).where(*where), end
            if end is None:
                return
            self._looked_at += step
            left -= STEP
            if left <= 0:
                return
            self._beyond = [self._walk.beyond(end, self._dialect)]

    def _end(self, connection: Connection, step: int) -> Position | None:
        """The position `step` rows ahead; None: the walk ends before."""
        columns = shown_columns(self.table, self.order, self._dialect.name)
        row = connection.execute(self._rows(*columns).limit(1).offset(step - 1)).first()
        return None if row is None else tuple(row)

    def looked_at(self, connection: Connection) -> int:
        """How many rows were looked at, once the walk has ended."""
        if not self._extra:
            return 0
        # The last step ended before its limit: it is counted, in the index.
        counted = self._rows(literal_column("1").label("one")).limit(STEP).subquery()
        counting = select(func.count()).select_from(counted)
        return self._looked_at + int(connection.execute(counting).scalar_one())

    def time_of(self, connection: Connection, position: Position) -> datetime | None:
        """When the message there was created or archived; None: it has just gone."""
        statement = select(self._moment).where(self._walk.table.c.id == position[-1])
        moment: datetime | None = connection.execute(statement).scalar()
        return moment


def walks_of(connection: Connection, dialect: Operations, filters: Filters) -> Iterator[Walk]:
    """The walks in which all messages are that match `filters`, each message in one of them."""
    if filters.archived:
        yield archive_walk(dialect, filters)
        return
    c = dialect.tables.message.c
    if filters.queue is None:
        yield Walk("all", dialect.tables.message, None, (), (c.id,), falling=True)
    elif filters.key is not None:
        where = (c.queue == filters.queue, c.key == filters.key)
        yield Walk("key", dialect.tables.message, "key_index", where, (c.id,))
    else:
        yield from _queue_walks(connection, dialect, filters.queue, filters.state)


def _queue_walks(
    connection: Connection, dialect: Operations, queue: str, state: MessageState | None
) -> Iterator[Walk]:
    """What is leased, then what waits in the order of claims."""
    table = dialect.tables.message
    c = table.c
    mysql = dialect.name in MYSQL
    if state in {None, MessageState.PROCESSING}:
        leased = text("lease_expires_at IS NOT NULL") if mysql else _LEASED
        of_queue = (c.queue == queue, leased)
        yield Walk("leased", table, "leased_index", of_queue, (c.lease_expires_at, c.id))
    if state is None or state in CLAIMABLE_STATES:
        claimable = text("claimable = 1") if mysql else _CLAIMABLE
        for pair in dialect.ready_pairs(connection, [queue]):
            of_pair = (claimable, c.queue == queue, c.priority == pair.priority)
            name = f"ready {pair.priority}"
            yield Walk(name, table, "ready_index", of_pair, (c.next_attempt_at, c.id))


def archive_walk(dialect: Operations, filters: Filters) -> Walk:
    """That of archived messages, the last archived first."""
    table = dialect.tables.archive
    assert table is not None  # noqa: S101 - the store has looked
    c = table.c
    where = list(_between(c.archived_at, filters))
    index = "archived_index"
    if filters.ids:
        where.insert(0, c.id.in_(filters.ids))
        return Walk("all", table, None, where, (c.archived_at, c.id), falling=True)
    if filters.state in UNCOMPLETED_STATES:
        # Also with a queue: of a queue there may be many more that were COMPLETED.
        where.insert(0, ended_as(dialect, filters.state))
        return Walk("ended", table, "uncompleted_index", where, (c.archived_at, c.id), falling=True)
    if filters.queue is not None:
        where.insert(0, c.queue == filters.queue)
        index = "archive_queue_index"
    return Walk("archive", table, index, where, (c.archived_at, c.id), falling=True)


def ended_as(dialect: Operations, state: MessageState) -> ColumnElement[bool]:
    """The condition for archived messages of one of `UNCOMPLETED_STATES`, by their own index."""
    # A literal, for generic plans.
    of_state = literal_column("state") == literal_column(f"'{state.name}'")
    return of_state if dialect.knows_implied else and_(of_state, text(_UNCOMPLETED))


def _between(column: Any, filters: Filters) -> Iterator[Any]:
    if filters.since is not None:
        yield column >= _moment(filters.since)
    if filters.until is not None:
        yield column < _moment(filters.until)


def _moment(value: datetime | float) -> Any:
    if isinstance(value, datetime):
        return value
    return later(literal_column(str(-round(value * 1_000_000))))


def conditions_of(table: Table, filters: Filters, database: str) -> list[Any]:
    """All that `filters` say, as conditions for rows of `table` that are found by their ids."""
    found = _conditions(Walk("all", table, None, (), ()), filters, database)
    if filters.archived:
        found += _between(table.c.archived_at, filters)
    return row_by_row(found)


def _unindexed(walk: Walk, filters: Filters, database: str) -> list[Any]:
    """The conditions that the walk's index does not know."""
    return row_by_row(_conditions(walk, filters, database))


def row_by_row(conditions: list[Any]) -> list[Any]:
    """The same, in a form that no index serves.

    Trap: without fresh statistics PostgreSQL takes the index of a queue that it has not seen yet,
    or, from 17 on, of all that wait, and reads a million rows of it to find the few between two
    ids.
    """
    if not conditions:
        return []
    return [case((and_(*conditions), _ONE), else_=literal_column("0")) == _ONE]


def _conditions(walk: Walk, filters: Filters, database: str) -> list[Any]:
    c = walk.table.c
    found = list(_equal(walk, filters))
    if filters.reason is not None and database in MYSQL:
        # As texts, those that differ in spaces at their end would be equal.
        found.append(cast(c.reason, LargeBinary) == filters.reason.encode())
    if filters.error is not None:
        found.append(_contains(c.last_error, filters.error, database))
    found += [_header(walk, database, *each) for each in filters.headers.items()]
    if not filters.archived:
        found += _between(c.created_at, filters)
    return found


def _equal(walk: Walk, filters: Filters) -> Iterator[Any]:
    """The filters that compare a column with one value, unless the walk's range does so."""
    c = walk.table.c
    if filters.state is not None and not _only(walk, filters.state):
        yield c.state == filters.state.name
    if filters.queue is not None and walk.name in _OF_ALL_QUEUES:
        yield c.queue == filters.queue
    if filters.key is not None and walk.name != "key":
        yield c.key == filters.key
    if filters.reason is not None:
        yield c.reason == filters.reason
    if filters.fingerprint is not None:
        yield c.error_fingerprint == filters.fingerprint


def _only(walk: Walk, state: MessageState) -> bool:
    return walk.name == "ended" or (walk.name == "leased" and state is MessageState.PROCESSING)


def _contains(column: Any, part: str, database: str) -> Any:
    """Whether the text has this part, in these letters: LIKE in SQLite takes "A" for "a"."""
    if database == "sqlite":
        return func.instr(column, part) > 0
    return column.contains(part, autoescape=True)


def _header(walk: Walk, database: str, name: str, value: str) -> Any:
    """Whether the header `name` is this text, whatever characters the name has; or a number, or
    true or false, that JSON writes so.
    """
    headers = walk.table.c.headers
    if database == "postgresql":
        return headers[name].as_string() == value
    if database in MYSQL:
        # A path's name in quotes is a JSON text of its own.
        path = f"$.{json.dumps(name, ensure_ascii=False)}"
        found = func.json_extract(headers, path)
        # Bytes: as texts, those that differ in spaces at their end would be equal.
        same = cast(func.json_unquote(found), LargeBinary) == value.encode()
        return and_(func.json_type(found) != "NULL", same)
    # Another program may have stored there what is not JSON, which would be an error. SQLite's
    # paths have no way to write a quote.
    known = case((func.json_valid(headers) == 1, headers))
    each = func.json_each(known).table_valued("key", "value", "type")
    # Its value of true is the number 1.
    logical = each.c.type.in_(("true", "false"))
    shown = case((logical, each.c.type), else_=cast(each.c.value, String))
    return select(each.c.key).where(each.c.key == name, shown == value).exists()
