"""The migrations of the package make the tables that this version needs, and take them back."""

from importlib import import_module
from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.exceptions import SchemaError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.migrate import (
    HEAD,
    create_all,
    list_versions,
    render_migrations,
    upgrade,
)
from faststream_sqlbroker.schema.tables import build_tables

pytestmark = pytest.mark.capability("Alembic migrations and validation at start")

CONFIG = SqlBrokerSchemaConfig()
NOW = build_tables(CONFIG)


async def test_create_tables_leaves_other_tables_and_the_start_says_what_to_do(
    engine: AsyncEngine,
) -> None:
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE message DROP COLUMN hops"))
    await broker.create_tables()
    with pytest.raises(
        SchemaError, match=r"upgrade them with .*schema\.migrate\.upgrade"
    ) as caught:
        await broker.start()
    await broker.stop()
    [line] = [each for each in str(caught.value).splitlines() if each.startswith("  - ")]
    what, _, mend = line.partition(": ")
    assert what.endswith("column message.hops is missing")
    assert mend.startswith("ALTER TABLE message ADD COLUMN")
    async with engine.begin() as connection:
        await connection.execute(text(mend))
    await broker.start()
    await broker.stop()


async def test_the_first_version_can_be_taken_back(engine: AsyncEngine) -> None:
    def back(connection: Connection) -> list[str]:
        upgrade(connection, CONFIG)
        options = {"opts": {"sqlbroker_config": CONFIG}}
        with Operations.context(MigrationContext.configure(connection, **options)):
            import_module("faststream_sqlbroker.schema.versions.0001_initial").downgrade()
        return inspect(connection).get_table_names()

    async with engine.begin() as connection:
        left = await connection.run_sync(back)
    assert [name for name in left if name.startswith("message")] == ["message_schema_version"]


@pytest.mark.parametrize("name", ["postgresql", "mysql", "sqlite"])
def test_each_version_is_rendered_by_itself(name: str) -> None:
    assert list(list_versions()) == [HEAD] == ["0001"]
    assert "CREATE TABLE message (" in render_migrations(name, to=HEAD)
    assert "CREATE" not in render_migrations(name, since=HEAD)


async def test_created_tables_are_those_of_the_newest_version(engine: AsyncEngine) -> None:
    """`create_tables` and the migrations both make them, with their columns in the same order."""

    def columns(connection: Connection) -> Any:
        return {
            table.name: [column["name"] for column in inspect(connection).get_columns(table.name)]
            for table in NOW.broker_tables
        }

    async with engine.begin() as connection:
        await connection.run_sync(lambda c: create_all(c, NOW))
        created = await connection.run_sync(columns)
        for table in (*NOW.broker_tables, NOW.version):
            await connection.execute(text(f"DROP TABLE {table.name}"))
        await connection.run_sync(lambda c: upgrade(c, CONFIG))
        assert await connection.run_sync(columns) == created
