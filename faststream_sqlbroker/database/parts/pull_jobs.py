"""Jobs of pull consumers: the statements are the same on every database.

A job's row is locked before its state is judged, so of two requests the second sees what the first
has done. What a lease allows is decided by the database's clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import (
    Connection,
    Integer,
    Select,
    Table,
    and_,
    bindparam,
    case,
    func,
    literal,
    literal_column,
    or_,
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
from faststream_sqlbroker.database.constants import LONG_AGO
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.brought_back import bring_back, lock_records
from faststream_sqlbroker.database.parts.cancels import discarded, of_leases, requests
from faststream_sqlbroker.database.parts.claimed_rows import load_payload
from faststream_sqlbroker.database.parts.live_subscribers import is_lasting, pause_of
from faststream_sqlbroker.database.parts.message_walks import Walk, row_by_row, shown_columns
from faststream_sqlbroker.database.parts.sizes import chunks
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
_SHOWN = ("id", "priority", "deliveries_count", "headers", "payload")
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
    found = connection.execute(bodies_of_jobs(dialect), {"ids": list(ids)})
    rows = {row.id: row for row in found}
    return [job_of(rows[i], JobState.QUEUED) for i in ids if i in rows]


def _due(
    connection: Connection,
    dialect: Dialect,
    beyond: Sequence[Any] | None,
    binds: Mapping[str, Any],
) -> Sequence[Any]:
    """Position and size of jobs of one priority, in the order of their due times."""
    statement = due_jobs(dialect)
    if beyond is not None:
        statement = statement.where(walk_of_due_jobs(dialect).beyond(beyond, dialect))
    return connection.execute(statement, binds).all()


def _of_size(rows: Sequence[Any]) -> Sequence[Any]:
    size = 0
    for number, row in enumerate(rows):
        size += row.size or 0
        if number and size > channels.PAGE_BYTES:
            return rows[:number]
    return rows


def job_of(row: Any, state: JobState) -> PullJob:
    """The job that was read, without what only a live one has."""
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
        statement = holding(dialect, is_live=is_live)
        row = connection.execute(statement, {"job": job_id, "queue": queue}).first()
        if row is not None and is_live:
            return _live(connection, dialect, row, max_retries)
        if row is not None:
            return Held(row.id, row.queue, STATES[MessageState[row.state]])
    return None


def _live(connection: Connection, dialect: Dialect, row: Any, max_retries: int) -> Held:
    state = STATES[MessageState[row.state]]
    if state is JobState.QUEUED:
        return Held(row.id, row.queue, state, due=bool(row.is_due))
    if not row.over:
        age = (row.now - row.acquired_at).total_seconds()
        return Held(row.id, row.queue, state, row.lease_token, max(0.0, age))
    died = ends_of_cancelled(connection, dialect, [row]).get(row.id)
    if died is None and row.deliveries_count > max_retries:
        died = timed_out(row.id, row.lease_token)
    if died is not None:
        dialect.settle(connection, [died])
        return Held(row.id, row.queue, JobState.DEAD, died=died)
    requeue(connection, dialect, row.id, row.attempts_count)
    return Held(row.id, row.queue, JobState.QUEUED)


def requeue(connection: Connection, dialect: Dialect, job_id: int, attempts: int) -> None:
    """Queue a job again whose time is over."""
    table = dialect.tables.message
    state = MessageState.RETRYABLE if attempts else MessageState.PENDING
    values = {"state": state.name, **_WITHOUT_LEASE}
    connection.execute(update(table).where(table.c.id == job_id).values(values))


def end_cancelled(connection: Connection, dialect: Dialect, queue: str) -> None:
    """End those jobs in flight that an operator has cancelled."""
    table = dialect.tables.message
    c = table.c
    for ids in chunks(sorted(each.message_id for each in requests(connection, _state(dialect)))):
        asked = select(c.id, c.lease_token).where(c.id.in_(ids), c.queue == queue, text(_LEASED))
        rows = connection.execute(asked.with_for_update()).all()
        if ends := list(ends_of_cancelled(connection, dialect, rows).values()):
            dialect.settle(connection, ends)


def requeue_all(connection: Connection, dialect: Dialect, queue: str) -> None:
    """Queue all jobs again that are in flight: no client can end them any more."""
    table = dialect.tables.message
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


def timed_out(job_id: int, token: UUID) -> Settlement:
    """The end of a job that ran out of time too often; no consumer has answered."""
    return Settlement(job_id, token, MessageState.FAILED, attempted=False, reason=MAX_DELIVERIES)


def ends_of_cancelled(
    connection: Connection, dialect: Dialect, rows: Sequence[Any]
) -> dict[int, Settlement]:
    """The ends of those leased `rows` that an operator has cancelled, by id."""
    leases = [(row.id, row.lease_token) for row in rows]
    asked = of_leases(connection, _state(dialect), leases)
    return {number: discarded(request, archive=True) for number, request in asked.items()}


def _state(dialect: Dialect) -> Table:
    return dialect.tables.policy_state


# Statements, each built once for all requests.


def holding(dialect: Operations, *, is_live: bool) -> Select[Any]:
    """Locks the row of `job` in `queue`, live or archived."""

    def build() -> Select[Any]:
        table = _table(dialect, is_live=is_live)
        c = table.c
        columns: list[Any] = [c.id, c.queue, c.state, c.deliveries_count, c.attempts_count]
        if is_live:
            columns += [c.acquired_at, clock().label("now"), c.lease_token, *_times(table)]
        return select(*columns).where(*_job_by_id(table)).with_for_update()

    return dialect.built(f"hold_{_kind(is_live=is_live)}_job", build)


def showing(dialect: Operations, *, is_live: bool) -> Select[Any]:
    """Reads the `job` of `queue`, live or archived."""

    def build() -> Select[Any]:
        table = _table(dialect, is_live=is_live)
        columns = shown_columns(table, (*_SHOWN, "state"), dialect.name)
        if is_live:
            columns += shown_columns(table, ("lease_expires_at",), dialect.name)
            columns += _times(table)
        return select(*columns).where(*_job_by_id(table))

    return dialect.built(f"{_kind(is_live=is_live)}_job", build)


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
        with_gone = bindparam("gone", type_=Integer) == 1
        listed = or_(_lives(walk.table), and_(with_gone, _is_gone(walk.table)))
        jobs = walk.select(dialect, columns).where(listed)
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


def expired_jobs(dialect: Operations) -> Select[Any]:
    """Locks those of the jobs `ids` in `queue` that wait, and have expired long ago."""

    def build() -> Select[Any]:
        table = dialect.tables.message
        c = table.c
        waiting = row_by_row([c.queue == bindparam("queue"), text(_CLAIMABLE), _is_gone(table)])
        of_ids = c.id.in_(bindparam("ids", expanding=True))
        return select(c.id).where(of_ids, *waiting).with_for_update(skip_locked=True)

    return dialect.built("expired_jobs", build)


def bodies_of_jobs(dialect: Operations) -> Select[Any]:
    """Reads those of the jobs `ids` that are not in flight."""

    def build() -> Select[Any]:
        table = dialect.tables.message
        of_ids = table.c.id.in_(bindparam("ids", expanding=True))
        columns = shown_columns(table, _SHOWN, dialect.name)
        return select(*columns).where(of_ids, *row_by_row([text(_CLAIMABLE)]))

    return dialect.built("bodies_of_jobs", build)


def pause_of_jobs(dialect: Operations) -> Select[Any]:
    """The row that tells that `queue` is paused, if it is."""

    def build() -> Select[Any]:
        table = dialect.tables.policy_state
        of_queue = pause_of(table, bindparam("queue"))
        return select(table.c.key).where(of_queue, is_lasting(table))

    return dialect.built("pause_of_jobs", build)


def _table(dialect: Operations, *, is_live: bool) -> Table:
    table = dialect.tables.message if is_live else dialect.tables.archive
    assert table is not None  # noqa: S101 - without an archive there are no channels
    return table


def _kind(*, is_live: bool) -> str:
    return "live" if is_live else "archived"


def _job_by_id(table: Table) -> tuple[Any, Any]:
    return table.c.id == bindparam("job"), table.c.queue == bindparam("queue")


def _times(table: Table) -> list[Any]:
    """Whether the lease is `over`, and whether a queued job `is_due`."""
    over = case((table.c.lease_expires_at <= clock(), 1), else_=0)
    is_due = case((and_(table.c.next_attempt_at <= clock(), _lives(table)), 1), else_=0)
    return [over.label("over"), is_due.label("is_due")]


def _lives(table: Table) -> Any:
    return func.coalesce(table.c.expires_at > clock(), True)


def _is_gone(table: Table) -> Any:
    ago: Any = literal_column(str(-LONG_AGO * 1_000_000))
    return table.c.expires_at <= later(ago)
