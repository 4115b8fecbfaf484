"""What subscribers with policies claim before a worker is free, on every database."""

import asyncio
from datetime import timedelta
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.util import await_only

from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.policies import Concurrency, Delay, Throttle
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Slot
from faststream_sqlbroker.flow.consumer import QueueConsumer
from faststream_sqlbroker.flow.deliver.policy_starts import PolicyRunner
from faststream_sqlbroker.flow.deliver.prefetch import HORIZON, HandlerTimes
from tests.flow.conftest import Rig, count_as_quick
from tests.flow.test_policies import archived, slot_of
from tests.flow.test_policy_limits import Process
from tests.helpers import eventually


async def start_quick(rig: Rig, go: asyncio.Event, **options: Any) -> QueueConsumer:
    """A consumer whose handler counts as quick, and waits for `go`."""

    async def handle(row: ClaimedMessage) -> None:
        rig.handled.append(row)
        await go.wait()
        row.record_outcome(Ack())

    consumer = rig.consumer(handle, max_workers=1, wakeup="poll", **options)
    await consumer.start()
    count_as_quick(consumer)
    return consumer


@pytest.mark.parametrize(
    "options",
    [
        {"policies": [Concurrency(1_000)]},
        {"policies": [Concurrency(2, per_key=True)]},
        {"policies": [Throttle(100_000, per="1s")]},
        {"policies": [Delay("1ms")]},
        {"ordered": True},
    ],
    ids=str,
)
async def test_quick_handlers_find_their_next_messages_waiting(
    rig: Rig, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim for each message would cost more than the message. What waits is leased for 20 s, so
    that it is back soon if its process dies."""
    monkeypatch.setattr("faststream_sqlbroker.flow.deliver.fetch.MAX_PREFETCH_WAIT", 600.0)
    go = asyncio.Event()
    consumer = await start_quick(rig, go, **options)
    await rig.store.insert([NewMessage("q", b"1", key=f"k{n}", delay=-1) for n in range(30)])
    await eventually(lambda: rig.handled and consumer.inflight.waiting.qsize() >= 20)
    assert len(rig.handled) == 1
    rows = await rig.rows()
    leases = {row["lease_expires_at"] - row["acquired_at"] for row in rows if row["acquired_at"]}
    assert max(leases) < timedelta(seconds=21)
    go.set()
    await archived(rig, 30)


async def test_what_waits_leaves_leases_to_free_workers_elsewhere(rig: Rig) -> None:
    """A quarter of those that are free: the other three start at once in other processes."""
    go = asyncio.Event()
    first = await start_quick(rig, go, policies=[Concurrency(5)])
    await rig.put(30)
    await eventually(lambda: first.inflight.waiting.qsize() == 1)
    others = [await start_quick(rig, go, policies=[Concurrency(5)]) for _ in range(3)]
    await eventually(lambda: len(rig.handled) == 4)
    assert sum(consumer.inflight.waiting.qsize() for consumer in (first, *others)) <= 1
    go.set()
    await archived(rig, 30)


async def test_the_rate_holds_whatever_a_commit_takes(rig: Rig) -> None:
    """Z10: lateness is measured from the reading of the clock, not from the answer to COMMIT."""
    process = Process(rig, [Throttle(5, per=0.5)])
    await rig.put(5)

    @event.listens_for(rig.store._engine.sync_engine, "commit")
    def late(_connection: Any) -> None:
        await_only(asyncio.sleep(0.4))

    asked = monotonic()
    now = await rig.store.server.read_now()
    answered = monotonic()
    claim = await process.claim()
    assert claim.rows
    for row in claim.rows:
        assert row.slot is not None
        assert row.slot.deadline is not None
        # By our clock the slot is between these.
        since = (slot_of(row) - now).total_seconds()
        assert asked + since - 0.01 < row.slot.earliest <= row.slot.latest
        deadline = (row.slot.deadline - row.slot.granted_at) / 1e6  # type: ignore[operator]
        assert row.slot.latest < answered + since + deadline + 0.01


async def test_a_slow_claim_does_not_put_the_next_one_off(rig: Rig) -> None:
    """The time to claim again is the database's: what the claim itself takes is part of it."""
    time = rig.shifted()
    throttle = Throttle(1, per="1h")
    consumer = rig.consumer(policies=[throttle], max_workers=2, max_fetch_interval=9_000.0)
    await rig.put(2)
    commits = 0

    @event.listens_for(rig.store._engine.sync_engine, "commit")
    def late(_connection: Any) -> None:
        nonlocal commits
        commits += 1
        time.shift += 1_000.0

    wait = await consumer._fetcher.tick()
    assert consumer.inflight.waiting.qsize() == 1
    assert commits > 0
    assert 1_000.0 < wait < 3_700.0 - 1_000.0 * commits


async def test_workers_that_wait_for_slots_do_not_count_as_stuck(rig: Rig) -> None:
    """They begin at their slots, and more is claimed before that."""
    clock = rig.wakeups.clock
    times = HandlerTimes(clock)
    now = clock.monotonic()
    times.record_end(now - 100.0 - HORIZON, now - 100.0)
    assert times.count_upcoming_starts(400, 0) == 0
    times.record_start(now + 1_000.0)
    times.record_start(now)
    times.record_end(now - 100.0 - HORIZON, now - 100.0)
    assert times.count_upcoming_starts(400, 0) > 300

    consumer = rig.consumer(policies=[Throttle(1, per="1h")])
    nothing: Any = None
    starts = PolicyRunner(rig.store, consumer.inflight, nothing, [], rig.log, bool, None)
    slot = Slot(now + 1_000.0, now + 2_000.0)
    row: Any = SimpleNamespace(slot=slot, slot_started=None, lease_lost=True)
    waiting = asyncio.create_task(starts.wait_for_slot(row))
    await eventually(lambda: consumer.inflight.times.starts_at >= now + 999.0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_busy_workers_put_the_next_claim_off(rig: Rig) -> None:
    """A throttle has slots to spare, but no worker: a claim at once would find the same."""
    throttle = Throttle(1_000, per="1s")
    consumer = rig.consumer(policies=[throttle], max_workers=400, max_fetch_interval=9_000.0)
    await rig.put(5)
    now = rig.wakeups.clock.monotonic()
    consumer.inflight.times.record_end(now - 60.0, now)
    consumer.inflight.running = 400
    assert await consumer._fetcher.tick() > 20.0
    assert consumer.inflight.waiting.qsize() == 0
    assert consumer.inflight.is_capacity_requested
