"""Rows that wait for a worker: how long they may wait, and that a lost row never starts."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.flow.consumer import QueueConsumer
from faststream_sqlbroker.flow.deliver.prefetch import HORIZON, PREFETCH_LEASE
from tests.flow.conftest import Rig, count_as_quick, ticks
from tests.helpers import eventually

FAST: Any = {"max_fetch_interval": 0.05, "flush_interval": 0.01, "wakeup": "poll"}
LONG = 6_000.0


@pytest.fixture(autouse=True)
def longest_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a worker stays until a test says that it has waited for too long."""
    monkeypatch.setattr("faststream_sqlbroker.flow.deliver.fetch.MAX_PREFETCH_WAIT", LONG)


class Gate:
    """A handler that waits for `open` from the second body on."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.started: list[bytes] = []

    async def __call__(self, rows: Any) -> None:
        for row in rows if isinstance(rows, tuple) else (rows,):
            self.started.append(row.payload)
            row.record_outcome(Ack())
        if len(self.started) > 1:
            await self.open.wait()


def age(rows: list[ClaimedMessage], seconds: float) -> None:
    for row in rows:
        row.renewed_monotonic -= seconds


def waiting(consumer: QueueConsumer) -> list[ClaimedMessage]:
    return [row for row in consumer.inflight.waiting.items if row is not None]


async def _held_up(rig: Rig, gate: Gate, count: int = 6, **options: Any) -> QueueConsumer:
    """A consumer that runs the second of `count` messages, while the others wait in it."""
    await rig.put(count)
    consumer = rig.consumer(gate, **FAST, **options)
    await consumer.start()
    count_as_quick(consumer)
    await eventually(lambda: len(gate.started) == 2 and len(waiting(consumer)) == count - 2)

    async def first_is_written() -> bool:
        return len(await rig.rows(archive=True)) == 1

    await eventually(first_is_written)
    return consumer


async def test_rows_behind_a_running_handler_are_given_back_uncharged(rig: Rig) -> None:
    gate = Gate()
    time = rig.shifted()
    consumer = await _held_up(rig, gate)

    async def given_back() -> bool:
        rows = await rig.rows()
        return [r["state"] for r in rows] == ["PROCESSING"] + ["PENDING"] * 4

    await ticks(consumer._fetch_loop, 4)
    assert len(waiting(consumer)) == 4
    time.shift = LONG
    consumer._fetch_loop.wake()
    await eventually(given_back)
    assert [r["deliveries_count"] for r in await rig.rows()] == [1, 0, 0, 0, 0]
    assert await rig.claim(), "another worker may claim them"
    assert waiting(consumer) == []
    gate.open.set()


async def test_nothing_is_fetched_ahead_of_a_handler_of_unknown_duration(rig: Rig) -> None:
    end = asyncio.Event()
    started = 0

    async def handle(row: ClaimedMessage) -> None:
        nonlocal started
        started += 1
        await end.wait()
        row.record_outcome(Ack())

    await rig.put(9)
    consumer = rig.consumer(handle, **FAST, max_workers=2)
    await consumer.start()
    await eventually(lambda: started == 2)
    ticks = consumer._fetcher.get_window
    seen: list[int] = []
    consumer._fetcher.get_window = lambda: (seen.append(1), ticks())[1]  # type: ignore[method-assign]
    await eventually(lambda: len(seen) >= 3)
    assert len(consumer.inflight.held) == 2
    end.set()
    await eventually(lambda: started == 9)


async def test_waiting_rows_are_leased_and_renewed_for_less(rig: Rig) -> None:
    gate = Gate()
    consumer = await _held_up(rig, gate)
    rows = waiting(consumer)
    assert all(row.prefetched for row in rows)
    ends_in = await rig.store.get_seconds_to_lease_end(["q"])
    assert ends_in is not None
    assert ends_in <= PREFETCH_LEASE
    ids = {row.id for row in rows}
    leases = [r["lease_expires_at"] - r["acquired_at"] for r in await rig.rows() if r["id"] in ids]
    assert min(leases) >= timedelta(seconds=PREFETCH_LEASE)
    age(rows, PREFETCH_LEASE / 2)
    before = [row.renewed_monotonic for row in rows]
    consumer._lease_loop.wake()
    await eventually(
        lambda: all(r.renewed_monotonic > b for r, b in zip(rows, before, strict=True))
    )
    assert all(row.prefetched for row in rows), "still by the shorter lease"
    again = await rig.store.get_seconds_to_lease_end(["q"])
    assert again is not None
    assert again <= PREFETCH_LEASE
    gate.open.set()
    await eventually(lambda: len(gate.started) == 6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"handler_timeout": 60.0},
        {"batch": True, "fetch_batch_size": 2, "max_not_processed_factor": 3},
    ],
)
async def test_a_row_with_little_left_is_renewed_before_it_starts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    gate = Gate()
    consumer = await _held_up_any(rig, gate, **options)
    consumer._lease_loop.wake = lambda: None  # type: ignore[method-assign]
    renewed: list[int] = []
    renew = rig.store.renew

    async def counted(leases: Any, lease: float, **given: Any) -> set[int]:
        renewed.extend(i for i, _ in leases)
        return await renew(leases, lease, **given)

    monkeypatch.setattr(rig.store, "renew", counted)
    rows = waiting(consumer)
    age(rows, PREFETCH_LEASE * 0.6)
    gate.open.set()
    await eventually(lambda: len(gate.started) == 6)
    assert {row.id for row in rows} <= set(renewed)
    await eventually(lambda: not consumer.inflight.held)
    assert consumer.inflight.lease_lost_count == 0


async def _held_up_any(rig: Rig, gate: Gate, **options: Any) -> QueueConsumer:
    await rig.put(6)
    consumer = rig.consumer(gate, **FAST, **options)
    await consumer.start()
    count_as_quick(consumer)
    await eventually(lambda: gate.started and len(waiting(consumer)) + len(gate.started) == 6)
    return consumer


async def test_a_row_that_another_worker_holds_by_then_does_not_start(rig: Rig) -> None:
    gate = Gate()
    consumer = await _held_up(rig, gate)
    rows = waiting(consumer)
    await _take(rig)
    age(rows, PREFETCH_LEASE * 0.6)
    gate.open.set()
    await eventually(lambda: not consumer.inflight.held)
    assert gate.started == [b"0", b"1"]
    assert all(row.lease_lost for row in rows)
    assert [r["deliveries_count"] for r in await rig.rows()] == [2] * 4


async def _take(rig: Rig) -> None:
    """Another worker has what waits."""
    await rig.execute(
        "UPDATE message SET lease_token = :other, deliveries_count = 2, "
        f"lease_expires_at = {rig.past(-3600)} WHERE payload <> :running",
        other=uuid4().hex,
        running=b"1",
    )


@pytest.mark.parametrize("lease", [0.5, 15.0, 60.0])
@pytest.mark.parametrize("options", [{}, {"handler_timeout": 60.0}])
async def test_a_lost_row_does_not_start_with_leases_of_one_length(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, lease: float, options: dict[str, Any]
) -> None:
    async def nothing(*_: Any) -> int:
        return 0

    # A lease may run out before the others have it.
    monkeypatch.setattr(rig.store, "release_stuck", nothing)
    gate = Gate()
    consumer = await _held_up(rig, gate, release_stuck_timeout=lease, **options)
    await consumer._lease_loop.stop()  # what a handler that blocks the event loop does
    rows = waiting(consumer)
    await _take(rig)
    age(rows, lease)
    gate.open.set()
    await eventually(lambda: not consumer.inflight.held)
    assert gate.started == [b"0", b"1"]
    assert all(row.lease_lost for row in rows)
    assert [r["deliveries_count"] for r in await rig.rows()] == [2] * 4


async def test_while_the_database_does_not_say_a_row_is_held_it_does_not_start(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    consumer = await _held_up(rig, gate)
    rows = waiting(consumer)
    renew = rig.store.renew
    asked = 0

    async def gone(leases: Any, lease: float, **given: Any) -> set[int]:
        nonlocal asked
        if given.get("skip_locked") or asked == len(rows):
            return await renew(leases, lease, **given)
        asked += 1
        assert len(gate.started) == 2
        raise TransientStoreError("out of reach")

    monkeypatch.setattr(rig.store, "renew", gone)
    age(rows, PREFETCH_LEASE * 0.6)
    gate.open.set()
    await eventually(lambda: len(gate.started) == 6)
    assert asked == 4
    await eventually(lambda: not consumer.inflight.held)
    assert await rig.rows() == []
    assert [r["deliveries_count"] for r in await rig.rows(archive=True)] == [1] * 6


async def test_a_batch_that_is_cut_off_while_a_lease_is_renewed_goes_back_whole(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    consumer = await _held_up_any(
        rig, gate, batch=True, fetch_batch_size=3, max_not_processed_factor=3
    )
    rows = waiting(consumer)
    renew = rig.store.renew
    asked = asyncio.Event()

    async def hang(leases: Any, lease: float, **given: Any) -> set[int]:
        if given.get("skip_locked"):
            return await renew(leases, lease, **given)
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(rig.store, "renew", hang)
    age(rows[:1], PREFETCH_LEASE * 0.6)
    gate.open.set()
    await asyncio.wait_for(asked.wait(), 60)
    assert len(rows) == 3
    await consumer.stop(0.2)
    assert [(r["state"], r["deliveries_count"]) for r in await rig.rows()] == [("PENDING", 0)] * 3


async def test_an_urgent_message_of_an_unknown_priority_is_the_next_to_start(rig: Rig) -> None:
    """A wake-up that waits until a worker is free is answered by a look."""
    gate = asyncio.Event()
    started = list[bytes]()

    async def handle(row: ClaimedMessage) -> None:
        started.append(row.payload)
        await gate.wait()
        row.record_outcome(Ack())

    await rig.put(5)
    consumer = rig.consumer(handle, flush_interval=0.01, max_fetch_interval=600.0, wakeup="poll")
    await consumer.start()
    await eventually(lambda: started)
    await rig.store.insert([NewMessage("q", b"urgent", priority=7)])
    consumer._on_hint()
    hint = consumer._fetcher.ready._hint
    assert hint is not None
    consumer._fetcher.ready._hint = replace(hint, at=hint.at - HORIZON)
    gate.set()
    await eventually(lambda: len(started) == 6)
    assert started[:2] == [b"0", b"urgent"]


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "still ours"])
async def test_a_lease_is_counted_from_the_request_of_a_claim_whose_answer_is_late(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """As after a stall of the process: another worker may have the message since."""
    time = rig.shifted()
    claim = rig.store.claim

    async def answer_late(*args: Any, **options: Any) -> Any:
        rows = await claim(*args, **options)
        if rows and not time.shift:
            time.shift = 90.0
            if taken:
                await rig.execute(
                    "UPDATE message SET lease_token = :other, deliveries_count = 2",
                    other=uuid4().hex,
                )
        return rows

    monkeypatch.setattr(rig.store, "claim", answer_late)
    started: list[int] = []

    async def handle(row: ClaimedMessage) -> None:
        started.append(row.id)
        row.record_outcome(Ack())

    await rig.put()
    consumer = rig.consumer(handle, **FAST, release_stuck_timeout=60.0)
    await consumer.start()
    held = consumer.inflight
    await eventually(lambda: held.claimed_count == 1 and not held.held)
    assert len(started) == (0 if taken else 1)
    assert held.lease_lost_count == (1 if taken else 0)
    rows = await rig.rows(archive=not taken)
    assert [row["deliveries_count"] for row in rows] == [2 if taken else 1]
