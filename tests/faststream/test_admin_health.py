"""broker.admin.health: what the server tells, and what of it is a problem."""

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SetupError, SqlBroker
from faststream_sqlbroker.admin import Health
from tests.accounts import account
from tests.faststream.conftest import QUICK, Look
from tests.helpers import bytes_in_a_statement, eventually

pytestmark = pytest.mark.capability("`broker.admin.health`: server, rights, clocks, subscribers")


async def test_a_broker_that_works_has_no_problems(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK)
    async def handle(_body: int) -> None: ...

    await broker.start()
    await broker.publish(1, "q")
    await look.archived()

    async def at_rest() -> Health | None:
        # Other tests use the server, so their transactions are not counted as old.
        health = await broker.admin.health(old_transaction="24h")
        return None if any(each.held for each in health.process.subscribers) else health

    health = await eventually(at_rest)
    assert health is not None
    assert health.problems == []
    [subscriber] = health.process.subscribers
    [known] = await eventually(broker.admin.subscribers)
    assert (subscriber.worker, subscriber.queues, subscriber.held) == (known.worker, ("q",), 0)
    assert subscriber.healthy
    assert subscriber.last_claim_ago is not None
    assert subscriber.last_flush_ago is not None
    assert subscriber.last_claim_ago >= 0 <= subscriber.last_flush_ago
    assert abs(health.clock_difference) <= 1 + health.clock_doubt, "the same machine's"
    assert health.pool_limit is None or health.pool_used is not None


async def test_the_server_tells_its_version(broker: SqlBroker, database: str) -> None:
    health = await broker.admin.health()
    name, version = health.database.version.split()
    names = {
        "postgresql": "PostgreSQL",
        "mariadb": "MariaDB",
        "mysql": "MySQL",
        "sqlite": "SQLite",
    }
    assert name == names[database]
    assert version.split(".")[0].isdigit()
    tables = [table.table for table in health.database.tables]
    assert bool(tables) is (database == "postgresql")
    assert health.database.hidden is None, "the tests' user may see all"


@pytest.mark.capability(
    "`broker.admin.health`: an old transaction is named, which holds up vacuum and loads"
)
@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_an_old_transaction_is_named(
    broker: SqlBroker, database: str, database_url: str
) -> None:
    """It keeps dead rows from being removed, which slows every claim down. SQLite cannot tell."""
    options: dict[str, Any] = {}
    if "asyncpg" in database_url:
        options = {"connect_args": {"server_settings": {"application_name": "report"}}}
    engine = create_async_engine(database_url, **options)
    async with engine.connect() as connection:
        own = "pg_backend_pid()" if database == "postgresql" else "CONNECTION_ID()"
        number = (await connection.execute(text(f"SELECT {own}"))).scalar_one()
        await connection.execute(text("SELECT count(*) FROM message_policy_state"))
        await connection.execute(text("DELETE FROM message_policy_state WHERE scope = 'none'"))

        async def seen() -> Health | None:
            found = await broker.admin.health(old_transaction=0.1)
            return found if any(str(number) in text for text in found.problems) else None

        health = await eventually(seen)
        assert health is not None
        [one] = [each for each in health.database.transactions if each.name == str(number)]
        assert one.kind == "session"
        assert one.age is not None
        assert one.age >= 0.1
        if options:
            assert one.application == "report"
            assert one.query is not None
            assert "message_policy_state" in one.query
        [problem] = [each for each in health.problems if f"session {number}" in each]
        assert problem.startswith("transactions: ")
        patient = await broker.admin.health(old_transaction="1h")
        assert not any(str(number) in each for each in patient.problems)
    await engine.dispose()


async def test_a_missing_table_is_a_problem_and_nothing_else_fails(engine: AsyncEngine) -> None:
    broker = SqlBroker(engine, logger=None)

    @broker.subscriber("q")
    async def handle(_body: int) -> None: ...

    health = await broker.admin.health(old_transaction="24h")
    assert any("'message' is missing: " in each for each in health.schema)
    assert {each.partition(":")[0] for each in health.problems} >= {"tables", "rights"}


async def test_autovacuum_that_is_off_is_a_problem(
    broker: SqlBroker, engine: AsyncEngine, database: str
) -> None:
    if database != "postgresql":
        pytest.skip("only PostgreSQL has autovacuum")
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE message SET (autovacuum_enabled = false)"))
    health = await broker.admin.health(old_transaction="24h")
    [problem] = health.problems
    assert problem == (
        "dead rows: message has autovacuum_enabled=false: ALTER TABLE message RESET "
        "(autovacuum_enabled)"
    )


async def test_a_subscriber_whose_loops_fail_is_a_problem(
    broker: SqlBroker, engine: AsyncEngine
) -> None:
    @broker.subscriber("q", **QUICK)
    async def handle(_body: int) -> None: ...

    await broker.start()
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE message RENAME TO elsewhere"))

    async def told() -> list[str]:
        problems = (await broker.admin.health(old_transaction="24h")).problems
        return [each for each in problems if each.startswith("subscribers: ")]

    [problem] = await eventually(told)
    assert " of q fails: last claim " in problem
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE elsewhere RENAME TO message"))


async def test_all_connections_in_use_are_a_problem(database_url: str) -> None:
    engine = create_async_engine(database_url, pool_size=2, max_overflow=0)
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    async with engine.connect():
        # The look itself takes the second one, and gives it back.
        health = await broker.admin.health(old_transaction="24h")
        assert (health.pool_used, health.pool_limit) == (1, 2)
    assert not any(each.startswith("pool") for each in health.problems)
    await engine.dispose()


async def test_what_a_user_may_not_see_is_named_with_its_right(
    broker: SqlBroker, engine: AsyncEngine, database: str, database_url: str
) -> None:
    if database == "sqlite":
        pytest.skip("SQLite has no users")
    with account(database_url) as user:
        its_engine = user.engine()
        async with engine.connect() as other:
            await other.execute(text("SELECT 1"))
            found = (await SqlBroker(its_engine, logger=None).admin.health()).database
        await its_engine.dispose()
    right = "pg_read_all_stats" if database == "postgresql" else "PROCESS"
    assert found.hidden is not None
    assert f"GRANT {right}" in found.hidden


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
async def test_bytes_in_a_statement_hide_transactions_of_mysql(
    broker: SqlBroker, engine: AsyncEngine, database: str
) -> None:
    """Another session publishes a body of bytes; `health` still shows all other figures."""
    async with bytes_in_a_statement(engine):
        health = await broker.admin.health(old_transaction="24h")
    said = "all transactions, while a session runs a statement with bytes that are no text"
    assert health.database.hidden == (said if database == "mysql" else None)
    assert health.schema == ()

    async def is_shown() -> bool:
        return (await broker.admin.health()).database.hidden is None

    await eventually(is_shown)


async def test_an_age_that_is_none_is_refused(broker: SqlBroker) -> None:
    with pytest.raises(SetupError, match="old_transaction"):
        await broker.admin.health(old_transaction=0)
