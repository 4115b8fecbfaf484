"""sqlbroker sql and migrate: the tables, shown and made."""

import json
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.exceptions import NotSupportedError, SchemaError, SetupError
from faststream_sqlbroker.schema.migrate import HEAD
from tests.faststream.test_operating_cli import Shell

pytestmark = pytest.mark.capability("`sqlbroker sql` and `migrate`: the tables' migrations")


@pytest.fixture
def shell(engine: AsyncEngine, database_url: str) -> Shell:
    """In a database without tables."""
    return Shell(database_url)


async def failure(shell: Shell, *words: str) -> BaseException | None:
    """What the command raises."""
    result = await shell.result(*words)
    assert result.exit_code != 0
    return result.exception


async def test_tables_are_made_once(shell: Shell, engine: AsyncEngine) -> None:
    planned = await shell.run("migrate", "--dry-run")
    assert "CREATE TABLE" in planned
    assert "Aborted" in await shell.run("migrate", answer="n\n", code=1)
    broker = SqlBroker(engine, logger=None)
    assert await broker._store.server.find_differences(), "nothing was made until now"
    made = await shell.run("migrate", "--yes", "--by", "Ann")
    assert f"from version none to {HEAD}" in made
    assert await broker._store.server.find_differences() == []
    assert f"are up to date at version {HEAD}" in await shell.run("migrate", "--yes")
    again = json.loads(await shell.run("migrate", "--json", "--yes"))
    assert again == {"from": HEAD, "to": HEAD, "sql": "", "done": False}
    [action] = await broker.admin.audit()
    assert (action.action, action.by, action.arguments) == ("migrate", "Ann", {"to": HEAD})


async def test_the_printed_sql_makes_the_tables(
    shell: Shell, engine: AsyncEngine, database: str
) -> None:
    kind = "mysql" if database == "mariadb" else database
    printed = await shell.run("sql", "--database", kind, "--to", HEAD)
    assert printed == await shell.run("sql")
    shown = await shell.json("sql", "--to", HEAD)
    assert shown == {"functions": False, "since": None, "to": HEAD, "sql": printed}
    async with engine.begin() as connection:
        for statement in filter(str.strip, printed.split(";\n")):
            if statement.strip() not in {"BEGIN", "COMMIT"}:
                await connection.execute(text(statement.replace(":", "\\:")))
    assert f"are up to date at version {HEAD}" in await shell.run("migrate", "--yes")
    broker = SqlBroker(engine, logger=None)
    assert await broker._store.server.find_differences() == []
    await broker.publish("x", "q")
    assert await broker.pop("q") is not None


async def test_tables_of_an_application_are_left_to_its_migrations(
    shell: Shell, engine: AsyncEngine
) -> None:
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    async with engine.begin() as connection:
        await connection.execute(text("DELETE FROM message_schema_version"))
    error = await failure(shell, "migrate", "--yes")
    assert isinstance(error, SchemaError)
    assert "has no version, so the migrations of your application created it" in str(error)


async def test_newer_tables_are_left_alone(shell: Shell, engine: AsyncEngine) -> None:
    await SqlBroker(engine, logger=None).create_tables()
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE message_schema_version SET version_num = '9999'"))
    error = await failure(shell, "migrate", "--yes")
    assert isinstance(error, SchemaError)
    assert "upgrade the package" in str(error)


async def test_sql_needs_no_database(tmp_path: Any, database: str) -> None:
    if database != "sqlite":
        pytest.skip("nothing is connected to, so one is as good as another")
    shell = Shell("")
    for kind in ("postgresql", "mysql", "mariadb", "sqlite"):
        shown = await shell.run("--message-table", "job", "sql", "--database", kind)
        assert "CREATE TABLE job " in shown
        assert shown.count("CREATE TABLE job_policy_state ") == 1
    assert "sqlbroker_publish" in await shell.run("sql", "--database", "postgresql", "--functions")
    unknown = await failure(shell, "sql", "--database", "oracle")
    assert isinstance(unknown, SetupError)
    assert "postgresql, mysql, sqlite or mariadb, got 'oracle'" in str(unknown)
    version = await failure(shell, "sql", "--database", "sqlite", "--since", "2")
    assert isinstance(version, SetupError)
    assert f"--since must be one of {HEAD}, head" in str(version)
    none = await failure(shell, "sql", "--database", "sqlite", "--functions")
    assert isinstance(none, NotSupportedError)


async def test_a_script_is_never_asked(shell: Shell) -> None:
    error = await failure(shell, "migrate", "--json")
    assert isinstance(error, SetupError)
    assert "--json cannot ask for confirmation" in str(error)
