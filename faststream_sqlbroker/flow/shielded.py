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
on in the background.
"""


class ShieldedCalls:
    """Database calls that go on after their caller was cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(
        self, work: Coroutine[Any, Any, T], undo: Callable[[], Awaitable[object]] | None = None
    ) -> T:
        """Run `work` to the end, even if the caller is cancelled.

        A cancelled caller never gets the result, for example a lease, so `undo` gives it back. It
        is not called if `work` had no effect: it returned None, or failed with an error other than
        `UnknownOutcomeError`. Database errors of `undo` are dropped: leases expire by themselves.
        """
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise  # with the event loop
            remaining_work = asyncio.ensure_future(_finish(task, undo))
            # asyncio refers to tasks weakly: the set keeps this one until its end.
            self._tasks.add(remaining_work)
            remaining_work.add_done_callback(self._tasks.discard)
            await wait_through_cancel(remaining_work, SHIELDED_TIMEOUT)
            raise

    async def close(self) -> None:
        """Wait for remaining calls, for `SHIELDED_TIMEOUT` seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SHIELDED_TIMEOUT)


async def wait_through_cancel(task: "asyncio.Task[Any]", seconds: float) -> None:
    """Wait for `task` for up to `seconds`, even if the caller is cancelled during the wait.

    The cancellation is swallowed here, so the caller must raise it, or end, afterwards.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while not task.done() and (remaining := deadline - clock()) > 0:
        try:
            await asyncio.wait((task,), timeout=remaining)
        except asyncio.CancelledError:
            continue


async def _finish(task: "asyncio.Task[Any]", undo: Callable[[], Awaitable[object]] | None) -> None:
    """Wait for the end of `task`, whose caller was cancelled, and undo the effect, if any.

    After an `UnknownOutcomeError`, a COMMIT without an answer, there may be an effect. A result of
    None means that there is none: for example, a claim found no message.
    """
    await asyncio.wait((task,))
    if task.cancelled():
        return
    error = task.exception()
    has_effect = (
        isinstance(error, UnknownOutcomeError) if error is not None else task.result() is not None
    )
    if has_effect and undo is not None:
        await try_undo(undo)


async def try_undo(undo: Callable[[], Awaitable[object]]) -> bool:
    """Call `undo`; return False if the database has refused or did not answer.

    That is no error for the caller: a lease that is not given back expires.
    """
    try:
        await undo()
    except StoreError:
        return False
    return True
