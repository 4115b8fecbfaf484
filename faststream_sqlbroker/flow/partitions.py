"""Makes partitions of the archive ahead of time, in one process of the fleet.

Nothing waits for it: what has no partition goes to the DEFAULT one.
"""

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING
from uuid import uuid4

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.exceptions import AccessError, StoreError
from faststream_sqlbroker.flow.loop import Log, Loop
from faststream_sqlbroker.flow.outage import Outages

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

LOCK = "sqlbroker.partitions"
"""The key of the lock."""
INTERVAL = 3_600.0
"""Seconds between two looks: partitions are made days ahead."""
LEASE = 600.0
"""Seconds for which the lock is taken; a look takes less than one."""
STOP_LIMIT = 2.0
"""Most seconds for a look that runs when the broker stops."""


class PartitionLoop:
    """Looks from time to time which partitions are missing."""

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        """Nothing runs before `start`."""
        self._store = store
        self._log = log
        self._clock = clock
        self._token = uuid4()
        self._refused = False
        self._loop: Loop | None = None

    def start(self, outages: Outages) -> None:
        """Start looking; without effect if it does."""
        if self._loop is None or self._loop.orphaned:
            self._loop = Loop("partitions", self.tick, self._log, self._clock)
            self._loop.start(outages)

    async def stop(self) -> None:
        """Stop looking, and let another process do it."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        await loop.stop(STOP_LIMIT)
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(STOP_LIMIT):
                await self._store.locks.release(LOCK, self._token)

    async def tick(self) -> float:
        """Add what is missing, if this process is to do it; seconds until the next time."""
        if await self._store.locks.acquire(LOCK, self._token, LEASE) is None:
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
