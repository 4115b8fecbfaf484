"""What retention reads of a large archive: the oldest rows of an index, and no others."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.dialects import postgresql as dialect_of_postgresql

from faststream_sqlbroker.core.loaded_windows import LOADED_SCOPE, LoadedWindow, RowSum
from faststream_sqlbroker.core.retention import PrunePosition
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.archive_growth import ArchiveGrowth
from faststream_sqlbroker.database.dialects import create_dialect
from faststream_sqlbroker.database.parts import window_rows
from faststream_sqlbroker.database.retention import BATCH, ArchivePartitions, ArchiveRetention
from faststream_sqlbroker.database.verified_prune import LoadedWindows
from faststream_sqlbroker.schema.migrate import create_all
from tests.helpers import mysql_numbers
from tests.plans.conftest import TABLES, Crowds, DatabaseOf, analyze
from tests.plans.test_mysql import reads
from tests.plans.test_postgresql import nodes

ROWS = 100_000
"""Minutes: the oldest row has ended so many minutes ago. Each hundredth has failed."""
FEWER = 5
"""MySQL and MariaDB get a part of them: they take long to write."""


def fill_archived(engine: Engine) -> None:
    if engine.dialect.name == "postgresql":
        of = f"generate_series(1, {ROWS}) AS s(n)"
        at = "statement_timestamp() - s.n * interval '1 minute'"
    else:
        of = f"{mysql_numbers(ROWS // FEWER)} s"
        at = "UTC_TIMESTAMP(6) - INTERVAL s.n MINUTE"
    state = "CASE WHEN MOD(s.n, 100) = 0 THEN 'FAILED' ELSE 'COMPLETED' END"
    columns = "id, queue, payload, state, created_at, next_attempt_at, archived_at"
    with engine.begin() as connection:
        create_all(connection, TABLES)
        connection.execute(
            text(
                f"INSERT INTO message_archive ({columns}) "
                f"SELECT s.n, 'q', 'x', {state}, {at}, {at}, {at} FROM {of}"
            )
        )
    analyze(engine, "message_archive")


@pytest.fixture
def archived(database: str, crowds: Crowds) -> Iterator[Engine]:
    """A synchronous engine on an archive with many rows."""
    with crowds.of(database, fill_archived) as engine:
        yield engine


def retention_on(connection: Connection) -> ArchiveRetention:
    database: Any = DatabaseOf(connection)
    return ArchiveRetention(database, ArchivePartitions(database))


def windows_on(connection: Connection) -> LoadedWindows:
    database: Any = DatabaseOf(connection)
    return LoadedWindows(database)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize(("state", "index"), [("COMPLETED", "archived"), ("FAILED", "uncompleted")])
def test_postgresql_reads_the_beginning_of_an_index(
    archived: Engine, database: str, state: str, index: str
) -> None:
    with archived.connect() as connection:
        retention = retention_on(connection)
        before = asyncio.run(retention.read_cutoff(3600.0))
        asked = retention._select_oldest(MessageState[state], before, None).limit(BATCH)
        made: Any = dialect_of_postgresql.dialect
        plain = str(asked.compile(dialect=made(), compile_kwargs={"literal_binds": True}))
        plan = "\n".join(connection.scalars(text(f"EXPLAIN {plain}".replace(":", "\\:"))).all())
    assert f"message_archive_{index}" in plan
    assert "Seq Scan" not in plan
    assert "Sort" not in plan


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
@pytest.mark.parametrize("state", ["COMPLETED", "FAILED"])
def test_mysql_reads_no_more_than_it_removes(archived: Engine, database: str, state: str) -> None:
    with archived.connect() as connection:
        retention = retention_on(connection)
        before = asyncio.run(retention.read_cutoff(3600.0))
        asyncio.run(retention.remove(MessageState[state], before, None))
        with reads(connection, at_most=8 * BATCH):
            step = asyncio.run(retention.remove(MessageState[state], before, None))
    assert step.rows == (BATCH if state == "COMPLETED" else 0)


def middle(connection: Connection) -> LoadedWindow:
    """A window of a week and more in the middle of the archive."""
    retention = retention_on(connection)
    start, end = (asyncio.run(retention.read_cutoff(60.0 * minutes)) for minutes in (15_000, 3_000))
    return LoadedWindow("a week", start, end, RowSum(), "a lake")


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_postgresql_compares_a_window_page_by_page(archived: Engine, database: str) -> None:
    """PostgreSQL 18 may read a page by the index of queues, too: what is read of it counts."""
    dialect = create_dialect(archived.dialect, TABLES)
    page = window_rows.PAGE_SIZE
    with archived.connect() as connection:
        window = middle(connection)
        first = window_rows.read_page(connection, dialect, window, None)
        second = window_rows.read_page(connection, dialect, window, first.last)
        assert isinstance(first.last, PrunePosition)
        made: Any = dialect_of_postgresql.dialect
        for last in (None, second.last):
            asked = window_rows.select_rows(dialect, window, first.last, last)
            asked = asked.limit(page) if last is None else asked
            plain = str(asked.compile(dialect=made(), compile_kwargs={"literal_binds": True}))
            explain = f"EXPLAIN (ANALYZE, FORMAT JSON) {plain}".replace(":", "\\:")
            plan = connection.scalars(text(explain)).one()[0]["Plan"]
            scans = [node for node in nodes(plan) if "Scan" in node["Node Type"]]
            assert "Seq Scan" not in {scan["Node Type"] for scan in scans}
            read = [scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0) for scan in scans]
            assert plan["Actual Rows"] == page
            assert max(read) <= page + 1, plan
            # A page itself is small enough to be sorted.
            assert last is not None or "Sort" not in {node["Node Type"] for node in nodes(plan)}


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
def test_mysql_compares_and_removes_a_page_by_its_rows(archived: Engine, database: str) -> None:
    dialect = create_dialect(archived.dialect, TABLES)
    page = window_rows.PAGE_SIZE
    with archived.connect() as connection:
        window = middle(connection)
        record = {"scope": LOADED_SCOPE + "shop", "key": window.name, "info": window.to_json()}
        connection.execute(TABLES.policy_state.insert().values(record))
        first = window_rows.read_page(connection, dialect, window, None)
        done = {MessageState.COMPLETED}
        with reads(connection, at_most=3 * page):
            second = window_rows.read_page(connection, dialect, window, first.last)
        assert second.rows.rows == page
        with reads(connection, at_most=8 * page):
            lowered = asyncio.run(windows_on(connection).remove("shop", window, second, done))
    assert lowered is not None
    assert lowered.remaining.rows == -second.states[MessageState.COMPLETED]


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
def test_growth_is_that_of_a_day(archived: Engine, database: str) -> None:
    with archived.connect() as connection:
        database: Any = DatabaseOf(connection)
        per_day = asyncio.run(ArchiveGrowth(database).estimate_rows_per_day())
    assert 1_430 <= per_day <= 1_440
