"""The faults: each is one disturbance of a cell, at a random moment, over when it returns."""

import asyncio
import contextlib
import signal
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import make_url, text
from sqlalchemy.exc import DBAPIError

from tests.faults.cell import Cell
from tests.proxy import COMMIT, Proxy
from tools.packages import install

SERVERS = ("postgresql", "mariadb")
EVERYWHERE = (*SERVERS, "sqlite")
Disturb = Callable[[Cell, "Proxy | None"], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """How a cell is set up and disturbed."""

    name: str
    disturb: Disturb
    databases: tuple[str, ...] = EVERYWHERE
    proxied: bool = False
    """Whether the workers (and the publisher) go through a proxy."""
    disturbing: bool = False
    """Whether it may keep any worker from renewing its leases."""
    own_server: bool = False
    """Whether it needs a server of its own, which it ends."""
    small_disk: bool = False
    """Whether it needs a file system that it can fill."""


FAULTS: dict[str, Fault] = {}


def fault(
    name: str,
    databases: tuple[str, ...] = EVERYWHERE,
    *,
    proxied: bool = False,
    disturbing: bool = False,
    own_server: bool = False,
    small_disk: bool = False,
) -> Callable[[Disturb], Disturb]:
    """Enter a function into `FAULTS`."""

    def enter(disturb: Disturb) -> Disturb:
        kept = disturbing or proxied or own_server or small_disk
        FAULTS[name] = Fault(name, disturb, databases, proxied, kept, own_server, small_disk)
        return disturb

    return enter


async def _some_work(cell: Cell) -> None:
    """Until a random number of handlers has started since."""
    wanted = cell.started() + cell.random.randint(1, 8)
    with contextlib.suppress(AssertionError):
        for _ in range(200):
            if cell.started() >= wanted:
                return
            await asyncio.sleep(0.01)


@fault("nothing")
async def nothing(_cell: Cell, _proxy: Proxy | None) -> None:
    """The control: no fault."""


@fault("kill -9 in a handler")
async def kill(cell: Cell, _proxy: Proxy | None) -> None:
    """At any moment of the work."""
    await _some_work(cell)
    if alive := cell.alive():
        victim = cell.random.choice(alive)
        victim.kill()
        victim.wait()
        cell.history.killed.add(victim.pid)


@fault("kill -9 around a claim or a flush")
async def kill_in_a_step(cell: Cell, _proxy: Proxy | None) -> None:
    """Between the commit of a claim and its first handler; before a flush, and after its commit."""
    step = cell.random.choice(("after claim", "before settle", "after settle"))
    victim = cell.start(die=step)
    for _ in range(300):
        if victim.poll() is not None:
            break
        await cell.publish(1)
        await asyncio.sleep(0.01)
    if victim.poll() is None:
        victim.kill()
    victim.wait()
    cell.history.killed.add(victim.pid)


@fault("SIGSTOP past the lease, then SIGCONT")
async def pause(cell: Cell, _proxy: Proxy | None) -> None:
    """A worker that sleeps does not know that its leases have run out."""
    await _some_work(cell)
    await asyncio.sleep(cell.random.random() * cell.lease)  # in the middle of a slow handler, too
    if alive := cell.alive():
        victim = cell.random.choice(alive)
        cell.history.disturbed.add(victim.pid)
        if cell.store.dialect_name == "sqlite":
            cell.disturb_all()  # stopped in the middle of a write, it keeps everybody from writing
        victim.send_signal(signal.SIGSTOP)
        await asyncio.sleep(cell.lease * 1.6)
        victim.send_signal(signal.SIGCONT)


@fault("sessions ended by the server", SERVERS, disturbing=True)
async def sessions_ended(cell: Cell, _proxy: Proxy | None) -> None:
    """What a restart or a failover does to connections, wherever they are."""
    await _some_work(cell)
    async with cell.engine.connect() as connection:
        if cell.store.dialect_name == "postgresql":
            own = "datname = current_database() AND pid <> pg_backend_pid()"
            await connection.execute(
                text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {own}")
            )
            return
        own = "db = DATABASE() AND id <> CONNECTION_ID()"
        ids = await connection.execute(text(f"SELECT id FROM information_schema.processlist WHERE {own}"))
        for session in ids.scalars().all():
            with contextlib.suppress(DBAPIError):  # it has ended meanwhile
                await connection.execute(text(f"KILL {session}"))


@fault("server killed and restarted", SERVERS, own_server=True)
async def server_killed(cell: Cell, _proxy: Proxy | None) -> None:
    """It recovers from its log: what was committed is there, sessions and locks are not."""
    assert cell.server is not None
    await _some_work(cell)
    await asyncio.to_thread(cell.server.crash)
    await asyncio.sleep(cell.lease * cell.random.uniform(0.0, 1.0))
    await asyncio.to_thread(cell.server.start)
    await cell.reconnect()


@fault("connection cut between COMMIT and its answer", SERVERS, proxied=True)
async def commit_cut(cell: Cell, proxy: Proxy | None) -> None:
    """The work is committed, and nobody knows."""
    assert proxy is not None
    for _ in range(cell.random.randint(6, 12)):
        await cell.publish(3)
        await asyncio.sleep(cell.random.random() * 0.03)  # claimed, handled or being written
        proxy.swallow_answer_to = COMMIT
        await asyncio.sleep(cell.random.random() * 0.05)
    proxy.swallow_answer_to = None


@fault("half-open connections", SERVERS, proxied=True)
async def half_open(cell: Cell, proxy: Proxy | None) -> None:
    """Packets vanish for longer than a lease; then the old connections are dead."""
    assert proxy is not None
    await _some_work(cell)
    proxy.stall()
    await asyncio.sleep(cell.lease * cell.random.uniform(0.5, 2.0))
    await proxy.stop()
    proxy.flow()
    await proxy.start()


@fault("database out of reach", SERVERS, proxied=True)
async def out_of_reach(cell: Cell, proxy: Proxy | None) -> None:
    """Connections are refused for longer than a lease."""
    assert proxy is not None
    await _some_work(cell)
    await proxy.stop()
    await asyncio.sleep(cell.lease * cell.random.uniform(0.5, 2.0))
    await proxy.start()


@contextlib.asynccontextmanager
async def _worker_like(cell: Cell, **options: object) -> AsyncIterator[None]:
    """One worker more with other options, for the length of the fault."""
    worker = cell.start(**options)
    cell.history.disturbed.add(worker.pid)
    yield
    worker.terminate()
    await asyncio.to_thread(worker.wait, 60)


@fault("pool exhausted", SERVERS)
async def pool_exhausted(cell: Cell, _proxy: Proxy | None) -> None:
    """A worker whose pool is far too small for what it does."""
    async with _worker_like(cell, pool_size=3, max_overflow=1, max_workers=8, statement_timeout=0.5):
        await cell.publish(10)
        await asyncio.sleep(1.0)


@fault("two versions of settings side by side")
async def other_settings(cell: Cell, _proxy: Proxy | None) -> None:
    """Other batches, a longer lease, a shorter search for expired ones."""
    options = {
        "fetch_batch_size": 3, "flush_batch_size": 100, "flush_interval": 0.2, "max_workers": 1,
        "release_stuck_timeout": 4 * cell.lease, "release_stuck_interval": 0.05, "slow": cell.lease,
    }  # fmt: skip
    async with _worker_like(cell, **options):
        await cell.publish(10)
        await asyncio.sleep(0.8)


@fault("deadlocks and locked rows", SERVERS)
async def deadlocks(cell: Cell, _proxy: Proxy | None) -> None:
    """Somebody locks random rows in random order, and gives up."""
    for _ in range(6):
        async with cell.engine.connect() as connection:
            ids = list((await connection.execute(text("SELECT id FROM message"))).scalars())
            cell.random.shuffle(ids)
            with contextlib.suppress(DBAPIError):  # we were the victim
                for message_id in ids[:5]:
                    await connection.execute(
                        text(f"SELECT id FROM message WHERE id = {message_id} FOR UPDATE")
                    )
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
            await connection.rollback()


@fault("held snapshot", SERVERS)
async def held_snapshot(cell: Cell, _proxy: Proxy | None) -> None:
    """A reader that does not let go of the past."""
    async with cell.engine.connect() as connection:
        await connection.execution_options(isolation_level="REPEATABLE READ")
        await connection.execute(text("SELECT count(*) FROM message"))
        await cell.publish(10)
        await asyncio.sleep(0.5)


@fault("another writer holds the lock", ("sqlite",), disturbing=True)
async def sqlite_locked(cell: Cell, _proxy: Proxy | None) -> None:
    """For longer than a lease."""
    await _some_work(cell)
    path = make_url(cell.straight).database or ""

    def hold(seconds: float) -> None:
        connection = sqlite3.connect(path, isolation_level=None, timeout=10)
        connection.execute("BEGIN IMMEDIATE")
        import time

        time.sleep(seconds)
        connection.execute("ROLLBACK")
        connection.close()

    await asyncio.to_thread(hold, cell.lease * cell.random.uniform(0.3, 1.5))


@fault("process clock an hour off", SERVERS)
async def clock(cell: Cell, _proxy: Proxy | None) -> None:
    """One worker lives an hour ago, or in an hour; SQLite has no other clock than the process's."""
    shift = cell.random.choice(("-3600", "+3600"))
    library = await asyncio.to_thread(libfaketime)
    cell.env = {"LD_PRELOAD": library, "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    worker = cell.start()
    cell.env = {}
    await cell.publish(10)
    await asyncio.sleep(1.0)
    worker.terminate()
    await asyncio.to_thread(worker.wait, 60)


@fault("disk full", ("sqlite",), small_disk=True)
async def disk_full(cell: Cell, _proxy: Proxy | None) -> None:
    """The file system of the database has no byte left for longer than a lease."""
    await _some_work(cell)
    filler = Path(make_url(cell.straight).database or "").parent / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        await asyncio.sleep(cell.lease * cell.random.uniform(0.3, 1.5))
    finally:
        filler.unlink()


def libfaketime() -> str:
    """Path of the library, installed if need be."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not found:
        install("faketime")
        found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return str(found[0])
