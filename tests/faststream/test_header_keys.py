"""Policies that go by a header, from publish to handler, and with rows of other programs."""

from typing import Any

from sqlalchemy import insert

from faststream_sqlbroker import (
    Concurrency,
    Header,
    Once,
    SqlBroker,
    SqlBrokerMessage,
    Throttle,
)
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually


async def test_once_goes_by_a_header(broker: SqlBroker, look: Look) -> None:
    """Of all messages of an order one runs, also of those that another program has written."""
    handled: list[tuple[Any, str | None]] = []

    @broker.subscriber("q", policies=[Once("1h", key=Header("order"))], **QUICK)
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        handled.append((body, message.key))

    for order, key in (("o1", "k1"), ("o1", "k2"), ("o2", "k1")):
        await broker.publish(f"{order} {key}", "q", key=key, headers={"order": order})
    foreign = insert(look.tables.message).values(
        queue="q", payload=b"foreign", headers={"order": "o2"}
    )
    async with look.engine.begin() as connection:
        await connection.execute(foreign)
    await broker.start()
    rows = await look.archived(4)
    assert [(row["state"], row["reason"]) for row in rows] == [
        ("COMPLETED", None),
        ("DISCARDED", "duplicate"),
        ("COMPLETED", None),
        ("DISCARDED", "duplicate"),
    ]
    assert [row["related_id"] for row in rows[1::2]] == [rows[0]["id"], rows[2]["id"]]
    assert handled == [("o1 k1", "k1"), ("o2 k1", "k1")]
    assert [row["policy_key"] for row in rows] == ["o1", "o1", "o2", "o2"]


async def test_explain_goes_by_the_header(broker: SqlBroker, look: Look) -> None:
    """The reason is that of the header's value, not of the key of the publish."""
    tenant = Header("tenant")

    @broker.subscriber(
        "q", policies=[Concurrency(1, per_key=tenant), Throttle(2, "1h", key=tenant)], **QUICK
    )
    async def handle(body: str) -> None: ...

    await broker.start()
    ids = [
        await broker.publish("x", "q", key=f"k{n}", headers={"tenant": "busy"}) for n in range(3)
    ]

    async def two_have_run() -> bool:
        return len(await look.rows(archive=True)) == 2

    async def why() -> Any:
        assert ids[2] is not None
        found = await broker.admin.explain(ids[2])
        return [reason for reason in found.reasons if reason.code == "throttled"]

    await eventually(two_have_run)
    [reason] = await eventually(why)
    assert reason.policy == "Throttle(2, per=3600s, key=Header('tenant'))"


async def test_a_moved_message_gets_the_key_of_its_next_queue(
    broker: SqlBroker, look: Look
) -> None:
    """Each queue has a header of its own."""
    one = Header("one")
    broker.subscriber("a", policies=[Throttle(9, "1s", key=one)], forward_to="b", **QUICK)

    @broker.subscriber("b", policies=[Throttle(9, "1s", key=Header("two"))], **QUICK)
    async def handle(body: str) -> None: ...

    await broker.start()
    await broker.publish("x", "a", headers={"one": "1", "two": "2"})
    [row] = await look.archived(1)
    assert (row["queue"], row["policy_key"]) == ("b", "2")
