"""Create the message of a row, decode its body and ack it, like FastStream and this package do."""

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from faststream.message import AckStatus
from faststream.message.source_type import SourceType

from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.text import MAX_CACHED_HEADERS, parse_flat_headers
from faststream_sqlbroker.message import SqlBrokerBatchMessage, SqlBrokerMessage
from faststream_sqlbroker.parser import (
    CONTENT_TYPE,
    CORRELATION_ID,
    JSON,
    REPLY_TO,
    SqlBrokerParser,
    load_json,
)

NOT_DECODED: Any = object()
"""Marks a body that FastStream has to decode."""
Load = Callable[[Any], Any]
"""Returns the decoded body of a message, or NOT_DECODED."""
Parse = Callable[[ClaimedMessage], SqlBrokerMessage]

_ACK = Ack()
_ACK_METHOD = SqlBrokerMessage.ack
_CONSUME = SourceType.CONSUME
_DECODER = "_StreamMessage__decoder"
_DECODED = "_StreamMessage__decoded_caches"
_OWN_CLASSES = (SqlBrokerMessage, SqlBrokerBatchMessage)


def make_loader(decoder: Any) -> Load:
    """Return a function that decodes JSON like `message.decode()`, without coroutines.

    For other bodies, and after errors, it returns NOT_DECODED: the caller then awaits
    `message.decode()`.
    """
    if getattr(decoder, "__func__", None) is not SqlBrokerParser.decode_message:
        return lambda _message: NOT_DECODED  # a decoder or codec of the user's, or a batch

    def load(message: Any) -> Any:
        """Return the decoded JSON body of `message`, or NOT_DECODED."""
        # A middleware may pass on another object, or replace the method. `type`, because a proxy
        # reports the class of the object behind it.
        if type(message) is not SqlBrokerMessage or "decode" in (attributes := message.__dict__):
            return NOT_DECODED
        # A middleware may have decoded the body already, or with another decoder.
        decoded = attributes[_DECODED]
        if attributes["content_type"] != JSON or decoded or attributes[_DECODER] is not decoder:
            return NOT_DECODED
        try:
            body = decoded[decoder] = load_json(attributes["body"])
        except Exception:  # noqa: BLE001 - decode() raises it where FastStream would
            return NOT_DECODED
        return body

    return load


def is_decode_replaced(message: Any) -> bool:
    """Return True if a middleware replaced `message.decode()` or the message.

    A second call of the user's own method may have unwanted effects.
    """
    return type(message) not in _OWN_CLASSES or "decode" in vars(message)


def make_quick_parse(parser: SqlBrokerParser) -> Parse:
    """Return a function like `parser.parse` that mostly avoids FastStream's constructor.

    The constructor takes a large part of the time of a short message. Both functions are compared
    on samples. If their messages differ, `parser.parse` itself is returned.
    """
    parse_fully = parser.parse

    def parse(row: ClaimedMessage) -> SqlBrokerMessage:
        """Create the message of `row`, the short way if its headers are plain."""
        stored = row.stored_headers
        if stored.__class__ is not str or len(stored) > MAX_CACHED_HEADERS:
            return parse_fully(row)
        headers = parse_flat_headers(stored)
        if headers is None or REPLY_TO in headers:
            return parse_fully(row)
        return _make_message(row, headers)

    # Another version of FastStream may set other attributes, so compare the results.
    samples = [_make_sample(headers) for headers in _SAMPLES]
    return parse if all(_is_equal(parse(row), parse_fully(row)) for row in samples) else parse_fully


def _make_message(row: ClaimedMessage, headers: dict[str, Any]) -> SqlBrokerMessage:
    """Create the message of `row` with the attributes that `parser.parse` leaves.

    Their order is the same, too. Setting all of them at once is faster than the constructor.
    """
    content_type = headers.get(CONTENT_TYPE)
    correlation_id = headers.get(CORRELATION_ID)
    attributes: dict[str, Any] = {
        "raw_message": row,
        "body": row.payload,
        "reply_to": "",
        "content_type": content_type if content_type.__class__ is str else None,
        "source_type": _CONSUME,
        "headers": headers.copy(),
        "batch_headers": [],
        "path": {},
        "correlation_id": correlation_id,
        "committed": None,
        "processed": False,
        _DECODER: None,
        _DECODED: {},
    }
    if not correlation_id or correlation_id.__class__ is not str:
        del attributes["correlation_id"]  # the message generates one when it is asked for
    message = SqlBrokerMessage.__new__(SqlBrokerMessage)
    message.__dict__ = attributes
    return message


_SAMPLES = (
    "{}",
    '{"content-type": "application/json"}',
    '{"content-type": 5, "correlation_id": "c"}',
)


def _make_sample(headers: str) -> ClaimedMessage:
    """Create a row with `headers` to compare the two ways of creating a message."""
    timestamp = datetime(2026, 1, 1, tzinfo=timezone.utc)
    return ClaimedMessage(
        *(1, "queue", b"{}", headers, 0, None, 0, 1, 1, timestamp, timestamp),
        *(None, None, None, timestamp, UUID(int=0)),
    )


def _is_equal(message: SqlBrokerMessage, other: SqlBrokerMessage) -> bool:
    return type(message) is type(other) and list(vars(message).items()) == list(vars(other).items())


def ack_quickly(message: Any) -> bool:
    """Ack an unsettled message like `message.ack()`; return False if this is not possible.

    Avoids a coroutine for each message. Batches cannot be acked this way.
    """
    if message.__class__ is not SqlBrokerMessage:
        return False
    # `message.ack()` handles messages that are settled, or replaced by a test.
    row = message.raw_message
    if (
        message.committed is not None
        or row.outcome is not None
        or SqlBrokerMessage.ack is not _ACK_METHOD
        or "ack" in message.__dict__
    ):
        return False
    row.outcome = _ACK
    message.committed = AckStatus.ACKED
    return True
