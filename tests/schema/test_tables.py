"""The tables: created, migrated, compared, refused."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from sqlalchemy import Connection, MetaData, create_engine, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateTable

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import SchemaError, SetupError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.migrate import HEAD, create_all, upgrade
from faststream_sqlbroker.schema.tables import build_tables, include_tables
from faststream_sqlbroker.schema.validate import find_differences
from tests.helpers import MYSQL

pytestmark = pytest.mark.capability("Alembic migrations and validation at start")

CONFIG = SqlBrokerSchemaConfig()
TABLES = build_tables(CONFIG)
WAYS: dict[str, Callable[[Connection], None]] = {
    "create_tables": lambda c: create_all(c, TABLES),
    "migrations": lambda c: upgrade(c, CONFIG),
}


async def run(engine: AsyncEngine, work: Callable[[Connection], Any]) -> Any:
    async with engine.begin() as connection:
        return await connection.run_sync(work)


@pytest.mark.parametrize("way", WAYS)
async def test_both_ways_make_the_tables_that_are_needed(engine: AsyncEngine, way: str) -> None:
    """Twice is as good as once."""
    for _ in range(2):
        await run(engine, WAYS[way])
        assert await run(engine, lambda c: find_differences(c, TABLES)) == []
    assert await run(
        engine, lambda c: c.execute(text("SELECT * FROM message_schema_version")).all()
    ) == [(HEAD,)]


async def test_processes_that_start_together_create_the_tables_once(database_url: str) -> None:
    """As the workers of `faststream run --workers` do. Each has an engine of its own."""
    engines = [create_async_engine(database_url) for _ in range(6)]
    stores = [Store(engine, TABLES) for engine in engines]
    try:
        await asyncio.gather(*(store.server.create_tables() for store in stores))
        assert await stores[0].server.find_differences() == []
    finally:
        for engine in engines:
            await engine.dispose()


async def test_migrations_follow_created_tables(engine: AsyncEngine) -> None:
    """A development database can be handed to the migrations."""
    await run(engine, WAYS["create_tables"])
    await run(engine, WAYS["migrations"])
    assert await run(engine, lambda c: find_differences(c, TABLES)) == []


async def test_other_names_and_no_archive(engine: AsyncEngine) -> None:
    config = SqlBrokerSchemaConfig(message_table_name="Outbox_1", message_archive_table_name=None)
    await run(engine, lambda c: upgrade(c, config))
    assert await run(engine, lambda c: find_differences(c, build_tables(config))) == []
    names = await run(engine, lambda c: inspect(c).get_table_names())
    ours = sorted(n.lower() for n in names if "sqlite" not in n)
    assert ours == ["outbox_1", "outbox_1_policy_state", "outbox_1_schema_version"]
    store = Store(engine, build_tables(config))
    assert len(await store.insert([NewMessage("q", b"1")])) == 1


@pytest.mark.capability("tables in a schema of their own")
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_a_schema_of_its_own(engine: AsyncEngine) -> None:
    """Only PostgreSQL has schemas inside a database."""
    config = SqlBrokerSchemaConfig(schema="broker")
    await run(engine, lambda c: c.execute(text("CREATE SCHEMA broker")))
    await run(engine, lambda c: upgrade(c, config))
    store = Store(engine, build_tables(config))
    assert await store.server.find_differences() == []
    await store.insert([NewMessage("q", b"1")])
    assert [p.queue for p in await store.find_ready_pairs(["q"])] == ["q"]


BROKEN = {
    "a column": (
        "ALTER TABLE message DROP COLUMN last_error",
        "column message.last_error is missing: ALTER TABLE",
    ),
    "an index": (
        "DROP INDEX message_dedup{on}",
        "index message_dedup on message is missing: CREATE UNIQUE INDEX",
    ),
    "the archive": (
        "DROP TABLE message_archive",
        "table 'message_archive' is missing: CREATE TABLE",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_a_difference_is_named_with_its_remedy(
    engine: AsyncEngine, database: str, what: str
) -> None:
    await run(engine, WAYS["create_tables"])
    statement, expected = BROKEN[what]
    on = " ON message" if database in MYSQL else ""
    await run(engine, lambda c: c.execute(text(statement.format(on=on))))
    [line] = await run(engine, lambda c: find_differences(c, TABLES))
    assert line.startswith(expected)
    cure = line.partition(": ")[2]
    await run(engine, lambda c: c.exec_driver_sql(cure))
    left = await run(engine, lambda c: find_differences(c, TABLES))
    assert [d for d in left if not d.startswith("index message_archive")] == []


ALTERED = {
    "type": "ALTER COLUMN reason TYPE varchar(20)",
    "null": "ALTER COLUMN payload DROP NOT NULL",
    "default": "ALTER COLUMN archived_at DROP DEFAULT",
}


@pytest.mark.parametrize("what", ALTERED)
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_an_altered_column_is_named_with_its_remedy(engine: AsyncEngine, what: str) -> None:
    await run(engine, WAYS["create_tables"])
    await run(engine, lambda c: c.execute(text(f"ALTER TABLE message_archive {ALTERED[what]}")))
    [line] = await run(engine, lambda c: find_differences(c, TABLES))
    await run(engine, lambda c: c.exec_driver_sql(line.partition(": ")[2]))
    assert await run(engine, lambda c: find_differences(c, TABLES)) == []


@pytest.mark.parametrize("database", MYSQL, indirect=True)
async def test_an_altered_column_is_named_with_its_remedy_on_mysql(engine: AsyncEngine) -> None:
    await run(engine, WAYS["create_tables"])
    for change in ("reason VARCHAR(20)", "payload BLOB NULL", "attempts_count INT NOT NULL"):
        await run(
            engine,
            lambda c, change=change: c.execute(
                text(f"ALTER TABLE message_archive MODIFY {change}")
            ),
        )
    lines = await run(engine, lambda c: find_differences(c, TABLES))
    assert len(lines) == 4, lines  # the payload is both too small and nullable
    for line in lines:
        await run(engine, lambda c, line=line: c.exec_driver_sql(line.partition(": ")[2]))
    assert await run(engine, lambda c: find_differences(c, TABLES)) == []


async def test_the_users_own_columns_are_left_alone(engine: AsyncEngine) -> None:
    await run(engine, WAYS["create_tables"])
    await run(engine, lambda c: c.execute(text("ALTER TABLE message ADD COLUMN tenant INTEGER")))
    assert await run(engine, lambda c: find_differences(c, TABLES)) == []


OLD = (
    "CREATE TABLE message (id INTEGER PRIMARY KEY, queue VARCHAR(255), payload VARCHAR(9), "
    "state VARCHAR(9), deliveries_count INTEGER)"
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("ddl", "words"),
    [
        (OLD, "faststream-sqlbroker 0.1"),
        ("CREATE TABLE message (id INTEGER, body INTEGER)", "not a table of"),
    ],
)
async def test_a_foreign_table_is_refused_by_name(
    engine: AsyncEngine, way: str, ddl: str, words: str
) -> None:
    await run(engine, lambda c: c.execute(text(ddl)))
    with pytest.raises(SchemaError, match=f"table .*'message' .*{words}"):
        await run(engine, WAYS[way])
    [line] = await run(engine, lambda c: find_differences(c, TABLES))
    assert words in line


CHECKS = {
    "a priority out of range": {"priority": 101},
    "an unknown state": {"state": "DONE"},
    "a lease without a state": {"lease_token": "0" * 32},
    "a state without a lease": {"state": "PROCESSING"},
    "negative counts": {"attempts_count": -1},
}


@pytest.mark.parametrize("wrong", CHECKS.values(), ids=CHECKS)
async def test_the_database_refuses(engine: AsyncEngine, wrong: dict[str, Any]) -> None:
    await run(engine, WAYS["create_tables"])
    columns = ", ".join(["queue", "payload", *wrong])
    values = ", ".join(["'q'", "'x'", *(f":{name}" for name in wrong)])
    if engine.dialect.name == "postgresql":
        values = values.replace(":lease_token", "CAST(:lease_token AS uuid)")
    with pytest.raises(DBAPIError):
        await run(
            engine,
            lambda c: c.execute(text(f"INSERT INTO message ({columns}) VALUES ({values})"), wrong),
        )


async def test_ids_are_never_used_again(engine: AsyncEngine) -> None:
    store = Store(engine, TABLES)
    await store.server.create_tables()
    first = await store.insert([NewMessage("q", b"1"), NewMessage("q", b"2")])
    await run(engine, lambda c: c.execute(text("DELETE FROM message")))
    second = await store.insert([NewMessage("q", b"3")])
    assert second[0] not in first


async def test_a_naive_time_is_refused(engine: AsyncEngine) -> None:
    await run(engine, WAYS["create_tables"])
    naive = datetime(2030, 1, 1)
    with pytest.raises(StatementError, match="must have a time zone"):
        statement = insert(TABLES.message).values(queue="q", payload=b"", next_attempt_at=naive)
        await run(engine, lambda c: c.execute(statement))
    aware = datetime(2030, 1, 1, tzinfo=timezone.utc)
    statement = insert(TABLES.message).values(queue="q", payload=b"", next_attempt_at=aware)
    await run(engine, lambda c: c.execute(statement))
    assert await run(engine, lambda c: c.scalar(select(TABLES.message.c.next_attempt_at))) == aware


def test_tables_join_the_applications_metadata() -> None:
    metadata = MetaData()
    tables = include_tables(metadata, dialect_name="mysql")
    assert set(metadata.tables) == {"message", "message_archive", "message_policy_state"}
    assert "claimable" in tables.message.c
    assert "claimable" not in include_tables(MetaData()).message.c


@pytest.mark.parametrize("name", ["mysql", "mariadb"])
@pytest.mark.parametrize("url", ["mysql+pymysql://", "mariadb+pymysql://"])
def test_an_applications_tables_are_the_same_under_either_name_of_mariadb(
    name: str, url: str
) -> None:
    """Of a server, the URL gives the name; of the tables, the application."""
    tables = include_tables(MetaData(), dialect_name=name)
    dialect = create_engine(url).dialect
    for table in tables.broker_tables:
        made = str(CreateTable(table).compile(dialect=dialect))
        assert "ENGINE=InnoDB" in made
        assert "COLLATE utf8mb4_bin" in made.rpartition(")")[2]


async def test_autogenerate_finds_nothing_to_change(engine: AsyncEngine) -> None:
    """Users' own Alembic agrees with ours."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    await run(engine, WAYS["migrations"])
    metadata = MetaData()
    include_tables(metadata, dialect_name=engine.dialect.name)

    def compare(connection: Connection) -> list[Any]:
        ours = set(metadata.tables)
        options = {"include_name": lambda name, kind, _p: kind != "table" or name in ours}
        return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)

    assert await run(engine, compare) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"message_table_name": ""},
        {"message_table_name": "x" * 41},
        {"message_table_name": "a;b"},
        {"message_table_name": None},
        {"message_archive_table_name": "1a"},
        {"schema": "a.b"},
        {"message_archive_table_name": "message"},
        {"message_archive_table_name": "message_schema_version"},
        {"message_archive_table_name": "message_policy_state"},
    ],
)
def test_wrong_names_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SetupError):
        SqlBrokerSchemaConfig(**wrong)
