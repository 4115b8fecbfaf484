"""The rows read for a subscriber of 1 000 queues on MariaDB, MySQL and SQLite: a few index
entries a queue."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.dialects import sqlite

from faststream_sqlbroker.core.rows import ClaimRequest, ReadyPair
from faststream_sqlbroker.database.mysql.dialect import MysqlDialect
from faststream_sqlbroker.database.mysql.many_queues import FIRST_ROWS
from faststream_sqlbroker.database.sqlite.dialect import SqliteDialect
from faststream_sqlbroker.schema.migrate import create_all
from tests.plans.conftest import SYNC_DRIVERS, TABLES
from tests.plans.test_mysql import read_so_far

mysqls = pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
statistics = pytest.mark.parametrize(
    "analyzed", [True, False], ids=["fresh statistics", "stale statistics"]
)

COUNT = 1_000
DUE = 10_000
LATER = 20_000
LIMIT = 100
NAMES = [f"q{n:04d}" for n in range(COUNT)]
CROWDED = NAMES[500]
POSTPONED = NAMES[20]
"""One has many due rows of each of three priorities, one many of a later day; of each queue one row
is due."""


def numbers(count: int) -> str:
    """Rows with a number `n` from 0."""
    return (
        "(WITH RECURSIVE s(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM s "
        f"WHERE n < {count - 1}) SELECT n FROM s) s"
    )


@pytest.fixture
def queues(database: str, database_url: str, analyzed: bool) -> Iterator[Connection]:
    """A connection to the tables; if not `analyzed`, statistics say that they are empty."""
    engine: Engine = create_engine(make_url(database_url).set(drivername=SYNC_DRIVERS[database]))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        create_all(connection, TABLES)
        deep = "max_recursive_iterations" if database == "mariadb" else "cte_max_recursion_depth"
        connection.execute(text(f"SET SESSION {deep} = 1000000"))
        connection.execute(text("ALTER TABLE message STATS_AUTO_RECALC = 0"))
        connection.execute(text("ANALYZE TABLE message"))
        insert = "INSERT INTO message (queue, payload, priority, next_attempt_at) SELECT"
        now = "UTC_TIMESTAMP(6)"
        later = "UTC_TIMESTAMP(6) + INTERVAL 3600 + s.n SECOND"
        for values, count in (
            (f"CONCAT('q', LPAD(s.n, 4, '0')), 'x', 0, {now}", COUNT),
            (f"'{CROWDED}', 'x', 5 * MOD(s.n, 3), {now}", DUE),
            (f"'{POSTPONED}', 'x', 0, {later}", LATER),
            (f"'another', 'x', 0, {now}", DUE),
        ):
            connection.execute(text(f"{insert} {values} FROM {numbers(count)}"))
        if analyzed:
            connection.execute(text("ANALYZE TABLE message"))
    with engine.connect() as connection:
        connection.execute(text("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"))
        connection.commit()
        yield connection
    engine.dispose()


@contextmanager
def reads(connection: Connection, at_most: int) -> Iterator[None]:
    """Fail if more index entries and rows of the table are read inside."""
    before = read_so_far(connection)
    yield
    counters = {name: value - before[name] for name, value in read_so_far(connection).items()}
    # Lists given as JSON are tables that are read one by one.
    total = sum(value for name, value in counters.items() if "rnd" not in name.lower())
    assert total <= at_most, counters


@mysqls
@statistics
def test_a_scan_descends_to_the_ends_of_each_queue(queues: Connection) -> None:
    dialect = MysqlDialect(TABLES, queues.dialect)
    for _ in range(2):  # what is read once, of the data dictionary too
        with reads(queues, at_most=6 * COUNT):
            pairs = dialect.find_ready_pairs(queues, NAMES)
    assert len(pairs) == COUNT + 2
    assert [p.priority for p in pairs if p.queue == CROWDED] == [10, 5, 0]
    with reads(queues, at_most=2 * COUNT):
        assert dialect.find_ready_pairs(queues, [f"none{n}" for n in range(COUNT)]) == []


@mysqls
@statistics
def test_a_claim_of_many_pairs_reads_what_it_leases(queues: Connection) -> None:
    dialect = MysqlDialect(TABLES, queues.dialect)
    pairs = [ReadyPair(name, 0, 0.0) for name in NAMES]
    dialect.build_claim(ClaimRequest(pairs[:10], 1, 60.0, uuid4()))(queues)
    with reads(queues, at_most=(2 * FIRST_ROWS + 10) * LIMIT):
        found = dialect.build_claim(ClaimRequest(pairs[10 : 3 * LIMIT], LIMIT, 60.0, uuid4()))(
            queues
        )
    assert [m.queue for m in found] == NAMES[10 : LIMIT + 10]
    crowded = [*pairs[200:210], ReadyPair(CROWDED, 5, 0.0), *pairs[210:220]]
    with reads(queues, at_most=(2 * FIRST_ROWS + 10) * LIMIT):
        found = dialect.build_claim(ClaimRequest(crowded, LIMIT, 60.0, uuid4()))(queues)
    assert [m.queue for m in found] == [*NAMES[200:210], *[CROWDED] * (LIMIT - 10)]


@mysqls
@statistics
def test_expired_leases_of_many_queues_are_found_among_them(queues: Connection) -> None:
    dialect = MysqlDialect(TABLES, queues.dialect)
    token = uuid4()
    claimed = dialect.build_claim(ClaimRequest([ReadyPair(CROWDED, 0, 0.0)], LIMIT, 60.0, token))(
        queues
    )
    assert len(claimed) == LIMIT
    for _ in range(2):  # what is read once, of the data dictionary too
        with reads(queues, at_most=4 * COUNT + 2 * LIMIT):
            ends_in = dialect.get_seconds_to_lease_end(queues, NAMES)
    assert ends_in is not None
    assert 0 < ends_in <= 60.0
    with reads(queues, at_most=4 * COUNT + 10 * LIMIT):
        assert dialect.release_stuck(queues, NAMES, 1_000) == 0
    queues.execute(
        text(
            "UPDATE message SET lease_expires_at = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND "
            "WHERE lease_token = :t"
        ),
        {"t": token.hex},
    )
    with reads(queues, at_most=4 * COUNT + 10 * LIMIT):
        assert dialect.release_stuck(queues, NAMES, 1_000) == LIMIT
    dialect.build_claim(ClaimRequest([ReadyPair(CROWDED, 0, 0.0)], LIMIT, 60.0, token))(queues)
    with reads(queues, at_most=4 * COUNT + 12 * LIMIT):
        assert dialect.release_claim(queues, NAMES, token) == LIMIT


DRIVER = sqlite.dialect(paramstyle="named")
STEPS = {
    "ready_pairs": [
        "SEARCH m USING INDEX message_ready (queue=?)",
        "SEARCH m USING INDEX message_ready (queue=? AND priority<?)",
        "SEARCH m USING INDEX message_ready (queue=? AND priority=?)",
        # Whether there are due times that are none, at both ends.
        "SEARCH m USING INDEX message_ready (queue=? AND priority=? AND next_attempt_at<?)",
        "SEARCH m USING INDEX message_ready (queue=? AND priority=? AND next_attempt_at>?)",
    ],
    "unusable": [
        "SEARCH m USING INDEX message_ready (queue=? AND priority=? AND next_attempt_at<?)",
        "SEARCH m USING INDEX message_ready (queue=? AND priority=? AND next_attempt_at>?)",
    ],
    "claim": ["SEARCH m USING INDEX message_ready (queue=? AND priority=? AND next_attempt_at<?)"],
    "claim_others": [
        "SEARCH m USING INDEX message_ready (queue=? AND priority=? AND next_attempt_at<?)"
    ],
    "claim_apart": [
        "SEARCH m USING INDEX message_ready (queue=? AND priority=? AND next_attempt_at<?)"
    ],
    "lease_ends_in": ["SEARCH m USING INDEX message_leased (queue=? AND lease_expires_at>?)"],
    "release_stuck": ["SEARCH m USING INDEX message_leased (queue=? AND lease_expires_at<?)"],
    "release_claim": ["SEARCH m USING INDEX message_leased (queue=?)"],
}


@pytest.mark.parametrize("name", STEPS)
def test_sqlite_searches_the_index_for_each_queue(name: str, tmp_path: Path) -> None:
    """And sorts nothing but the pairs that it has found."""
    path = tmp_path / "test.db"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        create_all(connection, TABLES)
    engine.dispose()
    compiled = SqliteDialect(TABLES, DRIVER).sql[name].compile(dialect=DRIVER)
    raw = sqlite3.connect(path)
    binds: dict[str, Any] = dict.fromkeys(compiled.params, 1)
    plan = raw.execute(f"EXPLAIN QUERY PLAN {compiled}", binds)
    # Whether the index alone is read is no matter here, and versions of SQLite differ in it.
    rows = [row[3].replace("COVERING INDEX", "INDEX") for row in plan]
    raw.close()
    assert sorted(row for row in rows if " m " in row) == sorted(STEPS[name]), rows
    assert any("TEMP B-TREE" in row for row in rows) == (name == "ready_pairs"), rows
