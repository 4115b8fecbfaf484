"""Forwarding by the loops alone: fences, and due times by the database's clock."""

import asyncio
import json
from datetime import datetime, timedelta
from time import monotonic
from typing import Any

import pytest

from faststream_sqlbroker.core.outcome import Relocate
from faststream_sqlbroker.core.routing import DESTINATION
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.flow.deliver.forward import ForwardHandler
from faststream_sqlbroker.subscriber.options import make_settings
from tests.flow.conftest import Rig
from tests.helpers import eventually


async def test_a_late_move_changes_nothing(rig: Rig) -> None:
    """The lease is lost while the batch is on its way: another has the messages, and they stay its
    own."""
    forward = ForwardHandler(make_settings("q", {"forward_to": "out"}), rig.log, lambda *_: None)
    reached = asyncio.Event()
    go_on = asyncio.Event()

    async def handle(rows: Any) -> None:
        await forward(rows)
        reached.set()
        await go_on.wait()

    await rig.put(3)
    consumer = rig.consumer(handle, batch=True, max_fetch_interval=0.05)
    await consumer.start()
    await asyncio.wait_for(reached.wait(), 60)
    taken = "lease_token = NULL, lease_expires_at = NULL, acquired_at = NULL, state = 'PENDING'"
    await rig.execute(f"UPDATE message SET {taken}, queue = 'elsewhere'")
    go_on.set()
    await eventually(lambda: consumer.inflight.lease_lost_count == 3)
    assert {row["queue"] for row in await rig.rows()} == {"elsewhere"}
    assert len(rig.logged("lease lost")) == 3


@pytest.mark.parametrize("ahead", [0.0, 0.0004, 0.03, 0.5, 3600.0])
async def test_a_forwarded_message_is_never_due_too_early(rig: Rig, ahead: float) -> None:
    """P1: whatever the clock's step, and however soon it is written."""
    forward = ForwardHandler(
        make_settings("q", {"forward_to": DESTINATION}), rig.log, lambda *_: None
    )
    took = []
    for _ in range(10):
        began = await rig.store.server.read_now()
        due = began + timedelta(seconds=ahead)
        headers = f'{{"destination": "out", "publish_after": "{due.isoformat()}"}}'
        await rig.put(headers=headers)
        [row] = await rig.claim(1)
        row.claimed_monotonic = monotonic()
        await forward([row])
        assert isinstance(row.outcome, Relocate)
        await rig.store.settle([settle(row, row.outcome, SettleRules(), ended_after=0.0)])
        took.append(await rig.store.server.read_now() - began)
    for stored, late in zip(await rig.rows(), took, strict=True):
        headers = stored["headers"]
        assert stored["next_attempt_at"] >= _due(headers)
        assert stored["next_attempt_at"] <= _due(headers) + late + timedelta(seconds=1)


def _due(headers: Any) -> Any:
    loaded = headers if isinstance(headers, dict) else json.loads(headers)
    return datetime.fromisoformat(loaded["publish_after"])
