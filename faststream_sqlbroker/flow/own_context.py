"""A context of its own for each handler call: context variables do not reach the next message.

One task runs many messages, so they would share its context. A task for each message costs far more
than a copy of the context. `asyncio.current_task()` stays the worker's.

Because this module runs the handler's coroutine, it can also close it, if the coroutine goes on
after its cancellation.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import copy_context
from typing import Any
from weakref import WeakSet

MAX_CLOSES = 20
"""Maximum tries to close a coroutine: it may wait again, once for each `async with` and `finally`.

"""
_abandoned_tasks: "WeakSet[asyncio.Task[Any] | None]" = WeakSet()


class SuspendedCoroutine:
    """A coroutine that waits for a future, and continues in a separate context when awaited."""

    __slots__ = ("_coroutine", "_future", "_run")

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], run: Callable[..., Any], future: Any
    ) -> None:
        self._coroutine = coroutine
        self._run = run
        self._future = future

    def __await__(self) -> Generator[Any, Any, Any]:
        """Drive the coroutine in a separate context; close the coroutine of an abandoned task.

        Like `yield from`, written out: each `send` and `throw` goes through `run`, which enters the
        context. A stop abandons a task whose handler goes on after its cancellation; the coroutine
        is then closed instead of receiving the error.
        """
        run = self._run
        coroutine = self._coroutine
        future = self._future
        try:
            while True:
                try:
                    value = yield future
                except GeneratorExit:
                    run(coroutine.close)
                    raise
                except BaseException as error:  # noqa: BLE001 - it is the coroutine's
                    if asyncio.current_task() in _abandoned_tasks:
                        break
                    future = run(coroutine.throw, error)
                else:
                    future = run(coroutine.send, value)
        except StopIteration as stop:
            return stop.value
        run(_close_coroutine, coroutine)
        raise asyncio.CancelledError


def start_coroutine(coroutine: Coroutine[Any, Any, Any]) -> SuspendedCoroutine | None:
    """Run `coroutine` in a copy of the context until it suspends; return None if it has ended.

    The caller awaits the result, which runs the rest. The copy keeps context variables that a
    handler sets from the next message, without a task for each message.
    """
    context = copy_context()
    try:
        future = context.run(coroutine.send, None)
    except StopIteration:
        return None
    return SuspendedCoroutine(coroutine, context.run, future)


async def run_closable(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await `coroutine` in the running context, so that `abandon_task` can close it.

    With a plain `await`, a coroutine that swallows its cancellation could not be ended.
    """
    try:
        future = coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    return await SuspendedCoroutine(coroutine, _call, future)


def abandon_task(task: "asyncio.Task[Any]") -> None:
    """Cancel `task` if still running, and close the awaited coroutine.

    Called at a stop for a task that goes on after its cancellation. If it awaits a
    `SuspendedCoroutine`, GeneratorExit is raised inside of it, which application code rarely
    catches.
    """
    _abandoned_tasks.add(task)
    task.cancel()


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _close_coroutine(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Close `coroutine`, repeatedly if `finally` blocks await or raise.

    An `await` during `close` raises RuntimeError, and the coroutine stays open for another try.
    """
    for _ in range(MAX_CLOSES):
        with suppress(Exception):  # it waits again, or fails
            coroutine.close()
            break
