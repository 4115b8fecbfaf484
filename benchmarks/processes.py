"""One queue, several consuming processes: python -m benchmarks.processes consume '{"url": ...,
"count": ...}'."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.filling import fill
from benchmarks.measure import answer, clock
from benchmarks.ours import DEADLINE, QUEUE, check_rows, engine_of, subscriber_of
from benchmarks.policies import WORKS, subscribe
from benchmarks.server import server_cpu
from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.subscriber.pipeline.fingerprints import GENERIC, VARIABLE

PATIENCE = 60.0
"""Seconds for processes to start, and to stop."""
WORKERS = 20
"""Of each process that works under policies."""
REAPED = 0.2
"""Seconds after which the server has counted its ended sessions."""


class Slot:
    """Counts in one place of an array that processes share."""

    def __init__(self, counts: Any, index: int) -> None:
        self._counts = counts
        self._index = index

    def append(self, _n: int, /) -> None:
        """Count one."""
        self._counts[self._index] += 1

    def extend(self, numbers: Iterable[int], /) -> None:
        """Count several."""
        self._counts[self._index] += len(list(numbers))


async def _serve(url: str, work: str | None, slot: Slot, barrier: Any, stop: Any) -> float:
    """Consume from the barrier's release until told to stop; CPU seconds."""
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    if work is None:
        subscriber_of(broker, slot, archive=True, shape="typed")
    else:
        subscribe(broker, WORKS[work], WORKERS, slot.append, 0.0)
    with clock() as c:
        barrier.wait(PATIENCE)
        await broker.start()
        while not stop.is_set():
            await asyncio.sleep(0.02)
        await broker.stop()
    await engine.dispose()
    return c.cpu


def _child(
    url: str, work: str | None, index: int, counts: Any, cpu: Any, barrier: Any, stop: Any
) -> None:
    cpu[index] = asyncio.run(_serve(url, work, Slot(counts, index), barrier, stop))


async def _prepare(url: str, count: int, keys: int) -> None:
    engine = engine_of(url)
    await SqlBroker(engine, logger=None).create_tables()
    await fill(engine, count, QUEUE, keys=keys)
    await engine.dispose()


async def _check(url: str, count: int, handled: int) -> None:
    """Every message was acked once (ids are unique in the archive), and none was handled twice."""
    engine = engine_of(url)
    await check_rows(engine, live=0, archived=count)
    await engine.dispose()
    if handled != count:
        raise RuntimeError(f"{handled} handled of {count}")


def _wait(children: Sequence[BaseProcess], counts: Any, count: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while sum(counts) < count:
        if time.monotonic() > deadline or not all(child.is_alive() for child in children):
            raise RuntimeError(f"gave up after {sum(counts)} of {count} messages")
        time.sleep(0.005)


def _join(children: Sequence[BaseProcess]) -> None:
    for child in children:
        child.join(PATIENCE)
    if any(child.exitcode != 0 for child in children):
        raise RuntimeError(f"consumers ended with {[child.exitcode for child in children]}")


def consume(url: str, count: int, processes: int, work: str | None = None) -> dict[str, Any]:
    """Until the last message is handled; CPU until all have stopped, `db_cpu` being the server's.

    `work` is one of `benchmarks.policies`, by 20 workers in each process and through FastStream's
    own pipeline; None: as in `benchmarks.ours`.
    `cpu_each` and `db_cpu_each` are CPU seconds a message, None if the server's cannot be seen.
    """
    if work is not None:
        os.environ[VARIABLE] = GENERIC  # which the processes inherit
    asyncio.run(_prepare(url, count, 0 if work is None else WORKS[work].keys))
    context = multiprocessing.get_context("spawn")
    counts, cpu = (
        context.Array("q", processes, lock=False),
        context.Array("d", processes, lock=False),
    )
    barrier = context.Barrier(processes + 1)
    stop = context.Event()
    shared = counts, cpu, barrier, stop
    children = [
        context.Process(target=_child, args=(url, work, n, *shared), daemon=True)
        for n in range(processes)
    ]
    for child in children:
        child.start()
    give_up_at = time.monotonic() + PATIENCE
    while barrier.n_waiting < processes and time.monotonic() < give_up_at:
        time.sleep(0.005)
    before = server_cpu()
    barrier.wait(PATIENCE)
    started = time.perf_counter()
    _wait(children, counts, count)
    seconds = time.perf_counter() - started
    stop.set()
    _join(children)
    time.sleep(REAPED)
    after = server_cpu()
    asyncio.run(_check(url, count, sum(counts)))
    result: dict[str, Any] = {
        "count": count,
        "seconds": seconds,
        "cpu": sum(cpu),
        "processes": processes,
    }
    result["cpu_each"] = result["cpu"] / count
    result["db_cpu"] = None if before is None or after is None else after - before
    result["db_cpu_each"] = None if result["db_cpu"] is None else result["db_cpu"] / count
    return result


if __name__ == "__main__":
    answer({"consume": consume})
