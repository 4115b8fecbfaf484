"""Claims with and without policies read due messages only."""

import json
import os
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url, text

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies import (
    Concurrency,
    Debounce,
    Delay,
    Policy,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.policies.flags import HELD_BURST
from faststream_sqlbroker.core.policies.standby import STANDBY
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.mysql.dialect import MysqlDialect
from faststream_sqlbroker.database.policies.claims import PolicyClaims
from faststream_sqlbroker.database.policies.request import PolicyClaimRequest, ScanPosition
from faststream_sqlbroker.schema.migrate import create_all
from tests.helpers import MYSQL
from tests.plans.conftest import SYNC_DRIVERS, TABLES
from tests.plans.test_mysql import reads
from tests.plans.test_postgresql import explain, nodes

pytestmark = pytest.mark.timeout(1800)

DELAYED = int(os.environ.get("SQLBROKER_TEST_DELAYED", "1000000"))
DUE = 300
MORE = 20
"""Buffers by which a deeper index may lengthen the descents of one statement."""


@pytest.fixture
def few(database_url: str) -> Iterator[Engine]:
    """A synchronous engine on tables with a few due messages."""
    engine = create_engine(make_url(database_url).set(drivername=SYNC_DRIVERS["postgresql"]))
    with engine.begin() as connection:
        create_all(connection, TABLES)
        put(connection, DUE, "statement_timestamp()")
    yield engine
    engine.dispose()


def put(connection: Connection, count: int, due: str) -> None:
    """Messages of a hundred keys and three priorities."""
    columns = "queue, payload, priority, key, next_attempt_at"
    values = f"'q', 'x', n % 3, 'k' || n % 100, {due}"
    connection.execute(
        text(
            f"INSERT INTO message ({columns}) SELECT {values} "
            f"FROM generate_series(1, {count}) AS s(n)"
        )
    )


LATER = 4_000_000_000_000_000
"""Microseconds since 1970, in the year 2096."""
ONE: dict[str, Any] = {"queue": "q", "priority": 0}
LOOK: dict[str, Any] = {"queues": ["q"], "size": 100, "most": 100, "scopes": ["throttle0:"]}
STATEMENTS: dict[str, dict[str, Any]] = {
    "ready_pairs": {"queues": ["q"]},
    "claim": {
        "queues": ["q"] * 3,
        "priorities": [2, 1, 0],
        "since": [None] * 3,
        "limit": 100,
        "lease": 60.0,
    },
    "policy_arrivals": {**ONE, "before": 0, "own": 2, "since": 0, "size": 5000},
    "policy_due": {**ONE, "before": 0, "now": LATER, "size": 100},
    "policy_due_others": {**ONE, "before": 0, "now": LATER, "size": 100, **SuspectRule().binds},
    "policy_standby_due": {**ONE, "now": STANDBY + LATER, "size": 1},
    "policy_running": {"queue": "q", "size": 100},
    "ordered_window": {**ONE, "size": 100, "mask": 0},
    "look": LOOK,
    "look_others": {**LOOK, **SuspectRule().binds},
}


def buffers(engine: Engine) -> dict[str, int]:
    """The rows that each statement of a claim reads; the claim is rolled back."""
    used = {}
    with engine.connect() as connection:
        for name, binds in STATEMENTS.items():
            given = {**binds, "token": uuid4()} if name == "claim" else binds
            plan = explain(connection, name, **given)
            # What a claim writes goes into every index: only what it reads to find its messages
            # counts.
            finds = (
                [n for n in nodes(plan) if n.get("Index Name") == "message_ready"]
                if name == "claim"
                else [plan]
            )
            used[name] = sum(n["Shared Hit Blocks"] + n["Shared Read Blocks"] for n in finds)
            connection.rollback()
    return used


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_million_delayed_messages_change_nothing(few: Engine) -> None:
    """P1, Z6."""
    vacuum(few)
    before = buffers(few)
    with few.begin() as connection:
        put(
            connection,
            DELAYED,
            "statement_timestamp() + n * interval '1 millisecond' + interval '1 hour'",
        )
    vacuum(few)
    after = buffers(few)
    # A descent for each message and each of its keys, which are fifty.
    assert before["ordered_window"] < 1_000
    more = {name: 200 if name == "ordered_window" else MORE for name in before}
    assert {name: used for name, used in after.items() if used > before[name] + more[name]} == {}, (
        before,
        after,
    )


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("mask", [0, 1])
def test_a_table_that_was_never_analysed_is_read_by_its_index(few: Engine, mask: int) -> None:
    """A condition on marks that the planner takes to be rare made it read all that is due, and sort
    it, for each claim of a backlog."""
    with few.begin() as connection:
        put(connection, 20_000, "statement_timestamp()")
        connection.execute(text("UPDATE message SET policy_marks = :mask"), {"mask": mask})
    marked = {"before": mask, "mask": mask}
    with few.connect() as connection:
        for name in (
            "policy_due",
            "policy_due_others",
            "policy_arrivals",
            "policy_standby_due",
            "look",
            "ordered_window",
        ):
            given = {each: marked.get(each, value) for each, value in STATEMENTS[name].items()}
            seen = nodes(explain(connection, name, **{**given, "size": 100}))
            scans = [n for n in seen if n.get("Relation Name") == "message"]
            assert scans
            assert {n["Node Type"] for n in scans} <= {"Index Scan", "Index Only Scan"}, name


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("statistics", ["none", "old", "fresh"])
def test_what_stands_by_for_some_keys_is_found_by_them(few: Engine, statistics: str) -> None:
    """Not by its due times: that would be all that stands by, with each claim."""
    if statistics == "old":
        vacuum(few)
    with few.begin() as connection:
        put(connection, 20_000, f"timestamptz 'epoch' + {STANDBY + LATER} * interval '1 us'")
        marked = {"held": HELD_BURST}
        connection.execute(text("UPDATE message SET policy_marks = :held"), marked)
    if statistics == "fresh":
        vacuum(few)
    keys = [{"n": n, "k": f"k{n}", "low": 0, "high": 2**62} for n in range(3)]
    with few.connect() as connection:
        for name in ("policy_standby_first", "policy_standby_last"):
            plan = explain(connection, name, queue="q", rows=json.dumps(keys), size=5_000)
            [scan] = [n for n in nodes(plan) if n.get("Relation Name") == "message"]
            assert scan["Index Name"] == "message_key", (name, scan)
            assert scan["Actual Loops"] == len(keys), (name, scan)
            assert plan["Actual Rows"] == 600


def vacuum(engine: Engine) -> None:
    """Fresh statistics, and no work left for later."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE message"))


LIMIT = 100
WHOLE: list[list[Policy]] = [
    [Concurrency(1000)],
    [Throttle(1000, "1s", burst=1000)],
    [Window("00:00", "24:00")],
    [Concurrency(1000, per_key=True)],
]
INTAKE: list[list[Policy]] = [[Delay("1h")], [Debounce("1h")]]


@pytest.mark.parametrize("database", MYSQL, indirect=True)
@pytest.mark.parametrize("policies", [*WHOLE, *INTAKE], ids=str)
def test_a_claim_reads_what_is_due(crowded: Engine, policies: list[Policy]) -> None:
    """Among thousands of delayed messages of the queue and as many of others."""
    claims = PolicyClaims(MysqlDialect(TABLES, crowded.dialect), Clock())
    with crowded.connect() as connection:
        wanted = PolicyClaimRequest(["q"], LIMIT, 60.0, uuid4(), policies)
        if policies in INTAKE:
            with reads(connection, at_most=200 + 12 * DUE):
                found = claims.claim(connection, wanted, ScanPosition()).rows
                assert found == [] or policies == INTAKE[1]
            return
        with reads(connection, at_most=200 + 12 * LIMIT):
            assert len(claims.claim(connection, wanted, ScanPosition()).rows) == LIMIT
