"""A subscriber: start, stop, options and settings."""

import asyncio
from typing import Any

import pytest
from faststream import AckPolicy
from faststream.exceptions import StopConsume

from faststream_sqlbroker import ConstantRetryStrategy, NotSupportedError, SetupError, SqlBroker
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually


async def test_stop_consume_ends_a_subscriber(broker: SqlBroker, look: Look) -> None:
    handled: list[Any] = []

    @broker.subscriber("q", **QUICK, ack_policy=AckPolicy.ACK)
    async def handle(body: Any) -> None:
        handled.append(body)
        raise StopConsume

    await broker.start()
    await broker.publish_batch("a", "b", "c", queue="q")

    async def given_back() -> bool:
        rows = await look.rows()
        return len(rows) == 2 and all(
            (r["state"], r["deliveries_count"]) == ("PENDING", 0) for r in rows
        )

    await eventually(given_back)
    assert handled == ["a"]
    assert await broker.ping(60.0)
    await asyncio.wait_for(broker.stop(), 60)


async def test_a_system_exit_in_a_handler_does_not_hang_the_stop(
    broker: SqlBroker, look: Look
) -> None:
    @broker.subscriber("q", **QUICK, ack_policy=AckPolicy.ACK)
    async def handle(body: Any) -> None:
        raise SystemExit

    await broker.start()
    await broker.publish("a", "q")
    await look.archived(1)
    await asyncio.wait_for(broker.stop(), 60)


async def test_a_running_handler_ends_before_the_stop(broker: SqlBroker, look: Look) -> None:
    started = asyncio.Event()
    may_end = asyncio.Event()

    @broker.subscriber("q", **QUICK)
    async def handle(body: Any) -> None:
        started.set()
        await may_end.wait()

    await broker.start()
    await broker.publish("x", "q")
    await asyncio.wait_for(started.wait(), 60)
    stopping = asyncio.create_task(broker.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    may_end.set()
    await asyncio.wait_for(stopping, 60)
    assert [row["state"] for row in await look.rows(archive=True)] == ["COMPLETED"]


async def test_a_subscriber_may_be_added_after_the_start(broker: SqlBroker, look: Look) -> None:
    async def handle(body: Any) -> None: ...

    await broker.start()
    subscriber = broker.subscriber("q", **QUICK, persistent=False)
    subscriber(handle)
    await broker.publish("x", "q")
    async with subscriber:
        await look.archived(1)
    assert not subscriber.running


async def test_a_subscriber_without_a_handler(broker: SqlBroker) -> None:
    subscriber = broker.subscriber("q", **QUICK)
    await broker.start()
    assert subscriber.consumer is None


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_settings_can_be_read(broker: SqlBroker) -> None:
    strategy = ConstantRetryStrategy(delay_seconds=1, max_attempts=4, max_total_delay_seconds=None)
    config = broker.subscriber(
        ["a", "b"],
        max_workers=3,
        retry_strategy=strategy,
        release_stuck_timeout="5m",
        ack_policy=AckPolicy.MANUAL,
    ).config
    assert config.queues == ("a", "b")
    assert (config.max_workers, config.retry_strategy) == (3, strategy)
    assert (config.max_deliveries, config.release_stuck_timeout) == (7, 300.0)
    assert (config.max_not_processed_factor, config.min_fetch_interval) == (1.5, 0.0)
    assert config.release_stuck_interval == 60.0
    assert config.ack_policy is AckPolicy.MANUAL


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "wrong",
    [
        {"queues": []},
        {"queues": ["a", "a"]},
        {"queues": "a", "max_workers": 0},
        {"queues": "a", "max_wokers": 1},
        {"queues": "a", "flush_interval": "soon"},
        {"queues": "a", "ack_policy": "ack"},
    ],
    ids=repr,
)
def test_wrong_options_are_refused_at_the_decorator(
    broker: SqlBroker, wrong: dict[str, Any]
) -> None:
    with pytest.raises(SetupError):
        broker.subscriber(**wrong)
    assert broker.subscribers == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_timeout_cannot_end_a_synchronous_handler(broker: SqlBroker) -> None:
    await broker.create_tables()

    @broker.subscriber("q", handler_timeout=5)
    def handle(body: str) -> None: ...

    with pytest.raises(
        SetupError, match="handler_timeout cannot end the synchronous handler 'handle'"
    ):
        await broker.start()


async def test_a_subscriber_starts_again_after_stop_consume(broker: SqlBroker, look: Look) -> None:
    seen: list[str] = []
    subscriber = broker.subscriber("q", **QUICK, ack_policy=AckPolicy.ACK)

    @subscriber
    async def handle(body: str) -> None:
        seen.append(body)
        if len(seen) == 1:
            raise StopConsume

    await broker.start()
    await broker.publish("1", "q")
    await eventually(lambda: not subscriber.running)
    assert subscriber.consumer is None
    await broker.publish("2", "q")
    await subscriber.start()
    await look.archived(2)
    assert seen == ["1", "2"]


async def test_a_start_while_the_stop_is_under_way_waits_for_it(
    broker: SqlBroker, look: Look
) -> None:
    running = asyncio.Event()
    go_on = asyncio.Event()
    subscriber = broker.subscriber("q", **QUICK)

    @subscriber
    async def handle(body: str) -> None:
        running.set()
        await go_on.wait()

    await broker.start()
    await broker.publish("1", "q")
    await running.wait()
    first = subscriber.consumer
    subscriber._request_stop()
    starting = asyncio.create_task(subscriber.start())
    await asyncio.sleep(0.05)
    assert not starting.done()
    go_on.set()
    await starting
    assert subscriber.running
    assert subscriber.consumer is not first
    await broker.publish("2", "q")
    await look.archived(2)


async def test_listening_is_refused_on_databases_without_it(
    broker: SqlBroker, database: str
) -> None:
    await broker.create_tables()

    @broker.subscriber("q", wakeup="listen")
    async def handle(body: str) -> None: ...

    if database == "postgresql":
        await broker.start()
        return
    with pytest.raises(NotSupportedError, match="needs PostgreSQL through asyncpg and a pool"):
        await broker.start()


@pytest.mark.parametrize("workers", [1, 4])
async def test_z2_m2_a_starting_subscriber_takes_the_highest_priority_first(
    broker: SqlBroker, look: Look, workers: int
) -> None:
    """Its first claim knows which priorities are there; a wake-up on the way changes nothing about
    that."""
    started: list[int] = []

    @broker.subscriber("q", **QUICK, max_workers=workers, fetch_batch_size=10)
    async def handle(body: int) -> None:
        started.append(body)
        await asyncio.sleep(0)

    await broker.create_tables()
    for priority in (0, 100, -3, 50):
        await broker.publish_batch(*[priority] * 10, queue="q", priority=priority)
    await broker.start()
    await look.archived(40)
    assert started == sorted(started, reverse=True)
