"""FastStream's spans of each publish and each run of a handler, for this broker.

The attributes have the names of OpenTelemetry's semantic conventions for messaging.
"""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from faststream.opentelemetry import TelemetryMiddleware, TelemetrySettingsProvider
from faststream.opentelemetry.middleware import BaseTelemetryMiddleware
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from faststream_sqlbroker.core.rows import ClaimedMessage, format_row_ids
from faststream_sqlbroker.parser import CORRELATION_ID
from faststream_sqlbroker.response import SqlBrokerPublishCommand

if TYPE_CHECKING:
    from faststream import ContextRepo, PublishCommand, StreamMessage
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.trace import TracerProvider


SYSTEM = "sqlbroker"
MESSAGING_SYSTEM = "messaging.system"
DESTINATION = "messaging.destination.name"
DESTINATION_PUBLISH = "messaging.destination_publish.name"
MESSAGE_ID = "messaging.message.id"
CONVERSATION_ID = "messaging.message.conversation_id"
BODY_SIZE = "messaging.message.body.size"
OLD_BODY_SIZE = "messaging.message.payload_size_bytes"
"""The name before version 1.22 of the conventions, still used by FastStream's other brokers."""
BATCH_COUNT = "messaging.batch.message_count"
KEY = "messaging.sqlbroker.message.key"
DELIVERY = "messaging.sqlbroker.message.delivery"
"""The number of the delivery, starting at 1."""
Raw = ClaimedMessage | tuple[ClaimedMessage, ...]
"""The raw message of a subscriber: a row, or the rows of a batch."""


class SqlBrokerTelemetrySettingsProvider(TelemetrySettingsProvider[Any, SqlBrokerPublishCommand]):
    """Reads the attributes of a message or a batch; stateless, so a single instance is shared."""

    __slots__ = ()
    messaging_system = SYSTEM

    def get_publish_attrs_from_cmd(self, cmd: SqlBrokerPublishCommand) -> dict[str, Any]:
        """Return queue, correlation id and key. A relay's command belongs to another broker."""
        is_own_command = isinstance(cmd, SqlBrokerPublishCommand)
        attributes: dict[str, Any] = {
            MESSAGING_SYSTEM: SYSTEM if is_own_command else _get_system(cmd),
            DESTINATION: cmd.destination,
        }
        if cmd.correlation_id is not None:
            # Reading the id creates and stores it. The links of a batch distinguish publishes by
            # it.
            attributes[CONVERSATION_ID] = cmd.correlation_id
        if is_own_command and (key := cmd.options.get("key")) is not None:
            attributes[KEY] = key
        return attributes

    def get_publish_destination_name(self, cmd: SqlBrokerPublishCommand) -> str:
        """Return the queue."""
        return cmd.destination

    def get_consume_attrs_from_message(self, msg: "StreamMessage[Raw]") -> dict[str, Any]:
        """Return ids, queue, body size, number of the delivery, and key.

        For a batch: ids and queue of the first message, the total size, and the number of messages.
        """
        raw = msg.raw_message
        rows = raw if isinstance(raw, tuple) else (raw,)
        first = rows[0]
        size = sum([len(row.payload) for row in rows])
        attributes: dict[str, Any] = {
            MESSAGING_SYSTEM: SYSTEM,
            DESTINATION: first.queue,
            DESTINATION_PUBLISH: first.queue,
            # As the span of the publish, which does not know the time in `message_id`.
            MESSAGE_ID: format_row_ids(raw),
            CONVERSATION_ID: msg.correlation_id,
            BODY_SIZE: size,
            OLD_BODY_SIZE: size,
        }
        if rows is raw:
            return attributes | {BATCH_COUNT: len(rows)}
        attributes[DELIVERY] = first.deliveries_count
        if first.key is not None:
            attributes[KEY] = first.key
        return attributes

    def get_consume_destination_name(self, msg: "StreamMessage[Raw]") -> str:
        """Return the queue; for a batch, the queue of the first message."""
        raw = msg.raw_message
        return (raw[0] if isinstance(raw, tuple) else raw).queue


def _get_system(cmd: "PublishCommand") -> str:
    """Return the conventions' name of the broker that a command of FastStream publishes to."""
    package = type(cmd).__module__.removeprefix("faststream.").partition(".")[0]
    return {"confluent": "kafka", "rabbit": "rabbitmq"}.get(package, package)


_PROVIDER = SqlBrokerTelemetrySettingsProvider()
_PROPAGATOR = TraceContextTextMapPropagator()
TRACE_HEADERS = frozenset(_PROPAGATOR.fields)
"""Headers that carry the trace of a message's publish."""
READ_HEADERS = (*sorted(TRACE_HEADERS), "baggage", CORRELATION_ID)
"""All headers that are read here."""
REPLAY = {"messaging.sqlbroker.link": "replay"}
"""Attributes of the link from the run of a replayed message to its first publish."""


class SqlBrokerTelemetryMiddleware(TelemetryMiddleware[SqlBrokerPublishCommand]):
    """Traces each publish and each run of a handler: `SqlBroker(middlewares=[…])`.

    The headers of a message carry the trace from the publish through the row to the handler, and on
    to the messages that the handler publishes. A move to another queue and a retry continue the
    trace. A message published without a correlation id gets one.

    The run of a batch, or of a message of `publish_batch`, has its own trace with links to the
    traces of the publishes. So does the run of a message that was published again (`republish`, a
    replay from the archive), because its first trace may have ended long ago.
    """

    def __init__(
        self,
        *,
        tracer_provider: "TracerProvider | None" = None,
        meter_provider: "MeterProvider | None" = None,
        meter: "Meter | None" = None,
        include_messages_counters: bool = True,
    ) -> None:
        """Create the middleware.

        Args:
            tracer_provider: Provider of the tracer; default the global one.
            meter_provider: Provider of the meter for durations of publishes and runs; default the
                global one.
            meter: A meter to use instead of a provider.
            include_messages_counters: Also count messages.
        """
        super().__init__(
            settings_provider_factory=lambda _raw: _PROVIDER,
            tracer_provider=tracer_provider,
            meter_provider=meter_provider,
            meter=meter,
            include_messages_counters=include_messages_counters,
        )

    def __call__(
        self, msg: Any | None, /, *, context: "ContextRepo"
    ) -> BaseTelemetryMiddleware[SqlBrokerPublishCommand]:
        """Create the middleware of a message, or of a publish if `msg` is None."""
        return _MessageTelemetry(
            msg,
            tracer=self._tracer,
            metrics_container=self._metrics,
            settings_provider_factory=self._settings_provider_factory,
            context=context,
        )


class _MessageTelemetry(BaseTelemetryMiddleware[SqlBrokerPublishCommand]):
    """The middleware of a message or a publish."""

    async def publish_scope(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: SqlBrokerPublishCommand
    ) -> Any:
        """Trace a publish, with the id of the new row."""

        async def insert(cmd: SqlBrokerPublishCommand) -> Any:
            result = await call_next(cmd)
            if isinstance(result, int):
                trace.get_current_span().set_attribute(MESSAGE_ID, str(result))
            return result

        parent = _extract_parent(msg.headers)
        if parent is None:
            return await super().publish_scope(insert, msg)
        token = context_api.attach(parent)
        try:
            return await super().publish_scope(insert, msg)
        finally:
            context_api.detach(token)

    async def consume_scope(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: "StreamMessage[Any]"
    ) -> Any:
        """Trace the run of a handler."""
        if not _is_readable(msg.headers):
            msg.headers = _remove_trace_headers(msg.headers)
        raw = msg.raw_message
        if isinstance(raw, tuple):
            return await self._consume_batch(call_next, msg)
        if isinstance(raw, ClaimedMessage) and raw.publish_count > 1:
            return await self._consume_replay(call_next, msg)
        return await super().consume_scope(call_next, msg)

    async def _consume_batch(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: "StreamMessage[Any]"
    ) -> Any:
        """Trace a batch, with a link for each message.

        FastStream creates one link per correlation id, and none for a message without one.
        """
        batch_headers = msg.batch_headers
        msg.batch_headers = [
            {
                CORRELATION_ID: f"row {n}",
                **(headers if _is_readable(headers) else _remove_trace_headers(headers)),
            }
            for n, headers in enumerate(batch_headers)
        ]

        async def handle(message: "StreamMessage[Any]") -> Any:
            message.batch_headers = batch_headers
            return await call_next(message)

        return await super().consume_scope(handle, msg)

    async def _consume_replay(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: "StreamMessage[Any]"
    ) -> Any:
        """Start a new trace, with a link to the trace of the first publish."""
        headers = msg.headers
        first_publish = _extract_publish_span(headers)
        msg.headers = _remove_trace_headers(headers)

        async def handle(message: "StreamMessage[Any]") -> Any:
            message.headers = headers
            if first_publish is not None:
                trace.get_current_span().add_link(first_publish, REPLAY)
            return await call_next(message)

        return await super().consume_scope(handle, msg)

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool | None:
        """End the span of the run."""
        # Workers handle all messages in one context, so anything not reset here would stay.
        self._scope_tokens_stack.close()
        return await super().after_processed(exc_type, exc_val, exc_tb)


def _is_readable(headers: dict[str, Any]) -> bool:
    """Return True if all trace headers are text; another program may have stored other values."""
    return all(isinstance(headers.get(name, ""), str) for name in READ_HEADERS)


def _remove_trace_headers(headers: dict[str, Any]) -> dict[str, Any]:
    """Return the headers without the parent trace, and without unreadable trace values."""
    return {
        name: value
        for name, value in headers.items()
        if name not in TRACE_HEADERS and (name not in READ_HEADERS or isinstance(value, str))
    }


def _extract_publish_span(headers: dict[str, Any]) -> SpanContext | None:
    span = trace.get_current_span(_PROPAGATOR.extract(headers)).get_span_context()
    return span if span.is_valid else None


def _extract_parent(headers: dict[str, Any]) -> Context | None:
    """Return the trace from the headers of a publish; a span that runs here takes precedence."""
    if trace.get_current_span().get_span_context().is_valid or not _is_readable(headers):
        return None
    return None if _extract_publish_span(headers) is None else _PROPAGATOR.extract(headers)
