"""The archive's upkeep, in one process of the fleet: remove old messages, make partitions ahead of
time.

The processes agree on that one by a lock, as for metrics. A process that has lost the lock without
knowing removes at most what another one would: every row that goes is old by the database's clock.
"""

import logging
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.retention import Retention
from faststream_sqlbroker.database.retention import Pruner
from faststream_sqlbroker.exceptions import AccessError, StoreError
from faststream_sqlbroker.flow.loop import FleetLoop, Log, Outages

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


PRUNE_LOCK = "sqlbroker.retention"
"""The key of the lock."""
PRUNE_INTERVAL = 60.0
"""Seconds between two passes over the archive."""
PRUNE_LEASE = 300.0
"""Seconds for which the lock is taken at each step, so that it outlives the longest of them."""


class RetentionLoop:
    """Prunes from time to time, in one process of the fleet."""

    def __init__(self, store: "Store", retention: Retention, log: Log, clock: Clock) -> None:
        """Nothing runs before `start`."""
        self._retention = retention
        self._pruner = Pruner(store.retention, retention, clock)
        self._log = log
        self._loop = FleetLoop(store, PRUNE_LOCK, "retention", self.tick, log, clock)

    @property
    def healthy(self) -> bool:
        """Whether the last pass succeeded."""
        return self._loop.healthy

    def start(self, outages: Outages) -> None:
        """Start pruning; without effect if it does."""
        self._loop.start(outages)

    async def stop(self) -> None:
        """Stop pruning, and let another process do it."""
        await self._loop.stop()

    async def _keep(self) -> bool:
        """Whether this process is still the one to prune."""
        return await self._loop.extend(PRUNE_LEASE)

    async def tick(self) -> float:
        """Prune once, if this process is the one to do it; seconds until the next time."""
        # Another process has it, or had it a moment ago and has died: its lease runs out.
        if not await self._loop.acquire(PRUNE_LEASE):
            return PRUNE_INTERVAL
        pruned = await self._pruner.prune(keep=self._keep)
        if pruned.rows:
            text = (
                f"{pruned.rows} old messages were removed from the archive: {pruned.completed} "
                f"completed, {pruned.failed} failed, {pruned.discarded} discarded"
            )
            self._log(logging.INFO, text)
        if pruned.partitions:
            text = f"old partitions of the archive were dropped: {', '.join(pruned.partitions)}"
            self._log(logging.INFO, text)
        for window in pruned.differing:
            text = (
                f"nothing is removed from window {window}, as lake "
                f"{self._retention.unless_loaded_by!r} has recorded: export again"
            )
            self._log(logging.WARNING, text)
        return PRUNE_INTERVAL


async def growth_line(store: "Store") -> str | None:
    """How fast the archive grows, for the log of a start without retention; None if there is
    nothing to tell, or this process may not read it.
    """
    needed = frozenset({Activity.PRUNE})
    try:
        if store.tables.archive is None or (await store.access.find_lacks(needed)).lacks:
            return None
        growth = await store.retention.growth()
    except StoreError:
        return None  # A start does not fail for a line of the log.
    if not growth.per_day:
        return None
    return (
        f"the archive grows by about {growth.per_day:,} messages a day, and nothing removes them: "
        'SqlBroker(retention=Retention(completed="30d")) would'
    )


PARTITION_LOCK = "sqlbroker.partitions"
"""The key of the lock."""
PARTITION_INTERVAL = 3_600.0
"""Seconds between two looks: partitions are made days ahead."""
PARTITION_LEASE = 600.0
"""Seconds for which the lock is taken; a look takes less than one."""


class PartitionLoop:
    """Makes partitions of the archive ahead of time.

    Nothing waits for it: what has no partition goes to the DEFAULT one.
    """

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        """Nothing runs before `start`."""
        self._store = store
        self._log = log
        self._refused = False
        self._loop = FleetLoop(store, PARTITION_LOCK, "partitions", self.tick, log, clock)

    def start(self, outages: Outages) -> None:
        """Start looking; without effect if it does."""
        self._loop.start(outages)

    async def stop(self) -> None:
        """Stop looking, and let another process do it."""
        await self._loop.stop()

    async def tick(self) -> float:
        """Add what is missing, if this process is to do it; seconds until the next time."""
        if not await self._loop.acquire(PARTITION_LEASE):
            return PARTITION_INTERVAL
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
        return PARTITION_INTERVAL
