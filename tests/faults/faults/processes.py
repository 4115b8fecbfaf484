"""Faults of the workers: killed, stopped, set up in another way."""

import asyncio
import contextlib
import signal
from pathlib import Path

from tests.faults.cell import STOPPING, WORKING, Cell, Worker
from tests.faults.faults.fault import SERVERS, fault, some_work
from tests.helpers import eventually
from tests.proxy import Proxy
from tools.packages import install


@fault("nothing")
async def nothing(_cell: Cell, _proxy: Proxy | None) -> None:
    """The control: no fault."""


@fault("kill -9 in a handler", short=("postgresql", "mysql", "sqlite"))
async def kill(cell: Cell, _proxy: Proxy | None) -> None:
    """At any moment of the work."""
    await some_work(cell)
    if alive := cell.alive():
        victim = cell.random.choice(alive)
        victim.kill()
        victim.wait()
        cell.history.killed.add(victim.pid)


@fault("kill -9 around a claim or a flush", short=("postgresql", "mariadb", "sqlite"))
async def kill_in_a_step(cell: Cell, _proxy: Proxy | None) -> None:
    """Between the commit of a claim and its first handler; before a flush, and after its commit."""
    step = cell.random.choice(("after claim", "before settle", "after settle"))
    victim = cell.start(die=step)
    for _ in range(300):
        if victim.poll() is not None:
            break
        await cell.publish(1)
        await asyncio.sleep(0.03)
    if victim.poll() is None:
        victim.kill()
    victim.wait()
    cell.history.killed.add(victim.pid)


@fault("SIGSTOP past the lease, then SIGCONT", short=("postgresql", "mysql", "sqlite"))
async def pause(cell: Cell, _proxy: Proxy | None) -> None:
    """A worker that sleeps does not know that its leases have run out."""
    await some_work(cell)
    await asyncio.sleep(cell.random.random() * cell.lease)  # in the middle of a slow handler, too
    if alive := cell.alive():
        victim = cell.random.choice(alive)
        cell.history.disturbed.add(victim.pid)
        if cell.store.dialect_name == "sqlite":
            cell.disturb_all()  # stopped in the middle of a write, it keeps everybody from writing
        victim.send_signal(signal.SIGSTOP)
        await asyncio.sleep(cell.lease * 1.6)
        victim.send_signal(signal.SIGCONT)


async def _works_for(cell: Cell, worker: Worker, seconds: float) -> None:
    """Let `worker`, one more than the others, work for so long, and end it."""

    async def works() -> bool:
        await cell.publish(5)
        return cell.started(worker) > 0 or worker.poll() is not None

    with contextlib.suppress(AssertionError):
        await eventually(works, timeout=WORKING, step=0.2)
    await asyncio.sleep(seconds)
    worker.terminate()
    await asyncio.to_thread(worker.wait, STOPPING)


@fault("pool exhausted", short=("postgresql", "mariadb"), databases=SERVERS)
async def pool_exhausted(cell: Cell, _proxy: Proxy | None) -> None:
    """A worker whose pool is far too small for what it does."""
    worker = cell.start(pool_size=3, max_overflow=1, max_workers=8, statement_timeout=0.5)
    cell.history.disturbed.add(worker.pid)
    await _works_for(cell, worker, 0.8)


@fault("two versions of settings side by side", short=("postgresql", "mysql", "sqlite"))
async def other_settings(cell: Cell, _proxy: Proxy | None) -> None:
    """Other batches, a longer lease, a shorter search for expired ones."""
    options = {
        "fetch_batch_size": 3,
        "flush_batch_size": 100,
        "flush_interval": 0.2,
        "max_workers": 1,
        "release_stuck_timeout": 4 * cell.lease,
        "release_stuck_interval": 0.05,
        "slow": cell.lease,
    }
    worker = cell.start(**options)
    cell.history.disturbed.add(worker.pid)
    await _works_for(cell, worker, 0.6)


@fault("process clock an hour off", short=("postgresql", "mariadb"), databases=SERVERS)
async def clock(cell: Cell, _proxy: Proxy | None) -> None:
    """One worker lives an hour ago, or in an hour; SQLite has no other clock than the process's."""
    shift = cell.random.choice(("-3600", "+3600"))
    library = await asyncio.to_thread(libfaketime)
    cell.env = {"LD_PRELOAD": library, "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    worker = cell.start()
    cell.env = {}
    await _works_for(cell, worker, 0.5)


def libfaketime() -> str:
    """Path of the library, installed if need be."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not found:
        install("faketime")
        found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    return str(found[0])
