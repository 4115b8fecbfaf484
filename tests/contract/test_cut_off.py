"""A statement of SQLite's that is cut off leaves no lock behind."""

import asyncio
from typing import Any
from uuid import uuid4

import aiosqlite
import pytest

from faststream_sqlbroker.exceptions import TransientStoreError
from tests.contract.conftest import LEASE, Bench

pytestmark = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
FETCH = aiosqlite.Cursor.fetchall


@pytest.mark.parametrize("terminates", [True, False])
@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
async def test_a_claim_whose_time_is_over_between_its_statement_and_its_rows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, terminates: bool, journal: str
) -> None:
    """What keeps its error keeps the cursor, too, and SQLite ends no transaction while one has rows
    left. Without WAL a COMMIT would wait for its end: a process that only publishes does not turn
    that on."""
    async with bench.store.engine.connect() as connection:
        await connection.exec_driver_sql(f"PRAGMA journal_mode={journal}")
    dialect = bench.store.engine.sync_engine.dialect
    if not terminates:  # older releases of SQLAlchemy close it, and ask for that at once
        monkeypatch.setattr(dialect, "do_terminate", dialect.do_close)
    await bench.put(3)
    pairs = await bench.store.find_ready_pairs(["q"])

    async def hang(cursor: Any) -> Any:
        if cursor._conn.in_transaction:
            await asyncio.Event().wait()
        return await FETCH(cursor)

    with monkeypatch.context() as patched:
        patched.setattr(aiosqlite.Cursor, "fetchall", hang)
        patched.setattr(bench.store._database, "timeout", 0.2)
        with pytest.raises(TransientStoreError) as kept:
            await bench.store.claim(pairs, 3, LEASE, uuid4())
    assert kept.value.__cause__ is not None
    await bench.put(1)  # fails if it waits for the time limit
    assert len(await bench.claim()) == 4


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_begin_that_is_cut_off_or_has_lost_its_thread_leaves_no_transaction(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    await bench.put(3)
    pairs = await bench.store.find_ready_pairs(["q"])
    script = aiosqlite.Connection.executescript

    async def fails(connection: Any, sql: str) -> Any:
        await script(connection, sql)
        if hangs:
            await asyncio.Event().wait()
        raise ValueError("no active connection")

    with monkeypatch.context() as patched:
        patched.setattr(aiosqlite.Connection, "executescript", fails)
        patched.setattr(bench.store._database, "timeout", 0.2)
        with pytest.raises(TransientStoreError):
            await bench.store.claim(pairs, 3, LEASE, uuid4())
    await bench.put(1)  # fails if it waits for the time limit
    assert len(await bench.claim()) == 4
