"""Jobs of channels: published to all consumers at once, taken and ended over HTTP."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from faststream_sqlbroker.core.channels import (
    MESSAGE_ID,
    Channels,
    JobState,
    PullJob,
    Registered,
    channel_id,
    consumer_type,
    is_id,
    queue_of,
)
from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.pull import Changed, ChangeRequest
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.fleet.housekeeping import BATCH, RemovedPolicies
from faststream_sqlbroker.flow.loop import Log, Loop
from faststream_sqlbroker.flow.metrics import DirectMetrics
from faststream_sqlbroker.flow.tasks.configured import BY_CONFIGURATION, Configured
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

LONGEST_PAUSE = 5.0
"""Seconds between two looks for leases that have ended; other processes may have given some."""
SHORTEST_PAUSE = 0.1
"""Seconds: a lease that ends just now is found by the next look."""

LATE_TAKES = (0.0, 0.05, 0.25)
"""Seconds before each look for jobs that were taken in spite of a consumer's change to push."""
CLEANED = 60.0
"""Seconds between two looks for states that have expired, such as those of lookup values."""
MOST_ROUNDS = 4
"""Times that one request ends expired jobs, and looks anew; then it passes over the others."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """What became of a message to a channel."""

    message_id: str
    """What its jobs have in common."""
    consumers: int
    jobs: int
    """Written: fewer than consumers if some had the message already."""


class PullJobs:
    """One broker's channels; its loop queues jobs again whose time is over."""

    def __init__(
        self,
        store: "Store",
        write: Callable[[Sequence[NewMessage], str], Awaitable[list[int | None]]],
        wakeups: Wakeups,
        options: Channels,
        *,
        log: Log,
        recorder: Recorder | None,
        subscribed: Callable[[], Mapping[str, str]],
        looks: bool = True,
    ) -> None:
        """Publish by `write`, which gets the channel with the rows; `subscribed` tells the queues
        of this process's subscribers, each with its worker's name. Without `looks` there is no
        loop: a request finds what is over.

        Raises:
            SetupError: nothing finished is kept, or a subscriber has the queue of a pull consumer.
        """
        if not store.channels.has_archive:
            raise SetupError(
                "channels need the archive, which knows what has become of a job: give the "
                "message_archive_table_name in SqlBrokerSchemaConfig"
            )
        self.store = store
        self._write = write
        self._looks = looks
        self._wakeups = wakeups
        self._options = options
        self._subscribed = subscribed
        self._metrics = DirectMetrics(recorder)
        self._loop = Loop("pull jobs", self._tick, log, wakeups.clock)
        self._configured = Configured(self._configure, wakeups.clock)
        self._clean_at = float("-inf")
        self._removed = RemovedPolicies(store, log, wakeups.clock)
        for channel, of_channel in options.channels.items():
            for name, consumer in of_channel.consumers.items():
                if consumer_type(consumer.type) == "pull":
                    refuse_subscriber(queue_of(channel, name), subscribed())

    def start(self) -> None:
        """Start the loop; without effect while it runs."""
        if self._looks and not self._loop.running:
            self._removed.begin(sleeps=False)
            self._loop.start(self._wakeups.outages)

    async def begin(self) -> None:
        """Make what the configuration names, and start the loop; without effect the second time.

        Raises:
            SetupError: a subscriber has the queue of a pull consumer.
        """
        self.start()
        await self._configured.begin()

    def makes_push(self, channel: str, consumer: str) -> bool:
        """Whether the configuration says that the consumer is a push one."""
        known = self._options.channels.get(channel)
        named = None if known is None else known.consumers.get(consumer)
        return named is not None and consumer_type(named.type) == "push"

    async def _configure(self) -> None:
        for channel, settings in self._options.channels.items():
            await self.store.channels.put(channel, by=BY_CONFIGURATION, token=settings.token)
            for name, consumer in settings.consumers.items():
                await self.put_consumer(
                    channel,
                    name,
                    kind=consumer.type,
                    by=BY_CONFIGURATION,
                    token=consumer.token,
                )

    async def stop(self) -> None:
        """End the loop."""
        await self._loop.stop()

    # Channels and consumers.

    async def put_channel(self, channel: str, *, by: str, rotate: bool = False) -> Registered:
        """Make the channel, or give it a new token.

        Raises:
            SetupError: `channel` cannot be an id.
        """
        found = await self.store.channels.put(channel_id(channel), by=by, rotate=rotate)
        assert found is not None  # noqa: S101 - only a consumer can be without its channel
        return found

    async def put_consumer(
        self,
        channel: str,
        consumer: str,
        *,
        kind: str | None,
        by: str,
        rotate: bool = False,
        token: str | None = None,
    ) -> Registered | None:
        """Make the consumer, or change it. None: there is no such channel.

        Raises:
            SetupError: an id or the type is not valid, or a subscriber has the queue of a pull
                consumer.
        """
        wanted = consumer_type(kind)
        queue = queue_of(channel_id(channel), channel_id(consumer))
        if wanted == "pull":
            refuse_subscriber(queue, self._subscribed())
            living = await self.store.live_subscribers.subscribers()
            refuse_subscriber(queue, {q: each.worker for each in living for q in each.queues})
        found = await self.store.channels.put(
            channel, consumer, by=by, kind=wanted, rotate=rotate, token=token
        )
        became_push = found is not None and (found.earlier_type, wanted) == ("pull", "push")
        if became_push and self.store.channels.takes_without_lock:
            await self._give_up(queue)
        return found

    async def _give_up(self, queue: str) -> None:
        """Queue again what statements take that have begun before the consumer was a push one."""
        for pause in LATE_TAKES:
            await self._wakeups.clock.sleep(pause)
            await self.store.channels.requeue_all(queue)

    async def find(self, channel: str) -> Registered | None:
        """The channel; None for what cannot be an id, which the database may refuse to look up."""
        return await self.store.channels.find(channel) if is_id(channel) else None

    async def both(
        self, channel: str, consumer: str
    ) -> tuple[Registered | None, Registered | None]:
        """The channel and the consumer; None as `find`."""
        if not (is_id(channel) and is_id(consumer)):
            return None, None
        of_channel, of_consumer = await self.store.channels.both(channel, consumer)
        return of_channel, of_consumer

    # Jobs.

    async def broadcast(
        self,
        channel: str,
        payload: bytes,
        content_type: str | None,
        priority: int,
        dedup_id: str | None = None,
    ) -> Broadcast:
        """Write a job for each consumer of the channel, in one transaction.

        A consumer whose queue has a job with the `dedup_id` already gets none.

        Raises:
            PublishError: the body is too large.
            QueueFullError: the queue of a consumer is full: no job is written.
        """
        message = uuid4().hex
        headers = {MESSAGE_ID: message}
        if content_type:
            headers["content-type"] = content_type
        told = json.dumps(headers)
        rows = [
            NewMessage(queue_of(channel, each.id), payload, told, priority, dedup_id=dedup_id)
            for each in await self.store.channels.consumers(channel)
        ]
        # A channel without consumers has nothing to publish.
        ids = await self._write(rows, channel) if rows else []
        self._metrics.published(rows, ids)
        return Broadcast(message, len(rows), len([i for i in ids if i is not None]))

    async def queued(
        self, queue: str, after: str | None, limit: int
    ) -> tuple[list[PullJob], str | None]:
        """A page of the jobs that are due, and where the next one begins.

        Raises:
            NotACursorError: `after` is not of such a list.
        """
        page = await self.store.channels.queued(queue, after, limit)
        if page.overdue:
            await self._sweep(queue)
            page = await self.store.channels.queued(queue, after, limit)
        # As a claim of a subscriber does: nothing else ends them, and each page would walk over
        # them again.
        for rounds in range(1, MOST_ROUNDS + 1):
            if not page.expired:
                break
            await self.store.channels.end_expired(queue, page.expired)
            more = rounds < MOST_ROUNDS
            page = await self.store.channels.queued(queue, after, limit, gone=more)
        return page.jobs, page.following

    async def job(self, queue: str, job_id: int) -> PullJob | None:
        """One job; one whose time is over is queued again first, or dead."""
        found = await self.store.channels.job(queue, job_id)
        if found is None or not found.over:
            return found
        end = await self.store.channels.end_overdue(queue, job_id, self._options.max_retries)
        if end is not None:
            self._metrics.settled(end, queue)
        return await self.store.channels.job(queue, job_id)

    async def change(
        self,
        queue: str,
        job_id: int,
        wanted: JobState,
        *,
        longer: int | None = None,
        token: UUID | None = None,
    ) -> Changed:
        """Lead the job to the state that is asked for, if that is allowed.

        `longer` are seconds added to the timeout of a start; `token` is the lease that the consumer
        believes to have, None if it does not say.
        """
        changed = await self.store.channels.change(
            self._request(queue, job_id, wanted, longer, token)
        )
        if changed.started is not None:
            self._metrics.taken([changed.started], [])
        for end in (changed.died, changed.ended):
            if end is not None:
                self._metrics.settled(end, queue)
        if changed.verdict == "lost":
            self._metrics.lost(queue, unknown=False)
        return changed

    async def extend(self, queue: str, job_id: int, token: UUID, *, longer: int = 0) -> bool:
        """Let the lease end after one more timeout and `longer` seconds; false if it is gone."""
        request = self._request(queue, job_id, JobState.INFLIGHT, longer, token)
        changed = await self.store.channels.extend(request)
        if changed.died is not None:
            self._metrics.settled(changed.died, queue)
        return changed.verdict == "done"

    def _request(
        self, queue: str, job_id: int, wanted: JobState, longer: int | None, token: UUID | None
    ) -> ChangeRequest:
        return ChangeRequest(
            queue=queue,
            job=job_id,
            wanted=wanted,
            lease=self._options.timeout + (longer or 0),
            max_retries=self._options.max_retries,
            with_timeout=longer is not None,
            token=token,
        )

    # What no consumer ends.

    async def _tick(self) -> float:
        queues = await self.store.channels.pulled()
        if not queues:
            return LONGEST_PAUSE
        await self._clean()
        if self._removed.due_in <= 0:
            # No subscriber may take from them any more.
            await self._removed.look(queues, sleeps=False)
        overdue, ends_in = await self.store.channels.overdue(queues)
        for queue in overdue:
            await self._sweep(queue)
        pause = LONGEST_PAUSE if ends_in is None else ends_in
        return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, pause))

    async def _clean(self) -> None:
        """Forget states that have expired, as a subscriber does: there may be none anywhere."""
        now = self._wakeups.clock.monotonic()
        if now < self._clean_at:
            return
        more = await self.store.forget_expired(BATCH) == BATCH
        self._clean_at = now + (0.0 if more else CLEANED)

    async def _sweep(self, queue: str) -> None:
        for end in await self.store.channels.sweep(queue, self._options.max_retries):
            self._metrics.settled(end, queue)


def refuse_subscriber(queue: str, subscribed: Mapping[str, str]) -> None:
    """Refuse a subscriber, with its policies, dead letters and limits, on a pull queue.

    Raises:
        SetupError: `queue` is among `subscribed`, each with its subscriber.
    """
    if queue in subscribed:
        raise SetupError(
            f"the queue {queue!r} has the subscriber {subscribed[queue]}: jobs of a pull "
            "consumer are taken over HTTP only, without policies and dead_letter_queue. Use "
            "the type push, or end the subscriber"
        )
