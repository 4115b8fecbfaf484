"""Adapts handlers: synchronous ones run in threads, and what a handler returns is awaited.

A generator function is refused, because calling it runs none of its lines.
"""

import inspect
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, get_args, get_origin, get_type_hints

from fast_depends.utils import is_coroutine_callable

from faststream_sqlbroker.adapter.pipeline import HandlerCallWrapper
from faststream_sqlbroker.control_exceptions import Postpone
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.publish_on_ack import current_delivery
from faststream_sqlbroker.flow.threads import own_in_thread

MAX_AWAITS = 10
"""A decorator's coroutine may give another one. An object that gives itself, such as a pipeline of
Redis, would hold the event loop for ever without a limit."""
_IN_THREAD = "__sqlbroker_in_thread__"


def named(handler: Any) -> Any:
    """Return `handler`, with a `__name__` for documents and logs if it has none.

    A callable object gets that of its class, a `functools.partial` that of its function.
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


def _in_time(handler: Callable[..., Any]) -> Callable[..., Any]:
    """`handler`, unless its thread has come too late for the slot of a Throttle."""

    @wraps(handler)
    def call(*args: Any, **kwargs: Any) -> Any:
        here = current_delivery.get()
        if here is not None and not here.may_start():
            raise Postpone(0)  # the outcome is known: the message goes back
        return handler(*args, **kwargs)

    return call


def runs_in_thread(handler: Callable[..., Any]) -> bool:
    """Return whether `handler`, adapted or not, is synchronous: nothing can cancel it."""
    return getattr(handler, _IN_THREAD, False) or not is_coroutine_callable(handler)


def refuse_generator(handler: Any) -> None:
    """Refuse a generator or async generator function.

    Raises:
        SetupError: `handler` is one, also inside of `functools.partial`, or its `__call__` is.
    """
    function = _function_of(handler)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise SetupError(_refusal(handler))


def adapt(handler: Callable[..., Any], *, returns_are_checked: bool) -> Callable[..., Any]:
    """Make `handler` a coroutine function that awaits what `handler` returns.

    Args:
        handler: The application's function or object.
        returns_are_checked: Whether a result that does not fit the annotation is an error: then an
            async handler that returns None stays as it is.
    """
    in_loop = is_coroutine_callable(handler)
    returns = _return_type(handler)
    if in_loop and returns_are_checked and returns in (None, type(None)):
        return handler
    start = handler if in_loop else partial(own_in_thread, _in_time(handler))

    @wraps(handler)
    async def call(*args: Any, **kwargs: Any) -> Any:
        result = await start(*args, **kwargs)
        for _ in range(MAX_AWAITS):
            if result is None or not inspect.isawaitable(result):
                break
            result = await result
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            _refuse_unrun(handler, result)
        return result

    setattr(call, _IN_THREAD, not in_loop)
    if _names_awaitable(returns):
        # What is checked is the awaited value.
        is_one = _names_awaitable(get_origin(returns) or returns)
        awaited = (get_args(returns) or (Any,))[-1] if is_one else Any
        signature = inspect.signature(handler)
        call.__signature__ = signature.replace(return_annotation=awaited)  # type: ignore[attr-defined]
    return call


def _names_awaitable(annotation: Any) -> bool:
    """Return whether `annotation` is an awaitable type, or has one as a part."""
    origin = get_origin(annotation) or annotation
    if isinstance(origin, type) and issubclass(origin, Awaitable):
        return True
    return any(_names_awaitable(part) for part in get_args(annotation))


def _return_type(handler: Any) -> Any:
    """Return the annotation of the result; Any if it has none, or one that cannot be read."""
    try:
        return get_type_hints(_function_of(handler), include_extras=True).get("return", Any)
    except Exception:  # noqa: BLE001 - names that are known at the call only
        return Any


def _function_of(handler: Any) -> Any:
    """Return the function that a call of `handler` runs."""
    while True:
        if isinstance(handler, HandlerCallWrapper):
            handler = handler._declared_call  # noqa: SLF001 - FastStream's
        elif isinstance(handler, partial):
            handler = handler.func
        elif inspect.isroutine(handler) or inspect.isclass(handler):
            return handler
        else:
            return type(handler).__call__ if callable(handler) else handler


def _refuse_unrun(handler: Any, result: Any) -> None:
    """Fail for a decorated generator function, which has returned its generator `result`.

    A generator that the handler has made for a publisher is another one's.
    """
    code = getattr(inspect.unwrap(_function_of(handler)), "__code__", None)
    if code is not None and code in (
        getattr(result, "gi_code", None),
        getattr(result, "ag_code", None),
    ):
        raise TypeError(_refusal(handler))


def _refusal(handler: Any) -> str:
    name = getattr(_function_of(handler), "__qualname__", repr(handler))
    return (
        f"the handler {name!r} is a generator function, whose body would never run: use a function "
        "or an async function without yield, and publish each result"
    )
