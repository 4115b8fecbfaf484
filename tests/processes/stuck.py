"""An application whose handlers do not end, for tests of how its process does: python -m
tests.processes.stuck, or run by what runs FastStream, FastAPI or `sqlbroker serve`.

STUCK_URL is its database. Each start of a handler is a file in the folder STUCK_FOLDER.
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path

from fastapi import FastAPI
from faststream import FastStream

from faststream_sqlbroker.fastapi import SqlBrokerRouter as FastAPIRouter

FOREVER = 3600.0
"""Seconds: far longer than any test waits."""
WORKERS = 2

router = FastAPIRouter(os.environ["STUCK_URL"], graceful_timeout=0.2)
broker = router.broker
app = FastStream(broker)
api = FastAPI()


def note(name: str) -> None:
    """Tell that a handler has begun."""
    folder = Path(os.environ["STUCK_FOLDER"])
    (folder / f"{name}-{time.monotonic_ns()}").touch()


def blocks(body: int) -> None:
    """Wait in a thread."""
    note("blocks")
    time.sleep(FOREVER)


def blocks_on_batch(body: list[int]) -> None:
    """Wait in a thread."""
    note("blocks_on_batch")
    time.sleep(FOREVER)


async def swallows(body: int) -> None:
    """Wait, whatever happens."""
    note("swallows")
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(FOREVER)


async def retries(body: int) -> None:
    """Try again, whatever happens."""
    note("retries")
    for _ in range(5):
        try:
            await asyncio.sleep(FOREVER)
        except BaseException:
            await asyncio.sleep(FOREVER)


async def swallows_in_its_task(body: int) -> None:
    """Wait, whatever happens."""
    await swallows(body)


def blocking_schedule() -> None:
    """Wait in a thread."""
    blocks(0)


async def swallowing_schedule() -> None:
    """Wait, whatever happens."""
    await swallows(0)


def subscribe() -> None:
    """With what `sqlbroker serve` has from its file, instead."""
    broker.subscriber("blocks", max_workers=WORKERS)(blocks)
    broker.subscriber("blocks_on_batch", batch=True)(blocks_on_batch)
    broker.subscriber("swallows", max_workers=WORKERS)(swallows)
    broker.subscriber("retries", max_workers=WORKERS)(retries)
    own = {"task_per_message": True, "max_workers": WORKERS}
    broker.subscriber("swallows_in_its_task", **own)(swallows_in_its_task)
    every_second = "* * * * * *"
    broker.schedule(every_second, queue="ticks", name="blocking")(blocking_schedule)
    broker.schedule(every_second, queue="ticks", name="swallowing")(swallowing_schedule)


subscribe()
api.include_router(router)

if __name__ == "__main__":
    asyncio.run(app.run())
