"""Rows that wait in this process for a worker: how many, how many bytes, and where they wait.

A process claims what its workers will start within `HORIZON`, by how long the handler has taken
lately. So the rest stays for other processes, and what comes later with a higher priority is not
behind it.

A claim takes rows, and how large they are is known when they are there. So it is sized by the mean
of recent bodies, and what is too much after all is given back. As long as no body is large, nothing
is counted.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil, inf
from typing import Generic, TypeVar

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.settings import ConsumerSettings

HORIZON = 0.2
"""Seconds within which the workers will start what waits for them."""
REMEMBERED_RUNS = 128
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
        self.recent: deque[float] = deque(maxlen=REMEMBERED_RUNS)
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


REMEMBERED_SHARE = 0.5
"""Share of what is known that still counts with the next claim."""
TOLD_EVERY = 600.0
"""Seconds between two lines of the log about messages that were given back."""


def body_bytes(rows: Iterable[ClaimedMessage | None]) -> int:
    """Bytes of the bodies of `rows`."""
    return sum(len(row.payload) for row in rows if row is not None)


class PrefetchBytes:
    """Keeps to `max_prefetch_bytes` of one subscriber."""

    def __init__(self, settings: ConsumerSettings | None = None) -> None:
        """Without `settings` there is no limit."""
        limit = None if settings is None else settings.max_prefetch_bytes
        self.limit: float = inf if limit is None else limit
        self._rows = 0
        if settings is not None:
            waiting = int(settings.fetch_batch_size * settings.max_not_processed_factor)
            self._rows = waiting + settings.run_size
        self._bytes = 0.0
        self._count = 0.0
        self.counts = False
        """Whether bodies were so large that the limit may be reached."""
        self.drains = False
        """Whether the first message that is due is so large that it waits until nothing else does.
        """
        self._told_at = float("-inf")
        self._given_back = 0

    @property
    def mean(self) -> float:
        """Bytes of a recent body."""
        return self._bytes / self._count if self._count else 0.0

    @property
    def most_rows(self) -> float:
        """Rows of the mean size that may wait: one or more."""
        return max(1, self.limit // max(1.0, self.mean)) if self.counts else inf

    def room(self, held: Sequence[int]) -> float:
        """Rows of the mean size that may be claimed while `held` bytes, of so many rows, wait."""
        size, count = held
        if not count:
            self.drains = False
            return self.most_rows
        return 0 if self.drains else (self.limit - size) // max(1.0, self.mean)

    def note(self, rows: Sequence[ClaimedMessage]) -> None:
        """A claim has leased `rows`."""
        sizes = [len(row.payload) for row in rows]
        if not sizes:
            return
        self._bytes = REMEMBERED_SHARE * self._bytes + sum(sizes)
        self._count = REMEMBERED_SHARE * self._count + len(sizes)
        # It stays so: to count costs little, and a queue with large bodies will have others.
        self.counts = self.counts or max(sizes) * self._rows > self.limit

    def keeps(self, rows: Sequence[ClaimedMessage], held: Sequence[int]) -> int:
        """How many of `rows`, from the first on, may wait with what is held already: one or more if
        that is nothing.
        """
        size, count = held
        for place, row in enumerate(rows):
            size += len(row.payload)
            if size > self.limit and place + count:
                self.drains = not place
                return place
        return len(rows)

    def tell(self, log: Log, surplus: Sequence[ClaimedMessage], now: float) -> None:
        """Log that `surplus` is given back, every ten minutes at most."""
        self._given_back += len(surplus)
        if now - self._told_at < TOLD_EVERY:
            return
        self._told_at = now
        log(
            logging.INFO,
            f"{self._given_back} claimed messages given back uncharged: with them more than "
            f"max_prefetch_bytes={self.limit:.0f} would wait for a worker (one of them is "
            f"message {surplus[0].id} of queue {surplus[0].queue!r} with "
            f"{len(surplus[0].payload)} bytes)",
            message_id=surplus[0].id,
        )
        self._given_back = 0


T = TypeVar("T")


class Buffer(Generic[T]):
    """First in, first out; any number of tasks may wait in `get`.

    It has the methods of asyncio.Queue, without its accounting for every item.
    """

    def __init__(self) -> None:
        """Hold nothing; `items` may be taken from the left."""
        self.items: deque[T] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._watchers: deque[asyncio.Future[None]] = deque()
        """Wait in `coming`."""

    def qsize(self) -> int:
        """Items that wait."""
        return len(self.items)

    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self.items

    def put_nowait(self, item: T) -> None:
        """Add one."""
        self.items.append(item)
        self._wake(1)

    def extend(self, items: Sequence[T]) -> None:
        """Add several, in their order."""
        self.items.extend(items)
        self._wake(len(items))

    def get_nowait(self) -> T:
        """Take the first.

        Raises:
            IndexError: there is none.
        """
        return self.items.popleft()

    async def get(self) -> T:
        """Take the first, as soon as there is one."""
        while not self.items:
            await self._wait_among(self._getters)
        return self.items.popleft()

    async def coming(self) -> None:
        """Wait until there is one, or until `interrupt`; who waits here is woken before `get`."""
        if not self.items:
            await self._wait_among(self._watchers)

    def interrupt(self) -> None:
        """End every wait in `coming`."""
        self._wake_of(self._watchers, len(self._watchers))

    async def _wait_among(self, waiters: "deque[asyncio.Future[None]]") -> None:
        waiter = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and self.items:
                self._wake(1)  # it was meant for us: for the next one, then
            raise

    def _wake(self, count: int) -> None:
        self._wake_of(self._getters, self._wake_of(self._watchers, count))

    @staticmethod
    def _wake_of(waiters: "deque[asyncio.Future[None]]", count: int) -> int:
        """Wake up to `count` of `waiters`; how many are left of it."""
        while count and waiters:
            waiter = waiters.popleft()
            # A task of a closed event loop has ended with it, and to wake it would fail.
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)
                count -= 1
        return count
