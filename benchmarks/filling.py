"""Fill the tables without the broker, by the database itself where it can."""

import base64
import random

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.measure import body, compact

HEADERS = '{"content-type": "application/json"}'
"""What a publish without options writes."""
CHUNK = 1_000

_SERIES = """
INSERT INTO message (queue, key, payload, headers, created_at, next_attempt_at)
SELECT :queue || CASE WHEN :queues > 1 THEN '-' || n % :queues ELSE '' END,
  CASE WHEN :keys > 0 THEN 'k' || n % :keys END,
  convert_to(:head || n || :tail, 'UTF8'), cast(:headers AS jsonb),
  statement_timestamp(), statement_timestamp() + :due * interval '1 second'
FROM generate_series(cast(:first AS int), cast(:last AS int)) AS n
"""
# Ids are drawn as for messages that were published before those in the message table.
_ARCHIVED = """
INSERT INTO message_archive (id, queue, payload, headers, state, attempts_count, deliveries_count,
  created_at, next_attempt_at, first_attempt_at, last_attempt_at, acquired_at, archived_at)
SELECT nextval(pg_get_serial_sequence('message', 'id')), :queue,
  convert_to(:head || n || :tail, 'UTF8'), cast(:headers AS jsonb),
  'COMPLETED', 1, 1, t, t, t, t, t, t
FROM generate_series(1, cast(:count AS int)) AS n,
  LATERAL (
    SELECT statement_timestamp() - (cast(:count AS int) - n) * interval '1 millisecond'
  ) AS x(t)
"""
_FAILED = """
UPDATE message_archive SET state = 'FAILED', reason = 'max_attempts',
  last_error = 'ConnectionError: no route to host ' || id % 10,
  error_fingerprint = lpad(to_hex(id % 10), 16, '0')
WHERE id IN (SELECT id FROM message_archive WHERE queue = :queue ORDER BY archived_at DESC
  LIMIT :count)
"""
_NUMBER = 4242424242


def names_of(queue: str, queues: int) -> list[str]:
    """The names of the queues over which `fill` spreads messages: `queue` itself if it is one."""
    return [queue] if queues == 1 else [f"{queue}-{n}" for n in range(queues)]


def padded(n: int, size: int) -> bytes:
    """A message of about `size` bytes that cannot be compressed much, as most large ones."""
    note = base64.b64encode(random.Random(1).randbytes(size)).decode()
    empty = len(compact({"order": n, "note": ""}))
    return compact({"order": n, "note": note[: max(0, size - empty)]})


def _around_number(size: int | None) -> dict[str, str]:
    example = compact(body(_NUMBER)) if size is None else padded(_NUMBER, size)
    head, tail = example.decode().split(str(_NUMBER))
    return {"head": head, "tail": tail, "headers": HEADERS}


async def fill(
    engine: AsyncEngine,
    count: int,
    queue: str,
    *,
    due: float = 0.0,
    first: int = 0,
    queues: int = 1,
    size: int | None = None,
    keys: int = 0,
) -> None:
    """Insert `count` messages (numbers from `first`) that are due in `due` seconds, with so many
    keys in turn; leave the table vacuumed.

    On PostgreSQL also spread over `queues` queues in turn, and of `size` bytes each.
    """
    if engine.dialect.name == "postgresql":
        series = {"first": first, "last": first + count - 1, "queues": queues, "keys": keys}
        async with engine.begin() as connection:
            binds = {"queue": queue, "due": due, **series, **_around_number(size)}
            await connection.execute(text(_SERIES), binds)
        await vacuum(engine)
        return
    if queues != 1 or size is not None:
        raise NotImplementedError("queues and size are for PostgreSQL only")
    key = engine.dialect.identifier_preparer.quote("key")
    statement = text(
        f"INSERT INTO message (queue, {key}, payload, headers) "
        "VALUES (:queue, :key, :payload, :headers)"
    )
    async with engine.begin() as connection:
        for start in range(first, first + count, CHUNK):
            numbers = range(start, min(first + count, start + CHUNK))
            rows = [
                {
                    "queue": queue,
                    "key": f"k{n % keys}" if keys else None,
                    "payload": compact(body(n)),
                    "headers": HEADERS,
                }
                for n in numbers
            ]
            await connection.execute(statement, rows)


async def fill_archive(engine: AsyncEngine, count: int, queue: str) -> None:
    """Insert `count` finished messages, a millisecond apart, before any others (PostgreSQL)."""
    async with engine.begin() as connection:
        binds = {"queue": queue, "count": count, **_around_number(None)}
        await connection.execute(text(_ARCHIVED), binds)
    await vacuum(engine)


async def fill_failed(engine: AsyncEngine, count: int, queue: str) -> None:
    """Let so many of the newest archived messages be FAILED, of ten kinds of errors
    (PostgreSQL)."""
    async with engine.begin() as connection:
        await connection.execute(text(_FAILED), {"count": count, "queue": queue})
    await vacuum(engine)


async def vacuum(engine: AsyncEngine) -> None:
    """VACUUM ANALYZE, as autovacuum would after such a load (PostgreSQL)."""
    async with engine.connect() as connection:
        autocommit = await connection.execution_options(isolation_level="AUTOCOMMIT")
        await autocommit.execute(text("VACUUM ANALYZE message"))
        await autocommit.execute(text("VACUUM ANALYZE message_archive"))
