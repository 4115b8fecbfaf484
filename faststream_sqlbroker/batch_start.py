"""Whether the handler of a batch has started, and what of the batch kept it from starting.

One body that cannot be decoded, or does not fit the handler's annotation, fails the call for the
whole batch before the handler's first line. Whoever notices notes it here, and the subscriber hands
the batch out again in parts.
"""

from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import wraps
from typing import Any

from fast_depends.utils import is_coroutine_callable

_MARKS = "__sqlbroker_marks_start__"


class BatchStart:
    """One call of a batch handler, from its parser on."""

    __slots__ = ("begun", "culprits", "error")

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.begun = False
        """Whether the handler's first line was reached: from then on the batch is one."""
        self.error: Exception | None = None
        """What kept it from starting, if that may be a message's fault."""
        self.culprits: frozenset[int] = frozenset()
        """LoopSemaphore in the batch of the messages that are known to be at fault; none if it is
        not known."""


starting: ContextVar[BatchStart | None] = ContextVar("sqlbroker_batch_start", default=None)
"""The call that is being made."""


def note_fault(error: Exception, culprits: Collection[int] = ()) -> None:
    """A message of the batch is at fault for `error`; `culprits` are the places of those that are."""
    start = starting.get()
    if start is not None and not start.begun:
        start.error = error
        if culprits:
            start.culprits = frozenset(culprits)


def marking_start(handler: Callable[..., Any]) -> Callable[..., Any]:
    """`handler`, noting that it was started."""
    begin: Callable[..., Any]
    if is_coroutine_callable(handler):

        @wraps(handler)
        async def begin(*args: Any, **kwargs: Any) -> Any:
            _begin()
            return await handler(*args, **kwargs)
    else:

        @wraps(handler)
        def begin(*args: Any, **kwargs: Any) -> Any:
            _begin()
            return handler(*args, **kwargs)

    setattr(begin, _MARKS, True)
    return begin


def marks_start(handler: Callable[..., Any]) -> bool:
    """Whether `handler` is the work of `marking_start`."""
    return bool(getattr(handler, _MARKS, False))


def _begin() -> None:
    if (start := starting.get()) is not None:
        start.begun = True
