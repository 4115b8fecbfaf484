"""Policies that go by a header, from publish to handler, and with rows of other programs."""

import asyncio
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


async def test_a_message_that_is_moved_and_moved_back_has_its_key_again(
    broker: SqlBroker, look: Look
) -> None:
    """Both queues are busy with its key there, so that it waits, untouched, with each key."""
    handled = asyncio.Event()
    several: Any = {**QUICK, "max_workers": 4}

    @broker.subscriber("a", policies=[Concurrency(1, per_key=Header("tenant"))], **several)
    @broker.subscriber("b", policies=[Concurrency(1, per_key=Header("region"))], **several)
    async def handle(body: str) -> None:
        await handled.wait()

    for queue in ("a", "b"):
        await broker.publish("busy", queue, headers={"tenant": "t1", "region": "eu"})
    await broker.start()

    async def running() -> bool:
        return [row["state"] for row in await look.rows()] == ["PROCESSING"] * 2

    await eventually(running)
    waiting = await broker.publish("waits", "a", headers={"tenant": "t1", "region": "eu"})

    async def key() -> str | None:
        [row] = [row for row in await look.rows() if row["id"] == waiting]
        return row["policy_key"]

    async def has_tenant() -> bool:
        return await key() == "t1"

    async def has_region() -> bool:
        return await key() == "eu"

    await eventually(has_tenant)
    moved = await broker.admin.bulk_move("b", queue="a", dry_run=False)
    await eventually(has_region)
    undone = await broker.admin.undo(moved.id)
    assert (moved.done, undone.done) == (1, 1)
    assert await key() == "t1"
    handled.set()
