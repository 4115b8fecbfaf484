"""The count of messages with a lookup value reads their records, however many others there are."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.dialects import sqlite

from faststream_sqlbroker.database.mirror_store import build_count_statement
from faststream_sqlbroker.database.mysql.dialect import MysqlDialect
from faststream_sqlbroker.database.parts.mirror_rows import MIRROR
from faststream_sqlbroker.database.postgresql.dialect import PostgresqlDialect
from faststream_sqlbroker.database.sqlite.dialect import SqliteDialect
from faststream_sqlbroker.schema.migrate import create_all
from tests.helpers import mysql_numbers
from tests.plans.conftest import FEWER, TABLES, Crowds, analyze
from tests.plans.test_mysql import reads
from tests.plans.test_postgresql import nodes

RECORDS = 100_000
OF_ONE = 100
"""Messages with one lookup value."""
NUMBERS = {
    "postgresql": f"generate_series(1, {RECORDS}) AS s(n)",
    "sqlite": "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s "
    f"WHERE n < {RECORDS // FEWER}) SELECT n FROM s)",
}
INFO = '{"text": "i"}'


def fill_mirrored(engine: Engine) -> None:
    """Messages, and the record of each, as the tables hold them after a publish with `lookup=`."""
    kind = engine.dialect.name
    records = RECORDS if kind == "postgresql" else RECORDS // FEWER
    numbers = NUMBERS.get(kind) or f"{mysql_numbers(records)} s"
    lookup = f"id % {records // OF_ONE}"
    if kind in {"postgresql", "sqlite"}:
        key, name, scope = '"key"', "CAST(id AS TEXT)", f"'{MIRROR}' || ({lookup})"
    else:
        key, name, scope = "`key`", "CAST(id AS CHAR)", f"CONCAT('{MIRROR}', {lookup})"
    with engine.begin() as connection:
        create_all(connection, TABLES)
        insert = f"INSERT INTO message_policy_state (scope, {key}, counter, info)"
        for statement in (
            f"INSERT INTO message (queue, payload) SELECT 'q', 'x' FROM {numbers}",
            f"{insert} SELECT {scope}, {name}, id, '{INFO}' FROM message",
        ):
            # Without parameters these drivers take a percent sign as it is.
            connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
    if kind != "sqlite":
        for table in ("message", "message_policy_state"):
            analyze(engine, table)


@pytest.fixture
def mirrored(database: str, crowds: Crowds) -> Iterator[Engine]:
    """A synchronous engine on these tables; statistics are fresh."""
    with crowds.of(database, fill_mirrored) as engine:
        yield engine


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("info", [None, "i"])
def test_p11_postgresql_counts_by_the_index(mirrored: Engine, info: str | None) -> None:
    """P11."""
    dialect = PostgresqlDialect(TABLES, mirrored.dialect)
    statement = build_count_statement(dialect, "7", info).compile(
        mirrored, compile_kwargs={"literal_binds": True}
    )
    with mirrored.connect() as connection:
        found = connection.exec_driver_sql(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
        ).scalar_one()
        assert connection.scalar(build_count_statement(dialect, "7", info)) == OF_ONE
    plan = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
    assert not [each for each in nodes(plan) if each["Node Type"] == "Seq Scan"], plan
    used = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    assert used <= 8 * OF_ONE, plan


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
@pytest.mark.parametrize("info", [None, "i"])
def test_p11_mysql_counts_by_the_index(mirrored: Engine, info: str | None) -> None:
    """P11."""
    dialect = MysqlDialect(TABLES, mirrored.dialect)
    with mirrored.connect() as connection:
        connection.scalar(build_count_statement(dialect, "7", info))  # prepares the session
        with reads(connection, at_most=4 * OF_ONE):
            assert connection.scalar(build_count_statement(dialect, "7", info)) == OF_ONE


def test_p11_sqlite_counts_by_the_index(tmp_path: Path) -> None:
    """P11."""
    path = tmp_path / "plans.db"
    engine = create_engine(f"sqlite:///{path}")
    fill_mirrored(engine)
    dialect = SqliteDialect(TABLES, sqlite.dialect())
    compiled = build_count_statement(dialect, "7", "i").compile(
        dialect=sqlite.dialect(paramstyle="named")
    )
    with engine.connect() as connection:
        assert connection.scalar(build_count_statement(dialect, "7", "i")) == OF_ONE
    engine.dispose()
    raw = sqlite3.connect(path)
    rows = raw.execute(f"EXPLAIN QUERY PLAN {compiled}", compiled.params).fetchall()
    raw.close()
    first, second = (row[3] for row in rows)
    assert first.startswith("SEARCH message_policy_state USING "), rows
    assert "(scope=?)" in first
    assert second.startswith("SEARCH message USING INTEGER PRIMARY KEY"), rows
