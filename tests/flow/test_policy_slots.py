"""Slots of a Throttle: each is for one attempt."""

from time import monotonic
from typing import Any
from uuid import uuid4

from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.policies.request import (
    PolicyClaim,
    PolicyClaimRequest,
    ScanPosition,
)
from tests.flow.conftest import Rig
from tests.flow.test_policies import archived

HOURLY: Any = {"per": "1h"}


async def claim(rig: Rig, throttle: Throttle) -> PolicyClaim:
    """As a process does that has just started."""
    claimed, _ = await rig.store.policies.claim(
        PolicyClaimRequest(["q"], 10, 60.0, uuid4(), [throttle]), ScanPosition()
    )
    return claimed


async def test_a_lost_lease_has_spent_its_slot(rig: Rig) -> None:
    """Z10: a message that a killed process started needs another slot."""
    throttle = Throttle(1, key=True, **HOURLY)
    await rig.put(1, key="a")
    assert len((await claim(rig, throttle)).rows) == 1
    await rig.expire()
    assert await rig.store.release_stuck(["q"], 10) == 1
    again = await claim(rig, throttle)
    assert again.rows == []
    assert again.next_claim_in is not None
    assert again.next_claim_in > 3500


async def test_what_waits_for_its_slot_starts_in_it(rig: Rig) -> None:
    """Z10: one worker, and slots that are granted ahead: each message starts in its own."""
    early: list[float] = []

    async def handle(row: ClaimedMessage) -> None:
        assert row.slot is not None
        rig.handled.append(row)
        now = monotonic()
        early.append(max(row.slot.earliest - now, 0.0))
        row.record_outcome(Ack())

    policies = [Throttle(5, per="1s", burst=1)]
    consumer = rig.consumer(
        handle, policies=policies, max_workers=1, max_fetch_interval=0.05, wakeup="poll"
    )
    ids = await rig.put(3)
    await consumer.start()
    await archived(rig, 3)
    assert sorted(row.id for row in rig.handled) == ids
    assert early == [0.0] * 3
    assert all(row.deliveries_count == 1 for row in rig.handled)
