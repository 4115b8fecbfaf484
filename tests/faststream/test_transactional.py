"""Promise 5: a handler's own SQL, its answers and its ack are committed together or not at all."""

import asyncio
from typing import Annotated, Any
from unittest.mock import patch

import pytest
from faststream import AckPolicy, Depends
from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    SetupError,
    SqlBroker,
    SqlBrokerMessage,
    SqlConnection,
    SqlSession,
    TransientStoreError,
)
from faststream_sqlbroker.annotations import SqlBrokerBatchMessage
from faststream_sqlbroker.flow.deliver import worker_ends
from faststream_sqlbroker.schema.types import clock
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually
from tests.proxy import COMMIT, proxied

pytestmark = pytest.mark.capability("`transactional=True`")
metadata = MetaData()
effects = Table(
    "effects",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("body", String(50), nullable=False),
)
TWICE = ConstantRetryStrategy(delay_seconds=0.01, max_attempts=2)
OPTIONS: Any = {**QUICK, "transactional": True, "retry_strategy": TWICE}


class Base(DeclarativeBase):
    """The session's tests use a mapped class."""


class Effect(Base):
    """A row of `effects`."""

    __tablename__ = "effects"
    id: Mapped[int] = mapped_column(primary_key=True)
    body: Mapped[str] = mapped_column(String(50))


@pytest.fixture
async def bodies(engine: AsyncEngine, broker: SqlBroker) -> Any:
    """The committed effects."""
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)

    async def read() -> list[str]:
        async with engine.connect() as connection:
            return sorted((await connection.execute(select(effects.c.body))).scalars())

    return read


@pytest.mark.parametrize("kind", ["connection", "session"])
async def test_effects_answers_and_ack_appear_together(
    broker: SqlBroker, look: Look, bodies: Any, kind: str
) -> None:
    seen: list[Any] = []

    async def check() -> None:
        """Other sessions see nothing yet."""
        if (
            look.engine.dialect.name != "sqlite"
        ):  # whose readers in WAL mode see the old state all the same
            seen.append((await bodies(), [r["state"] for r in await look.rows()]))

    if kind == "connection":

        @broker.subscriber("in", **OPTIONS)
        @broker.publisher("out")
        async def handle(body: str, connection: SqlConnection) -> str:
            await connection.execute(insert(effects).values(body=body))
            await broker.publish("in the transaction", "out", connection=connection)
            await broker.publish("with the ack", "out", with_ack=True)
            await check()
            return body
    else:

        @broker.subscriber("in", **OPTIONS)
        @broker.publisher("out")
        async def handle_session(body: str, session: SqlSession) -> str:
            session.add(Effect(body=body))
            await session.commit()  # only flushes
            await broker.publish("in the transaction", "out", session=session)
            await broker.publish("with the ack", "out", with_ack=True)
            session.add(Effect(body="not flushed by the handler"))
            await check()
            return body

    await broker.start()
    await broker.publish("x", "in")
    await eventually(lambda: look.rows(archive=True))
    assert [r["state"] for r in await look.rows(archive=True)] == ["COMPLETED"]
    assert len([r for r in await look.rows() if r["queue"] == "out"]) == 3
    assert await bodies() == (
        ["x"] if kind == "connection" else ["not flushed by the handler", "x"]
    )
    assert seen in ([], [([], ["PROCESSING"])])


@pytest.mark.parametrize("how", ["raise", "nack", "reject", "constraint", "commit", "rollback"])
async def test_nothing_is_committed_without_the_ack(
    broker: SqlBroker, look: Look, bodies: Any, how: str
) -> None:
    @broker.subscriber("in", **{**OPTIONS, "retry_strategy": None})
    @broker.publisher("out")
    async def handle(
        body: str, connection: SqlConnection, session: SqlSession, message: SqlBrokerMessage
    ) -> str:
        await connection.execute(insert(effects).values(id=7, body="effect"))
        await broker.publish("x", "out", with_ack=True)
        await broker.publish("x", "out", connection=connection)
        match how:
            case "raise":
                raise RuntimeError("after the effect")
            case "nack":
                await message.nack()
            case "reject":
                await message.reject(reason="no")
            case "constraint":
                session.add(Effect(id=7, body="the second of this id"))
            case "commit":
                await connection.commit()
            case "rollback":
                await connection.rollback()
        return "answer"

    await broker.start()
    await broker.publish("x", "in")
    [row] = await eventually(lambda: look.rows(archive=True))
    assert row["state"] == "FAILED"
    if how == "commit":
        assert "ended its transaction" in row["last_error"]
        return
    assert await bodies() == []
    assert await look.rows() == []
    expected = {
        "raise": "after the effect",
        "constraint": "IntegrityError",
        "rollback": "transaction ended before the ack",
    }
    assert expected.get(how, "") in (row["last_error"] or "")


async def test_a_failed_attempt_leaves_nothing_and_the_next_commits_once(
    broker: SqlBroker, look: Look, bodies: Any
) -> None:
    attempts: list[int] = []

    @broker.subscriber("in", **OPTIONS, max_workers=2)
    async def handle(body: str, connection: SqlConnection, message: SqlBrokerMessage) -> None:
        attempts.append(message.attempts_count)
        await connection.execute(insert(effects).values(body=body))
        if message.attempts_count == 0:
            raise RuntimeError

    await broker.start()
    await broker.publish_batch(*"abcdef", queue="in")
    rows = await look.archived(6)
    assert {(r["state"], r["attempts_count"]) for r in rows} == {("COMPLETED", 2)}
    assert await bodies() == list("abcdef")
    assert sorted(attempts) == [0] * 6 + [1] * 6


async def test_a_batch_commits_together(broker: SqlBroker, look: Look, bodies: Any) -> None:
    calls: list[list[str]] = []

    @broker.subscriber("in", **OPTIONS, batch=True)
    @broker.publisher("out")
    async def handle(
        batch: list[str], connection: SqlConnection, message: SqlBrokerBatchMessage
    ) -> str:
        calls.append(batch)
        for body in batch:
            await connection.execute(insert(effects).values(body=body))
        if len(calls) == 1:
            raise RuntimeError
        await message.messages[0].reject(reason="with its effects all the same")
        return "sum"

    await broker.publish_batch("a", "b", "c", queue="in")
    await broker.start()

    async def done() -> bool:
        return len(await look.rows(archive=True)) == 3

    await eventually(done)
    assert calls == [["a", "b", "c"]] * 2
    assert await bodies() == ["a", "b", "c"]
    states = [r["state"] for r in await look.rows(archive=True)]
    assert states == ["FAILED", "COMPLETED", "COMPLETED"]
    assert [r["queue"] for r in await look.rows()] == ["out"], "the answer goes with what was acked"


async def test_a_lost_lease_is_not_started(broker: SqlBroker, look: Look, bodies: Any) -> None:
    started: list[str] = []

    @broker.subscriber("in", **OPTIONS)
    async def handle(body: str, connection: SqlConnection) -> None:
        started.append(body)

    store = broker.config.store
    original = store.claim

    async def claim(*arguments: Any, **options: Any) -> Any:
        rows = await original(*arguments, **options)
        for row in (row for row in rows if row.id == stolen):
            async with look.engine.begin() as connection:
                await connection.execute(
                    text("UPDATE message SET lease_token = :t WHERE id = :id"),
                    {"t": _other(look), "id": row.id},
                )
        return rows

    with patch.object(store, "claim", claim):
        stolen, _ = await broker.publish_batch("stolen", "kept", queue="in")
        await broker.start()
        await eventually(lambda: look.rows(archive=True))
    assert started == ["kept"]
    assert [r["state"] for r in await look.rows()] == ["PROCESSING"]
    consumer = broker.subscribers[0].consumer  # type: ignore[attr-defined]
    assert consumer.inflight.lease_lost_count == 1


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_the_lock_is_the_lease(broker: SqlBroker, look: Look, bodies: Any) -> None:
    """An expired lease is neither released nor renewed while the handler's transaction lives, and
    works."""
    running = asyncio.Event()
    go_on = asyncio.Event()

    @broker.subscriber("in", **OPTIONS)
    async def handle(body: str, connection: SqlConnection) -> None:
        await connection.execute(insert(effects).values(body=body))
        running.set()
        await go_on.wait()

    store = broker._store
    original = store.claim

    async def claim(*arguments: Any, **options: Any) -> Any:
        rows = await original(*arguments, **options)
        if rows:
            async with look.engine.begin() as connection:
                over = update(look.tables.message).values(lease_expires_at=clock())
                await connection.execute(over)
        return rows

    # No other process looks for it before the handler has its lock.
    with patch.object(store, "claim", claim), patch.object(store, "release_stuck", return_value=0):
        await broker.start()
        await broker.publish("x", "in")
        await running.wait()
    [row] = await look.rows()
    assert await store.release_stuck(["in"], 10) == 0
    renewal = await store.renew_free([(row["id"], row["lease_token"])], 600.0)
    assert renewal == (set(), {row["id"]})
    assert await look.rows() == [row]
    go_on.set()
    [row] = await look.archived(1)
    assert (row["state"], row["deliveries_count"]) == ("COMPLETED", 1)
    assert await bodies() == ["x"]


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_a_session_that_dies_commits_nothing(
    broker: SqlBroker, look: Look, bodies: Any, engine: AsyncEngine
) -> None:
    """The lock goes with the session, so another may claim the message; ours cannot commit."""
    running = asyncio.Event()
    go_on = asyncio.Event()
    calls = []

    @broker.subscriber("in", **OPTIONS)
    async def handle(body: str, connection: SqlConnection) -> None:
        calls.append(body)
        await connection.execute(insert(effects).values(body=f"{body}{len(calls)}"))
        if len(calls) == 1:
            own = {"postgresql": "SELECT pg_backend_pid()"}.get(
                engine.dialect.name, "SELECT CONNECTION_ID()"
            )
            ids.append((await connection.execute(text(own))).scalar_one())
            running.set()
            await go_on.wait()

    ids: list[int] = []
    await broker.start()
    await broker.publish("x", "in")
    await running.wait()
    kill = {"postgresql": f"SELECT pg_terminate_backend({ids[0]})"}.get(
        engine.dialect.name, f"KILL {ids[0]}"
    )
    async with engine.connect() as connection:
        await connection.execute(text(kill))
    go_on.set()
    [row] = await look.archived(1)
    assert row["state"] == "COMPLETED"
    assert await bodies() == ["x2"]


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_an_unanswered_commit_is_written_once_or_done_again(
    look: Look, bodies: Any, database_url: str
) -> None:
    """It was committed: nothing more is written for that message, and its effect is there once."""
    async with proxied(database_url) as (proxy, url):
        engine = create_async_engine(url)
        broker = SqlBroker(engine, logger=None)

        @broker.subscriber("in", **{**OPTIONS, "release_stuck_interval": 60})
        @broker.publisher("out")
        async def handle(body: str, connection: SqlConnection) -> str:
            await connection.execute(insert(effects).values(body=body))
            await asyncio.gather(*(loop.stop() for loop in broker.subscribers[0].consumer._loops))  # type: ignore[attr-defined]
            proxy.swallow_answer_to = COMMIT
            return body

        await broker.start()
        await broker.publish("x", "in")
        consumer = broker.subscribers[0].consumer  # type: ignore[attr-defined]
        await eventually(lambda: consumer.inflight.settle_unknown_count == 1)
        await eventually(lambda: consumer.inflight.is_empty)  # its connection is let go of first
        assert await bodies() == ["x"]
        assert [r["state"] for r in await look.rows(archive=True)] == ["COMPLETED"]
        assert [r["queue"] for r in await look.rows()] == ["out"]
        await broker.stop()
        await engine.dispose()


async def test_a_handler_that_is_cancelled_commits_nothing(
    broker: SqlBroker, look: Look, bodies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_ends, "CANCEL_GRACE", 60.0)
    running = asyncio.Event()

    @broker.subscriber("in", **OPTIONS)
    async def handle(body: str, connection: SqlConnection, message: SqlBrokerMessage) -> None:
        await connection.execute(insert(effects).values(body=body))
        await message.ack()
        running.set()
        await asyncio.Event().wait()

    await broker.start()
    await broker.publish("x", "in")
    await running.wait()
    broker.config.broker_config.graceful_timeout = 0.05
    await broker.stop()
    assert await bodies() == []
    [row] = await look.rows()
    assert (row["state"], row["deliveries_count"], row["attempts_count"]) == ("PENDING", 1, 0)


async def test_without_a_connection_the_message_waits_uncharged(
    broker: SqlBroker, look: Look, bodies: Any
) -> None:
    @broker.subscriber("in", **OPTIONS)
    async def handle(body: str, connection: SqlConnection) -> None:
        await connection.execute(insert(effects).values(body=body))

    handlers = broker.config.store.handlers
    failures = []
    original = handlers.open

    def failing() -> Any:
        if len(failures) < 2:
            failures.append(1)
            raise TransientStoreError("no connection")
        return original()

    with patch.object(handlers, "open", failing):
        await broker.start()
        await broker.publish("x", "in")
        [row] = await look.archived(1)
    assert (row["deliveries_count"], row["attempts_count"]) == (1, 1)
    assert await bodies() == ["x"]


async def test_impossible_options_are_refused(broker: SqlBroker, engine: AsyncEngine) -> None:
    for policy in (AckPolicy.ACK, AckPolicy.ACK_FIRST):
        with pytest.raises(
            SetupError, match=f"AckPolicy.{policy.name} acks even if the handler fails"
        ):
            broker.subscriber("q", transactional=True, ack_policy=policy)
    with pytest.raises(SetupError, match="transactional must be True or False"):
        broker.subscriber("q", transactional="yes")  # type: ignore[arg-type]
    first = SqlBroker(engine, logger=None)

    @first.subscriber("q", transactional=True)
    def synchronous(body: str) -> None: ...

    with pytest.raises(SetupError, match="synchronous handler 'synchronous'"):
        await first.start()
    second = SqlBroker(engine, logger=None)

    @second.subscriber("q")
    async def without(body: str, session: SqlSession) -> None: ...

    with pytest.raises(SetupError, match="add transactional=True"):
        await second.start()
    small = create_async_engine(engine.url, pool_size=2, max_overflow=0)
    third = SqlBroker(small, logger=None)

    @third.subscriber("q", transactional=True)
    async def handle(body: str) -> None: ...

    with pytest.raises(SetupError, match="has none left for handlers"):
        await third.start()
    for other in (first, second, third):
        await other.stop()
    await small.dispose()


async def test_a_dependency_may_ask_for_the_transaction(
    broker: SqlBroker, look: Look, bodies: Any
) -> None:
    async def audit(connection: SqlConnection) -> None:
        await connection.execute(insert(effects).values(body="audit"))

    @broker.subscriber("in", **OPTIONS)
    async def handle(body: str, _: Annotated[None, Depends(audit)]) -> None: ...

    await broker.start()
    await broker.publish("x", "in")
    await look.archived(1)
    assert await bodies() == ["audit"]


async def test_a_constraint_found_at_the_commit_rolls_back(
    broker: SqlBroker, look: Look, bodies: Any
) -> None:
    """Deferred constraints (PostgreSQL) speak only then; here the COMMIT is made to fail
    everywhere."""
    from sqlalchemy import event

    refused: list[int] = []

    @broker.subscriber("in", **OPTIONS)
    async def handle(body: str, connection: SqlConnection, message: SqlBrokerMessage) -> None:
        await connection.execute(insert(effects).values(body=body))
        if not refused:
            event.listen(connection.sync_connection, "commit", refuse)

    def refuse(_connection: Any) -> None:
        if not refused:
            refused.append(1)
            raise IntegrityError("COMMIT", {}, Exception("deferred"))

    await broker.start()
    await broker.publish("x", "in")
    [row] = await look.archived(1)
    assert (row["state"], row["attempts_count"]) == ("COMPLETED", 2)
    assert await bodies() == ["x"]


def _other(look: Look) -> Any:
    from uuid import uuid4

    return uuid4() if look.engine.dialect.name == "postgresql" else uuid4().hex
