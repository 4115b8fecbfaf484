"""faststream-outbox (PostgreSQL, asyncpg).

python peer_outbox.py SCENARIO '{"url": "...", "count": 2000}'
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from common import QUEUE, Peer, answer, body, scenarios
from faststream_outbox import OutboxBroker, make_outbox_table, outbox_autovacuum_ddl
from sqlalchemy import MetaData, func, select, text
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

THROUGHPUT = {
    "max_workers": 1,
    "fetch_batch_size": 500,
    "terminal_flush_batch_size": 500,
    "min_fetch_interval": 0.001,
    "max_fetch_interval": 0.001,
}
TABLE = make_outbox_table(MetaData())


@asynccontextmanager
async def engine_of(url: str, connections: int = 5, **options) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(
        url.replace("://", "+asyncpg://", 1), pool_size=connections, **options
    )
    try:
        yield engine
    finally:
        await engine.dispose()


async def create(url: str) -> None:
    """Its table with the autovacuum settings that it recommends."""
    async with engine_of(url) as engine, engine.begin() as connection:
        await connection.run_sync(TABLE.metadata.create_all)
        await connection.execute(text(outbox_autovacuum_ddl(TABLE.name)))


async def settle(url: str) -> None:
    async with (
        engine_of(url, isolation_level="AUTOCOMMIT") as engine,
        engine.connect() as connection,
    ):
        await connection.execute(text(f"VACUUM ANALYZE {TABLE.name}"))


async def waiting(url: str) -> int:
    async with engine_of(url) as engine, engine.connect() as connection:
        return await connection.scalar(select(func.count()).select_from(TABLE))


class Publisher:
    def __init__(self, sessions: async_sessionmaker[AsyncSession], broker: OutboxBroker) -> None:
        self._sessions = sessions
        self._broker = broker

    async def single(self, n: int) -> None:
        async with self._sessions.begin() as session:
            await self._broker.publish(body(n), queue=QUEUE, session=session)

    async def transaction(self, numbers: Sequence[int]) -> None:
        async with self._sessions.begin() as session:
            for n in numbers:
                await self._broker.publish(body(n), queue=QUEUE, session=session)

    async def bulk(self, numbers: Sequence[int]) -> None:
        async with self._sessions.begin() as session:
            await self._broker.publish_batch(
                *(body(n) for n in numbers), queue=QUEUE, session=session
            )


@asynccontextmanager
async def publisher(url: str, connections: int) -> AsyncIterator[Publisher]:
    async with engine_of(url, connections) as engine:
        broker = OutboxBroker(engine, outbox_table=TABLE, logger=None)
        await broker.connect()
        yield Publisher(async_sessionmaker(engine, expire_on_commit=False), broker)


@asynccontextmanager
async def consumer(
    url: str, take: Callable[[int], None], *, idle: bool, archive: bool
) -> AsyncIterator[None]:
    """Acknowledged rows are always deleted; idle: its defaults, which listen for NOTIFY."""
    async with engine_of(url) as engine:
        broker = OutboxBroker(engine, outbox_table=TABLE, logger=None)

        @broker.subscriber(QUEUE, **({} if idle else THROUGHPUT))
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
