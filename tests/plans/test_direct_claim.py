"""M1, M3: pop and reserve read only the rows they claim, with any cached plan and without
ANALYZE."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from faststream_sqlbroker import SqlBroker
from tests.helpers import eventually
from tests.plans.conftest import TABLES

pytestmark = [
    pytest.mark.parametrize("database", ["postgresql"], indirect=True),
    pytest.mark.capability("plans of hot statements tested against 200 000 other rows"),
]

CROWD = 20_000
WARM = 12
"""Calls after which a connection has a plan of each statement for good."""


@pytest.fixture(params=["never analysed", "analysed empty"])
async def one_connection(
    engine: AsyncEngine, request: pytest.FixtureRequest
) -> AsyncIterator[AsyncEngine]:
    """Tables without ANALYZE from now on, and an engine of one connection."""
    broker = SqlBroker(engine)
    await broker.create_tables()
    async with engine.connect() as connection:
        connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
        for table in TABLES.metadata.tables:
            if request.param == "analysed empty":
                await connection.execute(text(f"VACUUM ANALYZE {table}"))
            await connection.execute(text(f"ALTER TABLE {table} SET (autovacuum_enabled = false)"))
    only = create_async_engine(engine.url, pool_size=1, max_overflow=0)
    yield only
    await only.dispose()


async def read_by_scans(engine: AsyncEngine) -> int:
    """Rows of the message table read by sequential scans; a session reports them when it ends."""
    await engine.dispose()
    looking = create_async_engine(engine.url, poolclass=NullPool)
    asked = "SELECT n_tup_ins, seq_tup_read FROM pg_stat_user_tables WHERE relname = 'message'"

    async def told() -> int | None:
        async with looking.connect() as connection:
            inserted, read = (await connection.execute(text(asked))).one()
            return None if inserted < 2 * CROWD else int(read) + 1

    return await eventually(told) - 1


async def take_all_ways(broker: SqlBroker, *, empty: bool) -> None:
    """Take, commit, roll back and reject one message each; and look where there is none."""
    for _ in range(4 if empty else 0):
        await broker.publish(b"x", queue="q")
    assert await broker.pop("q") is not None
    for end in ("commit", "reject", "rollback"):
        reservation = await broker.reserve("q")
        assert reservation is not None
        await (reservation.rollback(delay=0) if end == "rollback" else getattr(reservation, end)())
    assert await broker.pop("other") is None
    assert await broker.reserve("other") is None
    if empty:
        assert await broker.pop("q") is not None


async def test_m1_m3_pop_and_reserve_are_bounded_without_analyze(
    one_connection: AsyncEngine,
) -> None:
    """The connection has planned every statement for a table of a few rows; then 40 000 come."""
    broker = SqlBroker(one_connection)
    for _ in range(WARM):
        await take_all_ways(broker, empty=True)
    async with one_connection.begin() as connection:
        for due in ("now()", "now() + interval '1 hour'"):
            await connection.execute(
                text(
                    "INSERT INTO message (queue, payload, next_attempt_at) "
                    f"SELECT 'q', 'x', {due} FROM generate_series(1, {CROWD})"
                )
            )
    for _ in range(3):
        await take_all_ways(broker, empty=False)
    assert await read_by_scans(one_connection) < CROWD
