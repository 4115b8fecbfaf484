"""A subscriber's loops that do not run by themselves: the test moves them on, step by step."""

import asyncio
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from faststream_sqlbroker.core.rows import ClaimedMessage, ReadyPair
from faststream_sqlbroker.flow.consumer import Consumer
from faststream_sqlbroker.flow.deliver.worker_ends import Workers
from faststream_sqlbroker.subscriber.options import SubscriberSettings, changed
from faststream_sqlbroker.testing.database import LiveRow


class SteppedConsumer(Consumer):
    """The parts of a real subscriber, in the hands of a `Pump`: claims, workers, writes."""

    def __init__(
        self,
        pump: Any,
        *,
        time_passes: bool,
        settings: SubscriberSettings,
        **options: Any,
    ) -> None:
        """`pump` is a `Pump`; `settings` and `options` are those of `Consumer`.

        Unless `time_passes`, no batch waits to be filled: it would wait for ever.
        """
        if not time_passes:
            settings = changed(settings, batch_max_wait=None)
        # Each delivery has a task, and so a context, of its own.
        self.settings = settings = changed(settings, task_per_message=False)
        super().__init__(settings=settings, **options)
        self._pump = pump
        self._writing = asyncio.Lock()
        self.store = self._store
        self.table = self._store.tables.config.message_table_name
        self.title = f"the handler {', '.join(map(repr, self._handlers))}"

    @property
    def queues(self) -> tuple[str, ...]:
        """Those that are not paused."""
        return () if self._stopping else self.registration.open

    def live(self) -> Iterator[LiveRow]:
        """The messages of these, by due time, priority, id."""
        queues = self.queues
        return (row for row in self._pump.database.live(self.table) if row.queue in queues)

    def due(self, now: int) -> Iterator[LiveRow]:
        """Those of them that may start."""
        return (row for row in self.live() if row.due <= now and row.lease_ends is None)

    def begin(self) -> None:
        """`start`, without an event loop."""
        if not self._stopping:
            return
        self._begin(known=True)
        if self._heartbeat is not None:
            self._heartbeat.know(self.registration)
        self._pump.add(self)

    @override
    async def start(self) -> None:
        """Begin, and deliver what is due."""
        self.begin()
        await self._pump.run_due()

    @override
    async def _end_workers(self, graceful_timeout: float | None) -> Workers:
        self._workers = self._pump.deliveries_of(self)
        return await super()._end_workers(graceful_timeout)

    async def stopped(self) -> None:
        """Wait for a stop that a handler has asked for."""
        if self._stop_task is not None:
            await asyncio.wait((self._stop_task,))

    def end(self) -> None:
        """The test is over: nothing is written any more."""
        self._stopping = True
        self.registration.end()
        if self._heartbeat is not None:
            self._heartbeat.forget(self.registration)

    async def claim(self, now: int) -> float | None:
        """Claim one message, or a batch; in how many seconds to look again, if that is known."""
        s = self.settings
        pairs = dict.fromkeys((row.queue, -row.rank) for row in self.due(now))
        # Policies and order keep messages back, and a batch takes more than the first.
        several = s.policies or s.ordered or s.batch
        wanted = [ReadyPair(*pair, 0.0) for pair in list(pairs)[: None if several else 1]]
        again: float | None = 0.0
        # How long ago everything was read is measured in real time.
        self._fetcher.look_at_all()
        for _ in range(LOOKS):
            limit = self.inflight.missing or s.run_size
            count, again = await self._fetcher.claim_now(wanted, limit)
            if count or again != 0:
                break
        return again

    def waiting(self) -> list[ClaimedMessage]:
        """What is claimed and not taken yet."""
        return [row for row in self.inflight.waiting.items if row is not None]

    async def give_back(self) -> None:
        """Give back what is claimed and not taken yet."""
        if self.waiting():
            self.inflight.give_back_waiting()
            await self.write()

    async def deliver(self) -> None:
        """Run the handler on what waits first, and write the outcome."""
        try:
            await self._make_worker().run_one()
        finally:
            await self.write()

    async def write(self) -> None:
        """Write all outcomes."""
        async with self._writing:
            self._flusher.hurry()
            await self._flusher.empty()
            for _ in range(REPEATS):
                if await self._flusher.repeater.tick() is None:
                    break
            if self._first is not None:
                await self._first.write()

    async def renew(self) -> None:
        """Renew leases that are old."""
        if self.inflight.held:
            await self._keeper.tick()


LOOKS = 100
"""Looks of a claim that moves on through what may not start."""
REPEATS = 10
"""Tries to write what the database refuses; the real ones pause in between."""
