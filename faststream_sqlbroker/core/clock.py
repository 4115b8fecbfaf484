"""The time that a broker's loops live by: how long something took, pauses, and when to look again.

One `Clock` is made by the broker and handed to its parts. A test may put another time behind it,
in this one place, and let an hour pass at once.

Real time stays where work is under way that takes real time: limits on statements, on connections,
and on what a stop waits for. Due times, leases and expiry are the database's and never read here.
"""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

LEAST_JITTER = 0.5
"""The shortest pause, as a part of the length asked for."""
MOST_JITTER = 1.5
"""What a pause is multiplied by, at random: a fleet that failed together must not return as one."""


class Timer(Protocol):
    """What `call_later` returns."""

    def cancel(self) -> None:
        """Do not call; without effect afterwards."""


class TimeSource(Protocol):
    """What a clock asks."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Return after so many seconds; at the next turn of the event loop if there are none."""

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        """Cancel the block after so many seconds and raise TimeoutError; None is without limit."""

    def limit(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        """`timeout` for a block that is the application's, such as a handler."""

    def call_later(self, seconds: float, callback: Callable[..., object], *args: object) -> Timer:
        """Call `callback` in the running event loop after so many seconds."""

    def uniform(self, low: float, high: float) -> float:
        """A random number between `low` and `high`."""


class RealTime:
    """The process's own time and chance."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)
    timeout = staticmethod(asyncio.timeout)
    limit = staticmethod(asyncio.timeout)
    uniform = staticmethod(random.uniform)

    @staticmethod
    def call_later(seconds: float, callback: Callable[..., object], *args: object) -> Timer:
        """As the event loop's."""
        return asyncio.get_running_loop().call_later(seconds, callback, *args)


class Clock:
    """The time of one broker: real, unless a test says otherwise."""

    monotonic: Callable[[], float]
    """Seconds since some moment; never goes back. An attribute, as it is asked for each message."""
    callers: "Clock"
    """The time by which the application's own waits end: `get_one`, `pop`, `reserve`, `lock`. It is
    another one in a test whose time stands still, so that these waits end there, too."""

    def __init__(self, source: TimeSource | None = None) -> None:
        """Ask `source`; None is real time."""
        self.callers = self
        self.use(RealTime() if source is None else source)

    def use(self, source: TimeSource) -> None:
        """Ask `source` from now on; call it before the broker starts, as workers keep
        `monotonic`.
        """
        self._source = source
        self.monotonic = source.monotonic

    async def sleep(self, seconds: float) -> None:
        """Wait for so many seconds."""
        await self._source.sleep(seconds)

    def timeout(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        """Cancel the block after so many seconds and raise TimeoutError; None is without limit."""
        return self._source.timeout(seconds)

    def limit(self, seconds: float | None) -> AbstractAsyncContextManager[object]:
        """`timeout` for a block that is the application's, such as a handler."""
        return self._source.limit(seconds)

    def timeout_at(self, deadline: float | None) -> AbstractAsyncContextManager[object]:
        """`timeout`, at a time of `monotonic`."""
        return self.timeout(None if deadline is None else deadline - self.monotonic())

    def call_later(self, seconds: float, callback: Callable[..., object], *args: object) -> Timer:
        """Call `callback` in the running event loop after so many seconds."""
        return self._source.call_later(seconds, callback, *args)

    def jitter(self, seconds: float) -> float:
        """`seconds`, between half and one and a half times as long."""
        return seconds * self._source.uniform(LEAST_JITTER, MOST_JITTER)
