"""All features at once, for long: under load, while workers are killed, ended and stopped."""

import asyncio
import signal
import time

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.exceptions import StoreError
from tests.faults.cell import QUEUES, STOPPING, Cell
from tests.faults.faults.fault import fault
from tests.faults.features import FEATURES
from tests.proxy import Proxy

SOAK = "soak: all features, with kills and stops"
PACE = 0.1
"""Mean seconds between two transactions that publish; on SQLite, with one writer, twice as long."""
CANCELLED = ("plain", "tx", "forwarded", "throttled")
"""Queues of which an operator ends messages, and one of which is paused."""


@fault(
    SOAK,
    queues=(*QUEUES, *FEATURES),
    load=600.0,
    keeps_from_renewing=True,
    options={"release_stuck_timeout": 6.0, "slow": 3.0, "pool_size": 20},
)
async def soak(cell: Cell, _proxy: Proxy | None) -> None:
    """Publish and disturb for `cell.load` seconds; then it is calm."""
    end = time.monotonic() + cell.load
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_publish(cell, end))
        tasks.create_task(_disturb(cell, end))
        tasks.create_task(_operate(cell, end))
    if cell.timed:
        cell.history.calm_at = time.monotonic()


async def _publish(cell: Cell, end: float) -> None:
    pace = PACE * (2 if cell.store.dialect_name == "sqlite" else 1)
    chance = cell.random.random
    while time.monotonic() < end:
        queue = cell.random.choice(cell.queues)
        more = {}
        if chance() < 0.1 and queue in CANCELLED:
            more = {"delay": 4 * chance(), "priority": cell.random.randint(-5, 5)}
        await cell.publish_to(queue, cell.random.randint(1, 3), roll_back=chance() < 0.1, **more)
        await asyncio.sleep(2 * pace * chance())


async def _disturb(cell: Cell, end: float) -> None:
    while time.monotonic() < end:
        await asyncio.sleep(cell.random.uniform(2, 8))
        cell.refill()
        victim = cell.random.choice(cell.alive())
        match cell.random.choices(("kill", "end", "stop"), (0.7, 0.15, 0.15)):
            case ["kill"]:
                victim.kill()
                cell.history.killed.add(victim.pid)
            case ["end"]:
                victim.terminate()
            case _:
                victim.send_signal(signal.SIGSTOP)
                await asyncio.sleep(1.6 * cell.history.lease)
                victim.send_signal(signal.SIGCONT)
                continue
        await asyncio.to_thread(victim.wait, STOPPING)


async def _operate(cell: Cell, end: float) -> None:
    """End messages, and pause a queue now and then."""
    broker = SqlBroker(create_async_engine(cell.straight), logger=None)
    cell.kept.push_async_callback(broker.stop)
    cell.kept.push_async_callback(broker.config.broker_config.store.engine.dispose)
    while time.monotonic() < end:
        await asyncio.sleep(2 * cell.random.random())
        queue = cell.random.choice(CANCELLED)
        try:
            page = await broker.admin.messages(queue=queue, limit=20)
            if page.messages:
                await _cancel(cell, broker, cell.random.choice(page.messages).id)
            if cell.random.random() < 0.1:
                await broker.admin.pause("plain", until=1, by="soak")
        except (StoreError, DBAPIError):
            continue  # a worker that has been stopped holds a lock


async def _cancel(cell: Cell, broker: SqlBroker, message: int) -> None:
    async with cell.engine.connect() as connection:
        found = await connection.scalar(
            text("SELECT payload FROM message WHERE id = :id"), {"id": message}
        )
    if (await broker.admin.cancel(message, by="soak")).done and found is not None:
        cell.history.cancelled.add(int(bytes(found)))
