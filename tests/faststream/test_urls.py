"""MySQL and MariaDB under each other's URLs: mysql+… leads to both, mariadb+… to MariaDB."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import inspect, make_url, select
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.core.policies import Debounce
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.migrate import upgrade
from tests.faststream.conftest import QUICK
from tests.helpers import MYSQL, eventually

on_both = pytest.mark.parametrize("database", MYSQL, indirect=True)
by_each_driver = pytest.mark.parametrize("driver", ["aiomysql", "asyncmy"])
NAMES = {
    "usual": SqlBrokerSchemaConfig(),
    # Each is reserved by one of the two.
    "reserved": SqlBrokerSchemaConfig(
        message_table_name="rank", message_archive_table_name="offset"
    ),
}


@pytest.fixture
async def made() -> AsyncIterator[list[SqlBroker]]:
    """Brokers to stop, with their engines to dispose of."""
    brokers: list[SqlBroker] = []
    yield brokers
    for broker in brokers:
        await broker.stop()
        await broker.engine.dispose()


def broker_at(url: str, scheme: str, made: list[SqlBroker], **options: Any) -> SqlBroker:
    engine = create_async_engine(make_url(url).set(drivername=scheme))
    made.append(SqlBroker(engine, logger=None, **options))
    return made[-1]


@on_both
@by_each_driver
@pytest.mark.parametrize("way", ["create_tables", "migrations"])
@pytest.mark.parametrize("config", NAMES.values(), ids=NAMES)
async def test_a_mysql_url_leads_to_both(
    database_url: str, driver: str, way: str, config: SqlBrokerSchemaConfig, made: list[SqlBroker]
) -> None:
    broker = broker_at(database_url, f"mysql+{driver}", made, schema=config)
    if way == "create_tables":
        await broker.create_tables()
    else:
        async with broker.engine.begin() as connection:
            await connection.run_sync(lambda c: upgrade(c, config))
    seen: list[Any] = []

    @broker.subscriber("in", policies=[Debounce("300ms")], **QUICK)
    async def collect(body: Any) -> None:
        seen.append(body)

    await broker.start()
    ids = await broker.publish_batch(*range(10), queue="in", key="k")
    await eventually(lambda: seen and seen[-1] == 9)

    async def archived() -> bool:
        table = broker._store.tables.archive
        async with broker.engine.connect() as connection:
            return set(await connection.scalars(select(table.c.id))) == set(ids)

    await eventually(archived)
    async with broker.engine.connect() as connection:
        names = await connection.run_sync(lambda c: inspect(c).get_table_names())
    assert config.message_table_name in names


@pytest.mark.parametrize("database", ["mysql"], indirect=True)
@by_each_driver
async def test_a_mariadb_url_that_leads_to_mysql_is_refused(
    database_url: str, driver: str, made: list[SqlBroker]
) -> None:
    """SQLAlchemy refuses it when it connects; the error says what to write instead."""
    broker = broker_at(database_url, f"mariadb+{driver}", made)
    broker.subscriber("in")(lambda body: None)
    for attempt in (broker.create_tables, broker.start, lambda: broker.publish({}, "in")):
        with pytest.raises(
            SetupError, match=r"not a MariaDB variant\. The URL begins with mariadb\+: use mysql\+"
        ):
            await attempt()
