"""Promise 6: what a handler returns, or publishes with its ack, is written with the ack or not at
all."""

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from faststream import AckPolicy
from faststream.exceptions import NackMessage
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    PublishError,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerResponse,
    StoreError,
    UnknownOutcomeError,
)
from tests.faststream.conftest import CALM, QUICK, Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("publish on ack: answers and `with_ack` commit with the ack")
TWICE = ConstantRetryStrategy(delay_seconds=0.01, max_attempts=2)


def queues(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(row["queue"] for row in rows)


async def test_an_answer_appears_when_its_message_is_settled(broker: SqlBroker, look: Look) -> None:
    """Not before: the outcome waits for the flush, and so does the answer."""
    done = asyncio.Event()

    @broker.subscriber("in", **{**QUICK, "flush_interval": 30, "max_workers": 2})
    @broker.publisher("out")
    async def handle(body: str, message: SqlBrokerMessage) -> str:
        if body == "last":
            await done.wait()
        else:
            await broker.publish("joined", "extra", with_ack=True)
        return body + "!"

    await broker.publish_batch("first", "last", queue="in")
    with patch.object(broker.config.store, "settle", side_effect=StoreError("not now")) as refused:
        await broker.start()
        await eventually(lambda: refused.called)
        assert queues(await look.rows()) == ["in", "in"]
        done.set()
        await eventually(lambda: refused.call_count > 2)
        assert queues(await look.rows()) == ["in", "in"]

    async def all_there() -> bool:
        return queues(await look.rows()) == ["extra", "out", "out"]

    await eventually(all_there)
    assert queues(await look.rows(archive=True)) == ["in", "in"]


async def test_only_with_an_ack(broker: SqlBroker, look: Look) -> None:
    """Each case has a queue for its message, one for its answer, and one for what it publishes."""
    cases: list[tuple[AckPolicy, type[Exception] | None, bool]] = [
        (AckPolicy.NACK_ON_ERROR, RuntimeError, False),
        (AckPolicy.REJECT_ON_ERROR, RuntimeError, False),
        (AckPolicy.ACK, RuntimeError, True),
        (AckPolicy.NACK_ON_ERROR, NackMessage, False),
        (AckPolicy.MANUAL, None, False),
        (AckPolicy.NACK_ON_ERROR, None, True),
    ]

    def subscribe(queue: str, policy: AckPolicy, raised: type[Exception] | None) -> None:
        @broker.subscriber(queue, **CALM, ack_policy=policy, retry_strategy=TWICE)
        @broker.publisher(f"out of {queue}")
        async def handle(body: str) -> str:
            to = f"joined by {queue}"
            assert await broker.publish("x", to, with_ack=True) is None
            assert await broker.publish_batch("x", "y", queue=to, with_ack=True) == [None, None]
            if raised is not None:
                raise raised
            return "answer"

    expected: list[str] = []
    for policy, raised, written in cases:
        queue = f"{policy.value} {raised}"
        subscribe(queue, policy, raised)
        await broker.publish("x", queue)
        expected += [f"joined by {queue}"] * 3 if written else []
        expected += [f"out of {queue}"] if written and raised is None else []
    await broker.start()

    async def ended() -> bool:
        return len(await look.rows(archive=True)) == len(cases)

    await eventually(ended)
    assert queues(await look.rows()) == sorted(expected)


async def test_a_publish_without_it_is_immediate(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("in", **QUICK, retry_strategy=None)
    async def handle(body: str) -> None:
        assert await broker.publish("x", "out")
        raise RuntimeError

    await broker.start()
    await broker.publish("x", "in")
    await eventually(lambda: look.rows(archive=True))
    assert queues(await look.rows()) == ["out"]


async def test_an_answer_of_a_batch_goes_with_all_of_its_messages(
    broker: SqlBroker, look: Look
) -> None:
    calls: list[int] = []

    @broker.subscriber(
        "in",
        **QUICK,
        batch=True,
        flush_batch_size=2,
        fetch_batch_size=10,
        max_not_processed_factor=1,
    )
    @broker.publisher("out")
    async def handle(bodies: list[str]) -> str:
        calls.append(len(bodies))
        return "sum"

    await broker.publish_batch(*"abcdefg", queue="in")

    async def done() -> bool:
        return len(await look.rows(archive=True)) == 7

    sizes: list[int] = []
    store = broker.config.store
    original = store.settle

    async def counting(batch: Any, **options: Any) -> Any:
        sizes.append(len(batch))
        return await original(batch, **options)

    with patch.object(store, "settle", counting):
        await broker.start()
        await eventually(done)
    assert calls == [7]
    assert sizes == [7], "one transaction, whatever the size of a flush"
    assert queues(await look.rows()) == ["out"]


async def test_chained_rows_keep_their_options(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("in", **QUICK)
    @broker.publisher("out")
    async def handle(body: str) -> SqlBrokerResponse:
        return SqlBrokerResponse(body, priority=7, key="k", dedup_id="d", delay=60)

    await broker.publish("x", "out", dedup_id="other")
    await broker.start()
    for _ in range(2):
        await broker.publish("x", "in", correlation_id="c")

    async def done() -> bool:
        return len(await look.rows(archive=True)) == 2

    await eventually(done)
    first, answer = await look.rows()
    assert first["dedup_id"] == "other"
    assert (answer["priority"], answer["key"], answer["dedup_id"]) == (7, "k", "d"), (
        "the second is a duplicate"
    )
    assert answer["next_attempt_at"] > answer["created_at"]


async def test_publishes_without_an_ack_to_join(
    broker: SqlBroker, look: Look, engine: AsyncEngine
) -> None:
    refusals: dict[str, str] = {}
    later: list[asyncio.Task[None]] = []

    async def refused(name: str, publish: Callable[[], Any]) -> None:
        with pytest.raises(PublishError) as info:
            await publish()
        refusals[name] = str(info.value)

    async def ended() -> bool:
        return "in" in queues(await look.rows(archive=True))

    async def late() -> None:
        await eventually(ended)
        await refused("late", lambda: broker.publish("x", "out", with_ack=True))

    @broker.subscriber("first", **QUICK, ack_policy=AckPolicy.ACK_FIRST)
    @broker.publisher("out")
    async def at_most_once(body: str) -> str:
        await refused("ack first", lambda: broker.publish("x", "out", with_ack=True))
        return "answer"

    @broker.subscriber("in", **QUICK)
    async def handle(body: str) -> None:
        later.append(asyncio.create_task(late()))

    await refused("outside", lambda: broker.publish("x", "out", with_ack=True))
    async with engine.connect() as connection:
        await refused(
            "both", lambda: broker.publish("x", "out", with_ack=True, connection=connection)
        )
    await broker.start()
    await broker.publish("x", "first")
    await broker.publish("x", "in")
    await eventually(lambda: later and later[0].done() and "ack first" in refusals)
    await later[0]
    assert "no handler runs here" in refusals["outside"]
    assert "only one of" in refusals["both"]
    assert "ACK_FIRST" in refusals["ack first"]
    assert "has ended" in refusals["late"]
    # An answer under ACK_FIRST is published at once, in a write of its own.
    assert await eventually(look.rows)
    assert queues(await look.rows()) == ["out"]


async def test_another_brokers_handler_has_no_ack_to_join(
    broker: SqlBroker, look: Look, engine: AsyncEngine
) -> None:
    """Its answers go to this broker at once, before its own ack, which may repeat them."""
    other = SqlBroker(engine, logger=None)
    refusals: list[str] = []

    @other.subscriber("in", **QUICK)
    @broker.publisher("out")
    async def handle(body: str) -> str:
        with pytest.raises(PublishError, match="another broker") as info:
            await broker.publish("x", "out", with_ack=True)
        refusals.append(str(info.value))
        return "relayed"

    await broker.start()
    await other.start()
    await other.publish("x", "in")

    async def done() -> bool:
        return queues(await look.rows()) == ["out"] and len(await look.rows(archive=True)) == 1

    await eventually(done)
    assert refusals
    await other.stop()


async def test_an_answer_that_cannot_be_stored_is_a_failed_attempt(
    broker: SqlBroker, look: Look
) -> None:
    """Others are not delayed; at last the message is a dead letter that says why."""

    @broker.subscriber("in", **QUICK, retry_strategy=TWICE)
    @broker.publisher("out")
    async def handle(body: str) -> str:
        return body

    store = broker.config.store
    original = store.dialect.insert

    def refusing(connection: Any, rows: Any) -> Any:
        from sqlalchemy.exc import IntegrityError

        if any(row.queue == "out" and row.payload == b"bad" for row in rows):
            raise IntegrityError("INSERT", {}, Exception("a constraint of the user's"))
        return original(connection, rows)

    if store.dialect_name == "postgresql":
        # It inserts in the statement that acks.
        check = "ALTER TABLE message ADD CHECK (queue <> 'out' OR payload <> 'bad')"
        async with look.engine.begin() as connection:
            await connection.execute(text(check))

    await broker.publish_batch("good", "bad", "fine", queue="in")
    with patch.object(store.dialect, "insert", refusing):
        await broker.start()

        async def done() -> bool:
            return len(await look.rows(archive=True)) == 3

        await eventually(done)
    rows = {bytes(row["payload"]): row for row in await look.rows(archive=True)}
    assert (rows[b"good"]["state"], rows[b"fine"]["state"]) == ("COMPLETED", "COMPLETED")
    bad = rows[b"bad"]
    assert (bad["state"], bad["reason"], bad["attempts_count"]) == ("FAILED", "max_attempts", 2)
    assert (
        "the database refused the messages that the handler published with its ack"
        in bad["last_error"]
    )
    assert [bytes(r["payload"]) for r in await look.rows()] == [b"good", b"fine"]


async def test_a_repeat_after_an_unanswered_commit_writes_no_answer_twice(
    broker: SqlBroker, look: Look
) -> None:
    @broker.subscriber("in", **QUICK)
    @broker.publisher("out")
    async def handle(body: str) -> str:
        return body

    store = broker.config.store
    original = store.settle
    lost = []

    async def unanswered(batch: Any, **options: Any) -> Any:
        result = await original(batch, **options)
        if not lost:
            lost.append(batch)
            raise UnknownOutcomeError("the answer was lost")
        return result

    with patch.object(store, "settle", unanswered):
        await broker.start()
        await broker.publish("x", "in")
        consumer = broker.subscribers[0].consumer  # type: ignore[attr-defined]
        await eventually(lambda: consumer.inflight.settle_unknown_count == 1)
    assert queues(await look.rows()) == ["out"]
    assert len(await look.rows(archive=True)) == 1


async def test_the_answer_of_a_lost_lease_is_not_written(broker: SqlBroker, look: Look) -> None:
    go_on = asyncio.Event()

    @broker.subscriber("in", **QUICK)
    @broker.publisher("out")
    async def handle(body: str) -> str:
        await go_on.wait()
        return body

    await broker.start()
    await broker.publish("x", "in")
    await look.in_state("PROCESSING")
    async with look.engine.begin() as connection:
        await connection.exec_driver_sql(
            "UPDATE message SET state = 'PENDING', lease_token = NULL, lease_expires_at = NULL, "
            "acquired_at = NULL, queue = 'elsewhere'"
        )
    go_on.set()
    consumer = broker.subscribers[0].consumer  # type: ignore[attr-defined]
    await eventually(lambda: consumer.inflight.lease_lost_count == 1)
    assert queues(await look.rows()) == ["elsewhere"]


async def test_a_chain_of_three(broker: SqlBroker, look: Look) -> None:
    """Each step is woken by the one before it, within the process."""
    slow: Any = {**QUICK, "min_fetch_interval": 20, "max_fetch_interval": 20}

    @broker.subscriber("one", **slow)
    @broker.publisher("two")
    async def one(body: int) -> int:
        return body + 1

    @broker.subscriber("two", **slow)
    @broker.publisher("three")
    async def two(body: int) -> int:
        return body * 10

    @broker.subscriber("three", **slow)
    async def three(body: int) -> None:
        assert body == 50

    await broker.start()
    await broker.publish(4, "one")
    assert {row["state"] for row in await look.archived(3)} == {"COMPLETED"}
