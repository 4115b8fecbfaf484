"""Jobs of pull consumers: listing them and ending their leases.

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
    PullJob,
    PullJobState,
    build_page_cursor,
    parse_page_cursor,
)
from faststream_sqlbroker.core.reasons import MAX_DELIVERIES
from faststream_sqlbroker.core.rows import Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.constants import EXPIRED_JOB_GRACE
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.cancel_requests import create_settlement, find_requests
from faststream_sqlbroker.database.parts.claimed_rows import load_payload
from faststream_sqlbroker.database.parts.message_walks import (
    IndexRange,
    get_readable_columns,
    to_unindexed,
)
from faststream_sqlbroker.schema.types import MYSQL, clock, later

STATES = {
    MessageState.PENDING: PullJobState.QUEUED,
    MessageState.RETRYABLE: PullJobState.QUEUED,
    MessageState.PROCESSING: PullJobState.INFLIGHT,
    MessageState.COMPLETED: PullJobState.DELIVERED,
    MessageState.FAILED: PullJobState.DEAD,
    MessageState.DISCARDED: PullJobState.DEAD,
}
_CLAIMABLE = "state IN ('PENDING', 'RETRYABLE')"
MAX_RELEASED = 100
"""Maximum jobs that one transaction releases; bounds its length."""
_JOB_COLUMNS = ("id", "priority", "deliveries_count", "headers", "payload")


def read_job(
    connection: Connection, dialect: Dialect, queue: str, job_id: int, *, lock: bool = False
) -> PullJob | None:
    """Return the live or archived job; with `lock`, lock the row until the transaction ends.

    A job is a message of a pull consumer. For a job in flight, the lease is read too. None if there
    is no such job in the queue.
    """
    # The live table twice: a job may come back from the archive between the first two reads.
    for is_live in (True, False, True):
        statement = select_job(dialect, is_live=is_live)
        statement = statement.with_for_update() if lock else statement
        row = connection.execute(statement, {"job": job_id, "queue": queue}).first()
        if row is None:
            continue
        state = STATES[MessageState[row.state]]
        if state is not PullJobState.INFLIGHT:
            return _to_job(row, state)
        age = max(0.0, (row.now - row.acquired_at).total_seconds())
        return _to_job(row, state, token=row.lease_token, lease_age=age, is_expired=bool(row.over))
    return None


def release_leases(
    connection: Connection,
    dialect: Dialect,
    queue: str,
    max_retries: float = inf,
    *,
    job_id: int | None = None,
    ended: bool = True,
) -> list[Settlement]:
    """Release up to `MAX_RELEASED` expired jobs of `queue`, or the job with `job_id`.

    Without `ended`, releases all jobs in flight. Jobs that an operator has cancelled, and jobs with
    more than `max_retries` deliveries, end instead: returns their settlements. A released job is
    queued again, in the state before its claim.
    """
    rows = connection.execute(_select_leased(dialect, queue, job_id, ended=ended)).all()
    leases = [(row.id, row.lease_token) for row in rows]
    requests = find_requests(connection, dialect.tables.policy_state, leases)
    settlements: list[Settlement] = []
    for row in rows:
        # Restores the state before the claim, except the delivery count.
        settlement = Settlement(row.id, row.lease_token, None, attempted=False)
        if row.id in requests:
            settlement = create_settlement(requests[row.id], archive=True)
        elif row.deliveries_count > max_retries:
            settlement.state = MessageState.FAILED
            settlement.reason = MAX_DELIVERIES
        settlements.append(settlement)
    if settlements:
        dialect.settle(connection, settlements)
    return [settlement for settlement in settlements if settlement.is_final]


def _select_leased(dialect: Dialect, queue: str, job_id: int | None, *, ended: bool) -> Select[Any]:
    """Select and lock the jobs that `release_leases` releases.

    A search for expired leases skips rows that another transaction has locked, such as its
    acknowledgement; a release of all jobs in flight waits for them.
    """
    table = dialect.tables.message
    c = table.c
    columns = (c.id, c.lease_token, c.deliveries_count)
    # The condition of the partial index as a literal: a bound state would not match it.
    condition = "lease_expires_at IS NOT NULL" if dialect.name in MYSQL else "state = 'PROCESSING'"
    conditions = [text(condition), c.queue == queue]
    if ended:
        conditions.append(c.lease_expires_at <= clock())
    if job_id is not None:
        return select(*columns).where(c.id == job_id, *to_unindexed(conditions)).with_for_update()
    walk = IndexRange("leased", table, "leased_index", conditions, (c.lease_expires_at, c.id))
    jobs = walk.select(dialect, columns).limit(MAX_RELEASED if ended else None)
    return jobs.with_for_update(skip_locked=ended)


def list_queued(
    connection: Connection,
    dialect: Dialect,
    queue: str,
    after: str | None,
    limit: int,
    *,
    gone: bool,
) -> JobsPage:
    """Return up to `limit` due jobs, the highest priority first.

    With `gone`, the result also names jobs that expired long ago, which the caller then discards.
    Bodies are read only for the jobs that fit into the page.

    Raises:
        InvalidCursorError: `after` is not of such a list.
    """
    expires_in = dialect.get_seconds_to_lease_end(connection, [queue])
    rows = _list_due(connection, dialect, queue, after, limit + 1, gone=gone)
    page = _limit_size(rows[:limit])
    next_cursor = None
    if len(page) < len(rows):
        last = page[-1]
        next_cursor = build_page_cursor(last.priority, last.next_attempt_at, last.id)
    ids = [row.id for row in page if not row.gone]
    rows_by_id = {row.id: row for row in connection.execute(select_bodies(dialect), {"ids": ids})}
    # Jobs claimed since are omitted.
    jobs = [
        _to_job(rows_by_id[job_id], PullJobState.QUEUED) for job_id in ids if job_id in rows_by_id
    ]
    expired = [row.id for row in rows if row.gone]
    return JobsPage(jobs, next_cursor, expires_in is not None and expires_in <= 0, expired)


def _list_due(
    connection: Connection,
    dialect: Dialect,
    queue: str,
    after: str | None,
    limit: int,
    *,
    gone: bool,
) -> list[Any]:
    """Return positions and sizes of up to `limit` due jobs after `after`.

    Priority by priority, each a range of the index. The sizes decide how many bodies fit into the
    page.
    """
    # Without a cursor, all priorities are lower.
    highest, *position = (inf,) if after is None else parse_page_cursor(after)
    rows: list[Any] = []
    for pair in dialect.find_ready_pairs(connection, [queue], only_open=True):
        if pair.due_in > 0 or pair.priority > highest:
            continue
        statement = select_due_jobs(dialect)
        if pair.priority == highest:
            statement = statement.where(get_due_range(dialect).build_after(position, dialect))
        binds = {"queue": queue, "priority": pair.priority, "gone": int(gone)}
        rows += connection.execute(statement, {**binds, "limit": limit - len(rows)})
        if len(rows) >= limit:
            break
    return rows


def _limit_size(rows: Sequence[Any]) -> Sequence[Any]:
    """Return the first rows whose bodies fit into a page together; at least a single row.

    A client receives the page as one response, so its size is limited.
    """
    size = 0
    for number, row in enumerate(rows):
        size += row.size or 0
        if number and size > channels.PAGE_BYTES:
            return rows[:number]
    return rows


def _to_job(row: Any, state: PullJobState, **lease: Any) -> PullJob:
    """Build the job of a row; `lease` has the values that only a job in flight has."""
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


def select_job(dialect: DialectOperations, *, is_live: bool) -> Select[Any]:
    """Select the `job` of `queue`, live or archived.

    A live job has its lease too, and `over`, which is 1 if the lease has expired.
    """

    def build() -> Select[Any]:
        """Build the select, which the dialect keeps."""
        # Without an archive there are no channels.
        table = dialect.tables.message if is_live else dialect.archive
        c = table.c
        columns = get_readable_columns(table, (*_JOB_COLUMNS, "state"), dialect.name)
        if is_live:
            over = case((c.lease_expires_at <= clock(), 1), else_=0).label("over")
            columns += [c.acquired_at, c.lease_token, clock().label("now"), over]
        return select(*columns).where(c.id == bindparam("job"), c.queue == bindparam("queue"))

    return dialect.get_or_build("live_job" if is_live else "archived_job", build)


def select_due_jobs(dialect: DialectOperations) -> Select[Any]:
    """Select positions and sizes of up to `limit` unexpired jobs of `get_due_range`.

    If the bind `gone` is 1, also selects jobs that expired long ago, with their column `gone` set:
    no client will take such a job, so the caller ends it.
    """

    def build() -> Select[Any]:
        """Build the select, which the dialect keeps."""
        index_range = get_due_range(dialect)
        c = index_range.table.c
        names = ("priority", "next_attempt_at", "id")
        size = func.length(c.payload).label("size")
        gone = case((_match_unexpired(index_range.table), 0), else_=1).label("gone")
        columns = [*get_readable_columns(index_range.table, names, dialect.name), size, gone]
        ago: Any = literal_column(str(-EXPIRED_JOB_GRACE * 1_000_000))
        with_gone = and_(bindparam("gone", type_=Integer) == 1, c.expires_at <= later(ago))
        jobs = index_range.select(dialect, columns).where(
            or_(_match_unexpired(index_range.table), with_gone)
        )
        return jobs.limit(bindparam("limit", type_=Integer))

    return dialect.get_or_build("due_jobs", build)


def get_due_range(dialect: DialectOperations) -> IndexRange:
    """Return the index range of due jobs of `queue` and `priority`, which are binds.

    Built once: the dialect keeps the range for all requests.
    """

    def build() -> IndexRange:
        """Build the range, which the dialect keeps."""
        table = dialect.tables.message
        c = table.c
        claimable = text("claimable = 1" if dialect.name in MYSQL else _CLAIMABLE)
        pair = (c.queue == bindparam("queue"), c.priority == bindparam("priority"))
        where = (claimable, *pair, c.next_attempt_at <= clock())
        return IndexRange("ready", table, "ready_index", where, (c.next_attempt_at, c.id))

    return dialect.get_or_build("walk_of_due_jobs", build)


def select_bodies(dialect: DialectOperations) -> Select[Any]:
    """Select the jobs in `ids` that are not in flight.

    Jobs may have been claimed since their ids were read.
    """

    def build() -> Select[Any]:
        """Build the select, which the dialect keeps."""
        table = dialect.tables.message
        condition = table.c.id.in_(bindparam("ids", expanding=True))
        columns = get_readable_columns(table, _JOB_COLUMNS, dialect.name)
        return select(*columns).where(condition, *to_unindexed([text(_CLAIMABLE)]))

    return dialect.get_or_build("bodies_of_jobs", build)


def _match_unexpired(table: Table) -> Any:
    return func.coalesce(table.c.expires_at > clock(), True)
