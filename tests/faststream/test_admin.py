"""broker.admin."""

import asyncio
import re

import pytest
from faststream import AckPolicy
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker, UnknownOutcome
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually


async def test_unknown_outcomes_are_listed_and_forgotten(
    engine: AsyncEngine, broker: SqlBroker, look: Look
) -> None:
    """Promise 4: after a crash the message may not have run at all, and is listed."""
    began = asyncio.Event()

    @broker.subscriber("mail", **QUICK, ack_policy=AckPolicy.ACK_FIRST, release_stuck_timeout=0.5)
    async def handle(_body: str) -> None:
        began.set()
        await asyncio.Event().wait()

    await broker.start()
    message_id = await broker.publish("hello", "mail", key="user-1")
    await asyncio.wait_for(began.wait(), 10)
    for subscriber in broker.subscribers:
        await subscriber.consumer.stop(0)  # type: ignore[attr-defined] # the handler is cut off
    await broker.stop()

    other = SqlBroker(engine)  # neither connected nor started

    async def listed() -> list[UnknownOutcome]:
        return await other.admin.unknown("mail")

    [found] = await eventually(listed)
    assert (found.message_id, found.queue, found.key) == (message_id, "mail", "user-1")
    assert re.fullmatch(r".+:\d+", found.worker)
    [archived] = await look.rows(archive=True)
    assert archived["id"] == message_id
    assert await other.admin.unknown("else") == []
    assert await other.admin.forget_unknown(found.message_id, 10**6) == 1
    assert await other.admin.unknown() == []
    assert await other.admin.forget_unknown() == 0


async def test_a_limit_below_one_is_refused(broker: SqlBroker) -> None:
    with pytest.raises(ValueError, match="limit must be 1 or more, got 0"):
        await broker.admin.unknown(limit=0)
