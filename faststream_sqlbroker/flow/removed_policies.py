"""Frees what waits for policies that a deployment has removed, or because the database's clock was
set back.
"""

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.flow.loop import Log

if TYPE_CHECKING:
    from faststream_sqlbroker.database.parts.policy_holds import Hold
    from faststream_sqlbroker.database.store import Store

INTERVAL = 60.0
"""Seconds between two looks for a clock that was set back."""
REMOVED_INTERVAL = 300.0
"""Seconds between two looks for removed policies."""
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
        self._removed_at = float("inf")
        self._often_until = float("-inf")

    @property
    def due_in(self) -> float:
        """Seconds until the next look; 0 or less: it is due."""
        return self._next - self._clock.monotonic()

    def begin(self, *, sleeps: bool) -> None:
        """A subscriber has started: the deployment may be another."""
        now = self._clock.monotonic()
        self._often_until = float("-inf") if sleeps else now + STARTING
        self._removed_at = now if sleeps else min(self._removed_at, now + SOON)
        self._next = min(self._next, self._removed_at)

    async def look(self, queues: Collection[str], *, sleeps: bool) -> None:
        """Free what waits for policies that no live subscriber of `queues` has, or longer than it
        should as the database's clock was set back.

        Raises:
            StoreError: the database failed; call again.
        """
        now = self._clock.monotonic()
        self._next = now + INTERVAL
        holds = await self._store.policies.holds(sorted(queues))
        done = [await self._mend(queue) for queue in {hold.queue for hold in holds if hold.ahead}]
        if now >= self._removed_at:
            self._removed_at = now + SOON
            freed = [await self._free(hold) for hold in await self._store.policies.removed(holds)]
            if all(freed) and now >= self._often_until:
                self._removed_at = now + REMOVED_INTERVAL
            done += freed
        if sleeps and all(done):
            self._next = self._removed_at = now + SLEEPING
        elif not holds:
            self._next = self._removed_at  # nothing of its queues has been put off

    async def _free(self, hold: "Hold") -> bool:
        freed = await self._store.policies.free_removed(hold)
        if freed:
            text = (
                f"{freed} messages of queue {hold.queue!r} waited for policies that no live "
                f"subscriber has any more ({hold.name}): they are freed"
            )
            self._log(logging.INFO, text)
        return freed is not None

    async def _mend(self, queue: str) -> bool:
        step = await self._store.policies.mend_clock_step(queue)
        if step is not None and step.back:
            text = (
                f"the database's clock was set back by about {step.back / MICROSECONDS:.0f} s: "
                f"{step.freed} messages of queue {queue!r} that policies had put off do not wait "
                "for it to come there again; delayed publishes, retries, and what was published "
                "before, are due as written"
            )
            self._log(logging.WARNING, text)
        return step is not None
