"""Record whether the handler of a batch has started, and which messages prevented the start.

A single body that cannot be decoded, or that does not fit the handler's annotation, fails the call
for the whole batch before the first line of the handler. The decoder and the validation record the
error here; the subscriber then redelivers the batch in parts.
"""

from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import wraps
from typing import Any

from fast_depends.utils import is_coroutine_callable

_MARKS = "__sqlbroker_marks_start__"


class BatchStart:
    """The state of a batch handler's call, beginning with the parser."""

    __slots__ = ("culprits", "error", "started")

    def __init__(self) -> None:
        self.started = False
        """True once the first line of the handler was reached; the batch is then not split."""
        self.error: Exception | None = None
        """The error that prevented the start, if a message may have caused it."""
        self.culprits: frozenset[int] = frozenset()
        """Positions in the batch of the messages that caused `error`; empty if unknown."""


current_batch_start: ContextVar[BatchStart | None] = ContextVar(
    "sqlbroker_batch_start", default=None
)
"""The batch call in progress in this context."""


def record_fault(error: Exception, culprits: Collection[int] = ()) -> None:
    """Record that messages of the batch caused `error`, which prevents the handler from starting.

    The batch is then delivered again in parts. Does nothing outside of a batch call, and once the
    handler has started.

    Args:
        error: The error that prevented the start.
        culprits: Positions in the batch of the messages that caused it; empty if unknown.
    """
    start = current_batch_start.get()
    if start is not None and not start.started:
        start.error = error
        if culprits:
            start.culprits = frozenset(culprits)


def wrap_to_mark_start(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `handler` to record that the handler has started.

    After an error, a batch whose handler has not started is delivered again in parts.
    """
    begin: Callable[..., Any]
    if is_coroutine_callable(handler):

        @wraps(handler)
        async def begin(*args: Any, **kwargs: Any) -> Any:
            _record_start()
            return await handler(*args, **kwargs)
    else:

        @wraps(handler)
        def begin(*args: Any, **kwargs: Any) -> Any:
            _record_start()
            return handler(*args, **kwargs)

    setattr(begin, _MARKS, True)
    return begin


def is_marking_start(handler: Callable[..., Any]) -> bool:
    """Return True if `handler` was wrapped by `wrap_to_mark_start`."""
    return bool(getattr(handler, _MARKS, False))


def _record_start() -> None:
    if (start := current_batch_start.get()) is not None:
        start.started = True
