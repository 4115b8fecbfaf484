"""The time that the server needs for each page of the dashboard, among many rows (PostgreSQL).

python -m benchmarks.pages URL_OF_AN_EMPTY_DATABASE [ROWS]
"""

import asyncio
import statistics
import sys
import time

import httpx

from benchmarks.filling import fill, fill_archive
from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http import Role, User

MILLION = 1_000_000
QUEUES = 20
TIMES = 10
PATHS = (
    "/",
    "/ui/queues",
    "/ui/queue?name=load-1",
    "/ui/messages",
    "/ui/messages?queue=load-1",
    "/ui/messages?archived=on",
    "/ui/messages?error=nothing+has+it",
    "/ui/messages/1",
    "/ui/dead-letters",
    "/ui/schedules",
    "/ui/policies",
    "/ui/locks",
    "/ui/workers",
    "/ui/channels",
    "/ui/jobs",
    "/ui/audit",
)


async def measure(url: str, rows: int) -> None:
    """Fill the tables, and print milliseconds: the median and the longest."""
    broker = SqlBroker(url, logger=None)
    await broker.create_tables()
    await fill(broker.engine, rows, "load", queues=QUEUES)
    await fill_archive(broker.engine, rows, "load-1")
    app = broker.asgi(lambda _request: User("bench", Role.ADMIN))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://bench") as client:
        for path in PATHS:
            taken = []
            for _ in range(TIMES):
                begun = time.perf_counter()
                answer = await client.get(path)
                taken.append((time.perf_counter() - begun) * 1_000)
                answer.raise_for_status()
            print(f"{statistics.median(taken):8.1f} {max(taken):8.1f}  {path}", flush=True)
    await broker.stop()


if __name__ == "__main__":
    asyncio.run(measure(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else MILLION))
