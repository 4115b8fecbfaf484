"""Handlers that insert a row each: python -m benchmarks.effects own|joined '{"url": ..., "count":
...}'."""

import asyncio
from typing import Any

from sqlalchemy import text

from benchmarks.filling import fill
from benchmarks.measure import answer, clock
from benchmarks.ours import QUEUE, check_rows, consume_all, engine_of
from faststream_sqlbroker import SqlBroker, SqlConnection

WORKERS = 4
EFFECT = text("INSERT INTO effects (n) VALUES (:n)")


async def _consume(url: str, count: int, *, transactional: bool) -> dict[str, Any]:
    engine = engine_of(url, **({} if url.startswith("sqlite") else {"pool_size": 2 * WORKERS}))
    broker = SqlBroker(engine, logger=None)
    seen = []

    if transactional:

        @broker.subscriber(QUEUE, max_workers=WORKERS, transactional=True)
        async def handle(message: dict, connection: SqlConnection) -> None:
            await connection.execute(EFFECT, {"n": message["order"]})
            seen.append(message["order"])
    else:

        @broker.subscriber(QUEUE, max_workers=WORKERS)
        async def handle_plain(message: dict) -> None:
            async with engine.begin() as connection:
                await connection.execute(EFFECT, {"n": message["order"]})
            seen.append(message["order"])

    await broker.create_tables()
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE effects (n INTEGER)"))
    await fill(engine, count, QUEUE)
    with clock() as c:
        await consume_all(broker, seen, count)
    await check_rows(engine, live=0, archived=count)
    async with engine.connect() as connection:
        found = (await connection.execute(text("SELECT count(*) FROM effects"))).scalar_one()
    await engine.dispose()
    if found != count:
        raise RuntimeError(f"{found} effects of {count} messages")
    return {"count": count, "seconds": c.seconds, "cpu": c.cpu}


def own(url: str, count: int) -> dict[str, Any]:
    """Each in a transaction of its own, begun and committed by the handler."""
    return asyncio.run(_consume(url, count, transactional=False))


def joined(url: str, count: int) -> dict[str, Any]:
    """Each in the transaction of its ack (transactional=True)."""
    return asyncio.run(_consume(url, count, transactional=True))


if __name__ == "__main__":
    answer({"own": own, "joined": joined})
