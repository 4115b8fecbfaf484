"""Run the cell of a failover."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.failover import FAILOVERS
from tests.faults.failover.cell import FailoverCell
from tests.faults.failover.topology import Topology
from tests.faults.run import run_rounds

OPTIONS: dict[str, Any] = {
    # An outage is shorter: only a failover that loses commits lets leases run out.
    "release_stuck_timeout": 6.0,
    "slow": 1.0,
    "refusing": False,
}
"""Of the workers, for every failover."""


@dataclass
class Seen:
    """What has come of some rounds."""

    broken: dict[str, list[str]]
    """Violations of each rule."""
    lost: int
    """Messages whose COMMIT was answered, and which the database has lost."""
    forgotten: int
    """Deliveries that it has lost."""
    recoveries: dict[str, list[float | None]]
    """By way, as `FailoverCell.recoveries`."""


async def run_failover(
    name: str, topology: Topology, folder: Path, seed: int, rounds: int, **options: Any
) -> Seen:
    """What has come of `rounds` rounds of the failover `name`, whose servers `topology` are.

    Args:
        name: One of `FAILOVERS`.
        topology: What its `topology` gives.
        folder: For the events of this run.
        seed: Of everything random that is not the machine's own timing.
        rounds: Each with new messages and one failover, until all has ended.
        options: Of the cell (queues) and of its workers.
    """
    one = FAILOVERS[name]
    chosen = {"queues": one.queues, **OPTIONS, **one.options, **options}
    async with AsyncExitStack() as stack:
        await topology.open(stack)
        cell = FailoverCell(
            topology, folder, seed, ways=one.ways, published=one.published, **chosen
        )
        broken = await run_rounds(cell, lambda: one.strike(cell, topology), rounds, disturbing=True)
        return Seen(broken, len(cell.history.lost), len(cell.history.forgotten), cell.recoveries())
