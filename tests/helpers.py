"""Waiting for something to become true, with a deadline instead of a sleep."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

MYSQL = ("mariadb", "mysql")
"""The two that share a dialect."""


def mysql_numbers(count: int) -> str:
    """SQL of a table of the numbers `n` from 1, on MySQL and MariaDB."""
    array = f"CONCAT('[0', REPEAT(',0', {count - 1}), ']')"
    return f"(SELECT n FROM JSON_TABLE({array}, '$[*]' COLUMNS (n FOR ORDINALITY)) numbered)"


async def eventually(
    check: Callable[[], Awaitable[T] | T], timeout: float = 30.0, step: float = 0.01
) -> T:
    """Call `check` until it returns something true; fail with its last answer after `timeout`
    seconds."""
    deadline = time.monotonic() + timeout
    while True:
        answer = check()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not true after {timeout} seconds, last answer: {answer!r}")
        await asyncio.sleep(step)
