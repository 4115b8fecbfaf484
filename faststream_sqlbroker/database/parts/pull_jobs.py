"""Jobs of pull consumers: which there are, and the end of their leases.

The statements are the same on every database.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

from sqlalchemy import (
    Connection,
    Integer,
    Select,
    Table,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    or_,
    select,
    text,
)

from faststream_sqlbroker.core import channels
from faststream_sqlbroker.core.channels import (
    JobsPage,
    JobState,
    PullJob,
    page_cursor,
    page_position,
)
from faststream_sqlbroker.core.reasons import MAX_DELIVERIES
from faststream_sqlbroker.core.rows import Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.constants import LONG_AGO
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.cancels import discarded, of_leases
from faststream_sqlbroker.database.parts.claimed_rows import load_payload
from faststream_sqlbroker.database.parts.message_walks import Walk, row_by_row, shown_columns
from faststream_sqlbroker.schema.types import MYSQL, clock, later

STATES = {
    MessageState.PENDING: JobState.QUEUED,
    MessageState.RETRYABLE: JobState.QUEUED,
    MessageState.PROCESSING: JobState.INFLIGHT,
    MessageState.COMPLETED: JobState.DELIVERED,
    MessageState.FAILED: JobState.DEAD,
    MessageState.DISCARDED: JobState.DEAD,
}
_CLAIMABLE = "state IN ('PENDING', 'RETRYABLE')"
SWEPT = 100
"""Jobs that one transaction gives back; bounds its length."""
_SHOWN = ("id", "priority", "deliveries_count", "headers", "payload")


def read_job(
    connection: Connection, dialect: Dialect, queue: str, job_id: int, *, lock: bool = False
) -> PullJob | None:
    """The job, live or archived; with `lock` its row stays as it is until the transaction ends."""
    # Twice the live ones: a job may come back from the archive between the first two looks.
    for is_live in (True, False, True):
        statement = job_by_id(dialect, is_live=is_live)
        statement = statement.with_for_update() if lock else statement
        row = connection.execute(statement, {"job": job_id, "queue": queue}).first()
        if row is None:
            continue
        state = STATES[MessageState[row.state]]
        if state is not JobState.INFLIGHT:
            return _job(row, state)
        age = max(0.0, (row.now - row.acquired_at).total_seconds())
        return _job(row, state, token=row.lease_token, age=age, over=bool(row.over))
    return None


def end_leases(
    connection: Connection,
    dialect: Dialect,
    queue: str,
    max_retries: float = inf,
    *,
    job_id: int | None = None,
    ended: bool = True,
) -> list[Settlement]:
    """Give back up to `SWEPT` jobs of `queue` whose time is over, or the one with `job_id`;
    without `ended`, all that are in flight. What an operator has cancelled, and what ran out of
    time too often, ends instead: returns these ends.
    """
    rows = connection.execute(_leased(dialect, queue, job_id, ended=ended)).all()
    leases = [(row.id, row.lease_token) for row in rows]
    asked = of_leases(connection, dialect.tables.policy_state, leases)
    ends: list[Settlement] = []
    for row in rows:
        # As before its claim, but for the delivery.
        end = Settlement(row.id, row.lease_token, None, attempted=False)
        if row.id in asked:
            end = discarded(asked[row.id], archive=True)
        elif row.deliveries_count > max_retries:
            end.state = MessageState.FAILED
            end.reason = MAX_DELIVERIES
        ends.append(end)
    if ends:
        dialect.settle(connection, ends)
    return [end for end in ends if end.leaves]


def _leased(dialect: Dialect, queue: str, job_id: int | None, *, ended: bool) -> Select[Any]:
    """Locks what `end_leases` gives back."""
    table = dialect.tables.message
    c = table.c
    columns = (c.id, c.lease_token, c.deliveries_count)
    # The condition of the index, which a bound state would not be.
    leased = "lease_expires_at IS NOT NULL" if dialect.name in MYSQL else "state = 'PROCESSING'"
    where = [text(leased), c.queue == queue]
    if ended:
        where.append(c.lease_expires_at <= clock())
    if job_id is not None:
        return select(*columns).where(c.id == job_id, *row_by_row(where)).with_for_update()
    walk = Walk("leased", table, "leased_index", where, (c.lease_expires_at, c.id))
    jobs = walk.select(dialect, columns).limit(SWEPT if ended else None)
    return jobs.with_for_update(skip_locked=ended)


def queued(
    connection: Connection,
    dialect: Dialect,
    queue: str,
    after: str | None,
    limit: int,
    *,
    gone: bool,
) -> JobsPage:
    """Up to `limit` jobs that are due, the highest priority first; with `gone`, also those that
    have expired long ago.

    Raises:
        NotACursorError: `after` is not of such a list.
    """
    ends_in = dialect.lease_ends_in(connection, [queue])
    rows = _due(connection, dialect, queue, after, limit + 1, gone=gone)
    page = _of_size(rows[:limit])
    following = None
    if len(page) < len(rows):
        last = page[-1]
        following = page_cursor(last.priority, last.next_attempt_at, last.id)
    ids = [row.id for row in page if not row.gone]
    with_bodies = {row.id: row for row in connection.execute(bodies_of_jobs(dialect), {"ids": ids})}
    # One that was taken since is left out.
    jobs = [_job(with_bodies[i], JobState.QUEUED) for i in ids if i in with_bodies]
    expired = [row.id for row in rows if row.gone]
    return JobsPage(jobs, following, ends_in is not None and ends_in <= 0, expired)


def _due(
    connection: Connection,
    dialect: Dialect,
    queue: str,
    after: str | None,
    limit: int,
    *,
    gone: bool,
) -> list[Any]:
    """Positions and sizes of up to `limit` jobs that are due, behind `after`."""
    # Without one, all priorities are lower.
    highest, *beyond = (inf,) if after is None else page_position(after)
    rows: list[Any] = []
    for pair in dialect.ready_pairs(connection, [queue], only_open=True):
        if pair.due_in > 0 or pair.priority > highest:
            continue
        statement = due_jobs(dialect)
        if pair.priority == highest:
            statement = statement.where(walk_of_due_jobs(dialect).beyond(beyond, dialect))
        binds = {"queue": queue, "priority": pair.priority, "gone": int(gone)}
        rows += connection.execute(statement, {**binds, "limit": limit - len(rows)})
        if len(rows) >= limit:
            break
    return rows


def _of_size(rows: Sequence[Any]) -> Sequence[Any]:
    size = 0
    for number, row in enumerate(rows):
        size += row.size or 0
        if number and size > channels.PAGE_BYTES:
            return rows[:number]
    return rows


def _job(row: Any, state: JobState, **lease: Any) -> PullJob:
    return PullJob(
        id=row.id,
        state=state,
        priority=row.priority,
        deliveries=row.deliveries_count,
        headers=load_headers(row.headers),
        payload=load_payload(row.payload),
        **lease,
    )


# Statements, each built once for all requests.


def job_by_id(dialect: Operations, *, is_live: bool) -> Select[Any]:
    """Reads the `job` of `queue`, live or archived."""

    def build() -> Select[Any]:
        table = dialect.tables.message if is_live else dialect.tables.archive
        assert table is not None  # noqa: S101 - without an archive there are no channels
        c = table.c
        columns = shown_columns(table, (*_SHOWN, "state"), dialect.name)
        if is_live:
            over = case((c.lease_expires_at <= clock(), 1), else_=0).label("over")
            columns += [c.acquired_at, c.lease_token, clock().label("now"), over]
        return select(*columns).where(c.id == bindparam("job"), c.queue == bindparam("queue"))

    return dialect.built("live_job" if is_live else "archived_job", build)


def due_jobs(dialect: Operations) -> Select[Any]:
    """Positions and sizes of up to `limit` jobs of `walk_of_due_jobs` that live; if the bind `gone`
    is 1, also of those that have expired long ago, and which are such.
    """

    def build() -> Select[Any]:
        walk = walk_of_due_jobs(dialect)
        c = walk.table.c
        names = ("priority", "next_attempt_at", "id")
        size = func.length(c.payload).label("size")
        gone = case((_lives(walk.table), 0), else_=1).label("gone")
        columns = [*shown_columns(walk.table, names, dialect.name), size, gone]
        ago: Any = literal_column(str(-LONG_AGO * 1_000_000))
        with_gone = and_(bindparam("gone", type_=Integer) == 1, c.expires_at <= later(ago))
        jobs = walk.select(dialect, columns).where(or_(_lives(walk.table), with_gone))
        return jobs.limit(bindparam("limit", type_=Integer))

    return dialect.built("due_jobs", build)


def walk_of_due_jobs(dialect: Operations) -> Walk:
    """Jobs of `queue` and `priority` whose time has come."""

    def build() -> Walk:
        table = dialect.tables.message
        c = table.c
        claimable = text("claimable = 1" if dialect.name in MYSQL else _CLAIMABLE)
        pair = (c.queue == bindparam("queue"), c.priority == bindparam("priority"))
        where = (claimable, *pair, c.next_attempt_at <= clock())
        return Walk("ready", table, "ready_index", where, (c.next_attempt_at, c.id))

    return dialect.built("walk_of_due_jobs", build)


def bodies_of_jobs(dialect: Operations) -> Select[Any]:
    """Reads those of the jobs `ids` that are not in flight."""

    def build() -> Select[Any]:
        table = dialect.tables.message
        of_ids = table.c.id.in_(bindparam("ids", expanding=True))
        columns = shown_columns(table, _SHOWN, dialect.name)
        return select(*columns).where(of_ids, *row_by_row([text(_CLAIMABLE)]))

    return dialect.built("bodies_of_jobs", build)


def _lives(table: Table) -> Any:
    return func.coalesce(table.c.expires_at > clock(), True)
