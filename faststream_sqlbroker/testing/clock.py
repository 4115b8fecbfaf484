"""The time of a test: it stands still until the test moves it."""

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

TICK = 1_000
"""Microseconds: SQLite's clock is read in milliseconds, so no other moment can be met."""
CALM_TURNS = 25
"""Turns of the event loop without any work, after which nothing is under way: what a timer or an
event wakes comes to its next call of the store, or its next pause, within a few."""
STUCK = 5.0
"""Real seconds that a handler, or a call of the store, may take while time is moved."""


delivery: ContextVar["asyncio.Task[Any] | None"] = ContextVar("sqlbroker_delivery", default=None)
"""The task that runs a handler, in it and in the tasks that it makes."""


class VirtualTimer:
    """A call to come."""

    def __init__(self, call: Callable[[], object]) -> None:
        """It is made when it has `call` still."""
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Do not call."""
        self.call = None


class VirtualClock:
    """The time of `TestSqlBroker`: of the broker and of its database.

    It stands still until `advance`. The broker's chance is `seed`'s, so a test does the same each
    time. The process's own clock (`datetime.now`, `asyncio.sleep`) goes on as ever.
    """

    def __init__(self, start: datetime | None = None, *, seed: int = 0) -> None:
        """Begin at `start`.

        Args:
            start: With a time zone, rounded up to milliseconds; default the present moment. Give
                one to test schedules and windows, which depend on the time of the day.
            seed: Of everything random in the broker: jitter of retries and of pauses.

        Raises:
            SetupError: `start` has no time zone.
        """
        if start is None:
            start = datetime.now(timezone.utc)
        if start.utcoffset() is None:
            raise SetupError(f"start must have a time zone, got {start!r}: add tzinfo=timezone.utc")
        self.seed = seed
        self.microseconds = _ceil(to_microseconds(start))
        self._began = self.microseconds
        self._random = random.Random(seed)  # noqa: S311 - a test repeats it
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._reached = 0.0
        """When the last timer ran out, in seconds since the start."""
        self._number = count()
        self._pumps: list[Any] = []
        self._paused: Counter[asyncio.Task[Any] | None] = Counter()
        self._paused_within: Counter[asyncio.Task[Any] | None] = Counter()
        self._calls = 0
        self._activity = 0
        self._changed = asyncio.Event()
        self._advancing: asyncio.Task[Any] | None = None

    # -- for tests -----------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The moment at which the clock stands (aware, UTC)."""
        return from_microseconds(self.microseconds)

    async def advance(self, length: Duration) -> None:
        """Let time pass, and everything happen in it at its moment.

        It jumps from one moment to the next at which a message is due, a lease ends, a schedule
        fires or a timer of the broker runs out; nothing polls. Before the first and at each, it
        waits until no handler, callback or call of the store runs. Messages start one after the
        other: by due time, then priority, then id. What a handler raises is reported by
        `broker.drain()`.

        It does not wait for a handler that waits for time itself, or in a task that it has made.

        Args:
            length: 0 or more: seconds, a timedelta or text like "1h"; rounded up to milliseconds.

        Raises:
            SetupError: `length` is not a valid duration or negative; or a handler, or a second
                task, calls it.
            TimeoutError: a handler took more than 5 seconds of real time; the text names it.
        """
        seconds = parse_duration(length, name="length")
        if seconds < 0:
            raise SetupError(f"length must be 0 or more, got {length!r}: time never goes back")
        await self._advance_to(_ceil(self.microseconds + round(seconds * 1_000_000)))

    async def advance_to(self, moment: datetime) -> None:
        """`advance` until `moment`, which has a time zone and does not lie in the past.

        Raises:
            SetupError: `moment` is none of these, or as `advance`.
            TimeoutError: as `advance`.
        """
        if moment.utcoffset() is None:
            raise SetupError(f"moment must have a time zone, got {moment!r}")
        if moment < self.now:
            raise SetupError(
                f"moment must be {self.now} or later, got {moment}: time never goes back"
            )
        await self._advance_to(_ceil(to_microseconds(moment)))

    async def _advance_to(self, end: int) -> None:
        if self._advancing is not None or self.is_delivering():
            raise SetupError(
                "advance waits until no handler runs, and no two tasks can move time: call it in "
                "the test itself"
            )
        self._advancing = asyncio.current_task()
        try:
            for pump in self._pumps:
                await pump.finish_running(time_follows=True)
            await self._settle()
            while (moment := self._next_moment()) is not None and moment <= end:
                self._go_to(moment)
                await self._settle()
            self._go_to(end)
            await self._settle()
        finally:
            self._advancing = None

    def _next_moment(self) -> int | None:
        """When something happens next by itself, in microseconds since 1970."""
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        moments = [moment for pump in self._pumps if (moment := pump.next_moment()) is not None]
        if self._timers:
            seconds = self._timers[0][0]
            moments.append(self._began + math.ceil(round(seconds * 1_000_000, 3)))
        return max(self.microseconds, _ceil(min(moments))) if moments else None

    def _go_to(self, moment: int) -> None:
        self.microseconds = max(self.microseconds, moment)
        now = self.monotonic()
        # A timer that one of them starts anew is for the next moment.
        due = []
        while self._timers and self._timers[0][0] <= now + 1e-7:
            self._reached, _, timer = heapq.heappop(self._timers)
            due.append(timer)
        for timer in due:
            call, timer.call = timer.call, None
            if call is not None:
                call()

    async def _settle(self) -> None:
        """Do what is due now, until nothing is."""
        await self.quiet()
        worked = True
        while worked:
            worked = False
            for pump in self._pumps:
                worked = await pump.run_due(limit=STUCK) or worked
            await self.quiet()

    async def quiet(self) -> None:
        """Wait until no call of the store runs, nor anything that was woken.

        Raises:
            TimeoutError: after 5 seconds of real time.
        """
        deadline = asyncio.get_running_loop().time() + STUCK
        calm = 0
        while calm < CALM_TURNS:
            activity = self._activity
            if self._calls:
                await self.changed_by(deadline, "a call of the store")
            else:
                await asyncio.sleep(0)
            calm = calm + 1 if activity == self._activity and not self._calls else 0

    # -- what goes on --------------------------------------------------------------------------

    def join(self, pump: Any) -> None:
        """Tell `pump`, a `Pump`, of time that passes."""
        self._pumps.append(pump)

    def leave(self, pump: Any) -> None:
        """No longer."""
        self._pumps.remove(pump)

    def begin_call(self) -> None:
        """A call of the store begins."""
        self._calls += 1
        self.note()

    def end_call(self) -> None:
        """It has ended."""
        self._calls -= 1
        self.note()

    def note(self, *_: object) -> None:
        """Something has changed that may be waited for."""
        self._activity += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed_by(self, deadline: float | None, what: str) -> None:
        """Wait until something changes, by `deadline` (the event loop's time).

        Raises:
            TimeoutError: nothing did; the text names `what` is waited for.
        """
        try:
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(f"{what} has not ended within {STUCK:.0f} s of real time") from None

    def waits_for_time(self, task: "asyncio.Task[Any]", *, within: bool = False) -> bool:
        """Whether `task` waits for time to pass, so that waiting for it would be for ever; or,
        with `within`, whether a task does that the delivery `task` has made.
        """
        return self._paused[task] > 0 or (within and self._paused_within[task] > 0)

    def is_delivering(self) -> bool:
        """Whether the running task is a handler's."""
        task = asyncio.current_task()
        return any(pump.is_delivery(task) for pump in self._pumps)

    # -- as a TimeSource -----------------------------------------------------------------------

    def monotonic(self) -> float:
        """Seconds since the start."""
        # Sums of floats may lie a trifle behind their millisecond. Who waits until such a moment
        # would look again and again if the clock stood before it.
        return max(self._reached, (self.microseconds - self._began) / 1_000_000)

    def uniform(self, low: float, high: float) -> float:
        """A number that `seed` decides."""
        return self._random.uniform(low, high)

    def call_later(
        self, seconds: float, callback: Callable[..., object], *args: object
    ) -> VirtualTimer:
        """Call when so much virtual time has passed."""
        timer = VirtualTimer(partial(callback, *args))
        heapq.heappush(self._timers, (self.monotonic() + seconds, next(self._number), timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        """Wait until so much virtual time has passed."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        over = asyncio.Event()
        timer = self.call_later(seconds, over.set)
        with self._pausing():
            try:
                await over.wait()
            finally:
                timer.cancel()

    @asynccontextmanager
    async def timeout(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """asyncio's, which expires when so much virtual time has passed."""
        async with asyncio.timeout(None) as scope:
            if seconds is None:
                yield scope
                return

            def expire() -> None:
                # A task that waits for a cancelled statement is still on its way out.
                if not scope.expired():
                    scope.reschedule(asyncio.get_running_loop().time())

            if seconds <= 0:
                expire()
            timer = self.call_later(seconds, expire)
            with self._pausing():
                try:
                    yield scope
                finally:
                    timer.cancel()

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        """Mark the running task, and the delivery that has made it, as waiting for time."""
        counts = [(self._paused, asyncio.current_task()), (self._paused_within, delivery.get())]
        for paused, task in counts:
            paused[task] += 1
        self.note()
        try:
            yield
        finally:
            for paused, task in counts:
                paused[task] -= 1
                if not paused[task]:
                    del paused[task]
            self.note()

    @staticmethod
    def limit(seconds: float | None) -> asyncio.Timeout:
        """Of real time: what a handler waits for is real, too."""
        return asyncio.timeout(seconds)


class StandingClock(VirtualClock):
    """The time of a test that was given no clock: it cannot be moved.

    What the application itself waits for, such as `get_one`, ends in real time.
    """


def _ceil(microseconds: int) -> int:
    return -(-microseconds // TICK) * TICK
