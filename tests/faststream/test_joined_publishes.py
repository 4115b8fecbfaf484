"""Promise 6: what a handler with transactional=True publishes is committed with its ack, or not at
all."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import pytest
from anyio import from_thread
from faststream import BaseMiddleware, Depends
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    MaxDepth,
    NotSupportedError,
    PublishError,
    QueueFullError,
    SqlBroker,
    SqlBrokerMessage,
    SqlConnection,
    TransientStoreError,
)
from faststream_sqlbroker.database.messages.handler import HandlerTransaction, current_transaction
from faststream_sqlbroker.database.messages.inserts import Inserts
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.deliver import worker_ends
from tests.faststream.conftest import QUICK, Look, Make
from tests.forked import Forked
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`transactional=True`")
SERVERS = ("postgresql", "mariadb", "mysql")
TWICE = ConstantRetryStrategy(delay_seconds=0.01, max_attempts=2)
OPTIONS: Any = {**QUICK, "transactional": True, "retry_strategy": TWICE}
ONCE: Any = {**OPTIONS, "retry_strategy": None}


async def in_thread(broker: SqlBroker) -> object:
    """Publish as a synchronous function does."""
    loop = asyncio.get_running_loop()

    def publish() -> object:
        return asyncio.run_coroutine_threadsafe(broker.publish("x", "out"), loop).result()

    return await asyncio.to_thread(publish)


WAYS: dict[str, Callable[[SqlBroker], Awaitable[object]]] = {
    "publish": lambda b: b.publish("x", "out"),
    "with options": lambda b: b.publish("x", "out", headers={"a": 1}, priority=3),
    "dedup_id": lambda b: b.publish("x", "out", dedup_id="d"),
    "lookup": lambda b: b.publish("x", "out", lookup="l"),
    "batch": lambda b: b.publish_batch("x", queue="out"),
    "publisher": lambda b: b.publisher("out").publish("x"),
    "publisher of batches": lambda b: b.publisher("out", batch=True).publish_batch("x"),
    "from a thread": in_thread,
}


@pytest.fixture
def bodies(look: Look) -> Callable[[], Awaitable[list[bytes]]]:
    """Bodies of the committed messages of the queue `out`."""

    async def read() -> list[bytes]:
        return [row["payload"] for row in await look.rows() if row["queue"] == "out"]

    return read


def flat(answers: Iterable[Any]) -> list[int]:
    """The ids that publishes and batches have returned."""
    each = [answer if isinstance(answer, list) else [answer] for answer in answers]
    return [i for ids in each for i in ids if isinstance(i, int)]


async def handled(broker: SqlBroker, look: Look, count: int = 1) -> list[str]:
    """The states of the messages of the queue `in` once `count` have ended."""

    async def ended() -> list[str]:
        rows = [row for row in await look.rows(archive=True) if row["queue"] == "in"]
        return [row["state"] for row in rows] if len(rows) == count else []

    return await eventually(ended)


@pytest.mark.parametrize("ends", ["ack", "raise", "nack", "reject"])
async def test_every_publish_is_committed_with_the_ack_or_not_at_all(
    broker: SqlBroker, look: Look, bodies: Any, ends: str
) -> None:
    """Until then no other session sees it; the ids are those of the rows."""
    given: list[Any] = []
    seen: list[Any] = []

    @broker.subscriber("in", **ONCE)
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        for publish in WAYS.values():
            given.append(await publish(broker))
        seen.append(await bodies())
        if ends == "raise":
            raise ValueError
        if ends == "nack":
            await message.nack()
        if ends == "reject":
            await message.reject()

    await broker.publish("x", "in")
    await broker.start()
    acked = ends == "ack"
    assert await handled(broker, look) == ["COMPLETED" if acked else "FAILED"]
    assert seen == [[]]
    rows = [row for row in await look.rows() if row["queue"] == "out"]
    assert [row["payload"] for row in rows] == [b"x"] * len(WAYS) * acked
    if acked:
        assert flat(given) == [row["id"] for row in rows]


async def test_a_middleware_and_a_synchronous_dependency_join_too(
    make: Make, look: Look, bodies: Any
) -> None:
    class Watch(BaseMiddleware[Any, Any]):
        async def on_receive(self) -> None:
            await broker.publish("received", "out")

        async def after_processed(self, *error: Any) -> bool | None:
            await broker.publish("processed", "out")
            return await super().after_processed(*error)

    broker = make(middlewares=[Watch])
    await broker.create_tables()

    def depends() -> None:
        from_thread.run(broker.publish, "depends", "out")

    @broker.subscriber("in", **OPTIONS)
    async def handle(
        body: str, message: SqlBrokerMessage, _: Annotated[None, Depends(depends)]
    ) -> None:
        await broker.publish("handles", "out")
        if message.attempts_count == 0:
            raise ValueError

    await broker.publish("x", "in")
    await broker.start()
    assert await handled(broker, look) == ["COMPLETED"]
    # Those of the first attempt are rolled back with it.
    assert await bodies() == [b"received", b"depends", b"handles", b"processed"]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_batch_joins_too(broker: SqlBroker, look: Look, bodies: Any, fails: bool) -> None:
    @broker.subscriber("in", batch=True, **ONCE)
    async def handle(batch: list[str]) -> None:
        for body in batch:
            await broker.publish(body, "out")
        if fails:
            raise ValueError

    await broker.publish_batch("a", "b", queue="in")
    await broker.start()
    assert await handled(broker, look, 2) == ["FAILED" if fails else "COMPLETED"] * 2
    assert await bodies() == ([] if fails else [b"a", b"b"])


@pytest.mark.parametrize("fails", [False, True])
async def test_tasks_of_the_handler_join_one_statement_at_a_time(
    broker: SqlBroker, look: Look, bodies: Any, fails: bool
) -> None:
    ids: list[int | None] = []

    @broker.subscriber("in", **ONCE)
    async def handle(body: str, connection: SqlConnection) -> None:
        publishes = [broker.publish(str(n), "out", dedup_id=str(n)) for n in range(15)]
        batches = [broker.publish_batch("b", "b", queue="out", lookup=str(n)) for n in range(5)]
        answers = await asyncio.gather(*publishes, connection.execute(select(1)), *batches)
        ids.extend(flat(answers))
        if fails:
            raise ValueError

    await broker.publish("x", "in")
    await broker.start()
    assert await handled(broker, look) == ["FAILED" if fails else "COMPLETED"]
    rows = [row for row in await look.rows() if row["queue"] == "out"]
    assert sorted(row["id"] for row in rows) == ([] if fails else sorted(ids))
    assert len(set(ids)) == 25


async def test_a_publish_that_goes_on_as_the_handler_ends_is_committed(
    broker: SqlBroker, look: Look, bodies: Any
) -> None:
    """The commit waits for it. What has not begun by then is refused."""
    sending, go_on, is_shut = asyncio.Event(), asyncio.Event(), asyncio.Event()
    tasks: list[asyncio.Task[object]] = []
    insert_in, shut = Inserts.insert_in, HandlerTransaction.stop_publishing

    async def slowly(self: Inserts, connection: Any, rows: Any) -> Any:
        if not isinstance(connection, HandlerTransaction):
            sending.set()
            await go_on.wait()
        return await insert_in(self, connection, rows)

    async def shutting(self: HandlerTransaction) -> None:
        go_on.set()
        await shut(self)
        is_shut.set()
        await asyncio.wait(tasks)

    async def publish_late() -> None:
        await is_shut.wait()
        with pytest.raises(PublishError, match="has ended"):
            await broker.publish("late", "out")

    @broker.subscriber("in", **ONCE)
    async def handle(body: str) -> None:
        tasks.append(asyncio.create_task(publish_late()))
        tasks.append(asyncio.create_task(broker.publish("goes on", "out")))
        await sending.wait()

    await broker.publish("x", "in")
    with (
        patch.object(Inserts, "insert_in", slowly),
        patch.object(HandlerTransaction, "stop_publishing", shutting),
    ):
        await broker.start()
        assert await handled(broker, look) == ["COMPLETED"]
    assert await bodies() == [b"goes on"]
    assert await asyncio.gather(*tasks) == [None, 2]


async def test_a_task_that_publishes_after_the_end_is_told_what_to_do(
    broker: SqlBroker, look: Look, bodies: Any
) -> None:
    """It inherits the handler's transaction; what is to be committed at once is not refused."""
    go_on = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    errors: list[str] = []

    async def later() -> None:
        await go_on.wait()
        for publish in WAYS.values():
            with pytest.raises(PublishError, match="has ended") as caught:
                await publish(broker)
            errors.append(str(caught.value))
        assert await broker.publish("at once", "out", with_ack=False)
        async with broker.lock("k", wait=0):
            pass

    @broker.subscriber("in", **ONCE)
    async def handle(body: str) -> None:
        tasks.append(asyncio.create_task(later()))

    await broker.publish("x", "in")
    await broker.start()
    assert await handled(broker, look) == ["COMPLETED"]
    go_on.set()
    await asyncio.gather(*tasks)
    assert await bodies() == [b"at once"]
    assert all("await the publish" in text and "with_ack=False" in text for text in errors)


async def test_after_a_rollback_of_the_handler_a_publish_is_refused(
    broker: SqlBroker, look: Look, bodies: Any
) -> None:
    """It would be committed although nothing else of the handler is."""

    @broker.subscriber("in", **ONCE)
    async def handle(body: str, connection: SqlConnection) -> None:
        await broker.publish("before", "out")
        await connection.rollback()
        with pytest.raises(PublishError, match="has ended"):
            await broker.publish("after", "out")

    await broker.publish("x", "in")
    await broker.start()
    assert await handled(broker, look) == ["FAILED"]
    assert await bodies() == []


@pytest.mark.parametrize("database", SERVERS, indirect=True)
async def test_at_once_is_committed_before_the_handler_ends(
    broker: SqlBroker, look: Look, bodies: Any, engine: AsyncEngine
) -> None:
    """By with_ack=False, or in a transaction of the handler's own; True keeps its meaning."""
    given: list[Any] = []
    seen: list[Any] = []

    @broker.subscriber("in", **ONCE)
    async def handle(body: str) -> None:
        await broker.publish("joins", "out")
        given.append(await broker.publish("acked", "out", with_ack=True))
        given.append(await broker.publish("at once", "out", with_ack=False))
        given.append(await broker.publish_batch("batch", queue="out", with_ack=False))
        async with engine.begin() as connection:
            await broker.publish("own", "out", connection=connection)
        seen.append(await bodies())
        raise ValueError

    await broker.publish("x", "in")
    await broker.start()
    assert await handled(broker, look) == ["FAILED"]
    assert seen == [[b"at once", b"batch", b"own"]] == [await bodies()]
    assert given[0] is None
    assert isinstance(given[1], int)
    assert isinstance(given[2][0], int)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_at_once_is_refused_on_sqlite(broker: SqlBroker, look: Look, bodies: Any) -> None:
    """It would wait for itself."""
    errors: list[str] = []

    @broker.subscriber("in", **ONCE)
    async def handle(body: str) -> None:
        for publish in (broker.publish, broker.publish_batch, broker.publisher("out").publish):
            with pytest.raises(NotSupportedError, match="blocks all other writers") as caught:
                await publish("x", queue="out", with_ack=False)
            errors.append(str(caught.value))
        await broker.publish("acked", "out", with_ack=True)

    await broker.publish("x", "in")
    await broker.start()
    assert await handled(broker, look) == ["COMPLETED"]
    assert await bodies() == [b"acked"]
    assert all("omit with_ack" in text for text in errors)


@pytest.mark.parametrize("same", [True, False])
async def test_another_broker_joins_if_it_has_the_same_engine(
    broker: SqlBroker, engine: AsyncEngine, look: Look, bodies: Any, same: bool
) -> None:
    """Or the same file of SQLite, where it would wait for the handler."""
    another = engine if same else create_async_engine(engine.url)
    other = SqlBroker(another, logger=None)
    joins = same or engine.dialect.name == "sqlite"
    seen: list[Any] = []

    @broker.subscriber("in", **ONCE)
    async def handle(body: str) -> None:
        await other.publish("x", "out")
        seen.append(await bodies())

    await broker.publish("x", "in")
    await broker.start()
    assert await handled(broker, look) == ["COMPLETED"]
    assert seen == [[] if joins else [b"x"]]
    assert await bodies() == [b"x"]
    await other.stop()
    if not same:
        await another.dispose()


async def test_a_subscriber_that_a_handler_starts_has_its_own_transactions(
    broker: SqlBroker, look: Look, bodies: Any
) -> None:
    """Its tasks inherit the context of that handler."""

    @broker.subscriber("in", **ONCE)
    async def handle(body: str) -> None:
        second = broker.subscriber("second", persistent=False, **QUICK)

        @second
        async def publish_on(body: str) -> None:
            await broker.publish(body, "out")

        await second.start()

    await broker.publish("x", "second")
    await broker.publish("x", "in")
    await broker.start()
    assert await handled(broker, look) == ["COMPLETED"]
    assert await eventually(bodies) == [b"x"]


async def test_a_failed_commit_takes_the_publishes_with_it(
    broker: SqlBroker, look: Look, bodies: Any
) -> None:
    """A deadlock, say: the handler runs again, and the attempt is not charged."""
    commit = HandlerTransaction.commit
    runs: list[Any] = []

    async def failing(self: HandlerTransaction, *arguments: Any) -> Any:
        if len(runs) == 1:
            raise TransientStoreError("deadlock")
        return await commit(self, *arguments)

    @broker.subscriber("in", **ONCE)
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        runs.append((await bodies(), message.attempts_count))
        await broker.publish(str(len(runs)), "out")

    await broker.publish("x", "in")
    with patch.object(HandlerTransaction, "commit", failing):
        await broker.start()
        assert await handled(broker, look) == ["COMPLETED"]
    assert runs == [([], 0), ([], 0)]
    assert await bodies() == [b"2"]


@pytest.mark.parametrize("database", SERVERS, indirect=True)
async def test_a_task_of_a_handler_that_is_cut_off_keeps_nothing(
    broker: SqlBroker,
    look: Look,
    bodies: Any,
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for a lock as its handler is cancelled: its statement is cut off, too, and nothing
    else is sent on that connection."""
    monkeypatch.setattr(worker_ends, "CANCEL_GRACE", 60.0)
    tasks: list[asyncio.Task[object]] = []
    waiting = asyncio.Event()

    @broker.subscriber("in", **ONCE)
    async def handle(body: str) -> None:
        tasks.append(asyncio.create_task(broker.publish("x", "out", dedup_id="d")))
        transaction: Any = current_transaction.get()
        await eventually(transaction._turn.locked)
        waiting.set()
        await asyncio.Event().wait()

    async with engine.connect() as connection:
        async with connection.begin() as held:
            await broker.publish("held", "out", dedup_id="d", connection=connection)
            await broker.publish("x", "in")
            await broker.start()
            await waiting.wait()
            broker.config.broker_config.graceful_timeout = 0.05
            stopping = asyncio.create_task(broker.stop())
            await asyncio.wait(tasks)
            await held.rollback()
    await stopping
    assert isinstance(tasks[0].exception(), StoreError)
    [row] = await look.rows()
    assert (row["queue"], row["state"], row["attempts_count"]) == ("in", "PENDING", 0)


async def test_a_killed_process_leaves_nothing(
    broker: SqlBroker, look: Look, bodies: Any, database_url: str, tmp_path: Path
) -> None:
    await broker.publish("x", "in")
    said = tmp_path / "said"
    process = Forked(die_in_a_handler, database_url, said=said)
    assert process.wait(240) == -signal.SIGKILL
    assert said.read_text().startswith("published ")
    [row] = await look.rows()
    assert (row["queue"], row["state"]) == ("in", "PROCESSING")


def die_in_a_handler(url: str) -> None:
    """Publish in a transaction of a handler, and end without a word."""

    async def run() -> None:
        broker = SqlBroker(url, logger=None)

        @broker.subscriber("in", **ONCE)
        async def handle(body: str) -> None:
            sys.stdout.write(f"published {await broker.publish(body, 'out')}")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        await broker.start()
        await asyncio.Event().wait()

    asyncio.run(run())


async def test_subscribers_are_woken_by_the_commit(
    broker: SqlBroker, look: Look, bodies: Any
) -> None:
    """Nothing else makes them look."""
    slow: Any = {**QUICK, "max_fetch_interval": 600}
    looked: list[Any] = []

    @broker.subscriber("out", **slow)
    async def take(body: str) -> None:
        looked.append(body)

    @broker.subscriber("in", **{**slow, "transactional": True})
    async def handle(body: str) -> None:
        await broker.publish(body, "out")
        await broker.publish("of later", "later", delay="1h")

    await broker.start()
    await broker.publish("x", "in")
    await eventually(lambda: looked)
    assert looked == ["x"]


async def test_a_full_queue_is_waited_for_where_others_can_write(
    engine: AsyncEngine, make: Make, look: Look, bodies: Any
) -> None:
    """On SQLite none can, so that it raises at once."""
    broker = make(max_depth={"out": MaxDepth(1, timeout=None)})
    await broker.create_tables()
    full: list[bool] = []

    @broker.subscriber("in", **ONCE)
    async def handle(body: str) -> None:
        full.append(True)
        await broker.publish("second", "out")

    await broker.publish("first", "out")
    await broker.publish("x", "in")
    await broker.start()
    await eventually(lambda: full)
    if engine.dialect.name == "sqlite":
        assert await handled(broker, look) == ["FAILED"]
        [row] = await look.rows(archive=True)
        assert QueueFullError.__name__ in row["last_error"]
        return
    assert (await broker.pop("out")) is not None
    assert await handled(broker, look) == ["COMPLETED"]
    assert await bodies() == [b"second"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_handler_waits_for_nothing_that_its_own_lock_keeps_away(
    make: Make, look: Look
) -> None:
    """What waits for room holds up those behind it, and room takes another writer."""
    broker = make(max_depth={"out": MaxDepth(1, timeout=None)})
    await broker.create_tables()
    begun = asyncio.Event()
    waiting = asyncio.Event()

    @broker.subscriber("in", **ONCE)
    async def handle(body: str) -> None:
        begun.set()
        await waiting.wait()
        await broker.publish("third", "out")

    await broker.publish("first", "out")
    await broker.publish("x", "in")
    await broker.start()
    async with asyncio.timeout(60):
        await begun.wait()
        behind = asyncio.create_task(broker.publish("second", "out"))
        await asyncio.sleep(0.2)  # It holds the line by then.
        waiting.set()
    assert await handled(broker, look) == ["FAILED"]
    [row] = await look.rows(archive=True)
    assert QueueFullError.__name__ in row["last_error"]
    assert await broker.pop("out") is not None
    async with asyncio.timeout(60):
        await behind
