"""`SqlProducer`: publishing from synchronous code, on every database."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from faststream_sqlbroker import (
    AccessError,
    MaxDepth,
    MessageTooLargeError,
    MissingExtraError,
    PublishError,
    QueueFullError,
    SetupError,
    SqlBroker,
    SqlBrokerResponse,
    SqlBrokerSchemaConfig,
    SqlProducer,
    StoreError,
    TestSqlBroker,
    TransientStoreError,
)
from tests.accounts import account
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually
from tests.plans.conftest import SYNC_DRIVERS

pytestmark = pytest.mark.capability("`SqlProducer`: publishing without a broker, Django too")


@pytest.fixture
async def sync_engine(database_url: str, broker: SqlBroker) -> AsyncIterator[Engine]:
    """Another program's engine, on the broker's tables."""
    url = make_url(database_url)
    name = url.get_backend_name()
    engine = create_engine(url.set(drivername=SYNC_DRIVERS.get(name, name)))
    yield engine
    engine.dispose()


@pytest.fixture
def producer(sync_engine: Engine) -> SqlProducer:
    return SqlProducer(sync_engine)


class Order(BaseModel):
    number: int


async def test_what_it_publishes_is_handled(producer: SqlProducer, broker: SqlBroker) -> None:
    got: list[Any] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: Any) -> None:
        got.append(body)

    await broker.start()
    # In a thread: SQLite has one writer, and a broker whose event loop stands still keeps it out.
    first = await asyncio.to_thread(producer.publish, {"a": "é"}, "q")
    assert first is not None
    ids = await asyncio.to_thread(
        producer.publish_batch, Order(number=3), b"bytes", None, "text", queue="q"
    )
    assert None not in ids
    assert len({first, *ids}) == 5
    await eventually(lambda: len(got) == 5)
    for body in ({"a": "é"}, {"number": 3}, "bytes", "text"):
        assert body in got or (body == "bytes" and b"bytes" in got)


async def test_its_rows_are_those_of_the_broker(
    producer: SqlProducer, broker: SqlBroker, look: Look
) -> None:
    options: Any = {
        "headers": {"h": [1]},
        "priority": 7,
        "key": "k",
        "delay": "1.5h",
        "expires_in": 7200,
        "correlation_id": "c",
        "reply_to": "r",
    }
    producer.publish({"a": 1}, "q", **options)
    await broker.publish({"a": 1}, "q", **options)
    ours, theirs = await look.rows()
    assert ours["next_attempt_at"] - ours["created_at"] == (
        theirs["next_attempt_at"] - theirs["created_at"]
    )
    moments = ("id", "created_at", "next_attempt_at", "expires_at")
    assert {k: v for k, v in ours.items() if k not in moments} == {
        k: v for k, v in theirs.items() if k not in moments
    }


async def test_a_batch_has_messages_with_options_of_their_own(
    producer: SqlProducer, look: Look
) -> None:
    ids = producer.publish_batch(
        "a",
        SqlBrokerResponse("b", queue="other", dedup_id="d"),
        SqlBrokerResponse("c", queue="other", dedup_id="d"),
        queue="q",
    )
    assert ids[2] is None
    rows = await look.rows()
    assert [(row["id"], row["queue"]) for row in rows] == [(ids[0], "q"), (ids[1], "other")]
    assert producer.publish_batch() == []


async def test_it_publishes_in_the_callers_transaction(
    producer: SqlProducer, sync_engine: Engine, look: Look
) -> None:
    with sync_engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id INTEGER)"))
    with sync_engine.connect() as connection:
        with connection.begin() as transaction:
            connection.execute(text("INSERT INTO orders VALUES (1)"))
            assert producer.publish(1, "q", connection=connection)
            producer.publish_batch(2, 3, queue="q", connection=connection)
            transaction.rollback()
        assert connection.scalar(text("SELECT count(*) FROM orders")) == 0
    assert await look.rows() == []
    with Session(sync_engine) as session, session.begin():
        session.execute(text("INSERT INTO orders VALUES (1)"))
        producer.publish(4, "q", session=session)
    [row] = await look.rows()
    assert row["payload"] == b"4"


async def test_an_own_transaction_is_whole_or_nothing(
    producer: SqlProducer, look: Look, sync_engine: Engine
) -> None:
    with pytest.raises(PublishError, match="priority"):
        producer.publish_batch("a", SqlBrokerResponse("b", priority=1_000), queue="q")
    with pytest.raises(PublishError, match="with_ack is only for handlers"):
        producer.publish("a", "q", with_ack=True)  # type: ignore[call-arg]
    with sync_engine.connect() as connection, pytest.raises(PublishError, match="not both"):
        producer.publish("a", "q", connection=connection, session=Session(sync_engine))
    with pytest.raises(PublishError, match="must not be empty"):
        producer.publish("a")
    with pytest.raises(PublishError, match=r"use publish_batch\(\*messages\)"):
        producer.publish_batch(["a", "b"], queue="q")
    assert await look.rows() == []


async def test_an_engine_in_autocommit_has_transactions_too(
    sync_engine: Engine, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    autocommit = create_engine(sync_engine.url, isolation_level="AUTOCOMMIT")
    producer = SqlProducer(autocommit, notify=True)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(producer._store, "notify", fail)
        with pytest.raises(ZeroDivisionError):
            producer.publish("a", "q")
    assert await look.rows() == []
    producer.publish("b", "q")
    autocommit.dispose()
    assert [row["payload"] for row in await look.rows()] == [b"b"]
    with pytest.raises(SetupError, match="AUTOCOMMIT"):
        SqlProducer(sync_engine.execution_options(isolation_level="AUTOCOMMIT"))


async def test_a_connection_must_lead_to_its_database(
    producer: SqlProducer, sync_engine: Engine, tmp_path: Any
) -> None:
    elsewhere = create_engine(f"sqlite:///{tmp_path}/other.db")
    with (
        elsewhere.connect() as connection,
        pytest.raises(PublishError, match="connection to the broker's database"),
    ):
        producer.publish(1, "q", connection=connection)
    elsewhere.dispose()
    with sync_engine.connect() as connection:
        pass
    with pytest.raises(PublishError, match="connection is closed"):
        producer.publish(1, "q", connection=connection)


async def test_limits_are_those_of_the_broker(sync_engine: Engine, look: Look) -> None:
    producer = SqlProducer(
        sync_engine, max_payload=10, max_depth={"q": 2, "d": MaxDepth(1, "drop")}
    )
    producer.publish_batch(1, 2, queue="q")
    with pytest.raises(QueueFullError):
        producer.publish(3, "q")
    assert producer.publish_batch(1, queue="d") != [None]
    assert producer.publish_batch(SqlBrokerResponse(2, queue="e"), 3, queue="d")[1] is None
    with pytest.raises(MessageTooLargeError):
        producer.publish("x" * 11, "other")
    assert [row["queue"] for row in await look.rows()] == ["q", "q", "d", "e"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_near_a_large_limit_not_every_publish_counts(
    sync_engine: Engine, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = 0

    def slow_count(*_: Any) -> int:
        nonlocal counted
        counted += 1
        clock.time += 1.0
        return 99_999

    clock = FrozenTime()
    producer = SqlProducer(sync_engine, max_depth={"q": 100_000})
    assert producer._limits is not None
    monkeypatch.setattr(producer._limits, "_clock", clock)
    monkeypatch.setattr(producer._store, "read_sync", slow_count)
    for n in range(5):
        producer.publish(n, "q")
    assert counted == 1
    clock.time += 10.0
    producer.publish(5, "q")
    assert counted == 2
    assert len(await look.rows()) == 6


class FrozenTime:
    """A clock that moves when it is told to."""

    time = 100.0

    def monotonic(self) -> float:
        return self.time


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_settings_of_the_applications_connections_stay(
    sync_engine: Engine, producer: SqlProducer, look: Look
) -> None:
    """A pooled connection of SQLite comes back as it was, also after an error."""

    def settings() -> list[int]:
        with sync_engine.connect() as connection:
            return [
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("busy_timeout", "synchronous")
            ]

    with sync_engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 1234")
        connection.exec_driver_sql("PRAGMA synchronous = 1")
    assert settings() == [1234, 1]
    producer.publish(1, "q")
    assert settings() == [1234, 1]
    with pytest.raises(StoreError):
        SqlProducer(
            sync_engine, schema=SqlBrokerSchemaConfig(message_table_name="missing")
        ).publish(1, "q")
    assert settings() == [1234, 1]
    assert len(await look.rows()) == 1


async def test_a_dropped_message_is_told_to_the_log(
    sync_engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    producer = SqlProducer(sync_engine, max_depth={"q": MaxDepth(1, "drop")})
    producer.publish(1, "q")
    with caplog.at_level(logging.WARNING, "faststream_sqlbroker.producer"):
        assert producer.publish(2, "q") is None
    assert "dropped 1 more messages" in caplog.text


async def test_subscribers_are_told_if_asked(
    sync_engine: Engine, broker: SqlBroker, database: str
) -> None:
    """Without that they would look in an hour."""
    got: list[int] = []

    @broker.subscriber("q", max_fetch_interval=3600 if database == "postgresql" else 0.05)
    async def handle(body: int) -> None:
        got.append(body)

    await broker.start()
    await eventually(lambda: database != "postgresql" or broker._wakeups.is_listening)
    telling = SqlProducer(sync_engine, notify=True)
    await asyncio.to_thread(telling.publish, 1, "q")
    await eventually(lambda: got == [1])


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_errors_of_the_database_are_ours(
    broker: SqlBroker, database_url: str, engine: AsyncEngine
) -> None:
    url = make_url(database_url)
    sync = url.set(drivername=SYNC_DRIVERS[url.get_backend_name()])
    with account(database_url) as user:
        denied = SqlProducer(sync.set(username=user.name, password="Plain-1"))
        with pytest.raises(AccessError):
            denied.publish(1, "q")
        denied._store._database.dispose()
    nowhere = SqlProducer(sync.set(port=1))
    with pytest.raises(TransientStoreError):
        nowhere.publish(1, "q")
    await broker.stop()


async def test_without_tables_it_says_so(engine: AsyncEngine, database_url: str) -> None:
    url = make_url(database_url)
    name = url.get_backend_name()
    producer = SqlProducer(url.set(drivername=SYNC_DRIVERS.get(name, name)))
    with pytest.raises(StoreError, match="message"):
        producer.publish(1, "q")
    producer._store._database.dispose()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_only_a_synchronous_database_will_do(engine: AsyncEngine) -> None:
    for wrong in (engine, None, 5):
        with pytest.raises(SetupError, match="needs a synchronous Engine"):
            SqlProducer(wrong)
    for wrong in ("sqlite+aiosqlite:///x.db", engine.url, engine.sync_engine):
        with pytest.raises(SetupError, match=r"needs a synchronous Engine.* with aiosqlite"):
            SqlProducer(wrong)
    for wrong in ("nonsense", "mysql+nonsense://x", "postgresql://u:secret@host:port/x"):
        with pytest.raises(SetupError, match="cannot create an engine") as caught:
            SqlProducer(wrong)
        assert "secret" not in str(caught.value)
    with pytest.raises(MissingExtraError, match="'pg8000' is not installed"):
        SqlProducer("postgresql+pg8000://x")
    with pytest.raises(SetupError, match="max_payload"):
        SqlProducer("sqlite:///x.db", max_payload=0)
    with pytest.raises(SetupError, match="MaxDepth"):
        SqlProducer("sqlite:///x.db", max_depth={"q": 0})


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_it_refuses_in_tests_without_a_database(
    producer: SqlProducer, broker: SqlBroker, look: Look
) -> None:
    """What it wrote elsewhere would reach no handler of the test."""

    @broker.subscriber("q")
    async def handle(_body: Any) -> None: ...

    async with TestSqlBroker(broker):
        with pytest.raises(PublishError, match="which TestSqlBroker does not use"):
            producer.publish("x", "q")
        with pytest.raises(PublishError, match="pass with_real=True to TestSqlBroker"):
            producer.publish_batch("x", queue="q")
    assert await look.rows() == []
    assert producer.publish("y", "q") is not None
