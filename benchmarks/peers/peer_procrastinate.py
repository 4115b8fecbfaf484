"""procrastinate (PostgreSQL, psycopg).

python peer_procrastinate.py SCENARIO '{"url": "...", "count": 2000}'
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import psycopg
from common import QUEUE, Peer, answer, body, scenarios
from procrastinate import App, PsycopgConnector
from procrastinate.tasks import Task

THROUGHPUT = {"concurrency": 30, "delete_jobs": "always"}
IDLE = {"concurrency": 10}
CONNECTIONS = 10
"""Connections of a worker's pool, in addition to the one that listens."""

# It warns of applications made in the main module.
logging.getLogger("procrastinate").setLevel(logging.ERROR)


@asynccontextmanager
async def opened(
    url: str, connections: int, take: Callable[[int], None] | None = None
) -> AsyncIterator[Task]:
    """Its application with one task, whose arguments are the message."""
    app = App(connector=PsycopgConnector(conninfo=url, min_size=connections, max_size=connections))

    @app.task(name="handle", queue=QUEUE)
    async def handle(**message) -> None:
        take(message["order"])

    async with app.open_async():
        yield handle


async def create(url: str) -> None:
    async with opened(url, 1) as task:
        await task.blueprint.schema_manager.apply_schema_async()


async def settle(url: str) -> None:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(
            "VACUUM ANALYZE procrastinate_jobs, procrastinate_events, procrastinate_workers"
        )


async def waiting(url: str) -> int:
    """Those that were not yet done: its workers keep the others by default."""
    async with await psycopg.AsyncConnection.connect(url) as connection:
        query = "SELECT count(*) FROM procrastinate_jobs WHERE status <> 'succeeded'"
        return (await (await connection.execute(query)).fetchone())[0]


class Publisher:
    def __init__(self, task: Task, connection: psycopg.AsyncConnection) -> None:
        self._task = task
        self._connection = connection

    async def single(self, n: int) -> None:
        await self._task.defer_async(**body(n))

    async def transaction(self, numbers: Sequence[int]) -> None:
        async with self._connection.transaction():
            deferrer = self._task.configure(connection=self._connection)
            for n in numbers:
                await deferrer.defer_async(**body(n))

    async def bulk(self, numbers: Sequence[int]) -> None:
        await self._task.batch_defer_async(*(body(n) for n in numbers))


@asynccontextmanager
async def publisher(url: str, connections: int) -> AsyncIterator[Publisher]:
    async with (
        opened(url, connections) as task,
        await psycopg.AsyncConnection.connect(url) as connection,
    ):
        yield Publisher(task, connection)


@asynccontextmanager
async def consumer(
    url: str, take: Callable[[int], None], *, idle: bool, archive: bool
) -> AsyncIterator[None]:
    """One worker, which listens for NOTIFY; cancelling it is its way to stop when the running jobs
    are done."""
    async with opened(url, CONNECTIONS, take) as task:
        settings = IDLE if idle else THROUGHPUT
        worker = asyncio.create_task(
            task.blueprint.run_worker_async(install_signal_handlers=False, **settings)
        )
        try:
            yield
        finally:
            worker.cancel()
            with suppress(asyncio.CancelledError):
                await worker


if __name__ == "__main__":
    peer = Peer(
        create=create, settle=settle, waiting=waiting, publisher=publisher, consumer=consumer
    )
    answer(scenarios(peer))
