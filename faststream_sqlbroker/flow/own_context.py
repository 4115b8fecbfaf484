"""Runs each call of a handler in a context of its own: what it sets in context variables is not
there for the next message.

One task runs many messages, so they would share its context. A task for each costs far more than a
copy of the context. `asyncio.current_task()` stays the worker's.

As the handler's coroutine is run here, it can be closed here, if it goes on after its cancellation.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import copy_context
from typing import Any
from weakref import WeakSet

MAX_CLOSES = 20
"""A coroutine may wait again when it is closed, once for each `async with` and `finally`."""
_given_up: "WeakSet[asyncio.Task[Any] | None]" = WeakSet()


class Suspended:
    """A coroutine that waits for its first future, and goes on in its own context when it is
    awaited.
    """

    __slots__ = ("_coroutine", "_future", "_run")

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], run: Callable[..., Any], future: Any
    ) -> None:
        self._coroutine = coroutine
        self._run = run
        self._future = future

    def __await__(self) -> Generator[Any, Any, Any]:
        run = self._run
        coroutine = self._coroutine
        future = self._future
        try:
            while True:
                try:
                    sent = yield future
                except GeneratorExit:
                    run(coroutine.close)
                    raise
                except BaseException as error:  # noqa: BLE001 - it is the coroutine's
                    if asyncio.current_task() in _given_up:
                        break
                    future = run(coroutine.throw, error)
                else:
                    future = run(coroutine.send, sent)
        except StopIteration as ended:
            return ended.value
        run(_close, coroutine)
        raise asyncio.CancelledError


def begin(coroutine: Coroutine[Any, Any, Any]) -> Suspended | None:
    """Run `coroutine` in a copy of the running context until it suspends; None if it has ended.

    The caller awaits what is returned. A handler that never suspends costs no more than the copy.
    """
    context = copy_context()
    try:
        future = context.run(coroutine.send, None)
    except StopIteration:
        return None
    return Suspended(coroutine, context.run, future)


async def closable(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await `coroutine` in the running context, so that `give_up` closes it."""
    try:
        future = coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    return await Suspended(coroutine, _call, future)


def give_up(task: "asyncio.Task[Any]") -> None:
    """Cancel `task` if it still runs, but close what it awaits as `Suspended`: GeneratorExit is
    raised there.
    """
    _given_up.add(task)
    task.cancel()


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _close(coroutine: Coroutine[Any, Any, Any]) -> None:
    for _ in range(MAX_CLOSES):
        with suppress(Exception):  # it waits again, or fails
            coroutine.close()
            break
