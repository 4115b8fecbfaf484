"""Makes the message of a row, decodes its body and acks it, as FastStream and our classes do."""

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from faststream.message import AckStatus
from faststream.message.source_type import SourceType

from faststream_sqlbroker.core.correlation import CorrelationIds, new_database_id
from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.rows import ClaimedMessage, Holder
from faststream_sqlbroker.core.text import LONGEST_KEPT, plain_headers
from faststream_sqlbroker.message import SqlBrokerBatchMessage, SqlBrokerMessage
from faststream_sqlbroker.parser import (
    CONTENT_TYPE,
    CORRELATION_ID,
    JSON,
    REPLY_TO,
    SqlBrokerParser,
    load_json,
)

UNKNOWN: Any = object()
"""Stands for a body that FastStream has to decode."""
Load = Callable[[Any], Any]
"""Gives the decoded body of a message, or UNKNOWN."""
Parse = Callable[[ClaimedMessage], SqlBrokerMessage]

_ACK = Ack()
_ACK_METHOD = SqlBrokerMessage.ack
_CONSUME = SourceType.CONSUME
_DECODER = "_StreamMessage__decoder"
_DECODED = "_StreamMessage__decoded_caches"
_OURS = (SqlBrokerMessage, SqlBrokerBatchMessage)


def loading(decoder: Any) -> Load:
    """Decodes JSON as `message.decode()` does, without its coroutines.

    Whatever else the body may be, and an error, is left to `message.decode()`.
    """
    if getattr(decoder, "__func__", None) is not SqlBrokerParser.decode_message:
        return lambda _message: UNKNOWN  # a decoder or codec of the user's, or a batch

    def load(message: Any) -> Any:
        # A middleware may hand another object on, or replace the method. `type`, because a proxy
        # says that it is of the class that it stands for.
        if type(message) is not SqlBrokerMessage or "decode" in (known := message.__dict__):
            return UNKNOWN
        # It may have decoded the body before, or with another decoder.
        decoded = known[_DECODED]
        if known["content_type"] != JSON or decoded or known[_DECODER] is not decoder:
            return UNKNOWN
        try:
            body = decoded[decoder] = load_json(known["body"])
        except Exception:  # noqa: BLE001 - decode() raises it where FastStream would
            return UNKNOWN
        return body

    return load


def decodes_by_itself(message: Any) -> bool:
    """Whether a middleware has replaced `message.decode()`, or handed an object of its own on."""
    return type(message) not in _OURS or "decode" in vars(message)


def quick_parse(parser: SqlBrokerParser) -> Parse:
    """`parser.parse`, for most messages without the constructor.

    Where the constructor would make something else of a message, it is `parser.parse` itself.
    """
    full = parser.parse

    def parse(row: ClaimedMessage) -> SqlBrokerMessage:
        stored = row.stored_headers
        if stored.__class__ is not str or len(stored) > LONGEST_KEPT:
            return full(row)
        headers = plain_headers(stored)
        if headers is None or REPLY_TO in headers:
            return full(row)
        return _made(row, headers)

    # Another version of FastStream may set other attributes: compare with what it makes.
    samples = [_sample(headers) for headers in _SAMPLES]
    return parse if all(_same(parse(row), full(row)) for row in samples) else full


def _made(row: ClaimedMessage, headers: dict[str, Any]) -> SqlBrokerMessage:
    """The message of `row`, with what StreamMessage's constructor sets, in its order."""
    own_id = str(row.id)
    content_type = headers.get(CONTENT_TYPE)
    correlation_id = headers.get(CORRELATION_ID)
    if not correlation_id or correlation_id.__class__ is not str:
        # As `correlation_id_of`, without its call.
        holder = row.holder
        correlation_id = own_id if holder is None else holder.correlation_ids.of(row.id)
    message = SqlBrokerMessage.__new__(SqlBrokerMessage)
    message.__dict__ = {
        "raw_message": row,
        "body": row.payload,
        "reply_to": "",
        "content_type": content_type if content_type.__class__ is str else None,
        "source_type": _CONSUME,
        "headers": headers.copy(),
        "batch_headers": [],
        "path": {},
        "correlation_id": correlation_id,
        "message_id": own_id,
        "committed": None,
        "processed": False,
        _DECODER: None,
        _DECODED: {},
    }
    return message


_SAMPLES = (
    "{}",
    '{"content-type": "application/json"}',
    '{"content-type": 5, "correlation_id": "c"}',
)


async def _extends(_rows: Any, _seconds: float) -> bool:
    return True


_HOLDER = Holder(_extends, None, ack_first=False, correlation_ids=CorrelationIds(new_database_id()))


def _sample(headers: str) -> ClaimedMessage:
    moment = datetime(2026, 1, 1, tzinfo=timezone.utc)
    row = ClaimedMessage(
        *(1, "queue", b"{}", headers, 0, None, 0, 1, 1, moment, moment),
        *(None, None, None, moment, UUID(int=0)),
    )
    row.holder = _HOLDER
    return row


def _same(one: SqlBrokerMessage, other: SqlBrokerMessage) -> bool:
    return type(one) is type(other) and list(vars(one).items()) == list(vars(other).items())


def ack_quickly(message: Any) -> bool:
    """Ack a message that is not settled, as `message.ack()` does; whether this was possible.

    Batches cannot.
    """
    if message.__class__ is not SqlBrokerMessage:
        return False
    # What the handler has settled, or a test has replaced, is for `message.ack()`.
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
