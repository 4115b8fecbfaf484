"""Correlation ids of messages that were published without one: the same wherever they are seen."""

import asyncio
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    SqlBroker,
    SqlBrokerBatchMessage,
    SqlBrokerMessage,
)
from faststream_sqlbroker.core.correlation import CorrelationIds, build_message_id
from faststream_sqlbroker.database.parts.policy_state import DATABASE
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.testing import TestSqlBroker
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually
from tests.quick_tables import TABLES

on_one = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


async def drawn(look: Look) -> list[Any]:
    """What the policy state has drawn."""
    table = look.tables.policy_state
    async with look.engine.connect() as connection:
        found = await connection.execute(select(table.c.info).where(table.c.scope == DATABASE))
        return [info["id"] for info in found.scalars()]


async def test_handlers_of_several_processes_see_the_same(engine: AsyncEngine, look: Look) -> None:
    """At each attempt, alone and in a batch; an answer carries it on, and the archive keeps what it
    is made of."""
    seen: list[tuple[str, str]] = []
    again = ConstantRetryStrategy(delay_seconds=0.0, max_attempts=3)

    def add(broker: SqlBroker) -> None:
        @broker.subscriber("q", **QUICK, retry_strategy=again)
        @broker.publisher("answers")
        async def handle(body: str, message: SqlBrokerMessage) -> str:
            seen.append((message.message_id, message.correlation_id))
            if message.attempts_count == 0:
                raise ValueError("no")
            return body

        @broker.subscriber("batch", **QUICK, batch=True)
        async def handle_all(bodies: list[str], message: SqlBrokerBatchMessage) -> None:
            ids = [(one.message_id, one.correlation_id) for one in message.messages]
            assert ids[0][1] == message.correlation_id
            seen.extend(ids)

    brokers = [SqlBroker(engine, logger=None) for _ in range(2)]
    await brokers[0].create_tables()
    for broker in brokers:
        add(broker)
        await broker.start()
    [database_id] = await eventually(partial(drawn, look))
    published = [await brokers[0].publish("x", "q") for _ in range(4)]
    published += await brokers[0].publish_batch("x", "y", queue="batch")

    async def done() -> bool:
        return len(await look.rows(archive=True)) == 6

    await eventually(done)
    for broker in brokers:
        await broker.stop()
    archived = await look.rows(archive=True)
    assert {row["id"] for row in archived} == set(published)
    ids = CorrelationIds(database_id)
    expected = {
        build_message_id(row["id"], row["created_at"]): ids.build_id(row["id"], row["created_at"])
        for row in archived
    }
    assert dict(seen) == expected
    assert {UUID(each).version for _, each in seen} == {8}
    assert len(set(seen)) == len(expected) < len(seen)
    answers = {row["headers"]["correlation_id"] for row in await look.rows()}
    assert answers == set(list(expected.values())[:4])


async def test_taken_messages_show_it_too(engine: AsyncEngine, look: Look) -> None:
    """Also in a process that has no subscriber, once the fleet has had one."""
    async with SqlBroker(engine, logger=None) as taking, SqlBroker(engine, logger=None) as broker:
        await broker.create_tables()
        first = await broker.publish("x", "q") or 0
        early = await taking.pop("q")
        assert early is not None
        assert early.correlation_id == early.message_id == build_message_id(first, early.created_at)

        @broker.subscriber("other", **QUICK)
        async def handle(body: str) -> None: ...

        await broker.start()

        [database_id] = await eventually(partial(drawn, look))
        for correlation_id in (None, "mine"):
            for _ in range(3):
                await broker.publish("x", "q", correlation_id=correlation_id)
            made = CorrelationIds(database_id)
            expected = [
                correlation_id or made.build_id(row["id"], row["created_at"])
                for row in await look.rows()
            ]
            async with SqlBroker(engine, logger=None) as other:
                popped = await other.pop("q")
                assert popped is not None
                reserved = await other.reserve("q")
                assert reserved is not None
                await reserved.commit()
                pulled = await other.subscriber("q").get_one(timeout=60)
                assert pulled is not None
                await pulled.ack()
            found = [popped.correlation_id, reserved.correlation_id, pulled.correlation_id]
            assert found == expected


async def test_processes_that_start_together_draw_once(engine: AsyncEngine, look: Look) -> None:
    stores = [Store(engine, TABLES, max_connections=1) for _ in range(8)]
    await stores[0].server.create_tables()
    announce = [
        each.live_subscribers.write_heartbeat({}, set(), 60.0, clean=False) for each in stores
    ]
    await asyncio.gather(*announce)
    known = {each.correlation_ids.database_id for each in stores}
    assert known == set(await drawn(look))
    for store in stores:
        await store.close()


@on_one
async def test_what_another_program_has_written_there_is_not_used(
    broker: SqlBroker, look: Look
) -> None:
    seen = list[tuple[str, str]]()

    @broker.subscriber("q", **QUICK)
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        seen.append((message.message_id, message.correlation_id))

    table = look.tables.policy_state
    async with look.engine.begin() as connection:
        values = {"scope": DATABASE, "key": "id", "info": {"id": "x' OR 1"}}
        await connection.execute(table.insert(), values)
    await broker.start()
    await broker.publish("x", "q")
    await look.archived()
    [(message_id, correlation_id)] = seen
    assert correlation_id == message_id
    assert await drawn(look) == ["x' OR 1"]


@on_one
async def test_tests_of_handlers_always_see_the_same(engine: AsyncEngine) -> None:
    seen = list[str]()
    broker = SqlBroker(engine, logger=None)

    @broker.subscriber("q")
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        seen.append(message.correlation_id)

    for _ in range(2):
        async with TestSqlBroker(broker):
            await broker.publish("x", "q")
    assert seen == ["00000000-0000-8000-8000-000000000001"] * 2
