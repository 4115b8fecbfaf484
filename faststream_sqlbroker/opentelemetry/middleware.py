"""FastStream's spans of each publish and each run of a handler, for this broker; their attributes
have the names of OpenTelemetry's semantic conventions for messaging.
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

from faststream_sqlbroker.core.rows import ClaimedMessage
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
"""The name until version 1.22 of the conventions, which FastStream's other brokers use."""
BATCH_COUNT = "messaging.batch.message_count"
KEY = "messaging.sqlbroker.message.key"
DELIVERY = "messaging.sqlbroker.message.delivery"
"""Which delivery it is, from 1."""
Raw = ClaimedMessage | tuple[ClaimedMessage, ...]
"""What a subscriber is given: a row, or the rows of a batch."""


class SqlBrokerTelemetrySettingsProvider(TelemetrySettingsProvider[Any, SqlBrokerPublishCommand]):
    """Reads a message, or the messages of a batch; it has no state, so one serves all."""

    __slots__ = ()
    messaging_system = SYSTEM

    def get_publish_attrs_from_cmd(self, cmd: SqlBrokerPublishCommand) -> dict[str, Any]:
        """Queue, correlation id and key. A relay's command is one of the other broker."""
        ours = isinstance(cmd, SqlBrokerPublishCommand)
        attributes: dict[str, Any] = {
            MESSAGING_SYSTEM: SYSTEM if ours else _system_of(cmd),
            DESTINATION: cmd.destination,
        }
        if cmd.correlation_id is not None:
            # Read, it is made and stored: by it the links of a batch tell one publish from another.
            attributes[CONVERSATION_ID] = cmd.correlation_id
        if ours and (key := cmd.options.get("key")) is not None:
            attributes[KEY] = key
        return attributes

    def get_publish_destination_name(self, cmd: SqlBrokerPublishCommand) -> str:
        """The queue."""
        return cmd.destination

    def get_consume_attrs_from_message(self, msg: "StreamMessage[Raw]") -> dict[str, Any]:
        """Ids, queue, size, which delivery it is, and the key; of a batch ids and queue of the
        first, the size of all, and how many there are.
        """
        raw = msg.raw_message
        rows = raw if isinstance(raw, tuple) else (raw,)
        first = rows[0]
        size = sum([len(row.payload) for row in rows])
        attributes: dict[str, Any] = {
            MESSAGING_SYSTEM: SYSTEM,
            DESTINATION: first.queue,
            DESTINATION_PUBLISH: first.queue,
            MESSAGE_ID: msg.message_id,
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
        """The queue, of a batch that of the first."""
        raw = msg.raw_message
        return (raw[0] if isinstance(raw, tuple) else raw).queue


def _system_of(cmd: "PublishCommand") -> str:
    """The conventions' name of the broker to which a command of `faststream.kafka` and others
    publishes.
    """
    package = type(cmd).__module__.removeprefix("faststream.").partition(".")[0]
    return {"confluent": "kafka", "rabbit": "rabbitmq"}.get(package, package)


_PROVIDER = SqlBrokerTelemetrySettingsProvider()
_PROPAGATOR = TraceContextTextMapPropagator()
TRACE_HEADERS = frozenset(_PROPAGATOR.fields)
"""Where a message keeps the trace of its publish."""
READ_HEADERS = (*sorted(TRACE_HEADERS), "baggage", CORRELATION_ID)
"""All headers that are read here."""
REPLAY = {"messaging.sqlbroker.link": "replay"}
"""Attributes of the link from the run of a replayed message to its first publish."""


class SqlBrokerTelemetryMiddleware(TelemetryMiddleware[SqlBrokerPublishCommand]):
    """Traces each publish and each run of a handler: `SqlBroker(middlewares=[…])`.

    The headers of a message carry the trace, so it goes from the publish by the row to the handler
    and to what the handler publishes; a move to another queue and a retry go on in it. A message
    that is published without a correlation id is given one.

    The run of a batch, or of a message of `publish_batch`, has a trace of its own with links to
    those of the publishes. So has the run of a message that was published again (`republish`, a
    replay of the archive): its first trace may have ended long ago.
    """

    def __init__(
        self,
        *,
        tracer_provider: "TracerProvider | None" = None,
        meter_provider: "MeterProvider | None" = None,
        meter: "Meter | None" = None,
        include_messages_counters: bool = True,
    ) -> None:
        """Trace with `tracer_provider`.

        Args:
            tracer_provider: Default the global one.
            meter_provider: Of the durations of publishes and runs; default the global one.
            meter: A meter in its place.
            include_messages_counters: Whether messages are counted, too.
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
        """The middleware of one message, or (None) of one publish."""
        return _OneMessage(
            msg,
            tracer=self._tracer,
            metrics_container=self._metrics,
            settings_provider_factory=self._settings_provider_factory,
            context=context,
        )


class _OneMessage(BaseTelemetryMiddleware[SqlBrokerPublishCommand]):
    """Of one message or publish."""

    async def publish_scope(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: SqlBrokerPublishCommand
    ) -> Any:
        """Trace a publish, which learns the id of its row."""

        async def insert(cmd: SqlBrokerPublishCommand) -> Any:
            result = await call_next(cmd)
            if isinstance(result, int):
                trace.get_current_span().set_attribute(MESSAGE_ID, str(result))
            return result

        given = _given_trace(msg.headers)
        if given is None:
            return await super().publish_scope(insert, msg)
        token = context_api.attach(given)
        try:
            return await super().publish_scope(insert, msg)
        finally:
            context_api.detach(token)

    async def consume_scope(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: "StreamMessage[Any]"
    ) -> Any:
        """Trace the run of a handler."""
        if not _readable(msg.headers):
            msg.headers = _without_traces(msg.headers)
        raw = msg.raw_message
        if isinstance(raw, tuple):
            return await self._consume_batch(call_next, msg)
        if isinstance(raw, ClaimedMessage) and raw.publish_count > 1:
            return await self._consume_replay(call_next, msg)
        return await super().consume_scope(call_next, msg)

    async def _consume_batch(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: "StreamMessage[Any]"
    ) -> Any:
        """FastStream makes one link for each correlation id, none for a message without one."""
        given = msg.batch_headers
        msg.batch_headers = [
            {CORRELATION_ID: f"row {n}", **(each if _readable(each) else _without_traces(each))}
            for n, each in enumerate(given)
        ]

        async def handle(message: "StreamMessage[Any]") -> Any:
            message.batch_headers = given
            return await call_next(message)

        return await super().consume_scope(handle, msg)

    async def _consume_replay(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: "StreamMessage[Any]"
    ) -> Any:
        """Begin a trace, with a link to that of the first publish."""
        given = msg.headers
        published = _publish_of(given)
        msg.headers = _without_traces(given)

        async def handle(message: "StreamMessage[Any]") -> Any:
            message.headers = given
            if published is not None:
                trace.get_current_span().add_link(published, REPLAY)
            return await call_next(message)

        return await super().consume_scope(handle, msg)

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool | None:
        """End the span of the run."""
        # Workers handle message after message in one context: what is not taken back here stays.
        self._scope_tokens_stack.close()
        return await super().after_processed(exc_type, exc_val, exc_tb)


def _readable(headers: dict[str, Any]) -> bool:
    """Whether all headers that tell of traces are text: another program may have stored others."""
    return all(isinstance(headers.get(name, ""), str) for name in READ_HEADERS)


def _without_traces(headers: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in headers.items()
        if name not in TRACE_HEADERS and (name not in READ_HEADERS or isinstance(value, str))
    }


def _publish_of(headers: dict[str, Any]) -> SpanContext | None:
    span = trace.get_current_span(_PROPAGATOR.extract(headers)).get_span_context()
    return span if span.is_valid else None


def _given_trace(headers: dict[str, Any]) -> Context | None:
    """The trace that a publish brings in its headers; a span that runs here comes before it."""
    if trace.get_current_span().get_span_context().is_valid or not _readable(headers):
        return None
    return None if _publish_of(headers) is None else _PROPAGATOR.extract(headers)
