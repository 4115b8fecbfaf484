"""faststream-sqlbroker on PostgreSQL (asyncpg), MariaDB (asyncmy) and SQLite (aiosqlite).

python peer_sqlbroker.py SCENARIO '{"url": "...", "count": 2000}'
"""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from common import QUEUE, Peer, answer, body, scenarios
from faststream_sqlbroker.sqlbroker.schema import define_sqlbroker_schema
from sqlalchemy import Integer, event, func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SqlBroker, SqlBrokerSchemaConfig, SqlBrokerSchemaType

DRIVERS = {
    "postgresql": "postgresql+asyncpg",
    "mariadb": "mysql+asyncmy",
    "sqlite": "sqlite+aiosqlite",
}
"""Its client knows the dialect "mysql", not "mariadb"."""
THROUGHPUT = {
    "fetch_batch_size": 1_000,
    "max_fetch_interval": 0.1,
    "min_fetch_interval": 0,
    "flush_interval": 0.05,
}
LOW_LATENCY = {"fetch_batch_size": 100, "max_fetch_interval": 0.02, "flush_interval": 0.02}

TABLES = define_sqlbroker_schema(config=SqlBrokerSchemaConfig()).tables
MESSAGE = TABLES[SqlBrokerSchemaType.MESSAGE]


@asynccontextmanager
async def engine_of(url: str, connections: int = 5, **options) -> AsyncIterator[AsyncEngine]:
    """An engine of its own; on SQLite with a write-ahead log."""
    dialect, _, rest = url.partition("://")
    if dialect == "sqlite":
        options["connect_args"] = {"timeout": 60}
    engine = create_async_engine(f"{DRIVERS[dialect]}://{rest}", pool_size=connections, **options)
    if dialect == "sqlite":
        event.listen(engine.sync_engine, "connect", set_pragmas)
    try:
        yield engine
    finally:
        await engine.dispose()


def broker_of(engine: AsyncEngine) -> SqlBroker:
    """Without its check of the tables on MariaDB, whose JSON columns it takes for LONGTEXT and
    refuses."""
    validate = engine.dialect.name != "mysql"
    return SqlBroker(engine=engine, logger=None, validate_schema_on_start=validate)


def set_pragmas(connection, record) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute(f"PRAGMA synchronous={os.environ.get('BENCHMARK_SYNCHRONOUS', 'NORMAL')}")
    cursor.close()


async def create(url: str) -> None:
    """The tables and indexes of its documentation; on SQLite the ids must be INTEGER."""
    if url.startswith("sqlite"):
        for table in TABLES.values():
            table.c.id.type = Integer()
    async with engine_of(url) as engine, engine.begin() as connection:
        await connection.run_sync(MESSAGE.metadata.create_all)


async def settle(url: str) -> None:
    if url.startswith("postgresql"):
        async with (
            engine_of(url, isolation_level="AUTOCOMMIT") as engine,
            engine.connect() as connection,
        ):
            await connection.execute(text("VACUUM ANALYZE message, message_archive"))


async def waiting(url: str) -> int:
    async with engine_of(url) as engine, engine.connect() as connection:
        return await connection.scalar(select(func.count()).select_from(MESSAGE))


class Publisher:
    def __init__(self, engine: AsyncEngine, broker: SqlBroker) -> None:
        self._engine = engine
        self._broker = broker

    async def single(self, n: int) -> None:
        await self._broker.publish(body(n), queue=QUEUE)

    async def transaction(self, numbers: Sequence[int]) -> None:
        async with self._engine.begin() as connection:
            for n in numbers:
                await self._broker.publish(body(n), queue=QUEUE, connection=connection)

    async def bulk(self, numbers: Sequence[int]) -> None:
        await self._broker.publish_batch(*(body(n) for n in numbers), queue=QUEUE)


@asynccontextmanager
async def publisher(url: str, connections: int) -> AsyncIterator[Publisher]:
    """A pool of as many connections; on SQLite one, since several would only wait for each other's
    lock."""
    if url.startswith("sqlite"):
        connections = 1
    async with engine_of(url, connections, max_overflow=0) as engine:
        broker = broker_of(engine)
        await broker.connect()
        yield Publisher(engine, broker)


@asynccontextmanager
async def consumer(
    url: str, take: Callable[[int], None], *, idle: bool, archive: bool
) -> AsyncIterator[None]:
    async with engine_of(url) as engine:
        broker = broker_of(engine)
        settings = LOW_LATENCY if idle else THROUGHPUT

        @broker.subscriber([QUEUE], max_workers=1, retain_in_archive_on_ack=archive, **settings)
        async def handle(msg: dict) -> None:
            take(msg["order"])

        await broker.start()
        try:
            yield
        finally:
            await broker.stop()


if __name__ == "__main__":
    peer = Peer(
        create=create, settle=settle, waiting=waiting, publisher=publisher, consumer=consumer
    )
    answer(scenarios(peer))
