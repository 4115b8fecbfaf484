"""Handlers whose answers go to another broker: FastStream's Kafka test broker, and a real Redis."""

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from faststream.kafka import KafkaBroker, KafkaMessage, TestKafkaBroker
from faststream.redis import BinaryMessageFormatV1, RedisBroker, RedisMessage
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import ConstantRetryStrategy, SetupError, SqlBroker, SqlBrokerResponse
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually
from tools.private import CannotStartError, redis

pytestmark = pytest.mark.capability("relay to another broker by stacking its publisher")
SOON = ConstantRetryStrategy(delay_seconds=0.05, max_attempts=100_000)
"""For as long as the other broker is away."""


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
