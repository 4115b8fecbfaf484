"""Weighted queues: shares of what is claimed."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from faststream_sqlbroker import (
    SetupError,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerResponse,
    SqlBrokerRoute,
    SqlBrokerRouter,
)
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("queues with weights: shares, and low never starves")


async def order_of(
    broker: SqlBroker, look: Look, queues: dict[str, int], messages: dict[str, int], **options: Any
) -> list[str]:
    """The queues of all messages, as they were handled."""
    order: list[str] = []

    @broker.subscriber(queues, **{**QUICK, **options})
    async def handle(message: SqlBrokerMessage) -> None:
        order.append(message.queue)

    for queue, count in messages.items():
        bodies = (SqlBrokerResponse(n, key=str(n)) for n in range(count))
        await broker.publish_batch(*bodies, queue=queue)
    await broker.start()
    await look.archived(sum(messages.values()))
    return order


@pytest.mark.parametrize("ordered", [False, True])
async def test_one_message_at_a_time_follows_the_weights(
    broker: SqlBroker, look: Look, ordered: bool
) -> None:
    """Z2: one worker claims one message at a time; the low queue is empty before the high one."""
    order = await order_of(
        broker,
        look,
        {"high": 5, "low": 1},
        {"high": 60, "low": 10},
        fetch_batch_size=1,
        ordered=ordered,
    )
    for start in range(0, 54, 6):
        assert order[start : start + 6].count("low") == 1, order


async def test_batches_follow_the_weights(broker: SqlBroker, look: Look) -> None:
    weights = {"a": 3, "b": 1, "c": 1}
    messages = {"a": 120, "b": 80, "c": 80}
    order = await order_of(broker, look, weights, messages, fetch_batch_size=10)
    first = Counter(order[:100])
    assert abs(first["a"] - 60) <= 10, first
    assert abs(first["b"] - 20) <= 10, first
    assert abs(first["c"] - 20) <= 10, first


async def test_a_continuous_flood_starves_no_queue(broker: SqlBroker, look: Look) -> None:
    """Z2: the high queue is filled faster than it is emptied."""
    seen: Counter[str] = Counter()
    flooding = True

    @broker.subscriber({"high": 9, "low": 1}, **QUICK, fetch_batch_size=1)
    async def handle(message: SqlBrokerMessage) -> None:
        seen[message.queue] += 1
        await asyncio.sleep(0.001)

    async def flood() -> None:
        while flooding:
            await broker.publish_batch(*range(50), queue="high")

    await broker.publish_batch(*range(100), queue="high")
    await broker.start()
    task = asyncio.create_task(flood())
    await eventually(lambda: seen["high"] > 20)
    before = seen["high"]
    await broker.publish_batch(*range(5), queue="low")
    await eventually(lambda: seen["low"] == 5)
    # At most a second until the queue is known, and five turns.
    assert seen["high"] > before
    flooding = False
    await task


async def test_empty_queues_leave_their_share_to_the_others(broker: SqlBroker, look: Look) -> None:
    order = await order_of(
        broker, look, {"a": 1000, "b": 1000, "c": 1}, {"c": 50}, fetch_batch_size=5
    )
    assert order == ["c"] * 50


async def test_a_prefix_and_a_route(broker: SqlBroker, look: Look) -> None:
    order: list[str] = []

    async def handle(message: SqlBrokerMessage) -> None:
        order.append(message.queue)

    route = SqlBrokerRoute(handle, {"high": 2, "low": 1}, **QUICK, fetch_batch_size=1)
    broker.include_router(SqlBrokerRouter("p.", [route]))
    for queue in ("p.high", "p.low"):
        await broker.publish_batch(*range(9), queue=queue)
    await broker.start()
    await look.archived(18)
    assert Counter(order[:9]) == {"p.high": 6, "p.low": 3}


@pytest.mark.parametrize(
    ("queues", "problem"),
    [
        ({"a": 0}, r"the weight of queue 'a' must be a whole number from 1 to 1000, got 0"),
        ({"a": 1, "b": -1}, r"the weight of queue 'b' .* got -1"),
        ({"a": 1.5}, r"got 1.5"),
        ({"a": True}, r"got True"),
        ({"a": "5"}, r"got '5'"),
        ({"a": 1001}, r"got 1001"),
        ({"a": None}, r"got None"),
        ({}, r"queues is empty"),
        ({"": 1}, r"'' cannot be the name of a queue"),
    ],
)
def test_bad_weights_are_refused(queues: Any, problem: str) -> None:
    with pytest.raises(SetupError, match=problem):
        SqlBroker("sqlite+aiosqlite:///x.db", logger=None).subscriber(queues)


def test_weights_are_given_for_all() -> None:
    broker = SqlBroker("sqlite+aiosqlite:///x.db", logger=None)
    with pytest.raises(SetupError, match="queues with weights must be in one mapping"):
        broker.subscriber({"a": 1}, "b")


async def test_without_weights_there_are_no_shares(broker: SqlBroker) -> None:
    """They cost nothing where they are not asked for."""
    subscriber = broker.subscriber("a", "b", **QUICK)

    @subscriber
    async def handle(body: str) -> None: ...

    await broker.start()
    assert subscriber.consumer is not None
    assert subscriber.consumer._fetcher._claimer._scheduler is None
