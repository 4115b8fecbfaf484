"""What operators' searches and repairs read of large tables: ranges of indexes, a limited number of
rows each; so a statement takes as long in a table ten times as large.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import Connection, Engine

from faststream_sqlbroker.core.bulk_jobs import MOVE, REDRIVE, RETRY, Job
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.database import stored_messages, verification
from faststream_sqlbroker.database.bulk import changes, visits
from faststream_sqlbroker.database.dialects import create_dialect
from faststream_sqlbroker.database.parts import message_walks
from tests.plans.conftest import TABLES
from tests.plans.test_message_lists import SCANNED, archive, sent, stored_messages_on
from tests.plans.test_mysql import reads
from tests.plans.test_postgresql import nodes

__all__ = ("archive",)  # a fixture

SIZE = 50
FAILED = MessageState.FAILED
Work = Callable[[Connection, Any], object]


def grouped(**filters: Any) -> Work:
    """Dead letters by their errors."""

    def work(connection: Connection, _dialect: Any) -> object:
        wanted = Filters(archived=True, state=FAILED, **filters)
        return asyncio.run(stored_messages_on(connection).group_dead_letters(wanted, 20))

    return work


def batch(action: str, change: Any, **filters: Any) -> Work:
    """One batch of a job in the middle of its way: what it visits, locks and changes."""

    def work(connection: Connection, dialect: Any) -> object:
        wanted = Filters(archived=action == REDRIVE, **filters)
        bound = visits.find_last_position(connection, dialect, action)
        job = Job(action=action, by="Ann", filters=wanted, bound=bound, arguments={"to": "mended"})
        ids, _ = visits.find_next(connection, dialect, job, SIZE)
        assert len(ids) == SIZE
        return change(connection, dialect, job, ids)

    return work


def verified(connection: Connection, dialect: Any) -> object:
    """Two stretches of each table."""
    first = verification._check_live(connection, dialect, None, 600.0)
    verification._check_live(connection, dialect, first.after, 600.0)
    of_archive = verification._check_archive(connection, dialect, None)
    return verification._check_archive(connection, dialect, of_archive.after)


READ: dict[str, Work] = {
    "dead letters": grouped(),
    "dead letters of a queue": grouped(queue="other10"),
    "dead letters of an hour": grouped(since=3_600.0),
    "verify": verified,
}
CHANGED: dict[str, Work] = {
    "retry": batch(RETRY, changes.retry_now),
    "move": batch(MOVE, changes.move),
    "redrive": batch(REDRIVE, changes.redrive, state=FAILED),
}
MOST_READ = 4 * SCANNED
"""Blocks, or rows: a few for each row that may be looked at."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a walk through a whole table is far above what is allowed."""
    monkeypatch.setattr(message_walks, "STEP_SIZE", SCANNED // 2)
    monkeypatch.setattr(verification, "STEP_SIZE", SCANNED // 2)
    monkeypatch.setattr(stored_messages, "MAX_SCANNED", SCANNED)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_postgresql_reads_no_table_as_a_whole(archive: Engine, database: str) -> None:
    dialect = create_dialect(archive.dialect, TABLES)
    for name, work in {**READ, **CHANGED}.items():
        with archive.connect() as connection:
            with sent(connection) as statements:
                work(connection, dialect)
            connection.rollback()
            for statement, parameters in statements:
                check(connection, name, statement, parameters)
            connection.rollback()


def check(connection: Connection, name: str, statement: str, parameters: Any) -> None:
    many = isinstance(parameters, list)
    found = connection.exec_driver_sql(
        f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}",
        parameters[0] if many else parameters,
    ).scalar_one()
    plan = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
    large = [n for n in nodes(plan) if n["Node Type"] == "Seq Scan"]
    assert not [n for n in large if n["Relation Name"] in {"message", "message_archive"}], name
    used = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    # A row that is changed touches the pages of each index, too.
    most = MOST_READ if name in READ else 60 * SIZE
    assert used <= most, (name, statement, used)


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
def test_mysql_reads_no_more_rows_than_it_may(archive: Engine, database: str) -> None:
    dialect = create_dialect(archive.dialect, TABLES)
    for name, work in {**READ, **CHANGED}.items():
        with archive.connect() as connection:
            work(connection, dialect)  # compiles the statements
            connection.rollback()
            most = 4 * MOST_READ if name in READ else 100 * SIZE
            with patch.object(visits, "MAX_SCANNED", SCANNED), reads(connection, at_most=most):
                work(connection, dialect)
            connection.rollback()
