"""Fill the message table without the broker, by the database itself where it can."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.measure import body, compact

HEADERS = '{"content-type": "application/json"}'
"""What a publish without options writes."""
CHUNK = 1_000

_SERIES = """
INSERT INTO message (queue, payload, headers, created_at, next_attempt_at)
SELECT :queue, convert_to(:head || n || :tail, 'UTF8'), cast(:headers AS jsonb),
  statement_timestamp(), statement_timestamp() + :due * interval '1 second'
FROM generate_series(cast(:first AS int), cast(:last AS int)) AS n
"""


async def fill(engine: AsyncEngine, count: int, queue: str, *, due: float = 0.0, first: int = 0) -> None:
    """Insert `count` messages (numbers from `first`) that are due in `due` seconds; leave the table vacuumed."""
    if engine.dialect.name == "postgresql":
        head, tail = (part.decode() for part in compact(body(4242424242)).split(b"4242424242"))
        binds = {"queue": queue, "head": head, "tail": tail, "headers": HEADERS, "due": due}
        async with engine.begin() as connection:
            await connection.execute(text(_SERIES), {**binds, "first": first, "last": first + count - 1})
        await vacuum(engine)
        return
    statement = text("INSERT INTO message (queue, payload, headers) VALUES (:queue, :payload, :headers)")
    async with engine.begin() as connection:
        for start in range(first, first + count, CHUNK):
            numbers = range(start, min(first + count, start + CHUNK))
            rows = [{"queue": queue, "payload": compact(body(n)), "headers": HEADERS} for n in numbers]
            await connection.execute(statement, rows)


async def vacuum(engine: AsyncEngine) -> None:
    """VACUUM ANALYZE, as autovacuum would after such a load (PostgreSQL)."""
    async with engine.connect() as connection:
        autocommit = await connection.execution_options(isolation_level="AUTOCOMMIT")
        await autocommit.execute(text("VACUUM ANALYZE message"))
        await autocommit.execute(text("VACUUM ANALYZE message_archive"))
