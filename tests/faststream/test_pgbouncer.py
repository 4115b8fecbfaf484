"""Through PgBouncer in transaction mode: named statements are off, LISTEN goes past it."""

import asyncio
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import NotSupportedError, SetupError, SqlBroker, StoreError
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.conftest import Servers
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

capability = pytest.mark.capability("through PgBouncer in transaction mode (`pgbouncer=True`)")
through = pytest.mark.parametrize("database", ["pgbouncer"], indirect=True)


@capability
@through
async def test_messages_published_and_handled_at_once(
    servers: Servers, database_url: str, look: Look
) -> None:
    """More connections than PgBouncer has, and wake-ups by a connection of their own."""
    straight = make_url(database_url).set(port=servers.admin("postgresql").url.port)
    broker = SqlBroker(database_url, pgbouncer=True, listen_url=straight, logger=None)
    handled: list[int] = []
    slow: Any = {**QUICK, "wakeup": "listen", "max_fetch_interval": 600}

    @broker.subscriber("q", **slow, max_workers=4, fetch_batch_size=5)
    async def handle(body: int) -> None:
        handled.append(body)

    await broker.create_tables()
    await broker.start()
    await eventually(lambda: broker.config.broker_config.wakeups.is_listening)
    other = SqlBroker(database_url, pgbouncer=True, logger=None)
    await asyncio.gather(*(other.publish(n, "q") for n in range(50)))
    await look.archived(50)  # woken, not polled
    assert sorted(handled) == list(range(50))
    await other.stop()
    await broker.stop()


@capability
@through
async def test_the_option_is_needed(
    servers: Servers, engine: AsyncEngine, database_url: str
) -> None:
    """A plain engine prepares statements that the next transaction may not find, unless PgBouncer
    keeps them: it can from 1.21 on, and does from 1.24 on."""
    plain = create_async_engine(database_url, pool_size=10)
    store = Store(plain, build_tables(SqlBrokerSchemaConfig()), max_connections=10)
    assert (await _failures(store) == 0) == _keeps_statements(servers.pgbouncer())
    await plain.dispose()
    store = Store(engine, build_tables(SqlBrokerSchemaConfig()), max_connections=10, pgbouncer=True)
    assert not store.can_listen
    assert (await _failures(store)) == 0


def _keeps_statements(port: int) -> bool:
    place = f"host=127.0.0.1 port={port} user=postgres dbname=pgbouncer"
    with psycopg.connect(place, autocommit=True) as console:
        config = {row[0]: row[1] for row in console.execute("SHOW CONFIG")}
    return int(config.get("max_prepared_statements", 0)) > 0


async def _failures(store: Store) -> int:
    await store.server.create_tables()

    async def both() -> None:
        await store.insert([NewMessage("q", b"x")])
        await asyncio.gather(*(store.find_ready_pairs(["q"]) for _ in range(10)))

    results = await asyncio.gather(*(both() for _ in range(10)), return_exceptions=True)
    return sum(isinstance(result, StoreError) for result in results)


async def test_impossible_options_are_refused() -> None:
    with pytest.raises(
        NotSupportedError, match="pgbouncer=True is only for PostgreSQL, got sqlite"
    ):
        SqlBroker("sqlite+aiosqlite:///x.db", pgbouncer=True)
    with pytest.raises(SetupError, match="listen_url must connect to PostgreSQL through asyncpg"):
        SqlBroker("sqlite+aiosqlite:///x.db", listen_url="postgresql+psycopg://user@host/name")
    engine = create_async_engine("postgresql+asyncpg://user@host/name")
    with pytest.raises(SetupError, match="listen_url must be a database URL"):
        SqlBroker(engine, listen_url=engine)  # type: ignore[arg-type]
