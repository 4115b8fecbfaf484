"""PostgreSQL's plans of prepared statements: index ranges and few buffers, in a full table."""

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.dialects.postgresql import asyncpg

from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.postgresql.dialect import PostgresqlDialect
from faststream_sqlbroker.schema.migrate import create_all
from tests.plans.conftest import TABLES, Crowds, analyze, fill_crowd

pytestmark = [
    pytest.mark.parametrize("database", ["postgresql"], indirect=True),
    pytest.mark.capability("plans of hot statements tested against 200 000 other rows"),
]

DRIVER = asyncpg.dialect()
SQL = PostgresqlDialect(TABLES, DRIVER).sql
LEASED = 100


def literal(value: Any) -> str:
    """`value` as SQL text; an array as one untyped literal, which takes the parameter's type."""
    if isinstance(value, list):
        return "'{" + ", ".join("NULL" if v is None else str(v) for v in value) + "}'"
    if value is None:
        return "NULL"
    return f"'{value}'" if isinstance(value, str | UUID | datetime) else str(value)


def explain(connection: Connection, name: str, **binds: Any) -> dict[str, Any]:
    """Run the statement with its generic plan, as a long-lived connection does; the plan with
    figures."""
    compiled = SQL[name].compile(dialect=DRIVER)
    connection.exec_driver_sql("SET plan_cache_mode = force_generic_plan")
    connection.exec_driver_sql("DEALLOCATE ALL")
    connection.exec_driver_sql(f"PREPARE p AS {compiled}".replace("%", "%%"))
    values = ", ".join(literal(binds[b]) for b in compiled.positiontup)
    result = connection.exec_driver_sql(
        f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE p ({values})"
    )
    found = result.scalar_one()
    plan: dict[str, Any] = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
    return plan


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def check(plan: dict[str, Any], *, indexes: set[str], buffers: int) -> None:
    message = [
        n for n in nodes(plan) if n.get("Relation Name") == "message" and "Scan" in n["Node Type"]
    ]
    assert message
    assert not [n for n in message if n["Node Type"] == "Seq Scan"], plan
    assert {n["Index Name"] for n in nodes(plan) if "Index Name" in n} <= indexes
    used = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    assert used <= buffers, f"{used} buffers, at most {buffers} were expected"


def test_a_scan_of_many_queues_is_not_compiled(crowded: Engine) -> None:
    """Compiling it took half a second each time; the planner sees the arrays in the first plans of
    a session."""
    statement = SQL["ready_pairs"].compile(dialect=DRIVER)
    with crowded.connect() as connection:
        jit_above = float(connection.exec_driver_sql("SHOW jit_above_cost").scalar_one())
        connection.exec_driver_sql("SET plan_cache_mode = force_custom_plan")
        connection.exec_driver_sql(f"PREPARE many AS {statement}".replace("%", "%%"))
        names = literal([f"none{n}" for n in range(1000)])
        found = connection.exec_driver_sql(
            f"EXPLAIN (FORMAT JSON) EXECUTE many ({names})"
        ).scalar_one()
        plan = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
    assert plan["Total Cost"] < jit_above / 2


def test_the_ready_pairs_are_found_by_a_loose_scan(crowded: Engine) -> None:
    with crowded.connect() as connection:
        plan = explain(connection, "ready_pairs", queues=["q", "other5", "empty"])
        check(plan, indexes={"message_ready"}, buffers=100)


CLAIMS = ("claim", "claim_apart", "claim_others")


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("limit", [1, 100])
def test_a_claim_reads_few_buffers(crowded: Engine, limit: int, name: str) -> None:
    """Updating 100 rows touches their pages and four indexes; reading them must add little."""
    with crowded.connect() as connection:
        binds = {"limit": limit, "lease": 60.0, "token": uuid4(), **SuspectRule().binds}
        plan = explain(
            connection, name, queues=["q"] * 3, priorities=[2, 1, 0], since=[None] * 3, **binds
        )
        check(plan, indexes={"message_ready"}, buffers=60 + 40 * limit)
        reading = next(n for n in nodes(plan) if n.get("Index Name") == "message_ready")
        assert reading["Actual Rows"] * reading["Actual Loops"] <= limit + 2


def test_a_claim_when_nothing_is_due_reads_few_buffers(crowded: Engine) -> None:
    with crowded.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(
            text("DELETE FROM message WHERE queue = 'q' AND next_attempt_at < now()")
        )
        connection.execute(text("VACUUM message"))
    with crowded.connect() as connection:
        binds = {"limit": 100, "lease": 60.0, "token": uuid4()}
        plan = explain(
            connection, "claim", queues=["q"] * 3, priorities=[2, 1, 0], since=[None] * 3, **binds
        )
        check(plan, indexes={"message_ready"}, buffers=60)


def fill_deep(engine: Engine) -> None:
    with engine.begin() as connection:
        create_all(connection, TABLES)
        connection.execute(text("ALTER TABLE message SET (autovacuum_enabled = false)"))
        rows = "SELECT 'deep', 'x' FROM generate_series(1, 20000)"
        connection.execute(text(f"INSERT INTO message (queue, payload) {rows}"))


@pytest.fixture
def deep(crowds: Crowds, database: str) -> Iterator[Engine]:
    """One queue of many due messages, which no ANALYZE has seen."""
    with crowds.of(database, fill_deep) as engine:
        yield engine


@pytest.mark.parametrize("name", ["claim_ids", "claim_ids_apart", "swap"])
def test_a_claim_of_one_row_does_not_read_its_queue(deep: Engine, name: str) -> None:
    with deep.connect() as connection:
        columns = "message_policy_state (scope, key, counter)"
        connection.execute(text(f"INSERT INTO {columns} VALUES ('ordered', 'deep', 1)"))
        found = connection.execute(text("SELECT max(id) FROM message")).scalar_one()
        swapped = {"queue": "deep", "version": 1, "scopes": [], "infos": [], "expiries": []}
        binds = {"lease": 60.0, "token": uuid4(), "limit": 1, "queues": ["deep"], **swapped}
        plan = explain(connection, name, ids=[found], **binds, **SuspectRule().binds)
        check(plan, indexes={"message_pkey", "message_policy_state_pkey"}, buffers=60)
        leased = "SELECT count(*) FROM message WHERE state = 'PROCESSING'"
        assert connection.execute(text(leased)).scalar_one() == 1


BY_IDS: dict[str, dict[str, Any]] = {
    "ordered_heads": {"mask": 0},
    "ordered_heads_others": {"mask": 0, **SuspectRule().binds},
    "ordered_soon": {},
}


@pytest.mark.parametrize("name", BY_IDS)
def test_a_step_of_a_policy_does_not_read_its_queue(deep: Engine, name: str) -> None:
    with deep.connect() as connection:
        found = connection.execute(text("SELECT max(id) FROM message")).scalar_one()
        plan = explain(connection, name, ids=[found], **BY_IDS[name])
        check(plan, indexes={"message_pkey"}, buffers=60)


def test_a_claim_that_begins_late_does_not_read_what_a_held_snapshot_keeps(crowded: Engine) -> None:
    """VACUUM cannot remove 5 000 dead rows that another session might still want to see."""
    insert = (
        "INSERT INTO message (queue, payload, next_attempt_at) "
        "SELECT 's', 'x', now() - {} FROM generate_series(1, {})"
    )
    with crowded.connect() as holder, crowded.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        connection.execute(text(insert.format("interval '1 minute'", 5000)))
        snapshot = holder.execution_options(isolation_level="REPEATABLE READ")
        snapshot.execute(text("SELECT count(*) FROM message"))
        connection.execute(text("DELETE FROM message WHERE queue = 's'"))
        connection.execute(text(insert.format("interval '1 second'", 10)))
        # Before what is due, and after what is dead, however long the machine paused in between.
        due = "SELECT min(next_attempt_at) - interval '10 seconds' FROM message WHERE queue = 's'"
        begin = connection.execute(text(due)).scalar_one()
        buffers = {}
        for name, since in (("all", None), ("late", begin)):
            binds = {"limit": 5, "lease": 60.0, "token": uuid4()}
            plan = explain(
                connection, "claim", queues=["s"], priorities=[0], since=[since], **binds
            )
            [reading] = [n for n in nodes(plan) if n.get("Index Name") == "message_ready"]
            assert reading["Actual Rows"] == 5
            buffers[name] = reading["Shared Hit Blocks"] + reading["Shared Read Blocks"]
    assert buffers["late"] * 10 < buffers["all"], buffers


@pytest.fixture
def leased(crowded: Engine) -> Iterator[tuple[Connection, dict[str, list[Any]]]]:
    """A connection, and 100 rows leased on it by two tokens."""
    with crowded.connect() as connection:
        ids = list(
            connection.execute(
                text("SELECT id FROM message WHERE queue = 'other7' LIMIT 100")
            ).scalars()
        )
        tokens = [uuid4(), uuid4()]
        token_of = [tokens[n % 2] for n in range(LEASED)]
        for n, token in enumerate(tokens):
            connection.execute(
                text(
                    "UPDATE message SET state = 'PROCESSING', lease_token = :t, "
                    "acquired_at = now(), lease_expires_at = now() - interval '1 second' "
                    "WHERE id = ANY(:ids)"
                ),
                {"t": token, "ids": ids[n::2]},
            )
        yield connection, {"ids": ids, "tokens": token_of}


ON_ACK: dict[str, Any] = {
    "owners": 0,
    "queues": "answers",
    "payloads": "1",
    "headers": None,
    "priorities": 0,
    "keys": None,
    "delays": None,
    "times": None,
    "expiries": None,
}
SETTLED: dict[str, dict[str, Any]] = {
    "archive": {"reasons": None, "related": None, "fingerprints": None},
    "archive_acked": {"ends": 500_000},
    "archive_acked_on_ack": {"ends": 500_000, **ON_ACK},
    "delete": {},
    "delete_on_ack": ON_ACK,
    "update": {
        "delays": 1.5,
        "queues": None,
        "new_keys": None,
        "payloads": None,
        "headers": None,
        "published": 0,
        "hops": None,
    },
    "renew": {"lease": 60.0},
    "held": {},
}


@pytest.mark.parametrize("name", SETTLED)
def test_settling_reads_by_the_primary_key(
    leased: tuple[Connection, dict[str, list[Any]]], name: str
) -> None:
    """Plans made when nothing was PROCESSING must not fall for the leased index."""
    connection, pairs = leased
    extra = {k: v if k == "lease" else [v] * LEASED for k, v in SETTLED[name].items()}
    if "owners" in extra:
        extra["owners"] = pairs["ids"]
    if name in {"archive", "update"}:
        extra |= {
            "states": ["COMPLETED" if name == "archive" else "RETRYABLE"] * LEASED,
            "attempts": [1] * LEASED,
            "charges": [0] * LEASED,
            "ends": [0.5] * LEASED,
            "errors": ["no"] * LEASED,
        }
    plan = explain(connection, name, **pairs, places=list(range(1, LEASED + 1)), **extra)
    check(plan, indexes={"message_pkey"}, buffers=60 * LEASED)


def test_release_reads_expired_leases_only(leased: tuple[Connection, dict[str, list[Any]]]) -> None:
    connection, _ = leased
    plan = explain(connection, "lease_ends_in", queues=["q", "other7"])
    check(plan, indexes={"message_leased"}, buffers=60)
    for before in (None, datetime.now(timezone.utc)):
        binds = {"queues": ["q", "other7"], "limit": 1000, "before": before}
        plan = explain(connection, "release_stuck", **binds)
        check(plan, indexes={"message_leased"}, buffers=60 * LEASED)


def test_a_look_for_replies_reads_its_queue_only(crowded: Engine) -> None:
    """A queue with none is looked at every 10 ms; and it does not hide behind due messages."""
    with crowded.connect() as connection:
        for queue in ("none", "other7"):
            plan = explain(connection, "left_replies", queue=queue, everything=0)
            check(plan, indexes={"message_ready"}, buffers=2_000 if queue == "other7" else 20)
        plan = explain(connection, "replies", queue="none")
        check(plan, indexes={"message_ready"}, buffers=20)
        plan = explain(connection, "remove", ids=[1, 2, 3])
        check(plan, indexes={"message_pkey"}, buffers=60)
        connection.rollback()


BLOCKED = 20_000
SIZE = 100


def fill_one_key(engine: Engine) -> None:
    insert = (
        "INSERT INTO message (queue, payload, key, policy_key) "
        "SELECT 'o', 'x', {0}, {0} FROM generate_series(1, {1}) AS s(n)"
    )
    with engine.begin() as connection:
        connection.execute(text(insert.format("'m'", BLOCKED)))
        connection.execute(text(insert.format("'z' || s.n % 100", 1000)))
        connection.execute(
            text(
                "UPDATE message SET state = 'PROCESSING', lease_token = gen_random_uuid(), "
                "lease_expires_at = now() + interval '1 hour' "
                "WHERE id = (SELECT min(id) FROM message WHERE queue = 'o')"
            )
        )
    analyze(engine, "message")


@pytest.fixture
def one_key(crowds: Crowds, database: str) -> Iterator[Engine]:
    """Many due messages of one key, the first of them leased, and a hundred other keys behind."""
    with crowds.of(database, fill_crowd, fill_one_key) as engine:
        yield engine


ORDERED: dict[str, dict[str, Any]] = {
    "ordered_window": {"queue": "o", "priority": 0, "size": SIZE, "mask": 0},
    "ordered_window_others": {
        "queue": "o",
        "priority": 0,
        "size": SIZE,
        "mask": 0,
        **SuspectRule().binds,
    },
    "ordered_keys": {"queue": "o", "start": "", "size": SIZE},
    "ordered_free": {
        "queue": "o",
        "priority": 0,
        "size": 1000,
        "due": "2000-01-01",
        "id": 0,
        "mask": 0,
    },
    "ordered_busy": {"queue": "o"},
}


@pytest.mark.parametrize("column", ["key", "policy_key"])
@pytest.mark.parametrize("name", ORDERED)
def test_ordered_claims_do_not_walk_what_waits_behind_a_head(
    one_key: Engine, name: str, column: str
) -> None:
    """A descent or two of an index for each message or key that is looked at; also for the limits
    of each tenant in a header, whatever other key Once has."""
    sent = name
    if column == "policy_key":
        # A limit of each key reads the first message of a key that can be claimed.
        sent = {"ordered_keys": "ordered_keys_ready"}.get(name, name) + "_by_header"
    with one_key.connect() as connection:
        given = ORDERED[name] | ({"mask": 0} if sent == "ordered_keys_ready_by_header" else {})
        plan = explain(connection, sent, **given)
        check(
            plan,
            indexes={"message_ready", f"message_{column}", "message_leased"},
            buffers=60 + 10 * SIZE,
        )
