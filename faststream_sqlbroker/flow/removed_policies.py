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
    from faststream_sqlbroker.dialects.policy_holds import Hold
    from faststream_sqlbroker.store import Store

INTERVAL = 60.0
"""Seconds between two looks. A policy counts as removed a minute after the last claim of a process
that has it."""
SLEEPING = 3600.0
"""Seconds between two looks while all subscribers of the process look only when they are told."""


class RemovedPolicies:
    """Looks for such policies of the queues that this process takes from."""

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        self._store = store
        self._log = log
        self._clock = clock
        self._next = float("inf")

    @property
    def due_in(self) -> float:
        """Seconds until the next look; 0 or less: it is due."""
        return self._next - self._clock.monotonic()

    def begin(self, *, sleeps: bool) -> None:
        """A subscriber has started: the deployment may be another."""
        now = self._clock.monotonic()
        self._next = now if sleeps else min(self._next, now + INTERVAL)

    async def look(self, queues: Collection[str], *, sleeps: bool) -> None:
        """Free what waits for policies that no live subscriber of `queues` has, or longer than it
        should as the database's clock was set back.

        Raises:
            StoreError: the database failed; call again.
        """
        holds = await self._store.policies.holds_to_end(sorted(queues))
        done = [await self._free(hold) for hold in holds if not hold.ahead]
        done += [await self._mend(queue) for queue in {hold.queue for hold in holds if hold.ahead}]
        pause = SLEEPING if sleeps and all(done) else INTERVAL
        self._next = self._clock.monotonic() + pause

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
                f"{step.moved} messages of queue {queue!r} that policies had put off before are "
                "due so much earlier; delayed publishes, retries, and what was published before it "
                "was set back, are due as written"
            )
            self._log(logging.WARNING, text)
        return step is not None
