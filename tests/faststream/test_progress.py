"""message.progress: operators see how far a handler has come, and no stale worker hides it."""

import asyncio
from typing import Any

import pytest
from faststream import AckPolicy
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SetupError, SqlBroker
from faststream_sqlbroker.admin import Progress
from faststream_sqlbroker.annotations import SqlBrokerMessage
from faststream_sqlbroker.flow.deliver import leases as notes
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`message.progress`: how far a handler has come")


async def shown(broker: SqlBroker, message_id: int) -> Progress | None:
    detail = await broker.admin.message(message_id)
    assert detail is not None
    return detail.progress


async def test_an_operator_sees_how_far_a_handler_has_come(
    engine: AsyncEngine, broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "PROGRESS_INTERVAL", 0.0)
    said = asyncio.Event()
    more = asyncio.Event()
    end = asyncio.Event()

    @broker.subscriber("q", **QUICK)
    async def handle(_body: str, message: SqlBrokerMessage) -> None:
        assert await message.progress(0.4, "page 40 of 100")
        said.set()
        await more.wait()
        assert await message.progress(1)
        said.set()
        await end.wait()

    message_id = await broker.publish("x", "q") or 0
    operator = SqlBroker(engine, logger=None)  # of another process
    assert await shown(operator, message_id) is None
    await broker.start()
    await asyncio.wait_for(said.wait(), 60)
    found = await shown(operator, message_id)
    assert found is not None
    assert (found.fraction, found.text) == (0.4, "page 40 of 100")
    said.clear()
    more.set()
    await asyncio.wait_for(said.wait(), 60)
    last = await shown(operator, message_id)
    assert last is not None
    assert (last.fraction, last.text) == (1.0, None)
    assert last.at >= found.at
    end.set()
    await look.archived()
    assert await shown(operator, message_id) is None


async def test_at_most_one_call_a_second_is_written(
    broker: SqlBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "PROGRESS_INTERVAL", 3600.0)
    said = asyncio.Event()
    end = asyncio.Event()

    @broker.subscriber("q", **QUICK)
    async def handle(_body: str, message: SqlBrokerMessage) -> None:
        for page in range(50):
            assert await message.progress(page / 50, f"page {page}")
        said.set()
        await end.wait()

    message_id = await broker.publish("x", "q") or 0
    await broker.start()
    await asyncio.wait_for(said.wait(), 60)
    found = await shown(broker, message_id)
    assert found is not None
    assert found.text == "page 0"
    end.set()


async def test_a_worker_that_has_lost_its_lease_says_nothing_any_more(
    broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is given back and claimed again; what the first one says must not be shown."""
    monkeypatch.setattr(notes, "PROGRESS_INTERVAL", 0.0)
    started = asyncio.Queue[SqlBrokerMessage]()
    end = asyncio.Event()

    @broker.subscriber("q", **QUICK, max_workers=2)
    async def handle(_body: str, message: SqlBrokerMessage) -> None:
        await started.put(message)
        await end.wait()

    message_id = await broker.publish("x", "q") or 0
    await broker.start()
    first = await asyncio.wait_for(started.get(), 60)
    assert await first.progress(0.9, "the first")
    [live] = await broker.admin.subscribers("q")
    assert await broker.admin.release(live.worker, force=True) == 1
    second = await asyncio.wait_for(started.get(), 60)
    assert await shown(broker, message_id) is None, "the second has said nothing yet"
    assert await second.progress(0.1, "the second")
    assert not await first.progress(1.0, "the first")
    found = await shown(broker, message_id)
    assert found is not None
    assert (found.fraction, found.text) == (0.1, "the second")
    end.set()


async def test_in_a_transaction_it_is_written_at_once_where_others_may_write(
    broker: SqlBroker, database: str
) -> None:
    said = asyncio.Event()
    end = asyncio.Event()

    @broker.subscriber("q", **QUICK, transactional=True)
    async def handle(_body: str, message: SqlBrokerMessage) -> None:
        assert await message.progress(0.5)
        said.set()
        await end.wait()

    message_id = await broker.publish("x", "q") or 0
    await broker.start()
    await asyncio.wait_for(said.wait(), 60)
    found = await shown(broker, message_id)
    assert (found is None) == (database == "sqlite")
    end.set()


async def test_wrong_progress_is_refused(broker: SqlBroker) -> None:
    refused: list[str] = []
    wrong: list[Any] = [(1.5,), (-0.1,), (True,), ("half",), (0.5, 7), (float("nan"),)]

    async def refuse(message: SqlBrokerMessage, *values: Any) -> None:
        with pytest.raises(SetupError) as caught:
            await message.progress(*values)
        refused.append(str(caught.value))

    @broker.subscriber("q", **QUICK)
    async def handle(_body: str, message: SqlBrokerMessage) -> None:
        for values in wrong:
            await refuse(message, *values)

    @broker.subscriber("once", **QUICK, ack_policy=AckPolicy.ACK_FIRST)
    async def gone(_body: str, message: SqlBrokerMessage) -> None:
        await refuse(message, 0.5)

    await broker.publish("x", "q")
    await broker.publish("x", "once")
    await broker.start()
    await eventually(lambda: len(refused) == len(wrong) + 1)
    texts = " ".join(refused)
    assert "fraction must be a number from 0 to 1, got 1.5" in texts
    assert "text must be a string or None, got 7" in texts
    assert "AckPolicy.ACK_FIRST acks it" in texts
