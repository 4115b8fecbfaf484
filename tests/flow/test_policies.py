"""Scheduling policies through a subscriber's loops, on every database."""

import asyncio
from datetime import datetime, timedelta
from itertools import pairwise
from time import monotonic, sleep
from typing import Any

import pytest

from faststream_sqlbroker.core.outcome import Ack, Nack
from faststream_sqlbroker.core.policies import (
    BlockingWait,
    Concurrency,
    Debounce,
    Delay,
    Once,
    Policy,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.database.policies.intake import Intake
from tests.flow.conftest import Rig, ticks
from tests.helpers import eventually

pytestmark = pytest.mark.capability(
    "scheduling policies: delay, debounce, throttle, window, concurrency, once"
)

QUICK: Any = {"max_fetch_interval": 0.05, "flush_interval": 0.01, "wakeup": "poll"}


async def archived(rig: Rig, count: int) -> list[dict[str, Any]]:
    """Wait until `count` messages are archived."""

    async def done() -> list[dict[str, Any]]:
        return await rig.rows(archive=True) if await rig.count(archive=True) == count else []

    return await eventually(done)


async def test_a_delay_holds_every_message_back_once(rig: Rig) -> None:
    """P1, Z6: and no retry, which would wait for another hour."""
    handled: list[int] = []

    async def handle(row: ClaimedMessage) -> None:
        handled.append(row.id)
        row.record_outcome(Nack(delay=0.0) if len(handled) == 1 else Ack())

    async def held_back() -> bool:
        [row] = await rig.rows()
        return bool(row["next_attempt_at"] - row["created_at"] >= timedelta(hours=1))

    consumer = rig.consumer(handle, policies=[Delay("1h")], **QUICK)
    await consumer.start()
    [message] = await rig.put()
    await eventually(held_back)
    assert (await rig.one())["state"] == "PENDING"
    await rig.execute(f"UPDATE message SET next_attempt_at = {rig.past(0)}")
    await archived(rig, 1)
    assert handled == [message, message]


async def test_a_delayed_message_is_claimed_after_its_delay(rig: Rig) -> None:
    """P1: not before."""
    await rig.consumer(policies=[Delay("400ms")], **QUICK).start()
    await rig.put()
    [row] = await archived(rig, 1)
    assert rig.handled[0].acquired_at - row["created_at"] >= timedelta(milliseconds=400)


async def test_the_newest_of_a_burst_is_delivered(rig: Rig) -> None:
    """Z7, Z1: the others are superseded by it."""
    consumer = rig.consumer(policies=[Debounce("300ms")], **QUICK)
    await consumer.start()
    began = monotonic()
    ids = await rig.put(5, key="a")
    others = await rig.put(2, key="b")
    rows = {row["id"]: row for row in await archived(rig, 7)}
    assert monotonic() - began >= 0.25
    assert [row.id for row in rig.handled] == [ids[-1], others[-1]]
    assert {rows[i]["state"] for i in ids[:-1]} == {"DISCARDED"}
    assert rows[ids[0]]["reason"] == "superseded"


async def test_max_wait_bounds_a_burst(rig: Rig) -> None:
    """Z7: an unbroken stream is delivered too."""
    consumer = rig.consumer(policies=[Debounce("300ms", max_wait="600ms")], **QUICK)
    await consumer.start()
    ids: list[int] = []

    async def twice() -> bool:
        ids.extend(await rig.put(1, key="a"))
        # On a busy machine a pause of the stream may end a burst.
        return len(ids) - 1 > len(rig.handled) >= 2

    await eventually(twice, step=0.1)
    await archived(rig, len(ids))
    assert len(rig.handled) < len(ids)
    assert rig.handled[-1].id == ids[-1]


async def test_the_first_of_a_burst_is_delivered_at_once(rig: Rig) -> None:
    """Z7: leading edge."""
    consumer = rig.consumer(policies=[Debounce("500ms", edge="leading")], **QUICK)
    await consumer.start()
    first = await rig.put(3, key="a")
    rows = await archived(rig, 3)
    assert [row.id for row in rig.handled] == [first[0]]
    assert {(row["reason"], row["related_id"]) for row in rows if row["id"] != first[0]} == {
        ("superseded", first[0])
    }
    await asyncio.sleep(0.6)
    again = await rig.put(2, key="a")
    await archived(rig, 5)
    assert [row.id for row in rig.handled] == [first[0], again[0]]


async def test_a_slow_claim_ends_no_burst_without_its_late_arrivals(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Z1, Z7: what arrives while a claim runs, and before a burst ends that ends while it runs,
    belongs to the burst."""
    look = Intake.join_bursts

    monkeypatch.setattr(Intake, "join_bursts", lambda *args: (look(*args), sleep(0.5))[0])
    old, _, new = await rig.store.insert(
        [
            NewMessage("q", b"1", key="a"),
            NewMessage("q", b"1", key="b", delay=0.7),  # makes a claim begin
            NewMessage("q", b"2", key="a", delay=0.9),
        ]
    )
    await rig.consumer(policies=[Debounce("1s", max_wait="1s")], **QUICK).start()
    rows = {row["id"]: row for row in await archived(rig, 3)}
    assert (rows[old]["reason"], rows[old]["related_id"]) == ("superseded", new)
    assert new in [row.id for row in rig.handled]


async def test_a_burst_waits_for_the_message_before(rig: Rig) -> None:
    """A message that arrives while the key's is being handled is delivered after it, and is not
    superseded by it."""
    go = asyncio.Event()
    running: list[int] = []

    async def handle(row: ClaimedMessage) -> None:
        running.append(row.id)
        if len(running) == 1:
            await go.wait()
        row.record_outcome(Ack())

    consumer = rig.consumer(handle, policies=[Debounce("100ms")], max_workers=4, **QUICK)
    await consumer.start()
    [first] = await rig.put(1, key="a")
    await eventually(lambda: running == [first])
    [second] = await rig.put(1, key="a")
    [other] = await rig.put(1, key="b")
    await eventually(lambda: other in running)
    await asyncio.sleep(0.3)
    assert running == [first, other]
    go.set()
    await archived(rig, 3)
    assert running == [first, other, second]


def slot_of(row: ClaimedMessage) -> datetime:
    """When its handler may start, by the database's clock."""
    assert row.slot is not None
    assert row.slot.granted_at is not None
    return from_microseconds(row.slot.granted_at)


@pytest.mark.parametrize("burst", [1, 5])
async def test_a_throttle_spaces_slots(rig: Rig, burst: int) -> None:
    """Z10: at most so many in any period, no start before its slot; none is lost."""
    early: list[float] = []

    async def handle(row: ClaimedMessage) -> None:
        assert row.slot is not None
        early.append(row.slot.earliest - monotonic())
        await rig.ack(row)

    consumer = rig.consumer(
        handle, policies=[Throttle(10, per="1s", burst=burst)], max_workers=5, **QUICK
    )
    await rig.put(25)
    await consumer.start()
    await archived(rig, 25)
    slots = sorted(slot_of(row) for row in rig.handled)
    period = timedelta(seconds=0.9999)  # of a float
    assert all(last - first >= period for first, last in zip(slots, slots[10:], strict=False))
    assert max(early) <= 0


async def test_a_throttle_per_key_keeps_only_its_key_back(rig: Rig) -> None:
    """Z10."""
    policies = [Throttle(1, per="500ms", key=True)]
    consumer = rig.consumer(policies=policies, max_workers=5, **QUICK)
    await rig.put(3, key="a")
    await rig.put(1, key="b")
    await rig.put(2)
    await consumer.start()
    await archived(rig, 6)
    slots = sorted(slot_of(row) for row in rig.handled if row.key == "a")
    assert all(late - early >= timedelta(milliseconds=499) for early, late in pairwise(slots))
    assert rig.handled[-1].key == "a", "of one for all of them, another would come last"
    assert [row.slot for row in rig.handled if row.key is None] == [None] * 2


@pytest.mark.parametrize(("exceeded", "state"), [("drop", "DISCARDED"), ("dead_letter", "FAILED")])
async def test_messages_over_the_rate_of_a_throttle_are_archived(
    rig: Rig, exceeded: Any, state: str
) -> None:
    """Z10: dropped, never silently."""
    policies = [Throttle(2, per="1h", burst=2, when_exceeded=exceeded)]
    consumer = rig.consumer(policies=policies, max_workers=10, **QUICK)
    await rig.put(10)
    await consumer.start()
    rows = await archived(rig, 10)
    assert len(rig.handled) == 2
    assert [(r["state"], r["reason"]) for r in rows if r["state"] != "COMPLETED"] == [
        (state, "throttled")
    ] * 8


async def test_a_message_that_backs_off_comes_back(rig: Rig) -> None:
    """Z10."""
    policies = [Throttle(1, per="200ms", when_exceeded="backoff")]
    consumer = rig.consumer(policies=policies, **QUICK)
    await rig.put(4)
    await consumer.start()
    await archived(rig, 4)


@pytest.mark.parametrize("per_key", [False, True])
async def test_a_concurrency_is_never_exceeded(rig: Rig, per_key: bool) -> None:
    """Exact in leases."""
    running = 0
    most = 0

    async def handle(row: ClaimedMessage) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        row.record_outcome(Ack())

    for _ in range(2):
        await rig.consumer(
            handle, policies=[Concurrency(2, per_key=per_key)], max_workers=5, **QUICK
        ).start()
    await rig.put(20, key="a")
    await archived(rig, 20)
    assert most <= 2


async def test_p6_outside_its_window_nothing_is_claimed(rig: Rig) -> None:
    """P6: messages wait unclaimed."""
    now = await rig.store.server.read_now()
    hour = now.hour
    closed = Window(f"{(hour + 2) % 24:02}:00", f"{(hour + 3) % 24:02}:00")
    consumer = rig.consumer(policies=[closed], **QUICK)
    await rig.put(3)
    await consumer.start()
    await ticks(consumer._fetch_loop, 4)
    assert {row["state"] for row in await rig.rows()} == {"PENDING"}
    await consumer.stop()
    opened = Window(f"{(hour - 1) % 24:02}:00", f"{(hour + 2) % 24:02}:00")
    await rig.consumer(policies=[opened], **QUICK).start()
    await archived(rig, 3)


async def test_a_key_is_handled_once(rig: Rig) -> None:
    """Z4: a second message of the key is a duplicate."""
    consumer = rig.consumer(policies=[Once("1h")], max_workers=4, **QUICK)
    await rig.put(4, key="a")
    await rig.put(2)
    await consumer.start()
    rows = await archived(rig, 6)
    assert len([row for row in rig.handled if row.key == "a"]) == 1
    assert len(rig.handled) == 3
    first = next(row.id for row in rig.handled if row.key == "a")
    assert {(row["reason"], row["related_id"]) for row in rows} == {
        (None, None),
        ("duplicate", first),
    }


async def test_only_a_repeatable_error_is_retried(rig: Rig) -> None:
    """Z4: RetryPossible gives the key back, any other error ends it."""
    tries: list[int] = []

    async def handle(row: ClaimedMessage) -> None:
        tries.append(row.id)
        row.record_outcome(Nack(delay=0.01, retry_possible=len(tries) == 1))

    await rig.consumer(handle, policies=[Once("1h")], **QUICK).start()
    await rig.put(1, key="a")
    [row] = await archived(rig, 1)
    assert len(tries) == 2
    assert (row["state"], row["reason"]) == ("FAILED", "failed_once")


async def test_a_worker_rests_after_a_failure(rig: Rig) -> None:
    """Z3: back-pressure."""
    starts: list[float] = []

    async def handle(row: ClaimedMessage) -> None:
        starts.append(monotonic())
        row.record_outcome(Nack() if len(starts) == 1 else Ack())

    await rig.consumer(handle, policies=[BlockingWait("300ms")], **QUICK).start()
    await rig.put(2)
    await eventually(lambda: len(starts) >= 2)
    assert starts[1] - starts[0] >= 0.3


COMPOSED: list[list[Policy]] = [
    [Debounce("200ms"), Throttle(20, per="1s")],
    [Delay("100ms"), Debounce("200ms"), Throttle(20, per="1s"), Once("1h")],
    [Throttle(50, per="1s", key=True), Concurrency(2)],
]


@pytest.mark.parametrize("policies", COMPOSED, ids=str)
async def test_composed_policies_all_apply(rig: Rig, policies: list[Policy]) -> None:
    """Z12."""
    for _ in range(3):
        await rig.store.insert([NewMessage("q", b"1", key=f"k{k}") for k in range(10)])
    await rig.consumer(policies=policies, max_workers=5, **QUICK).start()
    await archived(rig, 30)
    assert {row.key for row in rig.handled} == {f"k{k}" for k in range(10)}


async def test_a_batch_takes_only_messages_with_a_slot(rig: Rig) -> None:
    """Z10, with batch=True: no message starts before its slot, and each spends one."""
    early: list[float] = []
    sizes: list[int] = []

    async def handle(rows: tuple[ClaimedMessage, ...]) -> None:
        now = monotonic()
        sizes.append(len(rows))
        for row in rows:
            assert row.slot is not None
            early.append(row.slot.earliest - now)
            row.record_outcome(Ack())

    policies = [Throttle(50, per="1s")]
    consumer = rig.consumer(handle, policies=policies, batch=True, fetch_batch_size=10, **QUICK)
    await rig.put(30)
    await consumer.start()
    await archived(rig, 30)
    assert sum(sizes) == 30
    assert max(early) <= 0


async def test_a_message_without_the_key_is_a_dead_letter_if_the_policy_says_so(rig: Rig) -> None:
    policies = [Debounce("100ms", without_key="dead_letter")]
    await rig.consumer(policies=policies, **QUICK).start()
    await rig.put(1)
    [row] = await archived(rig, 1)
    assert (row["state"], row["reason"]) == ("FAILED", "no_key")
    assert rig.handled == []
    assert rig.logged(
        f"message {row['id']} of queue 'q' becomes a dead letter because of a policy: no_key"
    )


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_message_committed_after_its_burst_was_delivered_is_superseded(
    rig: Rig,
) -> None:
    """Z1: the last e-mail of a burst is not followed by an older one, whose transaction took
    longer."""
    await rig.consumer(policies=[Debounce("200ms")], **QUICK).start()
    async with rig.store.engine.begin() as slow:
        [old] = await rig.store.insert_in(slow, [NewMessage("q", b"old", key="a")])
        [new] = await rig.put(1, key="a")
        await archived(rig, 1)
    rows = {row["id"]: row for row in await archived(rig, 2)}
    assert (rows[old]["reason"], rows[old]["related_id"]) == ("superseded", new)
    assert [row.id for row in rig.handled] == [new]
