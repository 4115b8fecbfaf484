"""Slots of a Throttle: each is for one attempt."""

from typing import Any
from uuid import uuid4

import pytest

from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.policies.request import Claim, PolicyClaimRequest, ScanPosition
from tests.flow.conftest import Rig
from tests.flow.test_policies import archived

HOURLY: Any = {"per": "1h", "max_lag": "1h"}


async def claim(rig: Rig, throttle: Throttle) -> Claim:
    """As a process does that has just started."""
    claimed, _ = await rig.store.policies.claim(
        PolicyClaimRequest(["q"], 10, 60.0, uuid4(), [throttle]), ScanPosition()
    )
    return claimed


async def test_a_lost_lease_has_spent_its_slot(rig: Rig) -> None:
    """Z10: a message that a killed process started needs another slot, also within max_lag."""
    throttle = Throttle(1, key=True, **HOURLY)
    await rig.put(1, key="a")
    assert len((await claim(rig, throttle)).rows) == 1
    await rig.expire()
    assert await rig.store.release_stuck(["q"], 10) == 1
    again = await claim(rig, throttle)
    assert again.rows == []
    assert again.again is not None
    assert again.again > 3500


async def test_nothing_is_claimed_for_a_worker_that_waits_for_its_slot(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Z10: it would wait behind that one here, and miss a slot that another process could use."""
    # Where claims take long, on a busy machine, they take slots ahead.
    monkeypatch.setattr(ScanPosition, "note", lambda _, took: None)
    behind: list[int] = []

    async def handle(row: ClaimedMessage) -> None:
        rig.handled.append(row)
        behind.append(consumer.inflight.waiting.qsize())
        row.settle_as(Ack())

    policies = [Throttle(5, per="1s", burst=1, max_lag="500ms")]
    consumer = rig.consumer(
        handle, policies=policies, max_workers=1, max_fetch_interval=0.05, wakeup="poll"
    )
    ids = await rig.put(3)
    await consumer.start()
    await archived(rig, 3)
    assert sorted(row.id for row in rig.handled) == ids
    assert behind == [0] * 3
