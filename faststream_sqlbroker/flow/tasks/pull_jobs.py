"""Jobs of channels: published to all consumers at once, claimed and settled over HTTP."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from faststream_sqlbroker.core.channels import (
    MESSAGE_ID,
    Channels,
    PullJob,
    PullJobState,
    RegisteredEndpoint,
    build_queue_name,
    is_valid_id,
    validate_consumer_type,
    validate_id,
)
from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.pull import ChangeRequest, ChangeResult
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping, RemovedPolicies
from faststream_sqlbroker.flow.loop import Log, Loop
from faststream_sqlbroker.flow.metrics import DirectMetrics
from faststream_sqlbroker.flow.tasks.configured import BY_CONFIGURATION, ConfiguredSetup
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

MAX_PAUSE = 5.0
"""Seconds between two searches for expired leases; other processes may have given some."""
MIN_PAUSE = 0.1
"""Seconds: the next search finds a lease that ends just now."""

LATE_CLAIM_PAUSES = (0.0, 0.05, 0.25)
"""Seconds before each search for jobs that were claimed in spite of a consumer's change to push."""
CLEAN_INTERVAL = 60.0
"""Seconds between two removals of expired state, such as lookup values."""
MAX_ROUNDS = 4
"""Times that one request ends expired jobs and reads again; then it skips the rest."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Result of a message to a channel."""

    message_id: str
    """Id that all its jobs share."""
    consumers: int
    jobs: int
    """Jobs written: fewer than consumers if some had the message already."""


class PullJobs:
    """The channels of a broker; a loop queues expired jobs again."""

    def __init__(
        self,
        store: "Store",
        wakeups: Wakeups,
        write: Callable[[Sequence[NewMessage], str], Awaitable[list[int | None]]],
        options: Channels,
        *,
        subscribed: Callable[[], Mapping[str, str]],
        log: Log,
        recorder: Recorder | None,
        has_poll_loop: bool,
    ) -> None:
        """Publish by `write`, which gets the channel with the rows.

        `subscribed` returns the queues of this process's subscribers, each with its worker's name.
        Without `has_poll_loop` there is no loop: a request finds expired jobs itself.

        Raises:
            SetupError: finished jobs are not archived, or a subscriber has the queue of a pull
                consumer.
        """
        if not store.pull.has_archive:
            raise SetupError(
                "channels need the archive, which records how each job ended: set "
                "message_archive_table_name in SqlBrokerSchemaConfig"
            )
        self.store = store
        self._write = write
        self._has_poll_loop = has_poll_loop
        self._wakeups = wakeups
        self._options = options
        self._subscribed = subscribed
        self._metrics = DirectMetrics(recorder)
        self._loop = Loop("pull jobs", self._tick, log, wakeups.clock)
        self._configured = ConfiguredSetup(self._configure, wakeups.clock)
        self._housekeeping = Housekeeping(store, log, wakeups.clock)
        self._removed_policies = RemovedPolicies(store, log, wakeups.clock)
        for channel, of_channel in options.channels.items():
            for name, consumer in of_channel.consumers.items():
                if validate_consumer_type(consumer.type) == "pull":
                    refuse_subscriber(build_queue_name(channel, name), subscribed())

    def start(self) -> None:
        """Start the loop; no effect while running."""
        if self._has_poll_loop and not self._loop.is_running:
            self._removed_policies.start(is_sleeping=False)
            self._loop.start(self._wakeups.outages)

    async def setup(self) -> None:
        """Create what the configuration names, and start the loop; no effect the second time.

        Called before each request of a client, so that the first one does the work.

        Raises:
            SetupError: a subscriber has the queue of a pull consumer.
        """
        self.start()
        await self._configured.run_once()

    def is_push(self, channel: str, consumer: str) -> bool:
        """Return True if the configuration declares the consumer as a push consumer.

        A pull consumer claims jobs over HTTP; a push consumer's queue has a subscriber.
        """
        settings = self._options.channels.get(channel)
        configured = None if settings is None else settings.consumers.get(consumer)
        return configured is not None and validate_consumer_type(configured.type) == "push"

    async def _configure(self) -> None:
        """Create or change the channels and consumers that the configuration declares.

        The audit names the configuration as the author (`by`).
        """
        for channel, settings in self._options.channels.items():
            await self.put(channel, by=BY_CONFIGURATION, token=settings.token)
            for name, consumer in settings.consumers.items():
                await self.put(
                    channel, name, by=BY_CONFIGURATION, kind=consumer.type, token=consumer.token
                )

    async def stop(self) -> None:
        """Stop the loop."""
        await self._loop.stop()

    # Channels and consumers.

    async def put(
        self,
        channel: str,
        consumer: str | None = None,
        *,
        by: str,
        kind: str | None = None,
        rotate: bool = False,
        token: str | None = None,
    ) -> RegisteredEndpoint | None:
        """Create or change the channel or a consumer; return None if there is no such channel.

        A queue has either a pull consumer or a subscriber, in any process. After a change from pull
        to push, jobs that are claimed over HTTP are released for the subscriber.

        Raises:
            SetupError: an id or the type is not valid, or a subscriber has the queue of a pull
                consumer.
        """
        validate_id(channel)
        new_type = "" if consumer is None else validate_consumer_type(kind)
        queue = "" if consumer is None else build_queue_name(channel, validate_id(consumer))
        if new_type == "pull":
            refuse_subscriber(queue, self._subscribed())
            subscribers = await self.store.live_subscribers.list_subscribers()
            refuse_subscriber(
                queue,
                {q: subscriber.worker for subscriber in subscribers for q in subscriber.queues},
            )
        registered = await self.store.tokens.set_channel(
            channel, consumer, by=by, kind=new_type, rotate=rotate, token=token
        )
        became_push = registered is not None and (registered.previous_type, new_type) == (
            "pull",
            "push",
        )
        if became_push and self.store.pull.claims_without_lock:
            await self._requeue_claimed(queue)
        return registered

    async def _requeue_claimed(self, queue: str) -> None:
        """Release jobs of `queue` that are claimed after the consumer's change to push.

        Some databases claim without a lock on the consumer: a claim that started before the change
        may commit after it. Hence several searches, the last one after a short pause.
        """
        for pause in LATE_CLAIM_PAUSES:
            await self._wakeups.clock.sleep(pause)
            await self.store.pull.release_all(queue)

    async def find_channel(self, channel: str, *consumer: str) -> list[RegisteredEndpoint | None]:
        """Return a list of the channel, and of the consumer if given.

        None stands for a channel or consumer that does not exist, and for each if an id is invalid:
        the database may refuse to look such an id up.
        """
        if not all(map(is_valid_id, (channel, *consumer))):
            return [None] * (1 + len(consumer))
        return await self.store.tokens.find(channel, *consumer)

    # Jobs.

    async def broadcast(
        self,
        channel: str,
        payload: bytes,
        content_type: str | None,
        priority: int,
        dedup_id: str | None = None,
    ) -> Broadcast:
        """Write a job for each consumer of the channel, in a single transaction.

        A job is the message in a consumer's own queue; all jobs share the id of the broadcast. A
        consumer whose queue has a job with the `dedup_id` already gets none.

        Raises:
            PublishError: the body is too large.
            QueueFullError: the queue of a consumer is full: no job is written.
        """
        message = uuid4().hex
        headers = {MESSAGE_ID: message}
        if content_type:
            headers["content-type"] = content_type
        encoded_headers = json.dumps(headers)
        rows = [
            NewMessage(
                build_queue_name(channel, consumer.id),
                payload,
                encoded_headers,
                priority,
                dedup_id=dedup_id,
            )
            for consumer in await self.store.tokens.list_consumers(channel)
        ]
        # A channel without consumers has nothing to publish.
        ids = await self._write(rows, channel) if rows else []
        self._metrics.record_published(rows, ids)
        return Broadcast(message, len(rows), len([i for i in ids if i is not None]))

    async def list_queued(
        self, queue: str, after: str | None, limit: int
    ) -> tuple[list[PullJob], str | None]:
        """Return a page of the due jobs, and the key of the next page.

        Expired leases and expired jobs would make the page wrong, so they are ended first, and the
        page is read again. After `MAX_ROUNDS` tries expired jobs are left out instead.

        Raises:
            InvalidCursorError: `after` does not belong to such a list.
        """
        for rounds in range(MAX_ROUNDS + 1):
            has_rounds = rounds < MAX_ROUNDS
            page = await self.store.pull.list_queued(
                queue, after, limit, include_expired=has_rounds
            )
            if page.has_expired_leases and rounds == 0:
                await self._end_leases(queue)
            elif page.expired_ids:
                # As a subscriber's claim does: nothing else ends expired jobs, and each page would
                # read over them again.
                await self.store.pull.end_expired(queue, page.expired_ids)
            else:
                break
        return page.jobs, page.next_cursor

    async def get_job(self, queue: str, job_id: int) -> PullJob | None:
        """Return a job, or None without such a job.

        A job whose lease or lifetime is over is queued again first, or ended, and then read again,
        so that the caller does not see it as running.
        """
        while (job := await self.store.pull.read_job(queue, job_id)) is not None and job.is_expired:
            await self._end_leases(queue, job=job_id)
        return job

    async def change(
        self,
        queue: str,
        job_id: int,
        new_state: PullJobState,
        *,
        longer: int | None = None,
        token: UUID | None = None,
    ) -> ChangeResult:
        """Change the job to the requested state, if that is allowed.

        `longer` are seconds added to the timeout of a start. `token` is the lease that the consumer
        believes it holds, None if it does not say. The status "over" means that the job's lease or
        lifetime is over: that is settled first, and the change repeated.
        """
        request = ChangeRequest(
            queue=queue,
            job=job_id,
            target=new_state,
            lease=self._options.timeout + (longer or 0),
            with_timeout=longer is not None,
            token=token,
        )
        while (changed := await self.store.pull.change(request)).status == "over":
            await self._end_leases(queue, job=job_id)
        if changed.started is not None:
            self._metrics.record_claim([changed.started], [])
        if changed.ended is not None:
            self._metrics.record_settled(changed.ended, queue)
        if changed.status == "lost":
            self._metrics.record_lost(queue, unknown=False)
        return changed

    async def extend(self, queue: str, job_id: int, token: UUID, *, longer: int = 0) -> bool:
        """Extend the lease by another timeout and `longer` seconds from now; return False if lost.

        A lease that has expired cannot be extended, even if no consumer has claimed the job since.
        """
        lease = self._options.timeout + longer
        extended = await self.store.direct_claims.extend_held(
            queue, job_id, token, lease, in_time=True
        )
        if extended is None:
            # The lease may have expired.
            await self._end_leases(queue, job=job_id)
        return extended is not None

    # Expired jobs, which no consumer ends.

    async def _tick(self) -> float:
        """Release expired jobs and clean up; return the seconds until the next tick.

        An expired job is one whose consumer let its lease end. The queues of pull consumers have no
        subscriber, which would do this for other queues.
        """
        queues = await self.store.tokens.list_pulled_queues()
        if not queues:
            return MAX_PAUSE
        await self._housekeeping.clean(CLEAN_INTERVAL)
        if self._removed_policies.due_in <= 0:
            # Messages may wait for policies of subscribers that had these queues before.
            await self._removed_policies.free_waiting(queues, is_sleeping=False)
        expires_in = await self.store.get_seconds_to_lease_end(queues)
        if expires_in is not None and expires_in <= 0:
            # One queue at a time: the index orders the leases of one queue, not of several.
            for queue in queues:
                await self._end_leases(queue)
        pause = MAX_PAUSE if expires_in is None else expires_in
        return min(MAX_PAUSE, max(MIN_PAUSE, pause))

    async def _end_leases(self, queue: str, job: int | None = None) -> None:
        """Release expired jobs, or only `job`; a job whose lease has run out too often ends.

        An expired job is one whose consumer has neither ended it nor extended its lease in time.
        """
        max_retries = self._options.max_retries
        for settlement in await self.store.pull.end_leases(queue, max_retries, job):
            self._metrics.record_settled(settlement, queue)


def refuse_subscriber(queue: str, subscribed: Mapping[str, str]) -> None:
    """Refuse a subscriber, with policies, dead letters and limits, on the queue of a pull consumer.

    Jobs would then go to either, and only the subscriber keeps its rules.

    Raises:
        SetupError: `queue` is among `subscribed`, each with its subscriber.
    """
    if queue in subscribed:
        raise SetupError(
            f"queue {queue!r} has the subscriber {subscribed[queue]}, but jobs of a pull consumer "
            "are claimed over HTTP only, without policies and dead_letter_queue. Change the "
            "consumer's type to push, or stop the subscriber."
        )
