"""A background loop: ask `tick` for the seconds until the next one; back off while the database
fails.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.exceptions import StoreError

Log = Callable[..., None]
"""log(level, text, *, exc_info=None, message_id=None)"""

FIRST_BACKOFF = 0.1
"""Seconds after the first failure; each following pause is twice as long, with jitter."""
LAST_BACKOFF = 10.0
"""Most seconds between two tries, before the jitter."""
CANCEL_LIMIT = 10.0
"""Seconds for a cancelled tick to end: psycopg asks the server to cancel first."""


def backoff(failures: int, clock: Clock) -> float:
    """Seconds to wait after the given number of failures in a row (≥ 1)."""
    return clock.jitter(min(LAST_BACKOFF, FIRST_BACKOFF * 2 ** min(failures - 1, 16)))


def is_told(failures: int) -> bool:
    """Whether the log says that there were so many failures in a row: the first, the second, the
    fourth, and so on.
    """
    return failures.bit_count() == 1


class FailureLog(Protocol):
    """Tells failures of loops together (`flow.outage.Outages`)."""

    def failed(
        self, part: "Loop", name: str, error: StoreError, began: float | None = None
    ) -> None:
        """`part`, one of possibly many called `name`, has failed, and will try again; its try
        `began` then (monotonic seconds).
        """

    def worked(self, part: "Loop") -> None:
        """`part` has worked."""

    def left(self, part: "Loop") -> None:
        """`part` has ended."""


class Loop:
    """Runs `tick` until stopped; `wake` makes the next tick come at once.

    A tick that fails is repeated with growing, jittered pauses; until one succeeds the loop is
    unhealthy. The database's errors are told together with those of other loops. Any other is a
    bug, logged as CRITICAL, but no reason to stop working for good.
    """

    def __init__(
        self, name: str, tick: Callable[[], Awaitable[float | None]], log: Log, clock: Clock
    ) -> None:
        """`tick` returns seconds until the next tick, or None to wait for `wake`."""
        self.name = name
        self._tick = tick
        self._log = log
        self._clock = clock
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._outages: FailureLog | None = None
        self._stopped = asyncio.Event()
        self.failures = 0
        self.worked_at: float | None = None
        """When the last tick that succeeded ended (monotonic seconds)."""

    @property
    def healthy(self) -> bool:
        """Whether the last tick succeeded."""
        return self.failures == 0

    @property
    def orphaned(self) -> bool:
        """Whether the event loop that it ran in is closed."""
        return self._task is not None and self._task.get_loop().is_closed()

    @property
    def running(self) -> bool:
        """Whether it was started, is not stopped, and its event loop is open."""
        return self._task is not None and not self.orphaned

    def start(self, outages: FailureLog) -> None:
        """Start the loop's task; `outages` is told when the database fails."""
        # A new one: a task that is told to stop, and still ends its tick, must not go on.
        self._stopped = asyncio.Event()
        self._outages = outages
        self.failures = 0
        self._task = asyncio.create_task(self._run(self._stopped), name=f"sqlbroker-{self.name}")

    def wake(self) -> None:
        """Let the next tick come at once."""
        try:
            self._wake.set()
        except RuntimeError:
            if not self.orphaned:
                raise
            # What waits in a closed event loop cannot be woken. The next start is to find it set.
            self._wake = asyncio.Event()
            self._wake.set()

    async def stop(self, timeout: float | None = None) -> None:
        """End after the running tick, which is cancelled after `timeout` seconds (None: never)."""
        orphaned = self.orphaned
        if orphaned:
            self._wake = asyncio.Event()
        else:
            self._stopped.set()
            self._wake.set()
        task, self._task = self._task, None
        if task is None:
            return
        if not orphaned:
            # The task of a closed event loop has ended with it, and cannot be waited for.
            try:
                await asyncio.wait((task,), timeout=timeout)
            finally:
                # Also if this stop is cancelled itself: the task must not outlive it.
                task.cancel()  # no effect on a task that has ended
            # A driver may hang while it closes a connection; the stop goes on without it.
            await asyncio.wait((task,), timeout=CANCEL_LIMIT)
        if self._outages is not None:
            self._outages.left(self)

    async def _run(self, stopped: asyncio.Event) -> None:
        while not stopped.is_set():
            # Before the tick, so that a wake-up during the tick lets the next one come at once.
            self._wake.clear()
            wait = await self._guarded_tick(stopped)
            if not stopped.is_set():
                await self._pause(wait)

    async def _guarded_tick(self, stopped: asyncio.Event) -> float | None:
        began = self._clock.monotonic()
        try:
            wait = await self._tick()
        except Exception as error:  # noqa: BLE001 - a loop must not die; `healthy` turns false
            self.failures += 1
            pause = backoff(self.failures, self._clock)
            self._report(error, pause, began)
            await self._sleep_unless_stopping(pause, stopped)
            return 0.0
        self.worked_at = self._clock.monotonic()
        if self.failures:
            self.failures = 0
            if self._outages is not None:
                self._outages.worked(self)
        return wait

    def _report(self, error: Exception, pause: float, began: float) -> None:
        if isinstance(error, StoreError) and self._outages is not None:
            self._outages.failed(self, f"{self.name} loop", error, began)
            return
        text = (
            f"the {self.name} loop failed {self.failures} times in a row, again in {pause:.1f} s: "
            f"{error!r}"
        )
        self._log(logging.CRITICAL, text, exc_info=error)

    async def _sleep_unless_stopping(self, seconds: float, stopped: asyncio.Event) -> None:
        # A wake-up must not cut a back-off short: it would hammer a failing database.
        with suppress(TimeoutError):
            async with self._clock.timeout(seconds):
                await stopped.wait()

    async def _pause(self, wait: float | None) -> None:
        if wait is not None and wait <= 0:
            # A loop that always has work must let other tasks run.
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            async with self._clock.timeout(wait):
                await self._wake.wait()


async def persist(work: Callable[[], Awaitable[None]], deadline: float, clock: Clock) -> bool:
    """Do `work`, again whenever the database fails, but no longer than `deadline` (the event loop's
    time); whether it was done.
    """
    failures = 0
    try:
        async with asyncio.timeout_at(deadline):
            while True:
                try:
                    await work()
                except StoreError:
                    failures += 1
                    await clock.sleep(backoff(failures, clock))
                else:
                    return True
    except TimeoutError:
        return False


def cancelled() -> bool:
    """Whether the running task is told to end, or is closed after its event loop has ended."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return True
    return task is None or task.cancelling() > 0
