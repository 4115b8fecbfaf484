"""One cell of the table: a fault on a database, in rounds of seeded work by real processes."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Integer, MetaData, Table, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.exceptions import TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.store import Store
from tests.faults import worker
from tests.faults.checker import ORDERED, check, key_of
from tests.faults.forked import Forked
from tests.faults.history import History, Recorder, deliveries, read
from tests.helpers import eventually
from tools.private import Process

ROOT = Path(__file__).parent.parent.parent
HEADERS = '{"content-type": "application/json"}'
QUEUES = ("plain", "plain", "tx", "once", "ordered")
DRAIN = 80.0
"""Seconds for everything to end after a fault; what has not is called lost."""
effects = Table("effects", MetaData(), Column("id", Integer, primary_key=True), Column("number", Integer))
Worker = subprocess.Popen[bytes] | Forked


class Cell:
    """The database, the workers and the history of one cell."""

    def __init__(
        self,
        url: str,
        folder: Path,
        seed: int,
        *,
        workers: int = 2,
        queues: tuple[str, ...] = QUEUES,
        **options: Any,
    ) -> None:
        """`url` is where the workers connect (perhaps a proxy); `straight` may be set to lead past it."""
        self.url = self.straight = url
        self.queues = queues
        self.random, self.seed, self.count = random.Random(seed), seed, workers
        self.folder = folder / f"events-{seed}"
        self.folder.mkdir(parents=True)
        # SQLite's writers wait for each other, so that a renewal may come late on a busy machine.
        self.lease = 4.0 if url.startswith("sqlite") else 2.0
        self.options = {"release_stuck_timeout": self.lease, **options}
        self.workers: list[Worker] = []
        self.history = History()
        self.number = 0
        self.env: dict[str, str] = {}
        self.server: Process | None = None

    async def open(self) -> None:
        """Create the tables and start the workers."""
        self.engine: AsyncEngine = create_async_engine(self.straight)
        # Made at once: `close` is called however far we come.
        self.publisher = Store(
            create_async_engine(self.url), build_tables(SqlBrokerSchemaConfig()), statement_timeout=3.0
        )
        self.store = Store(self.engine, build_tables(SqlBrokerSchemaConfig()))
        await self.store.create_tables()
        await self.store.setup()
        async with self.engine.begin() as connection:
            await connection.run_sync(effects.metadata.create_all)
        while len(self.workers) < self.count:
            self.start()

    def start(self, **options: Any) -> Worker:
        """One more worker."""
        given = {**self.options, "seed": self.random.randrange(10**6), **options}
        made: Worker
        if self.env:  # read when an interpreter starts
            command = [
                sys.executable,
                "-m",
                "tests.faults.worker",
                self.url,
                str(self.folder),
                json.dumps(given),
            ]
            env = {**os.environ, **self.env}
            made = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
        else:
            made = Forked(worker.run, self.url, self.folder, given)
        self.workers.append(made)
        return made

    def alive(self) -> list[Worker]:
        """Workers that run; those that killed themselves are noted."""
        for one in self.workers:
            if one.poll() == -signal.SIGKILL:
                self.history.killed.add(one.pid)
        return [one for one in self.workers if one.poll() is None]

    def refill(self) -> None:
        """Start workers in the place of those that have ended."""
        for _ in range(self.count - len(self.alive())):
            self.start()

    async def publish(self, count: int) -> None:
        """Messages in transactions of their own, some of them rolled back."""
        for _ in range(count):
            self.number += 1
            await self._publish(self.number, self.random.choice(self.queues))

    async def _publish(self, number: int, queue: str) -> None:
        key = key_of(number) if queue == ORDERED else None
        rows = [NewMessage(queue, json.dumps(number).encode(), HEADERS, key=key)]
        h = self.history
        if self.random.random() < 0.1:
            h.rolled_back.add(number)
            async with self.engine.connect() as connection:
                await connection.begin()
                await self.store.insert_in(connection, rows)
                await connection.rollback()
            return
        try:
            await self.publisher.insert(rows)
            h.committed[number] = queue
        except UnknownOutcomeError:
            h.unknown.add(number)
        except TransientStoreError:
            h.rolled_back.add(number)

    def started(self) -> int:
        """Handlers started so far, by all workers."""
        return sum(path.read_bytes().count(b'"start"') for path in self.folder.iterdir())

    async def drained(self) -> bool:
        """Wait until nothing is live but answers; whether that came about in time."""

        async def empty() -> bool:
            self.refill()
            async with self.engine.connect() as connection:
                left = await connection.execute(text("SELECT count(*) FROM message WHERE queue <> 'out'"))
                return left.scalar_one() == 0

        try:
            await eventually(empty, timeout=DRAIN, step=0.05)
        except AssertionError:
            return False
        return True

    def disturb_all(self) -> None:
        """Note that no worker of now can be relied on to renew."""
        self.history.disturbed |= {one.pid for one in self.workers}

    async def stop(self) -> None:
        """End the workers; every one that was not killed must end well."""
        for one in self.alive():
            one.send_signal(signal.SIGCONT)
            one.terminate()
        for one in self.workers:
            try:
                code = await asyncio.to_thread(one.wait, 20)
            except (subprocess.TimeoutExpired, TimeoutError):
                one.kill()
                code = await asyncio.to_thread(one.wait)
            if code == -signal.SIGKILL:
                self.history.killed.add(one.pid)

    async def check(self) -> dict[str, list[str]]:
        """Read everything and apply the rules."""
        h = self.history
        events = read(self.folder)
        h.deliveries = deliveries(events)
        # A machine that is busy with others keeps a process from renewing its leases, as a fault does.
        h.disturbed |= {event["pid"] for event in events if event["event"] == "stalled"}
        h.live = [r for r in await self._rows("message") if r["queue"] != "out"]
        h.answers = [r["number"] for r in await self._rows("message") if r["queue"] == "out"]
        h.archived = await self._rows("message_archive")
        await self._read_unknown(h)
        async with self.engine.connect() as connection:
            result = await connection.execute(text("SELECT number FROM effects"))
            h.effects = list(result.scalars())
        return check(h)

    async def _read_unknown(self, h: History) -> None:
        """What is listed of ACK_FIRST when every note that no worker renews has run out."""

        async def over() -> bool:
            async with self.engine.connect() as connection:
                notes = await connection.execute(
                    text("SELECT count(*) FROM message_policy_state WHERE scope LIKE 'ack_first:%'")
                )
                found = await self.store.starts.unknown(None, 10_000)
                self.listed = {unknown.message_id for unknown in found}
                return notes.scalar_one() == len(self.listed)

        await eventually(over, timeout=self.lease + 10, step=0.1)
        numbers = {row["id"]: row["number"] for row in h.archived}
        h.listed = {numbers.get(message_id, -message_id) for message_id in self.listed}

    async def reconnect(self) -> None:
        """Forget connections to a server that has ended, and wait until it lets us in again."""
        await self.engine.dispose()

        async def in_again() -> bool:
            return await self.store.ping(1.0)

        await eventually(in_again, timeout=60, step=0.1)

    async def close(self) -> None:
        """Kill what is left and let go of the database."""
        for one in self.workers:
            if one.poll() is None:
                one.kill()
                one.wait()
        await self.publisher.engine.dispose()
        await self.engine.dispose()

    async def _rows(self, table: str) -> list[dict[str, Any]]:
        reason = ", reason" if table == "message_archive" else ""
        async with self.engine.connect() as connection:
            result = await connection.execute(
                text(
                    f"SELECT id, queue, state, payload, attempts_count, deliveries_count{reason} FROM {table}"
                )
            )
            return [{**row._mapping, "number": int(bytes(row.payload))} for row in result]


__all__ = ("Cell", "Recorder")
