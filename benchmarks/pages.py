"""The time that the server needs for each page of the dashboard, among many rows, as the tables of
docs/howto/dashboard.md have it (PostgreSQL): python -m benchmarks.pages [--rows N] [--jobs N]
[--times N].
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass

import httpx
from sqlalchemy import event

from benchmarks.filling import fill, fill_archive, fill_failed
from benchmarks.harness import database
from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http import Channels, Role, User

QUEUES = 20
"""Queues with messages, and later pull consumers with jobs."""
PARTS = 50
"""Statements that publish the messages, each with a due time of its own."""
PATHS = {
    "Overview, shared look": "/",
    "Queues, shared look": "/ui/queues",
    "a queue": "/ui/queue?name=load-1",
    "Messages, all": "/ui/messages",
    "Messages, of a queue": "/ui/messages?queue=load-1",
    "Messages, archived": "/ui/messages?archived=on",
    "Messages, by an error without messages": "/ui/messages?error=nothing+has+it",
    "Messages, archived, by an error without messages": (
        "/ui/messages?archived=on&error=nothing+has+it"
    ),
    "Messages, of a queue and by an error without messages": (
        "/ui/messages?queue=load-1&error=nothing+has+it"
    ),
    "a message": "/ui/messages/1",
    "Dead letters, 20,000 looked at": "/ui/dead-letters",
    "Policies": "/ui/policies",
    "Workers": "/ui/workers",
    "Locks": "/ui/locks",
    "Schedules": "/ui/schedules",
    "Jobs": "/ui/jobs",
    "Audit": "/ui/audit",
}
CHANNELS = "/ui/channels"
REFRESHED = {"X-Refreshed": "1"}
"""Of a page that is read again while it is open."""


class Statements:
    """Counts what is sent to the database."""

    def __init__(self, broker: SqlBroker) -> None:
        self.sent = 0
        event.listen(broker.engine.sync_engine, "before_cursor_execute", self._count)

    def _count(self, *_: object) -> None:
        self.sent += 1


@dataclass
class Bench:
    """Reads pages."""

    client: httpx.AsyncClient
    statements: Statements
    times: int

    async def read(self, name: str, path: str, headers: dict[str, str] | None = None) -> None:
        """Print a row of the table."""
        taken = []
        counts = []
        for _ in range(self.times):
            before = self.statements.sent
            begun = time.perf_counter()
            answer = await self.client.get(path, headers=headers or {})
            taken.append((time.perf_counter() - begun) * 1_000)
            counts.append(self.statements.sent - before)
            answer.raise_for_status()
        best, median = min(taken), statistics.median(taken)
        print(
            f"| {name} | {best:.0f} | {median:.0f} | {statistics.median_low(counts)} |", flush=True
        )


async def measure(url: str, rows: int, jobs: int, times: int) -> None:
    """Fill the tables, and print a row for each page."""
    broker = SqlBroker(url, logger=None)
    await broker.create_tables()
    # Not all at once: a million messages of one due time are rare.
    part = max(1, rows // PARTS)
    for first in range(0, rows, part):
        await fill(broker.engine, min(part, rows - first), "load", queues=QUEUES, first=first)
    await fill_archive(broker.engine, rows, "load-1")
    await fill_failed(broker.engine, rows // 10, "load-1")
    app = broker.asgi(lambda _request: User("bench", Role.ADMIN), channels=Channels())
    transport = httpx.ASGITransport(app)
    statements = Statements(broker)
    async with httpx.AsyncClient(transport=transport, base_url="http://bench") as client:
        print("| page | best, ms | median, ms | statements |\n|---|---|---|---|")
        await Bench(client, statements, 1).read("Queues, the first look", "/ui/queues")
        bench = Bench(client, statements, times)
        for name, path in PATHS.items():
            await bench.read(name, path)
        await _fill_jobs(broker, client, jobs)
        await bench.read(f"Channels, {QUEUES} pull consumers", CHANNELS)
        await bench.read("the same, read again while it is open", CHANNELS, REFRESHED)
    await broker.stop()


async def _fill_jobs(broker: SqlBroker, client: httpx.AsyncClient, jobs: int) -> None:
    """Jobs of pull consumers, with two and a half times as many that have ended."""
    (await client.put("/channel/bench")).raise_for_status()
    for number in range(QUEUES):
        path = f"/channel/bench/consumer/c-{number}"
        (await client.put(path, data={"type": "pull"})).raise_for_status()
        await fill_archive(broker.engine, jobs * 5 // 2, f"bench/c-{number}")
    await fill(broker.engine, jobs * QUEUES, "bench/c", queues=QUEUES)


def main() -> None:
    """Measure in a database of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="live messages; as many archived"
    )
    parser.add_argument("--jobs", type=int, default=20_000, help="live jobs of each pull consumer")
    parser.add_argument("--times", type=int, default=9, help="how often each page is read")
    given = parser.parse_args()
    with database("postgresql") as url:
        address = url.replace("postgresql://", "postgresql+asyncpg://", 1)
        asyncio.run(measure(address, given.rows, given.jobs, given.times))


if __name__ == "__main__":
    main()
