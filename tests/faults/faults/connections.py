"""Faults of connections: ended, cut, silent, refused."""

import asyncio
import contextlib
import re

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from tests.faults.cell import Cell
from tests.faults.faults.fault import SERVERS, fault, some_work
from tests.faults.history import FIRST, LAST
from tests.helpers import list_of_sessions
from tests.proxy import COMMIT, Proxy, proxied


async def end_sessions(cell: Cell) -> None:
    """End all sessions of the cell's database but the one that does it."""
    async with cell.engine.connect() as connection:
        if cell.store.dialect_name == "postgresql":
            own = "datname = current_database() AND pid <> pg_backend_pid()"
            await connection.execute(
                text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {own}")
            )
            return
        own = "db = DATABASE() AND id <> CONNECTION_ID()"
        ids = await connection.execute(
            text(f"SELECT id FROM {list_of_sessions(connection.dialect)} WHERE {own}")
        )
        for session in ids.scalars().all():
            with contextlib.suppress(DBAPIError):  # it has ended by now
                await connection.execute(text(f"KILL {session}"))


@fault(
    "sessions ended by the server",
    short=("postgresql", "mysql"),
    databases=SERVERS,
    keeps_from_renewing=True,
)
async def sessions_ended(cell: Cell, _proxy: Proxy | None) -> None:
    """End connections as a restart or a failover does, in any state."""
    await some_work(cell)
    await end_sessions(cell)


@fault(
    "connection cut between COMMIT and its answer",
    short=("postgresql", "mariadb"),
    databases=SERVERS,
    proxied=True,
)
async def commit_cut(cell: Cell, proxy: Proxy | None) -> None:
    """The work is committed, and the client never learns of it."""
    assert proxy is not None
    for _ in range(cell.random.randint(6, 12)):
        await cell.publish(3)
        await asyncio.sleep(cell.random.random() * 0.03)  # claimed, handled or being written
        proxy.swallow_answer_to = COMMIT
        await asyncio.sleep(cell.random.random() * 0.05)
    proxy.swallow_answer_to = None


@fault("half-open connections", short=("postgresql", "mysql"), databases=SERVERS, proxied=True)
async def half_open(cell: Cell, proxy: Proxy | None) -> None:
    """Packets vanish for longer than a lease; then the old connections are dead."""
    assert proxy is not None
    await some_work(cell)
    proxy.stall()
    await asyncio.sleep(cell.lease * cell.random.uniform(0.5, 2.0))
    await proxy.stop()
    proxy.flow()
    await proxy.start()


@fault("database out of reach", short=("postgresql", "mariadb"), databases=SERVERS, proxied=True)
async def out_of_reach(cell: Cell, proxy: Proxy | None) -> None:
    """Connections are refused for longer than a lease."""
    assert proxy is not None
    await some_work(cell)
    await proxy.stop()
    await asyncio.sleep(cell.lease * cell.random.uniform(0.5, 2.0))
    await proxy.start()


MIDDLES = {
    # The first is the values of a statement that was parsed for itself before: no limit for idle
    # sessions ends this one.
    "postgresql": (FIRST.encode(), rb"u\.delay IS NULL", LAST.encode()),
    "mysql": (rb"SET state = 'PROCESSING'", rb"DELETE m FROM JSON_TABLE", LAST.encode()),
}
"""What is sent in the middle of a transaction that has locked rows: a flush, a handler's own, a
claim."""


@fault("machine that vanishes without a word", short=("mariadb",), databases=SERVERS)
async def vanished(cell: Cell, _proxy: Proxy | None) -> None:
    """Its sockets stay open, so that the server keeps what its transactions have locked until it
    notices."""
    proxy, through = await cell.kept.enter_async_context(proxied(cell.straight))
    kind = "postgresql" if cell.store.dialect_name == "postgresql" else "mysql"
    proxy.die_at = re.compile(cell.random.choice(MIDDLES[kind]))
    victim = cell.start(through.render_as_string(hide_password=False))
    # From the moment at which its connection says nothing more.
    cell.history.disturbed.add(victim.pid)
    for _ in range(50):
        if proxy.died:
            break
        await cell.publish(1)
        await asyncio.sleep(0.05)
    proxy.vanish()
    victim.kill()
    await asyncio.to_thread(victim.wait)
    cell.history.killed.add(victim.pid)
