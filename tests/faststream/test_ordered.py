"""ordered=True at the decorator."""

import asyncio
from typing import Any

import pytest
from faststream import AckPolicy
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SetupError, SqlBroker, SqlBrokerMessage, SqlBrokerResponse
from tests.faststream.conftest import QUICK, Look

pytestmark = pytest.mark.capability("`ordered=True`")


async def test_one_message_of_a_key_at_a_time(broker: SqlBroker, look: Look) -> None:
    running: set[str] = set()
    seen: dict[str, list[int]] = {}

    @broker.subscriber("q", **QUICK, ordered=True, max_workers=5)
    async def handle(body: int, message: SqlBrokerMessage) -> None:
        key = message.key or ""
        assert key not in running
        running.add(key)
        await asyncio.sleep(0.002)
        running.discard(key)
        seen.setdefault(key, []).append(body)

    bodies = (SqlBrokerResponse(n, key=str(n % 3)) for n in range(30))
    await broker.publish_batch(*bodies, queue="q")
    await broker.start()
    rows = await look.archived(30)
    assert {row["state"] for row in rows} == {"COMPLETED"}
    assert seen == {str(k): list(range(k, 30, 3)) for k in range(3)}


async def test_transactional_handlers_can_be_ordered(broker: SqlBroker, look: Look) -> None:
    seen: list[int] = []

    @broker.subscriber("q", **QUICK, ordered=True, transactional=True, max_workers=2)
    async def handle(body: int) -> None:
        seen.append(body)

    await broker.publish_batch(*range(10), queue="q", key="a")
    await broker.start()
    await look.archived(10)
    assert seen == list(range(10))


async def test_a_transactional_key_goes_on_at_once(broker: SqlBroker, look: Look) -> None:
    """Its outcome is written by its own worker, while that still counts as busy."""

    @broker.subscriber("q", ordered=True, transactional=True, wakeup="poll", max_fetch_interval=600)
    async def handle(body: int) -> None: ...

    await broker.publish_batch(*range(10), queue="q", key="a")
    await broker.start()
    await look.archived(10)


def test_options_that_rule_out_order_are_refused() -> None:
    broker = SqlBroker("sqlite+aiosqlite:///x.db", logger=None)
    with pytest.raises(SetupError, match=r"ordered=True holds .*ACK_FIRST removes"):
        broker.subscriber("q", ordered=True, ack_policy=AckPolicy.ACK_FIRST)
    with pytest.raises(SetupError, match="ordered must be True or False"):
        broker.subscriber("q", ordered="yes")  # type: ignore[arg-type]
    asyncio.run(broker.stop())


@pytest.mark.parametrize("option", ["ordered", "transactional"])
async def test_a_policy_of_the_broker_that_does_not_fit_is_refused_at_the_start(
    engine: AsyncEngine, option: str
) -> None:
    broker = SqlBroker(engine, logger=None, ack_policy=AckPolicy.ACK_FIRST)
    await broker.create_tables()
    options: Any = {option: True}

    @broker.subscriber("q", **options)
    async def handle(body: str) -> None: ...

    with pytest.raises(SetupError, match="ACK_FIRST"):
        await broker.start()
    await broker.stop()
