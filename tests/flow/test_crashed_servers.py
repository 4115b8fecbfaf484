"""Whether a handler's transaction committed before its server crashed or another took its place;
both may reuse the numbers of lost transactions."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from uuid import UUID

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.parts.handler_locks import HandlerLock
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.contract.conftest import Bench
from tools.private import CannotStartError, Process, postgresql, wait_until_ready

LEASE = 60.0
MOST_CRASHES = 20
"""Of which one must come before the server writes what is in memory."""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Process]]:
    """A PostgreSQL of our own."""
    try:
        with postgresql() as started:
            yield started
    except CannotStartError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
async def engine(server: tuple[str, Process]) -> AsyncIterator[AsyncEngine]:
    """Its sessions are new each time: those of before have ended in the crash."""
    async with database(server[0]) as engine:
        yield engine


@asynccontextmanager
async def database(of_server: str) -> AsyncIterator[AsyncEngine]:
    """An empty database of the server."""
    url = make_url(of_server)
    name = "crashed"
    admin = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        connection.execute(text(f"CREATE DATABASE {name}"))
        # What is written stays in memory until a commit.
        connection.execute(text("ALTER SYSTEM SET wal_writer_delay = '10s'"))
        connection.execute(text("ALTER SYSTEM SET autovacuum = off"))
        connection.execute(text("SELECT pg_reload_conf()"))
    engine = create_async_engine(
        url.set(drivername="postgresql+asyncpg", database=name), poolclass=NullPool
    )
    yield engine
    await engine.dispose()


@pytest.fixture
async def bench(engine: AsyncEngine) -> Bench:
    return await create_bench(engine)


async def create_bench(engine: AsyncEngine) -> Bench:
    """A store over new tables."""
    store = Store(engine, build_tables(SqlBrokerSchemaConfig()))
    await store.server.create_tables()
    return Bench(store)


async def lock(bench: Bench, connection: AsyncConnection) -> HandlerLock:
    await bench.store.insert([NewMessage("q", b"x")])
    [row] = await bench.claim(1)
    leases: list[tuple[int, UUID]] = [(row.id, row.lease_token)]
    locks = bench.store.dialect.handler_locks
    return await connection.run_sync(lambda c: locks.lock(c, leases, LEASE))


def crash(server: tuple[str, Process]) -> None:
    """Not in a thread of its own: the server would end with it."""
    url, process = server
    process.crash()
    process.start()
    wait_until_ready(url)


async def lock_until_crash(
    bench: Bench, engine: AsyncEngine, server: tuple[str, Process]
) -> HandlerLock:
    """A lock whose transaction was cut off, and whose number the server has forgotten."""
    seen = []
    for _ in range(MOST_CRASHES):
        await bench.execute("DELETE FROM message")
        connection = await engine.connect()
        locked = await lock(bench, connection)
        crash(server)
        await connection.invalidate()
        await connection.close()
        number = await next_number(engine)
        if number <= int(locked.number):
            return locked
        # So much time has passed before the crash that the server wrote what was in memory.
        seen.append((locked.number, number))
    raise AssertionError(f"no number was forgotten; numbers, and the next after a crash: {seen}")


async def next_number(engine: AsyncEngine) -> int:
    """The number that the next transaction will have."""
    async with engine.connect() as connection:
        number = text("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")
        return int((await connection.execute(number)).scalar_one())


async def test_a_forgotten_number_was_not_committed(
    bench: Bench, engine: AsyncEngine, server: tuple[str, Process]
) -> None:
    """Neither before another transaction has it, nor after that one has committed."""
    handlers = bench.store.handlers
    locked = await lock_until_crash(bench, engine, server)
    assert not await handlers.was_committed(locked)
    async with engine.begin() as other:
        for _ in range(50):
            found = await other.execute(text("SELECT pg_current_xact_id()::text"))
            number = found.scalar_one()
            await other.execute(text("COMMIT"))
            if int(number) >= int(locked.number):
                break
    assert number == locked.number, "PostgreSQL remembers what was never written"
    assert not await handlers.was_committed(locked)


async def test_a_forgotten_number_that_a_renewal_has_now_was_not_committed(
    bench: Bench, engine: AsyncEngine, server: tuple[str, Process]
) -> None:
    """It has locked the row before it wrote it, and PostgreSQL hands such a lock on to the row's
    new version."""
    handlers = bench.store.handlers
    locked = await lock_until_crash(bench, engine, server)
    async with engine.begin() as other:
        while await next_number(engine) < int(locked.number):
            await other.execute(text("SELECT pg_current_xact_id()"))
            await other.execute(text("COMMIT"))
    assert await bench.store.renew_free(locked.leases, LEASE) == (locked.locked_ids, set())
    assert await _xmax(engine) == int(locked.number)
    assert not await handlers.was_committed(locked)


async def test_a_number_of_another_server_was_not_committed(
    bench: Bench, engine: AsyncEngine, server: tuple[str, Process]
) -> None:
    """The other one takes its place as a promoted standby does, which has run for longer than the
    transaction and has replayed nothing of it."""
    with postgresql() as (url, _process):
        async with database(url) as promoted:
            # The handler's number must be one that the other server has yet to give.
            while (gap := await next_number(promoted) - await next_number(engine)) > 0:
                await use_numbers(engine, gap)
            async with engine.connect() as connection:
                locked = await lock(bench, connection)
                await connection.rollback()
            other = await create_bench(promoted)
            await other.store.insert([NewMessage("q", b"x")])
            while (gap := int(locked.number) + 1 - await next_number(promoted)) > 0:
                await use_numbers(promoted, gap)
            async with promoted.connect() as connection:
                status = text("SELECT pg_xact_status((:number)::text::xid8)")
                found = await connection.execute(status, {"number": locked.number})
                assert found.scalar_one() == "committed", "the other transaction of that number"
            assert not await other.store.handlers.was_committed(locked)


async def use_numbers(engine: AsyncEngine, count: int) -> None:
    """Commit so many transactions."""
    async with engine.connect() as connection:
        for _ in range(count):
            await connection.execute(text("SELECT pg_current_xact_id()"))
            await connection.commit()


async def _xmax(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        return int((await connection.execute(text("SELECT xmax::text FROM message"))).scalar_one())


async def test_a_committed_transaction_stays_committed(
    bench: Bench, engine: AsyncEngine, server: tuple[str, Process]
) -> None:
    connection = await engine.connect()
    locked = await lock(bench, connection)
    await connection.commit()
    assert await bench.store.handlers.was_committed(locked)
    crash(server)
    await connection.invalidate()
    await connection.close()
    assert await bench.store.handlers.was_committed(locked)


async def test_a_rolled_back_transaction_stays_rolled_back(
    bench: Bench, engine: AsyncEngine, server: tuple[str, Process]
) -> None:
    async with engine.connect() as connection:
        locked = await lock(bench, connection)
        await connection.rollback()
    assert not await bench.store.handlers.was_committed(locked)
    crash(server)
    assert not await bench.store.handlers.was_committed(locked)
