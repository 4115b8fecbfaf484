"""The rules between the loops, without a database."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any
from unittest.mock import Mock, patch
from uuid import uuid4

import pytest

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.policies import Once
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, SettleResult, Unit
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.parts.once import OnceStatus
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.deliver.ack_first import AckFirstTracker
from faststream_sqlbroker.flow.deliver.flush import Flusher
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.leases import (
    BATCH,
    IDLE_INTERVAL,
    SEARCH_INTERVAL,
    LeaseKeeper,
    StuckReleaser,
)
from faststream_sqlbroker.flow.deliver.outcome_states import DeliveryState
from faststream_sqlbroker.flow.deliver.outcome_writer import QuarantineWriter
from faststream_sqlbroker.flow.deliver.policy_starts import PolicyRunner, create_key_claimer
from faststream_sqlbroker.flow.deliver.settlements import Settlements
from faststream_sqlbroker.flow.deliver.signals import Signals
from faststream_sqlbroker.flow.deliver.worker import Worker
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping
from faststream_sqlbroker.flow.fleet.lookout import SharedPoller
from faststream_sqlbroker.flow.loop import Loop, Outages
from faststream_sqlbroker.subscriber.options import make_settings
from tests.clock import VirtualTime

NOW = datetime.now(timezone.utc)


def row(number: int = 1) -> ClaimedMessage:
    return ClaimedMessage(
        number, "q", b"", {}, 0, None, 0, 1, 1, NOW, NOW, None, None, None, NOW, uuid4()
    )


def quiet(*_: Any, **__: Any) -> None:
    """A log that is not read."""


def ack(message: ClaimedMessage) -> Any:
    return settle(message, Ack(), SettleRules(), ended_after=0.0)


class Renewing:
    """A store whose renewal finds nothing; `before_answer` happens before its answer arrives."""

    def __init__(self, before_answer: Any) -> None:
        self.before_answer = before_answer

    async def renew_free(self, _leases: Any, _lease: float) -> tuple[set[int], set[int]]:
        self.before_answer()
        return set(), set()


@contextmanager
def clock_at(inflight: Inflight, seconds: float) -> Iterator[Mock]:
    """The monotonic clock of what holds rows and what renews them."""
    with patch.object(inflight.clock, "monotonic", Mock(return_value=seconds)) as clock:
        yield clock


async def renewed(inflight: Inflight, before_answer: Any) -> None:
    with clock_at(inflight, 10.0**9):
        store: Any = Renewing(before_answer)
        await LeaseKeeper(store, inflight, quiet, lease=1.0, max_lease=None).tick()


async def test_a_lease_that_is_gone_is_forgotten() -> None:
    inflight = Inflight()
    message = row()
    inflight.add([message])
    await renewed(inflight, lambda: None)
    assert message.lease_lost
    assert (inflight.lease_lost_count, inflight.held) == (1, {})


async def test_an_outcome_that_is_being_written_is_not_renewed() -> None:
    inflight = Inflight()
    with clock_at(inflight, 100.0) as clock:
        inflight.add([first := row(1), row(2)])
        inflight.queue_outcome(ack(first))
        inflight.start_batch(1)
        clock.return_value = 104.0
        assert [r.id for r in inflight.list_due_for_renewal(9.0, None)] == [2]
        clock.return_value = 106.0
        assert [r.id for r in inflight.list_due_for_renewal(9.0, None)] == [1, 2], "its write hangs"


def test_a_longer_hold_that_a_handler_asked_for_is_not_shortened() -> None:
    """It is renewed from when a lease reaches further; until it ends `max_lease` does not count."""
    inflight = Inflight()
    with clock_at(inflight, 100.0) as clock:
        inflight.add([message := row()])
        message.held_until = 150.0
        clock.return_value = 140.0
        assert inflight.list_due_for_renewal(9.0, 20.0) == []
        clock.return_value = 141.0
        assert inflight.list_due_for_renewal(9.0, 20.0) == [message]
        clock.return_value = 150.0
        assert inflight.list_due_for_renewal(9.0, 20.0) == []
        assert inflight.list_due_for_renewal(9.0, None) == [message]


async def test_a_row_written_during_its_renewal_is_no_lost_lease() -> None:
    inflight = Inflight()
    message = row()
    inflight.add([message])
    inflight.queue_outcome(ack(message))
    batch = inflight.start_batch(1)
    await renewed(inflight, lambda: inflight.apply_result(batch, SettleResult({message.id})))
    assert not message.lease_lost
    assert inflight.lease_lost_count == 0


async def test_a_row_that_is_being_written_during_its_renewal_is_no_lost_lease() -> None:
    inflight = Inflight()
    message = row()
    inflight.add([message])
    inflight.queue_outcome(ack(message))
    await renewed(inflight, lambda: inflight.start_batch(1))
    assert not message.lease_lost
    assert inflight.lease_lost_count == 0


async def test_a_later_delivery_is_not_taken_for_the_older_one() -> None:
    inflight = Inflight()
    older = row()
    later = row()
    inflight.add([older])
    inflight.queue_outcome(ack(older))
    await renewed(inflight, lambda: inflight.add([later]))
    assert older.lease_lost
    assert not later.lease_lost
    assert inflight.held == {1: later}
    assert inflight.queued == []
    assert (inflight.find_state(older), inflight.find_state(later)) == (
        DeliveryState.LOST,
        DeliveryState.WAITING,
    )


async def test_an_older_outcome_is_not_put_back_by_a_failed_flush() -> None:
    """While it was being written its lease ran out, and the message came back to us."""
    inflight = Inflight()
    older = row()
    later = row()

    class Store:
        async def settle(self, _batch: Any, **_: Any) -> Any:
            inflight.add([later])
            raise TransientStoreError("down")

    store: Any = Store()
    flusher = Flusher(store, inflight, quiet, batch_size=10, interval=1.0)
    inflight.add([older])
    inflight.queue_outcome(ack(older))
    with pytest.raises(TransientStoreError):
        await flusher.flush_batch()
    assert inflight.queued == []
    assert inflight.held == {1: later}
    assert inflight.lease_lost_count == 1


def test_a_row_reclaimed_during_its_write_is_judged_by_the_answer() -> None:
    """Its lease may have run out; or the outcome is written, and nothing was lost."""
    for result, counts in (
        (SettleResult(set(), {1}), (1, 0, 1)),
        (SettleResult({1}, set()), (0, 1, 0)),
    ):
        for ended in (False, True):
            said: list[str] = []
            inflight = Inflight(lambda *a, said=said, **_: said.append(a[1]))
            older = row()
            later = row()
            later.deliveries_count = 2
            inflight.add([older])
            inflight.queue_outcome(ack(older))
            batch = inflight.start_batch(1)
            inflight.add([later])
            assert (said, inflight.find_state(older)) == ([], DeliveryState.WRITING)
            if ended:
                inflight.queue_outcome(ack(later))
                inflight.apply_result(inflight.start_batch(1), SettleResult({1}, set()))
                inflight.settled_count = 0
            inflight.apply_result(batch, result)
            assert (inflight.lease_lost_count, inflight.settled_count, len(said)) == counts
            assert all(
                text.startswith("lease lost: message 1 of queue 'q' (delivery 1, phase flush)")
                for text in said
            )
            assert inflight.held == ({} if ended else {1: later})


def test_a_delivery_is_not_taken_for_an_older_one_that_is_being_written() -> None:
    inflight = Inflight()
    first = row()
    second = row()
    third = row()
    inflight.add([first])
    inflight.queue_outcome(ack(first))
    batch = inflight.start_batch(1)
    inflight.add([second])
    assert inflight.has_no_outcome(second)
    inflight.add([third])
    assert (first.lease_lost, second.lease_lost, third.lease_lost) == (False, True, False)
    inflight.requeue(batch, first=True)
    assert first.lease_lost
    assert inflight.lease_lost_count == 2


def test_the_older_outcome_of_a_reclaimed_message_is_not_queued_again() -> None:
    """Another row of its unit was lost. Sent together with the later outcome, it would be taken for
    that."""
    inflight = Inflight()
    lost = row()
    older = row(2)
    later = row(2)
    unit = Unit([])
    inflight.add([lost, older])
    inflight.queue_outcomes(
        [Settlement(r.id, r.lease_token, MessageState.COMPLETED, unit=unit) for r in (lost, older)]
    )
    batch = inflight.start_batch(2)
    inflight.add([later])
    inflight.apply_result(batch, SettleResult(set(), {1}))
    assert (inflight.queued, inflight.batches) == ([], [])
    assert inflight.held == {2: later}
    assert inflight.find_state(older) is DeliveryState.LOST
    assert inflight.lease_lost_count == 2
    inflight.queue_outcome(ack(later))
    inflight.apply_result(inflight.start_batch(1), SettleResult({2}))
    assert inflight.is_empty
    assert (inflight.settled_count, inflight.lease_lost_count) == (1, 2)


@pytest.mark.parametrize(
    "verdict", [OnceStatus.START, OnceStatus.DUPLICATE, OnceStatus.UNKNOWN, None]
)
async def test_a_message_reclaimed_while_its_key_was_requested_is_not_settled(
    verdict: OnceStatus | None,
) -> None:
    """Its lease has run out by then. Sent together with the later outcome, it would be taken for
    that."""
    inflight = Inflight()
    older = row()
    later = row()
    older.key = later.key = "k"

    class Policies:
        async def claim_free_keys(self, *_: Any) -> Any:
            return set()

        async def claim_keys(self, *_: Any) -> Any:
            inflight.add([later])
            if verdict is None:
                raise StoreError("no")
            return {1: (verdict, 7)}

    store: Any = Mock(policies=Policies())
    settlements = Settlements(SettleRules(), quiet)
    policies = [Once(60)]
    keys = create_key_claimer(store, policies)
    starts = PolicyRunner(store, inflight, settlements, policies, quiet, lambda: False, keys)
    inflight.add([older])
    with patch("faststream_sqlbroker.flow.deliver.policy_starts.backoff", return_value=0.0):
        started = await starts.claim_keys([older])
    assert settlements(started) == []
    assert inflight.queued == []
    assert inflight.held == {1: later}


async def test_an_older_outcome_that_is_refused_is_not_kept() -> None:
    """It was tried again when the message came back to us."""
    inflight = Inflight()
    older = row()
    later = row()

    class Store:
        dialect = Mock(has_archive=True)

        async def settle(self, _batch: Any, **_: Any) -> Any:
            inflight.add([later])
            raise StoreError("no")

    store: Any = Store()
    inflight.add([older])
    inflight.queue_outcome(ack(older))
    batch = inflight.start_batch(1)
    inflight.quarantine_refused(batch, batch.parts)
    inflight.requeue(batch, first=False)
    inflight.batches[0].due = 0.0
    assert await QuarantineWriter(store, inflight, quiet).tick() is None
    assert (inflight.batches, inflight.held) == ([], {1: later})
    assert inflight.lease_lost_count == 1


async def test_a_later_delivery_is_held_when_the_removal_of_the_older_one_finds_nothing() -> None:
    """ACK_FIRST: its lease ran out before the removal, and the message came back to us before the
    answer."""
    inflight = Inflight()
    older = row()
    later = row()

    class Starts:
        async def remove_first(self, *_: Any) -> SettleResult:
            inflight.add([later])
            return SettleResult(lost_ids={1})

    store: Any = Mock(ack_first_starts=Starts())
    first = AckFirstTracker(store, inflight, SettleRules(), quiet, lease=60.0, interval=1.0)
    inflight.add([older])
    assert await first.remove([older]) == []
    assert inflight.held == {1: later}
    assert inflight.lease_lost_count == 1


def test_a_lost_message_is_not_given_back() -> None:
    inflight = Inflight()
    lost = row(1)
    kept = row(2)
    inflight.add([lost, kept])
    inflight.lose([lost], "renew", "")
    inflight.release_waiting()
    assert [s.id for s in inflight.queued] == [2]


def worker(inflight: Inflight, **options: Any) -> Worker:
    nothing: Any = None
    return Worker(
        nothing,
        inflight,
        make_settings("q", options),
        nothing,
        quiet,  # type: ignore[arg-type]
        rules=SettleRules(),
        renew=nothing,
        first=None,
        stopping=lambda: False,
        must_end=lambda _task: False,
        on_idle=lambda: None,
    )


async def test_a_lost_message_neither_starts_nor_is_settled() -> None:
    inflight = Inflight()
    message = row()
    inflight.add([message])
    inflight.lose([message], "renew", "")
    ours = worker(inflight)
    assert not ours._may_start(message)
    message.record_outcome(Ack())
    assert ours._settlements([message]) == []


async def test_a_worker_asks_for_more_before_the_buffer_is_empty() -> None:
    asked: list[int] = []
    inflight = Inflight(
        signals=Signals(capacity_free=lambda: asked.append(inflight.waiting.qsize()))
    )
    ours = worker(inflight, fetch_batch_size=4, max_not_processed_factor=1)
    inflight.add([row(n) for n in range(4)])
    inflight.is_capacity_requested = True
    inflight.low_water = 2
    for _ in range(3):
        await ours._get_next()
    assert asked == [2]
    assert not inflight.is_capacity_requested


async def test_after_expired_leases_the_next_search_is_at_once_and_then_when_one_ends() -> None:
    counts = [BATCH, 3, 0]
    ends = [-2.0, -1.0, 2.5, -0.5, 600.0, None]

    class Store:
        def __init__(self) -> None:
            self.server = self.dead_sessions = self

        async def get_seconds_to_lease_end(self, _queues: Any) -> float | None:
            return ends.pop(0)

        async def end_cancelled(self, _queues: Any, **_: Any) -> int:
            return 0

        async def read_now(self) -> None:
            return None

        async def release_stuck(self, _queues: Any, _limit: int, _before: Any) -> int:
            return counts.pop(0)

        async def end_dead_sessions(self) -> list[int]:
            return []

        async def remove_expired_states(self, _limit: int) -> int:
            return 0

    released: list[int] = []
    store: Any = Store()
    clock = Clock(VirtualTime())
    lookout = SharedPoller(store, clock)
    releaser = StuckReleaser(
        store,
        ["q"],
        quiet,
        interval=60.0,
        on_released=lambda: released.append(1),
        poller=lookout,
        housekeeping=Housekeeping(store, quiet, clock),
    )
    waits = []
    for _ in range(6):
        waits.append(round(await releaser.tick(), 2))
        lookout.forget_leases()  # as after `MAX_LEASE_INFO_AGE`
    assert waits == [0.0, 0.0, 2.5, 0.5, SEARCH_INTERVAL, IDLE_INTERVAL]
    assert (len(released), counts) == (2, []), (
        "of the third a handler's transaction has locked the row"
    )


async def test_a_failing_loop_backs_off_and_no_hint_cuts_that_short() -> None:
    calls = []
    levels = []

    async def tick() -> float:
        calls.append(1)
        raise TransientStoreError("down")

    def log(level: int, *_: Any, **__: Any) -> None:
        levels.append(level)

    time = VirtualTime()
    clock = Clock(time)
    loop = Loop("test", tick, log, clock)
    loop.start(Outages(log, clock))
    for _ in range(50):
        await time.advance(0.01)
        loop.wake()
    assert not loop.healthy
    await loop.stop()
    assert len(calls) == 3, "at once, after 0.1 and after 0.3 seconds"
    assert levels == [logging.WARNING] * 2, "its beginning, and the stop before its end"


async def test_a_loop_that_hangs_is_cancelled_when_it_must_stop() -> None:
    async def tick() -> float:
        await asyncio.Event().wait()
        return 0.0

    loop = Loop("test", tick, quiet, Clock())
    loop.start(Outages(quiet))
    await asyncio.sleep(0)
    await asyncio.wait_for(loop.stop(0.05), 60)


async def test_a_loop_that_is_started_while_it_stops_does_not_hold_the_stop_up() -> None:
    """A request over HTTP may come at any moment, and starts the loop that it needs."""
    go = asyncio.Event()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        ticks += 1
        await go.wait()

    loop = Loop("test", tick, quiet, Clock())
    loop.start(Outages(quiet))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(loop.stop())
    await asyncio.sleep(0)
    loop.start(Outages(quiet))
    await asyncio.sleep(0)
    assert ticks == 2
    go.set()
    await asyncio.wait_for(stopping, 60)
    await asyncio.wait_for(loop.stop(), 60)


def test_a_lost_row_is_not_queued_again() -> None:
    """Its loss would be told and counted once more."""
    inflight = Inflight()
    lost = row(1)
    ours = row(2)
    inflight.add([lost, ours])
    inflight.lose([lost], "test", "gone")
    inflight.release([lost, ours])
    assert [s.id for s in inflight.queued] == [2]
    assert inflight.lease_lost_count == 1


async def test_nothing_is_remembered_of_a_removal_whose_commit_was_not_answered() -> None:
    """No outcome of it is written any more, which would tell."""

    async def unanswered(*_: Any) -> None:
        raise UnknownOutcomeError

    store = Mock()
    inflight = Inflight(quiet)
    message = row()
    store.ack_first_starts.remove_first = unanswered
    inflight.add([message])
    inflight.waiting.get_nowait()
    first = AckFirstTracker(store, inflight, SettleRules(), quiet, lease=10.0, interval=1.0)
    assert await first.remove([message]) == []
    assert (inflight.held, inflight.lost_leases.unanswered) == ({}, set())
