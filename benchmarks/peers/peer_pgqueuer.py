"""pgqueuer (PostgreSQL, asyncpg).

python peer_pgqueuer.py SCENARIO '{"url": "...", "count": 2000}'
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import asyncpg
from common import QUEUE, Peer, answer, body, compact, scenarios
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, Job, Queries, QueueManager

THROUGHPUT = {"batch_size": 500}


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def create(url: str) -> None:
    """Its tables, all of them logged ("durable", its default), with its autovacuum settings."""
    async with connected(url) as connection:
        queries = Queries(AsyncpgDriver(connection))
        await queries.install()
        await queries.optimize_autovacuum()


async def settle(url: str) -> None:
    async with connected(url) as connection:
        await connection.execute(
            "VACUUM ANALYZE pgqueuer, pgqueuer_log, pgqueuer_statistics, pgqueuer_schedules"
        )


async def waiting(url: str) -> int:
    async with connected(url) as connection:
        return await connection.fetchval("SELECT count(*) FROM pgqueuer")


class Publisher:
    def __init__(self, queries: Queries, connection: asyncpg.Connection | asyncpg.Pool) -> None:
        self._queries = queries
        self._connection = connection

    async def single(self, n: int) -> None:
        await self._queries.enqueue(QUEUE, compact(body(n)))

    async def transaction(self, numbers: Sequence[int]) -> None:
        async with self._connection.transaction():
            for n in numbers:
                await self._queries.enqueue(QUEUE, compact(body(n)))

    async def bulk(self, numbers: Sequence[int]) -> None:
        count = len(numbers)
        await self._queries.enqueue(
            [QUEUE] * count, [compact(body(n)) for n in numbers], [0] * count
        )


@asynccontextmanager
async def publisher(url: str, connections: int) -> AsyncIterator[Publisher]:
    """One connection, or a pool where several are asked for."""
    if connections == 1:
        async with connected(url) as connection:
            yield Publisher(Queries(AsyncpgDriver(connection)), connection)
    else:
        async with asyncpg.create_pool(url, min_size=connections, max_size=connections) as pool:
            yield Publisher(Queries(AsyncpgPoolDriver(pool)), pool)


@asynccontextmanager
async def consumer(
    url: str, take: Callable[[int], None], *, idle: bool, archive: bool
) -> AsyncIterator[None]:
    """One queue manager; its log of every state is always on. Idle: its defaults, which listen for
    NOTIFY."""
    async with connected(url) as connection:
        manager = QueueManager(Queries(AsyncpgDriver(connection)))

        @manager.entrypoint(QUEUE)
        async def handle(job: Job) -> None:
            take(json.loads(job.payload)["order"])

        running = asyncio.create_task(manager.run(**({} if idle else THROUGHPUT)))
        try:
            yield
        finally:
            manager.shutdown.set()
            await running


if __name__ == "__main__":
    peer = Peer(
        create=create, settle=settle, waiting=waiting, publisher=publisher, consumer=consumer
    )
    answer(scenarios(peer))
