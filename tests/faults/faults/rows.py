"""Faults that other sessions make: locks, old snapshots, leases given back."""

import asyncio
import contextlib

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from tests.faults.cell import Cell
from tests.faults.faults.fault import SERVERS, fault, some_work
from tests.proxy import Proxy


@fault("deadlocks and locked rows", short=("postgresql", "mysql"), databases=SERVERS)
async def deadlocks(cell: Cell, _proxy: Proxy | None) -> None:
    """Another session locks random rows in random order, and gives up."""
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


@fault("held snapshot", short=("postgresql", "mariadb"), databases=SERVERS)
async def held_snapshot(cell: Cell, _proxy: Proxy | None) -> None:
    """A reader that does not let go of the past."""
    async with cell.engine.connect() as connection:
        await connection.execution_options(isolation_level="REPEATABLE READ")
        await connection.execute(text("SELECT count(*) FROM message"))
        await cell.publish(10)
        await asyncio.sleep(0.5)


HITS = 15
"""Leases that are given back."""
_GIVE_BACK = text(
    "UPDATE message SET state = CASE WHEN attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END, "
    "acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL "
    "WHERE id = :id AND state = 'PROCESSING'"
)


@fault(
    "leases given back under their handlers",
    short=(),
    keeps_from_renewing=True,
    queues=("batch", "batch", "plain", "ordered"),
)
async def given_back(cell: Cell, _proxy: Proxy | None) -> None:
    """What becomes of a lease that has run out, one here and one there: of a batch only some."""
    await some_work(cell)
    hits = 0
    for _ in range(100):
        queue = cell.random.choice(("batch", "batch", "batch", "plain", "ordered"))
        async with cell.engine.connect() as connection:
            found = await connection.execute(
                text("SELECT id FROM message WHERE state = 'PROCESSING' AND queue = :queue"),
                {"queue": queue},
            )
            ids = list(found.scalars())
            await connection.rollback()
            with contextlib.suppress(DBAPIError):  # it is locked
                for message_id in cell.random.sample(ids, min(len(ids), 1)):
                    hit = await connection.execute(_GIVE_BACK, {"id": message_id})
                    hits += hit.rowcount
                await connection.commit()
        if hits >= HITS:
            break
        if not ids:
            await cell.publish_to(queue, 5)
        await asyncio.sleep(0.02)
