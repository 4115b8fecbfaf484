"""What is read to count and to estimate: ranges of an index, up to a limit."""

import sqlite3
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.dialects import sqlite

from faststream_sqlbroker.database import overviews as module
from faststream_sqlbroker.database.constants import MAX_SQLITE_COUNT
from faststream_sqlbroker.database.mysql.dialect import MysqlDialect
from faststream_sqlbroker.database.overviews import (
    MAX_COUNTED,
    MAX_RATED,
    count_messages,
    read_rates,
)
from faststream_sqlbroker.database.parts.live_queues import count_due
from faststream_sqlbroker.database.postgresql.dialect import PostgresqlDialect
from faststream_sqlbroker.database.sqlite.dialect import SqliteDialect
from faststream_sqlbroker.schema.migrate import create_all
from tests.plans.conftest import DUE, FEWER, FUTURE, TABLES
from tests.plans.test_many_queues import reads as all_reads
from tests.plans.test_message_lists import explained, sent
from tests.plans.test_mysql import reads
from tests.plans.test_postgresql import check, explain, nodes

PAIR = {"queue": "q", "priority": 1}
postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
mysqls = pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)


@postgresql
def test_a_sample_reads_a_range_up_to_the_limit(crowded: Engine) -> None:
    with crowded.connect() as connection:
        for kind in ("due", "later", "standing"):
            plan = explain(connection, f"sample_{kind}", **PAIR, most=MAX_COUNTED + 1)
            check(plan, indexes={"message_ready"}, buffers=2 * MAX_COUNTED)
        held = explain(connection, "sample_held", queue="q", most=MAX_COUNTED + 1)
        check(held, indexes={"message_leased"}, buffers=10)


@postgresql
def test_a_sample_reads_no_messages_of_other_queues(crowded: Engine) -> None:
    """Half of the table is a queue whose messages lie behind all others, which statistics do not
    tell: a walk from the table's begin would seem short.
    """
    with crowded.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(
            text(
                "INSERT INTO message (queue, payload) "
                f"SELECT 'late', 'x' FROM generate_series(1, {FUTURE})"
            )
        )
        connection.execute(text("VACUUM ANALYZE message"))
        late = {"queue": "late", "priority": 0}
        for name, limits in (
            ("sample_due", {"most": 201}),
            ("sample_standing", {"most": 201}),
            ("count_due", {"most": 201}),
            ("count_waiting", {"most_due": 201, "most_later": 201, "most_standing": 201}),
        ):
            plan = explain(connection, name, **late, **limits)
            check(plan, indexes={"message_ready"}, buffers=600)


@postgresql
def test_an_estimate_is_near(crowded: Engine) -> None:
    dialect = PostgresqlDialect(TABLES, crowded.dialect)
    with crowded.connect() as connection:
        counts = count_messages(connection, dialect, ["q", "other5"])
    assert counts["q"].delayed.is_exact is False
    assert FUTURE / 3 < counts["q"].delayed.value < FUTURE * 3
    assert (counts["q"].ready.is_exact, counts["q"].ready.value) == (True, 300)
    assert (counts["other5"].ready.is_exact, counts["other5"].ready.value) == (True, 1_000)


@mysqls
def test_mysql_looks_into_the_index(crowded: Engine) -> None:
    dialect = MysqlDialect(TABLES, crowded.dialect)
    with crowded.connect() as connection, patch.object(module, "MAX_COUNTED", 300):
        count_messages(connection, dialect, ["q"])  # compiles the statements
        with reads(connection, at_most=3 * (2 * 300 + 200) + 200):
            counts = count_messages(connection, dialect, ["q"])["q"]
    assert counts.delayed.is_exact is False
    assert FUTURE / FEWER / 3 < counts.delayed.value < FUTURE / FEWER * 3
    assert (counts.ready.is_exact, counts.ready.value) == (True, 300)


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
def test_rates_read_the_newest_messages_only(crowded: Engine, database: str) -> None:
    kind = PostgresqlDialect if database == "postgresql" else MysqlDialect
    dialect = kind(TABLES, crowded.dialect)
    with crowded.connect() as connection:
        # The crowd may have come more than a minute ago.
        connection.execute(text("INSERT INTO message (queue, payload) VALUES ('q', 'x')"))
        if database == "postgresql":
            with sent(connection) as statements:
                rates = read_rates(connection, dialect)
            assert statements
            for statement, parameters in statements:
                _, _, plan = explained(connection, statement, parameters)
                assert max(each["Actual Rows"] for each in nodes(plan)) <= MAX_RATED, plan
        else:
            read_rates(connection, dialect)  # compiles the statements
            # Each is read, and looked up among the queues.
            with all_reads(connection, at_most=2 * MAX_RATED + 200):
                rates = read_rates(connection, dialect)
    assert rates.published["q"] > 0


def test_sqlite_counts_on_in_the_index(tmp_path: Path) -> None:
    """It has no estimates."""
    path = tmp_path / "plans.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        create_all(connection, TABLES)
        connection.execute(
            text(
                "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n "
                "WHERE n < 1000000) INSERT INTO message (queue, payload) SELECT 'q', 'x' FROM n"
            )
        )
    dialect = SqliteDialect(TABLES, sqlite.dialect())
    with engine.connect() as connection:
        steps: list[None] = []
        driver: Any = connection.connection.driver_connection
        driver.set_progress_handler(lambda: steps.append(None), 1_000)
        found = connection.execute(
            dialect.sql["estimate_due"], {"queue": "q", "priority": 0}
        ).scalar_one()
    engine.dispose()
    assert found == MAX_SQLITE_COUNT
    assert len(steps) * 1_000 < 20 * MAX_SQLITE_COUNT
    raw = sqlite3.connect(path)
    steps = raw.execute(
        f"EXPLAIN QUERY PLAN {dialect.sql['count_due']}", {**PAIR, "most": MAX_COUNTED}
    ).fetchall()
    assert any("SEARCH" in step[-1] and "message_ready" in step[-1] for step in steps), steps
    for kind in ("due", "later", "held"):
        for what in ("sample", "estimate"):
            binds = {**PAIR, "most": MAX_COUNTED}
            statement = f"EXPLAIN QUERY PLAN {dialect.sql[f'{what}_{kind}']}"
            plan = raw.execute(statement, binds).fetchall()
            steps = [step[-1] for step in plan if "message" in step[-1]]
            assert steps
            assert all(
                step.startswith("SEARCH")
                and ("message_leased" if kind == "held" else "message_ready") in step
                for step in steps
            ), steps
    raw.close()


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
def test_a_limited_count_reads_no_more_than_its_limit(crowded: Engine, database: str) -> None:
    """Neither other queues nor what is not due, however much of it there is."""
    kind = PostgresqlDialect if database == "postgresql" else MysqlDialect
    dialect = kind(TABLES, crowded.dialect)
    with crowded.connect() as connection:
        assert count_due(connection, dialect, "q", 200) == 200  # compiles the statements
        assert count_due(connection, dialect, "q", 1_000) == DUE
        if database == "postgresql":
            plan = explain(connection, "count_due", **PAIR, most=200)
            check(plan, indexes={"message_ready"}, buffers=400)
        else:
            with reads(connection, at_most=3 * 200 + 200):
                count_due(connection, dialect, "q", 200)
