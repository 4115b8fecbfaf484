"""This project's side of each comparison: python -m benchmarks.ours SCENARIO '{"url": ..., "count":
...}'.

Every scenario works on an empty database of its own, checks what was done afterwards, and prints
one JSON line.
"""

import asyncio
import logging
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Protocol
from uuid import uuid4

from faststream import BaseMiddleware, Depends
from pydantic import BaseModel
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from benchmarks.filling import HEADERS, fill
from benchmarks.measure import answer, body, clock, compact, percentile
from faststream_sqlbroker import SqlBroker, SqlBrokerMessage, SqlBrokerSchemaConfig
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.subscriber.pipeline.choice import HandlerPipeline
from faststream_sqlbroker.subscriber.usecase import REPLACED_METHODS

BATCH = 1_000
QUEUE = "bench"
DRIVERS = {"postgresql": "asyncpg", "mariadb": "asyncmy", "mysql": "asyncmy", "sqlite": "aiosqlite"}
WARM = 10
"""Messages before the first that counts."""
DEADLINE = 300.0
"""Seconds for one scenario."""


class Seen(Protocol):
    """Notes the numbers of the messages that were handled; a list does."""

    def append(self, n: int, /) -> None:
        """One."""

    def extend(self, numbers: Iterable[int], /) -> None:
        """Several."""


def engine_of(url: str, **options: Any) -> AsyncEngine:
    """An engine by the driver that the peers use, too."""
    made = make_url(url)
    driver = f"{made.get_backend_name()}+{DRIVERS[made.get_backend_name()]}"
    return create_async_engine(made.set(drivername=driver), **options)


class Item(BaseModel):
    sku: str
    quantity: int


class Order(BaseModel):
    """The body, as a model."""

    order: int
    customer: str
    currency: str
    total: float
    items: list[Item]
    note: str
    express: bool


class Passes(BaseMiddleware):
    """A middleware that only hands the message on."""

    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        return await call_next(msg)


async def _forty() -> int:
    return 40


def _handlers(seen: Seen) -> dict[str, Any]:
    """Handlers that only note what they were given, by shape."""
    note = seen.append

    async def typed(message: dict) -> None:
        note(message["order"])

    async def untyped(message) -> None:
        note(message["order"])

    async def annotated(message: dict, raw: SqlBrokerMessage) -> None:
        note(message["order"])

    async def model(message: Order) -> None:
        note(message.order)

    async def depends(message: dict, forty: Annotated[int, Depends(_forty)]) -> None:
        note(message["order"])

    async def batch(messages: list[dict]) -> None:
        seen.extend([message["order"] for message in messages])

    named = {f.__name__: f for f in (typed, untyped, annotated, model, depends, batch)}
    return {**named, "middleware": typed, "logged": typed}


def broker_of(engine: AsyncEngine | str, shape: str, watch: str) -> SqlBroker:
    """A broker without a logger, unless the shape says so."""
    options = _watching(watch)
    if shape == "middleware":
        options = {**options, "middlewares": [Passes]}
    logger = None
    if shape == "logged":
        logger = logging.Logger("bench", logging.INFO)  # noqa: LOG001 - of this broker alone
        handler = logging.StreamHandler(Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
    return SqlBroker(engine, logger=logger, **options)


def subscriber_of(broker: SqlBroker, seen: Seen, *, archive: bool, shape: str) -> Any:
    """A subscriber whose handler only notes what it was given."""
    options: Any = {
        "fetch_batch_size": BATCH,
        "flush_batch_size": BATCH,
        "max_not_processed_factor": 2,
        "retain_in_archive_on_ack": archive,
        "batch": shape == "batch",
    }
    subscriber = broker.subscriber(QUEUE, **options)
    return subscriber(_handlers(seen)[shape])


def _watching(watch: str) -> dict[str, Any]:
    # Imported only if asked for: importing it costs memory, and OpenTelemetry starts a thread.
    if not watch:
        return {}
    from benchmarks.watching import watching  # noqa: PLC0415

    return watching(watch)


async def _dispatch(count: int, shape: str, watch: str, *, compiled: bool) -> dict[str, Any]:
    broker = broker_of("sqlite+aiosqlite:///unused.db", shape, watch)
    seen = []
    subscriber_of(broker, seen, archive=True, shape=shape)
    [subscriber] = broker.subscribers
    await broker.connect()
    await subscriber.prepare()
    subscriber.running = True
    now = datetime.now(timezone.utc)
    token = uuid4()
    headers = HEADERS
    rows = [
        ClaimedMessage(
            n,
            QUEUE,
            compact(body(n)),
            headers,
            0,
            None,
            0,
            1,
            1,
            now,
            now,
            None,
            None,
            None,
            now,
            token,
        )
        for n in range(count)
    ]
    raws = (
        rows if shape != "batch" else [tuple(rows[n : n + BATCH]) for n in range(0, count, BATCH)]
    )
    handle = HandlerPipeline(subscriber, REPLACED_METHODS).run if compiled else subscriber.consume
    with clock() as c:
        for raw in raws:
            await handle(raw)
    _check(count, seen)
    if any(row.outcome is None for row in rows):
        raise RuntimeError("not every message was acked")
    return {"count": count, "seconds": c.seconds, "cpu": c.cpu}


def dispatch(count: int, shape: str = "typed", watch: str = "") -> dict[str, Any]:
    """FastStream's own: the same handler on ready messages, in one task, with no database."""
    return asyncio.run(_dispatch(count, shape, watch, compiled=False))


def dispatch_compiled(count: int, shape: str = "typed", watch: str = "") -> dict[str, Any]:
    """The same through the compiled pipeline."""
    return asyncio.run(_dispatch(count, shape, watch, compiled=True))


async def _consume(
    url: str, count: int, shape: str, watch: str, *, archive: bool
) -> dict[str, Any]:
    engine = engine_of(url)
    broker = broker_of(engine, shape, watch)
    seen = []
    subscriber_of(broker, seen, archive=archive, shape=shape)
    await broker.create_tables()
    await fill(engine, count, QUEUE)
    with clock() as c:
        await consume_all(broker, seen, count)
    _check(count, seen)
    await check_rows(engine, live=0, archived=count if archive else 0)
    await engine.dispose()
    return {"count": count, "seconds": c.seconds, "cpu": c.cpu}


def consume(
    url: str, count: int, shape: str = "typed", archive: bool = True, watch: str = ""
) -> dict[str, Any]:
    """From the start to stopped, with every outcome written."""
    return asyncio.run(_consume(url, count, shape, watch, archive=archive))


async def _publish(
    url: str, count: int, way: Callable[[SqlBroker], Awaitable[None]], *, triggers: bool
) -> dict[str, Any]:
    engine = engine_of(url)
    schema = SqlBrokerSchemaConfig(notify_trigger=triggers)
    broker = SqlBroker(engine, logger=None, schema=schema)
    await broker.create_tables()
    await broker.connect()
    for n in range(50):
        await broker.publish(body(n), queue="warm")
    with clock() as c:
        await way(broker)
    await check_rows(engine, live=count + 50, archived=0)
    await broker.stop()
    await engine.dispose()
    return {"count": count, "seconds": c.seconds, "cpu": c.cpu}


def publish_single(url: str, count: int, triggers: bool = False) -> dict[str, Any]:
    """One coroutine, each message committed by itself."""

    async def way(broker: SqlBroker) -> None:
        for n in range(count):
            await broker.publish(body(n), queue=QUEUE)

    return asyncio.run(_publish(url, count, way, triggers=triggers))


def publish_concurrent(
    url: str, count: int, tasks: int = 20, triggers: bool = False
) -> dict[str, Any]:
    """Several coroutines, each message committed when its publish returns."""

    async def one(broker: SqlBroker, start: int) -> None:
        for n in range(start, count, tasks):
            await broker.publish(body(n), queue=QUEUE)

    async def way(broker: SqlBroker) -> None:
        await asyncio.gather(*(one(broker, start) for start in range(tasks)))

    return asyncio.run(_publish(url, count, way, triggers=triggers))


def publish_in_transaction(url: str, count: int, triggers: bool = False) -> dict[str, Any]:
    """Single publishes, 1 000 in each of the caller's transactions."""

    async def way(broker: SqlBroker) -> None:
        for start in range(0, count, BATCH):
            async with broker.engine.begin() as connection:
                for n in range(start, min(count, start + BATCH)):
                    await broker.publish(body(n), queue=QUEUE, connection=connection)

    return asyncio.run(_publish(url, count, way, triggers=triggers))


def publish_bulk(url: str, count: int, triggers: bool = False) -> dict[str, Any]:
    """1 000 messages a call."""

    async def way(broker: SqlBroker) -> None:
        for start in range(0, count, BATCH):
            await broker.publish_batch(*(body(n) for n in range(start, start + BATCH)), queue=QUEUE)

    return asyncio.run(_publish(url, count, way, triggers=triggers))


async def _listen(url: str, count: int, arrived: Any) -> None:
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    done = asyncio.Event()
    seen = 0

    @broker.subscriber(QUEUE)
    async def handle(message: dict) -> None:
        nonlocal seen
        arrived[message["order"]] = time.monotonic()
        seen += 1
        if seen == count:
            done.set()

    await broker.start()
    async with asyncio.timeout(DEADLINE):
        await done.wait()
    await broker.stop()
    await engine.dispose()


def _listener(url: str, count: int, arrived: Any) -> None:
    asyncio.run(_listen(url, count, arrived))


async def _send(
    url: str, count: int, pause: float, start: Callable[[], Any], arrived: Any
) -> list[float]:
    engine = engine_of(url)
    broker = SqlBroker(engine, logger=None)
    sent = list[float]()
    await broker.create_tables()
    await broker.connect()
    process = start()
    for n in range(WARM + count):
        await broker.publish(body(n), queue=QUEUE)
        sent.append(time.monotonic())
        if n == WARM - 1:
            async with asyncio.timeout(DEADLINE):
                while not all(arrived[:WARM]):
                    await asyncio.sleep(0.05)
        await asyncio.sleep(pause)
    await asyncio.to_thread(process.join, DEADLINE)
    await broker.stop()
    await engine.dispose()
    return sent


def latency(url: str, count: int = 50, pause: float = 0.1) -> dict[str, Any]:
    """From the return of publish() to the handler in another process, `pause` seconds apart;
    defaults."""
    context = multiprocessing.get_context("spawn")
    arrived = context.Array("d", WARM + count, lock=False)
    process = context.Process(target=_listener, args=(url, WARM + count, arrived), daemon=True)

    def start() -> Any:
        process.start()
        return process

    started = time.monotonic()
    sent = asyncio.run(_send(url, count, pause, start, arrived))
    if process.exitcode != 0 or not all(arrived):
        raise RuntimeError(f"the consumer ended with {process.exitcode}")
    took = [at - of for at, of in zip(arrived[WARM:], sent[WARM:], strict=True)]
    shares = {
        name: percentile(took, share)
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    }
    return {"count": count, "seconds": time.monotonic() - started, "cpu": 0.0, **shares}


async def consume_all(broker: SqlBroker, seen: list[int], count: int) -> None:
    """Start, wait until `seen` has `count` messages, and stop, with every outcome written."""
    await broker.start()
    async with asyncio.timeout(DEADLINE):
        while len(seen) < count:
            await asyncio.sleep(0.02)
    await broker.stop()


async def check_rows(engine: AsyncEngine, *, live: int, archived: int) -> None:
    """Refuse a result of which the tables tell something else."""
    async with engine.connect() as connection:
        for table, wanted in (("message", live), ("message_archive", archived)):
            found = (await connection.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one()
            if found != wanted:
                raise RuntimeError(f"{table} holds {found} rows, not {wanted}")


def _check(count: int, seen: list[int]) -> None:
    if len(seen) != count or len(set(seen)) != count:
        raise RuntimeError(f"{len(seen)} handled, {len(set(seen))} different ones, of {count}")


if __name__ == "__main__":
    answer(
        {
            "dispatch": dispatch,
            "dispatch_compiled": dispatch_compiled,
            "consume": consume,
            "publish_single": publish_single,
            "publish_concurrent": publish_concurrent,
            "publish_in_transaction": publish_in_transaction,
            "publish_bulk": publish_bulk,
            "latency": latency,
        }
    )
