"""ordered=True in the loops: one message of a key at a time, in order (promise 7)."""

import asyncio
from collections import defaultdict
from typing import Any
from unittest.mock import patch

from faststream_sqlbroker.core.outcome import Ack, Nack, Reject
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from tests.flow.conftest import Rig, ticks
from tests.helpers import eventually

QUICK: dict[str, Any] = {"max_fetch_interval": 0.05, "flush_interval": 0.01, "ordered": True}


async def test_keys_go_on_side_by_side_each_in_its_order(rig: Rig) -> None:
    running: defaultdict[str, int] = defaultdict(int)
    most = 0

    async def handle(row: ClaimedMessage) -> None:
        nonlocal most
        key = row.key or ""
        running[key] += 1
        assert running[key] == 1
        most = max(most, sum(running.values()))
        await asyncio.sleep(0.005)
        running[key] -= 1
        await rig.ack(row)

    for _ in range(8):
        for key in "abc":
            await rig.put(1, key=key)
    await rig.consumer(handle, max_workers=4, **QUICK).start()
    await eventually(lambda: len(rig.handled) == 24)
    for key in "abc":
        ids = [row.id for row in rig.handled if row.key == key]
        assert ids == sorted(ids)
    assert most > 1


async def test_a_retry_keeps_its_place(rig: Rig) -> None:
    """P7: what failed is tried again before the later messages of its key."""

    async def handle(row: ClaimedMessage) -> None:
        rig.handled.append(row)
        row.record_outcome(Ack() if row.attempts_count == 2 else Nack(error=ValueError("not yet")))

    [first, second] = await rig.put(2, key="a")
    strategy = ConstantRetryStrategy(delay_seconds=0.05)
    await rig.consumer(handle, max_workers=4, retry_strategy=strategy, **QUICK).start()
    await eventually(lambda: len(rig.handled) == 6)
    assert [row.id for row in rig.handled] == [first] * 3 + [second] * 3


async def test_a_dead_letter_unblocks_the_next_message(rig: Rig) -> None:
    async def handle(row: ClaimedMessage) -> None:
        rig.handled.append(row)
        row.record_outcome(Reject() if len(rig.handled) == 1 else Ack())

    ids = await rig.put(2, key="a")
    await rig.consumer(handle, **QUICK).start()
    await eventually(lambda: len(rig.handled) == 2)
    assert [row.id for row in rig.handled] == ids


async def test_nothing_is_leased_that_no_worker_can_start(rig: Rig) -> None:
    """A row in a buffer would keep its key from every other process."""
    go = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        await go.wait()
        await rig.ack(row)

    for key in "abcde":
        await rig.put(1, key=key)
    consumer = rig.consumer(handle, max_workers=2, **QUICK)
    await consumer.start()
    await eventually(lambda: consumer.inflight.running == 2)
    await ticks(consumer._fetch_loop, 4)
    states = [row["state"] for row in await rig.rows()]
    assert states.count("PROCESSING") == 2
    go.set()
    await eventually(lambda: len(rig.handled) == 5)


async def test_a_batch_holds_one_message_of_a_key(rig: Rig) -> None:
    batches: list[list[str | None]] = []

    async def handle(rows: tuple[ClaimedMessage, ...]) -> None:
        batches.append([row.key for row in rows])
        for row in rows:
            await rig.ack(row)

    await rig.put(2, key="a")
    await rig.put(2, key="b")
    await rig.put(3)
    await rig.consumer(handle, batch=True, **QUICK).start()
    await eventually(lambda: len(rig.handled) == 7)
    assert all(len({k for k in keys if k}) == len([k for k in keys if k]) for keys in batches)
    assert [row.id for row in rig.handled if row.key == "a"] == [1, 2]


async def test_a_key_goes_on_without_waiting_for_the_next_poll(rig: Rig) -> None:
    await rig.put(10, key="a")
    consumer = rig.consumer(ordered=True, max_fetch_interval=600.0, min_fetch_interval=0)
    await consumer.start()
    await eventually(lambda: len(rig.handled) == 10)


async def test_many_messages_behind_a_blocked_key_hide_no_other_key(rig: Rig) -> None:
    """More due messages of one key than a claim looks at, and many keys that are not due."""
    go = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        if row.key == "blocked":
            await go.wait()
        await rig.ack(row)

    await rig.put(250, key="blocked")
    await rig.store.insert(
        [NewMessage("q", b"x", key=f"future{n}", delay=3600.0) for n in range(120)]
    )
    [other] = await rig.put(1, key="other")
    await rig.consumer(handle, max_workers=2, **QUICK).start()
    await eventually(lambda: [row.id for row in rig.handled] == [other])
    go.set()


async def test_a_suspect_that_comes_first_runs_before_the_others_of_its_key(rig: Rig) -> None:
    """A message that two processes lost runs alone, and its key waits for it."""
    ids = await rig.put(3, key="a")
    await rig.execute(f"UPDATE message SET deliveries_count = 2 WHERE id = {ids[0]}")
    await rig.consumer(max_workers=2, **QUICK).start()
    await eventually(lambda: len(rig.handled) == 3)
    assert [row.id for row in rig.handled] == ids


async def test_messages_without_a_key_go_on_behind_a_blocked_one(rig: Rig) -> None:
    """More due messages of a key than a claim looks at, whose first one is not done yet."""
    go = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        if row.key is not None:
            await go.wait()
        await rig.ack(row)

    await rig.put(150, key="blocked")
    free = await rig.put(5)
    await rig.consumer(handle, max_workers=4, **QUICK).start()
    await eventually(lambda: sorted(row.id for row in rig.handled) == free)
    go.set()


async def test_an_expired_suspect_is_discarded(rig: Rig) -> None:
    await rig.put(1, key="a", expires_in=0.0)
    await rig.put(1, key="a")
    await rig.execute("UPDATE message SET deliveries_count = 3")
    await rig.consumer(**QUICK).start()

    async def states() -> list[str]:
        return sorted(row["state"] for row in await rig.rows(archive=True))

    await eventually(lambda: len(rig.handled) == 1)

    async def ended() -> bool:
        return await states() == ["COMPLETED", "DISCARDED"]

    await eventually(ended)


async def test_many_blocked_messages_are_not_scanned_without_a_pause(rig: Rig) -> None:
    """Nothing can be claimed: after a rotation the loop backs off to its longest wait."""
    await rig.put(1, key="m", delay=3600)
    await rig.put(150, key="m")
    await rig.store.insert(
        [NewMessage("q", b"x", key=f"k{n:03}", delay=3600.0) for n in range(350)]
    )
    claims = 0
    waits: list[float] = []
    claim_ordered = rig.store.claim_ordered

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal claims
        claims += 1
        return await claim_ordered(*arguments, **options)

    consumer = rig.consumer(ordered=True, max_fetch_interval=0.2)
    await consumer.start()
    pace = consumer._fetcher.pace
    idle = pace.advance_idle_pause

    def noted() -> float:
        waits.append(idle())
        return waits[-1]

    pace.advance_idle_pause = noted  # type: ignore[method-assign]
    with patch.object(rig.store, "claim_ordered", counted):
        await eventually(lambda: pace.idle_wait == 0.2)
        claims = 0
        waits.clear()
        await eventually(lambda: len(waits) == 4)
        # A rotation is about four pages.
        assert claims <= (4 + 2) * 5
    assert waits == [0.2] * len(waits)


async def test_a_head_starts_when_it_is_due_though_its_followers_are(rig: Rig) -> None:
    await rig.put(1, key="a", delay=0.5)
    await rig.put(2, key="a")
    consumer = rig.consumer(ordered=True, max_fetch_interval=600)
    await consumer.start()
    await eventually(lambda: len(rig.handled) == 3)
