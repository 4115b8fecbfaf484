"""SQLite's plans for what policies do with lists: each of a list by its row's id, and no message
that is not in it."""

import sqlite3

import pytest
from sqlalchemy import create_engine
from sqlalchemy.dialects import sqlite

from faststream_sqlbroker.database.sqlite.dialect import SqliteDialect
from faststream_sqlbroker.schema.migrate import create_all
from tests.plans.conftest import TABLES

DRIVER = sqlite.dialect(paramstyle="named")
SQL = SqliteDialect(TABLES, DRIVER).sql


@pytest.mark.parametrize(
    "name", ["policy_shift", "policy_lock", "policy_archive", "policy_drop", "policy_live"]
)
def test_lists_go_by_the_primary_key(name: str, tmp_path) -> None:
    path = tmp_path / "test.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        create_all(connection, TABLES)
    engine.dispose()
    compiled = SQL[name].compile(dialect=DRIVER)
    connection = sqlite3.connect(path)
    rows = connection.execute(
        f"EXPLAIN QUERY PLAN {compiled}", dict.fromkeys(compiled.params, 1)
    ).fetchall()
    connection.close()
    steps = [row[3] for row in rows if "LIST" not in row[3] and "TEMP B-TREE" not in row[3]]
    assert sorted(steps) == [
        "SCAN json_each VIRTUAL TABLE INDEX 1:",
        "SEARCH m USING INTEGER PRIMARY KEY (rowid=?)",
    ]
