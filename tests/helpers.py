"""Waiting for something to become true, with a deadline instead of a sleep."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(check: Callable[[], Awaitable[T] | T], timeout: float = 10.0, step: float = 0.01) -> T:
    """Call `check` until it returns something true; fail with its last answer after `timeout` seconds."""
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
