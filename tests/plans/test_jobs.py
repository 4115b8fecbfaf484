"""What a batch of a job reads: a range of an index, and no more rows than it may look at."""

import json
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine

from faststream_sqlbroker.core.bulk_jobs import CANCEL, REDRIVE, REPLAY, Job
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.stored import Filters
from faststream_sqlbroker.database.bulk import changes, visits
from faststream_sqlbroker.database.mysql.dialect import MysqlDialect
from faststream_sqlbroker.database.parts import message_walks, pull_job_rows
from faststream_sqlbroker.database.postgresql.dialect import PostgresqlDialect
from tests.plans.conftest import TABLES
from tests.plans.test_message_lists import SCANNED, archive, sent
from tests.plans.test_mysql import reads
from tests.plans.test_postgresql import deep, nodes

__all__ = ("archive", "deep")  # fixtures

SIZE = 50
FAILED = MessageState.FAILED
JOBS: list[tuple[str, dict[str, Any]]] = [
    (CANCEL, {}),
    (CANCEL, {"queue": "other5"}),
    (CANCEL, {"queue": "other5", "error": "none"}),
    (CANCEL, {"error": "none"}),
    (REDRIVE, {"state": FAILED}),
    (REDRIVE, {"state": FAILED, "queue": "other5"}),
    (REDRIVE, {"state": FAILED, "fingerprint": "0123456789abcdef"}),
    (REPLAY, {"queue": "other5"}),
    (REPLAY, {"state": FAILED}),
    (CANCEL, {"ids": range(1, SIZE)}),
    (REDRIVE, {"state": FAILED, "ids": range(1, SIZE)}),
    (REDRIVE, {"state": FAILED, "limit": 2 * SIZE}),
]


def planned(connection: Connection, dialect: Any, action: str, filters: dict[str, Any]) -> Job:
    limit = filters.get("limit")
    given = {name: value for name, value in filters.items() if name != "limit"}
    wanted = Filters(archived=action != CANCEL, **given)
    bound = visits.find_last_position(connection, dialect, action)
    assert bound is not None
    job = Job(action=action, by="Ann", filters=wanted, bound=bound, arguments={"name": "n"})
    if limit is None:
        return job
    limited = replace(job, limit=limit)
    return replace(limited, bound=visits.read_next(connection, dialect, limited, limit)[2])


def visit(connection: Connection, dialect: Any, action: str, filters: dict[str, Any]) -> None:
    """As a batch does, and the dry run before it, in steps."""
    job = planned(connection, dialect, action, filters)
    with (
        patch.object(message_walks, "STEP_SIZE", SCANNED // 2),
        patch.object(visits, "MAX_SCANNED", SCANNED),
    ):
        visits.find_next(connection, dialect, job, SIZE)
        visits.read_next(connection, dialect, job, SCANNED, ["queue"])


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_postgresql_reads_ranges_of_indexes(archive: Engine) -> None:
    dialect = PostgresqlDialect(TABLES, archive.dialect)
    with archive.connect() as connection:
        for action, filters in JOBS:
            with sent(connection) as statements:
                visit(connection, dialect, action, filters)
            for statement, parameters in statements:
                found = connection.exec_driver_sql(
                    f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters
                ).scalar_one()
                plan = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
                large = [n for n in nodes(plan) if n["Node Type"] == "Seq Scan"]
                assert not [n for n in large if "archive" in n["Relation Name"]], filters
                assert not [n for n in large if n["Relation Name"] == "message"], filters
                used = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
                assert used <= 4 * SCANNED, (action, filters, statement, used)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_batch_does_not_read_a_queue_that_no_analyze_has_seen(deep: Engine) -> None:
    dialect = PostgresqlDialect(TABLES, deep.dialect)
    with deep.connect() as connection:
        job = planned(connection, dialect, CANCEL, {"queue": "deep"})
        ids, _ = visits.find_next(connection, dialect, job, SIZE)
        with sent(connection) as statements:
            visits.find_next(connection, dialect, job, SIZE)
            visits.lock_matching(connection, dialect, job, ids, ["id"])
            changes._lock_untouched(connection, dialect, {one: {} for one in ids})
            connection.execute(pull_job_rows.select_bodies(dialect), {"ids": ids})
            dialect.claim_ids(connection, ids, ["deep"], 1.0, uuid4())
        assert len(ids) == SIZE
        for statement, parameters in statements:
            found = connection.exec_driver_sql(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters
            ).scalar_one()
            plan = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
            scans = [n for n in nodes(plan) if n.get("Relation Name") == "message"]
            assert all(n.get("Index Name") in {"message_pkey", None} for n in scans), statement
            assert plan["Shared Hit Blocks"] <= 4 * SCANNED, (statement, plan)


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
def test_mysql_reads_no_more_rows_than_it_may(archive: Engine) -> None:
    dialect = MysqlDialect(TABLES, archive.dialect)
    with archive.connect() as connection:
        for action, filters in JOBS:
            visit(connection, dialect, action, filters)  # compiles the statements
            with reads(connection, at_most=100 + 12 * SCANNED):
                visit(connection, dialect, action, filters)
