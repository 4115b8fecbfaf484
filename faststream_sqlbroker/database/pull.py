"""Jobs of pull consumers: which there are, and what their clients do with them.

A job's row is locked before its state is judged, so of two requests the second sees what the first
has done. What a lease allows is decided by the database's clock. Each operation is one transaction.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal
from uuid import UUID, uuid4

from sqlalchemy import Connection, case, literal, select

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.channels import JobsPage, JobState, PullJob, is_allowed
from faststream_sqlbroker.core.outcome import Discard, Release
from faststream_sqlbroker.core.reasons import EXPIRED, REJECTED
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import pull_jobs
from faststream_sqlbroker.database.parts.brought_back import bring_back, lock_records
from faststream_sqlbroker.database.parts.channels import place_of_consumer, registered
from faststream_sqlbroker.database.parts.live_subscribers import is_lasting, pause_of
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.exceptions import UnknownOutcomeError
from faststream_sqlbroker.schema.types import clock

CONSUMING = (Activity.CONSUME, Activity.ARCHIVE, Activity.STATE, Activity.REDRIVE)
"""What a consumer's requests do in the database."""
_RULES = SettleRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRequest:
    """What a consumer asks for one of its jobs."""

    queue: str
    job: int
    wanted: JobState
    lease: float
    """Seconds, for a start."""
    with_timeout: bool = False
    token: UUID | None = None
    """The lease that the consumer believes to have; None: it does not say."""


Verdict = Literal["done", "not_found", "over", "refused", "lost", "paused", "expired", "push"]


@dataclass(frozen=True, slots=True)
class Changed:
    """What became of it."""

    verdict: Verdict
    """"over": its time is over, so `end_leases` comes first."""
    state: JobState | None = None
    """Where the job was."""
    lease: UUID | None = None
    """Of a job that was started."""
    started: ClaimedMessage | None = None
    ended: Settlement | None = None


class PullStore:
    """Reads and writes jobs.

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
        return await self._database.run(
            lambda c: pull_jobs.queued(c, self._dialect, queue, after, limit, gone=gone),
            *CONSUMING,
            write=False,
        )

    async def job(self, queue: str, job_id: int) -> PullJob | None:
        """One job, live or archived."""

        def read(connection: Connection) -> PullJob | None:
            return pull_jobs.read_job(connection, self._dialect, queue, job_id)

        return await self._database.run(read, *CONSUMING, write=False)

    async def end_leases(
        self, queue: str, max_retries: float, job_id: int | None = None
    ) -> list[Settlement]:
        """Give back jobs of `queue` whose time is over, or the one with `job_id`; the ends of those
        that had it too often.
        """

        def work(connection: Connection) -> list[Settlement]:
            return pull_jobs.end_leases(
                connection, self._dialect, queue, max_retries, job_id=job_id
            )

        return await self._database.run(work, *CONSUMING)

    async def give_up(self, queue: str) -> None:
        """Give back all jobs that are in flight; those that an operator has cancelled end."""
        await self._database.run(
            lambda c: pull_jobs.end_leases(c, self._dialect, queue, ended=False), *CONSUMING
        )

    async def end_expired(self, queue: str, ids: Sequence[int]) -> None:
        """Discard those of the jobs `ids` that wait and have expired."""
        token = uuid4()

        def work(connection: Connection) -> None:
            # Leased as any other: one that was dead since, and was taken again, lives.
            rows = self._dialect.claim_ids(connection, ids, [queue], 1.0, token)
            ends = [_expiry(row) or settle(row, Release(), _RULES, ended_after=0.0) for row in rows]
            if ends:
                self._dialect.settle(connection, ends)

        await self._database.run(work, *CONSUMING)

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
        job = pull_jobs.read_job(connection, self._dialect, request.queue, request.job, lock=True)
        if job is None:
            return Changed("not_found")
        if job.token == token:
            # This request has taken it already, and the answer to that COMMIT was lost.
            return Changed("done", job.state, lease=token)
        if (verdict := _refusal(request, job)) is not None:
            return Changed(verdict, job.state)
        if job.state is request.wanted:
            return Changed("done", job.state)
        if starts:
            return self._start(connection, request, job, token)
        end = _end(job, request.wanted)
        self._dialect.settle(connection, [end])
        return Changed("done", job.state, ended=end)

    def _is_pulled(self, connection: Connection, queue: str) -> bool:
        """Whether `queue` is a pull consumer's, which it stays until the end of the transaction."""
        scope, key = place_of_consumer(*queue.split("/", 1))
        c = self._table.c
        of_consumer = select(c.key, c.info).where(c.scope == scope, c.key == key)
        row = connection.execute(of_consumer.with_for_update(read=True)).first()
        return row is not None and registered(row.key, row.info).type == "pull"

    def _start(
        self, connection: Connection, request: ChangeRequest, job: PullJob, token: UUID
    ) -> Changed:
        """Lease the locked job; a dead one comes back from the archive first."""
        pause = select(self._table.c.key).where(
            pause_of(self._table, request.queue), is_lasting(self._table)
        )
        if connection.execute(pause).first() is not None:
            return Changed("paused", job.state)
        if job.state is JobState.DEAD:
            self._bring_back(connection, job.id)
        rows = self._dialect.claim_ids(connection, [job.id], [request.queue], request.lease, token)
        if not rows:
            return Changed("refused", job.state)
        if (end := _expiry(rows[0])) is not None:
            self._dialect.settle(connection, [end])
            return Changed("expired", job.state, ended=end)
        return Changed("done", job.state, token, rows[0])

    def _bring_back(self, connection: Connection, job_id: int) -> None:
        archive = self._dialect.tables.archive
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
        records = lock_records(connection, self._dialect, [job_id])
        bring_back(connection, self._dialect, [job_id], new, records)


def _expiry(row: ClaimedMessage) -> Settlement | None:
    """The end of a job that has expired before its claim; None: it has not."""
    if row.expires_at is None or row.expires_at > row.acquired_at:
        return None
    return settle(row, Discard(EXPIRED), _RULES, ended_after=0.0, attempted=False)


def _end(job: PullJob, state: JobState) -> Settlement:
    """The end of a job that its consumer has done, or gives up."""
    assert job.token is not None  # noqa: S101 - it is in flight
    if state is JobState.DELIVERED:
        return Settlement(job.id, job.token, MessageState.COMPLETED, ended_after=job.age)
    return Settlement(job.id, job.token, MessageState.FAILED, ended_after=job.age, reason=REJECTED)


def _refusal(request: ChangeRequest, job: PullJob) -> Verdict | None:
    """Why the job does not change; None: it does, or is in that state already."""
    if job.over:
        return "over"
    allowed = is_allowed(job.state, request.wanted, with_timeout=request.with_timeout)
    if request.token is not None and request.token != job.token:
        # It wants to end what it no longer has; to start it anew is another matter.
        ends = not allowed and request.wanted is not JobState.INFLIGHT
        if ends or job.state is JobState.INFLIGHT:
            return "lost"
    return None if allowed else "refused"
