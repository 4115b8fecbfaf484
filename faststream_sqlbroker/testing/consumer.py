"""A subscriber's loops that do not run by themselves: the test moves them on, step by step."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from faststream_sqlbroker.core.rows import ClaimedMessage, ReadyPair
from faststream_sqlbroker.flow.consumer import Consumer
from faststream_sqlbroker.subscriber.options import SubscriberSettings, changed

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


class Owner(Protocol):
    """What moves subscribers on: a `Pump`."""

    def add(self, consumer: Any) -> None:
        """`consumer` claims from now on."""

    def remove(self, consumer: Any) -> None:
        """No longer."""

    def deliveries_of(self, consumer: Any) -> "set[asyncio.Task[Any]]":
        """The tasks that run its handlers."""

    async def run_due(self, *, limit: float | None = None) -> bool:
        """Deliver what is due."""


class SteppedConsumer(Consumer):
    """The parts of a real subscriber, in the hands of a `Pump`: claims, workers, writes."""

    def __init__(
        self, pump: Owner, *, time_passes: bool, settings: SubscriberSettings, **options: Any
    ) -> None:
        """`settings` and `options` are those of `Consumer`.

        Unless `time_passes`, no batch waits to be filled: it would wait for ever.
        """
        if not time_passes:
            settings = changed(settings, batch_max_wait=None)
        # Each delivery has a task, and so a context, of its own.
        settings = changed(settings, task_per_message=False)
        super().__init__(settings=settings, **options)
        self._pump = pump
        self._writing = asyncio.Lock()
        self.title = f"the subscriber of {', '.join(map(repr, self._settings.queues))}"

    @property
    def subscribed(self) -> tuple[str, ...]:
        """Its queues, also while they are paused."""
        return tuple(self._settings.queues)

    @property
    def queues(self) -> tuple[str, ...]:
        """Those that are not paused."""
        return () if self._stopping else self.registration.open

    @property
    def store(self) -> "Store":
        """Of its broker."""
        return self._store

    @property
    def table(self) -> str:
        """The name of the table of messages."""
        return self._store.tables.config.message_table_name

    @property
    def settings(self) -> Any:
        """The subscriber's."""
        return self._settings

    @property
    def looks_at_all(self) -> bool:
        """Whether a claim needs all due pairs: policies and order keep messages back."""
        return bool(self._settings.policies or self._settings.ordered)

    def name_after(self, handlers: Sequence[str]) -> None:
        """Name it in errors after its handlers."""
        if handlers:
            self.title = f"the handler {', '.join(map(repr, handlers))}"

    def begin(self) -> None:
        """`start`, without an event loop."""
        if not self._stopping:
            return
        self.registration.begin(known=True)
        self._build()
        self._stopping = False
        self._stop_task = None
        if self._heartbeat is not None:
            self._heartbeat.know(self.registration)
        self._pump.add(self)

    @override
    async def start(self) -> None:
        """Begin, and deliver what is due."""
        self.begin()
        await self._pump.run_due()

    @override
    async def _end_workers(self, graceful_timeout: float | None) -> "set[asyncio.Task[None]]":
        self._pump.remove(self)
        running = self._pump.deliveries_of(self) - {asyncio.current_task()}
        if running:
            _, late = await asyncio.wait(running, timeout=graceful_timeout)
            for task in late:
                self.cancel_worker(task)
            if late:
                await asyncio.wait(late)
        return set()

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

    async def claim(self, pairs: list[tuple[str, int]]) -> float | None:
        """Claim one message, or a batch; in how many seconds to look again, if that is known."""
        limit = self.inflight.missing or self._settings.run_size
        wanted = [ReadyPair(queue, priority, 0.0) for queue, priority in pairs]
        again: float | None = 0.0
        # How long ago everything was read is measured in real time.
        self._fetcher.look_at_all()
        for _ in range(LOOKS):
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
        worker = self._make_worker()
        try:
            await worker.run_one()
        finally:
            await self.write()

    async def write(self) -> None:
        """Write all outcomes."""
        async with self._writing:
            self._flusher.hurry()
            await self._flusher.empty()
            for _ in range(REPEATS):
                wait = await self._flusher.repeater.tick()
                if wait is None:
                    break
            if self._first is not None:
                await self._first.write()

    async def renew(self) -> None:
        """Renew leases that are old."""
        if self.inflight.held:
            await self._keeper.tick()

    @property
    def lease(self) -> float:
        """Seconds."""
        return self._settings.release_stuck_timeout

    @property
    def holds(self) -> bool:
        """Whether it has leases."""
        return bool(self.inflight.held)


LOOKS = 100
"""Looks of a claim that moves on through what may not start."""
REPEATS = 10
"""Tries to write what the database refuses; the real ones pause in between."""
