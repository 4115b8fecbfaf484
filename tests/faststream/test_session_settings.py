"""Settings of the application's sessions under which statements would fail: refused by name, or
harmless."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.exceptions import SetupError
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


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
async def test_a_limit_of_rows_is_refused(with_setting: Brokers) -> None:
    async with with_setting("sql_select_limit = 10") as broker:
        await broker.create_tables()
        told = r"sql_select_limit is 10.*SET SESSION sql_select_limit=18446744073709551615"
        with pytest.raises(SetupError, match=told):
            await broker.start()


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
async def test_safe_updates_are_refused_where_they_stop_settlements(with_setting: Brokers) -> None:
    async with with_setting("sql_safe_updates = 1") as broker:
        await broker.create_tables()
        told = r"sql_safe_updates is on.*SET SESSION sql_safe_updates=0"
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
