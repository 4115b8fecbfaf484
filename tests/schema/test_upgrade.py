"""Tables of the previous version are upgraded while they hold messages."""

from importlib import import_module
from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, insert, inspect, select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.exceptions import SchemaError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.migrate import create_all, migrate, render, upgrade, versions
from faststream_sqlbroker.schema.tables import Tables, build_tables
from faststream_sqlbroker.schema.validate import differences
from tests.helpers import MYSQL

pytestmark = pytest.mark.capability("Alembic migrations and validation at start")

CONFIG = SqlBrokerSchemaConfig()
NOW = build_tables(CONFIG)
BEFORE = build_tables(CONFIG, revision="0001")


def old_tables(connection: Connection) -> None:
    """The tables of version 0001, with a message in each."""
    migrate(CONFIG, connection=connection, to="0001")
    write(connection, BEFORE)


def write(connection: Connection, tables: Tables) -> None:
    """The row that a process of the version of `tables` writes."""
    assert tables.archive is not None
    found = connection.execute(insert(tables.message).values(queue="q", payload=b"1"))
    assert found.inserted_primary_key is not None
    [id_] = found.inserted_primary_key
    columns = [column.name for column in tables.message.columns if column.name in tables.archive.c]
    kept = select(tables.message.c[*columns]).where(tables.message.c.id == id_)
    connection.execute(
        insert(tables.archive).from_select(
            columns,
            kept.with_only_columns(
                *(
                    text("'COMPLETED'") if name == "state" else tables.message.c[name]
                    for name in columns
                )
            ),
        )
    )
    connection.execute(insert(tables.policy_state).values(scope="s", key=str(id_)))


async def test_a_table_with_messages_is_upgraded(engine: AsyncEngine) -> None:
    """A process of the version before goes on writing: what it does not know has a default."""
    async with engine.begin() as connection:
        await connection.run_sync(old_tables)
        assert len(await connection.run_sync(lambda c: differences(c, NOW))) >= 7
    async with engine.begin() as connection:
        await connection.run_sync(lambda c: upgrade(c, CONFIG))
    async with engine.begin() as connection:
        assert await connection.run_sync(lambda c: differences(c, NOW)) == []
        assert await connection.run_sync(lambda c: differences(c, BEFORE)) == []
        await connection.run_sync(lambda c: write(c, BEFORE))
        await connection.run_sync(lambda c: write(c, NOW))
        for table in (NOW.message, NOW.archive):
            assert table is not None
            found = (await connection.execute(select(table.c.hops, table.c.policy_key))).all()
            assert [tuple(row) for row in found] == [(0, None)] * 3
        assert (
            await connection.scalar(text("SELECT version_num FROM message_schema_version"))
            == "0003"
        )


async def test_an_upgrade_that_ended_half_way_goes_on(engine: AsyncEngine) -> None:
    """MySQL and MariaDB commit each statement."""
    async with engine.begin() as connection:
        await connection.run_sync(old_tables)
        await connection.execute(
            text("ALTER TABLE message ADD COLUMN hops SMALLINT DEFAULT 0 NOT NULL")
        )
        await connection.run_sync(lambda c: upgrade(c, CONFIG))
        assert await connection.run_sync(lambda c: differences(c, NOW)) == []


@pytest.mark.parametrize("database", ["postgresql", *MYSQL], indirect=True)
async def test_no_row_is_written_anew(engine: AsyncEngine, database: str) -> None:
    """MySQL and MariaDB refuse ALGORITHM=INSTANT where they would have to; PostgreSQL would make a
    new file.

    MariaDB's message table is the exception: it has an indexed virtual column.
    """

    def steps(connection: Connection) -> None:
        for statement in render("mysql", since="0001").split(";"):
            lines = [line for line in statement.splitlines() if not line.startswith("--")]
            text_ = " ".join(lines).strip()
            table = "" if database == "mysql" else "message_"
            instant = text_.startswith(f"ALTER TABLE {table}")
            if text_:
                connection.exec_driver_sql(f"{text_}, ALGORITHM=INSTANT" if instant else text_)

    files = text("SELECT pg_relation_filenode('message'), pg_relation_filenode('message_archive')")
    async with engine.begin() as connection:
        await connection.run_sync(old_tables)
        if database == "postgresql":
            before = (await connection.execute(files)).all()
            await connection.run_sync(lambda c: upgrade(c, CONFIG))
            assert (await connection.execute(files)).all() == before
        else:
            await connection.run_sync(steps)
        assert await connection.run_sync(lambda c: differences(c, NOW)) == []


async def test_create_tables_leaves_old_tables_and_the_start_says_what_to_do(
    engine: AsyncEngine,
) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(old_tables)
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    with pytest.raises(SchemaError, match=r"upgrade them by .*schema\.migrate\.upgrade") as caught:
        await broker.start()
    assert "column message.hops is missing: ALTER TABLE message ADD COLUMN" in str(caught.value)
    await broker.stop()
    async with engine.begin() as connection:
        await connection.run_sync(lambda c: upgrade(c, CONFIG))
    await broker.create_tables()
    await broker.start()
    await broker.stop()


async def test_the_newest_version_can_be_taken_back(engine: AsyncEngine) -> None:
    def back(connection: Connection) -> list[str]:
        upgrade(connection, CONFIG)
        options = {"opts": {"sqlbroker_config": CONFIG}}
        with Operations.context(MigrationContext.configure(connection, **options)):
            for version in ("0003_errors", "0002_hops"):
                import_module(f"faststream_sqlbroker.schema.versions.{version}").downgrade()
        return differences(connection, BEFORE)

    async with engine.begin() as connection:
        assert await connection.run_sync(back) == []
        assert await connection.run_sync(lambda c: differences(c, NOW)) != []


@pytest.mark.parametrize("name", ["postgresql", "mysql", "sqlite"])
def test_each_version_is_rendered_by_itself(name: str) -> None:
    assert list(versions()) == ["0001", "0002", "0003"]
    first = render(name, to="0001")
    second = render(name, since="0001")
    assert "CREATE TABLE message (" in first
    assert "hops" not in first
    assert "CREATE TABLE" not in second
    assert "ADD COLUMN hops SMALLINT" in second
    third = render(name, since="0002")
    assert "error_fingerprint" not in first
    assert "ADD COLUMN error_fingerprint" in third
    assert "hops" not in third


async def test_created_tables_are_those_of_the_newest_version(engine: AsyncEngine) -> None:
    """`create_tables` and the migrations both make them, with their columns in the same order."""

    def columns(connection: Connection) -> Any:
        return {
            table.name: [column["name"] for column in inspect(connection).get_columns(table.name)]
            for table in NOW.ours
        }

    async with engine.begin() as connection:
        await connection.run_sync(lambda c: create_all(c, NOW))
        created = await connection.run_sync(columns)
        for table in (*NOW.ours, NOW.version):
            await connection.execute(text(f"DROP TABLE {table.name}"))
        await connection.run_sync(lambda c: upgrade(c, CONFIG))
        assert await connection.run_sync(columns) == created
