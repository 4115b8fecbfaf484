"""Publishers are held back by `max_depth` and `max_payload`, on every database."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import create_engine, func, make_url, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from faststream_sqlbroker import (
    MaxDepth,
    MessageTooLargeError,
    PublishError,
    QueueFullError,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerResponse,
    StoreError,
    TestSqlBroker,
)
from faststream_sqlbroker.core.metrics import FULL_WAIT, REFUSED
from faststream_sqlbroker.flow.publish_limits import PublishLimits
from tests.faststream.conftest import QUICK, Heard, Look, Make
from tests.helpers import eventually
from tests.plans.conftest import SYNC_DRIVERS

pytestmark = pytest.mark.capability("`max_depth`, `max_payload`: publishers are held back")


class Counts:
    """A recorder that keeps what it is told."""

    sample_interval = 3600.0

    def __init__(self) -> None:
        self.counts: Counter[Any] = Counter()
        self.waits: list[tuple[Any, float]] = []

    def count(self, metric: Any, labels: Any, amount: int) -> None:
        if metric is REFUSED:
            self.counts[labels] += amount

    def observe(self, metric: Any, labels: Any, value: float) -> None:
        if metric is FULL_WAIT:
            self.waits.append((labels, value))

    def gauge(self, metric: Any, values: Any) -> None:
        pass


@pytest.fixture
async def make(make: Make) -> Make:
    """Over tables that are there."""
    await make().create_tables()
    return make


@pytest.fixture
def waits_begun() -> Iterator[Any]:
    """Counts the publishes that have found a queue full, and wait for room."""
    wait = patch.object(
        PublishLimits,
        "_wait_for_capacity",
        autospec=True,
        side_effect=PublishLimits._wait_for_capacity,
    )
    with wait as counted:
        yield counted


async def test_a_full_queue_raises_and_the_others_do_not(make: Make, look: Look) -> None:
    counts = Counts()
    broker = make(max_depth={"q": MaxDepth(3, "raise")}, metrics=counts)
    for n in range(3):
        await broker.publish(n, "q")
    with pytest.raises(
        QueueFullError, match="'q' has reached its max_depth of 3 due messages"
    ) as error:
        await broker.publish(3, "q")
    assert error.value.queue == "q"
    with pytest.raises(QueueFullError):
        await broker.publish_batch(4, SqlBrokerResponse(5, queue="other"), queue="q")
    await broker.publish(6, "other")
    assert [row["queue"] for row in await look.rows()] == ["q", "q", "q", "other"]
    assert counts.counts == {("q", "raised"): 2}


async def test_messages_that_are_not_due_do_not_count(make: Make, look: Look) -> None:
    broker = make(max_depth={"q": MaxDepth(2, "raise")})
    await broker.publish_batch(*range(5), queue="q", delay=600)
    other = make(max_depth={"q": MaxDepth(2, "raise")})
    await other.publish(1, "q")
    assert len(await look.rows()) == 6


async def test_a_batch_is_let_in_whole_while_there_is_room(make: Make, look: Look) -> None:
    broker = make(max_depth={"q": MaxDepth(3, "raise")})
    await broker.publish_batch(*range(10), queue="q")
    with pytest.raises(QueueFullError):
        await broker.publish_batch(1, 2, queue="q")
    assert len(await look.rows()) == 10


async def test_what_is_dropped_is_told(make: Make, look: Look, heard: Heard) -> None:
    counts = Counts()
    broker = make(max_depth={"q": MaxDepth(2, "drop")}, metrics=counts)
    assert await broker.publish(1, "q") is not None
    assert await broker.publish(2, "q") is not None
    assert await broker.publish(3, "q") is None
    ids = await broker.publish_batch(4, SqlBrokerResponse(5, queue="other"), 6, queue="q")
    assert [i is None for i in ids] == [True, False, True]
    assert [row["queue"] for row in await look.rows()] == ["q", "q", "other"]
    assert counts.counts == {("q", "dropped"): 3}
    [told] = heard.texts("dropped", logging.WARNING)
    assert told == (
        "queue 'q' has reached its max_depth of 2 due messages: dropped 1 more messages"
    )


async def test_a_publish_waits_until_a_handler_made_room(
    make: Make, look: Look, waits_begun: Any
) -> None:
    counts = Counts()
    broker = make(max_depth={"q": MaxDepth(2, timeout=None)}, metrics=counts)
    handled: list[int] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: int) -> None:
        handled.append(body)

    await broker.publish_batch(0, 1, queue="q")
    waiting = [asyncio.create_task(broker.publish(n, "q")) for n in (2, 3, 4)]
    await eventually(lambda: waits_begun.call_count == 3)
    assert not any(task.done() for task in waiting)
    assert len(await look.rows()) == 2
    await broker.start()
    assert all(await asyncio.gather(*waiting))
    assert len(await look.archived(5)) == 5
    assert sorted(handled) == [0, 1, 2, 3, 4]
    assert len(counts.waits) == 3
    assert not counts.counts


async def test_a_wait_ends_at_its_timeout(make: Make, look: Look) -> None:
    counts = Counts()
    broker = make(max_depth={"q": MaxDepth(1, timeout=0.3)}, metrics=counts)
    await broker.publish(1, "q")
    with pytest.raises(QueueFullError, match=r"gave up after 0\.3 s of waiting"):
        await broker.publish(2, "q")
    with pytest.raises(QueueFullError):
        await broker.wait_for_room("q")
    await broker.wait_for_room("a queue without a limit")
    with pytest.raises(QueueFullError):
        await broker.publish_batch(2, 3, 4, queue="q")
    assert len(await look.rows()) == 1
    assert counts.counts == {("q", "raised"): 5}


async def test_a_cancelled_wait_lets_the_next_one_in(
    make: Make, look: Look, waits_begun: Any
) -> None:
    broker = make(max_depth={"q": MaxDepth(1, timeout=None)})
    await broker.publish(1, "q")
    first = asyncio.create_task(broker.publish(2, "q"))
    second = asyncio.create_task(broker.publish(3, "q"))
    await eventually(lambda: waits_begun.call_count == 2)
    first.cancel()
    await asyncio.wait((first,))
    taken = await make().pop("q")
    assert taken is not None
    assert await second is not None
    assert [row["payload"] for row in await look.rows()] == [b"3"]


async def test_nothing_waits_in_a_transaction_of_the_caller(
    make: Make, look: Look, engine: AsyncEngine
) -> None:
    broker = make(max_depth={"q": MaxDepth(2, timeout=None)})
    async with engine.connect() as connection, connection.begin():
        await broker.publish(1, "q", connection=connection)
        await broker.publish(2, "q", connection=connection)
        # Its own messages count, though no other connection sees them.
        with pytest.raises(
            QueueFullError, match=r"await broker\.wait_for_room\('q'\), and repeat it"
        ):
            await broker.publish(3, "q", connection=connection)
    async with AsyncSession(engine) as session, session.begin():
        with pytest.raises(QueueFullError):
            await broker.publish(4, "q", session=session)
    assert len(await look.rows()) == 2


async def test_a_transaction_that_was_rolled_back_leaves_the_room(
    make: Make, look: Look, engine: AsyncEngine
) -> None:
    broker = make(max_depth={"q": MaxDepth(2)})
    async with engine.connect() as connection, connection.begin() as transaction:
        await broker.publish_batch(1, 2, queue="q", connection=connection)
        await transaction.rollback()
    assert await broker.publish(3, "q") is not None
    assert len(await look.rows()) == 1


async def test_all_connections_may_be_transactions_that_publish(database_url: str) -> None:
    """A count on a connection of its own would wait for one of them, in vain."""
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(database_url, pool_size=1, max_overflow=0)
    broker = SqlBroker(engine, logger=None, max_depth={"q": MaxDepth(1, "raise")})
    try:
        await broker.create_tables()
        async with engine.begin() as connection:
            await broker.publish(1, "q", connection=connection)
            with pytest.raises(QueueFullError):
                await broker.publish(2, "q", connection=connection)
    finally:
        await broker.stop()
        await engine.dispose()


async def test_synchronous_code_is_held_back_too(make: Make, look: Look, database_url: str) -> None:
    url = make_url(database_url)
    engine = create_engine(url.set(drivername=SYNC_DRIVERS.get(_kind(url), "sqlite")))
    broker = make(max_depth={"q": MaxDepth(2), "d": MaxDepth(1, "drop")}, max_payload=10)
    with engine.begin() as connection:
        for n in range(2):
            assert broker.publish_sync(n, "q", connection=connection)
        with pytest.raises(QueueFullError, match="waiting here would keep your transaction open"):
            broker.publish_sync(2, "q", connection=connection)
        assert broker.publish_sync(3, "d", connection=connection)
        assert broker.publish_sync(4, "d", connection=connection) is None
        with pytest.raises(MessageTooLargeError, match="the body for queue 'other' has 11 bytes"):
            broker.publish_sync(b"x" * 11, "other", connection=connection)
    engine.dispose()
    assert len(await look.rows()) == 3


def _kind(url: Any) -> str:
    name: str = url.get_backend_name()
    return name


async def test_what_an_ack_writes_is_not_held_back(make: Make, look: Look) -> None:
    """Else a handler's message could not be settled until another handler made room."""
    broker = make(max_depth={"answers": MaxDepth(1, "raise"), "q": MaxDepth(1, "raise")})

    @broker.subscriber("q", **QUICK)
    @broker.publisher("answers")
    async def handle(body: int) -> int:
        await broker.publish(body, "answers", with_ack=True)
        return body

    await broker.publish(0, "answers")
    await broker.publish(1, "q")
    await broker.start()

    async def done() -> bool:
        return [row["queue"] for row in await look.rows()] == ["answers"] * 3

    await eventually(done)
    [archived] = await look.rows(archive=True)
    assert archived["state"] == "COMPLETED"


async def test_a_request_is_never_dropped(make: Make) -> None:
    """Its caller would wait for the reply in vain."""
    broker = make(max_depth={"q": MaxDepth(1, "drop")})
    await broker.publish(1, "q")
    with pytest.raises(QueueFullError):
        await broker.request(2, "q", timeout=30.0)


async def test_two_publishing_brokers_and_one_that_handles(
    make: Make, look: Look, engine: AsyncEngine
) -> None:
    """Each publishes at most what its last count left room for: the depth stays near the limit."""
    limit = 20
    producers = [make(max_depth={"q": MaxDepth(limit, timeout=None)}) for _ in range(2)]
    consumer = make()
    handled: Counter[int] = Counter()

    @consumer.subscriber("q", max_workers=1, fetch_batch_size=5, **QUICK)
    async def handle(body: int) -> None:
        handled[body] += 1

    deepest = 0

    async def watch() -> None:
        nonlocal deepest
        table = look.tables.message
        due = select(func.count()).where(table.c.state.in_(("PENDING", "RETRYABLE")))
        while True:
            async with engine.connect() as connection:
                deepest = max(deepest, (await connection.execute(due)).scalar_one())
            await asyncio.sleep(0.01)

    async def produce(broker: SqlBroker, start: int) -> None:
        for n in range(50):
            await broker.publish(start + n, "q")

    await consumer.start()
    watching = asyncio.create_task(watch())
    await asyncio.gather(*(produce(b, n * 1000) for n, b in enumerate(producers)))
    await look.archived(100)
    watching.cancel()
    assert len(handled) == 100
    assert set(handled.values()) == {1}
    # Both may count just before the other writes: each has room for `limit` then.
    assert deepest <= 2 * limit


async def test_a_large_body_is_refused_wherever_it_is_published(make: Make, look: Look) -> None:
    broker = make(max_payload=20)
    said = "the body for queue 'q' has 21 bytes, more than the broker's max_payload of 20 bytes"
    await broker.publish(b"x" * 20, "q")
    with pytest.raises(MessageTooLargeError, match=said) as error:
        await broker.publish(b"x" * 21, "q")
    assert isinstance(error.value, PublishError)
    assert isinstance(error.value, StoreError)
    with pytest.raises(MessageTooLargeError, match=said):
        await broker.publish_batch(b"x", b"x" * 21, queue="q")
    with pytest.raises(MessageTooLargeError, match=said):
        await broker.request(b"x" * 21, "q")
    assert len(await look.rows()) == 1


async def test_an_answer_that_is_too_large_is_a_failed_attempt(make: Make, look: Look) -> None:
    broker = make(max_payload=20)

    @broker.subscriber("q", retry_strategy=None, **QUICK)
    @broker.publisher("answers")
    async def handle(_body: str, message: SqlBrokerMessage) -> str:
        return "x" * 21

    await broker.publish("small", "q")
    await broker.start()
    [row] = await look.archived()
    assert row["state"] == "FAILED"
    assert "max_payload" in row["last_error"]


async def test_limits_hold_under_the_test_broker() -> None:
    broker = SqlBroker(
        "sqlite+aiosqlite:///never_made.db",
        logger=None,
        max_depth={"q": MaxDepth(1, "raise")},
        max_payload=20,
    )
    async with TestSqlBroker(broker):
        await broker.publish(1, "q")
        with pytest.raises(QueueFullError):
            await broker.publish(2, "q")
        with pytest.raises(MessageTooLargeError):
            await broker.publish(b"x" * 21, "other")
