"""What is read to tell what waits: a step for each queue, and no more messages than are counted."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.dialects import sqlite

from faststream_sqlbroker.database.mysql.dialect import MysqlDialect
from faststream_sqlbroker.database.parts.live_queues import read_live_queues
from faststream_sqlbroker.database.parts.live_subscribers import MAX_SUBSCRIBERS, read_subscribers
from faststream_sqlbroker.database.sqlite.dialect import SqliteDialect
from faststream_sqlbroker.schema.migrate import create_all
from tests.plans.conftest import TABLES
from tests.plans.test_mysql import reads
from tests.plans.test_postgresql import check, explain, nodes

QUEUES = 101
"""Of the crowd."""
MOST = 500
"""Messages to count of a hundred times as many."""
PAIR = {"queue": "q", "priority": 1, "most_due": MOST, "most_later": MOST, "most_standing": MOST}

postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
mysqls = pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)


@postgresql
@pytest.mark.parametrize("name", ["next_queue", "next_leased_queue"])
def test_a_step_to_the_next_queue_reads_one_entry(crowded: Engine, name: str) -> None:
    with crowded.connect() as connection:
        plan = explain(connection, name, after="other5")
        check(plan, indexes={"message_ready", "message_leased"}, buffers=10)


@postgresql
def test_counting_reads_a_range_up_to_the_limit(crowded: Engine) -> None:
    with crowded.connect() as connection:
        plan = explain(connection, "count_waiting", **PAIR)
        check(plan, indexes={"message_ready"}, buffers=MOST)
        read = [n["Actual Rows"] for n in nodes(plan) if n.get("Index Name") == "message_ready"]
        assert len(read) == 4
        assert max(read) == MOST
        held = explain(connection, "count_leased", queue="q", most=MOST)
        check(held, indexes={"message_leased"}, buffers=10)


@postgresql
def test_subscribers_are_read_along_the_primary_key(crowded: Engine) -> None:
    """Up to the limit, whatever else the policy state holds."""
    sent: list[tuple[str, Any]] = []
    with crowded.connect() as connection:
        connection.execute(
            text(
                "INSERT INTO message_policy_state (scope, key, lease_expires_at) SELECT "
                "CASE WHEN n % 4 = 0 THEN 'other' ELSE 'subscriber' END, 'w' || n, "
                f"now() + interval '1 hour' FROM generate_series(1, {2 * MAX_SUBSCRIBERS}) n"
            )
        )
        connection.execute(text("ANALYZE message_policy_state"))
        event.listen(crowded, "before_cursor_execute", lambda *given: sent.append(given[2:4]))
        assert len(read_subscribers(connection, TABLES.policy_state)) == MAX_SUBSCRIBERS
        [(statement, binds)] = sent
        plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", binds).scalar_one()
        kinds = {node["Node Type"] for node in nodes(plan[0]["Plan"])}
        assert kinds == {"Limit", "Index Scan"}


@mysqls
def test_mysql_reads_as_little(crowded: Engine) -> None:
    dialect = MysqlDialect(TABLES, crowded.dialect)
    with crowded.connect() as connection:
        # Its first statement compiles what it reads of registrations.
        read_live_queues(connection, dialect)
        with reads(connection, at_most=3 * QUEUES + 60):
            assert len(read_live_queues(connection, dialect).names) == QUEUES
        with reads(connection, at_most=3 * MOST):
            counted = connection.execute(dialect.sql["count_waiting"], PAIR).one()
        assert counted == (100, MOST, 0, None)
        with reads(connection, at_most=60):
            assert held(connection, dialect) == 0


def held(connection: Connection, dialect: Any) -> int:
    statement = dialect.sql["count_leased"]
    count: int = connection.execute(statement, {"queue": "q", "most": MOST}).scalar_one()
    return count


def test_sqlite_searches_the_indexes(tmp_path: Path) -> None:
    path = tmp_path / "plans.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        create_all(connection, TABLES)
    engine.dispose()
    dialect = SqliteDialect(TABLES, sqlite.dialect())
    indexes = {
        "next_queue": {"message_ready"},
        "next_leased_queue": {"message_leased"},
        "count_waiting": {"message_ready"},
        "count_leased": {"message_leased"},
    }
    binds = {**PAIR, "after": "a", "most": MOST}
    connection = sqlite3.connect(path)
    for name, wanted in indexes.items():
        plan = connection.execute(f"EXPLAIN QUERY PLAN {dialect.sql[name]}", binds).fetchall()
        steps = [step[-1] for step in plan if "message" in step[-1]]
        assert steps
        for step in steps:
            assert step.startswith("SEARCH"), steps
            assert any(index in step for index in wanted), steps
    connection.close()
