"""What a trip through the packages costs a reader.

python tools/trips.py

Follows what a user does (publish, a delivery, a lock, …) on a SQLite file, by the interpreter's
calls: how many files and functions it enters, and how often the next call is in another file or
folder. Each trip is made once to warm up, then five times; each figure is the least of these, as
timers of the broker may run at the same time. Prints JSON.
"""

import asyncio
import json
import logging
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import httpx

import faststream_sqlbroker
from faststream_sqlbroker import SqlBroker, Throttle
from faststream_sqlbroker.http import BasicAuth, Channels, Login, hash_password

RUNS = 5
DEADLINE = 60.0
"""Seconds for one trip."""
ROOT = Path(faststream_sqlbroker.__file__).parent.parent
PACKAGES = tuple(f"{ROOT}/{package}/" for package in ("faststream_sqlbroker", "pyspark_sqlbroker"))
Figures = dict[str, int]
Step = Callable[[], Awaitable[object]]


class Calls:
    """The calls of functions of the packages, in order."""

    def __init__(self) -> None:
        """Nothing is noted yet."""
        self._files: list[str] = []
        self._functions: set[tuple[str, str]] = set()
        # The frames themselves: an id would be given to another frame once one is gone.
        self._frames: dict[int, FrameType] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call; for `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGES):
            return
        self._files.append(code.co_filename[len(str(ROOT)) + 1 :])
        # A coroutine that goes on is no new call.
        self._frames.setdefault(id(frame), frame)
        if not code.co_name.startswith("<"):
            self._functions.add((code.co_filename, code.co_qualname))

    def figures(self) -> Figures:
        """What was noted, in numbers."""
        folders = [folder_of(file) for file in self._files]
        return {
            "files": len(set(self._files)),
            "functions": len(self._functions),
            "calls": len(self._frames),
            "file moves": sum(a != b for a, b in pairwise(self._files)),
            "folder moves": sum(a != b for a, b in pairwise(folders)),
        }


def folder_of(file: str) -> str:
    """The folder of a package that has the file; a file of the package itself is one."""
    return "/".join(Path(file).parts[:2])


async def least(step: Step, prepare: Step | None = None) -> Figures:
    """The least figures of some runs of `step`, each after `prepare`."""
    found: list[Figures] = []
    for _ in range(1 + RUNS):
        if prepare is not None:
            await prepare()
        calls = Calls()
        with profiled(calls):
            await asyncio.wait_for(step(), DEADLINE)
        found.append(calls.figures())
    return {name: min(figures[name] for figures in found[1:]) for name in found[0]}


@contextmanager
def profiled(calls: Calls) -> Iterator[None]:
    """Let `calls` note what this thread calls."""
    sys.setprofile(calls.note)
    try:
        yield
    finally:
        sys.setprofile(None)


@asynccontextmanager
async def broker_on(folder: str, name: str) -> AsyncIterator[SqlBroker]:
    """A broker with tables of its own."""
    broker = SqlBroker(f"sqlite+aiosqlite:///{folder}/{name}.db", logger=None)
    await broker.create_tables()
    try:
        yield broker
    finally:
        await broker.stop()


async def operations(folder: str) -> dict[str, Figures]:
    """What a program asks of a broker that does not consume."""
    async with broker_on(folder, "operations") as broker:
        jobs: list[Any] = []

        @broker.subscriber("q")
        async def handle(body: dict[str, int]) -> None:
            raise ValueError(body)

        async def lock() -> None:
            async with broker.lock("k"):
                pass

        async def redrive() -> None:
            jobs.append(await broker.admin.redrive(dry_run=True, queue="q"))

        return {
            "publish": await least(lambda: broker.publish({"n": 1}, "other")),
            "take a lock and give it back": await least(lock),
            "plan to redrive": await least(redrive),
            "redrive": await least(lambda: broker.admin.run_job(jobs.pop())),
        }


async def delivery(folder: str, name: str, **options: Any) -> dict[str, Figures]:
    """One delivery, from its claim until it is archived."""
    async with broker_on(folder, name) as broker:
        file = f"{folder}/{name}.db"
        done = 0

        @broker.subscriber("q", **options)
        async def handle(body: dict[str, int]) -> None:
            pass

        async def archived() -> None:
            nonlocal done
            done += 1
            while rows_of(file, "message_archive") < done:
                await asyncio.sleep(0.02)

        await broker.start()
        return {name: await least(archived, lambda: broker.publish({"n": 1}, "q"))}


def rows_of(file: str, table: str) -> int:
    """How many rows a table has."""
    with closing(sqlite3.connect(file)) as connection:
        [(count,)] = connection.execute(f"SELECT count(*) FROM {table}")
    return int(count)


async def pull_job(folder: str) -> dict[str, Figures]:
    """A job that a program takes over HTTP."""
    async with broker_on(folder, "http") as broker:
        login = Login("ann", "admin", hash_password("correct horse"))
        app = broker.asgi(BasicAuth([login]), channels=Channels(stop_timeout="10m"))
        transport = httpx.ASGITransport(app)
        auth = "ann", "correct horse"
        async with httpx.AsyncClient(transport=transport, base_url="http://trips") as client:
            path = "/channel/orders/consumer/billing"
            channel = await client.put("/channel/orders", auth=auth)
            consumer = await client.put(path, data={"type": "pull"}, auth=auth)
            tokens = {
                "X-Broker-Channel-Token": channel.json()["Token"],
                "X-Broker-Consumer-Token": consumer.json()["Token"],
            }
            addresses: list[str] = []

            async def send() -> None:
                await client.post("/channel/orders/broadcast", json={"id": 1}, headers=tokens)
                queued = await client.get(f"{path}/queued-jobs", headers=tokens)
                addresses.append(f"{path}/job/{queued.json()['Result'][0]['ID']}")

            async def take() -> None:
                state = {"NextState": "INFLIGHT"}
                answer = await client.post(addresses.pop(), json=state, headers=tokens)
                answer.raise_for_status()

            return {"take a pull job over HTTP": await least(take, send)}


async def trips() -> dict[str, Figures]:
    """The figures of each trip."""
    with TemporaryDirectory() as folder:
        return {
            **await operations(folder),
            **await delivery(folder, "deliver"),
            **await delivery(folder, "deliver under a Throttle", policies=[Throttle(1000, "1s")]),
            **await pull_job(folder),
        }


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(json.dumps(asyncio.run(trips())))
