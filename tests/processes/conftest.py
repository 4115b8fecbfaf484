"""Fleets of worker processes over one database."""

import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.schema.types import clock
from tests.contract.conftest import Bench
from tests.forked import Process, start
from tests.helpers import eventually
from tests.processes.patience import holder_of, listening

DEADLOCK = 1213
"""ER_LOCK_DEADLOCK of MySQL and MariaDB."""
MOST_ROUNDS = 20
"""In how many rounds of work at most a second process must have a share: in one it may stand
still."""


class Fleet(Bench):
    """Starts workers, feeds them, and reads what they did."""

    def __init__(self, store: Store, url: str, folder: Path) -> None:
        super().__init__(store)
        self.url = url
        self.folder = folder
        self.said = folder.parent / "said"
        self.workers: list[Process] = []

    def start(
        self, handler: str = "quick", env: dict[str, str] | None = None, **options: Any
    ) -> Any:
        """Start one worker."""
        return self.run("worker", handler, json.dumps(options), env=env)

    def run(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> Process:
        """Start a process of `tests.processes.MODULE`."""
        module = f"tests.processes.{module}"
        worker = start(module, self.url, str(self.folder), *arguments, said=self.said, env=env)
        self.workers.append(worker)
        return worker

    async def publish(self, count: int, queue: str = "q") -> None:
        """Bodies 0 … count − 1, as the broker writes JSON numbers."""
        headers = '{"content-type": "application/json"}'
        for first in range(0, count, 1000):
            end = min(count, first + 1000)
            await self.store.insert(
                [NewMessage(queue, str(n).encode(), headers) for n in range(first, end)]
            )

    async def live(self, count: int) -> None:
        """Wait until `count` workers live: before that the first one may do all the work."""

        async def all_live() -> bool:
            listed = await self.store.live_subscribers.list_subscribers()
            # Each has a name for each of its subscribers: host, process id, number.
            return len({each.worker.split(":")[-2] for each in listed}) == count

        await eventually(all_live, timeout=120, step=0.05)

    def started(self) -> dict[int, Counter[int]]:
        """How often each process has started each body."""
        return {
            int(path.name): Counter(int(line) for line in path.read_text().split())
            for path in self.folder.iterdir()
        }

    def is_shared(self) -> bool:
        """Whether two processes or more have started something."""
        return sum(1 for bodies in self.started().values() if bodies) > 1

    def order(self, worker: Process) -> list[int]:
        """The bodies that `worker` has started, one after the other."""
        return [int(line) for line in (self.folder / str(worker.pid)).read_text().split()]

    def total(self) -> Counter[int]:
        """How often each body was started anywhere."""
        return sum(self.started().values(), Counter())

    async def count(self, where: str = "1 = 1", archive: bool = False) -> int:
        """Rows of the message table (or the archive)."""
        table = "message_archive" if archive else "message"
        async with self.store.engine.connect() as connection:
            result = await connection.execute(text(f"SELECT count(*) FROM {table} WHERE {where}"))
            return int(result.scalar_one())

    async def settled(self, count: int, timeout: float = 200.0) -> None:
        """Wait until `count` messages are archived and none is left; killed workers lose their
        leases."""

        async def done() -> bool:
            await self.bury()
            return await self.count(archive=True) == count and await self.count() == 0

        await eventually(done, timeout=timeout, step=0.1)

    async def bury(self) -> None:
        """End the leases of killed workers now.

        Call it again: the server may still have been at work for one. Traps: a lease that ended
        before this moment would be over in the middle of a search that has begun; and one that is
        ended again and again is never over before a search begins, so it is ended once.
        """
        dead = {worker.pid for worker in self.workers if worker.poll() == -signal.SIGKILL}
        message = self.store.tables.message.c
        if not dead:
            return
        held_now = message.state == "PROCESSING", message.lease_expires_at > clock()
        async with self.store.engine.connect() as connection:
            leased = select(message.id, message.lease_token).where(*held_now)
            held = (await connection.execute(leased)).all()
        if lost := [row for row in held if holder_of(row.lease_token) in dead]:
            ids, tokens = zip(*lost, strict=True)
            own = message.id.in_(ids), message.lease_token.in_(tokens)
            ended = update(self.store.tables.message).where(*own).values(lease_expires_at=clock())
            try:
                async with self.store.engine.begin() as connection:
                    await connection.execute(ended)
            except OperationalError as error:
                # A live worker's claim has locked some of them in another order.
                if error.orig is None or error.orig.args[:1] != (DEADLOCK,):
                    raise

    async def ended(self, worker: Process, timeout: float = 120.0) -> int:
        """Wait for `worker` to end; its exit code."""
        await eventually(lambda: worker.poll() is not None, timeout=timeout, step=0.05)
        return worker.wait()

    async def stop(self) -> None:
        """SIGTERM to all; every one must end well."""
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            code = await self.ended(worker)
            # It may not have come to listen to signals.
            listens = self.has_started(worker) or listening(self.folder, worker.pid).exists()
            assert (code == -signal.SIGTERM and not listens) or code in {0, -signal.SIGKILL}, (
                f"a worker ended with {code}: {self.said.read_text()}"
            )

    def has_started(self, worker: Process) -> bool:
        """Whether `worker` has noted anything."""
        noted = self.folder / str(worker.pid)
        return noted.exists() and noted.stat().st_size > 0


@pytest.fixture
async def fleet(engine: AsyncEngine, database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    folder = tmp_path / "started"
    folder.mkdir()
    store = Store(engine, build_tables(SqlBrokerSchemaConfig()))
    await store.server.create_tables()
    await store.server.setup()
    fleet = Fleet(store, database_url, folder)
    yield fleet
    for worker in fleet.workers:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
