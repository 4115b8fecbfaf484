"""Runs each call of a handler in a context of its own: what it sets in context variables is not
there for the next message.

One task runs many messages, so they would share its context. A task for each costs far more than a
copy of the context. `asyncio.current_task()` stays the worker's.
"""

from collections.abc import Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any


class Suspended:
    """A coroutine that waits for its first future, and goes on in its own context when it is
    awaited.
    """

    __slots__ = ("_context", "_coroutine", "_future")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context: Context, future: Any) -> None:
        self._coroutine = coroutine
        self._context = context
        self._future = future

    def __await__(self) -> Generator[Any, Any, None]:
        run = self._context.run
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
                    future = run(coroutine.throw, error)
                else:
                    future = run(coroutine.send, sent)
        except StopIteration:
            return


def begin(coroutine: Coroutine[Any, Any, Any]) -> Suspended | None:
    """Run `coroutine` in a copy of the running context until it suspends; None if it has ended.

    The caller awaits what is returned. A handler that never suspends costs no more than the copy.
    """
    context = copy_context()
    try:
        future = context.run(coroutine.send, None)
    except StopIteration:
        return None
    return Suspended(coroutine, context, future)
