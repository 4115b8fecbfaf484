"""An order service that survives rollbacks, failures and a killed worker: just demo
[sqlite|postgresql].
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table as View
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from docs.examples.database import empty_database
from docs.examples.demo.shop import (
    HOPELESS_EVERY,
    CardDeclinedError,
    metadata,
    orders,
    place_order,
    shipped_more_than_once,
)
from faststream_sqlbroker import SqlBroker, SqlBrokerSchemaConfig, include_tables

ORDERS = 1_000
DECLINED_EVERY = 10
HELD_AT_MOST = 60
PATIENCE = 90.0
"""Seconds after which a message that is still there counts as lost."""

tables = include_tables(metadata, SqlBrokerSchemaConfig())
message = tables.message
archive: Any = tables.archive
console = Console()


@dataclass
class Result:
    """What the database says at the end."""

    published: int = 0
    rolled_back: int = 0
    completed: int = 0
    retried: int = 0
    dead: int = 0
    archived: int = 0
    handled_twice: int = 0
    lost: int = 0


class Demo:
    """The shop, its two workers, and the view of them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine: AsyncEngine = create_async_engine(url)
        self.broker = SqlBroker(self.engine, logger=None)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.killed: subprocess.Popen[bytes] | None = None
        self.placed = self.declined = 0
        self.committed: set[int] = set()

    def start_worker(self) -> None:
        """Start one more process on the same queue."""
        command = [sys.executable, "-m", "docs.examples.demo.worker", self.url]
        self.workers.append(subprocess.Popen(command))

    async def place_orders(self) -> None:
        """Place all orders; half way, kill a worker."""
        for order_id in range(1, ORDERS + 1):
            declined = order_id % DECLINED_EVERY == 3
            try:
                await place_order(self.engine, self.broker, order_id, declined=declined)
                self.committed.add(order_id)
            except CardDeclinedError:
                self.declined += 1
            self.placed += 1
            if self.placed == ORDERS // 2:
                await self.kill_one()
            await asyncio.sleep(random.uniform(0, 0.008))

    async def kill_one(self) -> None:
        """SIGKILL: no farewell, its messages stay leased until their leases run out."""
        while await self.count(message, message.c.state == "PROCESSING") == 0:
            await asyncio.sleep(0.005)
        self.killed = self.workers[0]
        self.killed.send_signal(signal.SIGKILL)

    async def count(self, table: object, *where: object) -> int:
        """Rows of a table."""
        async with self.engine.connect() as connection:
            query = select(func.count()).select_from(table).where(*where)  # type: ignore[arg-type]
            return int((await connection.execute(query)).scalar_one())

    async def view(self) -> View:
        """The live picture."""
        view = View(title=f"orders on {self.engine.dialect.name}", min_width=60)
        view.add_column("what")
        view.add_column("number", justify="right")
        view.add_row("orders placed / declined (rolled back)", f"{self.placed} / {self.declined}")
        for state in ("PENDING", "PROCESSING", "RETRYABLE"):
            view.add_row(
                f"messages {state}", str(await self.count(message, message.c.state == state))
            )
        for state in ("COMPLETED", "FAILED"):
            view.add_row(
                f"archived {state}", str(await self.count(archive, archive.c.state == state))
            )
        for n, worker in enumerate(self.workers, 1):
            says = "killed (SIGKILL)" if worker is self.killed else "running"
            view.add_row(f"worker {n}, process {worker.pid}", says)
        return view

    async def run(self) -> Result:
        """Create the tables, work, wait for the end, count."""
        await self.broker.connect()
        await self.broker.create_tables()
        async with self.engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        self.start_worker()
        self.start_worker()
        placing = asyncio.create_task(self.place_orders())
        deadline = time.monotonic() + PATIENCE
        with Live(console=console, refresh_per_second=8) as live:
            while time.monotonic() < deadline:
                live.update(await self.view())
                if placing.done() and await self.count(message) == 0:
                    break
                await asyncio.sleep(0.15)
        await placing
        return await self.result()

    async def result(self) -> Result:
        """Ask the database, not our own memory."""
        async with self.engine.connect() as connection:
            stored = set((await connection.execute(select(orders.c.id))).scalars())
            bodies = (await connection.execute(select(archive.c.payload))).scalars()
            ended = {order_of(body) for body in bodies}
            twice = await shipped_more_than_once(connection)
            again = select(archive.c.payload).where(
                archive.c.deliveries_count > archive.c.attempts_count
            )
            redelivered = {order_of(body) for body in (await connection.execute(again)).scalars()}
        assert stored == self.committed, "orders and their transactions disagree"
        assert ended <= stored, "a message of a rolled-back order was delivered"
        assert twice <= redelivered, "an order was shipped twice without a lost lease"
        return Result(
            published=len(stored),
            rolled_back=ORDERS - len(stored),
            completed=await self.count(archive, archive.c.state == "COMPLETED"),
            retried=await self.count(archive, archive.c.attempts_count > 1),
            dead=await self.count(archive, archive.c.state == "FAILED"),
            archived=await self.count(archive),
            handled_twice=len(twice),
            lost=len(stored - ended),
        )

    async def stop(self) -> None:
        """End the workers as an operator would."""
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            await asyncio.to_thread(worker.wait, 30)
        await self.broker.stop()
        await self.engine.dispose()


def order_of(body: bytes) -> int:
    """The order that a message is about."""
    return int(json.loads(body)["order_id"])


def broken_promises(result: Result, *, killed: bool) -> list[str]:
    """What is not as the README says."""
    hopeless = sum(
        1 for n in range(1, ORDERS + 1) if n % HOPELESS_EVERY == 0 and n % DECLINED_EVERY != 3
    )
    return [
        text
        for broken, text in (
            (result.lost > 0, f"{result.lost} committed messages are lost"),
            (result.archived != result.published, "published and archived differ"),
            (result.completed + result.dead != result.archived, "an outcome is missing"),
            (result.dead != hopeless, f"{hopeless} orders are hopeless, {result.dead} are dead"),
            (result.retried == 0, "nothing was retried"),
            (not killed, "no worker was killed"),
            # Only what the killed worker had shipped but not yet settled may be shipped again.
            (
                result.handled_twice > HELD_AT_MOST,
                "more was handled twice than one killed worker can hold",
            ),
        )
        if broken
    ]


async def main(url: str) -> int:
    """Run the demo; the exit code."""
    demo = Demo(url)
    try:
        result = await demo.run()
    finally:
        await demo.stop()
    view = View("promise", "database", title="checked against the database")
    for name, value in asdict(result).items():
        view.add_row(name.replace("_", " "), str(value))
    console.print(view)
    broken = broken_promises(result, killed=demo.killed is not None)
    for what in broken:
        console.print(f"[red]broken promise: {what}[/red]")
    sys.stdout.write("demo: " + " ".join(f"{k}={v}" for k, v in asdict(result).items()) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        kind = sys.argv[1] if len(sys.argv) > 1 else "sqlite"
        code = asyncio.run(main(empty_database(kind, temporary, "demo")))
    sys.exit(code)
