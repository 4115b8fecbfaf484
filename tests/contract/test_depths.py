"""Counts of due messages up to a limit, on every database."""

from sqlalchemy.ext.asyncio import AsyncSession

from faststream_sqlbroker.core.rows import NewMessage
from tests.contract.conftest import Bench


async def test_what_is_due_and_not_leased_is_counted(bench: Bench) -> None:
    read = bench.store.depths.count
    assert await read("q", 100) == 0
    await bench.put(4)
    await bench.put(3, priority=-7)
    await bench.put(5, delay=600.0)
    await bench.put(6, "Q")
    assert await read("q", 100) == 7
    await bench.claim(2)
    assert await read("q", 100) == 5


async def test_a_count_ends_at_its_limit(bench: Bench) -> None:
    await bench.put(4)
    await bench.put(4, priority=1)
    for most, found in ((1, 1), (4, 4), (6, 6), (8, 8), (9, 8)):
        assert await bench.store.depths.count("q", most) == found


async def test_a_transaction_sees_its_own_messages(bench: Bench) -> None:
    store = bench.store
    await bench.put(1)
    row = NewMessage("q", b"x")
    async with store.engine.connect() as connection, connection.begin() as transaction:
        await store.insert_in(connection, [row, row])
        assert await store.depths.count("q", 10, connection) == 3
        await transaction.rollback()
    async with AsyncSession(store.engine) as session:
        await store.insert_in(session, [row])
        assert await store.depths.count("q", 10, session) == 2
        await session.rollback()
    assert await store.depths.count("q", 10) == 1
