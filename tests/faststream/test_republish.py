"""message.republish: published again, and counted; a handler reads the count and gives up (P10)."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from faststream import AckPolicy
from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    DESTINATION,
    ConstantRetryStrategy,
    Once,
    SetupError,
    SqlBroker,
    SqlBrokerBatchMessage,
    SqlBrokerMessage,
    SqlConnection,
)
from tests.faststream.conftest import CALM, QUICK, Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`message.republish`: publish again, and count it")

SETTLING = [p for p in AckPolicy if p is not AckPolicy.ACK_FIRST]
effects = Table(
    "effects", MetaData(), Column("id", Integer, primary_key=True), Column("body", String(50))
)

Until = Callable[[SqlBrokerMessage], Awaitable[None]]


def until_three(counts: list[int]) -> Until:
    """A handler that gives up when its message has been published three times."""

    async def handle(message: SqlBrokerMessage) -> None:
        counts.append(message.publish_count)
        if message.publish_count < 3:
            await message.republish(delay="10ms")

    return handle


async def test_p10_a_handler_gives_up_by_the_count(broker: SqlBroker, look: Look) -> None:
    """P10: kept apart from attempts and deliveries, which begin anew; under every policy."""
    counts: dict[str, list[int]] = {}
    ids: dict[str, int | None] = {}

    def subscribe(policy: AckPolicy) -> None:
        again = until_three(counts.setdefault(policy.value, []))
        options: Any = {**CALM, "ack_policy": policy, "max_deliveries": 1, "retry_strategy": None}

        @broker.subscriber(policy.value, **options)
        async def handle(message: SqlBrokerMessage) -> None:
            await again(message)
            await message.ack()

    for policy in SETTLING:
        subscribe(policy)
        queue = policy.value
        ids[queue] = await broker.publish("x", queue, headers={"h": 1}, key="k", priority=3)
    await broker.start()
    for row in await look.archived(len(SETTLING)):
        case = row["queue"]
        assert counts[case] == [1, 2, 3], case
        ended = (row["id"], row["state"], row["publish_count"])
        assert ended == (ids[case], "COMPLETED", 3), case
        assert (row["attempts_count"], row["deliveries_count"]) == (1, 1), case
        assert (row["key"], row["priority"], bytes(row["payload"])) == ("k", 3, b"x"), case


async def test_p10_hops_moves_and_retries_do_not_count(broker: SqlBroker, look: Look) -> None:
    """P10: only who publishes again."""
    counts: list[tuple[str, int]] = []
    broker.subscriber("a", **QUICK, forward_to="b")
    broker.subscriber("b", **QUICK, forward_to=DESTINATION)

    @broker.subscriber(
        "c", "d", **QUICK, retry_strategy=ConstantRetryStrategy(delay_seconds=0, max_attempts=2)
    )
    async def handle(message: SqlBrokerMessage) -> None:
        counts.append((message.queue, message.publish_count))
        if message.queue == "c":
            await message.move_to("d")
        elif message.attempts_count == 0:
            raise ValueError("again")

    await broker.start()
    await broker.publish("x", "a", destination="c")
    [row] = await look.archived()
    assert counts == [("c", 1), ("d", 1), ("d", 1)]
    assert (row["publish_count"], row["attempts_count"]) == (1, 2)


async def test_a_republish_into_another_queue_with_a_delay(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK)
    async def handle(message: SqlBrokerMessage) -> None:
        await message.republish("other", delay="1h")

    await broker.start()
    message_id = await broker.publish("x", "q", expires_in="2h")
    before = (await look.rows())[0]["expires_at"]

    async def moved() -> list[dict[str, Any]]:
        return [row for row in await look.rows() if row["queue"] == "other"]

    [row] = await eventually(moved)
    assert (row["id"], row["state"], row["publish_count"]) == (message_id, "PENDING", 2)
    assert row["next_attempt_at"] - row["created_at"] > timedelta(minutes=59)
    assert row["expires_at"] == before


async def test_a_republish_under_once_gives_the_key_back(broker: SqlBroker, look: Look) -> None:
    counts: list[int] = []
    broker.subscriber("q", **QUICK, policies=[Once(ttl="1h")])(until_three(counts))
    await broker.start()
    await broker.publish("x", "q", key="k")
    [row] = await look.archived()
    assert (counts, row["state"]) == ([1, 2, 3], "COMPLETED")
    await broker.publish("y", "q", key="k")
    second = (await look.archived(2))[1]
    assert (counts, second["reason"], second["related_id"]) == ([1, 2, 3], "duplicate", row["id"])


async def test_a_batch_is_republished_as_a_whole(broker: SqlBroker, look: Look) -> None:
    counts: list[list[int]] = []

    @broker.subscriber("q", **QUICK, batch=True)
    async def handle(bodies: list[str], message: SqlBrokerBatchMessage) -> None:
        counts.append([one.publish_count for one in message.messages])
        if counts == [[1, 1]]:
            await message.messages[0].ack()
            await message.republish()

    await broker.publish_batch("x", "y", queue="q")
    await broker.start()
    rows = await look.archived(2)
    assert counts == [[1, 1], [2]]
    assert [row["publish_count"] for row in rows] == [1, 2]


async def test_rows_published_with_the_ack_are_written_with_it(
    broker: SqlBroker, look: Look
) -> None:
    @broker.subscriber("q", **QUICK)
    async def handle(message: SqlBrokerMessage) -> None:
        await broker.publish("with it", "answers", with_ack=True)
        await message.republish("other")
        raise ValueError("after it was recorded")

    await broker.start()
    await broker.publish("x", "q")

    async def written() -> set[tuple[str, int]]:
        rows = {(row["queue"], row["publish_count"]) for row in await look.rows()}
        return rows if len(rows) == 2 else set()

    assert await eventually(written) == {("answers", 1), ("other", 2)}


async def test_a_republish_is_committed_with_the_sql_of_a_transactional_handler(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(effects.metadata.create_all)

    @broker.subscriber("q", **QUICK, transactional=True, retry_strategy=None)
    async def handle(message: SqlBrokerMessage, connection: SqlConnection) -> None:
        await connection.execute(insert(effects).values(body="done"))
        if message.publish_count == 1:
            await message.republish()

    await broker.start()
    await broker.publish("x", "q")
    [row] = await look.archived()
    async with engine.connect() as connection:
        done = list((await connection.execute(select(effects.c.body))).scalars())
    assert (row["state"], row["publish_count"], done) == ("COMPLETED", 2, ["done", "done"])


async def test_impossible_republishes_are_refused(broker: SqlBroker, look: Look) -> None:
    said: list[str] = []

    @broker.subscriber("q", "first", **QUICK)
    async def handle(message: SqlBrokerMessage) -> None:
        for queue, delay in (("", 0), ("x" * 300, 0), ("other", "soon")):
            with pytest.raises(SetupError):
                await message.republish(queue, delay=delay)
        said.append("refused")

    @broker.subscriber("gone", **QUICK, ack_policy=AckPolicy.ACK_FIRST)
    async def gone(message: SqlBrokerMessage) -> None:
        with pytest.raises(SetupError, match="ACK_FIRST"):
            await message.republish()
        said.append("gone")

    await broker.start()
    await broker.publish("x", "q")
    await broker.publish("x", "gone")
    rows = await look.archived(2)
    await eventually(lambda: _all(said))
    assert {row["publish_count"] for row in rows} == {1}


async def _all(said: list[str]) -> bool:
    return sorted(said) == ["gone", "refused"]
