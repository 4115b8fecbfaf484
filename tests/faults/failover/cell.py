"""A cell whose servers take each other's place while an application and workers go on."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker.broker.engine_factory import configure_for_pgbouncer
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tests.faults import reading
from tests.faults.cell import NOTES, WORKING, Cell, Worker, rows_of
from tests.faults.checker import ORDERED
from tests.faults.failover.topology import Topology, Way
from tests.faults.history import Delivery, Frozen, Loss, Takeover, deliveries, read
from tests.faults.losses import keep_what_is_there
from tests.helpers import eventually

PUBLISH_LIMIT = 6.0
"""Seconds that the application gives one transaction."""
PAUSES = (0.01, 0.04)
"""Seconds between two of its transactions."""
AFTER_FAILURE = 0.15
"""Seconds until it tries again."""
_tables = MetaData()
business = Table(
    "business",
    _tables,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("queue", String(30)),
)
"""The application's rows: one for each message, committed with it."""
T = TypeVar("T")


@dataclass(frozen=True)
class Shop:
    """An application, which reaches the servers by one of the ways."""

    engine: AsyncEngine
    store: Store


class FailoverCell(Cell):
    """Workers and an application take the ways of `topology` in turn."""

    def __init__(
        self,
        topology: Topology,
        folder: Path,
        seed: int,
        *,
        ways: tuple[str, ...],
        published: tuple[str, ...],
        **options: Any,
    ) -> None:
        """`ways` are those of workers, `published` those of the application."""
        super().__init__(topology.straight, folder, seed, workers=len(ways), **options)
        self.topology = topology
        self.way_of: dict[int, str] = {}
        """The way of each worker, by its process."""
        self._ways = ways
        self._published = published
        self._shops: list[Shop] = []
        self._newcomers: list[Worker] = []
        self.draw = Random(f"{seed} strikes")
        """Of what strikes: in which order it draws and the application does is not the seed's."""

    async def open(self) -> None:
        """As that of other cells, with the application's own rows."""
        self.prepare = _create_business
        for name in self._published:
            way = self.topology.ways[name]
            engine = create_async_engine(way.url, pool_timeout=PUBLISH_LIMIT)
            if way.broker.get("pgbouncer"):
                configure_for_pgbouncer(engine)
            self.kept.push_async_callback(engine.dispose)
            self._shops.append(Shop(engine, Store(engine, build_tables(SqlBrokerSchemaConfig()))))
        self._turns = cycle(self._shops)
        await super().open()

    def start(self, url: str | None = None, **options: Any) -> Worker:
        """One more worker, by the way that fewest have."""
        alive = [self.way_of.get(one.pid) for one in self.alive()]
        name = min(self._ways, key=alive.count)
        return self.start_by(name, **options)

    def start_by(self, name: str, **options: Any) -> Worker:
        """One more worker, by the way `name`."""
        way: Way = self.topology.ways[name]
        made = super().start(way.url, **{"broker": dict(way.broker), **options})
        self.way_of[made.pid] = name
        return made

    async def _publish_to(
        self, queue: str, count: int, *, roll_back: bool, **more: Any
    ) -> list[int]:
        """As that of other cells, in a transaction of the application, with rows of its own."""
        numbers = self.next_numbers(count)
        shop = self._shops[0] if self._needs_one_way(queue) else next(self._turns)
        rows = rows_of(queue, numbers, **more)
        h = self.history
        sent: float | None = None
        try:
            async with asyncio.timeout(PUBLISH_LIMIT), shop.engine.connect() as connection:
                await connection.execute(
                    insert(business), [{"number": n, "queue": queue} for n in numbers]
                )
                for n, row in zip(
                    numbers, await shop.store.insert_in(connection, rows), strict=True
                ):
                    h.rows.setdefault(row or 0, set()).add(n)
                if roll_back:
                    await connection.rollback()
                    h.rolled_back.update(numbers)
                    return numbers
                sent = time.monotonic()
                await connection.commit()
        except Exception:  # an outage: what became of it, the rows will tell
            (h.rolled_back if sent is None else h.unknown).update(numbers)
            answered = math.inf
            await asyncio.sleep(AFTER_FAILURE)
        else:
            h.committed.update(dict.fromkeys(numbers, queue))
            answered = time.monotonic()
        if sent is not None:
            h.commits.update(dict.fromkeys(numbers, (sent, answered)))
        return numbers

    def _needs_one_way(self, queue: str) -> bool:
        """Whether the order of ids is that of publishes only on one way."""
        return queue == ORDERED and not self.topology.ids_rise

    @asynccontextmanager
    async def loaded(self) -> AsyncIterator[None]:
        """The application publishes all the time; each worker has begun."""
        ending = asyncio.Event()

        async def publish() -> None:
            while not ending.is_set():
                await self.publish(2)
                await asyncio.sleep(self.random.uniform(*PAUSES))

        task = asyncio.create_task(publish())
        try:
            # One that starts while no server takes writes refuses to.
            await eventually(lambda: all(map(self.started, self.alive())), timeout=WORKING)
            yield
        finally:
            ending.set()  # a cancelled COMMIT would say nothing
            await task

    async def do(self, act: Callable[..., T], *arguments: Any) -> T:
        """Call what blocks, in a thread."""
        return await asyncio.to_thread(act, *arguments)

    @asynccontextmanager
    async def takeover(self, loses_since: float | None = None) -> AsyncIterator[None]:
        """Inside of it a server takes the place of another; afterwards all ways lead to it, and
        each worker starts messages that it has claimed there.

        `loses_since`: when all that was committed had arrived there, if the rest may be lost.
        """
        down = time.monotonic()
        workers = self.alive()
        yield
        await self.topology.lead_to_new()
        writable = time.monotonic()
        if loses_since is not None:
            self.history.losses.append(Loss(loses_since, down, writable))
        pids = frozenset(one.pid for one in workers)
        self.history.takeovers.append(Takeover(down, writable, pids))
        await self.reconnect()

        def idle() -> set[int]:
            alive = {one.pid for one in self.alive()}
            return (pids & alive) - first_starts(self.deliveries(), writable).keys()

        try:
            await eventually(lambda: not idle(), timeout=WORKING, step=0.1)
        except AssertionError:
            self.history.stuck.append(
                f"{sorted(idle())} started nothing for {WORKING:.0f} s after a failover"
            )
        if ended := pids - {one.pid for one in self.alive()}:
            self.history.stuck.append(f"{sorted(ended)} ended during a failover")

    def deliveries(self, queue: str | None = None) -> list[Delivery]:
        """Those so far, of all queues or one."""
        return [d for d in deliveries(read(self.folder)) if queue in {None, d.queue}]

    async def read_only(self, way: str) -> None:
        """`way` leads to a server that takes no writes: a worker that starts now is not well."""
        since = time.monotonic()
        made = self.start_by(way, health=True)

        def told() -> bool:
            return bool(self._told(made)) or made.poll() is not None

        with suppress(AssertionError):  # it says nothing: the checker finds it
            await eventually(told, timeout=WORKING, step=0.05)
        self._newcomers.append(made)
        window = Frozen(since, time.monotonic(), frozenset({made.pid}), brief=True)
        self.history.frozen.append(window)

    async def end_newcomers(self) -> None:
        """End what `read_only` has started, when it is well; it may have refused to start."""
        for one in self._newcomers:

            def is_well(worker: Worker = one) -> bool:
                return self._told(worker)[-1:] == [True] or worker.poll() is not None

            with suppress(AssertionError):  # the checker finds it
                await eventually(is_well, timeout=WORKING, step=0.05)
            if one.poll() is not None:
                self.history.refused.add(one.pid)
            self.history.told_to_end[one.pid] = time.monotonic()
            one.terminate()
            await self.ended(one)
        self._newcomers.clear()

    def _told(self, worker: Worker) -> list[bool]:
        events = [e for e in read(self.folder) if e["pid"] == worker.pid]
        return [bool(e["healthy"]) for e in events if e["event"] == "health"]

    async def _read_all(self) -> None:
        """Read everything, and take out what the database has lost."""
        await reading.read_all(self.history, self.folder, self.store, patience=NOTES)
        async with self.engine.connect() as connection:
            rows = (await connection.execute(select(business.c.number, business.c.queue))).all()
        keep_what_is_there(self.history, {row.number: row.queue for row in rows})
        self.durable = not self.history.losses

    def recoveries(self) -> dict[str, list[float | None]]:
        """By way: seconds of each worker, from each takeover to the first start of a message that
        it has claimed since; None: there was none."""
        found: dict[str, list[float | None]] = {}
        everything = self.deliveries()
        for takeover in self.history.takeovers:
            first = first_starts(everything, takeover.writable)
            for pid in sorted(takeover.pids):
                seconds = first[pid] - takeover.writable if pid in first else None
                found.setdefault(self.way_of[pid], []).append(seconds)
        return found


def first_starts(starts: list[Delivery], since: float) -> dict[int, float]:
    """When each process has first started a message that it has claimed `since` then."""
    first: dict[int, float] = {}
    for delivery in starts:
        if delivery.claimed >= since:
            first.setdefault(delivery.pid, delivery.at)
    return first


async def _create_business(cell: Cell) -> None:
    async with cell.engine.begin() as connection:
        await connection.run_sync(_tables.create_all)
