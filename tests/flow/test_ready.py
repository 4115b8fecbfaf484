"""Which pairs are claimed: after a wake-up without a scan, and while scans are slow."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest.mock import patch

import pytest

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, ReadyPair, ReadyPairs
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.flow.consumer import QueueConsumer
from faststream_sqlbroker.flow.deliver import ready as module
from faststream_sqlbroker.flow.deliver.ready import Mode, ReadyTracker
from faststream_sqlbroker.flow.wakeup import ALL
from tests.clock import VirtualTime
from tests.flow.conftest import Rig
from tests.helpers import Awake, eventually

SLEEPY = {"max_fetch_interval": 600.0, "release_stuck_interval": 600.0, "wakeup": "poll"}
MINUTES = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def time(rig: Rig) -> VirtualTime:
    """The consumers' time stands still."""
    time = VirtualTime()
    rig.wakeups.clock.use(time)
    return time


async def idle(consumer: QueueConsumer, time: VirtualTime) -> None:
    """Let it wait for longer than a second for the next look, which does not come by itself."""

    async def waits() -> bool:
        await time.advance(1.0)
        return consumer._fetcher.pace.idle_wait > 2

    await consumer.start()
    await eventually(waits)


async def test_a_wake_up_is_answered_by_a_claim(rig: Rig, time: VirtualTime) -> None:
    """No scan for the pairs of a queue comes first: one round trip less before the handler."""
    consumer = rig.consumer(**SLEEPY)
    await idle(consumer, time)
    with patch.object(rig.store, "find_ready_pairs", side_effect=AssertionError("looked")):
        await rig.publisher.publish([NewMessage("q", b"1")])
        await eventually(lambda: rig.handled)
    await consumer.stop()


async def test_a_wake_up_for_an_unknown_priority_is_answered_too(
    rig: Rig, time: VirtualTime
) -> None:
    consumer = rig.consumer(**SLEEPY)
    await idle(consumer, time)
    await rig.publisher.publish([NewMessage("q", b"1", priority=7)])
    await eventually(lambda: rig.handled)
    assert (("q", 7)) in consumer._fetcher.ready._known_pairs


@pytest.mark.parametrize(
    ("queues", "claimed"),
    [(["a", "b", "c"], {"b"}), ({"a": 1, "b": 1, "c": 1}, {"a", "b", "c"})],
    ids=["turns", "weights"],
)
async def test_a_wake_up_is_answered_from_its_queues(
    rig: Rig, time: VirtualTime, queues: list[str] | dict[str, int], claimed: set[str]
) -> None:
    """With 1 000 queues a claim from all of them takes many times as long. Weights compare all
    queues."""
    consumer = rig.consumer(None, queues, **SLEEPY)
    asked = list[set[str]]()
    claim = rig.store.claim

    async def noted(pairs: Sequence[ReadyPair], *args: Any, **kwargs: Any) -> Any:
        asked.append({pair.queue for pair in pairs})
        return await claim(pairs, *args, **kwargs)

    await idle(consumer, time)
    assert consumer._fetcher.ready.mode is Mode.IDLE
    with patch.object(rig.store, "claim", noted):
        await rig.publisher.publish([NewMessage("b", b"1")])
        await eventually(lambda: rig.handled)
    assert asked[0] == claimed


def test_wake_ups_before_a_claim_are_answered_together(rig: Rig) -> None:
    ready = rig.consumer(None, ["a", "b", "c"], **SLEEPY)._fetcher.ready
    ready.mode = Mode.IDLE
    ready.add_hint(frozenset("a"))
    ready.add_hint(frozenset("c"))
    assert ready.take_hint(1.0) == {"a", "c"}
    ready.mode = Mode.IDLE
    ready.add_hint(ALL)
    ready.add_hint(frozenset("b"))
    assert ready.take_hint(1.0) == ALL
    ready.mode = Mode.IDLE
    ready.add_hint(frozenset("b"))
    assert ready.take_hint(-1.0) is None, "it has waited for too long"
    assert ready.mode is Mode.POLL


async def test_slow_scans_run_in_the_background(rig: Rig) -> None:
    """Claims go on without scans; a scan in the background finds the rest, every second."""
    looks = rig.store.find_ready_pairs
    took = 0.02

    async def slowly(queues: Sequence[str]) -> ReadyPairs:
        found = await looks(queues)
        result = ReadyPairs(found)
        result.duration = took
        result.at = getattr(found, "at", None)
        return result

    consumer = rig.consumer(max_fetch_interval=0.1, release_stuck_interval=600.0, wakeup="poll")
    with patch.object(rig.store, "find_ready_pairs", slowly):
        await consumer.start()
        await eventually(lambda: consumer._fetcher.ready.mode is Mode.BLIND)
        await rig.put(5)
        await eventually(lambda: len(rig.handled) == 5)
        # Due long before what was claimed last, as after a commit that came late or a lost lease.
        await rig.store.insert([NewMessage("q", b"late", next_attempt_at=MINUTES)])
        await eventually(lambda: len(rig.handled) == 6)
        await rig.store.insert([NewMessage("q", b"new", priority=3)])
        await eventually(lambda: len(rig.handled) == 7)
        took = 0.0
        await eventually(lambda: consumer._fetcher.ready.mode is not Mode.BLIND)
    await consumer.stop()


def found(took: float, *pairs: ReadyPair, at: datetime | None = None) -> ReadyPairs:
    result = ReadyPairs(pairs)
    result.duration = took
    result.at = at
    return result


class FakeStore:
    """A store whose polls return the given results, one after the other."""

    def __init__(self, *results: ReadyPairs) -> None:
        self.results = list(results)

    async def find_ready_pairs(self, _queues: Sequence[str]) -> ReadyPairs:
        return self.results.pop(0)


async def test_claims_begin_a_little_before_the_last_row_while_scans_are_slow(rig: Rig) -> None:
    await rig.put(1)
    [message] = await rig.claim(1)
    due = message.next_attempt_at
    earlier = ReadyPair("q", 0, -60.0, due - timedelta(minutes=1))
    ready = ReadyTracker(FakeStore(found(1.0), found(1.0, earlier, at=due), found(0.0)), ["q"])  # type: ignore[arg-type]
    await ready.scan()
    assert [p.since for p in ready.list_known()] == [None], "nothing was claimed yet"
    ready.record_claimed(ready.list_known(), [message])
    assert [p.since for p in ready.list_known()] == [due - module.LATE_COMMITS]
    await ready.scan()
    assert [p.since for p in ready.list_known()] == [earlier.due_at], (
        "a look has found an older one"
    )
    await ready.scan()
    assert ready.mode is Mode.FOLLOW
    assert [p.since for p in ready.list_known()] == [None]
    ready.record_claimed(ready.list_known(), [message])
    assert [p.since for p in ready.list_known()] == [None], "looks are not slow"


async def test_a_scan_that_finds_an_earlier_row_is_not_undone_by_a_running_claim(
    rig: Rig,
) -> None:
    await rig.put(1)
    [message] = await rig.claim(1)
    due = message.next_attempt_at
    earlier = ReadyPair("q", 0, -3600.0, due - timedelta(hours=1))
    ready = ReadyTracker(FakeStore(found(1.0, at=due), found(1.0, earlier, at=due)), ["q"])  # type: ignore[arg-type]
    await ready.scan()
    asked = ready.list_known()
    await ready.scan()
    ready.record_claimed(asked, [message])
    [pair] = ready.list_known()
    assert pair.since == earlier.due_at
    ready.record_claimed([pair], [message])
    assert [p.since for p in ready.list_known()] == [due - module.LATE_COMMITS]


async def test_pairs_that_a_slow_scan_does_not_find_are_not_scanned_again() -> None:
    """A process that starts under a held snapshot: its claims begin where the look has found the
    first row."""
    at = MINUTES
    ready = ReadyTracker(
        FakeStore(found(1.0, ReadyPair("b", 0, -9.0, at - timedelta(seconds=9)), at=at)),
        ["a", "b"],
    )  # type: ignore[arg-type]
    await ready.scan()
    begins = {pair.queue: pair.since for pair in ready.list_known()}
    assert begins == {"a": at - module.LATE_COMMITS, "b": at - timedelta(seconds=9)}
    ready.reset_begin()
    assert {pair.since for pair in ready.list_known()} == {None}


async def test_a_message_that_becomes_due_does_not_hurry_claims_without_scans() -> None:
    later = ReadyPair("q", 0, 60.0)
    ready = ReadyTracker(FakeStore(found(1.0, later), found(0.0, later)), ["q"])  # type: ignore[arg-type]
    await ready.scan()
    assert ready.list_next_due() != []
    ready.polled_at -= 61
    assert ready.list_next_due() == [], "the last claim has seen it"
    await ready.scan()
    ready.polled_at -= 61
    assert ready.list_next_due() == [0.0], "the next look finds it"


async def test_a_scan_without_an_answer_leaves_claims_without_scans() -> None:
    class Hanging:
        async def find_ready_pairs(self, _queues: Sequence[str]) -> ReadyPairs:
            raise TransientStoreError("no answer within 30 seconds")

    ready = ReadyTracker(Hanging(), ["q"])  # type: ignore[arg-type]
    with pytest.raises(TransientStoreError):
        await ready.scan()
    assert ready.mode is Mode.START, "nothing is known that could be claimed from"
    ready.mode = Mode.FOLLOW
    with pytest.raises(TransientStoreError):
        await ready.scan()
    assert ready.mode is Mode.BLIND


async def test_a_stop_does_not_wait_for_a_scan(rig: Rig) -> None:
    """Outcomes are written, whatever a background scan is waiting for."""
    hanging = asyncio.Event()
    looks = rig.store.find_ready_pairs

    async def slowly(queues: Sequence[str]) -> ReadyPairs:
        if len(rig.handled) == 3:
            hanging.set()
            await asyncio.sleep(60)
        result = ReadyPairs(await looks(queues))
        result.duration = 0.02
        return result

    await rig.put(3)
    consumer = rig.consumer(max_fetch_interval=0.1, flush_interval=30.0, wakeup="poll")
    with patch.object(rig.store, "find_ready_pairs", slowly):
        await consumer.start()
        await eventually(hanging.is_set)
        async with Awake() as awake:
            await consumer.stop(1)
        assert awake.seconds < 5
    assert len(await rig.rows(archive=True)) == 3


async def test_slow_scans_take_a_twentieth_of_the_time() -> None:
    looks = FakeStore(found(0.2), found(0.2))
    ready = ReadyTracker(looks, ["q"], Clock(VirtualTime()))  # type: ignore[arg-type]
    assert await ready.scan_in_background() is None, "no claim needs it"
    await ready.scan()
    assert await ready.scan_in_background() == 0.2 * module.SLOW_SHARE
    assert len(looks.results) == 1
    ready.scan_soon()
    with patch.object(module, "SCAN_INTERVAL", 0.0):
        await ready.scan_in_background()
    assert looks.results == []


async def test_a_scan_under_way_does_not_answer_a_later_request() -> None:
    """It may have been sent before the rows were released: the next one comes within a second."""

    async def poll() -> ReadyPairs:
        ready.scan_soon()
        return found(0.2)

    ready = ReadyTracker(FakeStore(), ["q"], Clock(VirtualTime()))  # type: ignore[arg-type]
    await ready.scan(poll)
    assert ready.mode is Mode.BLIND
    assert await ready.scan_in_background() == module.SCAN_INTERVAL


async def test_known_pairs_are_bounded() -> None:
    many = [ReadyPair("q", n % 200, 0.0) for n in range(200)]
    few = ReadyPair("q", 7, 0.0)
    ready = ReadyTracker(FakeStore(found(0.0, *many), found(0.0, few)), ["q"])  # type: ignore[arg-type]
    with patch.object(module, "MAX_PAIRS", 10):
        await ready.scan()
        assert len(ready.list_known()) == 200, "what has rows is never forgotten"
        await ready.scan()
        assert len(ready.list_known()) == 10
        assert few.priority in {pair.priority for pair in ready.list_known()}


async def test_z2_m2_the_first_claim_of_a_subscriber_scans_first(rig: Rig) -> None:
    """Else it takes priority 0 before 100, as it knows of nothing else; a wake-up changes nothing
    about that."""
    order: list[int] = []

    async def handle(row: ClaimedMessage) -> None:
        order.append(row.priority)
        await rig.ack(row)

    for priority in (0, 100, -5, 7):
        await rig.put(3, priority=priority)
    consumer = rig.consumer(handle, max_workers=1, fetch_batch_size=2)
    await consumer.start()
    consumer._on_hint()  # as a publish, an opened queue or a returned lease does
    await eventually(lambda: len(order) == 12)
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("at_once", [True, False])
async def test_z2_m2_a_claim_follows_a_scan_that_has_succeeded(rig: Rig, at_once: bool) -> None:
    """One that fails when the subscriber starts does not let it claim what it happens to know."""
    order: list[int] = []
    looks = rig.store.find_ready_pairs
    failures = []

    async def look(queues: Any) -> Any:
        if len(failures) < 3:
            failures.append(queues)
            if not at_once:
                await asyncio.sleep(0.1)
            raise TransientStoreError("no connection")
        return await looks(queues)

    async def handle(row: ClaimedMessage) -> None:
        order.append(row.priority)
        await rig.ack(row)

    await rig.put(3)
    await rig.put(3, priority=100)
    with patch.object(rig.store, "find_ready_pairs", look):
        consumer = rig.consumer(handle, max_workers=1, fetch_batch_size=2)
        await consumer.start()
        await eventually(lambda: len(order) == 6)
    assert order == [100] * 3 + [0] * 3
