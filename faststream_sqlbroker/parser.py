"""A claimed row as FastStream's message. Foreign producers may store any JSON in the headers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from faststream.message import StreamMessage
from faststream.message import decode_message as decode_body

from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.message import SqlBrokerBatchMessage, SqlBrokerMessage

if TYPE_CHECKING:
    from faststream._internal.basic_types import DecodedMessage

CONTENT_TYPE = "content-type"
CORRELATION_ID = "correlation_id"
REPLY_TO = "reply_to"


class SqlBrokerParser:
    """FastStream's parser and decoder of single messages."""

    async def parse_message(self, message: ClaimedMessage) -> SqlBrokerMessage:
        """One row as a message."""
        return _parse(message)

    async def decode_message(self, msg: StreamMessage[Any]) -> "DecodedMessage":
        """The body as its content type says."""
        return decode_body(msg)


class SqlBrokerBatchParser(SqlBrokerParser):
    """FastStream's parser and decoder of batches, and of the single messages in them."""

    async def parse_batch(self, messages: Sequence[ClaimedMessage]) -> SqlBrokerBatchMessage:
        """Rows of one call as a message; its headers and ids are those of the first, unless said otherwise."""
        parsed = [_parse(row) for row in messages]
        for message in parsed:
            message.set_decoder(self.decode_message)
        first = parsed[0]
        return SqlBrokerBatchMessage(
            tuple(messages),
            [message.body for message in parsed],
            messages=parsed,
            headers=first.headers,
            batch_headers=[message.headers for message in parsed],
            reply_to=first.reply_to,
            content_type=first.content_type,
            correlation_id=first.correlation_id,
            message_id=f"{first.message_id}-{parsed[-1].message_id}",
        )

    # FastStream recognises batch decoders by this very name.
    async def decode_batch(self, msg: StreamMessage[Any]) -> list["DecodedMessage"]:
        """The bodies, each as its content type says."""
        return [decode_body(message) for message in msg.messages]  # type: ignore[attr-defined]


def _parse(row: ClaimedMessage) -> SqlBrokerMessage:
    headers, own_id = row.headers, str(row.id)
    return SqlBrokerMessage(
        row,
        row.payload,
        headers=headers,
        reply_to=_text(headers, REPLY_TO) or "",
        content_type=_text(headers, CONTENT_TYPE),
        correlation_id=_text(headers, CORRELATION_ID) or own_id,
        message_id=own_id,
    )


def _text(headers: dict[str, Any], name: str) -> str | None:
    value = headers.get(name)
    return value if isinstance(value, str) else None
