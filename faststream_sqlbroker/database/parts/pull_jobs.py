"""Jobs of pull consumers: the statements are the same on every database.

A job's row is locked before its state is judged, so of two requests the second sees what the first
has done. What a lease allows is decided by the database's clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from sqlalchemy import (
    Connection,
    Table,
    case,
    literal,
    select,
    text,
    update,
)

from faststream_sqlbroker.core import channels
from faststream_sqlbroker.core.channels import (
    JobsPage,
    JobState,
    PullJob,
    page_cursor,
    page_position,
)
from faststream_sqlbroker.core.reasons import MAX_DELIVERIES, REJECTED
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts import pull_statements as statements
from faststream_sqlbroker.database.parts.brought_back import bring_back, lock_records
from faststream_sqlbroker.database.parts.cancels import discarded, of_leases, requests
from faststream_sqlbroker.database.parts.claimed_rows import load_payload
from faststream_sqlbroker.database.parts.message_walks import Walk
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.schema.types import MYSQL, clock

SWEPT = 100
"""Expired leases that one transaction ends; bounds its length."""
_STATES = {
    MessageState.PENDING: JobState.QUEUED,
    MessageState.RETRYABLE: JobState.QUEUED,
    MessageState.PROCESSING: JobState.INFLIGHT,
    MessageState.COMPLETED: JobState.DELIVERED,
    MessageState.FAILED: JobState.DEAD,
    MessageState.DISCARDED: JobState.DEAD,
}
_LEASED = "state = 'PROCESSING'"
_WITHOUT_LEASE: dict[str, Any] = {
    "acquired_at": None,
    "lease_token": None,
    "lease_expires_at": None,
}


@dataclass(slots=True)
class Held:
    """A job whose row the transaction has locked."""

    id: int
    queue: str
    state: JobState
    token: UUID | None = None
    age: float = 0.0
    """Seconds since it was claimed."""
    due: bool = True
    """Whether a queued job may be taken."""
    died: Settlement | None = None
    """Its end, if its time was over just now, once too often."""


# Which jobs there are.


def queued(
    connection: Connection,
    dialect: Dialect,
    queue: str,
    after: str | None,
    limit: int,
    *,
    gone: bool,
    overdue: bool,
) -> JobsPage:
    """Up to `limit` jobs that are due, the highest priority first; with `gone`, also those that
    have expired long ago. `overdue` is noted in the page.

    Raises:
        NotACursorError: `after` is not of such a list.
    """
    found = _positions(connection, dialect, queue, after, limit + 1, gone=gone)
    page = _of_size(found[:limit])
    jobs = _with_bodies(connection, dialect, [row.id for row in page if not row.gone])
    following = None
    if len(page) < len(found):
        last = page[-1]
        following = page_cursor(last.priority, last.next_attempt_at, last.id)
    return JobsPage(jobs, following, overdue, [row.id for row in found if row.gone])


def lock_expired(
    connection: Connection, dialect: Dialect, queue: str, ids: Sequence[int]
) -> list[int]:
    """Lock those of `ids` that wait in `queue` and have expired long ago."""
    # Looked at again: one that was dead since, and was taken again, lives.
    found = connection.execute(statements.expired(dialect), {"ids": list(ids), "queue": queue})
    return list(found.scalars())


def _positions(
    connection: Connection,
    dialect: Dialect,
    queue: str,
    after: str | None,
    limit: int,
    *,
    gone: bool,
) -> list[Any]:
    """Positions and sizes of up to `limit` jobs that are due, behind `after`."""
    at = None if after is None else page_position(after)
    found: list[Any] = []
    for pair in dialect.ready_pairs(connection, [queue], only_open=True):
        if pair.due_in > 0 or (at is not None and pair.priority > at[0]):
            continue
        beyond = at[1:] if at is not None and pair.priority == at[0] else None
        binds = {"queue": queue, "priority": pair.priority, "limit": limit - len(found)}
        found += _due(connection, dialect, beyond, {**binds, "gone": int(gone)})
        if len(found) >= limit:
            break
    return found


def _with_bodies(connection: Connection, dialect: Dialect, ids: Sequence[int]) -> list[PullJob]:
    """The jobs in this order; one that was taken since is left out."""
    found = connection.execute(statements.bodies(dialect), {"ids": list(ids)})
    rows = {row.id: row for row in found}
    return [_job(rows[i], JobState.QUEUED) for i in ids if i in rows]


def _due(
    connection: Connection,
    dialect: Dialect,
    beyond: Sequence[Any] | None,
    binds: Mapping[str, Any],
) -> Sequence[Any]:
    """Position and size of jobs of one priority, in the order of their due times."""
    statement = statements.due(dialect)
    if beyond is not None:
        statement = statement.where(statements.due_walk(dialect).beyond(beyond, dialect))
    return connection.execute(statement, binds).all()


def _of_size(rows: Sequence[Any]) -> Sequence[Any]:
    size = 0
    for number, row in enumerate(rows):
        size += row.size or 0
        if number and size > channels.PAGE_BYTES:
            return rows[:number]
    return rows


def one(connection: Connection, dialect: Dialect, queue: str, job_id: int) -> PullJob | None:
    """The job, live or archived."""
    for is_live in (True, False):
        statement = statements.showing(dialect, is_live=is_live)
        row = connection.execute(statement, {"job": job_id, "queue": queue}).first()
        if row is None:
            continue
        job = _job(row, _STATES[MessageState[row.state]])
        if not is_live:
            return job
        return replace(
            job,
            due=bool(row.is_due),
            lease_expires_at=row.lease_expires_at,
            over=bool(row.over),
        )
    return None


def _job(row: Any, state: JobState) -> PullJob:
    return PullJob(
        id=row.id,
        state=state,
        priority=row.priority,
        deliveries=row.deliveries_count,
        headers=load_headers(row.headers),
        payload=load_payload(row.payload),
    )


# Changes of one job.


def hold(
    connection: Connection, dialect: Dialect, queue: str, job_id: int, max_retries: int
) -> Held | None:
    """Lock the job; if its time is over, queue it again, or end it as dead.

    None: there is no such job in the queue.
    """
    # Twice the live ones: a job may come back from the archive between the first two looks.
    for is_live in (True, False, True):
        statement = statements.holding(dialect, is_live=is_live)
        row = connection.execute(statement, {"job": job_id, "queue": queue}).first()
        if row is not None and is_live:
            return _live(connection, dialect, row, max_retries)
        if row is not None:
            return Held(row.id, row.queue, _STATES[MessageState[row.state]])
    return None


def _live(connection: Connection, dialect: Dialect, row: Any, max_retries: int) -> Held:
    state = _STATES[MessageState[row.state]]
    if state is JobState.QUEUED:
        return Held(row.id, row.queue, state, due=bool(row.is_due))
    if not row.over:
        age = (row.now - row.acquired_at).total_seconds()
        return Held(row.id, row.queue, state, row.lease_token, max(0.0, age))
    died = _cancelled(connection, dialect, [row]).get(row.id)
    if died is None and row.deliveries_count > max_retries:
        died = _killed(row.id, row.lease_token)
    if died is not None:
        settle(connection, dialect, died)
        return Held(row.id, row.queue, JobState.DEAD, died=died)
    _requeue(connection, dialect, row.id, row.attempts_count)
    return Held(row.id, row.queue, JobState.QUEUED)


def _requeue(connection: Connection, dialect: Dialect, job_id: int, attempts: int) -> None:
    table = dialect.tables.message
    state = MessageState.RETRYABLE if attempts else MessageState.PENDING
    values = {"state": state.name, **_WITHOUT_LEASE}
    connection.execute(update(table).where(table.c.id == job_id).values(values))


def requeue_all(connection: Connection, dialect: Dialect, queue: str) -> None:
    """Queue all jobs again that are in flight: no client can end them any more. Those that an
    operator has cancelled end.
    """
    table = dialect.tables.message
    c = table.c
    for ids in chunks(sorted(each.message_id for each in requests(connection, _state(dialect)))):
        asked = select(c.id, c.lease_token).where(c.id.in_(ids), c.queue == queue, text(_LEASED))
        rows = connection.execute(asked.with_for_update()).all()
        if ends := list(_cancelled(connection, dialect, rows).values()):
            dialect.settle(connection, ends)
    names = (MessageState.RETRYABLE.name, MessageState.PENDING.name)
    state = case((table.c.attempts_count > 0, names[0]), else_=names[1])
    leased = (table.c.queue == queue, text(_LEASED))
    connection.execute(update(table).where(*leased).values(state=state, **_WITHOUT_LEASE))


def start(
    connection: Connection, dialect: Dialect, held: Held, lease: float, token: UUID
) -> ClaimedMessage | None:
    """Lease the locked job; a dead one comes back from the archive first. None: it is not due."""
    if held.state is JobState.DEAD:
        archive = dialect.tables.archive
        assert archive is not None  # noqa: S101 - it was found there
        new = {
            "state": literal(MessageState.PENDING.name),
            "publish_count": archive.c.publish_count + 1,
            # One that has ended before its first delivery is retried, too.
            "deliveries_count": case(
                (archive.c.deliveries_count < 1, 1), else_=archive.c.deliveries_count
            ),
            "next_attempt_at": clock(),
            # Both are over by now: who starts it wants it to run.
            "expires_at": None,
            "dedup_id": None,
        }
        # The row is locked by now, and a prune of its window may wait for it: the database then
        # ends one of the two with an error that passes.
        records = lock_records(connection, dialect, [held.id])
        bring_back(connection, dialect, [held.id], new, records)
    found = dialect.claim_ids(connection, [held.id], [held.queue], lease, token)
    return found[0] if found else None


def has_expired(connection: Connection, dialect: Dialect, held: Held) -> bool:
    """Whether the job's `expires_at` is over."""
    table = dialect.tables.message
    over = select(table.c.id).where(table.c.id == held.id, table.c.expires_at <= clock())
    return connection.execute(over).first() is not None


def is_paused(connection: Connection, dialect: Dialect, queue: str) -> bool:
    """Whether an operator has paused the queue."""
    found = connection.execute(statements.pause(dialect), {"queue": queue})
    return found.first() is not None


def delivered(held: Held) -> Settlement:
    """The end of a job that its consumer has done."""
    assert held.token is not None  # noqa: S101 - it is in flight
    return Settlement(held.id, held.token, MessageState.COMPLETED, ended_after=held.age)


def killed(held: Held) -> Settlement:
    """The end of a job that its consumer gives up."""
    assert held.token is not None  # noqa: S101 - it is in flight
    return Settlement(
        held.id, held.token, MessageState.FAILED, ended_after=held.age, reason=REJECTED
    )


def _killed(job_id: int, token: UUID) -> Settlement:
    """The end of a job that ran out of time too often; no consumer has answered."""
    return Settlement(job_id, token, MessageState.FAILED, attempted=False, reason=MAX_DELIVERIES)


def _cancelled(
    connection: Connection, dialect: Dialect, rows: Sequence[Any]
) -> dict[int, Settlement]:
    """The ends of those leased `rows` that an operator has cancelled, by id."""
    leases = [(row.id, row.lease_token) for row in rows]
    asked = of_leases(connection, _state(dialect), leases)
    return {number: discarded(request, archive=True) for number, request in asked.items()}


def _state(dialect: Dialect) -> Table:
    return dialect.tables.policy_state


def settle(connection: Connection, dialect: Dialect, settlement: Settlement) -> bool:
    """Write the end of a job; false if its lease is gone."""
    return settlement.id in dialect.settle(connection, [settlement]).settled


# Leases that have run out.


def overdue(connection: Connection, dialect: Dialect, queues: Sequence[str]) -> list[str]:
    """Those of `queues` that have leases that have ended."""
    found: list[str] = []
    for part in chunks(queues):
        walk = _leased(dialect)
        over = walk.select(dialect, [walk.table.c.queue]).where(walk.table.c.queue.in_(part))
        found += connection.execute(over.order_by(None).distinct()).scalars()
    return found


def _leased(dialect: Dialect) -> Walk:
    """Leases that have ended, of all queues."""
    table = dialect.tables.message
    leased = text("lease_expires_at IS NOT NULL" if dialect.name in MYSQL else _LEASED)
    where = (leased, table.c.lease_expires_at <= clock())
    return Walk("leased", table, "leased_index", where, (table.c.lease_expires_at, table.c.id))


def sweep(
    connection: Connection, dialect: Dialect, queue: str, max_retries: int
) -> list[Settlement]:
    """Queue up to `SWEPT` jobs again whose time is over, and end those that had it too often;
    returns the ends.
    """
    walk = _leased(dialect)
    c = walk.table.c
    columns = [c.id, c.lease_token, c.deliveries_count, c.attempts_count]
    locking = walk.select(dialect, columns).where(c.queue == queue).limit(SWEPT)
    locking = locking.with_for_update(skip_locked=True)
    rows = connection.execute(locking).all()
    ended = _cancelled(connection, dialect, rows)
    for row in rows:
        if row.deliveries_count > max_retries:
            ended.setdefault(row.id, _killed(row.id, row.lease_token))
    ends = list(ended.values())
    if ends:
        dialect.settle(connection, ends)
    for row in rows:
        if row.id not in ended:
            _requeue(connection, dialect, row.id, row.attempts_count)
    return ends
