"""A driver that refuses a statement before sending it: nothing was written, so it is repeated."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import pytest
from asyncpg import Connection, InternalClientError
from sqlalchemy import Connection as SqlConnection
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.driver import DriverShortcut
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from tests.conftest import DRIVERS, OTHER_DRIVERS
from tests.contract.conftest import Bench
from tests.quick_tables import TABLES

ALL = [
    *DRIVERS.items(),
    *((kind, driver) for driver, kinds in OTHER_DRIVERS.items() for kind in kinds),
]
with_each_driver = pytest.mark.parametrize(
    ("database", "driver"),
    [pytest.param(*case, id="+".join(case)) for case in ALL],
    indirect=["database"],
)
on_asyncpg = pytest.mark.parametrize(
    ("database", "driver"), [("postgresql", "asyncpg")], indirect=["database"]
)


@pytest.fixture
async def store(engine: AsyncEngine, driver: str) -> AsyncIterator[Store]:
    name = engine.url.get_backend_name()
    options = {"timeout": 60} if name == "sqlite" else {}
    made = create_async_engine(engine.url.set(drivername=f"{name}+{driver}"), connect_args=options)
    store = Store(made, TABLES)
    await store.server.create_tables()
    await store.server.setup()
    yield store
    await store.close()
    await made.dispose()


async def close(driver: Any) -> None:
    """Close the connection at this end."""
    if hasattr(driver, "terminate"):  # asyncpg
        driver.terminate()
    elif hasattr(driver, "execute_fetchall"):  # aiosqlite
        # Of a connection that is closed as a whole, SQLAlchemy skips the COMMIT.
        await driver._execute(driver._conn.close)
    elif hasattr(driver, "pgconn"):  # psycopg
        driver.pgconn.finish()
    else:  # aiomysql, asyncmy
        driver.close()


@with_each_driver
async def test_a_commit_on_a_closed_connection_is_repeated(store: Store) -> None:
    """The driver says so before it sends anything: the outcome is known."""
    closed: list[Any] = []

    @event.listens_for(store.engine.sync_engine, "commit")
    def close_once(connection: SqlConnection) -> None:
        if not closed:
            closed.append(connection.connection.driver_connection)
            await_only(close(closed[0]))

    [written] = await store.insert([NewMessage("q", b"")])
    assert closed
    assert [row["id"] for row in await Bench(store).rows()] == [written]


@on_asyncpg
@pytest.mark.parametrize("state", ["busy", "closed"])
async def test_a_statement_of_a_driver_that_is_not_ready_is_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """asyncpg refuses statements while another one runs, or after the connection was closed."""
    alone = DriverShortcut.get_autocommit_driver
    others: list[asyncio.Task[Any]] = []

    async def first_disturbed(self: DriverShortcut, connection: Any) -> Any:
        driver = await alone(self, connection)
        if driver is not None and not others:
            others.append(asyncio.create_task(driver.execute("SELECT pg_sleep(600)")))
            await asyncio.sleep(0)
            if state == "closed":
                driver.terminate()
        return driver

    monkeypatch.setattr(DriverShortcut, "get_autocommit_driver", first_disturbed)
    await store.insert([NewMessage("q", b"")])
    [error] = await asyncio.gather(*others, return_exceptions=True)
    assert isinstance(error, Exception)
    assert await Bench(store).count() == 1


@on_asyncpg
@pytest.mark.parametrize(
    ("text", "is_sent"),
    [
        ("cannot switch to state 12; another operation (2) is in progress", False),
        ("waiter is done", True),
    ],
)
@pytest.mark.parametrize("write", ["insert", "remove"])
async def test_what_asyncpg_says_tells_whether_it_has_sent(
    store: Store, monkeypatch: pytest.MonkeyPatch, text: str, is_sent: bool, write: str
) -> None:
    """After an error of any other text the outcome stays unknown."""
    [written] = await store.insert([NewMessage("q", b"")])
    fetch = Connection.fetch
    failed: list[str] = []

    async def first_failing(self: Connection, query: str, *binds: Any) -> Any:
        if not failed and ("INSERT" in query or "DELETE" in query):
            failed.append(query)
            raise InternalClientError(text)
        return await fetch(self, query, *binds)

    monkeypatch.setattr(Connection, "fetch", first_failing)
    calls = {
        "insert": lambda: store.insert([NewMessage("q", b"")]),
        "remove": lambda: store.replies.remove([written]),
    }
    with pytest.raises(UnknownOutcomeError, match=text) if is_sent else nullcontext():
        await calls[write]()
    assert failed
    repeated = {"insert": 2, "remove": 0}
    assert await Bench(store).count() == (1 if is_sent else repeated[write])


@on_asyncpg
async def test_a_value_that_asyncpg_cannot_encode_is_refused(store: Store) -> None:
    """It is not sent, and a repeat would not help."""
    with pytest.raises(StoreError, match="out of int16 range") as caught:
        await store.insert([NewMessage("q", b"", priority=1_000_000)])
    assert not isinstance(caught.value, TransientStoreError)
