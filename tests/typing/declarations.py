"""Read by type checkers only: decorators, responses, annotations and routers have exact types."""

from contextlib import aclosing
from typing import Any, assert_type

from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from faststream_sqlbroker import (
    Pipeline,
    SqlBroker,
    SqlBrokerBatchMessage,
    SqlBrokerMessage,
    SqlBrokerParserType,
    SqlBrokerPublishCommand,
    SqlBrokerResponse,
    SqlBrokerRouter,
    SqlConnection,
    SqlSession,
    Step,
    TestSqlBroker,
    VirtualClock,
)
from faststream_sqlbroker.annotations import SqlBroker as TheBroker
from faststream_sqlbroker.fastapi import SqlBrokerRouter as FastAPIRouter
from faststream_sqlbroker.opentelemetry import SqlBrokerTelemetryMiddleware
from faststream_sqlbroker.parser import SqlBrokerParser
from faststream_sqlbroker.prometheus import SqlBrokerPrometheusMiddleware
from faststream_sqlbroker.publisher.usecase import QueuePublisher
from faststream_sqlbroker.subscriber.pulling import PulledMessage
from faststream_sqlbroker.subscriber.usecase import QueueSubscriber
from faststream_sqlbroker.testing import Drained, Published


def of_decorators(broker: SqlBroker, router: SqlBrokerRouter, api: FastAPIRouter) -> None:
    assert_type(broker.subscriber("q", max_workers=2), QueueSubscriber)
    assert_type(broker.subscriber(["a", "b"], batch=True), QueueSubscriber)
    assert_type(broker.subscriber({"high": 5, "low": 1}), QueueSubscriber)
    assert_type(router.subscriber("q", transactional=True), QueueSubscriber)
    assert_type(api.subscriber("q", response_model=int), QueueSubscriber)
    assert_type(broker.publisher("q"), QueuePublisher)
    assert_type(api.publisher("q"), QueuePublisher)
    assert_type(broker.pipeline("p", Step("a"), forward_to="b"), Pipeline)


async def of_handlers(broker: SqlBroker) -> None:
    @broker.subscriber("q")
    @broker.publisher("out")
    async def handle(body: int) -> str:
        return str(body)

    # A decorated handler can be called as before.
    assert_type(await handle(1), str)


async def of_annotations(
    message: SqlBrokerMessage,
    batch: SqlBrokerBatchMessage,
    broker: TheBroker,
    connection: SqlConnection,
    session: SqlSession,
) -> None:
    assert_type(connection, AsyncConnection)
    assert_type(session, AsyncSession)
    assert_type(broker, SqlBroker)
    assert_type(broker.engine, AsyncEngine)
    assert_type(message.message_id, str)
    assert_type(batch.batch_headers, list[dict[str, Any]])
    await message.nack(delay="5s")


def of_responses() -> None:
    response = SqlBrokerResponse({"a": 1}, queue="q", delay=5, priority=3)
    assert_type(response, SqlBrokerResponse)
    assert_type(response.as_publish_command(), SqlBrokerPublishCommand)
    assert_type(response.get_publish_key(), str | None)


async def of_call_assertions(broker: SqlBroker) -> None:
    """Handlers and publishers are asked with the fields of this broker."""
    out = broker.publisher("out")

    @broker.subscriber("q")
    async def handle(body: str) -> int:
        return len(body)

    @out
    async def answer(body: str) -> int:
        return len(body)

    await handle.assert_called_once_with("x", queue="q", key=None, delay="5m", attempt=1)
    await answer.assert_any_call(priority=3)
    await out.assert_called_with(3, queue="out")
    assert_type(await handle("x"), int)
    assert_type(await broker.drain(raise_errors=True), Drained)
    assert_type(broker.outbox("q"), list[Published])
    async with TestSqlBroker(broker, clock=VirtualClock()) as one:
        assert_type(one, SqlBroker)
    async with TestSqlBroker(broker, broker) as several:
        assert_type(several, tuple[SqlBroker, ...])


def of_other_brokers_habits(broker: SqlBroker, router: SqlBrokerRouter) -> None:
    """What is written as for FastStream's other brokers."""
    middlewares = (
        SqlBrokerTelemetryMiddleware(),
        SqlBrokerPrometheusMiddleware(registry=CollectorRegistry()),
    )
    SqlBroker("sqlite+aiosqlite:///x.db", middlewares=middlewares)
    SqlBroker("sqlite+aiosqlite:///x.db", middlewares=[SqlBrokerTelemetryMiddleware()])
    SqlBrokerRouter(middlewares=middlewares)
    FastAPIRouter("sqlite+aiosqlite:///x.db", middlewares=middlewares)
    broker.include_router(router, middlewares=middlewares)
    broker.add_middleware(middlewares[0])
    parsers: list[SqlBrokerParserType] = [SqlBrokerParser()]
    assert_type(parsers[0], SqlBrokerParserType)


async def of_batches(broker: SqlBroker) -> None:
    assert_type(broker.publisher("q", batch=True, headers={"a": 1}), QueuePublisher)
    async with aclosing(aiter(broker.subscriber("q"))) as messages:
        async for message in messages:
            assert_type(message, PulledMessage)
