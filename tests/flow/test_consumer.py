"""A message's way through the loops."""

import asyncio
import contextlib
from typing import Any
from unittest.mock import patch

import pytest

from faststream_sqlbroker.core.outcome import Ack, Defer, Nack, Reject
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.exceptions import TransientStoreError
from tests.flow.conftest import Rig, count_as_quick, ticks
from tests.helpers import eventually

FAST = {"max_fetch_interval": 0.05}


def quick(**options: Any) -> ConstantRetryStrategy:
    return ConstantRetryStrategy(delay_seconds=0.01, **{"max_attempts": 3, **options})


async def test_messages_are_handled_in_order_and_archived(rig: Rig) -> None:
    """F3, F8: one worker takes them by priority, then by due time and id."""
    await rig.put(5)
    await rig.put(2, priority=9)
    await rig.consumer().start()
    await eventually(lambda: len(rig.handled) == 7)
    assert [r.payload for r in rig.handled] == [b"0", b"1", b"0", b"1", b"2", b"3", b"4"]
    archived = await eventually(lambda: _archived(rig, 7))
    assert {row["state"] for row in archived} == {"COMPLETED"}
    assert await rig.rows() == []


async def test_a_failing_handler_is_tried_again_and_then_dead_lettered(rig: Rig) -> None:
    """F7, promise 8: the strategy's attempts and no more."""
    calls: list[bytes] = []

    async def handle(row: ClaimedMessage) -> None:
        calls.append(row.payload)
        row.record_outcome(
            Nack(error=ValueError(f"no {row.payload!r}")) if row.payload == b"0" else Ack()
        )

    await rig.put(2)
    await rig.consumer(handle, retry_strategy=quick(), **FAST).start()
    rows = await eventually(lambda: _archived(rig, 2))
    assert sorted(calls) == [b"0", b"0", b"0", b"1"]
    dead = next(r for r in rows if r["payload"] == b"0")
    assert (dead["state"], dead["reason"], dead["attempts_count"]) == ("FAILED", "max_attempts", 3)
    assert "no b'0'" in dead["last_error"]
    assert dead["last_attempt_at"] > dead["first_attempt_at"]


async def test_two_consumers_share_a_queue(rig: Rig) -> None:
    """F11: each message is handled once."""
    ids = await rig.put(400)
    for _ in range(2):
        await rig.consumer(fetch_batch_size=20, max_workers=3).start()
    await eventually(lambda: _archived(rig, 400))
    assert sorted(r.id for r in rig.handled) == sorted(ids)


async def test_a_stop_gives_back_rows_that_have_not_started(rig: Rig) -> None:
    """F10: PENDING, no delivery charged, the due time kept."""
    started = asyncio.Event()
    go_on = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        started.set()
        await go_on.wait()
        await rig.ack(row)

    await rig.put(10)
    before = {r["id"]: r for r in await rig.rows()}
    consumer = rig.consumer(handle)
    await consumer.start()
    await started.wait()
    stopping = asyncio.create_task(consumer.stop())
    await eventually(lambda: consumer.inflight.waiting.qsize() <= 1)
    go_on.set()
    await stopping
    assert len(rig.handled) == 1
    rows = await rig.rows()
    assert len(rows) == 9
    assert all(row == before[row["id"]] for row in rows)
    assert len(await rig.rows(archive=True)) == 1


async def test_the_graceful_timeout_cancels_and_gives_back(rig: Rig) -> None:
    """Due again at once; the delivery is charged, the attempt is not."""
    started = asyncio.Event()

    async def handle(_row: ClaimedMessage) -> None:
        started.set()
        await asyncio.Event().wait()

    await rig.put()
    consumer = rig.consumer(handle)
    await consumer.start()
    await started.wait()
    await consumer.stop(0.05)
    row = await rig.one()
    assert (row["state"], row["attempts_count"], row["deliveries_count"]) == ("PENDING", 0, 1)
    assert rig.logged("graceful_timeout")


@pytest.mark.parametrize(
    "options", [{}, {"task_per_message": True}, {"batch": True}, {"transactional": True}], ids=str
)
async def test_a_handler_that_swallows_its_cancellation_keeps_its_lease(
    rig: Rig, options: dict[str, Any]
) -> None:
    """A stop closes it, even if it waits again in a `finally`, and writes nothing of it."""
    started = asyncio.Event()
    closed = asyncio.Event()

    async def handle(given: Any) -> None:
        started.set()
        try:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        finally:
            closed.set()
            (given[0] if options.get("batch") else given).record_outcome(Ack())
            await asyncio.sleep(600)

    await rig.put()
    consumer = rig.consumer(handle, **options)
    await consumer.start()
    await started.wait()
    [worker] = consumer._workers
    limits = {"CANCEL_GRACE": 0.5, "SHIELDED_TIMEOUT": 0.5, "CLEAN_UP_TIMEOUT": 0.0}
    with patch.multiple("faststream_sqlbroker.flow.deliver.worker_ends", **limits):
        await consumer.stop(0.01)
    row = await rig.one()
    assert (row["state"], row["deliveries_count"]) == ("PROCESSING", 1)
    [told] = rig.logged("is abandoned")
    assert f"it swallows its cancellation; its messages [{row['id']}] of queue 'q'" in told
    assert worker.done()
    assert closed.is_set()


async def test_an_abandoned_handler_may_clean_up(rig: Rig) -> None:
    """What it does is not cut off at once; what its message ends in is not written."""
    started = asyncio.Event()
    go_on = asyncio.Event()
    cleaned = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await go_on.wait()
            row.record_outcome(Ack())
            cleaned.set()

    await rig.put()
    consumer = rig.consumer(handle)
    await consumer.start()
    await started.wait()
    [worker] = consumer._workers
    limits = {"CANCEL_GRACE": 0.2, "CLEAN_UP_TIMEOUT": 600.0}
    with patch.multiple("faststream_sqlbroker.flow.deliver.worker_ends", **limits):
        stopping = asyncio.create_task(consumer.stop(0.01))
        await eventually(lambda: rig.logged("is abandoned"))
        go_on.set()
        await stopping
    assert cleaned.is_set()
    assert worker.done()
    assert (await rig.one())["state"] == "PROCESSING"


async def test_handler_timeout_cancels_and_nacks(rig: Rig) -> None:
    calls = 0

    async def handle(row: ClaimedMessage) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.Event().wait()
        await rig.ack(row)

    await rig.put()
    await rig.consumer(handle, handler_timeout=0.05, retry_strategy=quick(), **FAST).start()
    [row] = await eventually(lambda: _archived(rig, 1))
    assert (row["state"], row["attempts_count"]) == ("COMPLETED", 2)
    assert "TimeoutError" in row["last_error"]


async def test_a_delivery_beyond_the_limit_is_not_started(rig: Rig) -> None:
    """F6: a poison message ends in the dead letters."""
    await rig.put()
    await rig.execute("UPDATE message SET deliveries_count = 5")
    await rig.consumer(max_deliveries=5, retry_strategy=quick()).start()
    [row] = await eventually(lambda: _archived(rig, 1))
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "max_deliveries", 0)
    assert row["first_attempt_at"] is None
    assert rig.handled == []
    assert rig.logged("Message delivery limit was exceeded for message")


async def test_no_attempt_beyond_the_strategys(rig: Rig) -> None:
    """Promise 8: a row that comes with its attempts used up (another process's strategy) does not
    start."""
    await rig.put()
    await rig.execute("UPDATE message SET state = 'RETRYABLE', attempts_count = 3")
    await rig.consumer(retry_strategy=quick()).start()
    [row] = await eventually(lambda: _archived(rig, 1))
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "max_attempts", 3)
    assert rig.handled == []


async def test_an_expired_message_is_discarded(rig: Rig) -> None:
    await rig.put(1, expires_in=0.001)
    await asyncio.sleep(0.01)
    await rig.consumer().start()
    [row] = await eventually(lambda: _archived(rig, 1))
    assert (row["state"], row["reason"]) == ("DISCARDED", "expired")
    assert rig.handled == []


async def test_no_outcome_is_one_error_and_a_dead_letter(rig: Rig) -> None:
    async def handle(_row: ClaimedMessage) -> None:
        return None

    await rig.put()
    await rig.consumer(handle).start()
    [row] = await eventually(lambda: _archived(rig, 1))
    assert (row["state"], row["reason"]) == ("FAILED", "no_outcome")
    assert len(rig.logged("was not updated after processing")) == 1


async def test_postpone_charges_nothing_and_comes_back(rig: Rig) -> None:
    """P4."""

    async def handle(row: ClaimedMessage) -> None:
        rig.handled.append(row)
        row.record_outcome(Defer(0.02) if len(rig.handled) < 3 else Ack())

    await rig.put()
    await rig.consumer(handle, **FAST).start()
    [row] = await eventually(lambda: _archived(rig, 1))
    assert (row["attempts_count"], row["deliveries_count"]) == (1, 1)
    assert len(rig.handled) == 3


async def test_a_batch_handler_gets_the_rows_of_one_claim(rig: Rig) -> None:
    sizes: list[int] = []

    async def handle(rows: tuple[ClaimedMessage, ...]) -> None:
        sizes.append(len(rows))
        for row in rows:
            row.record_outcome(Reject("bad") if row.payload == b"3" else Ack())

    await rig.put(25)
    await rig.consumer(handle, batch=True, fetch_batch_size=10).start()
    rows = await eventually(lambda: _archived(rig, 25))
    assert max(sizes) == 10
    assert sorted(r["state"] for r in rows) == ["COMPLETED"] * 24 + ["FAILED"]


async def test_start_works_again_after_stop(rig: Rig) -> None:
    consumer = rig.consumer()
    for n in range(3):
        await rig.put()
        await consumer.start()
        assert consumer.healthy
        await eventually(lambda n=n: len(rig.handled) == n + 1)
        await consumer.stop()
    assert len(await rig.rows(archive=True)) == 3
    await consumer.stop()


async def test_a_handler_may_ask_to_stop(rig: Rig) -> None:
    """StopConsume: the worker does not wait for its own drain."""

    async def handle(row: ClaimedMessage) -> None:
        await rig.ack(row)
        consumer.request_stop()

    await rig.put(5)
    consumer = rig.consumer(handle)
    await consumer.start()
    await consumer_stopped(consumer)
    assert len(rig.handled) == 1
    assert {r["state"] for r in await rig.rows()} == {"PENDING"}
    assert len(await rig.rows(archive=True)) == 1


async def consumer_stopped(consumer: Any) -> None:
    await eventually(lambda: consumer._stop_task is not None and consumer._stop_task.done())


async def test_several_queues_take_turns(rig: Rig) -> None:
    """No queue starves another, whatever the number waiting."""
    await rig.put(300, "a")
    await rig.put(5, "b")
    consumer = rig.consumer(queues=["a", "b"], fetch_batch_size=10)
    await consumer.start()
    await eventually(lambda: len(rig.handled) == 305)
    assert [r.queue for r in rig.handled[:105]].count("b") == 5


async def test_a_delayed_message_is_handled_when_it_is_due(rig: Rig) -> None:
    """P1: never earlier, by the database's clock, and not only by the next poll."""
    await rig.consumer(max_fetch_interval=600).start()
    await rig.publisher.publish([NewMessage("q", b"later", delay=0.3), NewMessage("q", b"now")])
    await eventually(lambda: len(rig.handled) == 2)
    now, later = rig.handled
    assert (now.payload, later.payload) == (b"now", b"later")
    assert later.acquired_at >= later.next_attempt_at


async def test_the_buffer_is_bounded(rig: Rig) -> None:
    """F4: never more than fetch_batch_size × max_not_processed_factor claimed and unstarted."""
    go_on = asyncio.Event()

    async def handle(row: ClaimedMessage) -> None:
        await go_on.wait()
        await rig.ack(row)

    await rig.put(100)
    consumer = rig.consumer(handle, fetch_batch_size=10, max_not_processed_factor=1.5, **FAST)
    await consumer.start()
    count_as_quick(consumer)
    with patch("faststream_sqlbroker.flow.deliver.fetch.MAX_PREFETCH_WAIT", 600.0):
        await eventually(lambda: consumer.inflight.claimed_count >= 15)
        await ticks(consumer._fetch_loop, 4)
        assert 15 <= sum(r["state"] == "PROCESSING" for r in await rig.rows()) <= 16
        go_on.set()
        await eventually(lambda: len(rig.handled) == 100)


async def test_claims_stop_while_outcomes_cannot_be_written(rig: Rig) -> None:
    """Memory is bounded: at most twice a batch unwritten, and a buffer."""
    await rig.put(200)
    options = {"fetch_batch_size": 10, "flush_batch_size": 10, "max_not_processed_factor": 1.5}
    consumer = rig.consumer(**options, **FAST)  # type: ignore[arg-type]
    with patch.object(rig.store, "settle", side_effect=TransientStoreError("down")):
        await consumer.start()
        await eventually(lambda: len(consumer.inflight.unwritten) >= 20)
        await ticks(consumer._fetch_loop, 10)
        assert len(rig.handled) <= 20 + 15 + 10
    await eventually(lambda: len(rig.handled) == 200)


async def test_room_made_by_the_flush_brings_the_next_claim(rig: Rig) -> None:
    consumer = rig.consumer(max_fetch_interval=600)
    consumer.inflight.is_capacity_requested = True
    await consumer._flush()
    assert not consumer.inflight.is_capacity_requested
    assert consumer._fetch_loop._wake_event.is_set()


@pytest.mark.parametrize("retain", [True, False])
async def test_retention_follows_the_options(rig: Rig, retain: bool) -> None:
    await rig.put()
    await rig.consumer(retain_in_archive_on_ack=retain).start()
    await eventually(lambda: _gone(rig))
    assert len(await rig.rows(archive=True)) == int(retain)


async def _gone(rig: Rig) -> bool:
    return not await rig.count()


async def _archived(rig: Rig, count: int) -> list[dict[str, Any]] | None:
    return await rig.rows(archive=True) if await rig.count(archive=True) == count else None


async def test_full_fetches_keep_their_distance_before_a_handler_has_ended(rig: Rig) -> None:
    """F5: neither wake-ups nor free workers bring the next one sooner."""
    time = rig.shifted()
    gate = asyncio.Event()

    async def wait(row: ClaimedMessage) -> None:
        await gate.wait()
        await rig.ack(row)

    sizes: dict[str, Any] = {"fetch_batch_size": 5, "max_workers": 50}
    consumer = rig.consumer(wait, **sizes, min_fetch_interval=600, max_fetch_interval=600)
    await rig.put(20)
    await consumer.start()
    for claimed in (5, 10):
        await eventually(lambda count=claimed: consumer.inflight.claimed_count == count)
        await rig.publisher.publish([NewMessage("q", b"new")])
        await ticks(consumer._fetch_loop, 3)
        assert consumer.inflight.claimed_count == claimed
        time.shift += 601.0
        consumer._fetch_loop.wake()
    gate.set()


async def test_a_fetch_for_the_free_workers_only_is_followed_without_a_pause(rig: Rig) -> None:
    await rig.put(3)
    consumer = rig.consumer(
        max_workers=1, fetch_batch_size=100, min_fetch_interval=600, max_fetch_interval=600
    )
    await consumer.start()
    await eventually(lambda: len(rig.handled) > 1)
