"""Assertions about the calls of handlers and publishers under a test broker."""

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
from faststream_sqlbroker.core.times import parse_delay
from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from faststream.message import StreamMessage


class ExpectedMessage(TypedDict, total=False):
    """Expected fields of the message of a call; omitted fields are not compared."""

    headers: Any
    """Headers that the message must have, possibly among others."""
    correlation_id: Any
    """The correlation id."""
    reply_to: Any
    """The queue for the answer."""
    content_type: Any
    """The content type."""
    path: Any
    """Always {}, because queue names have no path templates."""
    context: Mapping[str, Any]
    """Names in FastStream's context and their values."""
    queue: Any
    """The full name of the queue."""
    key: Any
    """The key; None if the message has none."""
    priority: Any
    """The priority."""
    delay: Any
    """The delay of the publish: seconds, a timedelta or text like "5m"."""
    attempt: Any
    """The number of the attempt, starting at 1."""


class SqlCallAssertions(CallAssertions):
    """FastStream's call assertions with the fields of this broker.

    These are `queue`, `key`, `priority`, `delay` and `attempt`.
    """

    __slots__ = ()

    @override
    async def assert_called_once_with(
        self, body: Any = EMPTY, /, **expected: Unpack[ExpectedMessage]
    ) -> None:
        """Assert that there was a single call, with this message.

        Args:
            body: A dict, a model or a matcher, encoded by the codec before the comparison.
            expected: See `ExpectedMessage`.

        Raises:
            AssertionError: there was another call or none. The text lists all differences and the
                waiting messages.
            SetupError: the broker is not under test, or the call was a batch and more than `body`
                was passed.
        """
        with add_waiting_messages(self._recorder.mock):
            await self._assert_called_once_with(_make_expected_call(body, expected))

    @override
    async def assert_called_with(
        self, body: Any = EMPTY, /, **expected: Unpack[ExpectedMessage]
    ) -> None:
        """Assert that the last call was with this message; see `assert_called_once_with`."""
        with add_waiting_messages(self._recorder.mock):
            await self._assert_called_with(_make_expected_call(body, expected))

    @override
    async def assert_any_call(
        self, body: Any = EMPTY, /, **expected: Unpack[ExpectedMessage]
    ) -> None:
        """Assert that any of the calls was with this message; see `assert_called_once_with`."""
        with add_waiting_messages(self._recorder.mock):
            await self._assert_any_call(_make_expected_call(body, expected))


@contextmanager
def add_waiting_messages(mock: Any) -> Iterator[None]:
    """Append the waiting messages to an AssertionError once, if `mock` can list messages.

    A message that still waits in its queue often explains why a test's handler was not called.
    """
    try:
        yield
    except AssertionError as error:
        describe_waiting: Callable[[], str] | None = mock.__dict__.get("what_waits")
        text = "" if describe_waiting is None else describe_waiting()
        if not text or text in str(error):
            raise
        raise AssertionError(f"{error}\n{text}") from None


class SqlHandlerCallWrapper(
    SqlCallAssertions, HandlerCallWrapper[P_HandlerParams, T_HandlerReturn]
):
    """A handler whose calls can be asserted in tests with the fields of this broker."""

    __slots__ = ()

    @override
    def __call__(
        self, *args: P_HandlerParams.args, **kwargs: P_HandlerParams.kwargs
    ) -> T_HandlerReturn:
        """Call the original handler, without the adaptation by subscribers."""
        return self._declared_call(*args, **kwargs)


def _make_expected_call(body: Any, expected: ExpectedMessage) -> ExpectedCall:
    """Build FastStream's expected call; this broker's fields are compared by `_read_field`.

    EMPTY marks a field that the test does not compare.
    """
    fields: dict[str, Any] = {n: value for n, value in expected.items() if value is not EMPTY}
    common_fields = {name: fields.pop(name, EMPTY) for name in _COMMON_FIELDS}
    if unknown := fields.keys() - ExpectedMessage.__annotations__:
        allowed = ", ".join(ExpectedMessage.__annotations__)
        raise TypeError(f"calls cannot be compared by {min(unknown)!r}: use {allowed}")
    if isinstance(delay := fields.get("delay"), int | float | str | timedelta):
        fields["delay"] = parse_delay(delay)
    return ExpectedCall(body=body, **common_fields, broker_fields=BrokerFields(fields, _read_field))


_COMMON_FIELDS = "headers", "correlation_id", "reply_to", "content_type", "path", "context"
"""Fields that FastStream compares with any broker."""


def _read_field(name: str, message: "StreamMessage[Any]") -> Any:
    """Return a field of a received message, for the comparison with the expected value.

    `delay` is None for a retry, whose due time no longer shows the delay of its publish.
    """
    row = message.raw_message
    if not isinstance(row, ClaimedMessage):
        raise SetupError(
            f"{name!r} is a field of this broker's messages, which {type(message).__name__} does "
            "not have"
        )
    if name == "attempt":
        return row.attempts_count + 1
    if name == "delay":
        # A retry has another due time.
        delay = max(0.0, (row.next_attempt_at - row.created_at).total_seconds())
        return delay if not row.attempts_count else None
    return getattr(row, name)
