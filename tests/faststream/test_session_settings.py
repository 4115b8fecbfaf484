"""Settings of the application's sessions under which statements would fail: refused by name, or
harmless."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.exceptions import SetupError, TransientStoreError
from tests.faststream.conftest import Look
from tests.helpers import eventually

Brokers = Callable[[str], AbstractAsyncContextManager[SqlBroker]]


@pytest.fixture
def with_setting(database_url: str) -> Brokers:
    """A broker whose sessions have a setting, on a database without the tables."""

    @asynccontextmanager
    async def brokers(setting: str) -> AsyncIterator[SqlBroker]:
        command = {"init_command": f"SET SESSION {setting}"}
        engine = create_async_engine(database_url, connect_args=command)
        broker = SqlBroker(engine)
        yield broker
        await broker.stop()
        await engine.dispose()

    return brokers


LIMITED = "sql_select_limit = 10", r"sql_select_limit is 10.*sql_select_limit=18446744073709551615"
SAFE = "sql_safe_updates = 1", r"sql_safe_updates is on.*SET SESSION sql_safe_updates=0"


@pytest.mark.parametrize(
    ("database", "setting", "told"),
    [("mariadb", *LIMITED), ("mysql", *LIMITED), ("mariadb", *SAFE)],
    indirect=["database"],
)
async def test_a_setting_that_stops_settlements_is_refused(
    with_setting: Brokers, setting: str, told: str
) -> None:
    async with with_setting(setting) as broker:
        await broker.create_tables()
        with pytest.raises(SetupError, match=told):
            await broker.start()


@pytest.mark.parametrize("database", ["mysql"], indirect=True)
async def test_safe_updates_change_nothing_on_mysql(with_setting: Brokers) -> None:
    handled: list[str] = []
    async with with_setting("sql_safe_updates = 1") as broker:
        await broker.create_tables()

        @broker.subscriber("q")
        async def handle(body: str) -> None:
            handled.append(body)

        await broker.publish("popped", "other")
        popped = await broker.pop("other")
        assert popped is not None
        await broker.admin.pause("q")
        await broker.admin.resume("q")
        await broker.start()
        for body in ("first", "second"):
            await broker.publish(body, "q", dedup_id=body)
        look = Look(broker.engine)
        assert [row["state"] for row in await look.archived(3)] == ["COMPLETED"] * 3
        await eventually(lambda: sorted(handled) == ["first", "second"])


def postgresql(url: str, driver: str, setting: str, value: str) -> AsyncEngine:
    """An engine whose sessions have a setting."""
    options: dict[str, Any] = {"options": f"-c {setting}={value}"}
    if driver == "asyncpg":
        options = {"server_settings": {setting: value}}
    place = make_url(url).set(drivername=f"postgresql+{driver}")
    return create_async_engine(place, connect_args=options)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_a_date_style_that_psycopg_cannot_read_is_refused(database_url: str) -> None:
    """asyncpg reads times as numbers."""
    for driver in ("asyncpg", "psycopg"):
        broker = SqlBroker(postgresql(database_url, driver, "DateStyle", "German"))
        await broker.create_tables()
        if driver == "asyncpg":
            await broker.start()
        else:
            with pytest.raises(
                SetupError, match=r"DateStyle must be 'ISO' .*got 'German.*DateStyle=ISO"
            ):
                await broker.start()
        await broker.stop()
        await broker.engine.dispose()


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
@pytest.mark.parametrize("kind", ["produces", "consumes"])
async def test_sessions_that_may_only_read_are_told_at_the_start(
    database: str, database_url: str, engine: AsyncEngine, kind: str
) -> None:
    """Each statement of the broker that writes would fail."""
    await SqlBroker(engine).create_tables()
    arguments: dict[str, Any] = {"init_command": "SET SESSION TRANSACTION READ ONLY"}
    if database == "postgresql":
        arguments = {"server_settings": {"default_transaction_read_only": "on"}}
    reading = create_async_engine(database_url, connect_args=arguments)
    broker = SqlBroker(reading)
    if kind == "produces":
        broker.publisher("q")
    else:
        broker.subscriber("q")(print)
    with pytest.raises(TransientStoreError, match=r"(?i)read.only transaction"):
        await broker.start()
    health = await broker.admin.health()
    assert [text for text in health.problems if "read" in text.lower() and "only" in text.lower()]
    await broker.stop()
    await reading.dispose()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_quoted_names_of_types_are_the_same_types(database_url: str, driver: str) -> None:
    broker = SqlBroker(postgresql(database_url, driver, "quote_all_identifiers", "on"))
    await broker.create_tables()
    await broker.start()
    await broker.stop()
    await broker.engine.dispose()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_the_session_that_listens_may_idle(database_url: str) -> None:
    """Where the application's sessions may not: another one that idles ends before."""
    engine = postgresql(database_url, "asyncpg", "idle_session_timeout", "300")
    broker = SqlBroker(engine)
    broker.subscriber("q")(print)
    look = create_async_engine(database_url)
    listens = text("SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN %'")

    async def listening() -> list[int]:
        async with look.connect() as connection:
            return list((await connection.scalars(listens)).all())

    await broker.create_tables()
    await broker.start()
    before = await eventually(listening)
    ended = asyncio.Event()
    idles = await engine.connect()
    driver = (await idles.get_raw_connection()).driver_connection
    assert driver is not None
    driver.add_termination_listener(lambda _connection: ended.set())
    await asyncio.wait_for(ended.wait(), 120)
    assert await listening() == before
    await idles.invalidate()
    await broker.stop()
    await engine.dispose()
    await look.dispose()
