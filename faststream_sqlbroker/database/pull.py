"""What clients over HTTP need: channels, their consumers and jobs, and the tokens of queues.

Each operation is one transaction.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal
from uuid import UUID, uuid4

from sqlalchemy import Connection, Select, bindparam, select, text

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.channels import (
    STARTS,
    JobsPage,
    JobState,
    PullJob,
    QueueRole,
    Registered,
    Step,
    queue_of,
    step_to,
)
from faststream_sqlbroker.core.jobs import Job
from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.reasons import EXPIRED
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import audit, channels, pull_jobs
from faststream_sqlbroker.database.parts.audit import note_action
from faststream_sqlbroker.database.parts.message_walks import Walk
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.database.policies.rows import PolicyRows
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.exceptions import UnknownOutcomeError
from faststream_sqlbroker.schema.types import MYSQL, clock

SCOPE = "queue:"
"""The scope of tokens is this and what they allow; the key is the queue."""


class QueueTokenStore:
    """Finds and makes them; the database has their hashes only.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    async def find(self, queue: str, role: QueueRole) -> Registered | None:
        """The token of the queue that allows `role`."""
        query = channels.finding(self._dialect, (SCOPE + role, queue))
        [found] = await self._database.run(query, Activity.STATE, write=False)
        return found

    async def put(
        self,
        queue: str,
        role: QueueRole,
        *,
        by: str,
        token: str | None = None,
        rotate: bool = False,
    ) -> Registered:
        """Make the token, or with `rotate` another one, and note in the audit who did."""

        def put(connection: Connection) -> Registered:
            found = channels.put(
                connection,
                self._table,
                SCOPE + role,
                queue,
                token=token,
                changes={},
                rotate=rotate,
            )
            if found.changed:
                arguments = {"queue": queue, "role": role}
                note_action(connection, self._dialect, "put_queue_token", by, arguments)
            return found

        return await self._database.run(put, Activity.STATE)


SWEPT = 100
"""Expired leases that one transaction ends; bounds its length."""
CONSUMING = (Activity.CONSUME, Activity.ARCHIVE, Activity.STATE, Activity.REDRIVE)
"""What a consumer's requests do in the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRequest:
    """What a consumer asks for one of its jobs."""

    queue: str
    job: int
    wanted: JobState
    lease: float
    """Seconds, for a start."""
    max_retries: int
    with_timeout: bool = False
    token: UUID | None = None
    """The lease that the consumer believes to have; None: it does not say."""


Verdict = Literal["done", "not_found", "refused", "lost", "paused", "expired", "push"]


@dataclass(frozen=True, slots=True)
class Changed:
    """What became of it."""

    verdict: Verdict
    state: JobState | None = None
    """Where the job was."""
    lease: UUID | None = None
    """Of a job that was started."""
    started: ClaimedMessage | None = None
    ended: Settlement | None = None
    died: Settlement | None = None
    """The end of a job whose time was over before, once too often."""


class ChannelStore:
    """Reads and writes them.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    @property
    def has_archive(self) -> bool:
        """Whether finished jobs can be kept, which their states need."""
        return self._dialect.has_archive

    @property
    def takes_without_lock(self) -> bool:
        """Whether a job may be taken while its consumer's type changes, and a little later."""
        return self._dialect.quick_jobs is not None

    async def find(self, channel: str, consumer: str | None = None) -> Registered | None:
        """The channel, or one of its consumers."""
        [found] = await self._find(_place(channel, consumer))
        return found

    async def both(self, channel: str, consumer: str) -> tuple[Registered | None, ...]:
        """The channel and the consumer, in one look."""
        return tuple(await self._find(_place(channel, None), _place(channel, consumer)))

    async def _find(self, *places: tuple[str, str]) -> list[Registered | None]:
        query = channels.finding(self._dialect, *places)
        return await self._database.run(query, Activity.STATE, write=False)

    async def put(
        self,
        channel: str,
        consumer: str | None = None,
        *,
        by: str,
        kind: str = "",
        token: str | None = None,
        rotate: bool = False,
    ) -> Registered | None:
        """Make or change the channel or consumer, and note who did in the audit.

        None: there is no such channel.
        """
        scope, key = _place(channel, consumer)
        changes = {} if consumer is None else {"type": kind}

        def work(connection: Connection) -> Registered | None:
            if consumer is not None:
                # A consumer of no channel could never be reached.
                [of_channel] = channels.finding(self._dialect, _place(channel, None))(connection)
                if of_channel is None:
                    return None
            found = channels.put(
                connection, self._table, scope, key, token=token, changes=changes, rotate=rotate
            )
            if not found.changed:
                return found
            # Its clients can end nothing any more, and a lease may last for years.
            if consumer is not None and (found.earlier_type, kind) == ("pull", "push"):
                queue = queue_of(channel, consumer)
                pull_jobs.end_cancelled(connection, self._dialect, queue)
                pull_jobs.requeue_all(connection, self._dialect, queue)
            arguments = {
                "channel": channel,
                "consumer": consumer,
                "type": kind or None,
                "new_token": found.new_token is not None or token is not None,
            }
            action = "put_channel" if consumer is None else "put_consumer"
            job = Job(action=action, by=by, arguments=arguments, state="ended", expected=1, done=1)
            audit.add(connection, self._table, job, self._dialect.now(connection))
            return found

        return await self._database.run(work, Activity.STATE)

    async def requeue_all(self, queue: str) -> None:
        """Queue all jobs again that are in flight; those that an operator has cancelled end."""

        def work(connection: Connection) -> None:
            pull_jobs.end_cancelled(connection, self._dialect, queue)
            pull_jobs.requeue_all(connection, self._dialect, queue)

        await self._database.run(work, *CONSUMING)

    async def consumers(self, channel: str) -> list[Registered]:
        """The consumers of a channel, by id."""
        c = self._table.c
        of_channel = select(c.key, c.info).where(c.scope == channels.CONSUMER + channel)
        listed = of_channel.order_by(c.key).limit(channels.MOST_CONSUMERS)

        def read(connection: Connection) -> list[Registered]:
            rows = connection.execute(listed)
            return [channels.registered(row.key, row.info) for row in rows]

        return await self._database.run(read, Activity.STATE, write=False)

    async def pulled(self) -> list[str]:
        """The queues of all pull consumers."""
        found = await self._database.run(
            lambda c: channels.pulled(c, self._table), Activity.STATE, write=False
        )
        return [queue_of(*each) for each in found]

    async def queued(
        self, queue: str, after: str | None, limit: int, *, gone: bool = True
    ) -> JobsPage:
        """A page of the jobs that are due; with `gone`, also of those that have expired long ago.

        Raises:
            NotACursorError: `after` is not of such a list.
        """
        quick = self._dialect.quick_jobs
        if quick is not None and after is None:
            first = quick.first(queue, limit, gone=gone)
            page: JobsPage = await self._database.run(first, *CONSUMING, write=False)
            return page

        def work(connection: Connection) -> JobsPage:
            ends_in = self._dialect.lease_ends_in(connection, [queue])
            ended = ends_in is not None and ends_in <= 0
            overdue = ended and bool(self._with_ended_leases(connection, [queue]))
            return pull_jobs.queued(
                connection, self._dialect, queue, after, limit, gone=gone, overdue=overdue
            )

        return await self._database.run(work, *CONSUMING, write=False)

    async def end_expired(self, queue: str, ids: Sequence[int]) -> None:
        """Discard those of the jobs `ids` that wait and have expired long ago."""

        def work(connection: Connection) -> None:
            # Looked at again: one that was dead since, and was taken again, lives.
            locking = pull_jobs.expired_jobs(self._dialect)
            held = connection.execute(locking, {"ids": list(ids), "queue": queue})
            self._discard_expired(connection, queue, list(held.scalars()))

        await self._database.run(work, *CONSUMING)

    def _discard_expired(self, connection: Connection, queue: str, ids: Sequence[int]) -> None:
        """Discard locked jobs, into the archive."""
        ends = {each: Discard(EXPIRED) for each in ids}
        PolicyRows(self._dialect, connection, queue).discard(ends, keep=True)

    async def job(self, queue: str, job_id: int) -> PullJob | None:
        """One job, live or archived."""

        def read(connection: Connection) -> PullJob | None:
            for is_live in (True, False):
                statement = pull_jobs.showing(self._dialect, is_live=is_live)
                row = connection.execute(statement, {"job": job_id, "queue": queue}).first()
                if row is None:
                    continue
                job = pull_jobs.job_of(row, pull_jobs.STATES[MessageState[row.state]])
                if not is_live:
                    return job
                return replace(
                    job,
                    due=bool(row.is_due),
                    lease_expires_at=row.lease_expires_at,
                    over=bool(row.over),
                )
            return None

        return await self._database.run(read, *CONSUMING, write=False)

    async def end_overdue(self, queue: str, job_id: int, max_retries: int) -> Settlement | None:
        """Queue the job again if its time is over, or end it; the end."""

        def work(connection: Connection) -> Settlement | None:
            held = pull_jobs.hold(connection, self._dialect, queue, job_id, max_retries)
            return None if held is None else held.died

        return await self._database.run(work, *CONSUMING)

    async def change(self, request: ChangeRequest) -> Changed:
        """Lead the job to the state that is asked for, if that is allowed."""
        # Drawn once: a repeated transaction gives the same lease, and knows it.
        token = uuid4()
        quick = self._quick_change(request, token)
        if quick is not None:
            with suppress(UnknownOutcomeError):
                if (changed := await self._database.run(quick, *CONSUMING)) is not None:
                    return changed

        def work(connection: Connection) -> Changed:
            return self._change(connection, request, token)

        try:
            return await self._database.run(work, *CONSUMING)
        except UnknownOutcomeError:
            return await self._database.run(work, *CONSUMING)

    def _quick_change(self, request: ChangeRequest, token: UUID) -> Query[Changed | None] | None:
        """The change in one statement, if the database has one: done, or None and nothing done."""
        quick = self._dialect.quick_jobs
        if quick is None:
            return None
        if request.wanted is JobState.INFLIGHT:
            taking = quick.take(request.queue, request.job, request.lease, token)
            return taking.then(lambda row: Changed("done", JobState.QUEUED, token, row))
        if request.wanted is JobState.DELIVERED and not request.with_timeout:
            delivering = quick.deliver(request.queue, request.job, request.token)
            return delivering.then(lambda end: Changed("done", JobState.INFLIGHT, ended=end))
        return None

    def _change(self, connection: Connection, request: ChangeRequest, token: UUID) -> Changed:
        # Before the job is locked: who changes the type locks the consumer first, too.
        starts = request.wanted is JobState.INFLIGHT
        if starts and not self._is_pulled(connection, request.queue):
            return Changed("push")
        held = self._hold(connection, request)
        if held is None:
            return Changed("not_found")
        changed = self._lead(connection, request, held, token)
        return changed if held.died is None else replace(changed, died=held.died)

    def _is_pulled(self, connection: Connection, queue: str) -> bool:
        """Whether `queue` is a pull consumer's. On MySQL and MariaDB it stays so until the end of
        the transaction.
        """

        def build() -> Select[Any]:
            c = self._table.c
            of_consumer = (c.scope == bindparam("scope"), c.key == bindparam("consumer"))
            found = select(c.key, c.info).where(*of_consumer)
            # On PostgreSQL a shared lock would be a write of the consumer's row for each job.
            return found.with_for_update(read=True) if self._dialect.name in MYSQL else found

        scope, key = channels.place_of(queue)
        statement = self._dialect.built("type_of_consumer", build)
        row = connection.execute(statement, {"scope": scope, "consumer": key}).first()
        return row is not None and channels.registered(row.key, row.info).type == "pull"

    def _lead(
        self, connection: Connection, request: ChangeRequest, held: pull_jobs.Held, token: UUID
    ) -> Changed:
        state = held.state
        if held.token == token:
            # This request has taken it already, and the answer to that COMMIT was lost.
            return Changed("done", state, lease=token)
        step = step_to(state, request.wanted, with_timeout=request.with_timeout)
        if _has_lost(request, held, step):
            return Changed("lost", state)
        if step is None:
            return Changed("refused", state)
        if step in STARTS:
            return self._start(connection, request, held, token)
        ended = {Step.DELIVER: pull_jobs.delivered, Step.KILL: pull_jobs.killed}.get(step)
        if ended is None:
            return Changed("done", state)
        settlement = ended(held)
        self._dialect.settle(connection, [settlement])
        return Changed("done", state, ended=settlement)

    def _hold(self, connection: Connection, request: ChangeRequest) -> pull_jobs.Held | None:
        return pull_jobs.hold(
            connection, self._dialect, request.queue, request.job, request.max_retries
        )

    def _start(
        self, connection: Connection, request: ChangeRequest, held: pull_jobs.Held, token: UUID
    ) -> Changed:
        dialect = self._dialect
        pause = connection.execute(pull_jobs.pause_of_jobs(dialect), {"queue": request.queue})
        if pause.first() is not None:
            return Changed("paused", held.state)
        if held.state is JobState.QUEUED and not held.due:
            c = dialect.tables.message.c
            expired = select(c.id).where(c.id == held.id, c.expires_at <= clock())
            if connection.execute(expired).first() is None:
                return Changed("refused", held.state)
            self._discard_expired(connection, held.queue, [held.id])
            return Changed("expired", held.state)
        started = pull_jobs.start(connection, dialect, held, request.lease, token)
        if started is None:
            return Changed("refused", held.state)
        return Changed("done", held.state, token, started)

    async def extend(self, request: ChangeRequest) -> Changed:
        """Let the lease end `request.lease` seconds from now, never sooner than it does; "lost" if
        it is gone.
        """

        def work(connection: Connection) -> Changed:
            held = self._hold(connection, request)
            if held is None or held.token is None or held.token != request.token:
                return Changed("lost", died=None if held is None else held.died)
            lease = [(held.id, held.token)]
            renewed = held.id in self._dialect.renew(connection, lease, request.lease)
            return Changed("done" if renewed else "lost", held.state)

        return await self._database.run(work, *CONSUMING)

    async def overdue(self, queues: Sequence[str]) -> tuple[list[str], float | None]:
        """Those of `queues` with leases that have ended; and the seconds until the first lease of
        any ends, None without a lease.
        """

        def read(connection: Connection) -> tuple[list[str], float | None]:
            ends_in = self._dialect.lease_ends_in(connection, queues)
            if ends_in is None or ends_in > 0:
                return [], ends_in
            return self._with_ended_leases(connection, queues), ends_in

        return await self._database.run(read, *CONSUMING, write=False)

    def _with_ended_leases(self, connection: Connection, queues: Sequence[str]) -> list[str]:
        """Those of `queues` that have leases that have ended."""
        found: list[str] = []
        walk = self._ended_leases()
        queue = walk.table.c.queue
        for part in chunks(queues):
            over = walk.select(self._dialect, [queue]).where(queue.in_(part))
            found += connection.execute(over.order_by(None).distinct()).scalars()
        return found

    def _ended_leases(self) -> Walk:
        """Leases that have ended, of all queues."""
        table = self._dialect.tables.message
        mysql = self._dialect.name in MYSQL
        leased = text("lease_expires_at IS NOT NULL" if mysql else "state = 'PROCESSING'")
        where = (leased, table.c.lease_expires_at <= clock())
        return Walk("leased", table, "leased_index", where, (table.c.lease_expires_at, table.c.id))

    async def sweep(self, queue: str, max_retries: int) -> list[Settlement]:
        """Queue up to `SWEPT` jobs again whose time is over, and end those that had it too often;
        the ends.
        """
        walk = self._ended_leases()
        c = walk.table.c
        columns = [c.id, c.lease_token, c.deliveries_count, c.attempts_count]
        of_queue = walk.select(self._dialect, columns).where(c.queue == queue).limit(SWEPT)
        locking = of_queue.with_for_update(skip_locked=True)

        def work(connection: Connection) -> list[Settlement]:
            rows = connection.execute(locking).all()
            ended = pull_jobs.ends_of_cancelled(connection, self._dialect, rows)
            for row in rows:
                if row.deliveries_count > max_retries:
                    ended.setdefault(row.id, pull_jobs.timed_out(row.id, row.lease_token))
            ends = list(ended.values())
            if ends:
                self._dialect.settle(connection, ends)
            for row in rows:
                if row.id not in ended:
                    pull_jobs.requeue(connection, self._dialect, row.id, row.attempts_count)
            return ends

        return await self._database.run(work, *CONSUMING)


def _has_lost(request: ChangeRequest, held: pull_jobs.Held, step: Step | None) -> bool:
    """Whether the consumer names a lease that is not the job's."""
    if request.token is None or request.token == held.token:
        return False
    if held.state is JobState.INFLIGHT:
        return True
    # It wants to end what it no longer has; to start it anew is another matter.
    return step is None and request.wanted is not JobState.INFLIGHT


def _place(channel: str, consumer: str | None) -> tuple[str, str]:
    if consumer is None:
        return channels.CHANNEL, channel
    return channels.CONSUMER + channel, consumer
