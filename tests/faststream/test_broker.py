"""The broker: connect, start, stop, ping, and wrong arguments."""

import asyncio
import io
import logging
import pkgutil
import re
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SchemaError, SetupError, SqlBroker, StoreError
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually


async def test_stop_before_start(broker: SqlBroker) -> None:
    await broker.stop()
    assert broker.running is False


async def test_a_broker_works_again_after_a_stop(broker: SqlBroker, look: Look) -> None:
    bodies: list[Any] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: Any) -> None:
        bodies.append(body)

    for n in range(3):
        await broker.start()
        await broker.publish({"n": n}, "q")
        await look.archived(n + 1)
        await broker.stop()
        assert broker.running is False
    assert bodies == [{"n": 0}, {"n": 1}, {"n": 2}]


async def test_a_stopped_broker_takes_nothing(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK)
    async def handle(body: Any) -> None: ...

    await broker.start()
    await broker.stop()
    await broker.publish("later", "q")
    assert (await look.in_state("PENDING"))["deliveries_count"] == 0


async def test_the_context_manager_only_connects(broker: SqlBroker) -> None:
    async with broker as connected:
        assert connected.running is False
        assert await connected.ping(60.0)


async def test_missing_tables_are_logged_in_one_line_with_the_remedy(
    engine: AsyncEngine,
) -> None:
    """`faststream run` prints it before its traceback. The installed package has what it names."""
    said = io.StringIO()
    heard = logging.getLogger("missing tables")
    heard.addHandler(handler := logging.StreamHandler(said))
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    broker = SqlBroker(engine, logger=heard)
    with pytest.raises(SchemaError) as caught:
        await broker.start()
    first = str(caught.value).splitlines()[0]
    assert said.getvalue() == f"CRITICAL {first}\n"
    assert first.startswith("the broker's tables are missing: in development, create them with ")
    assert "on_startup=[broker.create_tables]" in first
    [named] = re.findall(r"(faststream_sqlbroker(?:\.\w+)+)\(connection\)", first)
    upgrade = pkgutil.resolve_name(named)
    async with engine.begin() as connection:
        await connection.run_sync(upgrade)
    await broker.start()
    await broker.stop()


async def test_missing_tables_are_named_with_the_remedy(engine: AsyncEngine) -> None:
    broker = SqlBroker(engine, logger=None)
    with pytest.raises(SchemaError) as caught:
        await broker.start()
    assert "create_tables" in str(caught.value)
    assert "migrations" in str(caught.value)
    assert len(str(caught.value).splitlines()) > 2
    assert broker.running is False
    await broker.stop()


async def test_validation_can_be_left_out(engine: AsyncEngine) -> None:
    broker = SqlBroker(engine, logger=None, validate_schema_on_start=False)
    await broker.start()
    assert broker.running is True
    await broker.stop()


async def test_create_tables_may_be_repeated(broker: SqlBroker) -> None:
    await broker.create_tables()
    await broker.start()


async def test_the_callers_engine_survives(broker: SqlBroker, engine: AsyncEngine) -> None:
    pool = engine.pool
    await broker.start()
    await broker.stop()
    assert engine.pool is pool
    assert broker.config.broker_config.engine is engine  # the name that the existing package has
    async with engine.connect() as connection:
        assert await connection.scalar(text("SELECT 1")) == 1


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_an_engine_of_its_own(database_url: str) -> None:
    broker = SqlBroker(engine=database_url, logger=None)
    await broker.create_tables()
    for n in range(2):
        await broker.start()
        assert await broker.publish("x", "q") == n + 1
        await broker.stop()


@pytest.mark.parametrize("wrong", [None, 5, object(), "no url", "sqlite+aiosqlite:///:memory:"])
def test_unsupported_engines_are_refused(wrong: Any) -> None:
    with pytest.raises(SetupError):
        SqlBroker(wrong)


def test_a_synchronous_engine_is_refused() -> None:
    with pytest.raises(SetupError, match="AsyncEngine"):
        SqlBroker(create_engine("sqlite://"))  # type: ignore[arg-type]


def test_a_wrong_url_does_not_show_its_password() -> None:
    with pytest.raises(SetupError) as caught:
        SqlBroker("nonsense+nothing://user:hunter2@host/name")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("seconds", [90.5, "90.5s", "1m30s500ms", timedelta(seconds=90.5)])
async def test_times_are_durations(engine: AsyncEngine, seconds: Any) -> None:
    """P13."""
    broker = SqlBroker(engine, logger=None, statement_timeout=seconds, graceful_timeout=seconds)
    config: Any = broker.config
    assert (config.store.statement_timeout, config.graceful_timeout) == (90.5, 90.5)
    await broker.connect()
    await broker.create_tables()
    assert await broker.ping(seconds)
    assert await broker.ping(None)
    await broker.stop()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("value", ["5", "-1s", -1, float("nan"), True, b"1s"])
async def test_an_invalid_duration_is_refused(engine: AsyncEngine, value: Any) -> None:
    for name in ("statement_timeout", "graceful_timeout"):
        with pytest.raises(SetupError, match=rf"^{name} "):
            SqlBroker(engine, logger=None, **{name: value})
    with pytest.raises(SetupError, match=r"^timeout "):
        await SqlBroker(engine, logger=None).ping(value)


async def test_ping_sees_a_loop_that_fails(
    broker: SqlBroker, engine: AsyncEngine, heard: Heard
) -> None:
    @broker.subscriber("q", **QUICK)
    async def handle(body: Any) -> None: ...

    await broker.start()
    assert await broker.ping(60.0)
    async with engine.begin() as connection:
        await connection.execute(text("DROP TABLE message"))

    async def unhealthy() -> bool:
        return not await broker.ping(60.0)

    await eventually(unhealthy)
    await eventually(lambda: heard.texts("failed"))


async def test_publishing_without_tables(engine: AsyncEngine) -> None:
    broker = SqlBroker(engine, logger=None)
    with pytest.raises(StoreError):
        await broker.publish("x", "q")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_start_logs_the_startup_warnings(
    database_url: str, logger: logging.Logger, heard: Heard
) -> None:
    engine = create_async_engine(database_url, pool_size=1, max_overflow=0)
    broker = SqlBroker(engine, logger=logger)

    @broker.subscriber("q", handler_timeout=5)
    async def limited(body: str) -> None: ...

    await broker.create_tables()
    await broker.start()
    assert len(heard.texts("raise pool_size", logging.WARNING)) == 1
    assert not heard.texts("a handler that hangs")
    await broker.stop()

    @broker.subscriber("p")
    async def unlimited(body: str) -> None: ...

    await broker.start()
    assert len(heard.texts("a handler that hangs")) == 1
    assert not heard.texts("a handler that hangs", logging.INFO)
    await broker.stop()
    await engine.dispose()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_brokers_own_logger_has_a_column_for_the_queue(
    engine: AsyncEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    # FastStream keeps the logger of a name, with the stream of its first broker.
    logging.getLogger("faststream.access.sqlbroker").handlers.clear()
    broker = SqlBroker(engine)
    done = asyncio.Event()

    @broker.subscriber("a-rather-long-queue")
    async def handle(body: str) -> None:
        done.set()

    await broker.create_tables()
    await broker.start()
    message_id = await broker.publish("x", "a-rather-long-queue")
    await done.wait()
    await broker.stop()
    said = capsys.readouterr().out
    assert f"a-rather-long-queue | {message_id}" in said
    broker.config.logger.set_level(logging.ERROR)


class AwaitingCodec:
    """A codec that must wait for something."""

    async def encode(self, msg: Any, serializer: Any = None) -> tuple[bytes, str | None]:
        await asyncio.sleep(0)
        return b"x", None

    async def decode(self, msg: Any) -> Any:
        return msg.body


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_codec_that_awaits_cannot_serve_synchronous_code(
    engine: AsyncEngine, database_url: str
) -> None:
    broker = SqlBroker(engine, codec=AwaitingCodec())  # type: ignore[arg-type]
    await broker.create_tables()
    sync = create_engine(database_url.replace("+aiosqlite", ""))
    refusal = r"encode\(\) awaits nothing, got AwaitingCodec"
    with sync.begin() as connection, pytest.raises(SetupError, match=refusal):
        broker.publish_sync("x", "q", connection=connection)
    sync.dispose()
    assert await broker.publish("x", "q") is not None
