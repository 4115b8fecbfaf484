"""Adapt handlers: run synchronous handlers in threads, and await awaitable results.

Generator functions are refused, because calling such a function runs none of its lines.
"""

import inspect
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, get_args, get_origin, get_type_hints

from fast_depends.utils import is_coroutine_callable

from faststream_sqlbroker.adapter.pipeline import HandlerCallWrapper
from faststream_sqlbroker.control_exceptions import Postpone
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.publish_on_ack import current_delivery_var
from faststream_sqlbroker.flow.threads import run_in_tracked_thread

MAX_AWAITS = 10
"""Maximum number of awaits of a result.

A decorator's coroutine may return another coroutine. An object that returns itself, such as a Redis
pipeline, would block the event loop forever without a limit.
"""
_IN_THREAD = "__sqlbroker_in_thread__"


def ensure_name(handler: Any) -> Any:
    """Return `handler` with a `__name__` for documents and logs, set if missing.

    FastStream reads the name of every handler. A callable object gets the name of its class, a
    `functools.partial` the name of its function.
    """
    if isinstance(handler, HandlerCallWrapper) or getattr(handler, "__name__", None):
        return handler
    function = handler
    while isinstance(function, partial):
        function = function.func
    try:
        handler.__name__ = getattr(function, "__name__", type(function).__name__)
    except AttributeError:  # it has __slots__
        return handler.__call__
    return handler


def _skip_if_late(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `handler`, which is synchronous, so that it does not run if its thread started too late.

    A busy thread pool may delay the start past the slot of a Throttle, the time at which this
    message may start, or past the lease.
    """

    @wraps(handler)
    def call(*args: Any, **kwargs: Any) -> Any:
        delivery = current_delivery_var.get()
        if delivery is not None and not delivery.try_start():
            # This ends the call only: a missed slot has already recorded Release, and after a lost
            # lease nothing is written.
            raise Postpone(0)
        return handler(*args, **kwargs)

    return call


def is_synchronous(handler: Callable[..., Any]) -> bool:
    """Return True if `handler`, adapted or not, is synchronous and so cannot be cancelled.

    An adapted handler is a coroutine function; its mark says that it runs in a thread.
    """
    return getattr(handler, _IN_THREAD, False) or not is_coroutine_callable(handler)


def check_not_generator(handler: Any) -> None:
    """Raise an error for a generator or async generator function.

    Raises:
        SetupError: `handler` is such a function, also inside of `functools.partial` or as
            `__call__`.
    """
    function = _get_function(handler)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise SetupError(_format_generator_error(handler))


def adapt_handler(handler: Callable[..., Any], *, validates_result: bool) -> Callable[..., Any]:
    """Convert `handler` to a coroutine function that awaits an awaitable result.

    Called once for each declared handler. The result may be a coroutine, as of a decorated async
    function. A synchronous handler runs in a thread.

    Args:
        handler: The application's function or object.
        validates_result: True if a result that does not fit the annotation is an error. An async
            handler that returns None is then returned unchanged.
    """
    is_async = is_coroutine_callable(handler)
    returns = _get_return_type(handler)
    if is_async and validates_result and returns in (None, type(None)):
        return handler
    run = handler if is_async else partial(run_in_tracked_thread, _skip_if_late(handler))

    @wraps(handler)
    async def call(*args: Any, **kwargs: Any) -> Any:
        result = await run(*args, **kwargs)
        for _ in range(MAX_AWAITS):
            if result is None or not inspect.isawaitable(result):
                break
            result = await result
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            _check_not_unrun(handler, result)
        return result

    setattr(call, _IN_THREAD, not is_async)
    if _has_awaitable(returns):
        # The validation applies to the awaited value.
        is_awaitable = _has_awaitable(get_origin(returns) or returns)
        result_type = (get_args(returns) or (Any,))[-1] if is_awaitable else Any
        signature = inspect.signature(handler)
        call.__signature__ = signature.replace(return_annotation=result_type)  # type: ignore[attr-defined]
    return call


def _has_awaitable(annotation: Any) -> bool:
    """Return True if `annotation` is or contains an awaitable type, as in `Awaitable[int] | None`.

    The result of such a handler must be awaited before it is validated.
    """
    origin = get_origin(annotation) or annotation
    if isinstance(origin, type) and issubclass(origin, Awaitable):
        return True
    return any(_has_awaitable(part) for part in get_args(annotation))


def _get_return_type(handler: Any) -> Any:
    """Return the annotation of the result; Any if missing or unreadable."""
    try:
        return get_type_hints(_get_function(handler), include_extras=True).get("return", Any)
    except Exception:  # noqa: BLE001 - names that only the call defines
        return Any


def _get_function(handler: Any) -> Any:
    """Return the function behind wrappers, partials and callable objects."""
    while True:
        # Each kind of wrapper is removed in turn; they may be nested.
        if isinstance(handler, HandlerCallWrapper):
            handler = handler._declared_call  # noqa: SLF001 - FastStream's
        elif isinstance(handler, partial):
            handler = handler.func
        elif inspect.isroutine(handler) or inspect.isclass(handler):
            return handler
        else:
            return type(handler).__call__ if callable(handler) else handler


def _check_not_unrun(handler: Any, result: Any) -> None:
    """Refuse the generator of the handler itself, whose body has not run.

    A generator that the handler created for a publisher belongs to another function and is
    accepted.
    """
    # A generator and its function have the same code object.
    code = getattr(inspect.unwrap(_get_function(handler)), "__code__", None)
    if code is not None and code in (
        getattr(result, "gi_code", None),
        getattr(result, "ag_code", None),
    ):
        raise TypeError(_format_generator_error(handler))


def _format_generator_error(handler: Any) -> str:
    """Return the error text for a generator function used as a handler."""
    name = getattr(_get_function(handler), "__qualname__", repr(handler))
    return (
        f"the handler {name!r} is a generator function, whose body would never run: use a function "
        "or an async function without yield, and publish each result"
    )
