"""What waits for a worker has no more than max_prefetch_bytes; nothing is left out for it."""

import asyncio
from typing import Any

import pytest

from faststream_sqlbroker import Throttle
from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.flow.consumer import QueueConsumer
from tests.flow.conftest import Rig, count_as_quick
from tests.helpers import eventually

FAST: Any = {"max_fetch_interval": 0.05, "flush_interval": 0.01, "wakeup": "poll"}
LIMIT = 10_000
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several workers": {"max_workers": 4},
    "ordered": {"ordered": True},
    "batch": {"batch": True},
    "acked first": {"ack_first": True},
    "gathered": {"batch": True, "batch_max_wait": 0.05},
    "throttled": {"policies": [Throttle(1_000, per="1s")]},
    "transactional": {"transactional": True, "max_workers": 2},
}
SIZES = [2_500] * 12 + [50_000] + [10] * 30 + [9_000, 50_000, 50_000] + [10] * 5


class Watch:
    """Handles, and notes how much is held for it, and waits."""

    def __init__(self) -> None:
        self.handled: list[int] = []
        self.waited: list[tuple[int, int]] = []
        self.batches: list[int] = []
        self.consumer: QueueConsumer

    async def __call__(self, rows: Any) -> None:
        self.waited.append(self.consumer.inflight.measure_prefetched())
        given = rows if isinstance(rows, tuple) else (rows,)
        self.batches.append(sum(len(row.payload) for row in given))
        # The next claim is answered while this runs.
        await asyncio.sleep(0.01)
        for row in given:
            self.handled.append(len(row.payload))
            row.record_outcome(Ack())


async def publish(rig: Rig, sizes: list[int]) -> None:
    await rig.store.insert([NewMessage("q", bytes(size), key="k") for size in sizes])


def known_large(consumer: QueueConsumer) -> None:
    """Let large bodies be known, as after the first claim."""
    row = ClaimedMessage(*(1, "q", bytes(LIMIT), *(None,) * 13))  # type: ignore[arg-type]
    consumer.inflight.prefetch.record_claim([row])


@pytest.mark.parametrize("kind", KINDS)
async def test_all_are_handled_within_the_limit(kind: str, rig: Rig) -> None:
    watch = Watch()
    consumer = watch.consumer = rig.consumer(watch, **FAST, **KINDS[kind], max_prefetch_bytes=LIMIT)
    await publish(rig, SIZES)
    await consumer.start()
    known_large(consumer)
    count_as_quick(consumer)

    async def ended() -> bool:
        return not await rig.rows()

    await eventually(ended)
    # What is acked first is archived before its handler has ended.
    await eventually(lambda: len(watch.handled) >= len(SIZES))
    assert sorted(watch.handled) == sorted(SIZES)
    rows = await rig.rows(archive=True)
    assert {(row["state"], row["attempts_count"]) for row in rows} == {("COMPLETED", 1)}
    assert {row["deliveries_count"] for row in rows} == {1}, "what was given back is not charged"
    assert all(size <= LIMIT or count == 1 for size, count in watch.waited), watch.waited
    if KINDS[kind].get("batch"):
        assert all(size <= LIMIT or size == 50_000 for size in watch.batches), watch.batches


async def test_surplus_is_given_back_and_told(rig: Rig) -> None:
    """The first claim does not know how large bodies are."""
    end = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        await end.wait()
        row.record_outcome(Ack())

    consumer = rig.consumer(handle, **FAST, max_prefetch_bytes=LIMIT, max_workers=8)
    await publish(rig, [3_000] * 8)
    await consumer.start()
    await eventually(lambda: len(consumer.inflight.held) == 8, timeout=60)
    end.set()

    async def ended() -> bool:
        return len(await rig.rows(archive=True)) == 8

    await eventually(ended)
    rows = await rig.rows(archive=True)
    assert {row["deliveries_count"] for row in rows} == {1}
    [line] = rig.logged("max_prefetch_bytes=10000 would wait for a worker")
    assert line.startswith("5 claimed messages released without counting a delivery")


async def test_without_a_limit_all_are_claimed(rig: Rig) -> None:
    end = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        await end.wait()
        row.record_outcome(Ack())

    consumer = rig.consumer(handle, **FAST, max_prefetch_bytes=None)
    await publish(rig, [30_000] * 8)
    await consumer.start()
    count_as_quick(consumer)
    await eventually(lambda: len(consumer.inflight.held) == 8)
    assert not rig.logged("max_prefetch_bytes")
    end.set()
