"""When a publish can join the ack: from the parser on, until the handler has ended, never later."""

import asyncio
from typing import Any
from unittest.mock import patch

import pytest
from faststream import BaseMiddleware
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import PublishError, SqlBroker, SqlConnection
from faststream_sqlbroker.database.messages.handler import HandlerTransaction
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("publish on ack: answers and `with_ack` commit with the ack")


async def test_a_publish_during_the_commit_of_its_ack_is_refused(
    broker: SqlBroker, look: Look
) -> None:
    """It would be accepted, and never written: what is committed was decided before."""
    committing = asyncio.Event()
    tried = asyncio.Event()
    tasks = list[asyncio.Task[None]]()
    refusals: list[str] = []
    commit = HandlerTransaction.commit

    async def slowly(self: HandlerTransaction, *arguments: Any) -> Any:
        committing.set()
        await tried.wait()
        return await commit(self, *arguments)

    async def late() -> None:
        await committing.wait()
        try:
            await broker.publish("x", "out", with_ack=True)
        except PublishError as error:
            refusals.append(str(error))
        finally:
            tried.set()

    @broker.subscriber("in", transactional=True, **QUICK)
    async def handle(body: str, connection: SqlConnection) -> None:
        tasks.append(asyncio.create_task(late()))

    await broker.publish("x", "in")
    with patch.object(HandlerTransaction, "commit", slowly):
        await broker.start()
        await look.archived()
    assert "has ended" in refusals[0]
    assert await look.rows() == []


@pytest.mark.parametrize("batch", [False, True])
async def test_a_middleware_may_join_before_the_handler(
    engine: AsyncEngine, look: Look, batch: bool
) -> None:
    class Early(BaseMiddleware):
        async def on_receive(self) -> None:
            await broker.publish("early", "out", with_ack=True)

    broker = SqlBroker(engine, logger=None, middlewares=[Early])
    await broker.create_tables()

    @broker.subscriber("in", batch=batch, **QUICK)
    async def handle(body: Any) -> None:
        assert await look.rows() != []

    await broker.publish("x", "in")
    await broker.start()

    async def written() -> bool:
        return [row["queue"] for row in await look.rows()] == ["out"]

    await eventually(written)
    await broker.stop()


async def test_a_task_of_one_message_does_not_join_the_next(broker: SqlBroker, look: Look) -> None:
    """One worker: all messages, and the tasks that they leave, share its context."""
    second = asyncio.Event()
    tasks = list[asyncio.Task[None]]()
    refusals: list[str] = []

    async def late() -> None:
        await second.wait()
        with pytest.raises(PublishError) as info:
            await broker.publish("of the first", "out", with_ack=True)
        refusals.append(str(info.value))

    @broker.subscriber("in", **QUICK)
    async def handle(body: str) -> None:
        if body == "first":
            tasks.append(asyncio.create_task(late()))
            return
        second.set()
        await eventually(lambda: refusals)

    await broker.publish("first", "in")
    await broker.publish("second", "in")
    await broker.start()
    await look.archived(2)
    assert "has ended" in refusals[0]
