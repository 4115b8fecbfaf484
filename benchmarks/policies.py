"""A queue under each policy: python -m benchmarks.policies consume '{"url": ..., "count": ...,
"work": "delay"}'."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.filling import fill
from benchmarks.measure import answer, clock
from benchmarks.ours import DEADLINE, QUEUE, check_rows, consume_all, engine_of
from faststream_sqlbroker import (
    Concurrency,
    Debounce,
    Delay,
    Once,
    SqlBroker,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.subscriber.pipeline.fingerprints import GENERIC, VARIABLE


@dataclass(frozen=True)
class Work:
    """What a subscriber is told, and how many keys its messages have."""

    policies: tuple[Policy, ...] = ()
    ordered: bool = False
    keys: int = 0


WORKS = {
    "plain": Work(),
    "delay": Work((Delay("1ms"),)),
    "window": Work((Window("00:00", "24:00"),)),
    "throttle": Work((Throttle(1_000_000, per="1s"),)),
    "throttle 10 000/s": Work((Throttle(10_000, per="1s"),)),
    "throttle by key": Work((Throttle(1_000_000, per="1s", key=True),), keys=1_000),
    "concurrency": Work((Concurrency(100_000),)),
    "concurrency by key": Work((Concurrency(100, per_key=True),), keys=1_000),
    "ordered": Work(ordered=True, keys=1_000),
    "once": Work((Once("1h"),), keys=1_000_000),
    "debounce": Work((Debounce("10ms"),), keys=1_000_000),
}
"""By the name in the report; every message is handled."""


Append = Callable[[int], object]
COUNTED = 10
"""Statements are counted in a run of this share of the messages."""


def subscribe(broker: SqlBroker, told: Work, workers: int, note: Append, handler: float) -> None:
    """Let `broker` handle what `told` says; `handler`: seconds that each message takes."""

    @broker.subscriber(
        QUEUE, policies=list(told.policies), ordered=told.ordered, max_workers=workers
    )
    async def handle(message: dict) -> None:
        if handler:
            await asyncio.sleep(handler)
        note(message["order"])


async def _statements(url: str, count: int, work: str, workers: int) -> float:
    """Statements a message, in a run of their own: with a listener on the engine, the broker no
    longer sends any on the driver's own connection.
    """
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    seen: list[int] = []
    subscribe(broker, WORKS[work], workers, seen.append, 0.0)
    await fill(engine, count, QUEUE, keys=WORKS[work].keys)
    statements = 0

    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def note(*_: Any) -> None:
        nonlocal statements
        statements += 1

    await consume_all(broker, seen, count)
    await engine.dispose()
    return statements / count


async def _consume(url: str, count: int, work: str, workers: int, handler: float) -> dict[str, Any]:
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    seen: list[int] = []
    subscribe(broker, WORKS[work], workers, seen.append, handler)
    await broker.create_tables()
    await fill(engine, count, QUEUE, keys=WORKS[work].keys)
    with clock() as c:
        await consume_all(broker, seen, count)
    if len(seen) != count or len(set(seen)) != count:
        raise RuntimeError(f"{len(seen)} handled, {len(set(seen))} different ones, of {count}")
    await check_rows(engine, live=0, archived=count)
    await _empty(engine)
    await engine.dispose()
    return {
        "count": count,
        "seconds": c.seconds,
        "cpu": c.cpu,
        "statements_each": await _statements(url, max(1, count // COUNTED), work, workers),
    }


async def _empty(engine: AsyncEngine) -> None:
    # Keys that are handled once stay claimed, and slots that were granted stay granted.
    async with engine.begin() as connection:
        await connection.execute(text("DELETE FROM message_policy_state"))


async def _until(done: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.perf_counter() + DEADLINE
    while not await done():
        if time.perf_counter() > deadline:
            raise RuntimeError("gave up")
        await asyncio.sleep(0.02)


async def _debounce(url: str, count: int, keys: int, window: float) -> dict[str, Any]:
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    handled: list[int] = []
    first = 0.0

    def note(n: int) -> None:
        nonlocal first
        first = first or time.perf_counter()
        handled.append(n)

    subscribe(broker, Work((Debounce(window),)), 20, note, 0.0)
    await broker.create_tables()
    await fill(engine, count, QUEUE, keys=keys)
    await asyncio.sleep(window)  # every burst has ended
    started = time.perf_counter()
    with clock() as c:
        await broker.start()

        async def empty() -> bool:
            async with engine.connect() as connection:
                return await connection.scalar(text("SELECT id FROM message LIMIT 1")) is None

        await _until(empty)
        seconds = time.perf_counter() - started
        await broker.stop()
    if sorted(handled) != list(range(count - keys, count)):
        raise RuntimeError(f"{len(handled)} handled, not the newest of each of {keys} keys")
    await check_rows(engine, live=0, archived=count)
    await engine.dispose()
    return {"count": count, "seconds": seconds, "cpu": c.cpu, "first": first - started}


def debounce(
    url: str, count: int = 200_000, keys: int = 50_000, window: float = 1.0
) -> dict[str, Any]:
    """Messages whose bursts have ended when the broker starts; until all have left the queue.

    Through FastStream's own pipeline. `first`: seconds to the first delivery.
    """
    os.environ[VARIABLE] = GENERIC
    return asyncio.run(_debounce(url, count, keys, window))


def consume(
    url: str,
    count: int,
    work: str,
    workers: int = 20,
    handler: float = 0.0,
    pipeline: str = GENERIC,
) -> dict[str, Any]:
    """From the start to stopped, with every outcome written; `handler`: seconds that it sleeps.

    `pipeline` is FastStream's own, or compiled. The statements are counted afterwards, in a shorter
    run.
    """
    os.environ[VARIABLE] = pipeline
    return asyncio.run(_consume(url, count, work, workers, handler))


if __name__ == "__main__":
    answer({"consume": consume, "debounce": debounce})
