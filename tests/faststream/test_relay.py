"""Handlers whose answers go to another broker: FastStream's test brokers, and a real Redis."""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from faststream import confluent
from faststream.kafka import KafkaBroker, KafkaMessage, TestKafkaBroker
from faststream.nats import NatsBroker, TestNatsBroker
from faststream.rabbit import RabbitBroker, TestRabbitBroker
from faststream.redis import BinaryMessageFormatV1, RedisBroker, RedisMessage, TestRedisBroker
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import ConstantRetryStrategy, SetupError, SqlBroker, SqlBrokerResponse
from faststream_sqlbroker.opentelemetry import SqlBrokerTelemetryMiddleware
from faststream_sqlbroker.prometheus import SqlBrokerPrometheusMiddleware
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually
from tools.private import CannotStartError, redis

pytestmark = pytest.mark.capability("relay to another broker by stacking its publisher")
SOON = ConstantRetryStrategy(delay_seconds=0.05, max_attempts=100_000)
"""For as long as the other broker is away."""


class Other(NamedTuple):
    """Another broker that FastStream has."""

    make: Callable[..., Any]
    test: Callable[..., AbstractAsyncContextManager[Any]]
    system: str
    """OpenTelemetry's name of it."""


OTHERS = {
    "kafka": Other(KafkaBroker, TestKafkaBroker, "kafka"),
    "confluent": Other(confluent.KafkaBroker, confluent.TestKafkaBroker, "kafka"),
    "rabbit": Other(RabbitBroker, TestRabbitBroker, "rabbitmq"),
    "nats": Other(NatsBroker, TestNatsBroker, "nats"),
    "redis": Other(RedisBroker, TestRedisBroker, "redis"),
}
every_other = pytest.mark.parametrize("name", OTHERS)
on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        try:
            url = stack.enter_context(redis())
        except CannotStartError as error:
            if os.environ.get("CI"):
                pytest.fail(str(error))
            pytest.skip(str(error))
        yield url


def redis_at(url: str) -> RedisBroker:
    """Patient: a publish that is given up, and tried again, may have come all the same."""
    return RedisBroker(url, logger=None, socket_timeout=120.0, socket_connect_timeout=120.0)


async def test_answers_reach_kafka(broker: SqlBroker, look: Look) -> None:
    """Body, correlation id and headers; what is no text there is JSON."""
    kafka = KafkaBroker("localhost:9092", logger=None)
    got: list[tuple[Any, str, dict[str, str]]] = []

    @kafka.subscriber("orders")
    async def take(body: Any, message: KafkaMessage) -> None:
        got.append((body, message.correlation_id, message.headers))

    @broker.subscriber("outbox", **QUICK, forward_headers=True)
    @kafka.publisher("orders")
    async def relay(body: Any) -> Any:
        return body

    async with TestKafkaBroker(kafka):
        await broker.start()
        headers = {"traceparent": "00-abc-def-01", "n": 5, "deep": {"a": [1]}}
        await broker.publish({"order": 1}, "outbox", correlation_id="c", headers=headers)
        [row] = await look.archived(1)
        assert row["state"] == "COMPLETED"
        await broker.stop()
    [(body, correlation_id, seen)] = got
    assert (body, correlation_id) == ({"order": 1}, "c")
    assert (seen["traceparent"], seen["n"], seen["deep"]) == ("00-abc-def-01", "5", '{"a": [1]}')
    assert seen["content-type"] == "application/json"


@on_sqlite
@pytest.mark.parametrize(
    ("name", "options", "answer"),
    [
        *((name, {}, {"id": 1}) for name in OTHERS),
        *((name, {"batch": True}, [1, 2]) for name in ("kafka", "confluent")),
    ],
)
async def test_a_relay_is_traced_and_counted(
    engine: AsyncEngine, look: Look, name: str, options: dict[str, Any], answer: Any
) -> None:
    """Both middlewares take the commands of each of FastStream's brokers."""
    kind = OTHERS[name]
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    registry = CollectorRegistry()
    broker = SqlBroker(
        engine,
        logger=None,
        middlewares=[
            SqlBrokerTelemetryMiddleware(tracer_provider=provider),
            SqlBrokerPrometheusMiddleware(registry=registry),
        ],
    )
    other = kind.make(logger=None)
    got: list[Any] = []

    @other.subscriber("orders", **options)
    async def take(order: Any) -> None:
        got.append(order)

    @broker.subscriber("outbox", **QUICK, retry_strategy=None)
    @other.publisher("orders", **options)
    async def relay(order: Any) -> Any:
        return order

    await broker.create_tables()
    async with kind.test(other, connect_only=False):
        await broker.start()
        await broker.publish(answer, "outbox", correlation_id="c")
        [row] = await look.archived(1)
        await broker.stop()
    assert (row["state"], row["last_error"], got) == ("COMPLETED", None, [answer])
    publishes = [span for span in spans.get_finished_spans() if span.name == "orders publish"]
    [attributes] = [dict(span.attributes or {}) for span in publishes]
    assert attributes["messaging.system"] == kind.system
    assert attributes["messaging.message.conversation_id"] == "c"
    assert {span.context.trace_id for span in spans.get_finished_spans()} == {
        publishes[0].context.trace_id
    }
    sent = registry.get_sample_value(
        "faststream_published_messages_total",
        {
            "app_name": "faststream",
            "broker": "sqlbroker",
            "destination": "orders",
            "status": "success",
        },
    )
    assert sent == (len(answer) if options else 1)


@on_sqlite
@every_other
async def test_a_relay_whose_broker_is_not_connected_is_warned_of(
    broker: SqlBroker, heard: Heard, name: str
) -> None:
    kind = OTHERS[name]
    other = kind.make(logger=None)

    @broker.subscriber("outbox", **QUICK)
    @other.publisher("orders")
    async def relay(order: Any) -> Any:
        return order

    def warnings() -> list[str]:
        return heard.texts("whose broker is not connected")

    async with kind.test(other, connect_only=False):
        await broker.start()
        await broker.stop()
    assert warnings() == []
    await broker.start()
    [warning] = warnings()
    assert "to the publisher 'orders:" in warning
    assert f"of faststream.{name}, whose" in warning


async def test_named_headers_are_handed_on_within_the_broker_too(
    broker: SqlBroker, look: Look
) -> None:
    """The answer's own headers override those handed on."""

    @broker.subscriber("in", **QUICK, forward_headers=["traceparent", "who"])
    @broker.publisher("out")
    async def handle(body: str) -> SqlBrokerResponse:
        return SqlBrokerResponse(body, headers={"who": "answer"})

    await broker.start()
    await broker.publish("x", "in", headers={"traceparent": "t", "who": "message", "other": 1})
    await eventually(lambda: look.rows(archive=True))
    [row] = await eventually(look.rows)
    headers = (
        row["headers"]
        if isinstance(row["headers"], dict)
        else __import__("json").loads(row["headers"])
    )
    assert headers["traceparent"] == "t"
    assert headers["who"] == "answer"
    assert "other" not in headers


async def test_answers_reach_redis_and_failures_are_tried_again(
    broker: SqlBroker, look: Look, redis_url: str
) -> None:
    """Nothing is acked before the other broker has taken it."""
    remote = redis_at(redis_url)
    got: list[str] = []

    @remote.subscriber(list="orders")
    async def take(body: str, message: RedisMessage) -> None:
        assert message.correlation_id == "c"
        got.append(body)

    @broker.subscriber("outbox", **QUICK, retry_strategy=SOON)
    @remote.publisher(list="orders")
    async def relay(body: str) -> str:
        return body

    await broker.start()
    await broker.publish("early", "outbox", correlation_id="c")

    async def failing() -> bool:
        rows = await look.rows()
        return bool(rows) and rows[0]["attempts_count"] >= 2

    await eventually(failing)
    assert got == []
    assert "IncorrectState" in (await look.rows())[0]["last_error"]
    await remote.start()
    for body in ("a", "b"):
        await broker.publish(body, "outbox", correlation_id="c")
    rows = await look.archived(3)
    assert {row["state"] for row in rows} == {"COMPLETED"}
    await eventually(lambda: sorted(got) == ["a", "b", "early"])
    await remote.stop()


async def test_the_order_of_each_key_is_kept_on_request(
    engine: AsyncEngine,
    broker: SqlBroker,
    look: Look,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two brokers with several workers each, and publishes that fail: F2, promise 7."""
    remote = redis_at(redis_url)
    await remote.start()
    producer: Any = type(remote.config.producer)
    publish = producer.publish
    calls = 0

    async def flaky(self: Any, cmd: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise ConnectionError("not now")
        return await publish(self, cmd)

    monkeypatch.setattr(producer, "publish", flaky)
    second = SqlBroker(engine, logger=None)
    place = f"ordered-{uuid4()}"
    for one in (broker, second):

        @one.subscriber("outbox", **QUICK, retry_strategy=SOON, ordered=True, max_workers=4)
        @remote.publisher(list=place)
        async def relay(body: list[int]) -> list[int]:
            await asyncio.sleep(0.001 * (body[1] % 3))
            return body

    bodies = (SqlBrokerResponse([k, n], key=f"key {k}") for n in range(20) for k in range(4))
    await broker.publish_batch(*bodies, queue="outbox")
    await broker.start()
    await second.start()
    await look.archived(80)
    client: Any = await remote.connect()
    sent = [
        json.loads(BinaryMessageFormatV1.parse(raw)[0]) for raw in await client.lrange(place, 0, -1)
    ]
    assert len(sent) == 80
    for key in range(4):
        assert [n for k, n in sent if k == key] == list(range(20))
    assert calls > 80
    await second.stop()
    await remote.stop()


async def test_a_broker_that_is_not_started_is_named(
    look: Look, heard: Heard, broker: SqlBroker
) -> None:
    kafka = KafkaBroker("localhost:9092", logger=None)
    remote = RedisBroker(logger=None)

    @broker.subscriber("a", **QUICK)
    @kafka.publisher("orders")
    @remote.publisher("channel")
    @broker.publisher("own")
    async def relay(body: str) -> str:
        return body

    await broker.start()
    said = [
        record.getMessage() for record in heard.records if "is not connected" in record.getMessage()
    ]
    assert len(said) == 2
    assert any("'orders:Publisher' of faststream.kafka" in text for text in said)
    assert any("'channel:Publisher' of faststream.redis" in text for text in said)


@pytest.mark.parametrize("value", ["name", 5, [1]])
def test_wrong_headers_are_refused_at_the_decorator(value: Any) -> None:
    broker = SqlBroker("sqlite+aiosqlite:///x.db", logger=None)
    with pytest.raises(SetupError, match="forward_headers must"):
        broker.subscriber("q", forward_headers=value)
    asyncio.run(broker.stop())
