"""One subscriber's loops over a real database, without FastStream."""

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.flow import consumer as consumers
from faststream_sqlbroker.flow import shielded
from faststream_sqlbroker.flow.consumer import QueueConsumer
from faststream_sqlbroker.flow.deliver import ended_transactions, worker_ends
from faststream_sqlbroker.flow.loop import Loop
from faststream_sqlbroker.flow.publish import Publisher
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.subscriber.options import make_settings
from tests.clock import ShiftedTime
from tests.contract.conftest import Bench
from tests.helpers import eventually
from tests.quick_tables import TABLES

PATIENCE = 60.0
"""Seconds that a stop gives to what ends by itself."""


class Rig(Bench):
    """A store with publisher and wake-ups, and consumers that stop at the end of the test."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.logs: list[tuple[int, str]] = []
        self.wakeups = Wakeups(store, self.log)
        self.publisher = Publisher(store, self.wakeups)
        self.handled: list[ClaimedMessage] = []
        self.consumers: list[QueueConsumer] = []

    def log(self, level: int, text: str, **_: Any) -> None:
        """Keep what the loops say."""
        self.logs.append((level, text))

    def logged(self, part: str) -> list[str]:
        """Texts that contain `part`."""
        return [text for _, text in self.logs if part in text]

    def shifted(self) -> ShiftedTime:
        """The time of the consumers that are made from now on, which the test lets jump."""
        time = ShiftedTime()
        self.wakeups.clock.use(time)
        return time

    async def ack(self, row: ClaimedMessage) -> None:
        """The plain handler."""
        self.handled.append(row)
        row.record_outcome(Ack())

    def consumer(
        self,
        handle: Callable[[Any], Awaitable[Any]] | None = None,
        queues: str | list[str] | dict[str, int] = "q",
        *,
        ack_first: bool = False,
        store: Store | None = None,
        **options: Any,
    ) -> QueueConsumer:
        """A consumer that is not started yet."""
        consumer = QueueConsumer(
            store=store or self.store,
            wakeups=self.wakeups,
            settings=make_settings(queues, options),  # type: ignore[arg-type]
            handle=handle or self.ack,
            log=self.log,
            ack_first=ack_first,
        )
        self.consumers.append(consumer)
        return consumer


def count_as_quick(consumer: QueueConsumer) -> None:
    """Let the handler of `consumer`, just started, count as one that takes no time: what it may
    prefetch is claimed."""
    times = consumer.inflight.times
    times.record_end(time.monotonic() - 0.001, time.monotonic())
    # A busy machine may take longer to claim than the time after which a handler counts as stuck.
    times.ended_at = math.inf
    consumer._fetch_loop.wake()


async def ticks(loop: Loop, count: int = 2) -> None:
    """Wait until `loop` has worked so many times more; the first time may have begun before."""
    for _ in range(count):
        before = loop.succeeded_at
        loop.wake()
        await eventually(lambda before=before: loop.succeeded_at != before)


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """A stop cuts nothing off that ends by itself, however long a process or the server stands
    still."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_ends, "CANCEL_GRACE", PATIENCE)
        patch.setattr(consumers, "FINAL_FLUSH_TIMEOUT", PATIENCE)
        for module in (worker_ends, ended_transactions, shielded):
            patch.setattr(module, "SHIELDED_TIMEOUT", PATIENCE)
        yield


@pytest.fixture
async def rig(engine: AsyncEngine) -> AsyncIterator[Rig]:
    store = Store(engine, TABLES)
    await store.server.create_tables()
    await store.server.setup()
    rig = Rig(store)
    yield rig
    for consumer in rig.consumers:
        await consumer.stop(0)
    await rig.wakeups.stop()
