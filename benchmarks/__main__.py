"""How much of FastStream's own dispatch rate remains on each database: just bench [MESSAGES].

One run measures, in one process: FastStream's pipeline without any database (the ceiling), publishing in
batches, the whole path of a message (claim, handler, archive), and what transactional=True costs. Figures of different machines or runs
cannot be compared; the ratio to the ceiling can.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from pathlib import Path
from uuid import uuid4

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker, SqlConnection
from faststream_sqlbroker.core.rows import ClaimedMessage
from tools.servers import VARIABLES

BATCH = 1_000
WORKERS = 4
EFFECT = text("INSERT INTO effects (n) VALUES (:n)")
DRIVERS = {"postgresql": "asyncpg", "mariadb": "aiomysql"}


async def rate(count: int, work: Callable[[], Awaitable[None]]) -> float:
    """Messages a second."""
    started = time.perf_counter()
    await work()
    return count / (time.perf_counter() - started)


async def ceiling(count: int) -> float:
    """FastStream's pipeline on ready rows, nothing else."""
    broker = SqlBroker("sqlite+aiosqlite:///unused.db", logger=None)
    subscriber = broker.subscriber("q")

    @subscriber
    async def handle(body: int) -> None: ...

    await broker.connect()
    subscriber._build_fastdepends_model()  # noqa: SLF001 - what its start does before the loops
    now, token = datetime.now(timezone.utc), uuid4()
    headers = {"content-type": "application/json"}
    rows = [
        ClaimedMessage(n, "q", b"1", headers, 0, None, 0, 1, 1, now, now, None, None, None, now, token)
        for n in range(count)
    ]

    async def work() -> None:
        for row in rows:
            await subscriber.process_message(row)

    return await rate(count, work)


async def whole_path(url: str, count: int) -> tuple[float, float]:
    """Rates of publishing, and of claim, handler and archive."""
    engine = create_async_engine(url)
    broker = SqlBroker(engine, logger=None)
    handled, done = 0, asyncio.Event()

    @broker.subscriber("q", fetch_batch_size=BATCH)
    async def handle(body: int) -> None:
        nonlocal handled
        handled += 1
        if handled == count:
            done.set()

    await broker.create_tables()

    async def publish() -> None:
        for start in range(0, count, BATCH):
            await broker.publish_batch(*range(start, min(count, start + BATCH)), queue="q")

    async def consume() -> None:
        await broker.start()
        await done.wait()
        await broker.stop()

    published = await rate(count, publish)
    consumed = await rate(count, consume)
    await engine.dispose()
    return published, consumed


async def one_by_one(url: str, count: int, *, transactional: bool) -> float:
    """Rate of handlers that insert a row each: in the transaction of their ack, or in one of their own."""
    engine = create_async_engine(url, pool_size=WORKERS * 2)
    broker = SqlBroker(engine, logger=None)
    handled, done = 0, asyncio.Event()

    def count_one() -> None:
        nonlocal handled
        handled += 1
        if handled == count:
            done.set()

    if transactional:

        @broker.subscriber("q", max_workers=WORKERS, transactional=True)
        async def handle(body: int, connection: SqlConnection) -> None:
            await connection.execute(EFFECT, {"n": body})
            count_one()
    else:

        @broker.subscriber("q", max_workers=WORKERS)
        async def handle_plain(body: int) -> None:
            async with engine.begin() as connection:
                await connection.execute(EFFECT, {"n": body})
            count_one()

    await broker.create_tables()
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE effects (n INTEGER)"))
    await broker.publish_batch(*range(count), queue="q")

    async def consume() -> None:
        await broker.start()
        await done.wait()
        await broker.stop()

    consumed = await rate(count, consume)
    await engine.dispose()
    return consumed


def fresh(kind: str, folder: str) -> str:
    """URL of an empty database."""
    if kind == "sqlite":
        return f"sqlite+aiosqlite:///{Path(folder) / 'bench.db'}"
    admin = create_engine(os.environ[VARIABLES[kind]], isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("DROP DATABASE IF EXISTS sqlbroker_bench"))
        connection.execute(text("CREATE DATABASE sqlbroker_bench"))
    admin.dispose()
    url = admin.url.set(drivername=f"{kind}+{DRIVERS[kind]}", database="sqlbroker_bench")
    return url.render_as_string(hide_password=False)


async def main(count: int) -> None:
    """Print the table."""
    top = await ceiling(count)
    print(f"FastStream's dispatch alone: {top:,.0f} messages/s\n")
    print(f"{'':12}{'publish/s':>12}{'consume/s':>12}{'of dispatch':>14}")
    for kind in ("postgresql", "mariadb", "sqlite"):
        with tempfile.TemporaryDirectory() as folder:
            published, consumed = await whole_path(fresh(kind, folder), count)
        print(f"{kind:12}{published:12,.0f}{consumed:12,.0f}{consumed / top:14.2f}")
    print(f"\nHandlers that insert a row each, {WORKERS} workers:\n")
    print(f"{'':12}{'own':>12}{'transactional':>16}{'ratio':>8}")
    for kind in ("postgresql", "mariadb", "sqlite"):
        rates = []
        for transactional in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                url = fresh(kind, folder)
                rates.append(await one_by_one(url, count // 10, transactional=transactional))
        own, joined = rates
        print(f"{kind:12}{own:12,.0f}{joined:16,.0f}{joined / own:8.2f}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000))
