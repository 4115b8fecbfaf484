"""What a page of messages reads: a range of an index, and no more rows than it may look at."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import Connection, Engine, event, text

from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.stored import Filters, MessagePage
from faststream_sqlbroker.database import overviews, stored_messages
from faststream_sqlbroker.database.mysql.dialect import MysqlDialect
from faststream_sqlbroker.database.parts import message_walks
from faststream_sqlbroker.database.postgresql.dialect import PostgresqlDialect
from faststream_sqlbroker.database.stored_messages import StoredMessages
from tests.helpers import mysql_numbers
from tests.plans.conftest import FEWER, TABLES, Crowds, DatabaseOf, analyze, fill_crowd
from tests.plans.test_mysql import reads
from tests.plans.test_postgresql import literal, nodes

ARCHIVED = 100_000
ABOVE = 10_000_000
"""Ids of archived messages are above this, apart from those of live ones."""
SCANNED = 500
LIMIT = 50
INDEXED: list[dict[str, Any]] = [
    {},
    {"queue": "q"},
    {"queue": "other5", "key": "k"},
    {"queue": "q", "state": MessageState.PROCESSING},
    {"archived": True},
    {"archived": True, "queue": "other5"},
    {"archived": True, "queue": "other5", "since": 600.0, "until": 5.0},
    {"archived": True, "state": MessageState.FAILED},
    {"archived": True, "state": MessageState.FAILED, "since": 600.0},
    {"archived": True, "state": MessageState.DISCARDED},
]
"""Filters that an index knows."""
SEARCHED: list[dict[str, Any]] = [
    {"key": "k"},
    {"state": MessageState.RETRYABLE, "queue": "q"},
    {"error": "none"},
    {"headers": {"a": "b"}, "queue": "q"},
    {"until": 3_600.0},
    {"archived": True, "error": "none"},
    {"archived": True, "queue": "other5", "reason": "none"},
    {"archived": True, "state": MessageState.FAILED, "fingerprint": "0123456789abcdef"},
    {"archived": True, "state": MessageState.FAILED, "queue": "q"},
]
"""Filters that match nothing, so that a page is read until it may look at no more."""


def fill_archive(engine: Engine) -> None:
    if engine.dialect.name == "postgresql":
        numbers = f"generate_series(1, {ARCHIVED}) AS s(n)"
        ago = "statement_timestamp() - s.n * interval '1 second'"
    else:
        numbers = f"{mysql_numbers(ARCHIVED // FEWER)} s"
        ago = "UTC_TIMESTAMP(6) - INTERVAL s.n SECOND"
    state = "CASE MOD(s.n, 10) WHEN 0 THEN 'FAILED' ELSE 'COMPLETED' END"
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO message_archive "
                "(id, queue, payload, state, created_at, next_attempt_at, archived_at) "
                f"SELECT {ABOVE} + s.n, CONCAT('other', MOD(s.n, 20)), 'x', {state}, {ago}, {ago}, "
                f"{ago} FROM {numbers}"
            )
        )
    analyze(engine, "message_archive")


@pytest.fixture
def archive(crowds: Crowds, database: str) -> Iterator[Engine]:
    """The crowd, and as many archived messages."""
    with crowds.of(database, fill_crowd, fill_archive) as engine:
        yield engine


@contextmanager
def sent(connection: Connection) -> Iterator[list[tuple[str, Any]]]:
    """The statements that are sent inside."""
    found: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        found.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", note)
    yield found
    event.remove(connection, "before_cursor_execute", note)


def stored_messages_on(connection: Connection) -> StoredMessages:
    database: Any = DatabaseOf(connection)
    return StoredMessages(database)


def page(connection: Connection, filters: dict[str, Any]) -> MessagePage:
    # In two statements, the second of which begins where the first ended.
    step = patch.object(message_walks, "STEP_SIZE", SCANNED // 2)
    with patch.object(stored_messages, "MAX_SCANNED", SCANNED), step:
        reading = stored_messages_on(connection)
        return asyncio.run(reading.read_page(Filters(**filters), LIMIT, None, with_hidden=True))


def explained(
    connection: Connection, statement: str, parameters: Any
) -> tuple[list[dict[str, Any]], int, dict[str, Any]]:
    """The steps of the statement's plan that read a whole table, its buffers, and the plan."""
    found = connection.exec_driver_sql(
        f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters
    ).scalar_one()
    plan = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
    walks = [each for each in nodes(plan) if each["Node Type"] == "Seq Scan"]
    return walks, plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], plan


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_postgresql_reads_ranges_of_indexes(archive: Engine) -> None:
    dialect = PostgresqlDialect(TABLES, archive.dialect)
    with archive.connect() as connection:
        for filters in INDEXED + SEARCHED:
            with sent(connection) as statements:
                page(connection, filters)
            most = 3 * SCANNED if filters in SEARCHED else 4 * LIMIT
            for statement, parameters in statements:
                walks, used, _ = explained(connection, statement, parameters)
                assert not walks, filters
                assert used <= most, (filters, statement, used)
        # Of jobs that have ended: those of one consumer, and the last that failed in any queue.
        with sent(connection) as statements, patch.object(overviews, "MAX_DEAD", 1_000):
            [jobs] = overviews.count_jobs(connection, dialect, ["other5"])
        assert jobs.delivered is not None
        assert ARCHIVED / 60 < jobs.delivered.value < ARCHIVED / 7
        for statement, parameters in statements:
            if "message_archive" in statement and not statement.startswith("EXPLAIN"):
                _, used, plan = explained(connection, statement, parameters)
                assert used <= 4 * 1_000, (statement, used)
                # In the order of the index: not all that failed, to sort them.
                assert max(each["Actual Rows"] for each in nodes(plan)) <= 1_001, plan
                names = {each["Index Name"] for each in nodes(plan) if "Index Name" in each}
                assert names <= {"message_archive_queue", "message_archive_uncompleted"}, plan


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_postgresql_reads_no_row_twice_of_messages_that_are_due_at_the_same_moment(
    archive: Engine,
) -> None:
    """As a search by an error in a queue that one statement has filled."""
    with archive.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(
            text(
                "INSERT INTO message (queue, payload, next_attempt_at) SELECT 'alike', 'x', "
                f"statement_timestamp() - interval '1 hour' FROM generate_series(1, {4 * SCANNED})"
            )
        )
        connection.execute(text("VACUUM ANALYZE message"))
        with sent(connection) as statements:
            found = page(connection, {"queue": "alike", "error": "none"})
        assert found.after is not None
        read = 0
        for statement, parameters in statements:
            for each in nodes(explained(connection, statement, parameters)[2]):
                if "message_ready" in each.get("Index Name", ""):
                    read += each["Actual Rows"] + each.get("Rows Removed by Filter", 0)
        # Each step twice: to find its end, and then its rows.
        assert SCANNED <= read <= 2 * SCANNED + 2 * LIMIT


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
def test_mysql_reads_no_more_rows_than_it_may(archive: Engine) -> None:
    dialect = MysqlDialect(TABLES, archive.dialect)
    with archive.connect() as connection:
        for filters in INDEXED + SEARCHED:
            page(connection, filters)  # compiles the statements
            most = 4 * SCANNED if filters in SEARCHED else 5 * LIMIT
            with reads(connection, at_most=100 + most):
                found = page(connection, filters)
            if filters in SEARCHED:
                assert found.messages == ()
                assert found.after is not None
        with patch.object(overviews, "MAX_DEAD", 500), patch.object(overviews, "MAX_COUNTED", 100):
            overviews.count_jobs(connection, dialect, ["other5"])
            with reads(connection, at_most=2 * (500 + 100) + 2 * LIMIT + 1_000):
                [jobs] = overviews.count_jobs(connection, dialect, ["other5"])
        assert jobs.dead is not None
        assert jobs.dead.how == "about"


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
def test_a_search_ends_where_it_may_look_no_further(archive: Engine, database: str) -> None:
    with archive.connect() as connection:
        found = page(connection, {"archived": True, "error": "none"})
    assert found.messages == ()
    assert found.after is not None
    assert found.scanned_until is not None


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_search_ends_where_it_must_also_with_a_generic_plan(archive: Engine) -> None:
    """A driver prepares what is sent often, and the server then plans without the values."""
    with archive.connect() as connection:
        connection.execute(text("SET plan_cache_mode = force_generic_plan"))
        for filters in SEARCHED:
            with sent(connection) as statements:
                page(connection, filters)
            for statement, parameters in statements:
                used = buffers_of_prepared(connection, statement, parameters)
                assert used <= 3 * SCANNED, (filters, statement, used)


def buffers_of_prepared(connection: Connection, statement: str, parameters: Any) -> int:
    """The blocks that `statement` reads once it is prepared."""
    given = list(parameters)
    asked = statement
    for number, name in enumerate(given, 1):
        asked = asked.replace(f"%({name})s", f"${number}")
    values = ", ".join(
        literal(str(value) if isinstance(value, datetime) else value)
        for value in map(parameters.get, given)
    )
    connection.exec_driver_sql(f"PREPARE searched AS {asked}")
    call = "EXECUTE searched" + (f" ({values})" if values else "").replace("%", "%%")
    found = connection.exec_driver_sql(
        f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}"
    ).scalar_one()
    connection.exec_driver_sql("DEALLOCATE searched")
    plan = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
