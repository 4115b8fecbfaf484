"""All features at once, for long: under load, while workers are killed, ended and stopped."""

import asyncio
import signal
import time
from random import Random

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.exceptions import StoreError
from tests.faults.cell import QUEUES, WORKING, Cell
from tests.faults.faults.fault import fault
from tests.faults.features import FEATURES
from tests.helpers import eventually
from tests.proxy import Proxy

SOAK = "soak: all features, with kills and stops"
PACE = 0.1
"""Mean seconds between two transactions that publish; on SQLite, with one writer, twice as long."""
CANCELLED = ("plain", "tx", "forwarded", "throttled", "debounced")
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
        for work in (_publish, _disturb, _operate):
            # One of its own: in which order they draw is not the seed's.
            tasks.create_task(work(cell, end, Random(f"{cell.seed} {work.__name__}")))
    if cell.timed:
        cell.history.calm_at = time.monotonic()
    await _ticks_go_on(cell)


async def _publish(cell: Cell, end: float, draw: Random) -> None:
    pace = PACE * (2 if cell.store.dialect_name == "sqlite" else 1)
    while time.monotonic() < end:
        queue = draw.choice(cell.queues)
        more = {}
        if draw.random() < 0.1 and queue in CANCELLED:
            more = {"delay": 4 * draw.random(), "priority": draw.randint(-5, 5)}
        roll_back = draw.random() < 0.1
        await cell.publish_to(queue, draw.randint(1, 3), roll_back=roll_back, **more)
        await asyncio.sleep(2 * pace * draw.random())


async def _disturb(cell: Cell, end: float, draw: Random) -> None:
    while time.monotonic() < end:
        await asyncio.sleep(draw.uniform(2, 8))
        cell.refill()
        victim = draw.choice(cell.alive())
        match draw.choices(("kill", "end", "stop"), (0.7, 0.15, 0.15)):
            case ["kill"]:
                victim.kill()
            case ["end"]:
                victim.terminate()
            case _:
                victim.send_signal(signal.SIGSTOP)
                await asyncio.sleep(1.6 * cell.history.lease)
                victim.send_signal(signal.SIGCONT)
                continue
        await cell.ended(victim)


async def _operate(cell: Cell, end: float, draw: Random) -> None:
    """End messages, and pause a queue now and then."""
    engine = create_async_engine(cell.straight)
    broker = SqlBroker(engine, logger=None)
    cell.kept.push_async_callback(engine.dispose)
    cell.kept.push_async_callback(broker.stop)
    while time.monotonic() < end:
        await asyncio.sleep(2 * draw.random())
        try:
            page = await broker.admin.messages(queue=draw.choice(CANCELLED), limit=20)
            if page.messages:
                await _cancel(cell, broker, draw.choice(page.messages).id)
            if draw.random() < 0.1:
                await broker.admin.pause("plain", until=1, by="soak")
        except (StoreError, DBAPIError):
            continue  # a worker that has been stopped holds a lock


async def _cancel(cell: Cell, broker: SqlBroker, message: int) -> None:
    select = text("SELECT payload FROM message WHERE id = :id")
    async with cell.engine.connect() as connection:
        found = await connection.scalar(select, {"id": message})
    if found is None:
        return
    number = int(bytes(found))
    cell.history.asked.add(number)
    if (await broker.admin.cancel(message, by="soak")).done:
        cell.history.cancelled.add(number)


async def _ticks_go_on(cell: Cell) -> None:
    """A tick comes when it is calm; else it is noted."""
    tables = ("message", "message_archive")
    counts = [f"(SELECT count(*) FROM {table} WHERE queue = 'ticks')" for table in tables]

    async def ticks() -> int:
        async with cell.engine.connect() as connection:
            return int(await connection.scalar(text(f"SELECT {' + '.join(counts)}")) or 0)

    before = await ticks()

    async def more() -> bool:
        cell.refill()
        return await ticks() > before

    try:
        await eventually(more, timeout=WORKING, step=0.5)
    except AssertionError:
        cell.history.stuck.append(f"the schedule published nothing for {WORKING:.0f} s")
