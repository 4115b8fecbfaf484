"""A machine that vanishes in a transaction without closing its sockets: its locks end with its
session."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database import engine as transaction
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError
from tests.contract.conftest import done
from tests.flow.conftest import Rig
from tests.helpers import eventually
from tests.proxy import Proxy, proxied

LIMIT = 1.0
"""Seconds that the store which vanishes may idle."""
LESS = 29
"""Seconds: an application's own limit that is shorter than the broker's."""
READ = {
    "postgresql": (
        "SELECT extract(epoch FROM "
        "current_setting('idle_in_transaction_session_timeout')::interval)"
    ),
    "mariadb": "SELECT @@SESSION.idle_transaction_timeout",
    "mysql": "SELECT @@SESSION.wait_timeout",
}
SET = {
    "postgresql": "SET idle_in_transaction_session_timeout = '{}s'",
    "mariadb": "SET SESSION idle_transaction_timeout = {}",
    "mysql": "SET SESSION wait_timeout = {}",
}

on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
"""SQLite has no server: the kernel of the machine that dies frees its locks."""


def limit_of(connection: Connection, kind: str) -> float:
    return float(connection.execute(text(READ[kind])).scalar_one())


@pytest.fixture
async def far(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Proxy, Store]]:
    """A store over the same tables on another machine."""
    async with proxied(rig.store.engine.url) as (proxy, url):
        engine = create_async_engine(url)
        with monkeypatch.context() as patch:
            patch.setattr(transaction, "IDLE_LIMIT", LIMIT)
            store = Store(engine, rig.store.tables)
        yield proxy, store
        await engine.dispose()


@contextlib.asynccontextmanager
async def vanished(
    proxy: Proxy, at: bytes, work: Callable[[], Awaitable[Any]]
) -> AsyncIterator[None]:
    """Its machine sends nothing from the moment when it would send `at`; its sockets stay open."""
    proxy.die_at = re.compile(at)
    task = asyncio.ensure_future(work())

    def is_dead() -> bool:
        nonlocal task
        if not proxy.died and task.done():
            # It stood still before, for longer than it may idle.
            assert isinstance(task.exception(), StoreError)
            task = asyncio.ensure_future(work())
        return proxy.died > 0

    await eventually(is_dead)
    proxy.stall()
    try:
        yield
    finally:
        await proxy.stop()
        with contextlib.suppress(StoreError):
            await task


@on_servers
@pytest.mark.parametrize("application", [0, LESS, 900], ids=["none", "less", "more"])
async def test_the_limit_is_set_on_the_session_and_the_applications_own_is_restored(
    rig: Rig, database: str, application: int
) -> None:
    """Of its own limit and ours the smaller one holds."""
    if database == "mysql" and not application:
        application = 28_800
    engine = create_async_engine(rig.store.engine.url, pool_use_lifo=True)
    store = Store(engine, rig.store.tables)

    @event.listens_for(engine.sync_engine, "connect")
    def own(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(SET[database].format(application))
        cursor.close()
        connection.commit()

    async def left() -> float:
        async with engine.connect() as connection:
            return await connection.run_sync(limit_of, database)

    async def told() -> float:
        return await store._database.run(lambda c: limit_of(c, database))

    def fail(connection: Connection) -> None:
        limit_of(connection, database)
        raise KeyError("a bug")

    expected = LESS if application == LESS else 30
    assert await left() == application
    assert await told() == expected
    assert await left() == application
    with pytest.raises(KeyError):
        await store._database.run(fail)
    assert await left() == application
    await rig.put()
    [row] = await rig.claim()
    lease = [(row.id, row.lease_token)]
    async with store.transaction() as transaction:
        assert await transaction.lock(lease, 120.0) == {row.id}
        assert await transaction.connection.run_sync(limit_of, database) == (
            LESS if application == LESS else 120
        )
        assert await transaction.hold(lease, 500.0) == {row.id}
        assert await transaction.connection.run_sync(limit_of, database) >= (
            LESS if application == LESS else 500
        )
    assert await left() == application
    async with store.transaction() as transaction:
        await transaction.lock(lease, 120.0)
        assert (await transaction.commit([done(row)])).settled_ids == {row.id}
    assert await left() == application
    await engine.dispose()


@on_servers
async def test_a_session_whose_settings_cannot_be_reset_leaves_the_pool(
    rig: Rig, database: str
) -> None:
    """The limit could not be put back, so that the application must not get the connection."""
    engine = create_async_engine(rig.store.engine.url, pool_use_lifo=True)
    store = Store(engine, rig.store.tables)

    def refuse(_connection: Connection) -> None:
        raise KeyError("cannot be put back")

    store.dialect.restore = refuse  # type: ignore[method-assign]
    await store.insert([NewMessage("q", b"1", dedup_id="1")])
    async with engine.connect() as connection:
        assert await connection.run_sync(limit_of, database) in {0, 28_800}
    await engine.dispose()


@on_servers
async def test_a_handler_that_closes_its_connection_leaves_no_limit_in_the_pool(
    rig: Rig, database: str
) -> None:
    """It goes back to the pool before the broker could put the limit back."""
    engine = create_async_engine(rig.store.engine.url, pool_use_lifo=True)
    store = Store(engine, rig.store.tables)

    async def own() -> float:
        async with engine.connect() as connection:
            return await connection.run_sync(limit_of, database)

    before = await own()
    await rig.put()
    [row] = await rig.claim(lease=600.0)
    async with store.transaction() as transaction:
        assert await transaction.lock([(row.id, row.lease_token)], 77.0) == {row.id}
        assert await transaction.connection.run_sync(limit_of, database) == 77
        await transaction.connection.close()
        assert await own() == before, "while the handler runs, too"
    assert await own() == before
    await engine.dispose()


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
async def test_rows_of_a_claim_come_back(rig: Rig, far: tuple[Proxy, Store]) -> None:
    """On PostgreSQL a claim is one statement, which commits by itself."""
    proxy, store = far
    await rig.put(3)
    pairs = await store.find_ready_pairs(["q"])
    before = await rig.store.server.read_now()

    async def claim() -> None:
        nonlocal before
        before = await rig.store.server.read_now()
        await store.claim(pairs, 10, 60.0, uuid4())

    async with vanished(proxy, b"SET state = 'PROCESSING'", claim):
        rows: list[ClaimedMessage] = await rig.claim(10)
        if await rig.store.server.read_now() - before < timedelta(seconds=LIMIT):
            assert rows == [], "they are locked"

        async def all_claimed() -> bool:
            # The server lets go of one lock after the other: a claim may find some of them.
            rows.extend(await rig.claim(10))
            return len(rows) >= 3

        await eventually(all_claimed)
    assert [row.deliveries_count for row in rows] == [1, 1, 1]


@on_servers
async def test_an_order_is_free_again(rig: Rig, far: tuple[Proxy, Store]) -> None:
    """Of a queue in order one claim goes on at a time, so that one which hangs stops it all."""
    proxy, store = far
    await rig.put(3, key="k")
    pairs = await store.find_ready_pairs(["q"])

    async def claim() -> None:
        await store.claim_ordered(pairs, 10, 60.0, uuid4(), {})

    async def again() -> bool:
        rows, _, _ = await rig.store.claim_ordered(pairs, 10, 60.0, uuid4(), {})
        return bool(rows)

    async with vanished(proxy, b"SET state = 'PROCESSING'", claim):
        await eventually(again)


@on_servers
async def test_rows_that_were_being_settled_are_free_again(
    rig: Rig, far: tuple[Proxy, Store]
) -> None:
    proxy, store = far
    await rig.put(4)
    rows = await rig.claim(4, lease=600.0)
    nacked = [done(row, state=MessageState.RETRYABLE, archive=False, delay=5.0) for row in rows[:2]]
    acked = [done(row) for row in rows[2:]]
    last = rb"DELETE m|UPDATE message m SET|u\.delay IS NULL"
    async with vanished(proxy, last, lambda: store.settle([*nacked, *acked])):
        await settled(rig, acked)


async def settled(rig: Rig, settlements: list[Any]) -> None:
    """Wait until all are settled; the server lets go of one lock after the other."""
    found = set[int]()

    async def all_settled() -> bool:
        found.update((await rig.store.settle(settlements, skip_locked=True)).settled_ids)
        return len(found) == len(settlements)

    await eventually(all_settled)


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
async def test_a_deduplicated_publish_of_a_dead_machine_blocks_no_other(
    rig: Rig, far: tuple[Proxy, Store]
) -> None:
    """A publisher of the same dedup_id waits for the first one's COMMIT; PostgreSQL commits in the
    statement."""
    proxy, store = far
    row = NewMessage("q", b"1", dedup_id="same")
    async with vanished(proxy, rb"COMMIT$", lambda: store.insert([row])):
        assert await rig.store.insert([row]) != [None]
    assert len(await rig.rows()) == 1


@on_servers
async def test_a_handlers_row_is_free_again_after_its_lease(
    rig: Rig, far: tuple[Proxy, Store]
) -> None:
    proxy, store = far
    await rig.put()
    [row] = await rig.claim(lease=600.0)

    async def handle() -> None:
        try:
            async with store.transaction() as transaction:
                await transaction.lock([(row.id, row.lease_token)], LIMIT)
                await transaction.connection.execute(text("SELECT 'the handler goes on'"))
        except Exception as error:
            raise StoreError("the driver's") from error

    async with vanished(proxy, b"the handler goes on", handle):
        await settled(rig, [done(row)])


@on_servers
async def test_a_handler_that_idles_for_too_long_fails_and_its_connection_is_replaced(
    rig: Rig,
) -> None:
    """The server has ended its session: nothing of it is committed."""
    await rig.put()
    [row] = await rig.claim(lease=600.0)
    engine = create_async_engine(rig.store.engine.url, pool_use_lifo=True)
    store = Store(engine, rig.store.tables)
    async with store.transaction() as transaction:
        lease = [(row.id, row.lease_token)]
        assert await transaction.lock(lease, 60.0) == {row.id}
        await transaction.connection.execute(text("UPDATE message SET last_error = 'lost'"))
        await transaction.connection.run_sync(store.dialect.set_idle_limit, 1.0)
        await eventually(lambda: free(rig, row.id))
        with pytest.raises(TransientStoreError):
            await transaction.commit([done(row)])
    assert (await rig.one())["last_error"] is None
    assert (await store.settle([done(row)])).settled_ids == {row.id}
    await engine.dispose()


async def free(rig: Rig, message_id: int) -> bool:
    """Whether the row is unlocked."""
    async with rig.store.engine.begin() as connection:
        found = await connection.execute(
            text("SELECT id FROM message WHERE id = :id FOR UPDATE SKIP LOCKED"), {"id": message_id}
        )
        return len(found.all()) == 1
