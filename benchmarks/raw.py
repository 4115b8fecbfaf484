"""What asyncpg alone reaches on the same tables and indexes: python -m benchmarks.raw SCENARIO
OPTIONS."""

import asyncio
from typing import Any
from uuid import uuid4

import asyncpg

from benchmarks.filling import HEADERS, fill
from benchmarks.measure import answer, body, clock, compact
from benchmarks.ours import BATCH, QUEUE, check_rows, engine_of
from faststream_sqlbroker import SqlBroker

ONE = "INSERT INTO message (queue, payload, headers) VALUES ($1, $2, $3::text::jsonb)"
MANY = """
INSERT INTO message (queue, payload, headers)
SELECT q, p, h::jsonb FROM unnest($1::varchar[], $2::bytea[], $3::text[]) AS t(q, p, h)
"""
CLAIM = """
WITH r AS MATERIALIZED (
  SELECT ctid AS c FROM message
  WHERE queue = $1 AND priority = 0 AND state IN ('PENDING', 'RETRYABLE')
    AND next_attempt_at <= now()
  ORDER BY next_attempt_at, id LIMIT $2 FOR UPDATE SKIP LOCKED)
UPDATE message SET state = 'PROCESSING', acquired_at = now(), lease_token = $3,
  lease_expires_at = now() + interval '10 minutes', deliveries_count = deliveries_count + 1
WHERE ctid = ANY(ARRAY(SELECT c FROM r)) RETURNING id, payload
"""
SETTLE = """
WITH d AS (DELETE FROM message WHERE id = ANY($1::bigint[]) AND lease_token = $2 RETURNING *)
INSERT INTO message_archive (id, queue, priority, key, headers, payload, state, attempts_count,
  deliveries_count, publish_count, created_at, next_attempt_at, first_attempt_at, last_attempt_at,
  acquired_at, archived_at)
SELECT id, queue, priority, key, headers, payload, 'COMPLETED', 1, deliveries_count, publish_count,
  created_at, next_attempt_at, now(), now(), acquired_at, now() FROM d
"""


async def _connect(url: str) -> asyncpg.Connection:
    engine = engine_of(url)
    await SqlBroker(engine, logger=None).create_tables()
    await engine.dispose()
    return await asyncpg.connect(url)


async def _publish(url: str, count: int, way: Any) -> dict[str, Any]:
    connection = await _connect(url)
    for n in range(50):
        await connection.execute(ONE, "warm", compact(body(n)), HEADERS)
    with clock() as c:
        await way(connection)
    await connection.close()
    engine = engine_of(url)
    await check_rows(engine, live=count + 50, archived=0)
    await engine.dispose()
    return {"count": count, "seconds": c.seconds, "cpu": c.cpu}


def publish_single(url: str, count: int) -> dict[str, Any]:
    """INSERT after INSERT, each committed by itself."""

    async def way(connection: asyncpg.Connection) -> None:
        for n in range(count):
            await connection.execute(ONE, QUEUE, compact(body(n)), HEADERS)

    return asyncio.run(_publish(url, count, way))


def publish_in_transaction(url: str, count: int) -> dict[str, Any]:
    """INSERT after INSERT, 1 000 in a transaction."""

    async def way(connection: asyncpg.Connection) -> None:
        for start in range(0, count, BATCH):
            async with connection.transaction():
                for n in range(start, start + BATCH):
                    await connection.execute(ONE, QUEUE, compact(body(n)), HEADERS)

    return asyncio.run(_publish(url, count, way))


def publish_bulk(url: str, count: int) -> dict[str, Any]:
    """One INSERT of 1 000 rows after the other, by arrays."""

    async def way(connection: asyncpg.Connection) -> None:
        for start in range(0, count, BATCH):
            payloads = [compact(body(n)) for n in range(start, start + BATCH)]
            await connection.execute(MANY, [QUEUE] * BATCH, payloads, [HEADERS] * BATCH)

    return asyncio.run(_publish(url, count, way))


def publish_concurrent(url: str, count: int, tasks: int = 20) -> dict[str, Any]:
    """Group commit by hand: one INSERT by arrays in flight; each caller waits for its commit."""

    async def way(connection: asyncpg.Connection) -> None:
        waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        more = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def pump() -> None:
            while True:
                await more.wait()
                await asyncio.sleep(0)
                group = waiting[:]
                waiting.clear()
                more.clear()
                size = len(group)
                await connection.execute(
                    MANY, [QUEUE] * size, [p for p, _ in group], [HEADERS] * size
                )
                for _, done in group:
                    done.set_result(None)

        async def one(start: int) -> None:
            for n in range(start, count, tasks):
                done = loop.create_future()
                waiting.append((compact(body(n)), done))
                more.set()
                await done

        pumping = asyncio.create_task(pump())
        await asyncio.gather(*(one(start) for start in range(tasks)))
        pumping.cancel()

    return asyncio.run(_publish(url, count, way))


async def _consume(url: str, count: int) -> dict[str, Any]:
    engine = engine_of(url)
    await SqlBroker(engine, logger=None).create_tables()
    await fill(engine, count, QUEUE)
    first = await asyncpg.connect(url)
    second = await asyncpg.connect(url)
    handled = 0
    with clock() as c:
        settling: asyncio.Task[str] | None = None
        while True:
            token = uuid4()
            rows = await first.fetch(CLAIM, QUEUE, BATCH, token)
            if settling is not None:
                await settling
            if not rows:
                break
            handled += len(rows)
            settling = asyncio.create_task(
                second.execute(SETTLE, [row["id"] for row in rows], token)
            )
    await first.close()
    await second.close()
    if handled != count:
        raise RuntimeError(f"{handled} handled of {count}")
    await check_rows(engine, live=0, archived=count)
    await engine.dispose()
    return {"count": count, "seconds": c.seconds, "cpu": c.cpu}


def consume(url: str, count: int) -> dict[str, Any]:
    """Claim and archive in batches of 1 000; one is settled while the next is claimed."""
    return asyncio.run(_consume(url, count))


if __name__ == "__main__":
    answer(
        {
            "consume": consume,
            "publish_single": publish_single,
            "publish_concurrent": publish_concurrent,
            "publish_in_transaction": publish_in_transaction,
            "publish_bulk": publish_bulk,
        }
    )
