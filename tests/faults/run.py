"""Run a cell: rounds of work, each with one fault, then the check of all that happened."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.faults.cell import Cell
from tests.faults.databases import Place
from tests.faults.faults import FAULTS, Fault
from tests.proxy import Proxy, proxied

MESSAGES = 25
"""Published in each round before the fault."""


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
    async with _connected(FAULTS[name], place.url) as (through, proxy):
        cell = Cell(through, folder, seed, **options)
        cell.straight, cell.server = place.url, place.server
        try:
            await cell.open()
            for _ in range(rounds):
                await cell.publish(MESSAGES)
                await FAULTS[name].disturb(cell, proxy)
                drained = await cell.drained()
                if FAULTS[name].disturbing:
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
