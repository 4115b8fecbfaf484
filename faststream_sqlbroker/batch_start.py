"""Records whether the handler of a batch has started, and which messages kept it from starting.

One body that cannot be decoded, or that does not fit the handler's annotation, fails the call for
the whole batch before the handler's first line. The decoder and the validation record the error
here. The subscriber then delivers the batch again in parts.
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
        self.begun = False
        """The handler's first line was reached: from then on the batch is not split."""
        self.error: Exception | None = None
        """The error that kept the handler from starting, if a message may have caused it."""
        self.culprits: frozenset[int] = frozenset()
        """Positions in the batch of the messages that caused `error`; empty if not known."""


starting: ContextVar[BatchStart | None] = ContextVar("sqlbroker_batch_start", default=None)
"""The call that is under way in this context."""


def note_fault(error: Exception, culprits: Collection[int] = ()) -> None:
    """Record that messages of the batch caused `error`.

    Outside of a batch call, and once the handler has started, this does nothing.

    Args:
        error: What kept the handler from starting.
        culprits: Positions in the batch of the messages that caused it; empty if not known.
    """
    start = starting.get()
    if start is not None and not start.begun:
        start.error = error
        if culprits:
            start.culprits = frozenset(culprits)


def marking_start(handler: Callable[..., Any]) -> Callable[..., Any]:
    """`handler`, wrapped to record that its first line was reached."""
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
    """Whether `handler` was made by `marking_start`."""
    return bool(getattr(handler, _MARKS, False))


def _begin() -> None:
    if (start := starting.get()) is not None:
        start.begun = True
