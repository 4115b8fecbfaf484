"""Frees what waits for policies that a deployment has removed."""

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.flow.loop import Log

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

INTERVAL = 300.0
"""Seconds between two looks."""
SOON = 60.0
"""Seconds between those after a start: a policy counts as removed a minute after the last claim of
a process that has it."""
STARTING = 180.0
"""Seconds after a start for which that is so."""
SLEEPING = 3600.0
"""Seconds between two looks while all subscribers of the process look only when they are told."""


class RemovedPolicies:
    """Looks for such policies of the queues that this process takes from."""

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        self._store = store
        self._log = log
        self._clock = clock
        self._next = float("inf")
        self._often_until = float("-inf")

    @property
    def due_in(self) -> float:
        """Seconds until the next look; 0 or less: it is due."""
        return self._next - self._clock.monotonic()

    def begin(self, *, sleeps: bool) -> None:
        """A subscriber has started: the deployment may be another."""
        now = self._clock.monotonic()
        self._often_until = float("-inf") if sleeps else now + STARTING
        self._next = now if sleeps else min(self._next, now + SOON)

    async def look(self, queues: Collection[str], *, sleeps: bool) -> None:
        """Free what waits for policies that no live subscriber of `queues` has.

        Raises:
            StoreError: the database failed; call again.
        """
        busy = False
        for hold in await self._store.policies.removed_policies(sorted(queues)):
            freed = await self._store.policies.free_removed(hold)
            busy = busy or freed is None
            if freed:
                text = (
                    f"{freed} messages of queue {hold.queue!r} waited for policies that no live "
                    f"subscriber has any more ({hold.name}): they are freed"
                )
                self._log(logging.INFO, text)
        now = self._clock.monotonic()
        often = busy or now < self._often_until
        self._next = now + (SOON if often else SLEEPING if sleeps else INTERVAL)
