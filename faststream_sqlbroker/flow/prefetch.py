"""How many rows wait in this process for a worker, and how short their leases are.

A process claims what its workers will start within `HORIZON`, by how long the handler has taken
lately. So the rest stays for other processes, and what comes later with a higher priority is not
behind it.
"""

from collections import deque
from math import ceil

from faststream_sqlbroker.core.clock import Clock

HORIZON = 0.2
"""Seconds within which the workers will start what waits for them."""
REMEMBERED = 128
"""The last runs of the handler from which its time is known."""
PREFETCH_LEASE = 20.0
"""Seconds for which a row is leased that waits for a worker: what a dead process had not started is
back soon."""
LEAST_LEFT = 10.0
"""Seconds of such a lease that must be left when its row starts; else it is renewed before."""
LONGEST_WAIT = 1.0
"""Seconds after which a row that waits behind running handlers is given back."""


class HandlerTimes:
    """How long the last runs of one subscriber's handler took: of a message, or of a batch."""

    def __init__(self, clock: Clock | None = None) -> None:
        """Nothing is known yet."""
        self._clock = clock or Clock()
        self.recent: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds, the oldest run first."""
        self.ended_at = float("-inf")
        """When the last run ended (monotonic seconds)."""
        self.begins_at = float("-inf")
        """When the last run begins, or began, that a worker has waited for."""

    def ended(self, began: float, now: float) -> None:
        """A run that `began` has ended `now`."""
        self.recent.append(now - began)
        self.ended_at = now

    def begins(self, at: float) -> None:
        """A worker waits until `at` to begin a run: until then that none ends says nothing."""
        self.begins_at = max(self.begins_at, at)

    def starts_ahead(self, workers: int, free: int, horizon: float = HORIZON) -> int:
        """How many runs the `workers`, of which so many are `free`, will begin within `horizon`
        seconds.

        By the 90th percentile of the remembered times. With none, or while no run has ended for
        `horizon` though all workers are busy, it is what free workers begin at once.
        """
        moved_at = max(self.ended_at, self.begins_at)
        stuck = free <= 0 and self._clock.monotonic() - moved_at > horizon
        if not self.recent or stuck:
            return max(0, free)
        return max(0, free, int(horizon * workers / max(self.usual, 1e-6)))

    @property
    def usual(self) -> float:
        """The 90th percentile of the remembered times (seconds); 0 with none."""
        times = sorted(self.recent)
        return times[ceil(0.9 * len(times)) - 1] if times else 0.0


def prefetch_lease(lease: float) -> float:
    """Seconds for which a row that waits is leased, by a subscriber whose leases last `lease`
    seconds.
    """
    return min(lease, PREFETCH_LEASE)


def least_left(lease: float) -> float:
    """Seconds of `prefetch_lease(lease)` that must be left when a row starts."""
    return min(LEAST_LEFT, prefetch_lease(lease) / 2)
