"""Batches that the handler gets again in parts: stops and lost leases in between."""

import asyncio
from typing import Any

import pytest

from faststream_sqlbroker.core.outcome import Ack, Again, Nack
from faststream_sqlbroker.core.policies import Once
from faststream_sqlbroker.core.rows import ClaimedMessage
from tests.flow.conftest import Rig
from tests.helpers import eventually

QUICK: dict[str, Any] = {"batch": True, "max_fetch_interval": 0.05, "flush_interval": 0.01}
ONCE: dict[str, Any] = {**QUICK, "policies": [Once("1h")]}
BOTH = pytest.mark.parametrize("options", [QUICK, ONCE], ids=["plain", "once"])
Rows = tuple[ClaimedMessage, ...]


async def put(rig: Rig, count: int) -> list[int]:
    """Messages with a key each."""
    return [id_ for n in range(count) for id_ in await rig.put(1, key=f"k{n}")]


async def ack_all(rows: Rows) -> None:
    for row in rows:
        row.record_outcome(Ack())


async def states(rig: Rig) -> list[tuple[str, int, int]]:
    return [(r["state"], r["attempts_count"], r["deliveries_count"]) for r in await rig.rows()]


async def ends(rig: Rig, count: int) -> list[tuple[int, str, str | None]]:
    """How the messages have ended, once there are `count`."""

    async def there() -> bool:
        return len(await rig.rows(archive=True)) == count

    await eventually(there)
    return sorted((r["id"], r["state"], r["reason"]) for r in await rig.rows(archive=True))


class Parts:
    """Hands its first batch out again, each message a part of its own; the others wait until they
    may go on."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.rows: Rows = ()
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, rows: Rows) -> None:
        self.calls.append([row.id for row in rows])
        self.rows = self.rows or rows
        if len(self.calls) == 1:
            for part, row in enumerate(rows):
                row.outcome = Again(part)
            return
        self.entered.set()
        await self.go_on.wait()
        for row in rows:
            row.record_outcome(Ack())


async def test_a_stop_gives_back_parts_that_have_not_started(rig: Rig) -> None:
    handle = Parts()
    ids = await rig.put(3)
    consumer = rig.consumer(handle, **QUICK)
    await consumer.start()
    await handle.entered.wait()
    await consumer.stop(0)
    assert handle.calls == [ids, ids[:1]]
    rows = await rig.rows()
    assert [(r["state"], r["attempts_count"], r["deliveries_count"]) for r in rows] == [
        ("PENDING", 0, 1),
        ("PENDING", 0, 0),
        ("PENDING", 0, 0),
    ]
    assert consumer.inflight.is_empty


async def test_a_part_whose_lease_was_lost_does_not_start(rig: Rig) -> None:
    handle = Parts()
    ids = await rig.put(2)

    async def lose_the_second_row(rows: Rows) -> None:
        await handle(rows)
        if len(handle.calls) == 1:
            consumer.inflight.lose([rows[1]], "test", "")

    consumer = rig.consumer(lose_the_second_row, **QUICK)
    handle.go_on.set()
    await consumer.start()

    async def done() -> bool:
        return [row["id"] for row in await rig.rows(archive=True)] == ids[:1]

    await eventually(done)
    assert handle.calls == [ids, ids[:1]]
    assert [row["state"] for row in await rig.rows()] == ["PROCESSING"]


async def test_a_cancelled_part_gives_back_the_keys_of_the_others_first(rig: Rig) -> None:
    """Only the part that has run may have left an effect."""
    handle = Parts()
    ids = await put(rig, 3)
    consumer = rig.consumer(handle, **ONCE)
    await consumer.start()
    await handle.entered.wait()
    await consumer.stop(0)
    assert await states(rig) == [("PENDING", 0, 1), ("PENDING", 0, 0), ("PENDING", 0, 0)]
    await rig.consumer(ack_all, **ONCE).start()
    assert await ends(rig, 3) == [
        (ids[0], "FAILED", "unknown_outcome"),
        (ids[1], "COMPLETED", None),
        (ids[2], "COMPLETED", None),
    ]


async def test_a_stop_between_parts_gives_back_their_keys_first(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of what has failed are being given back when the worker is cancelled."""
    give_back_keys = rig.store.policies.release_keys
    reached = asyncio.Event()
    may_end = asyncio.Event()

    async def slow(*args: Any) -> None:
        reached.set()
        await may_end.wait()
        await give_back_keys(*args)

    async def handle(rows: Rows) -> None:
        for row in rows[1:]:
            row.outcome = Again(0)
        rows[0].record_outcome(Nack(delay=0.0, retry_possible=True))

    ids = await put(rig, 3)
    with monkeypatch.context() as patch:
        patch.setattr(rig.store.policies, "release_keys", slow)
        consumer = rig.consumer(handle, **ONCE)
        await consumer.start()
        await reached.wait()
        stop = asyncio.create_task(consumer.stop(0.05))
        await eventually(lambda: rig.logged("they are cancelled"))
        may_end.set()
        await stop
    assert await states(rig) == [("RETRYABLE", 1, 1), ("PENDING", 0, 0), ("PENDING", 0, 0)]
    await rig.consumer(ack_all, **ONCE).start()
    assert await ends(rig, 3) == [(id_, "COMPLETED", None) for id_ in ids]


@BOTH
async def test_no_part_starts_after_a_stop(rig: Rig, options: dict[str, Any]) -> None:
    """The part that runs ends; the others go back, uncharged."""
    handle = Parts()
    ids = await put(rig, 3)
    consumer = rig.consumer(handle, **options)
    await consumer.start()
    await handle.entered.wait()
    stop = consumer.request_stop()
    handle.go_on.set()
    await stop
    assert handle.calls == [ids, ids[:1]]
    assert await states(rig) == [("PENDING", 0, 0)] * 2
    await rig.consumer(ack_all, **options).start()
    assert await ends(rig, 3) == [(id_, "COMPLETED", None) for id_ in ids]


async def test_a_message_removed_by_ack_first_starts_even_during_a_stop(rig: Rig) -> None:
    """It could not be given back."""
    handle = Parts()
    ids = await rig.put(3)
    consumer = rig.consumer(handle, **QUICK, ack_first=True, retry_strategy=None)
    await consumer.start()
    await handle.entered.wait()
    stop = consumer.request_stop()
    handle.go_on.set()
    await stop
    assert handle.calls == [ids, *([id_] for id_ in ids)]


@BOTH
@pytest.mark.parametrize("why", ["lost", "expired"])
async def test_messages_that_may_not_start_any_more_are_left_out(
    rig: Rig, options: dict[str, Any], why: str
) -> None:
    """It has lost its lease, or has expired, while the part before it ran; its key can be claimed
    again."""
    ids = await put(rig, 3)
    handle = Parts()
    given_back = []
    give_back_keys = rig.store.policies.release_keys

    async def give_back(rows: list[ClaimedMessage]) -> None:
        given_back.append(
            [(row.id, consumer.inflight.has_no_outcome(row) or row.lease_lost) for row in rows]
        )
        await give_back_keys(rows)

    rig.store.policies.release_keys = give_back  # type: ignore[method-assign]
    consumer = rig.consumer(handle, **options)
    await consumer.start()
    await handle.entered.wait()
    row = handle.rows[1]
    if why == "lost":
        consumer.inflight.lose([row], "test", "")
    else:
        row.expires_at = row.acquired_at
    handle.go_on.set()
    lost = [] if why == "lost" else [(ids[1], "DISCARDED", "expired")]
    others = [(id_, "COMPLETED", None) for id_ in (ids[0], ids[2])]
    assert await ends(rig, 2 + len(lost)) == sorted(lost + others)
    assert handle.calls == [ids, ids[:1], ids[2:]]
    assert given_back == ([[(ids[1], True)]] if options is ONCE else []), "before it is settled"


@pytest.mark.parametrize("ack_first", [False, True])
async def test_parts_end_each_by_itself(rig: Rig, ack_first: bool) -> None:
    """One that raises what a handler can raise does not keep the others from starting."""
    calls: list[list[int]] = []

    async def handle(rows: Rows) -> None:
        calls.append([row.id for row in rows])
        if len(calls) == 1:
            for row in rows:
                row.outcome = Again(int(row is not rows[0]))
        elif len(calls) == 2:
            raise asyncio.CancelledError
        else:
            for row in rows:
                row.record_outcome(Ack())

    ids = await rig.put(3)
    await rig.consumer(handle, **QUICK, ack_first=ack_first, retry_strategy=None).start()

    async def done() -> bool:
        return len(await rig.rows(archive=True)) == 3 and len(calls) == 3

    await eventually(done)
    assert calls == [ids, ids[:1], ids[1:]]
    states = [row["state"] for row in await rig.rows(archive=True)]
    assert states == (["COMPLETED"] * 3 if ack_first else ["FAILED", "COMPLETED", "COMPLETED"])
