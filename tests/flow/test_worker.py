"""The worker: what a handler or a strategy may do without ending its loop."""

import asyncio
from typing import Any

from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import ClaimedMessage
from tests.flow.conftest import Rig
from tests.helpers import eventually


async def test_a_handler_that_raises_cancelled_error_does_not_end_its_worker(rig: Rig) -> None:
    async def handle(row: ClaimedMessage) -> None:
        if row.payload == b"0":
            task = asyncio.create_task(asyncio.sleep(9))
            task.cancel()
            await task
        await rig.ack(row)

    await rig.put(3)
    once = ConstantRetryStrategy(delay_seconds=0.01, max_attempts=1)
    consumer = rig.consumer(handle, retry_strategy=once, max_fetch_interval=0.05)
    await consumer.start()
    rows = await eventually(lambda: _archived(rig, 3))
    assert sorted(r["state"] for r in rows) == ["COMPLETED", "COMPLETED", "FAILED"]
    assert consumer.healthy


async def test_a_strategy_with_a_nonsensical_limit_has_none(rig: Rig) -> None:
    class Odd:
        max_attempts = "3"

        def get_next_attempt_at(self, **times: Any) -> Any:
            return times["last_attempt_at"]

    await rig.put()
    consumer = rig.consumer(retry_strategy=Odd(), max_fetch_interval=0.05)
    await consumer.start()
    await eventually(lambda: _archived(rig, 1))
    assert consumer.healthy


async def _archived(rig: Rig, count: int) -> list[dict[str, Any]] | None:
    rows = await rig.rows(archive=True)
    return rows if len(rows) == count else None
