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
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping, RemovedPolicies
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
        wakeups: Wakeups,
        write: Callable[[Sequence[NewMessage], str], Awaitable[list[int | None]]],
        options: Channels,
        *,
        subscribed: Callable[[], Mapping[str, str]],
        log: Log,
        recorder: Recorder | None,
        looks: bool,
    ) -> None:
        """Publish by `write`, which gets the channel with the rows; `subscribed` tells the queues
        of this process's subscribers, each with its worker's name. Without `looks` there is no
        loop: a request finds what is over.

        Raises:
            SetupError: nothing finished is kept, or a subscriber has the queue of a pull consumer.
        """
        if not store.pull.has_archive:
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
        self._housekeeping = Housekeeping(store, log, wakeups.clock)
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
            await self.put(channel, by=BY_CONFIGURATION, token=settings.token)
            for name, consumer in settings.consumers.items():
                await self.put(
                    channel, name, by=BY_CONFIGURATION, kind=consumer.type, token=consumer.token
                )

    async def stop(self) -> None:
        """End the loop."""
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
    ) -> Registered | None:
        """Make the channel or its consumer, or change it. None: there is no such channel.

        Raises:
            SetupError: an id or the type is not valid, or a subscriber has the queue of a pull
                consumer.
        """
        channel_id(channel)
        wanted = "" if consumer is None else consumer_type(kind)
        queue = "" if consumer is None else queue_of(channel, channel_id(consumer))
        if wanted == "pull":
            refuse_subscriber(queue, self._subscribed())
            living = await self.store.live_subscribers.subscribers()
            refuse_subscriber(queue, {q: each.worker for each in living for q in each.queues})
        found = await self.store.tokens.put_channel(
            channel, consumer, by=by, kind=wanted, rotate=rotate, token=token
        )
        became_push = found is not None and (found.earlier_type, wanted) == ("pull", "push")
        if became_push and self.store.pull.takes_without_lock:
            await self._give_up(queue)
        return found

    async def _give_up(self, queue: str) -> None:
        """Queue again what statements take that have begun before the consumer was a push one."""
        for pause in LATE_TAKES:
            await self._wakeups.clock.sleep(pause)
            await self.store.pull.give_up(queue)

    async def find(self, channel: str, *consumer: str) -> list[Registered | None]:
        """The channel, and the consumer if it is given; None for what cannot be an id, which the
        database may refuse to look up.
        """
        if not all(map(is_id, (channel, *consumer))):
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
            for each in await self.store.tokens.consumers(channel)
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
        for rounds in range(MOST_ROUNDS + 1):
            more = rounds < MOST_ROUNDS
            page = await self.store.pull.queued(queue, after, limit, gone=more)
            if page.overdue and rounds == 0:
                await self._end_leases(queue)
            elif page.expired:
                # As a claim of a subscriber does: nothing else ends them, and each page would walk
                # over them again.
                await self.store.pull.end_expired(queue, page.expired)
            else:
                break
        return page.jobs, page.following

    async def job(self, queue: str, job_id: int) -> PullJob | None:
        """One job; one whose time is over is queued again first, or dead."""
        while (job := await self.store.pull.job(queue, job_id)) is not None and job.over:
            await self._end_leases(queue, job=job_id)
        return job

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
        request = ChangeRequest(
            queue=queue,
            job=job_id,
            wanted=wanted,
            lease=self._options.timeout + (longer or 0),
            with_timeout=longer is not None,
            token=token,
        )
        while (changed := await self.store.pull.change(request)).verdict == "over":
            await self._end_leases(queue, job=job_id)
        if changed.started is not None:
            self._metrics.taken([changed.started], [])
        if changed.ended is not None:
            self._metrics.settled(changed.ended, queue)
        if changed.verdict == "lost":
            self._metrics.lost(queue, unknown=False)
        return changed

    async def extend(self, queue: str, job_id: int, token: UUID, *, longer: int = 0) -> bool:
        """Let the lease end after one more timeout and `longer` seconds; false if it is gone."""
        lease = self._options.timeout + longer
        extended = await self.store.takes.extend_held(queue, job_id, token, lease, in_time=True)
        if extended is None:
            # Its time may be over.
            await self._end_leases(queue, job=job_id)
        return extended is not None

    # What no consumer ends.

    async def _tick(self) -> float:
        queues = await self.store.tokens.pulled()
        if not queues:
            return LONGEST_PAUSE
        await self._housekeeping.clean(CLEANED)
        if self._removed.due_in <= 0:
            # No subscriber may take from them any more.
            await self._removed.look(queues, sleeps=False)
        ends_in = await self.store.lease_ends_in(queues)
        if ends_in is not None and ends_in <= 0:
            # One by one: the index has the order of the leases of a queue, not of several.
            for queue in queues:
                await self._end_leases(queue)
        pause = LONGEST_PAUSE if ends_in is None else ends_in
        return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, pause))

    async def _end_leases(self, queue: str, job: int | None = None) -> None:
        """Give back jobs whose time is over, or one `job`; what had it too often ends."""
        most = self._options.max_retries
        for end in await self.store.pull.end_leases(queue, most, job):
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
