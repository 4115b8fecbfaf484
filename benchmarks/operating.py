"""What operators' actions cost in large tables (PostgreSQL): python -m benchmarks.operating
operate|next_to_prune '{"url": ..., ...}'."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.filling import fill, fill_archive, fill_failed
from benchmarks.measure import answer, clock
from benchmarks.ours import DEADLINE, QUEUE, engine_of
from faststream_sqlbroker import Retention, SqlBroker

DAY = 86_400.0


class Slowest:
    """The longest statement of each operation, as the application's driver waits for it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.seconds = 0.0
        self._began = 0.0
        event.listen(engine.sync_engine, "before_cursor_execute", self._begins)
        event.listen(engine.sync_engine, "after_cursor_execute", self._ended)

    def _begins(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _ended(self, *_: Any) -> None:
        self.seconds = max(self.seconds, time.perf_counter() - self._began)

    async def of(self, work: Callable[[], Awaitable[Any]]) -> float:
        """Seconds of the longest statement of `work`, the better of two runs."""
        found = []
        for _ in range(2):
            self.seconds = 0.0
            await work()
            found.append(self.seconds)
        return min(found)


async def _operate(url: str, live: int, archive: int) -> dict[str, Any]:
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    await fill_archive(engine, archive, QUEUE)
    await fill_failed(engine, archive // 10, QUEUE)
    await fill(engine, live // 2, QUEUE, queues=20)
    await fill(engine, live - live // 2, QUEUE, queues=20, first=live, due=DAY)
    admin = broker.admin
    ended: dict[str, Any] = {"queue": QUEUE, "dry_run": False}
    one = f"{QUEUE}-1"
    jobs = itertools.count()
    kept = itertools.count(archive * 3 // 4, -archive // 8)
    works: dict[str, Callable[[], Awaitable[Any]]] = {
        "queues": admin.queues,
        "list": lambda: admin.messages(queue=one),
        "search": lambda: admin.messages(error="none"),
        "search_archive": lambda: admin.messages(error="none", archived=True),
        "dead_letters": admin.dead_letters,
        "dry_run": lambda: admin.redrive(queue=QUEUE),
        "move": lambda: admin.bulk_move(f"moved-{next(jobs)}", queue=one, dry_run=False),
        "redrive": lambda: admin.redrive(**ended, fingerprint=f"{next(jobs):016x}"),
        "prune": lambda: admin.prune(Retention(max_rows=next(kept))),
        "verify": lambda: admin.verify(rows=200_000),
    }
    slowest = Slowest(engine)
    found = {name: await slowest.of(work) for name, work in works.items()}
    await engine.dispose()
    return {"live": live, "archive": archive, "slowest": max(found.values()), **found}


def operate(url: str, live: int, archive: int) -> dict[str, Any]:
    """The longest statement (seconds) of each of an operator's actions, with so many live and
    archived messages."""
    return asyncio.run(_operate(url, live, archive))


async def _next_to_prune(url: str, count: int, archive: int, *, pruning: bool) -> dict[str, Any]:
    engine = engine_of(url)
    other = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    seen = list[int]()

    @broker.subscriber(QUEUE)
    async def handle(message: dict) -> None:
        seen.append(message["order"])

    await broker.create_tables()
    await fill_archive(engine, archive, QUEUE)
    await fill(engine, 2 * count, QUEUE)
    task = None
    if pruning:
        # Far more than go while it is measured.
        retention = Retention(max_rows=1)
        task = asyncio.create_task(SqlBroker(other, logger=None).admin.prune(retention))
        await asyncio.sleep(0.5)
    async with asyncio.timeout(DEADLINE):
        with clock() as c:
            await broker.start()
            while len(seen) < count:
                await asyncio.sleep(0.005)
            handled = len(seen)
    if task is not None:
        if task.done():
            raise RuntimeError("the prune had ended before the consumer: archive more rows")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await broker.stop()
    async with engine.connect() as connection:
        left = await connection.scalar(text("SELECT count(*) FROM message_archive"))
    removed = archive + len(seen) - int(left or 0)
    await engine.dispose()
    await other.dispose()
    return {"count": handled, "seconds": c.seconds, "cpu": c.cpu, "removed": removed}


def next_to_prune(url: str, count: int, archive: int, pruning: bool) -> dict[str, Any]:
    """The first `count` messages by a subscriber, while old messages leave the archive or not."""
    return asyncio.run(_next_to_prune(url, count, archive, pruning=pruning))


if __name__ == "__main__":
    answer({"operate": operate, "next_to_prune": next_to_prune})
