"""docs/howto/other_languages.md: its files and examples are run by their own tools."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker
from tests.accounts import account
from tests.faststream.conftest import Look
from tools.private import CannotStartError, find, needed

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "howto" / "other_languages.md").read_text()
SQL = dict(re.findall(r"```sql\n-- ([^\n]+)\n(.*?)```", PAGE, re.DOTALL))
NODE = dict(re.findall(r"```js\n// (\w+)\n(.*?)```", PAGE, re.DOTALL))
PACKAGES = {"pg": "pg@8", "mysql2": "mysql2@3"}
HOW = {"postgresql": "PostgreSQL", "mariadb": "MySQL and MariaDB", "mysql": "MySQL and MariaDB"}
servers_only = pytest.mark.parametrize("database", list(HOW), indirect=True)


def installed(program: str, package: str) -> str:
    """Its path; skip where it cannot be installed, fail in CI."""
    try:
        return needed(program, package)
    except CannotStartError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(error))


def client(url: URL, script: str) -> str:
    """What psql, or MySQL's client, prints."""
    if url.get_backend_name() == "postgresql":
        psql = installed("psql", "postgresql-client")
        command = [psql, "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d"]
        command.append(url.set(drivername="postgresql").render_as_string(hide_password=False))
        secret = {}
    else:
        # MariaDB's packages need not bring the old name.
        mysql = find("mysql") or installed("mariadb", "mariadb-client")
        command = [mysql, "-N", "--protocol=tcp", f"-h{url.host}", f"-P{url.port}"]
        command += [f"-u{url.username}", "--default-character-set=utf8mb4", str(url.database)]
        secret = {"MYSQL_PWD": url.password or ""}
    done = subprocess.run(
        command,
        input=script,
        env={**os.environ, **secret},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
async def url(database: str, database_url: str, engine: AsyncEngine) -> URL:
    """A database with the tables and, by the page's own file, the functions."""
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    await broker.stop()
    found = make_url(database_url)
    folder = "postgresql" if database == "postgresql" else "mysql"
    [name] = re.findall(rf"migrations/{folder}/(functions_v\d+\.sql)", PAGE)
    client(found, (ROOT / "migrations" / folder / name).read_text())
    return found


@pytest.fixture
def look(engine: AsyncEngine) -> Look:
    return Look(engine)


def test_every_example_is_run() -> None:
    assert set(SQL) == {
        "psql",
        "mysql",
        *(f"{what}, {how}" for what in ("grants", "trigger") for how in HOW.values()),
    }
    assert set(NODE) == set(PACKAGES)
    assert PAGE.count("```sql") == len(SQL)
    assert PAGE.count("```js") == len(NODE)


@servers_only
async def test_the_clients_session(url: URL, database: str, look: Look) -> None:
    printed = client(url, SQL["psql" if database == "postgresql" else "mysql"]).split()
    expected = ["1", "2", "3", "t"] if database == "postgresql" else ["1", "1"]
    assert printed == expected
    first, third = await look.rows()
    assert json.loads(first["payload"]) == {"id": 7, "item": "tea"}
    assert (third["payload"], third["headers"]) == (b"plain text", {"content-type": "text/plain"})
    [ended] = await look.rows(archive=True)
    assert (ended["reason"], ended["key"], ended["dedup_id"]) == ("cancelled", "ann", "order-8")
    assert ended["last_error"].endswith(": out of stock")


@servers_only
async def test_the_trigger(url: URL, database: str, look: Look) -> None:
    script = "CREATE TABLE orders (id bigint PRIMARY KEY, item varchar(50));\n"
    script += SQL[f"trigger, {HOW[database]}"]
    client(url, script + "INSERT INTO orders VALUES (1, 'tea'), (2, 'coffee');")
    rows = await look.rows()
    assert [json.loads(row["payload"]) for row in rows] == [
        {"id": 1, "item": "tea"},
        {"id": 2, "item": "coffee"},
    ]
    assert [row["key"] for row in rows] == ["tea", "coffee"]


@servers_only
async def test_the_grants_are_enough(url: URL, database: str, look: Look) -> None:
    with account(url.render_as_string(hide_password=False)) as user:
        for statement in SQL[f"grants, {HOW[database]}"].split(";"):
            if statement.strip():
                user.execute(re.sub(r" TO (?:shop_\w+|'shop_\w+'@'%')", " TO {who}", statement))
        engine = user.engine()
        calls = (
            ["SELECT sqlbroker_publish('q', '1')", "SELECT sqlbroker_cancel(1)"]
            if database == "postgresql"
            else ["CALL sqlbroker_publish('q', '1', NULL, @id)", "CALL sqlbroker_cancel(1, '', @c)"]
        )
        async with engine.begin() as connection:
            await connection.execute(text(calls[0]))
            assert await connection.scalar(text("SELECT sqlbroker_load('q')")) == 1
            await connection.execute(text(calls[1]))
        await engine.dispose()
    [ended] = await look.rows(archive=True)
    assert ended["last_error"].startswith("cancelled by sqlbroker_")


@pytest.fixture(scope="session")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Node's packages, by npm; skip where it cannot have them."""
    npm = installed("npm", "npm")
    folder = tmp_path_factory.mktemp("node")
    command = [npm, "install", "--no-audit", "--no-fund", *PACKAGES.values()]
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=True)
    except subprocess.SubprocessError as error:
        why = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"npm cannot install {', '.join(PACKAGES.values())}: {why[-300:]}")
    return folder


@servers_only
async def test_the_node_program(
    url: URL, database: str, look: Look, node_modules: Path, tmp_path: Path
) -> None:
    name = "pg" if database == "postgresql" else "mysql2"
    program = node_modules / f"{database}.js"
    program.write_text(NODE[name])
    plain = url.set(drivername="postgresql" if database == "postgresql" else "mysql")
    environment: dict[str, Any] = {
        **os.environ,
        "DATABASE_URL": plain.render_as_string(hide_password=False),
    }
    done = subprocess.run(
        [installed("node", "nodejs"), str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "id 1\n"), done.stderr
    [row] = await look.rows()
    assert json.loads(row["payload"]) == {"id": 9, "item": "coffee"}
    assert row["key"] == "ann"
    assert row["headers"] == {"content-type": "application/json", "source": "node"}
