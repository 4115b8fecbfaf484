"""Scheduling policies of subscribers that forward, and of weighted queues."""

from collections import Counter
from typing import Any

from sqlalchemy import update

from faststream_sqlbroker import Debounce, Delay, SqlBroker, SqlBrokerMessage, Step, Throttle
from faststream_sqlbroker.schema.types import clock
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually


async def test_only_the_last_of_each_user_reaches_the_sender(broker: SqlBroker, look: Look) -> None:
    """Z1 in small: debounce, then throttle, then the sending queue, as one service."""
    sent: dict[str, list[str]] = {}
    broker.pipeline(
        "Email",
        Step("email", **QUICK, policies=[Debounce("100ms")]),
        Step("email.paced", **QUICK, policies=[Throttle(100, per="1s")]),
        forward_to="email.send",
    )

    @broker.subscriber("email.send", **QUICK)
    async def send(body: str, message: SqlBrokerMessage) -> None:
        sent.setdefault(message.key or "", []).append(body)

    ids = [await broker.publish(f"n{n}", "email", key=f"user{n % 4}") for n in range(40)]
    async with look.engine.begin() as connection:
        # However long it took to publish them, the messages of each user are one burst.
        await connection.execute(update(look.tables.message).values(next_attempt_at=clock()))
    await broker.start()
    rows = await look.archived(40)
    assert sent == {f"user{k}": [f"n{36 + k}"] for k in range(4)}
    states = Counter((row["state"], row["queue"]) for row in rows)
    assert states == {("DISCARDED", "email"): 36, ("COMPLETED", "email.send"): 4}
    assert sorted(row["id"] for row in rows) == sorted(i for i in ids if i is not None)


async def test_a_delay_on_the_way(broker: SqlBroker, look: Look) -> None:
    got: list[Any] = []
    broker.subscriber("a", **QUICK, policies=[Delay("300ms")], forward_to="b")

    @broker.subscriber("b", **QUICK)
    async def handle(message: SqlBrokerMessage) -> None:
        got.append(message)

    await broker.start()
    await broker.publish("x", "a")
    [row] = await look.archived()
    assert (row["first_attempt_at"] - row["created_at"]).total_seconds() >= 0.3


async def test_shares_hold_under_a_throttle(broker: SqlBroker, look: Look) -> None:
    """Z2: claims that a policy cuts short do not give the low queue's turns away, nor do
    slots that are missed."""
    order: list[str] = []
    throttle = Throttle(1000, per="1s")
    options: Any = QUICK | {"fetch_batch_size": 5}

    @broker.subscriber({"high": 4, "low": 1}, **options, policies=[throttle])
    async def handle(message: SqlBrokerMessage) -> None:
        order.append(message.queue)

    await broker.publish_batch(*range(60), queue="high")
    await broker.publish_batch(*range(15), queue="low")
    await broker.start()
    await eventually(lambda: len(order) >= 50)
    assert order[:50].count("low") >= 5, order
