"""List and change the jobs of pull consumers.

A job's row is locked before its state is checked, so of two requests the second sees the result of
the first. The database's clock decides what a lease allows. Each operation is one transaction.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal
from uuid import UUID, uuid4

from sqlalchemy import Connection, case, literal, select

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.channels import JobsPage, PullJob, PullJobState, is_allowed
from faststream_sqlbroker.core.outcome import Discard, Release
from faststream_sqlbroker.core.reasons import EXPIRED, REJECTED
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.parts import pull_job_rows
from faststream_sqlbroker.database.parts.brought_back import lock_records, restore_messages
from faststream_sqlbroker.database.parts.channel_rows import get_consumer_key, parse_registration
from faststream_sqlbroker.database.parts.live_subscribers import match_active, match_pause
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.exceptions import UnknownOutcomeError
from faststream_sqlbroker.schema.types import MYSQL, clock

CONSUMING = (Activity.CONSUME, Activity.ARCHIVE, Activity.STATE, Activity.REDRIVE)
"""The database activities of a consumer's requests."""
_RULES = SettleRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRequest:
    """A consumer's request to change a job."""

    queue: str
    job: int
    target: PullJobState
    lease: float
    """Seconds, for a start."""
    with_timeout: bool = False
    token: UUID | None = None
    """The lease that the consumer believes to have; None if the request does not name it."""


ChangeStatus = Literal["done", "not_found", "over", "refused", "lost", "paused", "expired", "push"]


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """The result of a change request."""

    status: ChangeStatus
    """"over": the job's lease or lifetime is over, so call `end_leases` first."""
    state: PullJobState | None = None
    """The job's state before the change."""
    lease: UUID | None = None
    """The lease of a job that was started."""
    started: ClaimedMessage | None = None
    ended: Settlement | None = None


class PullJobStore(StoreSubject):
    """The jobs of pull consumers.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    @property
    def has_archive(self) -> bool:
        """True if finished jobs can be kept, which their states need."""
        return self._dialect.has_archive

    @property
    def claims_without_lock(self) -> bool:
        """True if a job may be claimed while the consumer's type changes, and a little later.

        A claim in a transaction locks the consumer's row; a single statement does not. In a cluster
        of MySQL or MariaDB with several writers, the lock holds on one server only.
        """
        return self._dialect.single_statement_jobs is not None or self._dialect.name in MYSQL

    async def list_queued(
        self, queue: str, after: str | None, limit: int, *, include_expired: bool = True
    ) -> JobsPage:
        """List a page of due jobs; with `include_expired`, also jobs that expired long ago.

        The caller then discards the expired jobs (`end_expired`). The first page takes a single
        statement where the database can.

        Raises:
            InvalidCursorError: `after` is not a cursor of this list.
        """
        single_statement_jobs = self._dialect.single_statement_jobs
        if single_statement_jobs is not None and after is None:
            first_page = single_statement_jobs.build_first_page(
                queue, limit, include_expired=include_expired
            )
            page: JobsPage = await self._database.run(first_page, *CONSUMING, write=False)
            return page
        return await self._database.run(
            lambda c: pull_job_rows.list_queued(
                c, self._dialect, queue, after, limit, gone=include_expired
            ),
            *CONSUMING,
            write=False,
        )

    async def read_job(self, queue: str, job_id: int) -> PullJob | None:
        """Read a job, live or archived."""

        def read_row(connection: Connection) -> PullJob | None:
            return pull_job_rows.read_job(connection, self._dialect, queue, job_id)

        return await self._database.run(read_row, *CONSUMING, write=False)

    async def end_leases(
        self, queue: str, max_retries: float, job_id: int | None = None
    ) -> list[Settlement]:
        """Release jobs of `queue` with an expired lease, or only the job `job_id`.

        A job with more than `max_retries` deliveries, or cancelled by an operator, ends instead.

        Returns:
            The settlements of those jobs.
        """

        def work(connection: Connection) -> list[Settlement]:
            return pull_job_rows.release_leases(
                connection, self._dialect, queue, max_retries, job_id=job_id
            )

        return await self._database.run(work, *CONSUMING)

    async def release_all(self, queue: str) -> None:
        """Release all jobs that are in flight; jobs cancelled by an operator end.

        Called after a consumer's change from pull to push, for jobs that a late claim has leased:
        its clients can no longer end the jobs.
        """
        await self._database.run(
            lambda c: pull_job_rows.release_leases(c, self._dialect, queue, ended=False), *CONSUMING
        )

    async def end_expired(self, queue: str, ids: Sequence[int]) -> None:
        """Discard the waiting jobs of `ids` whose lifetime has expired.

        Called with the expired jobs of a page, which was read in another transaction. Claims the
        jobs first: a dead job that was restarted since is no longer expired, and is released again.
        """
        token = uuid4()

        def work(connection: Connection) -> None:
            rows = self._dialect.claim_ids(connection, ids, [queue], 1.0, token)
            settlements = [
                _build_expiry(row) or settle(row, Release(), _RULES, ended_after=0.0)
                for row in rows
            ]
            if settlements:
                self._dialect.settle(connection, settlements)

        await self._database.run(work, *CONSUMING)

    async def change(self, request: ChangeRequest) -> ChangeResult:
        """Change the job to the requested state, if that is allowed.

        Tries a single statement first, where the database has one. If that changes nothing, or its
        answer is lost, a transaction that locks the job's row gives the exact status. After a lost
        answer it is repeated: the token, drawn once, shows whether this request has already claimed
        the job.
        """
        token = uuid4()
        query = self._build_quick_change(request, token)
        if query is not None:
            with suppress(UnknownOutcomeError):
                if (changed := await self._database.run(query, *CONSUMING)) is not None:
                    return changed

        def work(connection: Connection) -> ChangeResult:
            return self._change(connection, request, token)

        try:
            return await self._database.run(work, *CONSUMING)
        except UnknownOutcomeError:
            return await self._database.run(work, *CONSUMING)

    def _build_quick_change(
        self, request: ChangeRequest, token: UUID
    ) -> Query[ChangeResult | None] | None:
        """Build the change as a single statement, None if the database has no such statement.

        Covers the usual changes only: starting a queued job, and delivering a job in flight. The
        query's result is None if nothing was changed, for whatever reason.
        """
        single_statement_jobs = self._dialect.single_statement_jobs
        if single_statement_jobs is None:
            return None
        if request.target is PullJobState.INFLIGHT:
            claim = single_statement_jobs.build_claim(
                request.queue, request.job, request.lease, token
            )
            return claim.map_result(
                lambda row: ChangeResult("done", PullJobState.QUEUED, token, row)
            )
        if request.target is PullJobState.DELIVERED and not request.with_timeout:
            delivery = single_statement_jobs.build_deliver(
                request.queue, request.job, request.token
            )
            return delivery.map_result(
                lambda end: ChangeResult("done", PullJobState.INFLIGHT, ended=end)
            )
        return None

    def _change(self, connection: Connection, request: ChangeRequest, token: UUID) -> ChangeResult:
        """Lock the job, check the request against the state, and make the change.

        Returns "push" if the queue has no pull consumer. Returns "over" if the job's lease or
        lifetime is over: the caller then ends expired leases and requests the change again.
        """
        # Lock the consumer before the job, in the same order as a change of the consumer's type.
        starts = request.target is PullJobState.INFLIGHT
        if starts and not self._lock_pull_consumer(connection, request.queue):
            return ChangeResult("push")
        job = pull_job_rows.read_job(
            connection, self._dialect, request.queue, request.job, lock=True
        )
        if job is None:
            return ChangeResult("not_found")
        if job.token == token:
            # This request has claimed the job already, and the answer to that COMMIT was lost.
            return ChangeResult("done", job.state, lease=token)
        if (status := _check_request(request, job)) is not None:
            return ChangeResult(status, job.state)
        if job.state is request.target:
            return ChangeResult("done", job.state)
        if starts:
            return self._start(connection, request, job, token)
        settlement = _build_settlement(job, request.target)
        self._dialect.settle(connection, [settlement])
        return ChangeResult("done", job.state, ended=settlement)

    def _lock_pull_consumer(self, connection: Connection, queue: str) -> bool:
        """Return True if `queue` belongs to a pull consumer, and lock the consumer's type.

        The shared lock keeps an operator from making it a push consumer before this job is leased.
        It lasts until the end of the transaction.
        """
        scope, key = get_consumer_key(*queue.split("/", 1))
        c = self._table.c
        of_consumer = select(c.key, c.info).where(c.scope == scope, c.key == key)
        row = connection.execute(of_consumer.with_for_update(read=True)).first()
        return row is not None and parse_registration(row.key, row.info).type == "pull"

    def _start(
        self, connection: Connection, request: ChangeRequest, job: PullJob, token: UUID
    ) -> ChangeResult:
        """Lease the locked job for the consumer, unless the queue is paused or the job expired.

        A dead job is first restored from the archive, so that a consumer can retry it.
        """
        pause = select(self._table.c.key).where(
            match_pause(self._table, request.queue), match_active(self._table)
        )
        if connection.execute(pause).first() is not None:
            return ChangeResult("paused", job.state)
        if job.state is PullJobState.DEAD:
            self._restore_from_archive(connection, job.id)
        rows = self._dialect.claim_ids(connection, [job.id], [request.queue], request.lease, token)
        if not rows:
            return ChangeResult("refused", job.state)
        if (settlement := _build_expiry(rows[0])) is not None:
            self._dialect.settle(connection, [settlement])
            return ChangeResult("expired", job.state, ended=settlement)
        return ChangeResult("done", job.state, token, rows[0])

    def _restore_from_archive(self, connection: Connection, job_id: int) -> None:
        """Move the dead job from the archive to the message table, due now and without an expiry.

        A consumer may start a dead job again; the start then leases the restored row.
        """
        archive = self._dialect.archive
        new_values = {
            "state": literal(MessageState.PENDING.name),
            "publish_count": archive.c.publish_count + 1,
            # A job that ended before its first delivery is retried, too.
            "deliveries_count": case(
                (archive.c.deliveries_count < 1, 1), else_=archive.c.deliveries_count
            ),
            "next_attempt_at": clock(),
            # Both have expired by now, and an explicit start must run the job.
            "expires_at": None,
            "dedup_id": None,
        }
        # The records count the rows of an export's windows. A prune locks a record before the rows,
        # so it may wait for this row and hold the record: the database then ends one of the two
        # transactions with a transient error.
        records = lock_records(connection, self._dialect, [job_id])
        restore_messages(connection, self._dialect, [job_id], new_values, records)


def _build_expiry(row: ClaimedMessage) -> Settlement | None:
    """Build the end of a job that had expired before the claim, None for other jobs.

    The claim itself does not check the expiry; `acquired_at` is the time of the claim.
    """
    if row.expires_at is None or row.expires_at > row.acquired_at:
        return None
    return settle(row, Discard(EXPIRED), _RULES, ended_after=0.0, attempted=False)


def _build_settlement(job: PullJob, state: PullJobState) -> Settlement:
    """Build the settlement of a job that the consumer has delivered, or else rejected."""
    assert job.token is not None  # noqa: S101 - it is in flight
    if state is PullJobState.DELIVERED:
        return Settlement(job.id, job.token, MessageState.COMPLETED, ended_after=job.lease_age)
    return Settlement(
        job.id, job.token, MessageState.FAILED, ended_after=job.lease_age, reason=REJECTED
    )


def _check_request(request: ChangeRequest, job: PullJob) -> ChangeStatus | None:
    """Return the status that refuses the change, None for an allowed change.

    A request that names a lease which is no longer the job's is "lost": another delivery has the
    job.
    """
    if job.is_expired:
        return "over"
    allowed = is_allowed(job.state, request.target, with_timeout=request.with_timeout)
    if request.token is not None and request.token != job.token:
        # The consumer wants to end a job that it no longer holds; a new start is not affected.
        ends = not allowed and request.target is not PullJobState.INFLIGHT
        if ends or job.state is PullJobState.INFLIGHT:
            return "lost"
    return None if allowed else "refused"
