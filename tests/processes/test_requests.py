"""Requests among real processes: each gets its own reply; killed processes leave nothing behind."""

import asyncio
from collections import Counter

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker
from tests.helpers import eventually
from tests.processes.conftest import Fleet
from tests.processes.requester import TIMEOUT

EACH = 50

pytestmark = pytest.mark.capability("`request`: the answer of a handler, and `--rpc`")


async def test_requests_of_several_processes_get_their_own_replies(fleet: Fleet) -> None:
    """Two ask the same bodies with the same correlation id, two answer."""
    for _ in range(2):
        fleet.run("requester", "answer")
    asking = [fleet.run("requester", "ask", str(EACH)) for _ in range(2)]
    for process in asking:
        assert await fleet.ended(process, timeout=2 * TIMEOUT) == 0, fleet.said.read_text()
    await fleet.settled(2 * EACH)
    assert await fleet.count("queue = 'q' AND state = 'COMPLETED'", archive=True) == 2 * EACH
    await fleet.stop()


async def test_another_process_answers_for_a_killed_one(fleet: Fleet, engine: AsyncEngine) -> None:
    """When its lease has run out, which is before the request does."""
    victim = fleet.run("requester", "hang")
    async with SqlBroker(engine, logger=None) as broker:
        asking = asyncio.create_task(broker.request(7, "q", timeout=TIMEOUT))
        await eventually(lambda: fleet.started().get(victim.pid))
        victim.kill()
        victim.wait()
        await fleet.expire()
        other = fleet.run("requester", "answer")
        reply = await asking
        assert await reply.decode() == {"body": 7, "process": other.pid}
    await fleet.settled(1)
    assert fleet.total() == Counter({7: 2})
    await fleet.stop()


async def test_the_replies_to_a_killed_process_are_removed_when_they_have_expired(
    fleet: Fleet, engine: AsyncEngine
) -> None:
    asking = fleet.run("requester", "ask in vain", str(EACH))

    async def asked() -> bool:
        return await fleet.count("queue = 'unanswered'") == EACH

    await eventually(asked, step=0.02)
    asking.kill()
    asking.wait()
    answering = SqlBroker(engine, logger=None)

    @answering.subscriber("unanswered", max_workers=EACH)
    async def answer(body: int) -> int:
        return body

    async with answering:
        await answering.start()

        async def handled() -> bool:
            return await fleet.count("queue = 'unanswered'") == 0

        await eventually(handled)
    # Their reader is gone; they wait for their expiry, which the database's clock decides.
    assert await fleet.count("expires_at IS NOT NULL") == EACH
    await fleet.execute(f"UPDATE message SET expires_at = {fleet.past(1)}")
    cleaning = SqlBroker(engine, logger=None)

    @cleaning.subscriber("other")
    async def handle(body: int) -> None: ...

    async with cleaning:
        await cleaning.start()

        async def removed() -> bool:
            return await fleet.count() == 0

        await eventually(removed)
    assert await fleet.count("queue <> 'unanswered'", archive=True) == 0
