"""Call assertions of handlers and publishers under a test broker, with the fields of `publish`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypedDict

from typing_extensions import Unpack, override

from faststream_sqlbroker.adapter.testing import (
    BrokerFields,
    CallAssertions,
    ExpectedCall,
    HandlerCallWrapper,
)
from faststream_sqlbroker.adapter.values import EMPTY, P_HandlerParams, T_HandlerReturn
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.times import delay_seconds
from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from faststream.message import StreamMessage


class ExpectedMessage(TypedDict, total=False):
    """Fields that the message of a call is compared by."""

    headers: Any
    """Headers that the message has, perhaps among others."""
    correlation_id: Any
    """Its correlation id."""
    reply_to: Any
    """The queue for its answer."""
    content_type: Any
    """Its content type."""
    path: Any
    """Always {}: queues have no templates."""
    context: Mapping[str, Any]
    """Names of FastStream's context with their values."""
    queue: Any
    """Its full name."""
    key: Any
    """Its key; None: it has none."""
    priority: Any
    """Its priority."""
    delay: Any
    """The delay that it was published with: seconds, a timedelta or text like "5m"."""
    attempt: Any
    """The number of the attempt, from 1."""


class SqlCallAssertions(CallAssertions):
    """FastStream's, and with `queue`, `key`, `priority`, `delay` and `attempt`."""

    __slots__ = ()

    @override
    async def assert_called_once_with(
        self, body: Any = EMPTY, /, **expected: Unpack[ExpectedMessage]
    ) -> None:
        """Assert that there was a single call, with this message; what is left out is not compared.

        Args:
            body: A dict, a model or a matcher; it goes through the codec.
            expected: See `ExpectedMessage`.

        Raises:
            AssertionError: it was not; the text names all differences, and what waits.
            SetupError: it is not under a test broker, or the call was a batch and more than `body`
                is given.
        """
        with naming_what_waits(self._recorder.mock):
            await self._assert_called_once_with(_call(body, expected))

    @override
    async def assert_called_with(
        self, body: Any = EMPTY, /, **expected: Unpack[ExpectedMessage]
    ) -> None:
        """Assert that the last call was with this message; see `assert_called_once_with`."""
        with naming_what_waits(self._recorder.mock):
            await self._assert_called_with(_call(body, expected))

    @override
    async def assert_any_call(
        self, body: Any = EMPTY, /, **expected: Unpack[ExpectedMessage]
    ) -> None:
        """Assert that any call was with this message; see `assert_called_once_with`."""
        with naming_what_waits(self._recorder.mock):
            await self._assert_any_call(_call(body, expected))


@contextmanager
def naming_what_waits(mock: Any) -> Iterator[None]:
    """Add what waits to an AssertionError, once, if `mock` can tell it."""
    try:
        yield
    except AssertionError as error:
        what_waits: Callable[[], str] | None = mock.__dict__.get("what_waits")
        text = "" if what_waits is None else what_waits()
        if not text or text in str(error):
            raise
        raise AssertionError(f"{error}\n{text}") from None


class SqlHandlerCallWrapper(
    SqlCallAssertions, HandlerCallWrapper[P_HandlerParams, T_HandlerReturn]
):
    """A handler, whose calls a test can assert with the fields of this broker."""

    __slots__ = ()

    @override
    def __call__(
        self, *args: P_HandlerParams.args, **kwargs: P_HandlerParams.kwargs
    ) -> T_HandlerReturn:
        """Call the handler as written, not as adapted by subscribers."""
        return self._declared_call(*args, **kwargs)


def _call(body: Any, expected: ExpectedMessage) -> ExpectedCall:
    given: dict[str, Any] = {n: value for n, value in expected.items() if value is not EMPTY}
    everyones = {name: given.pop(name, EMPTY) for name in _EVERYONES}
    if unknown := given.keys() - ExpectedMessage.__annotations__:
        known = ", ".join(ExpectedMessage.__annotations__)
        raise TypeError(f"a call is not compared by {min(unknown)!r}, but by {known}")
    if isinstance(delay := given.get("delay"), int | float | str | timedelta):
        given["delay"] = delay_seconds(delay)
    return ExpectedCall(body=body, **everyones, broker_fields=BrokerFields(given, _read))


_EVERYONES = "headers", "correlation_id", "reply_to", "content_type", "path", "context"
"""What can be expected with any broker."""


def _read(name: str, message: "StreamMessage[Any]") -> Any:
    row = message.raw_message
    if not isinstance(row, ClaimedMessage):
        raise SetupError(
            f"{name!r} is a field of this broker's messages, and this "
            f"{type(message).__name__} is none of them"
        )
    if name == "attempt":
        return row.attempts_count + 1
    if name == "delay":
        # A retry has another due time.
        waited = max(0.0, (row.next_attempt_at - row.created_at).total_seconds())
        return waited if not row.attempts_count else None
    return getattr(row, name)
