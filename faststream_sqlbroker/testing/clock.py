"""The time of a test: it stands still until the test advances it."""

import asyncio
import heapq
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from functools import partial
from itertools import count
from typing import Any

from faststream_sqlbroker.core.times import (
    Duration,
    from_microseconds,
    parse_duration,
    to_microseconds,
)
from faststream_sqlbroker.exceptions import SetupError

TICK_MICROSECONDS = 1_000
"""Microseconds: SQLite's clock is read in milliseconds, so shorter steps have no effect."""
IDLE_TURNS = 25
"""Turns of the event loop without any work after which everything is idle: code that a timer or an
event wakes comes to its next call of the store, or its next pause, within a few turns.
"""
REAL_TIME_LIMIT = 5.0
"""Maximum real seconds that a handler, or a call of the store, may take while time is advanced."""


current_delivery_var: ContextVar["asyncio.Task[Any] | None"] = ContextVar(
    "sqlbroker_delivery", default=None
)
"""The task that runs a handler, visible in it and in the tasks that it creates."""


class VirtualTimer:
    """A scheduled call."""

    def __init__(self, call: Callable[[], object]) -> None:
        """Create a timer; its attribute `call` is None once it is cancelled or has run."""
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Cancel the call."""
        self.call = None


class VirtualClock:
    """The time of `TestSqlBroker`: of the broker and of the database.

    Time stands still until `advance`. Randomness in the broker comes from `seed`, so a test does
    the same each time. The process's own clock (`datetime.now`, `asyncio.sleep`) is not affected.
    """

    def __init__(self, start: datetime | None = None, *, seed: int = 0) -> None:
        """Start the clock at `start`.

        Args:
            start: With a time zone, rounded up to milliseconds; default the current time. Give
                one to test schedules and windows, which depend on the time of the day.
            seed: Seed of all randomness in the broker: jitter of retries and of pauses.

        Raises:
            SetupError: `start` has no time zone.
        """
        if start is None:
            start = datetime.now(timezone.utc)
        if start.utcoffset() is None:
            raise SetupError(f"start must have a time zone, got {start!r}: add tzinfo=timezone.utc")
        self.seed = seed
        self.microseconds = _round_up(to_microseconds(start))
        self._started_at = self.microseconds
        self._random = random.Random(seed)  # noqa: S311 - a test repeats it
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._last_timer_end = 0.0
        """End of the last timer that has run, in seconds since the start."""
        self._number = count()
        self._pumps: list[Any] = []
        self._waiting_tasks: Counter[asyncio.Task[Any] | None] = Counter()
        self._waiting_deliveries: Counter[asyncio.Task[Any] | None] = Counter()
        self._call_count = 0
        self._change_count = 0
        self._changed = asyncio.Event()
        self._advancing: asyncio.Task[Any] | None = None

    # -- for tests -----------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The current time of the clock (aware, UTC)."""
        return from_microseconds(self.microseconds)

    async def advance(self, length: Duration) -> None:
        """Advance time, and let every event happen at the right time.

        The clock jumps to the next time at which a message is due, a lease ends, a schedule fires
        or a timer of the broker ends; nothing polls. Before the first jump and after each,
        `advance` waits until no handler, callback or call of the store runs. Messages start one
        after the other: by due time, then priority, then id. Errors of handlers are reported by
        `broker.drain()`.

        `advance` does not wait for a handler that waits for time itself, or in a task that it has
        created.

        Args:
            length: 0 or more: seconds, a timedelta or text like "1h"; rounded up to milliseconds.

        Raises:
            SetupError: `length` is not a valid duration or negative; or the caller is a handler, or
                a second task.
            TimeoutError: a handler took more than 5 seconds of real time; the message names it.
        """
        seconds = parse_duration(length, name="length")
        if seconds < 0:
            raise SetupError(f"length must be 0 or more, got {length!r}: time never goes back")
        await self._advance_to(_round_up(self.microseconds + round(seconds * 1_000_000)))

    async def advance_to(self, moment: datetime) -> None:
        """Advance time until `moment`, which has a time zone and is not in the past.

        Raises:
            SetupError: `moment` is not such a time, or as `advance`.
            TimeoutError: as `advance`.
        """
        if moment.utcoffset() is None:
            raise SetupError(f"moment must have a time zone, got {moment!r}")
        if moment < self.now:
            raise SetupError(
                f"moment must be {self.now} or later, got {moment}: time never goes back"
            )
        await self._advance_to(_round_up(to_microseconds(moment)))

    async def _advance_to(self, end: int) -> None:
        """Jump from event to event until `end` (microseconds), and let each event's work finish.

        A single jump to the end would skip what events cause, such as a retry before the end.
        """
        if self._advancing is not None or self.is_delivering():
            raise SetupError(
                "advance waits until no handler runs, and only one task can move time at a time: "
                "call it in the test itself, one call after the other"
            )
        self._advancing = asyncio.current_task()
        try:
            for pump in self._pumps:
                await pump.finish_running(time_follows=True)
            await self._run_until_idle()
            while (next_time := self._get_next_time()) is not None and next_time <= end:
                self._set_time(next_time)
                await self._run_until_idle()
            self._set_time(end)
            await self._run_until_idle()
        finally:
            self._advancing = None

    def _get_next_time(self) -> int | None:
        """Return the time of the next event or timer, in microseconds since 1970, or None.

        Rounded up to the resolution of SQLite's clock: before that, the event would not be due.
        """
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        times = [time for pump in self._pumps if (time := pump.get_next_time()) is not None]
        if self._timers:
            seconds = self._timers[0][0]
            times.append(self._started_at + math.ceil(round(seconds * 1_000_000, 3)))
        return max(self.microseconds, _round_up(min(times))) if times else None

    def _set_time(self, time: int) -> None:
        """Set the time, and run the timers that are due by then.

        All due timers are removed before any is run: a call may start a new timer, which must wait
        for the next jump even if it is due at once.
        """
        self.microseconds = max(self.microseconds, time)
        now = self.monotonic()
        due = []
        # The small margin is for rounding errors of sums.
        while self._timers and self._timers[0][0] <= now + 1e-7:
            self._last_timer_end, _, timer = heapq.heappop(self._timers)
            due.append(timer)
        for timer in due:
            call, timer.call = timer.call, None
            if call is not None:
                call()

    async def _run_until_idle(self) -> None:
        """Deliver due messages until no handler, timer or store call has work left at this time.

        With several brokers, a delivery of one may publish for another: repeat until none works.
        """
        await self.wait_until_idle()
        has_worked = True
        while has_worked:
            has_worked = False
            for pump in self._pumps:
                has_worked = await pump.run_due(limit=REAL_TIME_LIMIT) or has_worked
            await self.wait_until_idle()

    async def wait_until_idle(self) -> None:
        """Wait until no call of the store runs and no woken code still has a turn.

        A turn is one pass of the event loop. Woken code may need several turns before it calls the
        store, so the loop must pass several times without a change.

        Raises:
            TimeoutError: after 5 seconds of real time.
        """
        deadline = asyncio.get_running_loop().time() + REAL_TIME_LIMIT
        idle_turns = 0
        while idle_turns < IDLE_TURNS:
            change_count = self._change_count
            if self._call_count:
                await self.wait_for_change(deadline, "a store operation")
            else:
                await asyncio.sleep(0)
            idle_turns = (
                idle_turns + 1 if change_count == self._change_count and not self._call_count else 0
            )

    # -- what goes on --------------------------------------------------------------------------

    def add_pump(self, pump: Any) -> None:
        """Notify `pump`, a `Pump`, of time that passes."""
        self._pumps.append(pump)

    def remove_pump(self, pump: Any) -> None:
        """Stop notifying `pump`."""
        self._pumps.remove(pump)

    def begin_call(self) -> None:
        """Record the start of a call of the store."""
        self._call_count += 1
        self.notify_change()

    def end_call(self) -> None:
        """Record the end of a call of the store."""
        self._call_count -= 1
        self.notify_change()

    def notify_change(self, *_: object) -> None:
        """Notify waiting code that something has changed: a call, a wait or a delivery."""
        self._change_count += 1
        # A new event each time, so that later waits are for later changes.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for_change(self, deadline: float | None, subject: str) -> None:
        """Wait until something changes, until `deadline` (the event loop's time).

        A change is the start or end of a call of the store or of a wait for time, or the end of a
        delivery.

        Raises:
            TimeoutError: nothing changed; the message names the `subject` that was waited for.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(
                f"{subject} has not ended within {REAL_TIME_LIMIT:.0f} s of real time"
            ) from None

    def is_waiting_for_time(self, task: "asyncio.Task[Any]", *, within: bool = False) -> bool:
        """Return True if `task` waits for virtual time, so a wait for the task would never end.

        Virtual time is the time of this clock. With `within`, also if another task that the handler
        in `task` has created waits.
        """
        return self._waiting_tasks[task] > 0 or (within and self._waiting_deliveries[task] > 0)

    def is_delivering(self) -> bool:
        """Return True if the running task is a handler's."""
        task = asyncio.current_task()
        return any(pump.is_delivery(task) for pump in self._pumps)

    # -- as a TimeSource -----------------------------------------------------------------------

    def monotonic(self) -> float:
        """Return the seconds since the start, not before the end of the last timer that has run."""
        # Trap: sums of floats may be slightly after their millisecond. Code that waits until such a
        # time would poll forever if the clock stood before it.
        return max(self._last_timer_end, (self.microseconds - self._started_at) / 1_000_000)

    def uniform(self, low: float, high: float) -> float:
        """Return a random number from the seeded generator."""
        return self._random.uniform(low, high)

    def call_later(
        self, seconds: float, callback: Callable[..., object], *args: object
    ) -> VirtualTimer:
        """Call `callback` after `seconds` of virtual time, during a jump of the clock."""
        timer = VirtualTimer(partial(callback, *args))
        # The number orders timers of the same time: first started, first called.
        heapq.heappush(self._timers, (self.monotonic() + seconds, next(self._number), timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has moved the time forward by `seconds`.

        The task is marked as waiting for time, so that `advance` does not wait for its end.
        """
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        elapsed = asyncio.Event()
        timer = self.call_later(seconds, elapsed.set)
        with self._mark_waiting():
            try:
                await elapsed.wait()
            finally:
                timer.cancel()

    @asynccontextmanager
    async def timeout(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Return asyncio's timeout, but let it expire after `seconds` of virtual time.

        A timer of this clock moves the timeout's end, which is without limit at first, to now. None
        never expires.
        """
        async with asyncio.timeout(None) as scope:
            if seconds is None:
                yield scope
                return

            def expire() -> None:
                # A scope that has expired must not be changed. Its task may still be ending, if it
                # waits for a cancelled statement.
                if not scope.expired():
                    scope.reschedule(asyncio.get_running_loop().time())

            if seconds <= 0:
                expire()
            timer = self.call_later(seconds, expire)
            with self._mark_waiting():
                try:
                    yield scope
                finally:
                    timer.cancel()

    @contextmanager
    def _mark_waiting(self) -> Iterator[None]:
        """Mark the running task, and the delivery that created it, as waiting for virtual time.

        Otherwise `advance` would wait for a handler that in turn waits for `advance`. The delivery
        is the task of the handler; counters, because it may have several waiting tasks.
        """
        counts = [
            (self._waiting_tasks, asyncio.current_task()),
            (self._waiting_deliveries, current_delivery_var.get()),
        ]
        for counter, task in counts:
            counter[task] += 1
        self.notify_change()
        try:
            yield
        finally:
            for counter, task in counts:
                counter[task] -= 1
                if not counter[task]:
                    del counter[task]
            self.notify_change()

    @staticmethod
    def limit(seconds: float | None) -> asyncio.Timeout:
        """Return a timeout of real time: handlers wait for real events, too."""
        return asyncio.timeout(seconds)


class StandingClock(VirtualClock):
    """The time of a test without a given clock, which cannot be advanced.

    Waits of the application itself, such as `get_one`, end after real time.
    """


def _round_up(microseconds: int) -> int:
    return -(-microseconds // TICK_MICROSECONDS) * TICK_MICROSECONDS
