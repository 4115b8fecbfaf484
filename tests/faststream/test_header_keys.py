"""Policies that go by a header, from publish to handler, and with rows of other programs."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import (
    Concurrency,
    Header,
    Once,
    RetryPossible,
    SqlBroker,
    SqlBrokerMessage,
    TestSqlBroker,
    Throttle,
)
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.policies.flags import HEADER_KEY
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


@pytest.mark.parametrize("key", [True, Header("order")], ids=["publish", "header"])
async def test_once_has_a_key_of_its_own(broker: SqlBroker, look: Look, key: bool | Header) -> None:
    """Of each order one message runs, and of each tenant one at a time, with retries and
    priorities; rows of other programs count."""
    running: Counter[Any] = Counter()
    most: Counter[Any] = Counter()
    failed: set[str] = set()
    several: Any = {**QUICK, "max_workers": 4}

    @broker.subscriber(
        "q", policies=[Concurrency(1, per_key=Header("tenant")), Once("1h", key=key)], **several
    )
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        tenant = message.headers["tenant"]
        running[tenant] += 1
        most[tenant] = max(most[tenant], running[tenant])
        await asyncio.sleep(0.01)
        running[tenant] -= 1
        if message.headers["order"] not in failed:
            failed.add(message.headers["order"])
            raise RetryPossible(delay=0.01)

    orders = [(f"o{n // 2}", f"t{n % 4 // 2}") for n in range(16)]
    for n, (order, tenant) in enumerate(orders[:-1]):
        headers = {"order": order, "tenant": tenant}
        await broker.publish("x", "q", key=order, headers=headers, priority=n % 3)
    order, tenant = orders[-1]
    foreign = insert(look.tables.message).values(
        queue="q", payload=b"x", key=order, headers={"order": order, "tenant": tenant}
    )
    async with look.engine.begin() as connection:
        await connection.execute(foreign)
    await broker.start()
    rows = await look.archived(16)
    by_order = Counter((row["key"], row["state"], row["reason"]) for row in rows)
    assert by_order == {
        (f"o{n}", *end): 1
        for n in range(8)
        for end in [("COMPLETED", None), ("DISCARDED", "duplicate")]
    }
    assert {row["policy_key"] for row in rows} == {"t0", "t1"}
    assert most == {"t0": 1, "t1": 1}


async def test_a_message_without_the_key_of_once(broker: SqlBroker, look: Look) -> None:
    """Each policy says what becomes of a message without its key."""
    strict: Any = {"without_key": "dead_letter"}
    ran: list[str] = []

    @broker.subscriber(
        "q",
        policies=[
            Concurrency(1, per_key=Header("tenant")),
            Once("1h", key=Header("order"), **strict),
        ],
        **QUICK,
    )
    async def handle(body: str) -> None:
        ran.append(body)

    @broker.subscriber(
        "r",
        policies=[Concurrency(1, per_key=Header("tenant"), **strict), Once("1h")],
        **QUICK,
    )
    async def handle_strictly(body: str) -> None:
        ran.append(body)

    await broker.publish("no tenant", "q", headers={"order": "o"})
    await broker.publish("no order", "q", key="o", headers={"tenant": "t", "order": ["o"]})
    await broker.publish("no key", "r", headers={"tenant": "t"})
    await broker.publish("key only", "r", key="o")
    await broker.start()
    rows = await look.archived(4)
    assert [row["reason"] for row in rows] == [None, "no_key", None, "no_key"]
    assert sorted(ran) == ["no key", "no tenant"]


async def test_keys_of_another_policy_are_no_duplicates(broker: SqlBroker, look: Look) -> None:
    """A deployment replaces a policy by tenant with Once by order: the tenant, which is stored as
    the key of what waits, ends no message as a duplicate."""
    ran: list[str] = []

    @broker.subscriber("q", policies=[Once("1h", key=Header("order"))], **QUICK)
    async def handle(body: str) -> None:
        ran.append(body)

    for order in ("o1", "o2", "o2"):
        await broker.publish(order, "q", headers={"tenant": "t", "order": order})
    async with look.engine.begin() as connection:
        of_tenant = {"policy_key": "t", "policy_marks": HEADER_KEY}
        await connection.execute(update(look.tables.message).values(**of_tenant))
    await broker.start()
    rows = await look.archived(3)
    assert [row["state"] for row in rows] == ["COMPLETED", "COMPLETED", "DISCARDED"]
    assert ran == ["o1", "o2"]


@pytest.mark.parametrize("key", [True, Header("order")], ids=["publish", "header"])
async def test_explain_knows_the_key_of_once(
    broker: SqlBroker, look: Look, key: bool | Header
) -> None:
    """A message whose tenant is busy, and whose order has run, is a duplicate for both looks."""
    started, done = asyncio.Event(), asyncio.Event()
    several: Any = {**QUICK, "max_workers": 4}

    @broker.subscriber(
        "q", policies=[Concurrency(1, per_key=Header("tenant")), Once("1h", key=key)], **several
    )
    async def handle(body: str) -> None:
        started.set()
        await done.wait()

    await broker.publish("x", "q", key="o", headers={"order": "o", "tenant": "t"})
    await broker.start()
    await asyncio.wait_for(started.wait(), 60)
    same, other = [
        await broker.publish("x", "q", key=order, headers={"order": order, "tenant": "t"})
        for order in ("o", "p")
    ]

    async def codes(message: int | None) -> set[str]:
        assert message is not None
        return {reason.code for reason in (await broker.admin.explain(message)).reasons}

    async def are_keyed() -> bool:
        return all(row["policy_key"] for row in await look.rows())

    await eventually(are_keyed)
    assert await codes(same) == {"key_held", "duplicate"}
    assert await codes(other) == {"key_held"}
    [queue] = await broker.admin.policies("q")
    assert sum(wait.count for wait in queue.waits) == 2
    done.set()
    await look.archived(3)


async def test_ordered_messages_have_another_key_for_once(broker: SqlBroker, look: Look) -> None:
    """They are ordered by the key of the publish, whatever header Once has."""
    ran: list[str] = []
    several: Any = {**QUICK, "max_workers": 4}

    @broker.subscriber("q", ordered=True, policies=[Once("1h", key=Header("order"))], **several)
    async def handle(body: str) -> None:
        ran.append(body)

    for n in range(12):
        await broker.publish(f"{n}", "q", key="k", headers={"order": f"o{n // 2}"})
    await broker.start()
    await look.archived(12)
    assert ran == [f"{n}" for n in range(0, 12, 2)]


async def test_a_test_broker_knows_both_keys() -> None:
    """As a database does."""
    broker = SqlBroker(create_async_engine("sqlite+aiosqlite:///unused.db"), logger=None)
    policies: list[Policy] = [Concurrency(1, per_key=Header("tenant")), Once("1h")]
    ran: list[str] = []

    @broker.subscriber("q", policies=policies)
    async def handle(body: str) -> None:
        ran.append(body)

    async with TestSqlBroker(broker):
        for n in range(4):
            await broker.publish(f"{n}", "q", key=f"o{n // 2}", headers={"tenant": "t"})
    assert ran == ["0", "2"]


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
