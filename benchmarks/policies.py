"""A queue under each policy: python -m benchmarks.policies consume '{"url": ..., "count": ...,
"work": "delay"}'."""

import asyncio
from dataclasses import dataclass
from typing import Any

from sqlalchemy import event

from benchmarks.filling import fill
from benchmarks.measure import answer, clock
from benchmarks.ours import QUEUE, check_rows, consume_all, engine_of
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


async def _consume(url: str, count: int, work: str, workers: int, handler: float) -> dict[str, Any]:
    engine = engine_of(url)
    statements = 0

    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def note(*_: Any) -> None:
        nonlocal statements
        statements += 1

    broker = SqlBroker(engine, logger=None)
    seen: list[int] = []
    told = WORKS[work]

    @broker.subscriber(
        QUEUE, policies=list(told.policies), ordered=told.ordered, max_workers=workers
    )
    async def handle(message: dict) -> None:
        if handler:
            await asyncio.sleep(handler)
        seen.append(message["order"])

    await broker.create_tables()
    await fill(engine, count, QUEUE, keys=told.keys)
    statements = 0
    with clock() as c:
        await consume_all(broker, seen, count)
    if len(seen) != count or len(set(seen)) != count:
        raise RuntimeError(f"{len(seen)} handled, {len(set(seen))} different ones, of {count}")
    await check_rows(engine, live=0, archived=count)
    await engine.dispose()
    return {
        "count": count,
        "seconds": c.seconds,
        "cpu": c.cpu,
        "statements_each": statements / count,
    }


def consume(
    url: str, count: int, work: str, workers: int = 20, handler: float = 0.0
) -> dict[str, Any]:
    """From the start to stopped, with every outcome written; `handler`: seconds that it sleeps.

    The statements are those of SQLAlchemy: what goes by the driver itself is not counted.
    """
    return asyncio.run(_consume(url, count, work, workers, handler))


if __name__ == "__main__":
    answer({"consume": consume})
