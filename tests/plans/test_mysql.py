"""Rows that MariaDB and MySQL read for each hot statement: only those it needs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, text

from faststream_sqlbroker.core.outcome import Ack, Nack, Outcome, Reject
from faststream_sqlbroker.core.retry import default_retry_strategy
from faststream_sqlbroker.core.rows import ClaimedMessage, ClaimRequest
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.database.mysql.dialect import MysqlDialect
from faststream_sqlbroker.database.parts.ordered import Cursors
from faststream_sqlbroker.database.parts.replies import remove_replies
from tests.helpers import MYSQL, mysql_numbers
from tests.plans.conftest import TABLES

pytestmark = [
    pytest.mark.parametrize("database", MYSQL, indirect=True),
    pytest.mark.capability("plans of hot statements tested against 200 000 other rows"),
]

LIMIT = 100
RULES = SettleRules(retry_strategy=default_retry_strategy())
TO_DEAD = SettleRules(dead_letter_queue="dead")


@pytest.fixture
def dialect(crowded: Engine) -> MysqlDialect:
    return MysqlDialect(TABLES, crowded.dialect)


@pytest.fixture
def connection(crowded: Engine) -> Iterator[Connection]:
    with crowded.connect() as connection:
        yield connection


@contextmanager
def reads(connection: Connection, at_most: int) -> Iterator[None]:
    """Fail if more index entries and rows are read inside."""
    before = read_so_far(connection)
    yield
    counters = {name: value - before[name] for name, value in read_so_far(connection).items()}
    total = sum(value for name, value in counters.items() if "rnd" not in name.lower())
    # Reading the counters themselves costs some; JSON_TABLE's rows are read in sequence too.
    assert total <= at_most, counters
    assert counters["Handler_read_rnd_next"] <= 20 * LIMIT, counters


def read_so_far(connection: Connection) -> dict[str, int]:
    """By the session; FLUSH STATUS would commit what the test has changed."""
    counters = connection.execute(text("SHOW SESSION STATUS LIKE 'Handler_read%'")).all()
    return {name: int(value) for name, value in counters}


def claim(
    dialect: MysqlDialect, connection: Connection, limit: int = LIMIT
) -> list[ClaimedMessage]:
    pairs = [p for p in dialect.find_ready_pairs(connection, ["q"]) if p.due_in <= 0]
    return dialect.build_claim(ClaimRequest(pairs, limit, 60.0, uuid4()))(connection)


def test_the_ready_pairs_are_found_by_a_loose_scan(
    dialect: MysqlDialect, connection: Connection
) -> None:
    with reads(connection, at_most=60):
        assert len(dialect.find_ready_pairs(connection, ["q", "other5", "empty"])) >= 3


@pytest.mark.parametrize("limit", [1, LIMIT])
def test_a_claim_reads_few_rows(dialect: MysqlDialect, connection: Connection, limit: int) -> None:
    with reads(connection, at_most=60 + 6 * limit):
        assert len(claim(dialect, connection, limit)) == limit


def test_a_claim_when_nothing_is_due_reads_few_rows(
    dialect: MysqlDialect, connection: Connection
) -> None:
    connection.execute(
        text("DELETE FROM message WHERE queue = 'q' AND next_attempt_at < UTC_TIMESTAMP(6)")
    )
    pairs = dialect.find_ready_pairs(connection, ["q"])
    assert len(pairs) == 3
    # Deleted rows stay in the index until they are committed and purged, and are stepped over.
    with reads(connection, at_most=60 + 3 * LIMIT * 3):
        assert dialect.build_claim(ClaimRequest(pairs, LIMIT, 60.0, uuid4()))(connection) == []


STEPS: dict[str, Callable[[MysqlDialect, Connection, list[ClaimedMessage]], Any]] = {
    "ack": lambda d, c, rows: d.settle(c, [_settled(r, Ack()) for r in rows]),
    "retry": lambda d, c, rows: d.settle(
        c, [_settled(r, Nack(error=ValueError("no"))) for r in rows]
    ),
    "dead letter": lambda d, c, rows: d.settle(c, [_settled(r, Reject(), TO_DEAD) for r in rows]),
    "renew": lambda d, c, rows: d.renew_free(c, [(r.id, r.lease_token) for r in rows], 60.0),
    "extend": lambda d, c, rows: d.renew(c, [(r.id, r.lease_token) for r in rows], 60.0),
}


def _settled(row: ClaimedMessage, outcome: Outcome, rules: SettleRules | None = None) -> Any:
    return settle(row, outcome, rules or RULES, ended_after=0.1)


@pytest.mark.parametrize("step", STEPS)
def test_settling_reads_by_the_primary_key(
    dialect: MysqlDialect, connection: Connection, step: str
) -> None:
    rows = claim(dialect, connection)
    with reads(connection, at_most=60 + 8 * LIMIT):
        STEPS[step](dialect, connection, rows)


def test_release_reads_expired_leases_only(dialect: MysqlDialect, connection: Connection) -> None:
    rows = claim(dialect, connection)
    with reads(connection, at_most=60 + 2 * LIMIT):
        assert (dialect.get_seconds_to_lease_end(connection, ["q", "other7"]) or 0) > 0
    connection.execute(
        text(
            "UPDATE message SET lease_expires_at = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND "
            "WHERE lease_token = :t"
        ),
        {"t": rows[0].lease_token.hex},
    )
    with reads(connection, at_most=60 + 8 * LIMIT):
        assert dialect.release_stuck(connection, ["q", "other7"], 1000) == LIMIT


def test_a_look_for_replies_reads_its_queue_only(
    dialect: MysqlDialect, connection: Connection
) -> None:
    with reads(connection, at_most=10):
        assert connection.execute(dialect.sql["replies"], {"queue": "none"}).all() == []
    with reads(connection, at_most=10):
        remove_replies(dialect, connection, "none", everything=True)
    rows = connection.execute(dialect.sql["replies"], {"queue": "other7"}).all()
    ids = [row.id for row in rows[:LIMIT]]
    with reads(connection, at_most=60 + 4 * LIMIT):
        dialect.build_remove(ids)(connection)
    connection.rollback()


def test_ordered_claims_do_not_walk_what_waits_behind_a_head(
    dialect: MysqlDialect, connection: Connection
) -> None:
    """The window's rows and a head for each; keys are looked for only where these are too few."""
    insert = "INSERT INTO message (queue, payload, `key`) SELECT 'o', 'x', {} FROM {} s"
    connection.execute(text(insert.format("'m'", mysql_numbers(5_000))))
    connection.execute(text(insert.format("CONCAT('z', MOD(n, 100))", mysql_numbers(1000))))
    pairs = dialect.find_ready_pairs(connection, ["o"])
    with reads(connection, at_most=60 + 10 * LIMIT):
        rows, again = dialect.ordered.claim(connection, pairs, 1, 60.0, uuid4(), Cursors())
    assert ([row.key for row in rows], again) == (["m"], None)
    cursors = Cursors({"o": "n"})
    with reads(connection, at_most=60 + 30 * LIMIT):
        rows, _ = dialect.ordered.claim(connection, pairs, LIMIT // 2, 60.0, uuid4(), cursors)
    assert len(rows) == LIMIT // 2
