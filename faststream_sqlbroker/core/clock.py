"""The clock of a broker's loops: durations, pauses and the times of polls.

The broker makes one `Clock` and passes it to its parts. A test can replace the time behind the
clock in this one place, and let an hour pass at once.

Work that takes real time keeps real time: limits on statements, on connections and on the waits
of a stop. Due times, leases and expiry use the database's clock and are never read here.
"""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol

MIN_JITTER = 0.5
"""Factor of the shortest pause."""
MAX_JITTER = 1.5
"""Factor of the longest pause. Pauses are random, so that processes that failed together do not
return together."""


class Timer(Protocol):
    """The result of `call_later`."""

    def cancel(self) -> None:
        """Cancel the call; without effect afterwards."""


class TimeSource(Protocol):
    """The source of a clock's time."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary time; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Wait for so many seconds; with 0, wait for the next turn of the event loop."""

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        """Cancel the block after so many seconds and raise TimeoutError; None means no limit."""

    def limit(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        """Like `timeout`, for a block of application code such as a handler."""

    def call_later(self, seconds: float, callback: Callable[..., object], *args: object) -> Timer:
        """Call `callback` in the running event loop after so many seconds."""

    def uniform(self, low: float, high: float) -> float:
        """Return a random number between `low` and `high`."""


class RealTime:
    """The process's own clock and random numbers."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)
    timeout = staticmethod(asyncio.timeout)
    limit = staticmethod(asyncio.timeout)
    uniform = staticmethod(random.uniform)

    @staticmethod
    def call_later(seconds: float, callback: Callable[..., object], *args: object) -> Timer:
        """Call `callback` in the running event loop after so many seconds."""
        return asyncio.get_running_loop().call_later(seconds, callback, *args)


class Clock:
    """The time of a broker: real time, unless a test replaces the source."""

    monotonic: Callable[[], float]
    """Seconds since an arbitrary time; never goes back. An attribute rather than a method, because
    it is read for each message."""
    callers: "Clock"
    """The clock for waits of the application: `get_one`, `pop`, `reserve`, `lock`. A test whose
    time stands still uses another clock here, so that these waits end."""

    def __init__(self, source: TimeSource | None = None) -> None:
        """Use `source`; None means real time."""
        self.callers = self
        self.use(RealTime() if source is None else source)

    def use(self, source: TimeSource) -> None:
        """Switch to `source`. Call this before the start, because workers store `monotonic`."""
        self._source = source
        self.monotonic = source.monotonic

    async def sleep(self, seconds: float) -> None:
        """Wait for so many seconds."""
        await self._source.sleep(seconds)

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        """Cancel the block after so many seconds and raise TimeoutError; None means no limit."""
        return self._source.timeout(seconds)

    def limit(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        """Like `timeout`, for a block of application code such as a handler."""
        return self._source.limit(seconds)

    def timeout_at(self, deadline: float | None) -> AbstractAsyncContextManager[object]:
        """Like `timeout`, with a deadline in `monotonic` seconds."""
        return self.timeout(None if deadline is None else deadline - self.monotonic())

    async def wait_for(self, event: asyncio.Event, seconds: float | None) -> bool:
        """Wait so many seconds at most for `event`; return True if the event is set in time."""
        with suppress(TimeoutError):
            async with self.timeout(seconds):
                return await event.wait()
        return False

    def call_later(self, seconds: float, callback: Callable[..., object], *args: object) -> Timer:
        """Call `callback` in the running event loop after so many seconds."""
        return self._source.call_later(seconds, callback, *args)

    def add_jitter(self, seconds: float) -> float:
        """Multiply `seconds` by a random factor between 0.5 and 1.5."""
        return seconds * self._source.uniform(MIN_JITTER, MAX_JITTER)
