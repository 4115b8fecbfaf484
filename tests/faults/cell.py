"""One cell of the table: a fault on a database, in rounds of seeded work by real processes."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Integer, MetaData, String, Table, insert, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import StoreError, UnknownOutcomeError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.faults import last_records, plan, reading, second_checker, worker
from tests.faults.checker import BATCH, check
from tests.faults.history import History, Recorder, Stall, read
from tests.faults.logins import Login
from tests.forked import Forked
from tests.helpers import eventually
from tools.private import Process

ROOT = Path(__file__).parent.parent.parent
HEADERS = '{"content-type": "application/json"}'
QUEUES = ("plain", "plain", "plain", "batch", "tx", "once", "ordered")
DRAIN = 80.0
"""Seconds for everything to end after a fault; what has not is called lost."""
LONGEST_DRAIN = 3
"""Times `DRAIN`, on a machine that is too busy."""
WORKING = 90.0
"""Seconds for a few messages to be handled where nothing should keep them from it."""
NOTES = 60.0
"""Seconds for the notes of ACK_FIRST to run out when no worker renews them any more."""
STOPPING = 120.0
"""Seconds for a worker to end; then it is killed."""
_tables = MetaData()
effects = Table(
    "effects",
    _tables,
    Column("id", Integer, primary_key=True),
    Column("number", Integer),
    Column("which", String(8)),
)
account = Table(
    "account", _tables, Column("id", Integer, primary_key=True), Column("balance", Integer)
)
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
        load: float = 0.0,
        timed: bool = False,
        **options: Any,
    ) -> None:
        """`url` is where the workers connect (perhaps a proxy); `straight` may be set to lead past
        it. `load`: seconds that a soak lasts; `timed`: whether it counts how long queues drain."""
        self.url = self.straight = url
        self.queues = queues
        self.random = random.Random(seed)
        self.seed = seed
        self.count = workers
        self.load = load
        self.timed = timed
        self.folder = folder / f"events-{seed}"
        self.folder.mkdir(parents=True)
        self.recorder = Recorder(self.folder)
        self.durable = True
        """Whether the database keeps all commits that it has confirmed."""
        # SQLite's writers wait for each other, so that a renewal may come late on a busy machine.
        self.lease = 4.0 if url.startswith("sqlite") else 2.0
        self.options = {
            "release_stuck_timeout": self.lease,
            "queues": sorted(set(queues)),
            **options,
        }
        self.workers: list[Worker] = []
        self.history = History(lease=float(self.options["release_stuck_timeout"]))
        self.number = 0
        self.env: dict[str, str] = {}
        self.server: Process | None = None
        self.login: Login | None = None
        self.kept = contextlib.AsyncExitStack()
        """Resources of faults, closed when the cell ends."""
        self.theirs: AsyncConnection | None = None
        """An application's, whose transaction stays open."""
        self.prepare: Callable[[Cell], Awaitable[None]] | None = None

    async def open(self) -> None:
        """Create the tables and start the workers."""
        self.engine: AsyncEngine = create_async_engine(self.straight)
        # Faults end connections: those of the cell's engine must not be among them.
        looks = create_async_engine(self.straight)
        self.kept.push_async_callback(looks.dispose)
        self.kept.push_async_callback(_ended, asyncio.create_task(self._look_for_stalls(looks)))
        # Made at once: `close` is called however far we come.
        self.publisher = Store(
            create_async_engine(self.url),
            build_tables(SqlBrokerSchemaConfig()),
            statement_timeout=3.0,
        )
        self.store = Store(self.engine, build_tables(SqlBrokerSchemaConfig()))
        await self.store.server.create_tables()
        await self.store.server.setup()
        async with self.engine.begin() as connection:
            await connection.run_sync(_tables.create_all)
            await connection.execute(
                insert(account), [{"id": 1, "balance": 0}, {"id": 2, "balance": 0}]
            )
        if self.options.get("refusing"):
            await self._refuse_some()
        if self.login is not None:
            await self.execute(
                *self.login.grants([*self.store.tables.broker_tables, *_tables.sorted_tables])
            )
        if self.prepare is not None:
            await self.prepare(self)
        while len(self.workers) < self.count:
            self.start()

    async def _look_for_stalls(self, engine: AsyncEngine) -> None:
        """Note when the machine, the database or this process stands still: leases may run out,
        though nothing disturbs their holders."""
        while True:
            asked = time.monotonic()
            # While a server starts or ends, the drivers' own errors come through, too.
            with contextlib.suppress(Exception):
                async with engine.connect() as connection:
                    await connection.execute(text("SELECT 1"))
            await asyncio.sleep(0.1)
            if (now := time.monotonic()) - asked > self.lease / 4:
                self.history.stalls.append(Stall(asked, now))

    async def execute(self, *statements: str) -> None:
        """Each by itself, as the database's owner."""
        async with self.engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            for statement in statements:
                await connection.execute(text(statement))

    async def _refuse_some(self) -> None:
        """A constraint that some answers do not fulfil."""
        bad = f"queue = 'out' AND {{}}priority = {plan.REFUSED_PRIORITY}"
        if self.store.dialect_name == "sqlite":
            when = bad.format("NEW.").replace("queue", "NEW.queue", 1)
            await self.execute(
                f"CREATE TRIGGER refuse BEFORE INSERT ON message WHEN {when} "
                "BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
            return
        await self.execute(
            f"ALTER TABLE message ADD CONSTRAINT refuse CHECK (NOT ({bad.format('')}))"
        )

    def start(self, url: str | None = None, **options: Any) -> Worker:
        """One more worker; `url` is its way to the database, if it has one of its own."""
        given = {**self.options, "seed": self.random.randrange(10**6), **options}
        made: Worker
        url = url or self.url
        if self.env:  # read when an interpreter starts
            command = [
                sys.executable,
                "-m",
                "tests.faults.worker",
                url,
                str(self.folder),
                json.dumps(given),
            ]
            env = {**os.environ, **self.env}
            made = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
        else:
            made = Forked(worker.run, url, self.folder, given)
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
        """Messages, a few at a time in a transaction of their own; some are rolled back."""
        last = self.number + count
        while self.number < last:
            queue = self.random.choice(self.queues)
            # What is committed together is claimed together: a batch of one shows little.
            several = self.random.randint(2, 6) if queue == BATCH else 1
            roll_back = self.random.random() < 0.1
            await self.publish_to(queue, min(several, last - self.number), roll_back=roll_back)

    async def publish_to(
        self, queue: str, count: int = 1, *, roll_back: bool = False, **more: Any
    ) -> list[int]:
        """Messages for one queue, in one transaction, `more` being fields; their numbers."""
        began = time.monotonic()
        numbers = await self._publish_to(queue, count, roll_back=roll_back, **more)
        for outcome, found in (
            ("committed", self.history.committed),
            ("rolled back", self.history.rolled_back),
            ("unknown", self.history.unknown),
        ):
            if numbers and numbers[0] in found:
                keys = [plan.key_in(queue, n) for n in numbers]
                fields = {"numbers": numbers, "queue": queue, "keys": keys, "outcome": outcome}
                self.recorder.note("publish", began=began, **fields)
        return numbers

    async def _publish_to(
        self, queue: str, count: int, *, roll_back: bool, **more: Any
    ) -> list[int]:
        numbers = self.next_numbers(count)
        rows = rows_of(queue, numbers, **more)
        h = self.history
        if roll_back:
            h.rolled_back.update(numbers)
            # SQLite lets one write at a time, and on a busy machine one may not come to its turn.
            with contextlib.suppress(StoreError):
                async with self.engine.connect() as connection:
                    await connection.begin()
                    await self.store.insert_in(connection, rows)
                    await connection.rollback()
            return numbers
        try:
            await self.publisher.insert(rows)
            h.committed.update(dict.fromkeys(numbers, queue))
        except UnknownOutcomeError:
            h.unknown.update(numbers)
        except StoreError:
            h.rolled_back.update(numbers)
        return numbers

    def next_numbers(self, count: int) -> list[int]:
        """Numbers that no message has yet."""
        first = self.number + 1
        self.number += count
        return list(range(first, self.number + 1))

    def started(self, by: Worker | None = None) -> int:
        """Handlers started so far, by all workers or one."""
        return self._noted("start", "*" if by is None else str(by.pid))

    def _noted(self, event: str, by: str = "*") -> int:
        """How often workers have noted `event` so far."""
        return sum(path.read_bytes().count(f'"{event}"'.encode()) for path in self.folder.glob(by))

    async def drained(self) -> bool:
        """Wait until nothing is live but answers; whether that came about in time.

        While workers get no processor they lose leases, and messages start anew: such time does not
        count at first.
        """

        patience = DRAIN
        last = time.monotonic()
        end = last + LONGEST_DRAIN * DRAIN
        stalls = self._noted("stalled")
        while patience > 0 and last < end:
            self.refill()
            if not await self._live():
                return True
            await asyncio.sleep(0.1)
            if (now := time.monotonic()) - last > self.lease:
                noted = self._noted("stalled")
                if noted == stalls:
                    patience -= now - last
                stalls = noted
                last = now
        return False

    async def _live(self) -> set[int]:
        async with self.engine.connect() as connection:
            left = await connection.execute(
                text("SELECT payload FROM message WHERE queue NOT IN ('out', 'ticks')")
            )
            return {int(bytes(payload)) for payload in left.scalars()}

    async def goes_on(self, while_what: str, queue: str, count: int = 5) -> None:
        """Messages published to `queue` now end soon; else it is noted, with `while_what`."""
        numbers = set(await self.publish_to(queue, count))

        async def gone() -> bool:
            # With a short statement_timeout, a start on a busy machine may fail, and ends its
            # process: that is no message that waits for another.
            self.refill()
            return not numbers & await self._live()

        try:
            await eventually(gone, timeout=WORKING, step=0.05)
        except AssertionError:
            left = sorted(numbers & await self._live())
            self.history.stuck.append(
                f"messages {left} were not handled for {WORKING:.0f} s {while_what}"
            )

    async def publishes_again(self, after_what: str) -> None:
        """A publish works soon; else it is noted, with `after_what`."""

        async def published() -> bool:
            [number] = await self.publish_to(self.queues[0])
            return number in self.history.committed

        try:
            await eventually(published, timeout=WORKING, step=0.1)
        except AssertionError:
            self.history.stuck.append(
                f"nothing could be published for {WORKING:.0f} s {after_what}"
            )

    def disturb_all(self) -> None:
        """Note that no worker of now can be relied on to renew."""
        self.history.disturbed |= {one.pid for one in self.workers}

    async def stop(self) -> None:
        """End the workers; every one that was not killed must end well."""
        if self.options.get("health"):
            with contextlib.suppress(AssertionError):  # the checker finds who is not well
                await eventually(self._all_are_well, timeout=WORKING, step=0.05)
            self.history.stopping = time.monotonic()
        for one in self.alive():
            one.send_signal(signal.SIGCONT)
            one.terminate()
        for one in self.workers:
            await self.ended(one)

    async def ended(self, worker: Worker) -> None:
        """Wait until `worker` has ended; one that takes too long is killed."""
        try:
            code = await asyncio.to_thread(worker.wait, STOPPING)
        except (subprocess.TimeoutExpired, TimeoutError):
            worker.kill()
            code = await asyncio.to_thread(worker.wait)
        if code == -signal.SIGKILL:
            self.history.killed.add(worker.pid)

    def _all_are_well(self) -> bool:
        last = {e["pid"]: e["healthy"] for e in read(self.folder) if e["event"] == "health"}
        return all(last.get(one.pid, True) for one in self.alive())

    async def check(self) -> dict[str, list[str]]:
        """Read everything and apply the rules of both checkers."""
        stopped = time.monotonic()
        await self._read_all()
        broken = check(self.history)
        patience = DRAIN + time.monotonic() - stopped
        await last_records.note_last(
            self.recorder,
            self.store,
            self.workers,
            self.history.listed,
            patience=patience,
            durable=self.durable,
        )
        found = second_checker.check(second_checker.read(self.folder))
        return {
            **broken,
            second_checker.AGREE: second_checker.compare(broken, found, durable=self.durable),
        }

    async def _read_all(self) -> None:
        await reading.read_all(self.history, self.folder, self.store, patience=NOTES)

    async def reconnect(self) -> None:
        """Forget connections to a server that has ended, and wait until it lets us in again."""
        await self.engine.dispose()

        async def in_again() -> bool:
            return await self.store.access.ping(1.0)

        await eventually(in_again, step=0.1)

    async def close(self) -> None:
        """Kill what is left and let go of the database."""
        for one in self.workers:
            if one.poll() is None:
                one.kill()
                one.wait()
        self.recorder.close()
        await self.kept.aclose()
        await self.publisher.engine.dispose()
        await self.engine.dispose()


def rows_of(queue: str, numbers: Iterable[int], **more: Any) -> list[NewMessage]:
    """The messages of `numbers`, `more` being fields."""
    return [
        NewMessage(queue, json.dumps(n).encode(), HEADERS, key=plan.key_in(queue, n), **more)
        for n in numbers
    ]


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait((task,))
