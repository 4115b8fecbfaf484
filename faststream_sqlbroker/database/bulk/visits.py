"""Which messages a job visits: those that match its filter, in an order that its own changes leave
as it is.

Live messages are visited by id, archived ones by when they were archived, none behind the last row
of the dry run: a message that fails again is not met again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, Select, String, cast, func, select, text

from faststream_sqlbroker.core.jobs import OF_ARCHIVE, REPLAY, Job, Position
from faststream_sqlbroker.core.replays import SCOPE
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


@dataclass(slots=True)
class Count:
    """Messages that match, as far as was looked."""

    queues: dict[str, int] = field(default_factory=dict)
    after: Position | None = None
    """Where to go on; None: all were counted."""


def last_row(connection: Connection, dialect: Operations, action: str) -> Position | None:
    """The last row that there is now in the order of the job; None: there is none."""
    table = _table(dialect, action)
    column = table.c.archived_at if action in OF_ARCHIVE else table.c.id
    found = connection.execute(select(func.max(column))).scalar_one()
    return None if found is None else [found]


def count(connection: Connection, dialect: Operations, job: Job, after: Position | None) -> Count:
    """Count the messages behind `after` that `job` would visit; it looks at 20 000 at most."""
    part = _part(dialect, job, after)
    found = Count()
    for rows, end in part.steps(connection, SCANNED):
        queues = rows(part.table.c.queue).subquery().c.queue
        for queue, number in connection.execute(select(queues, func.count()).group_by(queues)):
            found.queues[queue] = found.queues.get(queue, 0) + number
        found.after = end
    return found


def visit(
    connection: Connection, dialect: Operations, job: Job, size: int
) -> tuple[list[int], Position | None]:
    """Find the next `size` messages: their ids, and the position of the last; None: there are no
    more.
    """
    part = _part(dialect, job, job.cursor)
    rows, end = part.read(connection, part.order, size, SCANNED)  # the order ends with the id
    # One row more was read, which tells whether the walk goes on.
    if len(rows) > size:
        rows = rows[:size]
        end = [getattr(rows[-1], name) for name in part.order]
    return [row.id for row in rows], end


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


def _part(dialect: Operations, job: Job, after: Position | None) -> Part:
    assert job.filters is not None  # noqa: S101 - only an undo has none
    walk = _walk(dialect, job, job.filters)
    extra: list[Any] = [] if job.action in OF_ARCHIVE else [*CLAIMABLE]
    if job.action == REPLAY:
        extra.append(_not_replayed(dialect, walk, job))
    return Part(dialect, walk, after, job.filters, extra)


def _walk(dialect: Operations, job: Job, filters: Filters) -> Walk:
    bound = None if job.bound is None else job.bound[0]
    if job.action in OF_ARCHIVE:
        walk = archive_walk(dialect, filters)
        return replace(walk, falling=False, where=[*walk.where, walk.table.c.archived_at <= bound])
    c = dialect.tables.message.c
    if filters.queue is not None and filters.key is not None:
        where = (c.queue == filters.queue, c.key == filters.key, c.id <= bound)
        return Walk("key", dialect.tables.message, "key_index", where, (c.id,))
    return Walk("all", dialect.tables.message, None, (c.id <= bound,), (c.id,))


def _not_replayed(dialect: Operations, walk: Walk, job: Job) -> Any:
    """Whether no run of the replay has published the row, here or in Spark."""
    mark = dialect.tables.policy_state.c
    key = cast(walk.table.c.id, String)
    scope = SCOPE + job.arguments["name"]
    return ~select(mark.key).where(mark.scope == scope, mark.key == key).exists()


def _table(dialect: Operations, action: str) -> Any:
    return dialect.tables.archive if action in OF_ARCHIVE else dialect.tables.message
