"""Run a cell: rounds of work, each with one fault, then the check of all that happened."""

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.faults.cell import Cell
from tests.faults.checker import excused
from tests.faults.databases import Place
from tests.faults.faults import FAULTS, Fault
from tests.proxy import Proxy, proxied

_logger = logging.getLogger(__name__)
MESSAGES = 30
"""Published in each round before the fault."""
REFUSING_EVERY = 3
"""With each third seed some answers are refused by the database, whatever the fault: it costs
seconds."""


async def run_cell(
    name: str, place: Place, folder: Path, seed: int, rounds: int, **options: Any
) -> dict[str, list[str]]:
    """Violations of each promise after `rounds` rounds of the fault `name`.

    Args:
        name: One of `FAULTS`.
        place: An empty database.
        folder: For the events of this run.
        seed: Of everything random that is not the machine's own timing.
        rounds: Each with new messages and one disturbance, until all has ended.
        options: Of the cell (workers, queues) and of its workers.
    """
    fault = FAULTS[name]
    chosen = {"load": fault.load, **fault.options, **options}
    chosen.setdefault("queues", fault.queues)
    chosen.setdefault("refusing", seed % REFUSING_EVERY == 0)
    url = place.url if place.login is None else place.login.url(place.url)
    async with _connected(fault, url) as (through, proxy):
        cell = Cell(through, folder, seed, **chosen)
        cell.straight = place.url
        cell.server = place.server
        cell.login = place.login
        cell.prepare = fault.prepare
        broken = await run_rounds(
            cell, lambda: fault.disturb(cell, proxy), rounds, disturbing=fault.disturbing
        )
        if count := excused(cell.history):
            text = "%s, %s, seed %d: %d lost leases are excused, their holders stood still"
            _logger.warning(text, name, cell.store.dialect_name, seed, count)
        return broken


async def run_rounds(
    cell: Cell, disturb: Callable[[], Awaitable[None]], rounds: int, *, disturbing: bool
) -> dict[str, list[str]]:
    """Violations of each promise after `rounds` rounds; the cell is closed.

    `disturbing`: whether a disturbance may keep any worker from renewing its leases.
    """
    try:
        await cell.open()
        for _ in range(rounds):
            await cell.publish(MESSAGES)
            await disturb()
            drained = await cell.drained()
            if disturbing:
                cell.disturb_all()
            if not drained:
                break
        await cell.stop()
        return await cell.check()
    finally:
        await cell.close()


@contextlib.asynccontextmanager
async def _connected(fault: Fault, url: str) -> AsyncIterator[tuple[str, Proxy | None]]:
    if not fault.proxied:
        yield url, None
        return
    async with proxied(url) as (proxy, through):
        yield through.render_as_string(hide_password=False), proxy
