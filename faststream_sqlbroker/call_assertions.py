"""Call assertions of handlers and publishers under a test broker, with the fields of `publish`."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from typing_extensions import override

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

Describe = Callable[[], str]


class SqlCallAssertions(CallAssertions):
    """As every broker's, and with `queue`, `key`, `priority`, `delay` and `attempt`."""

    __slots__ = ()

    async def assert_called_once_with(
        self,
        body: Any = EMPTY,
        /,
        *,
        headers: Any = EMPTY,
        correlation_id: Any = EMPTY,
        reply_to: Any = EMPTY,
        content_type: Any = EMPTY,
        path: Any = EMPTY,
        context: Mapping[str, Any] = EMPTY,
        queue: Any = EMPTY,
        key: Any = EMPTY,
        priority: Any = EMPTY,
        delay: Any = EMPTY,
        attempt: Any = EMPTY,
    ) -> None:
        """Assert that it was called once, with this message; what is left out is not compared.

        Args:
            body: A dict, a model or a matcher; it goes through the codec.
            headers: Headers that the message has, perhaps among others.
            correlation_id: Its correlation id.
            reply_to: The queue for its answer.
            content_type: Its content type.
            path: Always {}: queues have no templates.
            context: Names of FastStream's context with their values.
            queue: Its full name.
            key: Its key; None: it has none.
            priority: Its priority.
            delay: The delay that it was published with: seconds, a timedelta or text like "5m".
            attempt: The number of the attempt, from 1.

        Raises:
            AssertionError: it was not; the text names all differences, and what waits.
            SetupError: it is not under a test broker, or the call was a batch and more than `body`
                is given.
        """
        fields = _fields(queue=queue, key=key, priority=priority, delay=delay, attempt=attempt)
        await self._assert_called_once_with(
            ExpectedCall(
                body=body,
                headers=headers,
                correlation_id=correlation_id,
                reply_to=reply_to,
                content_type=content_type,
                path=path,
                context=context,
                broker_fields=fields,
            )
        )

    async def assert_called_with(
        self,
        body: Any = EMPTY,
        /,
        *,
        headers: Any = EMPTY,
        correlation_id: Any = EMPTY,
        reply_to: Any = EMPTY,
        content_type: Any = EMPTY,
        path: Any = EMPTY,
        context: Mapping[str, Any] = EMPTY,
        queue: Any = EMPTY,
        key: Any = EMPTY,
        priority: Any = EMPTY,
        delay: Any = EMPTY,
        attempt: Any = EMPTY,
    ) -> None:
        """Assert that its last call was with this message; see `assert_called_once_with`."""
        fields = _fields(queue=queue, key=key, priority=priority, delay=delay, attempt=attempt)
        await self._assert_called_with(
            ExpectedCall(
                body=body,
                headers=headers,
                correlation_id=correlation_id,
                reply_to=reply_to,
                content_type=content_type,
                path=path,
                context=context,
                broker_fields=fields,
            )
        )

    async def assert_any_call(
        self,
        body: Any = EMPTY,
        /,
        *,
        headers: Any = EMPTY,
        correlation_id: Any = EMPTY,
        reply_to: Any = EMPTY,
        content_type: Any = EMPTY,
        path: Any = EMPTY,
        context: Mapping[str, Any] = EMPTY,
        queue: Any = EMPTY,
        key: Any = EMPTY,
        priority: Any = EMPTY,
        delay: Any = EMPTY,
        attempt: Any = EMPTY,
    ) -> None:
        """Assert that one of its calls was with this message; see `assert_called_once_with`."""
        fields = _fields(queue=queue, key=key, priority=priority, delay=delay, attempt=attempt)
        await self._assert_any_call(
            ExpectedCall(
                body=body,
                headers=headers,
                correlation_id=correlation_id,
                reply_to=reply_to,
                content_type=content_type,
                path=path,
                context=context,
                broker_fields=fields,
            )
        )

    async def _assert_called_once_with(self, expected: ExpectedCall) -> None:
        try:
            await super()._assert_called_once_with(expected)
        except AssertionError as error:
            raise self._told(error) from None

    async def _assert_called_with(self, expected: ExpectedCall) -> None:
        try:
            await super()._assert_called_with(expected)
        except AssertionError as error:
            raise self._told(error) from None

    async def _assert_any_call(self, expected: ExpectedCall) -> None:
        try:
            await super()._assert_any_call(expected)
        except AssertionError as error:
            raise self._told(error) from None

    def _told(self, error: AssertionError) -> AssertionError:
        """`error`, and what waits, if the mock knows it."""
        what_waits: Describe | None = getattr(self._recorder.mock, "what_waits", None)
        text = what_waits() if callable(what_waits) else ""
        if not isinstance(text, str) or not text or text in str(error):
            return error
        return AssertionError(f"{error}\n{text}")


class SqlHandlerCallWrapper(
    SqlCallAssertions, HandlerCallWrapper[P_HandlerParams, T_HandlerReturn]
):
    """A handler, whose calls a test can assert with the fields of this broker."""

    __slots__ = ()

    @override
    def __call__(
        self, *args: P_HandlerParams.args, **kwargs: P_HandlerParams.kwargs
    ) -> T_HandlerReturn:
        """Call the handler as it was written, not as subscribers adapt it."""
        return self._declared_call(*args, **kwargs)


def _fields(**given: Any) -> BrokerFields:
    values = {name: value for name, value in given.items() if value is not EMPTY}
    delay = values.get("delay")
    if isinstance(delay, int | float | str | timedelta):
        values["delay"] = delay_seconds(delay)
    return BrokerFields(values, _read)


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
