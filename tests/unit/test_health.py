"""What of a report is a problem."""

from dataclasses import replace

from faststream_sqlbroker.core.health import (
    DatabaseHealth,
    Health,
    OpenTransaction,
    ProcessHealth,
    SubscriberHealth,
    TableHealth,
    sort_by_age,
)

FINE = Health(
    database=DatabaseHealth(version="PostgreSQL 15.18", autovacuum=True),
    clock_difference=0.0,
    clock_doubt=0.0,
    pool_used=4,
    pool_limit=5,
    process=ProcessHealth(),
    lacks=(),
    schema=(),
)
SESSION = OpenTransaction(
    kind="session",
    name="17",
    user="ada",
    application="report",
    state="idle in transaction",
    age=301.2,
    query="SELECT *\n  FROM sales",
)
TABLE = TableHealth(
    table="message", live_rows=0, dead_rows=0, inserted_rows=0, last_vacuum_ago=None, options=()
)


def with_table(**values: object) -> list[str]:
    table = replace(TABLE, **values)  # type: ignore[arg-type]
    return replace(FINE, database=replace(FINE.database, tables=(table,))).problems


def with_session(**values: object) -> list[str]:
    session = replace(SESSION, **values)  # type: ignore[arg-type]
    return replace(FINE, database=replace(FINE.database, transactions=(session,))).problems


def test_nothing_is_wrong_by_itself() -> None:
    assert FINE.problems == []
    assert all(texts == [] for texts in FINE.findings().values())


def test_a_transaction_counts_from_its_age() -> None:
    [problem] = with_session()
    assert problem == (
        "transactions: session 17, report, ada, idle in transaction, open for 301 s: SELECT * FROM "
        "sales prevents the removal of dead rows: end it"
    )
    assert with_session(age=299.0) == []
    assert with_session(kind="standby", age=None) == [], "it may see only what is new"
    assert with_session(kind="replication slot", age=None) != []


def test_clocks_may_differ_by_what_is_not_known() -> None:
    assert replace(FINE, clock_difference=-5.5).problems != []
    assert replace(FINE, clock_difference=-5.5, clock_doubt=1.0).problems == []
    assert replace(FINE, clock_difference=5.5).problems != []


def test_a_pool_is_used_up_at_its_limit() -> None:
    assert [p.partition(":")[0] for p in replace(FINE, pool_used=5).problems] == ["pool"]
    assert replace(FINE, pool_used=5, pool_limit=None).problems == []
    assert replace(FINE, pool_used=None, pool_limit=5).problems == []


def test_dead_rows_are_a_problem_if_they_are_many_more_than_live_ones() -> None:
    assert with_table(dead_rows=10_000) == []
    [problem] = with_table(dead_rows=40_000, live_rows=220, last_vacuum_ago=61.0)
    assert problem == (
        "dead rows: message has 40000 dead rows and 220 live rows, last vacuum 61 s ago: end old "
        "transactions, then run VACUUM"
    )
    assert with_table(dead_rows=40_000, live_rows=8_000) == []
    assert "no vacuum yet" in with_table(dead_rows=40_000)[0]


def test_dead_rows_of_the_messages_since_the_last_vacuum_are_no_problem() -> None:
    busy = {"dead_rows": 1_000_000, "inserted_rows": 400_000}
    assert with_table(**busy, last_vacuum_ago=45.0) == []
    assert with_table(**busy | {"inserted_rows": 1_000}, last_vacuum_ago=45.0) != []
    assert with_table(**busy, last_vacuum_ago=301.0) != []
    assert with_table(options=("autovacuum_enabled=false",)) != []
    off = replace(FINE, database=replace(FINE.database, autovacuum=False))
    assert len(off.problems) == 1


def test_undo_records_that_are_not_purged_are_a_problem() -> None:
    for backlog, wrong in ((1_000_000, 0), (1_000_001, 1)):
        database = DatabaseHealth(version="MySQL 9.7.4", purge_backlog=backlog)
        assert len(replace(FINE, database=database).problems) == wrong


def test_a_subscriber_that_fails_is_named() -> None:
    one = SubscriberHealth(
        queues=("orders", "mails"),
        worker="host:1:ab",
        healthy=False,
        last_claim_ago=12.0,
        last_flush_ago=None,
        held=3,
    )
    process = ProcessHealth(subscribers=(one,))
    assert replace(FINE, process=process).problems == [
        "subscribers: host:1:ab of orders, mails fails: last claim 12 s ago, no flush yet"
    ]
    fine = ProcessHealth(subscribers=(replace(one, healthy=True),))
    assert replace(FINE, process=fine).problems == []


def test_rights_and_tables_are_problems_as_they_are() -> None:
    found = replace(FINE, lacks=("SELECT on message",), schema=("column x is missing",))
    assert found.problems == ["tables: column x is missing", "rights: SELECT on message"]


def test_transactions_are_sorted_by_age() -> None:
    ages = (3.0, None, 12.0, 0.5)
    found = sort_by_age([replace(SESSION, age=age) for age in ages])
    assert [each.age for each in found] == [None, 12.0, 3.0, 0.5]
