"""Time for tests: an hour passes at once, or a process's clock jumps."""

import asyncio
import heapq
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from faststream_sqlbroker.core.clock import RealTime

TURNS = 5
"""Turns of the event loop in which the tasks that a timer wakes come to their next pause."""


class VirtualTimer:
    """A call to come."""

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._call: Callable[[], object] | None = lambda: callback(*args)

    def cancel(self) -> None:
        """Do not call."""
        self._call = None

    @property
    def is_over(self) -> bool:
        """Whether it was cancelled or has fired."""
        return self._call is None

    def fire(self) -> bool:
        """Call, unless it is cancelled; whether it was called."""
        call, self._call = self._call, None
        if call is not None:
            call()
        return call is not None


class VirtualTime:
    """Stands still until `advance`; without chance, so that pauses have their plain lengths."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._number = count()

    def monotonic(self) -> float:
        """The virtual time."""
        return self.now

    def uniform(self, low: float, high: float) -> float:
        """The middle."""
        return (low + high) / 2

    def call_later(
        self, seconds: float, callback: Callable[..., object], *args: Any
    ) -> VirtualTimer:
        """Call when so much virtual time has passed."""
        timer = VirtualTimer(callback, args)
        heapq.heappush(self._timers, (self.now + seconds, next(self._number), timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        """Wait until so much virtual time has passed."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        over = asyncio.Event()
        timer = self.call_later(seconds, over.set)
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
            try:
                yield scope
            finally:
                timer.cancel()

    limit = timeout

    async def advance(self, seconds: float) -> None:
        """Let virtual time pass, and each timer fire at its moment."""
        end = self.now + seconds
        await self._settle()
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            if timer.fire():
                await self._settle()
        self.now = end

    @property
    def next_moment(self) -> float:
        """When the next timer fires; infinite if there is none."""
        while self._timers and self._timers[0][2].is_over:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else float("inf")

    async def _settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)


def let_loop_pass(seconds: float) -> None:
    """Let the time of the running event loop jump: what is bounded by it ends as if it had waited
    so long, such as a statement without an answer."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


class ShiftedTime(RealTime):
    """Real time, which a test lets jump."""

    def __init__(self) -> None:
        self.shift = 0.0

    def monotonic(self) -> float:  # type: ignore[override]
        """Real time and the jumps so far."""
        return time.monotonic() + self.shift
