"""An even stream of messages, end to end, on PostgreSQL: python -m benchmarks.rate rate '{"url":
..., "rate": 1000}'.

With a snapshot held by another session, no dead row can be removed: what slows down then shows as
growth from the first seconds to the last.
"""

import asyncio
import contextlib
import multiprocessing
import statistics
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import asyncpg

from benchmarks.measure import answer, body, clock, percentile
from benchmarks.ours import QUEUE, check_rows, engine_of
from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.flow.deliver import ready

STEPS = 100
"""Batches a second."""
WARM = 2.0
"""Seconds before the first window."""
WIDEST = 10.0
"""Seconds of a window at most; less in short runs."""
SHORTEST = 5
"""Seconds below which the windows would overlap."""
REPORTED = 1.0
"""Seconds after which ended sessions have reported their dead rows."""
DEAD = "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'message'"


@dataclass
class Record:
    """What the consumer saw, by `time.monotonic()`, which on Linux all processes share; seconds."""

    marks: bytearray
    """How often each message was handled."""
    handled: int = 0
    arrived: "array[float]" = field(default_factory=lambda: array("d"))
    latencies: "array[float]" = field(default_factory=lambda: array("d"))
    claims: list[tuple[float, float, int]] = field(default_factory=list)
    """When, how long it took, how many rows it gave."""


async def _publish(url: str, rate: int, seconds: int, pipe: Any) -> None:
    """Says when it is ready, starts when told to, then says when it started and how far it ever was
    behind."""
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    behind = 0.0
    await broker.connect()
    pipe.send("ready")
    pipe.recv()
    started = time.monotonic()
    for step in range(seconds * STEPS):
        early = started + step / STEPS - time.monotonic()
        behind = max(behind, -early)
        if early > 0:
            await asyncio.sleep(early)
        numbers = range(step * rate // STEPS, (step + 1) * rate // STEPS)
        now = time.monotonic()
        await broker.publish_batch(*({**body(n), "at": now} for n in numbers), queue=QUEUE)
    await broker.stop()
    await engine.dispose()
    pipe.send((started, behind))


def _publisher(url: str, rate: int, seconds: int, pipe: Any) -> None:
    asyncio.run(_publish(url, rate, seconds, pipe))


async def _receive(pipe: Any, process: BaseProcess) -> Any:
    """The publisher's next word."""
    while True:
        alive = process.is_alive()
        if pipe.poll():
            return pipe.recv()
        if not alive:
            raise RuntimeError(f"the publisher ended with {process.exitcode}")
        await asyncio.sleep(0.02)


def _record_claims(broker: SqlBroker, record: Record) -> None:
    """Time the store's claims."""
    store: Any = broker.config.broker_config.store
    claim = store.claim

    async def timed(*arguments: Any, **options: Any) -> Any:
        started = time.monotonic()
        rows = await claim(*arguments, **options)
        record.claims.append((started, time.monotonic() - started, len(rows)))
        return rows

    store.claim = timed


@contextlib.asynccontextmanager
async def _snapshot(url: str, *, held: bool) -> AsyncIterator[None]:
    """A session that holds a snapshot of the message table, as a long report or a dump does."""
    if not held:
        yield
        return
    connection = await asyncpg.connect(url)
    async with connection.transaction(isolation="repeatable_read"):
        await connection.fetchval("SELECT count(*) FROM message")
        yield
    await connection.close()


async def _consume(
    broker: SqlBroker, record: Record, pipe: Any, process: BaseProcess, seconds: int
) -> Any:
    """From the start to stopped; what the publisher said."""
    count = len(record.marks)
    await broker.start()
    pipe.send("go")
    async with asyncio.timeout(2 * seconds + 60):
        while record.handled < count:
            if not process.is_alive() and process.exitcode:
                raise RuntimeError(f"the publisher ended with {process.exitcode}")
            await asyncio.sleep(0.02)
        said = await _receive(pipe, process)
    await broker.stop()
    return said


async def _rate(url: str, rate: int, seconds: int, *, held: bool) -> dict[str, Any]:
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    record = Record(bytearray(rate * seconds))

    @broker.subscriber(QUEUE)
    async def handle(message: dict) -> None:
        now = time.monotonic()
        record.arrived.append(now)
        record.latencies.append(now - message["at"])
        record.marks[message["order"]] += 1
        record.handled += 1

    await broker.create_tables()
    _record_claims(broker, record)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_publisher, args=(url, rate, seconds, theirs), daemon=True)
    async with _snapshot(url, held=held):
        process.start()
        await _receive(pipe, process)
        observer = await asyncpg.connect(url)
        before = await observer.fetchval("SELECT pg_current_wal_lsn()")
        with clock() as c:
            started, behind = await _consume(broker, record, pipe, process, seconds)
        wal = await observer.fetchval("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), $1)", before)
        await check_rows(engine, live=0, archived=rate * seconds)
        await engine.dispose()
        await asyncio.sleep(REPORTED)
        dead = await observer.fetchval(DEAD)
        await observer.close()
    _check(record)
    about = {"dead_rows": dead, "wal_bytes": float(wal) / len(record.marks), "behind": behind}
    result = {"count": record.handled, "seconds": c.seconds, "cpu": c.cpu, **about}
    return {**result, **_figures(record, started, seconds)}


def _check(record: Record) -> None:
    if record.handled != len(record.marks) or set(record.marks) != {1}:
        different = sum(map(bool, record.marks))
        raise RuntimeError(
            f"{record.handled} handled, {different} different ones, of {len(record.marks)}"
        )


def _figures(record: Record, started: float, seconds: int) -> dict[str, float]:
    """Latencies and lengths of claims, over all and at both ends; seconds, and their growth."""
    width = min(WIDEST, seconds / 4)
    windows = {"start": started + WARM, "end": started + seconds - width}
    shares = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    figures = {name: percentile(list(record.latencies), share) for name, share in shares}
    for name, first in windows.items():
        last = first + width
        claims = [took for at, took, rows in record.claims if rows and first <= at < last]
        pairs = zip(record.arrived, record.latencies, strict=True)
        latencies = [latency for at, latency in pairs if first <= at < last]
        if not claims or not latencies:
            raise RuntimeError(f"nothing arrived in the {width} s at the {name}")
        figures[f"claim_{name}"] = statistics.median(claims)
        figures[f"p99_{name}"] = percentile(latencies, 0.99)
    for of in ("claim", "p99"):
        figures[f"{of}_growth"] = figures[f"{of}_end"] / figures[f"{of}_start"]
    return figures


def rate(
    url: str, rate: int = 1_000, seconds: int = 20, held: bool = False, begin: bool = True
) -> dict[str, Any]:
    """From publish to handler with archive and defaults, `rate` messages a second from another
    process.

    `held`: a session holds a snapshot from before the start. `begin`: claims may begin where the
        last one ended.
    Latency runs from just before the publish call to the handler; `behind` is by how many seconds a
    call was ever late. `dead_rows` are the message table's at the end; `wal_bytes` are the whole
    server's, a message.
    """
    if seconds < SHORTEST:
        raise ValueError(f"{seconds} seconds are too short: at least {SHORTEST}")
    if not begin:
        ready.SLOW_POLL = float("inf")
    return asyncio.run(_rate(url, rate, seconds, held=held))


if __name__ == "__main__":
    answer({"rate": rate})
