"""A loop whose work one process of the fleet does: the one that has its lock in the database.

Each process asks for the lock at every tick. Who has it keeps it, and if its process ends without a
word, its lease runs out. A process that has lost the lock without knowing may go on for a moment:
the work must bear that.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING
from uuid import uuid4

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.loop import Log, Loop
from faststream_sqlbroker.flow.outage import Outages

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

STOP_LIMIT = 2.0
"""Most seconds for a tick that runs when the broker stops, and to give the lock back; then its
lease runs out."""


class FleetLoop:
    """Calls `tick` from time to time; the lock is asked for by the tick, where it needs it."""

    def __init__(
        self,
        store: "Store",
        lock: str,
        name: str,
        tick: Callable[[], Awaitable[float]],
        log: Log,
        clock: Clock,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            store: Has the locks.
            lock: The key of the lock.
            name: The name of the loop in the log.
            tick: The work; returns the seconds until the next time.
            log: As of `Loop`.
            clock: As of `Loop`.
        """
        self._store = store
        self._lock = lock
        self._name = name
        self._tick = tick
        self._log = log
        self._clock = clock
        self._token = uuid4()
        self._loop: Loop | None = None

    @property
    def healthy(self) -> bool:
        """Whether the last tick succeeded."""
        return self._loop is None or self._loop.healthy

    def start(self, outages: Outages) -> None:
        """Start; without effect if it runs."""
        if self._loop is None or self._loop.orphaned:
            self._loop = Loop(self._name, self._tick, self._log, self._clock)
            self._loop.start(outages)

    async def acquire(self, lease: float) -> bool:
        """Whether this process is the one, for `lease` seconds from now."""
        return await self._store.locks.acquire(self._lock, self._token, lease) is not None

    async def extend(self, lease: float) -> bool:
        """Whether this process is still the one; then for `lease` seconds from now."""
        return await self._store.locks.extend(self._lock, self._token, lease)

    async def stop(self, forget: Callable[[], None] = lambda: None) -> None:
        """Stop, call `forget`, then let another process have the lock; without effect if nothing
        runs.
        """
        loop, self._loop = self._loop, None
        if loop is None:
            return
        await loop.stop(STOP_LIMIT)
        forget()
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(STOP_LIMIT):
                await self._store.locks.release(self._lock, self._token)
