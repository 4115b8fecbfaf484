"""TestSqlBroker behaves as FastStream's test brokers do, and its store is the real one."""

import asyncio
import gc
import json
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import Mock

import pytest
from faststream import AckPolicy, Context, FastStream
from faststream.asgi import AsgiFastStream
from faststream.exceptions import (
    NackMessage,
    RejectMessage,
    SetupError,
    StopConsume,
    SubscriberNotFound,
)
from pydantic import BaseModel
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from faststream_sqlbroker import (
    Concurrency,
    ConstantRetryStrategy,
    Debounce,
    LockNotAcquiredError,
    NotSupportedError,
    Once,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerResponse,
    SqlBrokerRouter,
    SqlBrokerSchemaConfig,
    SqlConnection,
    SqlSession,
    TestApp,
    TestSqlBroker,
    Throttle,
    VirtualClock,
)
from faststream_sqlbroker.testing.producer import FakeProducer
from tests.testing.conftest import unreachable

LATER = ConstantRetryStrategy(delay_seconds=60, max_attempts=3)

OwnBroker = Annotated[Any, Context("broker")]


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.capability("tests of handlers without the database: `TestSqlBroker`, virtual time")
async def test_a_publish_runs_the_handler(broker: SqlBroker) -> None:
    @broker.subscriber("q")
    async def handle(body: str) -> None:
        pass

    async with TestSqlBroker(broker) as br:
        assert br is broker
        message_id = await br.publish("hello", "q")
        handle.mock.assert_called_once_with("hello")
        assert [(m.id, m.body) for m in br.outbox("q")] == [(message_id, "hello")]
        assert (await br.drain()).waiting == []


async def test_answers_reach_publishers_and_subscribers(broker: SqlBroker) -> None:
    heard = broker.publisher("heard")
    unheard = broker.publisher("unheard")
    manual = broker.publisher("manual")

    @heard
    @unheard
    @broker.subscriber("q")
    async def handle(body: str) -> str:
        await manual.publish("by hand")
        return f"re: {body}"

    @broker.subscriber("heard")
    async def listen(body: str) -> None:
        pass

    async with TestSqlBroker(broker) as br:
        await br.start()
        assert len(br.subscribers) == 4
        await br.publish("hello", "q")
        listen.mock.assert_called_once_with("re: hello")
        heard.mock.assert_called_once_with("re: hello")
        unheard.mock.assert_called_once_with("re: hello")
        manual.mock.assert_called_once_with("by hand")
    gc.collect()
    assert len(broker.subscribers) == 2
    with pytest.raises(SetupError, match="not under a test broker"):
        heard.mock.assert_not_called()


async def test_reply_to_is_answered(broker: SqlBroker) -> None:
    @broker.subscriber("q")
    async def handle(body: str) -> str:
        return f"re: {body}"

    async with TestSqlBroker(broker) as br:
        await br.publish("hello", "q", reply_to="answers")
        assert [m.body for m in br.outbox("answers")] == ["re: hello"]


async def test_the_exception_is_raised_after_its_outcome_is_written(broker: SqlBroker) -> None:
    @broker.subscriber("q", retry_strategy=LATER)
    async def handle(body: str) -> None:
        raise ValueError(body)

    async with TestSqlBroker(broker) as br:
        with pytest.raises(ValueError, match="hello"):
            await br.publish("hello", "q")
        [attempt] = (await br.drain(raise_errors=True)).failed
        [waiting] = (await br.drain()).waiting
        assert (attempt.attempt, attempt.outcome, waiting.attempts) == (1, "nack", 1)
        assert "ValueError: hello" in waiting.reason


async def test_a_parser_and_a_body_may_fail(broker: SqlBroker) -> None:
    async def parser(_row: Any) -> Any:
        raise LookupError("no parser")

    @broker.subscriber("unparsed", parser=parser)
    async def unparsed() -> None:
        pass

    @broker.subscriber("people")
    async def people(person: Person) -> None:
        pass

    async with TestSqlBroker(broker) as br:
        with pytest.raises(LookupError):
            await br.publish("hello", "unparsed")
        with pytest.raises(ValueError, match="age"):
            await br.publish({"name": "Ada"}, "people")


@pytest.mark.parametrize("said", [NackMessage, RejectMessage])
async def test_control_exceptions_are_not_raised(broker: SqlBroker, said: type[Exception]) -> None:
    @broker.subscriber("q", retry_strategy=LATER)
    async def handle() -> None:
        raise said

    async with TestSqlBroker(broker) as br:
        await br.publish("hello", "q")
        [attempt] = (await br.drain()).attempts
        assert attempt.outcome == said.__name__.removesuffix("Message").lower()


async def test_stop_consume_is_raised_and_stops(broker: SqlBroker) -> None:
    @broker.subscriber("q")
    async def handle() -> None:
        raise StopConsume

    async with TestSqlBroker(broker) as br:
        with pytest.raises(StopConsume):
            await br.publish("first", "q")
        await br.publish("second", "q")
        assert handle.mock.call_count == 1
        waiting = {one.message_id: one.reason for one in (await br.drain()).waiting}
        assert "no running subscriber has the queue" in waiting[2]


async def test_a_handlers_own_publish_raises_in_it(broker: SqlBroker) -> None:
    caught = []

    @broker.subscriber("inner")
    async def inner() -> None:
        raise ValueError("inner")

    @broker.subscriber("outer")
    async def outer() -> None:
        try:
            await broker.publish("", "inner")
        except ValueError as error:
            caught.append(error)

    async with TestSqlBroker(broker) as br:
        await br.publish("", "outer")
        assert len(caught) == 1
        outer.mock.assert_called_once()


async def test_a_handler_publishes_to_its_own_queue(broker: SqlBroker) -> None:
    @broker.subscriber("q")
    async def handle(n: int) -> None:
        if n:
            await broker.publish(n - 1, "q")

    async with TestSqlBroker(broker) as br:
        await br.publish(3, "q")
        assert [call.args[0] for call in handle.mock.call_args_list] == [3, 2, 1, 0]


async def test_broker_is_patched_and_restored(broker: SqlBroker) -> None:
    old = broker.config.producer
    engine = broker.engine
    async with TestSqlBroker(broker) as br:
        assert isinstance(br.start, Mock)
        assert isinstance(br.stop, Mock)
        assert isinstance(br.config.producer, FakeProducer)
        assert await br.ping()
    assert not isinstance(broker.start, Mock)
    assert broker.config.producer is old
    assert broker.engine is engine
    for method in (broker.outbox, lambda: asyncio.run(broker.drain())):
        with pytest.raises(SetupError, match="TestSqlBroker"):
            await asyncio.to_thread(method)


async def test_assertions_take_our_fields(broker: SqlBroker) -> None:
    later = broker.publisher("later")

    @broker.subscriber("q")
    async def handle(person: Person) -> None:
        await later.publish("x", key="k")

    async with TestSqlBroker(broker) as br:
        await br.publish(
            Person(name="Ada", age=36),
            "q",
            key="ada",
            priority=3,
            headers={"a": "b"},
            correlation_id="c",
        )
        await handle.assert_called_once_with(
            {"name": "Ada", "age": 36},
            queue="q",
            key="ada",
            priority=3,
            delay=0,
            attempt=1,
            headers={"a": "b"},
            correlation_id="c",
        )
        await later.assert_called_with("x", queue="later", key="k")
        await later.assert_any_call(key="k")
        with pytest.raises(AssertionError, match=r"(?s)queue:.*key:.*delay:"):
            await handle.assert_called_once_with(queue="r", key="k", delay="5m")


@pytest.mark.parametrize("own", ["out", "", "moved"])
@pytest.mark.parametrize("handled", [True, False])
async def test_a_publisher_records_what_it_publishes_elsewhere(
    broker: SqlBroker, own: str, handled: bool, tmp_path: Path
) -> None:
    publisher = broker.publisher(own)
    broker.subscriber("moved", forward_to="next")
    if handled:

        @broker.subscriber("elsewhere", retry_strategy=None)
        async def handle(body: str) -> None:
            if body == "bad":
                raise ValueError

    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")
    async with TestSqlBroker(broker, connect_only=False):
        await publisher.publish("x", queue="elsewhere", key="k", delay="1h")
        publisher.mock.assert_called_once_with("x")
        await publisher.assert_called_once_with("x", queue="elsewhere", key="k", delay="1h")
        await publisher.publish_batch("y", "z", queue="elsewhere")
        assert [call.args for call in publisher.mock.call_args_list] == [("x",), ("y",), ("z",)]
        for ends in ("rollback", "commit"):
            async with engine.connect() as connection:
                await publisher.publish(ends, queue="elsewhere", connection=connection)
                await getattr(connection, ends)()
            await broker.drain()
        publisher.mock.assert_called_with("commit")
        assert publisher.mock.call_count == 4
        if handled:
            with pytest.raises(ValueError):
                await publisher.publish("bad", queue="elsewhere")
            publisher.mock.assert_called_with("bad")
        await publisher.publish("once", queue="elsewhere", dedup_id="d")
        await publisher.publish("twice", queue="elsewhere", dedup_id="d")
        publisher.mock.assert_called_with("once" if not handled else "twice")
        if own == "out":
            await publisher.publish("own")
            publisher.mock.assert_called_with("own")
            assert [call.args[0] for call in publisher.mock.call_args_list].count("own") == 1
    await engine.dispose()


async def test_a_publisher_records_what_a_transaction_has_published_elsewhere(
    broker: SqlBroker, tmp_path: Path
) -> None:
    publisher = broker.publisher("out")

    @broker.subscriber("in", transactional=True, retry_strategy=None)
    async def handle(body: str) -> None:
        await publisher.publish(body, queue="elsewhere")
        if body == "bad":
            raise ValueError

    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")
    async with TestSqlBroker(broker, connect_only=False, engine=engine):
        with pytest.raises(ValueError):
            await broker.publish("bad", "in")
        publisher.mock.assert_not_called()
        await broker.publish("good", "in")
        await broker.drain()
        publisher.mock.assert_called_once_with("good")
    await engine.dispose()


async def test_the_handler_that_was_declared_last_takes_the_messages(broker: SqlBroker) -> None:
    """One of an earlier test is still declared."""
    publisher = broker.publisher("q")
    for number in range(5):

        @broker.subscriber("q")
        async def handle(body: int) -> None: ...

        async with TestSqlBroker(broker, connect_only=False):
            await broker.publish(number, "q")
            handle.mock.assert_called_once_with(number)
            publisher.mock.assert_called_once_with(number)


async def test_failed_assertions_name_what_waits_and_until_when(broker: SqlBroker) -> None:
    @broker.subscriber("q")
    async def handle() -> None:
        pass

    async with TestSqlBroker(broker) as br:
        await br.publish("x", "q", delay="1h")
        due = br.outbox("q")[0].due_at
        said = f"message 1 in queue 'q' waits until {due}".replace("+", r"\+")
        with pytest.raises(AssertionError, match=said):
            handle.mock.assert_called_once_with("x")
        with pytest.raises(AssertionError, match=said):
            await handle.assert_called_once_with("x")


async def test_batches_come_together(broker: SqlBroker) -> None:
    @broker.subscriber("q", batch=True)
    async def handle(bodies: list[int]) -> None:
        pass

    async with TestSqlBroker(broker) as br:
        assert len(await br.publish_batch(1, 2, 3, queue="q")) == 3
        handle.mock.assert_called_once_with([1, 2, 3])
        await br.publish(4, "q")
        handle.mock.assert_called_with([4])


@pytest.mark.parametrize("policy", list(AckPolicy))
async def test_ack_policies_are_the_real_ones(broker: SqlBroker, policy: AckPolicy) -> None:
    retries: Any = {} if policy is AckPolicy.ACK_FIRST else {"retry_strategy": LATER}

    @broker.subscriber("q", ack_policy=policy, **retries)
    async def handle(body: str, msg: SqlBrokerMessage) -> None:
        if policy is AckPolicy.MANUAL:
            await msg.ack()
        raise ValueError

    async with TestSqlBroker(broker) as br:
        with pytest.raises(ValueError):
            await br.publish("", "q")
        drained = await br.drain()
        assert len(drained.waiting) == (policy is AckPolicy.NACK_ON_ERROR)
        outcome = {AckPolicy.NACK_ON_ERROR: "nack", AckPolicy.REJECT_ON_ERROR: "reject"}
        assert drained.attempts[0].outcome == outcome.get(policy, "ack")


async def test_policies_are_the_real_ones(broker: SqlBroker) -> None:
    @broker.subscriber("once", policies=[Once(ttl="1h")])
    async def once() -> None:
        pass

    running = 0
    most = 0

    @broker.subscriber("one", policies=[Concurrency(1)], max_workers=5)
    async def one() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    async with TestSqlBroker(broker) as br:
        for _ in range(2):
            await br.publish("", "once", key="k")
        once.mock.assert_called_once()
        await asyncio.gather(*(br.publish(n, "one") for n in range(4)))
        assert (one.mock.call_count, most) == (4, 1)


async def test_order_is_the_real_one(broker: SqlBroker) -> None:
    @broker.subscriber("q", ordered=True, retry_strategy=LATER)
    async def handle(body: str) -> None:
        if body == "a":
            raise ValueError

    async with TestSqlBroker(broker) as br:
        with pytest.raises(ValueError):
            await br.publish("a", "q", key="k")
        await br.publish("b", "q", key="k")
        await br.publish("c", "q", key="other")
        assert [call.args[0] for call in handle.mock.call_args_list] == ["a", "c"]


async def test_setup_is_checked_as_ever() -> None:
    broker = unreachable()

    @broker.subscriber("q", handler_timeout=1)
    def handle() -> None:
        pass

    with pytest.raises(SetupError, match="handler_timeout"):
        async with TestSqlBroker(broker):
            pass


async def test_handler_timeout_is_real(broker: SqlBroker) -> None:
    @broker.subscriber("q", handler_timeout=0.05, retry_strategy=LATER)
    async def handle() -> None:
        await asyncio.sleep(60)

    async with TestSqlBroker(broker) as br:
        with pytest.raises(TimeoutError):
            await br.publish("", "q")


async def test_routers_prefixes_and_schemas() -> None:
    broker = unreachable(schema=SqlBrokerSchemaConfig(schema="app", message_table_name="mine"))
    router = SqlBrokerRouter(prefix="p-")
    publisher = router.publisher("out")

    @publisher
    @router.subscriber("in", wakeup="listen")
    async def handle(body: str) -> Any:
        return SqlBrokerResponse(body, key="k")

    broker.include_router(router)
    async with TestSqlBroker(broker) as br:
        await br.publish("x", "p-in")
        await publisher.assert_called_once_with("x", queue="p-out", key="k")


async def test_several_brokers_see_each_other() -> None:
    one, two = unreachable(), unreachable()
    out = one.publisher("answers")

    @out
    @one.subscriber("q")
    async def ask(body: str) -> str:
        return body.upper()

    @two.subscriber("answers")
    async def answer(body: str) -> None:
        pass

    async with TestSqlBroker(one, two) as (first, second):
        assert (first, second) == (one, two)
        await second.publish("x", "q")
        answer.mock.assert_called_once_with("X")
        out.mock.assert_called_once_with("X")


async def test_nested_tests_keep_their_calls(broker: SqlBroker) -> None:
    @broker.subscriber("q")
    async def handle(body: str) -> None:
        pass

    async with TestSqlBroker(broker) as br:
        await br.publish("outer", "q")
        async with TestSqlBroker(broker) as inner:
            await inner.publish("inner", "q")
            handle.mock.assert_called_once_with("inner")
            assert [m.body for m in inner.outbox()] == ["inner"]
        handle.mock.assert_called_once_with("outer")
        await br.publish("again", "q")
        assert handle.mock.call_count == 2
        assert [m.body for m in br.outbox()] == ["outer", "again"]


async def test_subscribers_start_and_stop_under_test(broker: SqlBroker) -> None:
    async with TestSqlBroker(broker) as br:
        subscriber = br.subscriber("q", persistent=False)
        got = []

        @subscriber
        async def handle(body: str) -> None:
            got.append(body)

        await br.publish("early", "q")
        assert got == []
        await subscriber.start()
        assert got == ["early"]
        await br.publish("on time", "q")
        await subscriber.stop()
        await br.publish("late", "q")
        assert got == ["early", "on time"]


async def test_paused_queues_wait(broker: SqlBroker) -> None:
    @broker.subscriber("q")
    async def handle() -> None:
        pass

    async with TestSqlBroker(broker) as br:
        await br.admin.pause("q")
        await br.publish("", "q")
        handle.mock.assert_not_called()
        await br.admin.resume("q")
        await br.drain()
        handle.mock.assert_called_once()


async def test_an_application_is_tested_with_its_broker(broker: SqlBroker) -> None:
    app = FastStream(broker)

    @broker.subscriber("q")
    async def handle() -> None:
        pass

    @app.after_startup
    async def begin() -> None:
        await broker.publish("started", "q")

    async with TestSqlBroker(broker, connect_only=True), TestApp(app):
        handle.mock.assert_called_once_with("started")


def test_asyncapi_can_be_tried_out(broker: SqlBroker) -> None:
    app = AsgiFastStream(broker, asyncapi_path="/docs")
    assert app.routes


async def test_direct_claims_and_locks_work(broker: SqlBroker) -> None:
    async with TestSqlBroker(broker) as br:
        await br.publish("x", "q")
        async with br.lock("k"):
            reservation = await br.reserve("q")
        assert reservation is not None
        assert reservation.body == "x"
        await reservation.commit()
        assert await br.pop("q") is None


async def test_a_last_error_of_blanks_is_none(broker: SqlBroker) -> None:
    async with TestSqlBroker(broker) as br:
        await br.publish("x", "q")
        reservation = await br.reserve("q")
        assert reservation is not None
        await reservation.rollback("1h", error=" \n ")
        [waiting] = (await br.drain()).waiting
        assert waiting.reason.endswith(", after 1 attempt (without an error)")


# -- transactions of the test's --------------------------------------------------------------------


async def test_publishes_wait_for_the_commit_of_their_transaction(
    broker: SqlBroker, tmp_path: Path
) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")

    @broker.subscriber("q")
    async def handle(body: str) -> None:
        pass

    async with TestSqlBroker(broker) as br:
        async with engine.begin() as connection:
            first = await br.publish("kept", "q", connection=connection)
            handle.mock.assert_not_called()
            assert br.outbox() == []
        await br.drain()
        handle.mock.assert_called_once_with("kept")
        assert [m.id for m in br.outbox()] == [first]
        async with AsyncSession(engine) as session:
            await br.publish("dropped", "q", session=session)
            await session.rollback()
            await br.publish("later", "q", session=session)
            nested = await session.begin_nested()
            await br.publish("undone", "q", session=session)
            await nested.rollback()
            await session.commit()
        await br.drain()
        assert [m.body for m in br.outbox()] == ["kept", "later"]
    await engine.dispose()


async def test_ids_that_a_transaction_was_told_are_its_messages(
    broker: SqlBroker, tmp_path: Path
) -> None:
    """Also those of others that go on at the same time, of one with a dedup_id, or rolled back."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")

    @broker.subscriber("q")
    async def handle(body: str) -> None: ...

    told: dict[int | None, str] = {}

    async def in_transaction(n: int, *, commit: bool = True) -> None:
        async with engine.connect() as connection:
            await connection.begin()
            for dedup_id in (None, "once"):
                body = f"{n} {dedup_id}"
                message_id = await broker.publish(
                    body, "q", connection=connection, dedup_id=dedup_id
                )
                assert message_id not in told
                if commit:
                    told[message_id] = body
            await (connection.commit if commit else connection.rollback)()

    async def plain(n: int) -> None:
        message_id = await broker.publish(str(n), "q")
        assert message_id not in told
        told[message_id] = str(n)

    async with TestSqlBroker(broker):
        await in_transaction(0)
        await broker.drain()
        await in_transaction(1, commit=False)
        calls = [in_transaction(n) for n in range(2, 6)]
        await asyncio.gather(*calls, *(plain(n) for n in range(6, 10)))
        await broker.drain()
        outbox = {message.id: message.body for message in broker.outbox()}
        assert len(outbox) == len(broker.outbox())
        assert outbox.items() <= told.items()
        assert sum("None" in body or body.isdigit() for body in outbox.values()) == 9
    await engine.dispose()


async def test_errors_after_a_commit_are_raised_by_drain(broker: SqlBroker, tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")

    @broker.subscriber("q", retry_strategy=LATER)
    async def handle() -> None:
        raise ValueError("late")

    async with TestSqlBroker(broker) as br:
        async with engine.begin() as connection:
            await br.publish("", "q", connection=connection)
        with pytest.raises(ValueError, match="late"):
            await br.drain(raise_errors=True)
    await engine.dispose()


async def test_transactional_handlers_need_the_engine(broker: SqlBroker, tmp_path: Path) -> None:
    @broker.subscriber("q", transactional=True, retry_strategy=LATER)
    async def handle(body: str, connection: SqlConnection, session: SqlSession) -> None:
        await connection.execute(text("INSERT INTO app VALUES (:body)"), {"body": body})
        if body == "bad":
            raise ValueError

    with pytest.raises(SetupError, match="engine="):
        async with TestSqlBroker(broker):
            pass
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE app (body text)"))
    async with TestSqlBroker(broker, engine=engine) as br:
        await br.publish("good", "q")
        with pytest.raises(ValueError):
            await br.publish("bad", "q")
        async with engine.begin() as connection:
            rows = await connection.execute(text("SELECT body FROM app"))
            assert rows.scalars().all() == ["good"]
            await br.publish("shared", "q", connection=connection)
        await br.drain()
        handle.mock.assert_called_with("shared")
    async with TestSqlBroker(broker, engine=engine) as br:
        await br.publish("once more", "q")
        assert [message.body for message in br.outbox()] == ["once more"]
    await engine.dispose()


@pytest.mark.parametrize("own", ["sqlite", "postgresql"])
async def test_a_publish_in_a_transactional_handler_is_delivered_after_its_commit(
    own: str, tmp_path: Path
) -> None:
    """It is committed with the handler's ack. What would be committed at once is refused, as the
    test's file has one writer."""
    file = f"sqlite+aiosqlite:///{tmp_path / 'app.db'}"
    broker = SqlBroker(file if own == "sqlite" else "postgresql+asyncpg://u@h/d", logger=None)
    refused: list[str] = []
    taken: list[str] = []

    @broker.subscriber("q", transactional=True, retry_strategy=None)
    async def handle(body: str) -> None:
        try:
            await broker.publish(body, "out", with_ack=False)
        except NotSupportedError as error:
            refused.append(str(error))
        assert await broker.publish(body, "out")
        assert body not in taken
        if body == "bad":
            raise ValueError

    @broker.subscriber("out")
    async def out(body: str) -> None:
        taken.append(body)

    engine = create_async_engine(file)
    async with TestSqlBroker(broker, engine=engine) as br:
        with pytest.raises(ValueError):
            await br.publish("bad", "q")
        await br.drain()
        assert not taken
        # The second one is due while the handler of the first publishes.
        await br.publish_batch("good", "fine", queue="q")
        await br.drain()
        assert sorted(taken) == ["fine", "good"]
    assert len(refused) == 3
    assert all("omit with_ack" in text and "TestSqlBroker" in text for text in refused)
    await engine.dispose()


@pytest.mark.parametrize("url", ["postgresql+asyncpg://u@h/d", "sqlite+aiosqlite://"])
async def test_only_a_file_of_sqlite_is_an_engine(broker: SqlBroker, url: str) -> None:
    with pytest.raises(SetupError, match="SQLite file"):
        async with TestSqlBroker(broker, engine=create_async_engine(url)):
            pass


# -- with the real database ------------------------------------------------------------------------


async def test_with_real_uses_the_brokers_own_database(tmp_path: Path) -> None:
    broker = SqlBroker(f"sqlite+aiosqlite:///{tmp_path / 'real.db'}")
    publisher = broker.publisher("out")

    @publisher
    @broker.subscriber("q")
    async def handle(body: str) -> str:
        return body.upper()

    await broker.create_tables()
    async with TestSqlBroker(broker, with_real=True) as br:
        assert not isinstance(br.start, Mock)
        await br.publish("x", "q")
        await handle.wait_call(60)
        await handle.assert_called_once_with("x", queue="q")
        while not publisher.mock.called:
            await asyncio.sleep(0.01)
        publisher.mock.assert_called_once_with("X")
    await broker.stop()
    with pytest.raises(SetupError, match="with_real"):
        TestSqlBroker(broker, with_real=True, engine=broker.engine)


async def test_context_and_middlewares_are_there(broker: SqlBroker) -> None:
    seen: list[Any] = []

    @broker.subscriber("q")
    async def handle(body: dict[str, int], own: OwnBroker) -> None:
        seen.append((json.dumps(body), own))

    async with TestSqlBroker(broker) as br:
        await br.publish({"a": 1}, "q")
    assert seen == [('{"a": 1}', broker)]


async def test_a_request_returns_the_reply_of_its_handler() -> None:
    broker = unreachable()

    @broker.subscriber("double")
    async def double(n: int) -> int:
        if n < 0:
            raise ValueError("negative")
        return 2 * n

    @broker.subscriber("later", policies=[Debounce("1h")])
    async def later(n: int) -> int:
        return n

    async with TestSqlBroker(broker) as br:
        replies = await asyncio.gather(*(br.request(n, "double") for n in range(5)))
        assert [await reply.decode() for reply in replies] == [0, 2, 4, 6, 8]
        with pytest.raises(ValueError, match="negative"):
            await br.request(-1, "double")
        with pytest.raises(TimeoutError, match="'later': its first attempt sent none"):
            await br.request(1, "later", key="k")
        with pytest.raises(SubscriberNotFound, match="'nowhere'"):
            await br.request(1, "nowhere")


async def test_single_messages_are_taken_under_test() -> None:
    broker = unreachable()
    jobs = broker.subscriber("jobs")
    async with TestSqlBroker(broker) as br:
        await br.publish("one", "jobs")
        message = await jobs.get_one(timeout=60)
        assert message is not None
        assert await message.decode() == "one"
        await message.ack()
        assert (await br.drain()).waiting == []


async def test_waits_of_the_test_itself_end_without_a_clock(broker: SqlBroker) -> None:
    """A limit on a time that stands still would never be reached."""
    subscriber = broker.subscriber("single")
    async with asyncio.timeout(240), TestSqlBroker(broker) as br:
        assert await subscriber.get_one(timeout=0.01) is None
        assert await br.pop("q", wait=0.01) is None
        assert await br.reserve("q", wait=0.01) is None
        async with br.lock("k"):
            with pytest.raises(LockNotAcquiredError):
                async with br.lock("k", wait=0.01):
                    pass
        await br.admin.pause("single")
        assert await subscriber.get_one(timeout=0.01) is None
        await br.admin.resume("single")
        coming = asyncio.create_task(subscriber.get_one(timeout=60))
        await asyncio.sleep(0)
        await br.publish("hi", "single")
        message = await coming
        assert message is not None
        assert await message.decode() == "hi"


@pytest.mark.parametrize("circle", ["publish", "answers", "retries"])
async def test_what_goes_on_without_end_is_refused(broker: SqlBroker, circle: str) -> None:
    """A test that hangs says nothing."""
    again = ConstantRetryStrategy(delay_seconds=0, max_attempts=None, max_total_delay_seconds=None)
    subscriber = broker.subscriber("q", retry_strategy=again, max_deliveries=None)

    @subscriber
    async def handle(body: str) -> Any:
        if circle == "retries":
            raise ValueError
        if circle == "publish":
            await broker.publish(body, "q")
        return SqlBrokerResponse(body, queue="q") if circle == "answers" else None

    broker.publisher("q")(handle)
    async with asyncio.timeout(240), TestSqlBroker(broker) as br:
        with pytest.raises(AssertionError, match="in a loop, or a retry has no delay"):
            await br.publish("x", "q")


async def test_many_answers_of_one_handler_are_no_circle(broker: SqlBroker) -> None:
    @broker.subscriber("q")
    @broker.publisher("out", batch=True)
    async def spread(count: int) -> list[int]:
        return list(range(count))

    @broker.subscriber("out")
    async def take(_: int) -> None: ...

    async with TestSqlBroker(broker) as br:
        await br.publish(150, "q")
        assert take.mock.call_count == 150


async def test_a_transaction_begins_with_the_publish(broker: SqlBroker, tmp_path: Path) -> None:
    """Though nothing is written in it: a rollback drops the publish, a COMMIT delivers it."""
    subscriber = broker.subscriber("q")

    @subscriber
    async def handle(body: str) -> None: ...

    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")
    async with TestSqlBroker(broker) as br:
        async with engine.connect() as connection:
            await br.publish("dropped", "q", connection=connection)
            await connection.rollback()
            await br.publish("kept", "q", connection=connection)
            await connection.commit()
        await br.drain()
        handle.mock.assert_called_once_with("kept")
        with create_engine("sqlite://").connect() as plain:
            br.publish_sync("dropped", "q", connection=plain)
            plain.rollback()
            br.publish_sync("also kept", "q", connection=plain)
            plain.commit()
        await br.drain()
        assert [call.args[0] for call in handle.mock.call_args_list] == ["kept", "also kept"]
    await engine.dispose()


async def test_a_request_that_is_over_is_not_asked_again(broker: SqlBroker) -> None:
    """Its time is real, so it would never expire in a test whose time stands still. It may end
    before its message is written, while that is claimed, or in its handler.
    """

    @broker.subscriber("q")
    async def handle(body: str) -> str:
        if body == "slow":
            await asyncio.sleep(60)
        return body

    async with asyncio.timeout(240), TestSqlBroker(broker) as br:
        for milliseconds in range(1, 21):
            with pytest.raises(TimeoutError, match="no reply"):
                await br.request("slow", "q", timeout=milliseconds / 1_000)
            assert await (await br.request("quick", "q")).decode() == "quick"
        for turns in range(0, 60, 3):
            asking = asyncio.create_task(br.request("slow", "q", timeout=60))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert await (await br.request("quick", "q")).decode() == "quick"
        assert (await br.drain()).waiting == []


def test_other_event_loops_are_refused() -> None:
    """Such as trio's, in which coroutines run without asyncio."""
    entering = TestSqlBroker(unreachable()).__aenter__()
    with pytest.raises(SetupError, match="needs asyncio"):
        entering.send(None)


def test_a_clock_is_a_virtual_clock(broker: SqlBroker) -> None:
    with pytest.raises(SetupError, match="clock must be a VirtualClock"):
        TestSqlBroker(broker, clock="10:00")  # type: ignore[call-overload]


async def test_brokers_with_their_own_tables_have_their_own_errors() -> None:
    """Messages of two tables have the same ids."""
    failing = unreachable()
    schema = SqlBrokerSchemaConfig(message_table_name="other", message_archive_table_name="kept")
    working = unreachable(schema=schema)

    @failing.subscriber("q")
    async def fail(_: str) -> None:
        await asyncio.sleep(0.01)
        raise ValueError

    @working.subscriber("q")
    async def work(_: str) -> None:
        await asyncio.sleep(0.01)

    async with TestSqlBroker(failing, working):
        for brokers in ((failing, working), (working, failing)):
            results = await asyncio.gather(
                *(broker.publish("x", "q") for broker in brokers), return_exceptions=True
            )
            kinds = dict(zip(brokers, map(type, results), strict=True))
            assert kinds == {failing: ValueError, working: int}


async def test_a_batch_publisher_is_called_with_its_messages(broker: SqlBroker) -> None:
    """As FastStream's other batch publishers are."""
    doubled = broker.publisher("out", batch=True)

    @doubled
    @broker.subscriber("q", batch=True)
    async def double(numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    async with TestSqlBroker(broker) as br:
        await br.publish_batch(1, 2, 3, queue="q")
        doubled.mock.assert_called_once_with([2, 4, 6])
        await doubled.assert_called_once_with([2, 4, 6])
        assert [message.body for message in br.outbox("out")] == [2, 4, 6]


async def test_subscribers_of_the_test_are_alive(broker: SqlBroker) -> None:
    """For those who ask why a message waits."""
    clock = VirtualClock()
    subscriber = broker.subscriber("q", policies=[Throttle(1, "1h")])

    @subscriber
    async def handle(body: str) -> None: ...

    async with TestSqlBroker(broker, clock=clock) as br:
        await br.publish("x", "q")
        waiting = await br.publish("y", "q")
        assert waiting is not None
        await clock.advance("10m")
        assert [reason.code for reason in (await br.admin.explain(waiting)).reasons] == [
            "throttled"
        ]
        await subscriber.stop()
        reasons = (await br.admin.explain(waiting)).reasons
        assert [reason.code for reason in reasons] == ["no_live_subscriber"]
