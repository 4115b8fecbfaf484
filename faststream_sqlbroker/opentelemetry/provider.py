"""The attributes of spans: names of OpenTelemetry's semantic conventions for messaging."""

from typing import TYPE_CHECKING, Any

from faststream.opentelemetry import TelemetrySettingsProvider

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.response import SqlBrokerPublishCommand

if TYPE_CHECKING:
    from faststream.message import StreamMessage

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


class _OfPublish(TelemetrySettingsProvider[Any, SqlBrokerPublishCommand]):
    """What both kinds of messages have in common; it has no state, so one serves all."""

    __slots__ = ()
    messaging_system = SYSTEM

    def get_publish_attrs_from_cmd(self, cmd: SqlBrokerPublishCommand) -> dict[str, Any]:
        """Queue, correlation id and key."""
        attributes: dict[str, Any] = {
            MESSAGING_SYSTEM: SYSTEM,
            DESTINATION: cmd.destination,
        }
        if cmd.correlation_id is not None:
            attributes[CONVERSATION_ID] = cmd.correlation_id
        if (key := cmd.options.get("key")) is not None:
            attributes[KEY] = key
        return attributes

    def get_publish_destination_name(self, cmd: SqlBrokerPublishCommand) -> str:
        """The queue."""
        return cmd.destination


class SqlBrokerTelemetrySettingsProvider(_OfPublish):
    """Reads a message."""

    __slots__ = ()

    def get_consume_attrs_from_message(
        self, msg: "StreamMessage[ClaimedMessage]"
    ) -> dict[str, Any]:
        """Ids, queue, size, which delivery it is, and the key."""
        row = msg.raw_message
        size = len(row.payload)
        attributes: dict[str, Any] = {
            MESSAGING_SYSTEM: SYSTEM,
            DESTINATION: row.queue,
            DESTINATION_PUBLISH: row.queue,
            MESSAGE_ID: msg.message_id,
            CONVERSATION_ID: msg.correlation_id,
            BODY_SIZE: size,
            OLD_BODY_SIZE: size,
            DELIVERY: row.deliveries_count,
        }
        if row.key is not None:
            attributes[KEY] = row.key
        return attributes

    def get_consume_destination_name(self, msg: "StreamMessage[ClaimedMessage]") -> str:
        """The queue."""
        return msg.raw_message.queue


class BatchSqlBrokerTelemetrySettingsProvider(_OfPublish):
    """Reads the messages of a batch."""

    __slots__ = ()

    def get_consume_attrs_from_message(
        self, msg: "StreamMessage[tuple[ClaimedMessage, ...]]"
    ) -> dict[str, Any]:
        """Ids and queue of the first, the size of all, and how many there are."""
        rows = msg.raw_message
        size = sum([len(row.payload) for row in rows])
        queue = rows[0].queue
        return {
            MESSAGING_SYSTEM: SYSTEM,
            DESTINATION: queue,
            DESTINATION_PUBLISH: queue,
            MESSAGE_ID: msg.message_id,
            CONVERSATION_ID: msg.correlation_id,
            BODY_SIZE: size,
            OLD_BODY_SIZE: size,
            BATCH_COUNT: len(rows),
        }

    def get_consume_destination_name(self, msg: "StreamMessage[tuple[ClaimedMessage, ...]]") -> str:
        """The queue of the first."""
        return msg.raw_message[0].queue


_SINGLE = SqlBrokerTelemetrySettingsProvider()
_BATCH = BatchSqlBrokerTelemetrySettingsProvider()


def settings_provider(raw: Raw | None) -> TelemetrySettingsProvider[Any, SqlBrokerPublishCommand]:
    """What reads `raw`; None is a publish."""
    return _BATCH if isinstance(raw, tuple) else _SINGLE
