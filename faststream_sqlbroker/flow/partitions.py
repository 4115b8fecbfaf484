"""Makes partitions of the archive ahead of time, in one process of the fleet.

Nothing waits for it: what has no partition goes to the DEFAULT one.
"""

import logging
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.exceptions import AccessError
from faststream_sqlbroker.flow.fleet_loop import FleetLoop
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.outage import Outages

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

LOCK = "sqlbroker.partitions"
"""The key of the lock."""
INTERVAL = 3_600.0
"""Seconds between two looks: partitions are made days ahead."""
LEASE = 600.0
"""Seconds for which the lock is taken; a look takes less than one."""


class PartitionLoop:
    """Looks from time to time which partitions are missing."""

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        """Nothing runs before `start`."""
        self._store = store
        self._log = log
        self._refused = False
        self._loop = FleetLoop(store, LOCK, "partitions", self.tick, log, clock)

    def start(self, outages: Outages) -> None:
        """Start looking; without effect if it does."""
        self._loop.start(outages)

    async def stop(self) -> None:
        """Stop looking, and let another process do it."""
        await self._loop.stop()

    async def tick(self) -> float:
        """Add what is missing, if this process is to do it; seconds until the next time."""
        if not await self._loop.acquire(LEASE):
            return INTERVAL
        try:
            while name := await self._store.partitions.add():
                self._log(logging.INFO, f"partition {name} was added to the archive")
        except AccessError as error:
            if not self._refused:
                text = (
                    f"partitions of the archive cannot be added: {error}; let its owner run "
                    "`sqlbroker partitions` once a week. Until then messages go to the DEFAULT one"
                )
                self._log(logging.WARNING, text)
            self._refused = True
        return INTERVAL
