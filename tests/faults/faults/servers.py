"""Faults of the database as a whole: gone, read-only, full, locked, without rights."""

import asyncio
import contextlib
import sqlite3
import time
from pathlib import Path

from sqlalchemy import make_url

from tests.faults.cell import WORKING, Cell
from tests.faults.faults.connections import end_sessions
from tests.faults.faults.fault import SERVERS, fault, some_work
from tests.faults.history import Frozen, read
from tests.helpers import eventually
from tests.proxy import Proxy


@fault(
    "server killed and restarted",
    short=("postgresql", "mariadb"),
    databases=SERVERS,
    own_server=True,
)
async def server_killed(cell: Cell, _proxy: Proxy | None) -> None:
    """It recovers from its log: what was committed is there, sessions and locks are not."""
    assert cell.server is not None
    await some_work(cell)
    await asyncio.to_thread(cell.server.crash)
    await asyncio.sleep(cell.lease * cell.random.uniform(0.0, 1.0))
    await asyncio.to_thread(cell.server.start)
    await cell.reconnect()


@fault("another writer holds the lock", databases=("sqlite",), keeps_from_renewing=True)
async def sqlite_locked(cell: Cell, _proxy: Proxy | None) -> None:
    """For longer than a lease."""
    await some_work(cell)
    path = make_url(cell.straight).database or ""

    def hold(seconds: float) -> None:
        connection = sqlite3.connect(path, isolation_level=None, timeout=60)
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(seconds)
        connection.execute("ROLLBACK")
        connection.close()

    await asyncio.to_thread(hold, cell.lease * cell.random.uniform(0.3, 1.5))


@fault("disk full", databases=("sqlite",), small_disk=True)
async def disk_full(cell: Cell, _proxy: Proxy | None) -> None:
    """The file system of the database has no byte left for longer than a lease."""
    await some_work(cell)
    filler = Path(make_url(cell.straight).database or "").parent / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        await asyncio.sleep(cell.lease * cell.random.uniform(0.3, 1.5))
    finally:
        filler.unlink()


def _read_only(cell: Cell, *, on: bool) -> list[str]:
    """Statements that turn the server; connections that are opened while it is on stay read-only
    for good."""
    assert cell.login is not None
    if cell.login.kind == "postgresql":
        role = f"ALTER ROLE {cell.login.name}"
        return [
            "SET default_transaction_read_only = off",
            f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}",
            f"{role} SET default_transaction_read_only = on" if on else f"{role} RESET ALL",
            "SELECT pg_reload_conf()",
        ]
    first = "'SET SESSION TRANSACTION READ ONLY'" if on else "''"
    return [f"SET GLOBAL init_connect = {first}", f"SET GLOBAL read_only = {'ON' if on else 'OFF'}"]


@fault(
    "server read-only for a while",
    short=("postgresql",),
    databases=SERVERS,
    own_server=True,
    login=True,
    options={"wakeup": "poll"},
)
async def read_only(cell: Cell, _proxy: Proxy | None) -> None:
    """A failover: for a moment the address leads to a server that takes no writes, then to one that
    does."""
    await some_work(cell)
    await cell.execute(*_read_only(cell, on=True))
    if cell.random.random() < 0.7:
        await end_sessions(cell)
    await cell.publish(5)
    await asyncio.sleep(cell.lease * cell.random.uniform(0.3, 1.5))
    await cell.execute(*_read_only(cell, on=False))
    await cell.publishes_again("after the server took writes again")


@fault(
    "a right taken away for a while",
    short=("mysql",),
    databases=SERVERS,
    login=True,
    keeps_from_renewing=True,
    options={"health": True},
)
async def right_taken(cell: Cell, _proxy: Proxy | None) -> None:
    """Outcomes cannot be written; workers that start now must refuse to."""
    assert cell.login is not None
    # On a busy machine all workers may still be starting, and would then refuse to.
    await eventually(cell.started, timeout=WORKING, step=0.05)
    await some_work(cell)
    right = cell.random.choice((("INSERT", "message_archive"), ("UPDATE", "message")))
    asked = time.monotonic()
    await cell.execute(cell.login.revoke(*right))
    since = time.monotonic()
    await cell.publish(5)
    # A worker that is killed before anything of it was refused cannot say so. So none is killed
    # until one has said it, and the checker finds it if none does.
    with contextlib.suppress(AssertionError):
        await eventually(lambda: _ill(cell, asked), timeout=WORKING, step=0.05)
    unfit = set()
    for _ in range(2):
        # A worker that started after the right was taken has refused to run: none may be left.
        if alive := cell.alive():
            victim = cell.random.choice(alive)
            victim.kill()
            await asyncio.to_thread(victim.wait)
            cell.history.killed.add(victim.pid)
        unfit.add(cell.start().pid)
        await asyncio.sleep(cell.lease * 0.8)
    until = time.monotonic()
    await cell.execute(cell.login.grant(*right))
    cell.history.frozen.append(Frozen(since, until, frozenset(unfit)))


def _ill(cell: Cell, since: float) -> bool:
    """Whether a worker has said after `since` that it is not healthy."""
    said = [
        event for event in read(cell.folder) if event["event"] == "health" and event["at"] >= since
    ]
    return any(not event["healthy"] for event in said)
