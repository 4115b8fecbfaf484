"""A background loop: ask `tick` for the seconds until the next one; back off while the database fails."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

from faststream_sqlbroker.exceptions import StoreError

Log = Callable[..., None]
"""log(level, text, *, exc_info=None, message_id=None)"""

FIRST_BACKOFF = 0.1
LAST_BACKOFF = 10.0
"""Seconds; full jitter between half and one and a half, so that a fleet does not return as one."""


def backoff(failures: int) -> float:
    """Seconds to wait after the given number of failures in a row (≥ 1)."""
    base: float = min(LAST_BACKOFF, FIRST_BACKOFF * 2 ** min(failures - 1, 16))
    return base * random.uniform(0.5, 1.5)  # noqa: S311 - jitter, not a secret


class Loop:
    """Runs `tick` until stopped; `wake` makes the next tick come at once.

    A tick that fails with a database error is repeated with growing, jittered pauses; any other error
    ends the loop, is logged and makes it unhealthy.
    """

    def __init__(self, name: str, tick: Callable[[], Awaitable[float | None]], log: Log) -> None:
        """`tick` returns seconds until the next tick, or None to wait for `wake`."""
        self.name = name
        self._tick = tick
        self._log = log
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.failures = 0
        self._died = False

    @property
    def healthy(self) -> bool:
        """Whether the loop lives and its last tick succeeded."""
        return not self._died and self.failures == 0

    def start(self) -> None:
        """Start the loop's task."""
        self._stopping = False
        self._died = False
        self.failures = 0
        self._task = asyncio.create_task(self._run(), name=f"sqlbroker-{self.name}")

    def wake(self) -> None:
        """Let the next tick come at once."""
        self._wake.set()

    async def stop(self) -> None:
        """End after the running tick; returns when the task has ended."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                wait = await self._guarded_tick()
                if not self._stopping:
                    await self._pause(wait)
        except Exception as error:  # noqa: BLE001 - a loop that dies must say so; `healthy` turns false
            self._died = True
            self._log(logging.CRITICAL, f"the {self.name} loop has died: {error!r}", exc_info=error)

    async def _guarded_tick(self) -> float | None:
        try:
            wait = await self._tick()
        except StoreError as error:
            self.failures += 1
            pause = backoff(self.failures)
            self._log(
                logging.WARNING if self.failures < 5 else logging.ERROR,  # noqa: PLR2004 - five in a row
                f"the {self.name} loop failed {self.failures} times in a row, again in {pause:.1f} s: {error}",
            )
            await self._sleep_unless_stopping(pause)
            return 0.0
        self.failures = 0
        return wait

    async def _sleep_unless_stopping(self, seconds: float) -> None:
        # A wake-up must not cut a back-off short: it would hammer a failing database.
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while not self._stopping and (left := end - clock()) > 0:
            await asyncio.sleep(min(left, 0.2))

    async def _pause(self, wait: float | None) -> None:
        if wait is not None and wait <= 0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(wait):
                await self._wake.wait()
        except TimeoutError:
            pass

    def state(self) -> dict[str, Any]:
        """The loop's name, health and failures in a row."""
        return {"name": self.name, "healthy": self.healthy, "failures": self.failures}
