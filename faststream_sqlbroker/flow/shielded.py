"""Finish a database call after its caller was cancelled, then undo it.

If the call were cut off, its effect would be unknown.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from faststream_sqlbroker.exceptions import StoreError, UnknownOutcomeError

T = TypeVar("T")

SHIELDED_TIMEOUT = 3.0
"""Seconds that a cancelled caller waits until its work has ended and is undone; afterwards both go
on alone."""


class ShieldedCalls:
    """Keeps what goes on after its caller was cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(
        self, work: Coroutine[Any, Any, T], undo: Callable[[], Awaitable[object]] | None = None
    ) -> T:
        """Run `work` to its end, even if the caller is cancelled; then `undo` it, unless it gave
        None or has failed.

        Whatever `undo` raises of the database's is dropped: leases run out by themselves.
        """
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise  # with the event loop
            rest = asyncio.ensure_future(_finish(task, undo))
            self._tasks.add(rest)
            rest.add_done_callback(self._tasks.discard)
            await patiently(rest, SHIELDED_TIMEOUT)
            raise

    async def close(self) -> None:
        """Wait for what goes on, for `SHIELDED_TIMEOUT` seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SHIELDED_TIMEOUT)


async def patiently(task: "asyncio.Task[Any]", seconds: float) -> None:
    """Wait for `task` for up to `seconds`, even if cancelled: the caller raises that later."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while not task.done() and (left := deadline - clock()) > 0:
        try:
            await asyncio.wait((task,), timeout=left)
        except asyncio.CancelledError:
            continue


async def _finish(task: "asyncio.Task[Any]", undo: Callable[[], Awaitable[object]] | None) -> None:
    await asyncio.wait((task,))
    if task.cancelled():
        return
    error = task.exception()
    done = (
        isinstance(error, UnknownOutcomeError) if error is not None else task.result() is not None
    )
    if done and undo is not None:
        await quietly(undo)


async def quietly(undo: Callable[[], Awaitable[object]]) -> bool:
    """Do `undo`; whether it was done, and not refused by the database or left without an answer."""
    try:
        await undo()
    except StoreError:
        return False
    return True
