"""Archive maintenance in one process of the fleet: remove old messages, add partitions in advance.

The processes elect that one by a lock, as for metrics. A process that has lost the lock without
knowing removes at most what another one would: every removed row is old by the database's clock.
"""

import logging
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.retention import PRUNE_LOCK, Retention
from faststream_sqlbroker.database.retention import Pruner
from faststream_sqlbroker.exceptions import AccessError
from faststream_sqlbroker.flow.loop import FleetLoop, Log

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


PRUNE_INTERVAL = 60.0
"""Seconds between two passes over the archive."""
PRUNE_LEASE = 300.0
"""Seconds of the lock's lease, renewed at each step, so that it outlives the longest step."""


class RetentionLoop(FleetLoop):
    """Prunes the archive periodically, in a single process of the fleet."""

    def __init__(self, store: "Store", retention: Retention, log: Log, clock: Clock) -> None:
        super().__init__(store, PRUNE_LOCK, "retention", log, clock)
        self._info = {"retention": retention.as_json}
        self._retention = retention
        self._pruner = Pruner(store.retention, retention, clock)

    @override
    async def tick(self) -> float:
        """Prune once if this process holds the lock; return the seconds until the next time.

        To prune is to remove messages that are older than the retention allows. The lock is renewed
        between the steps. A window is a period of the archive that a lake has exported; it is kept
        if its rows differ from what the lake recorded.
        """
        # Another process holds the lock, or died while holding it: then the lease expires.
        if not await self.acquire(PRUNE_LEASE):
            return PRUNE_INTERVAL
        result = await self._pruner.prune(keep=partial(self.extend, PRUNE_LEASE))
        if result.rows:
            text = (
                f"{result.rows} old messages were removed from the archive: {result.completed} "
                f"completed, {result.failed} failed, {result.discarded} discarded"
            )
            self._log(logging.INFO, text)
        if result.partitions:
            text = f"old partitions of the archive were dropped: {', '.join(result.partitions)}"
            self._log(logging.INFO, text)
        for window in result.differing:
            text = (
                f"pruning skips window {window} as lake {self._retention.unless_loaded_by!r} "
                "recorded; export the window again"
            )
            self._log(logging.WARNING, text)
        return PRUNE_INTERVAL


PARTITION_LOCK = "sqlbroker.partitions"
"""Key of the lock."""
PARTITION_INTERVAL = 3_600.0
"""Seconds between two checks: partitions are added days in advance."""
PARTITION_LEASE = 600.0
"""Seconds of the lock's lease; a check takes less than one."""


class PartitionLoop(FleetLoop):
    """Adds partitions of the archive in advance.

    Nothing waits for it: rows without a partition go to the DEFAULT one.
    """

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        super().__init__(store, PARTITION_LOCK, "partitions", log, clock)
        self._refused = False

    @override
    async def tick(self) -> float:
        """Add missing partitions if this process holds the lock; return the seconds until the next
        time.

        A user who does not own the table may not add partitions: that is logged once.
        """
        if not await self.acquire(PARTITION_LEASE):
            return PARTITION_INTERVAL
        try:
            while name := await self._store.partitions.add():
                self._log(logging.INFO, f"partition {name} was added to the archive")
        except AccessError as error:
            if not self._refused:
                text = (
                    "cannot add partitions to the archive, so finished messages go to its DEFAULT "
                    f"partition: {error}; let the table's owner run `sqlbroker partitions` weekly"
                )
                self._log(logging.WARNING, text)
            self._refused = True
        return PARTITION_INTERVAL
