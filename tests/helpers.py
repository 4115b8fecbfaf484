"""Waiting for something to become true, with a deadline instead of a sleep."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

T = TypeVar("T")

MIN_STEP, MAX_STEP = 0.005, 0.05
"""Seconds of the first pause of `eventually`, and of the longest."""

MYSQL = ("mariadb", "mysql")
"""The two that share a dialect."""


def mysql_numbers(count: int) -> str:
    """SQL of a table of the numbers `n` from 1, on MySQL and MariaDB."""
    array = f"CONCAT('[0', REPEAT(',0', {count - 1}), ']')"
    return f"(SELECT n FROM JSON_TABLE({array}, '$[*]' COLUMNS (n FOR ORDINALITY)) numbered)"


class Awake:
    """Measures, while its block runs, the seconds for which the event loop was not held up.

    A process that the machine puts aside, or that does nothing else for a while, must not make
    the test of a limit fail.
    """

    STEP = 0.02
    """Seconds between two looks; a look that comes later tells of a pause."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def __aenter__(self) -> Self:
        self._last = time.monotonic()
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ticking.cancel()
        self._count()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.STEP)
            self._count()

    def _count(self) -> None:
        now = time.monotonic()
        self.seconds += min(now - self._last, 2 * self.STEP)
        self._last = now


async def eventually(
    check: Callable[[], Awaitable[T] | T], timeout: float = 120.0, step: float = MAX_STEP
) -> T:
    """Call `check` until it returns something true; fail with its last answer after `timeout`
    seconds.

    The pause between two calls grows to `step` seconds: most checks ask a database.
    """
    deadline = time.monotonic() + timeout
    pause = min(MIN_STEP, step)
    while True:
        answer = check()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not true after {timeout} seconds, last answer: {answer!r}")
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, step)
