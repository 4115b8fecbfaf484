"""Select the messages that a job visits, in an order that its own changes do not affect.

Live messages are visited by id, archived messages by the time of their archiving. None is
visited after the last row of the dry run: a message that fails again is not visited again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Select, String, cast, func, select, text

from faststream_sqlbroker.core.bulk_jobs import ARCHIVE_ACTIONS, REPLAY, Job, Position
from faststream_sqlbroker.core.replays import REPLAY_SCOPE
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.message_walks import (
    MAX_SCANNED,
    IndexRange,
    RangeReader,
    build_conditions,
    get_archive_range,
    get_readable_columns,
    to_unindexed,
)
from faststream_sqlbroker.schema.types import MYSQL

CLAIMABLE = to_unindexed([text("state IN ('PENDING', 'RETRYABLE')")])


def find_last_position(
    connection: Connection, dialect: DialectOperations, action: str
) -> Position | None:
    """Return the position of the last row that a job may visit, or None without rows.

    A position is the id of a live message, or the end time of an archived message. Read at the dry
    run: rows that come later are not visited.
    """
    table = _get_table(dialect, action)
    column = table.c.archived_at if action in ARCHIVE_ACTIONS else table.c.id
    maximum = connection.execute(select(func.max(column))).scalar_one()
    return None if maximum is None else [maximum]


def load_states(
    connection: Connection, dialect: DialectOperations, ids: Sequence[int]
) -> dict[int, MessageState]:
    """Return the states of the messages `ids`, live or archived; unknown ids are missing.

    For the note of a dry run that says why a requested message is not visited.
    """
    states: dict[int, MessageState] = {}
    for table in (dialect.tables.archive, dialect.tables.message):
        if table is not None:
            statement = select(table.c.id, table.c.state).where(table.c.id.in_(ids))
            states.update(
                (message_id, MessageState[name])
                for message_id, name in connection.execute(statement)
            )
    return states


def find_next(
    connection: Connection, dialect: DialectOperations, job: Job, size: int
) -> tuple[list[int], Position | None]:
    """Return the ids of the next `size` messages that the job visits, and the position of the last.

    The next batch continues after that position. It is None if no messages follow, or if the job's
    limit is reached.
    """
    rows, after, _ = read_next(connection, dialect, job, size)
    return [row.id for row in rows], after


def read_next(
    connection: Connection,
    dialect: DialectOperations,
    job: Job,
    size: int,
    names: Sequence[str] = (),
) -> tuple[Sequence[Any], Position | None, Position | None]:
    """Read the next `size` messages up to the job's limit: positions and columns `names`.

    Scans 20 000 rows at most, so fewer messages may be returned although more follow.

    Returns:
        The rows; the position to continue after, or None at the end; and the position of the last
        row if the limit is reached.
    """
    remaining = None if job.limit is None else job.limit - job.visited
    size = size if remaining is None else min(size, remaining)
    reader = _create_reader(dialect, job)
    # The order ends with the id.
    rows, end = reader.read_rows(connection, [*reader.order, *names], size, MAX_SCANNED)
    # One more row was read, which shows whether the range goes on.
    if len(rows) < size or not rows:
        return rows, end, None
    last = [getattr(rows[size - 1], name) for name in reader.order]
    if remaining == size:
        return rows[:size], None, last
    return rows[:size], last if len(rows) > size else end, None


def lock_matching(
    connection: Connection,
    dialect: DialectOperations,
    job: Job,
    ids: Sequence[int],
    names: Sequence[str],
) -> Sequence[Any]:
    """Lock the messages among `ids` that still match; return the columns `names`, by id.

    Called before a change: a message may have changed since the dry run. Messages locked by another
    transaction are skipped.
    """
    statement = _select_matching(dialect, job, ids, names).with_for_update(skip_locked=True)
    return connection.execute(statement).all()


def list_matching(
    connection: Connection,
    dialect: DialectOperations,
    job: Job,
    ids: Sequence[int],
    names: Sequence[str],
) -> Sequence[Any]:
    """Return the columns `names` of the messages of `ids` that match the job's filters, by id."""
    return connection.execute(_select_matching(dialect, job, ids, names)).all()


def _select_matching(
    dialect: DialectOperations, job: Job, ids: Sequence[int], names: Sequence[str]
) -> Select[Any]:
    """Select the messages `ids` that still match the filters of the job, by id."""
    table = _get_table(dialect, job.action)
    columns = get_readable_columns(table, names, dialect.name)
    statement = select(*columns).where(table.c.id.in_(ids), *_build_conditions(dialect, job))
    if dialect.name in MYSQL:
        # Without this hint, MySQL could also lock rows that it only scans.
        statement = statement.with_hint(table, "FORCE INDEX (PRIMARY)", dialect.name)
    return statement.order_by(table.c.id)


def _build_conditions(dialect: DialectOperations, job: Job) -> list[Any]:
    """Return the conditions of messages that the job may change; live messages must wait.

    A leased message is never changed, because its worker may be about to settle it.
    """
    assert job.filters is not None  # noqa: S101 - only an undo has none
    conditions = build_conditions(_get_table(dialect, job.action), job.filters, dialect.name)
    return conditions if job.action in ARCHIVE_ACTIONS else [*conditions, *CLAIMABLE]


def _create_reader(dialect: DialectOperations, job: Job) -> RangeReader:
    """Create a reader of the messages that the job has not visited yet, in the order of visits.

    Leased messages are skipped, and for a replay also messages that were replayed before.
    """
    assert job.filters is not None  # noqa: S101 - only an undo has none
    index_range = _build_range(dialect, job, job.filters)
    conditions: list[Any] = [] if job.action in ARCHIVE_ACTIONS else [*CLAIMABLE]
    if job.action == REPLAY:
        conditions.append(_build_not_replayed(dialect, index_range, job))
    return RangeReader(dialect, index_range, job.cursor, job.filters, conditions)


def _build_range(dialect: DialectOperations, job: Job, filters: Filters) -> IndexRange:
    """Return the index range of the job's messages, up to the last row of the dry run.

    Live messages are visited by id, archived messages by end time. The narrowest index that fits
    the filters is read.
    """
    # Without a bound the table was empty: a comparison with NULL matches no row.
    bound = job.bound or [None]
    if job.action in ARCHIVE_ACTIONS:
        index_range = replace(get_archive_range(dialect, filters), descending=False)
        # The bound of a limit includes the id: many messages are archived at the same time.
        until = replace(index_range, order=index_range.order[: len(bound)]).build_until(
            bound, dialect
        )
        return replace(index_range, where=[*index_range.where, until])
    c = dialect.tables.message.c
    up_to = c.id <= bound[0]
    if filters.ids:
        conditions = (c.id.in_(filters.ids), up_to)
        return IndexRange("all", dialect.tables.message, None, conditions, (c.id,))
    if filters.queue is not None and filters.key is not None:
        where = (c.queue == filters.queue, c.key == filters.key, up_to)
        return IndexRange("key", dialect.tables.message, "key_index", where, (c.id,))
    return IndexRange("all", dialect.tables.message, None, (up_to,), (c.id,))


def _build_not_replayed(dialect: DialectOperations, index_range: IndexRange, job: Job) -> Any:
    """Return the condition that no run of the replay has published the row, here or in Spark.

    A replay stores a mark for each message: a row of the policy state with the replay's name and
    the message's id.
    """
    mark = dialect.tables.policy_state.c
    key = cast(index_range.table.c.id, String)
    scope = REPLAY_SCOPE + job.arguments["name"]
    return ~select(mark.key).where(mark.scope == scope, mark.key == key).exists()


def find_replayed(
    connection: Connection, dialect: DialectOperations, job: Job, ids: Sequence[int]
) -> set[int]:
    """Return the messages that a replay of the job's name has published, here or in Spark.

    A replay stores a mark for each: a row of the policy state with its name and the message's id.
    """
    mark = dialect.tables.policy_state.c
    keys = select(mark.key).where(
        mark.scope == REPLAY_SCOPE + job.arguments["name"], mark.key.in_(map(str, ids))
    )
    return {int(key) for key in connection.execute(keys).scalars()}


def _get_table(dialect: DialectOperations, action: str) -> Any:
    """Return the table whose messages jobs of `action` visit: the archive or the live messages."""
    return dialect.tables.archive if action in ARCHIVE_ACTIONS else dialect.tables.message
