"""A subscriber whose loops do not run by themselves: the test runs them step by step."""

import asyncio
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from faststream_sqlbroker.core.rows import ClaimedMessage, ReadyPair
from faststream_sqlbroker.flow.consumer import QueueConsumer
from faststream_sqlbroker.flow.deliver.worker_ends import Workers
from faststream_sqlbroker.subscriber.options import SubscriberSettings, replace_settings
from faststream_sqlbroker.testing.database import LiveRow


class SteppedConsumer(QueueConsumer):
    """A subscriber without loops, for tests.

    A `Pump` calls the parts of the real subscriber (claims, workers, writes of outcomes) step by
    step.
    """

    def __init__(
        self, pump: Any, *, time_passes: bool, settings: SubscriberSettings, **options: Any
    ) -> None:
        """Create the parts; `pump` is a `Pump`, `settings` and `options` are as in `QueueConsumer`.

        Unless `time_passes`, no batch waits to be filled, which would take forever.
        """
        if not time_passes:
            settings = replace_settings(settings, batch_max_wait=None)
        # Each delivery has its own task, and so its own context.
        self.settings = settings = replace_settings(settings, task_per_message=False)
        super().__init__(settings=settings, **options)
        self._pump = pump
        self._writing = asyncio.Lock()
        self.store = self._store
        self.table = self._store.tables.config.message_table_name
        self.title = f"the handler {', '.join(map(repr, self._handlers))}"

    @property
    def queues(self) -> tuple[str, ...]:
        """Queues that are not paused."""
        return () if self._stopping else self.registration.open_queues

    def iter_live(self) -> Iterator[LiveRow]:
        """Yield the live messages of the open queues, by due time, priority, id."""
        queues = self.queues
        return (row for row in self._pump.database.list_live(self.table) if row.queue in queues)

    def iter_due(self, now: int) -> Iterator[LiveRow]:
        """Yield the live messages that may start."""
        return (row for row in self.iter_live() if row.due <= now and row.lease_ends_at is None)

    def start_claims(self) -> None:
        """Let the pump claim for this subscriber; works without an event loop.

        No loop and no worker is started, and the subscriber joins the heartbeat passively: only
        pauses by the test itself reach it.
        """
        if not self._stopping:
            return
        self._start_life(pauses_known=True)
        if self._heartbeat is not None:
            self._heartbeat.add_passive(self.registration)
        self._pump.add(self)

    @override
    async def start(self) -> None:
        """Start, and deliver due messages."""
        self.start_claims()
        await self._pump.run_due()

    @override
    async def _end_workers(self, graceful_timeout: float | None) -> Workers:
        """Stop the tasks of the pump, which are the workers of this subscriber.

        Then the stop drains, cancels or abandons them like real workers.
        """
        self._workers = self._pump.list_delivery_tasks(self)
        return await super()._end_workers(graceful_timeout)

    async def wait_for_stop(self) -> None:
        """Wait for a stop that a handler has requested."""
        if self._stop_task is not None:
            await asyncio.wait((self._stop_task,))

    def abandon(self) -> None:
        """Stop at the end of the test without writing anything: the database is removed."""
        self._stopping = True
        self.registration.mark_stopping()
        if self._heartbeat is not None:
            self._heartbeat.remove_passive(self.registration)

    async def claim(self, now: int) -> float | None:
        """Claim a message, or a batch; return the seconds until the next poll, if known.

        A claim may examine only a part of the due messages, for example if policies hold back the
        first ones. It then asks for another poll immediately, and is repeated here.
        """
        settings = self.settings
        pairs = dict.fromkeys((row.queue, -row.rank) for row in self.iter_due(now))
        # Policies and order hold messages back, and a batch takes more than the first message.
        claims_several = settings.policies or settings.ordered or settings.batch
        ready_pairs = [
            ReadyPair(*pair, 0.0) for pair in list(pairs)[: None if claims_several else 1]
        ]
        poll_delay: float | None = 0.0
        # Search from the first due row, not from the end of the last claim. How long that position
        # is used depends on real time, so tests would differ from run to run.
        self._fetcher.reset_position()
        for _ in range(MAX_CLAIM_TRIES):
            limit = self.inflight.missing_count or settings.run_size
            count, poll_delay = await self._fetcher.claim_now(ready_pairs, limit)
            if count or poll_delay != 0:
                break
        return poll_delay

    def list_waiting(self) -> list[ClaimedMessage]:
        """Return the rows that are claimed and not taken by a worker yet."""
        return [row for row in self.inflight.waiting.items if row is not None]

    async def release_waiting(self) -> None:
        """Release rows that are claimed and not taken by a worker yet."""
        if self.list_waiting():
            self.inflight.release_waiting()
            await self.write_outcomes()

    async def deliver(self) -> None:
        """Run the handler on the first waiting row, or on the batch, and write the outcome.

        Called by the pump, in a task for each delivery, in place of a worker that runs many.
        """
        try:
            await self._make_worker().run_one()
        finally:
            await self.write_outcomes()

    async def write_outcomes(self) -> None:
        """Write all recorded outcomes now; retry outcomes that the database refused.

        The quarantine holds refused outcomes until they are retried; its tick returns None when it
        is empty. The lock lets one delivery write at a time.
        """
        async with self._writing:
            self._flusher.flush_soon()
            await self._flusher.flush_all()
            for _ in range(MAX_WRITE_TRIES):
                if await self._flusher.quarantine.tick() is None:
                    break
            if self._ack_first_tracker is not None:
                await self._ack_first_tracker.write_ended()

    async def renew_leases(self) -> None:
        """Renew the leases of running handlers that have reached the age for a renewal.

        Called at each jump of the clock, in place of the loop that renews leases.
        """
        if self.inflight.held:
            await self._lease_keeper.tick()


MAX_CLAIM_TRIES = 100
"""Polls of a claim that moves on past messages that may not start."""
MAX_WRITE_TRIES = 10
"""Tries to write outcomes that the database refuses; the real retries pause in between."""
