"""Which messages a job visits: those that match its filter, in an order that its own changes leave
as it is.

Live messages are visited by id, archived ones by when they were archived, none behind the last row
of the dry run: a message that fails again is not met again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Select, String, cast, func, select, text

from faststream_sqlbroker.core.jobs import OF_ARCHIVE, REPLAY, Job, Position
from faststream_sqlbroker.core.replays import SCOPE
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.message_walks import (
    SCANNED,
    Part,
    Walk,
    archive_walk,
    conditions_of,
    row_by_row,
    shown_columns,
)
from faststream_sqlbroker.schema.types import MYSQL

CLAIMABLE = row_by_row([text("state IN ('PENDING', 'RETRYABLE')")])


def last_row(connection: Connection, dialect: Operations, action: str) -> Position | None:
    """The last row that there is now in the order of the job; None: there is none."""
    table = _table(dialect, action)
    column = table.c.archived_at if action in OF_ARCHIVE else table.c.id
    found = connection.execute(select(func.max(column))).scalar_one()
    return None if found is None else [found]


def states_of(
    connection: Connection, dialect: Operations, ids: Sequence[int]
) -> dict[int, MessageState]:
    """Read the states of the messages, live or archived."""
    states: dict[int, MessageState] = {}
    for table in (dialect.tables.archive, dialect.tables.message):
        if table is not None:
            these = select(table.c.id, table.c.state).where(table.c.id.in_(ids))
            states.update((i, MessageState[name]) for i, name in connection.execute(these))
    return states


def visit(
    connection: Connection, dialect: Operations, job: Job, size: int
) -> tuple[list[int], Position | None]:
    """Find the next `size` messages: their ids, and the position of the last; None: there are no
    more, or they reach the job's limit.
    """
    rows, after, _ = read(connection, dialect, job, size)
    return [row.id for row in rows], after


def read(
    connection: Connection, dialect: Operations, job: Job, size: int, names: Sequence[str] = ()
) -> tuple[Sequence[Any], Position | None, Position | None]:
    """Read the next `size` messages, up to the job's limit: their positions and the columns
    `names`. It looks at 20 000 rows at most.

    Returns:
        The rows; where to go on behind them, None: nowhere; and the position of the last one if
        the limit is reached.
    """
    room = None if job.limit is None else job.limit - job.visited
    size = size if room is None else min(size, room)
    part = _part(dialect, job)
    # The order ends with the id.
    rows, end = part.read(connection, [*part.order, *names], size, SCANNED)
    # One row more was read, which tells whether the walk goes on.
    if len(rows) < size or not rows:
        return rows, end, None
    last = [getattr(rows[size - 1], name) for name in part.order]
    if room == size:
        return rows[:size], None, last
    return rows[:size], last if len(rows) > size else end, None


def lock(
    connection: Connection, dialect: Operations, job: Job, ids: Sequence[int], names: Sequence[str]
) -> Sequence[Any]:
    """As `matching`, but lock the messages; skip what another transaction has locked."""
    statement = _matching(dialect, job, ids, names).with_for_update(skip_locked=True)
    return connection.execute(statement).all()


def matching(
    connection: Connection, dialect: Operations, job: Job, ids: Sequence[int], names: Sequence[str]
) -> Sequence[Any]:
    """Read the columns `names` of the messages that still match, by id."""
    return connection.execute(_matching(dialect, job, ids, names)).all()


def _matching(
    dialect: Operations, job: Job, ids: Sequence[int], names: Sequence[str]
) -> Select[Any]:
    table = _table(dialect, job.action)
    columns = shown_columns(table, names, dialect.name)
    statement = select(*columns).where(table.c.id.in_(ids), *_conditions(dialect, job))
    if dialect.name in MYSQL:
        # Else a row that it looks at on its way could be locked as well.
        statement = statement.with_hint(table, "FORCE INDEX (PRIMARY)", dialect.name)
    return statement.order_by(table.c.id)


def _conditions(dialect: Operations, job: Job) -> list[Any]:
    assert job.filters is not None  # noqa: S101 - only an undo has none
    found = conditions_of(_table(dialect, job.action), job.filters, dialect.name)
    return found if job.action in OF_ARCHIVE else [*found, *CLAIMABLE]


def _part(dialect: Operations, job: Job) -> Part:
    assert job.filters is not None  # noqa: S101 - only an undo has none
    walk = _walk(dialect, job, job.filters)
    extra: list[Any] = [] if job.action in OF_ARCHIVE else [*CLAIMABLE]
    if job.action == REPLAY:
        extra.append(_not_replayed(dialect, walk, job))
    return Part(dialect, walk, job.cursor, job.filters, extra)


def _walk(dialect: Operations, job: Job, filters: Filters) -> Walk:
    bound = job.bound or [None]
    if job.action in OF_ARCHIVE:
        walk = replace(archive_walk(dialect, filters), falling=False)
        # The bound of a limit has the id, too: many messages are archived at the same moment.
        until = replace(walk, order=walk.order[: len(bound)]).up_to(bound, dialect)
        return replace(walk, where=[*walk.where, until])
    c = dialect.tables.message.c
    up_to = c.id <= bound[0]
    if filters.ids:
        of_ids = (c.id.in_(filters.ids), up_to)
        return Walk("all", dialect.tables.message, None, of_ids, (c.id,))
    if filters.queue is not None and filters.key is not None:
        where = (c.queue == filters.queue, c.key == filters.key, up_to)
        return Walk("key", dialect.tables.message, "key_index", where, (c.id,))
    return Walk("all", dialect.tables.message, None, (up_to,), (c.id,))


def _not_replayed(dialect: Operations, walk: Walk, job: Job) -> Any:
    """Whether no run of the replay has published the row, here or in Spark."""
    mark = dialect.tables.policy_state.c
    key = cast(walk.table.c.id, String)
    scope = SCOPE + job.arguments["name"]
    return ~select(mark.key).where(mark.scope == scope, mark.key == key).exists()


def replayed(connection: Connection, dialect: Operations, job: Job, ids: Sequence[int]) -> set[int]:
    """Those of the messages that a replay of the job's name has published, here or in Spark."""
    mark = dialect.tables.policy_state.c
    keys = select(mark.key).where(
        mark.scope == SCOPE + job.arguments["name"], mark.key.in_(map(str, ids))
    )
    return {int(key) for key in connection.execute(keys).scalars()}


def _table(dialect: Operations, action: str) -> Any:
    return dialect.tables.archive if action in OF_ARCHIVE else dialect.tables.message
