"""Rows that wait in this process for a worker: their number, their bytes, their buffer.

A process claims as many rows as its workers will start within `HORIZON`, estimated by the recent
durations of the handler. So other rows stay available to other processes, and later messages of a
higher priority need not wait behind them.

A claim takes rows, and their size is known only afterwards. So the claim is sized by the mean of
recent bodies, and a surplus is released. As long as no body is large, nothing is counted.
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
"""Seconds within which the workers will start the waiting rows."""
MAX_REMEMBERED_RUNS = 128
"""Number of recent handler runs from which the duration is estimated."""
PREFETCH_LEASE = 20.0
"""Seconds for which a waiting row is leased: rows that a dead process had not started are back
soon.
"""
MIN_REMAINING_LEASE = 10.0
"""Seconds that must remain of such a lease when its row starts; otherwise it is renewed first."""
MAX_PREFETCH_WAIT = 1.0
"""Seconds after which a row that waits behind running handlers is released."""


class HandlerTimes:
    """Durations of the last handler runs of a subscriber, each of a message or a batch."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self.recent: deque[float] = deque(maxlen=MAX_REMEMBERED_RUNS)
        """Durations in seconds, the oldest run first."""
        self.ended_at = float("-inf")
        """Time when the last run ended (monotonic seconds)."""
        self.starts_at = float("-inf")
        """Start of the last run that a worker waits or has waited for (monotonic seconds)."""

    def record_end(self, started_at: float, now: float) -> None:
        """Record a run from `started_at` to `now`."""
        self.recent.append(now - started_at)
        self.ended_at = now

    def record_start(self, at: float) -> None:
        """Record that a worker waits until `at` to start a run, as a Throttle demands.

        If no run ends before that time, that does not mean that handlers are stuck.
        """
        self.starts_at = max(self.starts_at, at)

    def count_upcoming_starts(self, workers: int, free: int, horizon: float = HORIZON) -> int:
        """Return how many runs the `workers` will start within `horizon` seconds; `free` are idle.

        So many rows (or batches) are worth claiming now. The estimate uses the 90th percentile of
        the remembered durations. Without any, or while no run has ended for `horizon` though all
        workers are busy (handlers are stuck), only free workers count.
        """
        active_at = max(self.ended_at, self.starts_at)
        is_stuck = free <= 0 and self._clock.monotonic() - active_at > horizon
        if not self.recent or is_stuck:
            return max(0, free)
        return max(0, free, int(horizon * workers / max(self.usual_duration, 1e-6)))

    @property
    def usual_duration(self) -> float:
        """90th percentile of the remembered durations (seconds); 0 without any."""
        times = sorted(self.recent)
        return times[ceil(0.9 * len(times)) - 1] if times else 0.0


def get_prefetch_lease(lease: float) -> float:
    """Return the lease of a row that waits, for a subscriber whose leases last `lease` seconds.

    It is shorter, so that rows that a dead process had not started are back soon.
    """
    return min(lease, PREFETCH_LEASE)


def get_min_remaining(lease: float) -> float:
    """Return the seconds that must remain of the prefetch lease when a row starts.

    With less, the lease is renewed before the start. The prefetch lease is the shorter lease of
    rows that wait for a worker.
    """
    return min(MIN_REMAINING_LEASE, get_prefetch_lease(lease) / 2)


DECAY = 0.5
"""Share of the recorded sizes that still counts with the next claim."""
LOG_INTERVAL = 600.0
"""Seconds between two log lines about released messages."""


def count_body_bytes(rows: Iterable[ClaimedMessage | None]) -> int:
    """Return the total size of the bodies of `rows` in bytes."""
    return sum(len(row.payload) for row in rows if row is not None)


class PrefetchLimiter:
    """Enforces `max_prefetch_bytes` of a subscriber."""

    def __init__(self, settings: ConsumerSettings | None = None) -> None:
        """Set no limit if `settings` is None."""
        limit = None if settings is None else settings.max_prefetch_bytes
        self.limit: float = inf if limit is None else limit
        self._max_waiting_rows = 0
        if settings is not None:
            waiting = int(settings.fetch_batch_size * settings.max_not_processed_factor)
            self._max_waiting_rows = waiting + settings.run_size
        self._bytes = 0.0
        self._count = 0.0
        self.is_counting = False
        """True once bodies were so large that the limit may be reached."""
        self.is_draining = False
        """True if the first due message is so large that it must wait until no other message does.
        """
        self._logged_at = float("-inf")
        self._released_count = 0

    @property
    def mean_bytes(self) -> float:
        """Mean size of recent bodies in bytes."""
        return self._bytes / self._count if self._count else 0.0

    @property
    def max_rows(self) -> float:
        """Maximum number of waiting rows of the mean size, at least 1."""
        return max(1, self.limit // max(1.0, self.mean_bytes)) if self.is_counting else inf

    def get_capacity(self, held: Sequence[int]) -> float:
        """Return how many rows of the mean size may be claimed; `held` is (bytes, rows).

        `held` measures what waits for a worker already. A message that is too large to wait
        together with others is claimed when none waits; until then (`is_draining`) the result is 0.
        """
        size, count = held
        if not count:
            self.is_draining = False
            return self.max_rows
        return 0 if self.is_draining else (self.limit - size) // max(1.0, self.mean_bytes)

    def record_claim(self, rows: Sequence[ClaimedMessage]) -> None:
        """Record the sizes of claimed `rows`, from which the next claim's size is estimated.

        Older sizes count for less with each claim. As long as no body is large, nothing is counted.
        """
        sizes = [len(row.payload) for row in rows]
        if not sizes:
            return
        self._bytes = DECAY * self._bytes + sum(sizes)
        self._count = DECAY * self._count + len(sizes)
        # Never reset: counting is cheap, and a queue with large bodies will have others.
        self.is_counting = self.is_counting or max(sizes) * self._max_waiting_rows > self.limit

    def count_fitting(self, rows: Sequence[ClaimedMessage], held: Sequence[int]) -> int:
        """Return how many of `rows` fit into the limit, at least 1 if nothing is held.

        `held` is (bytes, rows) of what waits for a worker already. A message over the limit could
        never start otherwise, so it may wait alone.
        """
        size, count = held
        for position, row in enumerate(rows):
            size += len(row.payload)
            if size > self.limit and position + count:
                # Not even the first one fits: claim nothing more until no other row waits.
                self.is_draining = not position
                return position
        return len(rows)

    def log_surplus(self, log: Log, surplus: Sequence[ClaimedMessage], now: float) -> None:
        """Log that rows beyond `max_prefetch_bytes` are released, every ten minutes at most."""
        self._released_count += len(surplus)
        if now - self._logged_at < LOG_INTERVAL:
            return
        self._logged_at = now
        log(
            logging.INFO,
            f"{self._released_count} claimed messages released without counting a delivery, "
            f"because more than max_prefetch_bytes={self.limit:.0f} would wait for a worker (one "
            f"of them is message {surplus[0].id} of queue {surplus[0].queue!r} with "
            f"{len(surplus[0].payload)} bytes)",
            message_id=surplus[0].id,
        )
        self._released_count = 0


T = TypeVar("T")


class Buffer(Generic[T]):
    """A first in, first out buffer; any number of tasks may wait in `get`.

    It has the methods of asyncio.Queue, without its accounting for every item.
    """

    def __init__(self) -> None:
        """Hold nothing; `items` may be taken from the left."""
        self.items: deque[T] = deque()
        self._getters: deque[asyncio.Future[None]] = deque()
        self._watchers: deque[asyncio.Future[None]] = deque()
        """Tasks in `wait_nonempty`."""

    def qsize(self) -> int:
        """Return the number of waiting items."""
        return len(self.items)

    def empty(self) -> bool:
        """Return True if nothing waits."""
        return not self.items

    def put_nowait(self, item: T) -> None:
        """Add an item."""
        self.items.append(item)
        self._wake(1)

    def extend(self, items: Sequence[T]) -> None:
        """Add several items, in their order."""
        self.items.extend(items)
        self._wake(len(items))

    def get_nowait(self) -> T:
        """Remove and return the first item.

        Raises:
            IndexError: the buffer is empty.
        """
        return self.items.popleft()

    async def get(self) -> T:
        """Wait for an item; remove and return that item."""
        # Another task may have taken the item before this one runs.
        while not self.items:
            await self._wait_among(self._getters)
        return self.items.popleft()

    async def wait_nonempty(self) -> None:
        """Wait for an item or `interrupt`; tasks that wait here are woken before tasks in `get`."""
        if not self.items:
            await self._wait_among(self._watchers)

    def interrupt(self) -> None:
        """End every `wait_nonempty`."""
        self._wake_waiters(self._watchers, len(self._watchers))

    async def _wait_among(self, waiters: "deque[asyncio.Future[None]]") -> None:
        """Wait among `waiters` until woken.

        A task that is cancelled after its wake-up passes that on to the next task; else an item
        would lie in the buffer although a task waits for items.
        """
        waiter = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and self.items:
                self._wake(1)
            raise

    def _wake(self, count: int) -> None:
        self._wake_waiters(self._getters, self._wake_waiters(self._watchers, count))

    @staticmethod
    def _wake_waiters(waiters: "deque[asyncio.Future[None]]", count: int) -> int:
        """Wake up to `count` of `waiters`; return how many wake-ups are left for other waiters.

        A wake-up gives no item: the task takes one when it runs, or waits again.
        """
        while count and waiters:
            waiter = waiters.popleft()
            # A task of a closed event loop has ended with it, and waking it would fail.
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)
                count -= 1
        return count
