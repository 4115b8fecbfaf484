"""Message ids: the same at each delivery of a message, and never those of another message.

A database that loses commits, such as an asynchronous standby that takes over, gives the ids of
lost rows again.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import delete, text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    SetupError,
    SqlBroker,
    SqlBrokerBatchMessage,
    SqlBrokerMessage,
)
from faststream_sqlbroker.admin import Admin
from faststream_sqlbroker.message import SqlBrokerMessageState
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

AGAIN = {
    "postgresql": "SELECT setval('message_id_seq', 1, false)",
    # InnoDB goes on above the rows that there are.
    "mysql": "ALTER TABLE message AUTO_INCREMENT = 1",
    "mariadb": "ALTER TABLE message AUTO_INCREMENT = 1",
    "sqlite": "DELETE FROM sqlite_sequence WHERE name = 'message'",
}
"""Statements that give ids again, as a standby does that has not received the last rows."""


async def lose(look: Look) -> None:
    """What becomes of the messages that a standby has not received, when it takes over."""
    async with look.engine.begin() as connection:
        for table in (look.tables.message, look.tables.archive):
            assert table is not None
            await connection.execute(delete(table))
        await connection.execute(text(AGAIN[look.engine.dialect.name]))


async def test_an_id_given_again_is_another_message(broker: SqlBroker, look: Look) -> None:
    """A handler that keeps `message_id` as its idempotency key handles both messages."""
    done: dict[str, int] = {}
    skipped: list[int] = []
    seen: list[SqlBrokerMessage] = []
    batches: list[str] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: int, message: SqlBrokerMessage) -> None:
        seen.append(message)
        if message.message_id in done:
            skipped.append(body)
        done[message.message_id] = body

    @broker.subscriber("batch", **QUICK, batch=True)
    async def handle_all(bodies: list[int], message: SqlBrokerBatchMessage) -> None:
        batches.append(message.message_id)

    await broker.start()
    ids = []
    for number in range(2):
        published = [await broker.publish(number, "q"), await broker.publish(number, "batch")]
        ids.append(published)
        await look.archived(2)
        await lose(look)
    assert ids[0] == ids[1]
    assert (sorted(done.values()), skipped) == ([0, 1], [])
    assert len({message.raw_message.id for message in seen}) == 1
    assert len({message.correlation_id for message in seen}) == len(set(batches)) == 2


async def test_a_message_keeps_its_id(broker: SqlBroker, look: Look) -> None:
    """Through a retry, the archive, a redrive and a move; a replay is a new message."""
    seen: list[tuple[int, str, str]] = []

    @broker.subscriber(
        "q", **QUICK, retry_strategy=ConstantRetryStrategy(delay_seconds=0, max_attempts=2)
    )
    async def fail(body: str, message: SqlBrokerMessage) -> None:
        seen.append((message.raw_message.id, message.message_id, message.correlation_id))
        raise ValueError("no")

    @broker.subscriber("other", **QUICK)
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        seen.append((message.raw_message.id, message.message_id, message.correlation_id))

    await broker.start()
    row_id = await broker.publish("x", "q")
    await look.archived()
    await broker.admin.redrive(to="other", ids=[seen[0][1]], dry_run=False)
    [row] = await look.archived()
    assert (len(seen), len(set(seen)), row["queue"]) == (3, 1, "other")
    assert seen[0][:2] == (row_id, f"{row_id}-{seen[0][1].partition('-')[2]}")
    job = await broker.admin.replay("again", ids=[seen[0][1]], state="COMPLETED", dry_run=False)
    assert job.done == 1
    await look.archived(2)
    assert len(seen) == 4
    assert seen[3][1] != seen[0][1]


async def test_taken_messages_have_it(broker: SqlBroker, look: Look) -> None:
    for _ in range(3):
        await broker.publish("x", "q")
    popped = await broker.pop("q")
    reserved = await broker.reserve("q")
    pulled = await broker.subscriber("q").get_one(timeout=60)
    assert popped is not None
    assert reserved is not None
    assert pulled is not None
    taken = [popped.message_id, reserved.message_id, pulled.message_id]
    assert [each.partition("-")[0] for each in taken] == [
        str(row_id) for row_id in (popped.id, reserved.id, pulled.raw_message.id)
    ]
    await pulled.ack()
    await reserved.rollback(delay=0)
    again = await broker.reserve("q")
    assert again is not None
    assert again.message_id == reserved.message_id


OPERATIONS: dict[str, Callable[[Admin, str], Awaitable[Any]]] = {
    "message": lambda a, i: a.message(i),
    "explain": lambda a, i: a.explain(i),
    "cancel": lambda a, i: a.cancel(i),
    "retry_now": lambda a, i: a.retry_now(i),
    "postpone": lambda a, i: a.postpone(i, "1h"),
    "move": lambda a, i: a.move(i, "other"),
    "edit": lambda a, i: a.edit(i, priority=3),
    "bulk_cancel": lambda a, i: a.bulk_cancel(ids=[i], dry_run=False),
}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_the_id_of_a_lost_message_names_no_other(
    broker: SqlBroker, look: Look, operation: str
) -> None:
    call = OPERATIONS[operation]
    lost = await _publish_waiting(broker, look)
    assert str(await call(broker.admin, lost))
    await lose(look)
    missing: Any = await call(broker.admin, lost)
    found = getattr(missing, "verdict", None) or getattr(missing, "done", None)
    assert found in (None, "not_found", 0)
    other = await _publish_waiting(broker, look)
    assert other.partition("-")[0] == lost.partition("-")[0]
    before = await look.rows()
    with pytest.raises(SetupError, match=f"got message_id {lost}, but message .* is another"):
        await call(broker.admin, lost)
    assert await look.rows() == before
    # The number names the message that there is, and so does its own id.
    for name in (lost.partition("-")[0], other):
        explained = await broker.admin.explain(name)
        assert (explained.message_id, explained.state) == (
            before[0]["id"],
            SqlBrokerMessageState.RETRYABLE,
        )
    await call(broker.admin, other)


async def _publish_waiting(broker: SqlBroker, look: Look) -> str:
    """Publish a message that waits, and return its message id."""
    await broker.publish("x", "waiting")
    job = await broker.reserve("waiting")
    assert job is not None
    await job.rollback(delay="1h")
    return job.message_id


async def test_the_id_of_an_archived_message_is_checked(broker: SqlBroker, look: Look) -> None:
    await broker.publish("x", "q")
    first = await broker.pop("q")
    await lose(look)
    await broker.publish("x", "q")
    second = await broker.pop("q")
    assert first is not None
    assert second is not None
    assert (first.id, first.message_id) != (second.id, second.message_id)
    assert (await broker.admin.explain(second.message_id)).state is SqlBrokerMessageState.COMPLETED
    with pytest.raises(SetupError, match=f"give {first.id} to name the other"):
        await broker.admin.explain(first.message_id)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_row_without_a_time_gets_one_with_its_first_claim(
    broker: SqlBroker, look: Look, engine: AsyncEngine
) -> None:
    """Another program may have written text; the id must not change with each delivery."""
    seen: list[str] = []

    @broker.subscriber(
        "q", **QUICK, retry_strategy=ConstantRetryStrategy(delay_seconds=0, max_attempts=3)
    )
    async def fail(body: Any, message: SqlBrokerMessage) -> None:
        seen.append(message.message_id)
        raise ValueError("no")

    async with engine.begin() as connection:
        sql = "INSERT INTO message (queue, payload, created_at) VALUES ('q', x'31', 'soon')"
        await connection.execute(text(sql))
    await broker.start()
    await eventually(lambda: look.rows(archive=True))
    assert (len(seen), len(set(seen))) == (3, 1)
