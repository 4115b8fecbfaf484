"""Requests answered by another process: python -m benchmarks.requests ask '{"url": ..., "count":
...}'.

Plain messages and requests take turns, each after a pause, so that both meet the same machine.
"""

import asyncio
import multiprocessing
import time
from typing import Any

from benchmarks.measure import answer, body, percentile
from benchmarks.ours import DEADLINE, QUEUE, WARM, engine_of
from faststream_sqlbroker import SqlBroker

SHARES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


async def _serve(url: str, started: Any, stop: Any) -> None:
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)

    @broker.subscriber(QUEUE)
    async def handle(message: dict) -> dict:
        started[message["order"]] = time.monotonic()
        return message

    async with broker:
        await broker.start()
        while not stop.is_set():
            await asyncio.sleep(0.05)
    await engine.dispose()


def _server(url: str, started: Any, stop: Any) -> None:
    asyncio.run(_serve(url, started, stop))


async def _wait_for(started: Any, n: int) -> None:
    async with asyncio.timeout(DEADLINE):
        while not started[n]:
            await asyncio.sleep(0.002)


async def _ask(url: str, count: int, pause: float, serve: Any, started: Any) -> dict[str, Any]:
    engine = engine_of(url)
    handled = list[float]()
    """From the call of publish to the handler."""
    delivered = list[float]()
    """From the return of publish to the handler."""
    asked = list[float]()
    """From the call of request to its return."""
    async with SqlBroker(engine, logger=None) as broker:
        await broker.create_tables()
        serve()
        for n in range(WARM + count):
            called = time.monotonic()
            await broker.publish(body(2 * n), queue=QUEUE)
            returned = time.monotonic()
            await _wait_for(started, 2 * n)
            await asyncio.sleep(pause)
            begun = time.monotonic()
            await broker.request(body(2 * n + 1), QUEUE, timeout=DEADLINE)
            ended = time.monotonic()
            if n >= WARM:
                handled.append(started[2 * n] - called)
                delivered.append(started[2 * n] - returned)
                asked.append(ended - begun)
            await asyncio.sleep(pause)
    await engine.dispose()
    return {
        **{name: percentile(asked, share) for name, share in SHARES},
        **{f"{name}_handler": percentile(handled, share) for name, share in SHARES},
        "p50_delivered": percentile(delivered, 0.5),
    }


def ask(url: str, count: int = 200, pause: float = 0.05) -> dict[str, Any]:
    """`count` messages and as many requests, `pause` seconds apart; defaults."""
    context = multiprocessing.get_context("spawn")
    started = context.Array("d", 2 * (WARM + count), lock=False)
    stop = context.Event()
    process = context.Process(target=_server, args=(url, started, stop), daemon=True)
    begun = time.monotonic()
    found = asyncio.run(_ask(url, count, pause, process.start, started))
    seconds = time.monotonic() - begun
    stop.set()
    process.join(DEADLINE)
    if process.exitcode != 0:
        raise RuntimeError(f"the process that answers ended with {process.exitcode}")
    return {"count": 2 * count, "seconds": seconds, "cpu": 0.0, **found}


if __name__ == "__main__":
    answer({"ask": ask})
