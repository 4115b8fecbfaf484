"""What many rows and large bodies cost (PostgreSQL): python -m benchmarks.scale claim|throughput
'{"url": ..., ...}'."""

import asyncio
import json
import statistics
import time
from typing import Any
from uuid import uuid4

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.filling import fill, fill_archive, names_of
from benchmarks.measure import answer, clock
from benchmarks.ours import DEADLINE, QUEUE, check_rows, engine_of
from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.core.rows import ClaimRequest, ReadyPair
from faststream_sqlbroker.database.query import Query

DAY = 86_400.0
LIMIT = 100
"""Rows of a claim, as by default."""
LEASE = 600.0
WARM = 5
"""Runs before the measured ones, which fill caches."""

TIMES = 30
"""Measured runs."""

EXPLAIN = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "


class Claiming:
    """The store's own statements on a connection of asyncpg's, without the broker's loops around
    them."""

    def __init__(self, engine: AsyncEngine, connection: asyncpg.Connection, dialect: Any) -> None:
        self._engine = engine
        self._connection = connection
        self._dialect = dialect

    def _sent(self, query: Query[Any]) -> tuple[str, list[Any]]:
        """Text and binds as `database.driver` sends them."""
        compiled = query.clause.compile(dialect=self._engine.dialect)
        return str(compiled), [query.binds[name] for name in compiled.positiontup or ()]

    async def _timed(self, query: Query[Any]) -> tuple[float, list[Any]]:
        text, binds = self._sent(query)
        started = time.perf_counter()
        rows = await self._connection.fetch(text, *binds)
        return time.perf_counter() - started, rows

    async def _buffers(self, query: Query[Any]) -> int:
        """Shared buffers that it touches, planned for its values."""
        text, binds = self._sent(query)
        [explained] = json.loads(await self._connection.fetchval(EXPLAIN + text, *binds))
        plan = explained["Plan"]
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    def _claim(self, due: list[ReadyPair]) -> Query[Any]:
        query: Query[Any] = self._dialect.build_claim(ClaimRequest(due, LIMIT, LEASE, uuid4()))
        return query

    async def once(self, queues: list[str]) -> tuple[float, float, int]:
        """Seconds of a look and of the claim after it, and its rows; undone afterwards."""
        looking = self._dialect.build_scan(queues)
        transaction = self._connection.transaction()
        await transaction.start()
        look, rows = await self._timed(looking)
        due = [pair for pair in looking.read(rows) if pair.due_in <= 0]
        claim, claimed = await self._timed(self._claim(due))
        await transaction.rollback()
        return look, claim, len(claimed)

    async def buffers(self, queues: list[str]) -> tuple[int, int]:
        """Buffers of a look and of a claim; undone afterwards."""
        transaction = self._connection.transaction()
        await transaction.start()
        look = await self._buffers(self._dialect.build_scan(queues))
        claim = await self._buffers(self._claim([ReadyPair(queue, 0, 0.0) for queue in queues]))
        await transaction.rollback()
        return look, claim


async def _claim(
    url: str, ready: int, future: int, queues: int, subscribed: int, archive: int
) -> dict[str, Any]:
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    if archive:
        await fill_archive(engine, archive, QUEUE)
    await fill(engine, ready, QUEUE, queues=queues)
    await fill(engine, future, QUEUE, queues=queues, first=ready, due=DAY)
    names = names_of(QUEUE, queues)[:subscribed]
    connection = await asyncpg.connect(url)
    claiming = Claiming(engine, connection, broker.config.broker_config.store.dialect)
    taken = [await claiming.once(names) for _ in range(WARM + TIMES)][WARM:]
    look_buffers, claim_buffers = await claiming.buffers(names)
    await connection.close()
    await check_rows(engine, live=ready + future, archived=archive)
    await engine.dispose()
    wanted = min(LIMIT, sum(len(range(n, ready, queues)) for n in range(subscribed)))
    if {rows for _, _, rows in taken} != {wanted}:
        raise RuntimeError(
            f"claims gave {sorted({rows for _, _, rows in taken})} rows, not {wanted}"
        )
    return {
        "ready": ready,
        "future": future,
        "queues": queues,
        "subscribed": subscribed,
        "archive": archive,
        "look": statistics.median(look for look, _, _ in taken),
        "claim": statistics.median(claim for _, claim, _ in taken),
        "look_buffers": look_buffers,
        "claim_buffers": claim_buffers,
    }


def claim(
    url: str, ready: int, future: int = 0, queues: int = 1, subscribed: int = 1, archive: int = 0
) -> dict[str, Any]:
    """Medians (seconds) of a look at `subscribed` of `queues` queues and of the claim of 100 rows
    after it.

    `ready` rows are due, `future` ones in a day, all spread over the queues; `archive` rows are
    finished. The time is the statement's on the driver's connection, in a transaction that is
    rolled back.
    """
    return asyncio.run(_claim(url, ready, future, queues, subscribed, archive))


async def _throughput(
    url: str, ready: int, count: int, payload: int | None, archive: int
) -> dict[str, Any]:
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    seen = list[int]()

    @broker.subscriber(QUEUE)
    async def handle(message: dict) -> None:
        seen.append(message["order"])

    await broker.create_tables()
    if archive:
        await fill_archive(engine, archive, QUEUE)
    await fill(engine, ready, QUEUE, size=payload)
    async with asyncio.timeout(DEADLINE):
        with clock() as c:
            await broker.start()
            while len(seen) < count:
                await asyncio.sleep(0.005)
            handled = len(seen)
    await broker.stop()
    if len(set(seen)) != len(seen):
        raise RuntimeError(f"{len(seen)} handled, {len(set(seen))} different ones")
    await check_rows(engine, live=ready - len(seen), archived=archive + len(seen))
    await engine.dispose()
    about = {"ready": ready, "payload": payload, "archive": archive}
    return {"count": handled, "seconds": c.seconds, "cpu": c.cpu, **about}


def throughput(
    url: str, ready: int, count: int, payload: int | None = None, archive: int = 0
) -> dict[str, Any]:
    """The first `count` of `ready` messages by a subscriber with defaults, from its start; then it
    is stopped.

    Bodies have `payload` bytes, or are the usual ones; `archive` rows were finished before.
    """
    if count > ready:
        raise ValueError(f"{count} of {ready} messages cannot be handled")
    return asyncio.run(_throughput(url, ready, count, payload, archive))


if __name__ == "__main__":
    answer({"claim": claim, "throughput": throughput})
