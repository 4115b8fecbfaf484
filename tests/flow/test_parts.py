"""Batches that the handler gets again in parts, cut off or robbed in between."""

import asyncio
from typing import Any

import pytest

from faststream_sqlbroker.core.outcome import Ack, Again
from faststream_sqlbroker.core.rows import ClaimedMessage
from tests.flow.conftest import Rig
from tests.helpers import eventually

QUICK: dict[str, Any] = {"batch": True, "max_fetch_interval": 0.05, "flush_interval": 0.01}
Rows = tuple[ClaimedMessage, ...]


class Parts:
    """Hands its first batch out again, each message a part of its own; the others wait until they may go on."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, rows: Rows) -> None:
        self.calls.append([row.id for row in rows])
        if len(self.calls) == 1:
            for part, row in enumerate(rows):
                row.outcome = Again(part)
            return
        self.entered.set()
        await self.go_on.wait()
        for row in rows:
            row.settle_as(Ack())


async def test_a_stop_gives_back_what_has_not_started(rig: Rig) -> None:
    handle = Parts()
    ids = await rig.put(3)
    consumer = rig.consumer(handle, **QUICK)
    await consumer.start()
    await handle.entered.wait()
    await consumer.stop(0)
    assert handle.calls == [ids, ids[:1]]
    rows = await rig.rows()
    assert [(r["state"], r["attempts_count"], r["deliveries_count"]) for r in rows] == [
        ("PENDING", 0, 1), ("PENDING", 0, 0), ("PENDING", 0, 0),
    ]  # fmt: skip
    assert consumer.inflight.empty


async def test_a_part_whose_lease_was_lost_does_not_start(rig: Rig) -> None:
    handle = Parts()
    ids = await rig.put(2)

    async def lost_meanwhile(rows: Rows) -> None:
        await handle(rows)
        if len(handle.calls) == 1:
            consumer.inflight.lose([rows[1]], "test", "")

    consumer = rig.consumer(lost_meanwhile, **QUICK)
    handle.go_on.set()
    await consumer.start()

    async def done() -> bool:
        return [row["id"] for row in await rig.rows(archive=True)] == ids[:1]

    await eventually(done)
    assert handle.calls == [ids, ids[:1]]
    assert [row["state"] for row in await rig.rows()] == ["PROCESSING"]


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
                row.settle_as(Ack())

    ids = await rig.put(3)
    await rig.consumer(handle, **QUICK, ack_first=ack_first, retry_strategy=None).start()

    async def done() -> bool:
        return len(await rig.rows(archive=True)) == 3 and len(calls) == 3

    await eventually(done)
    assert calls == [ids, ids[:1], ids[1:]]
    states = [row["state"] for row in await rig.rows(archive=True)]
    assert states == (["COMPLETED"] * 3 if ack_first else ["FAILED", "COMPLETED", "COMPLETED"])
