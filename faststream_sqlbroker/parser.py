"""Create FastStream messages from claimed rows.

Other programs may insert rows, too, so headers may hold any JSON.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from faststream.message import StreamMessage
from faststream.message import decode_message as decode_body
from pydantic_core import from_json

from faststream_sqlbroker.adapter.messages import ParserProto, json_loads
from faststream_sqlbroker.batch_start import record_fault
from faststream_sqlbroker.core.checks import find_queue_error
from faststream_sqlbroker.core.correlation import CorrelationIds
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.message import SqlBrokerBatchMessage, SqlBrokerMessage

if TYPE_CHECKING:
    from faststream_sqlbroker.adapter.messages import DecodedMessage

SqlBrokerParserType: TypeAlias = ParserProto[ClaimedMessage]
"""A class that creates a message from a row, named as in FastStream's other brokers."""
CONTENT_TYPE = "content-type"
CORRELATION_ID = "correlation_id"
REPLY_TO = "reply_to"
JSON = "application/json"
_GENERATED_LATER = "-"
"""Keeps FastStream's constructor from generating an id; the message makes it when asked for."""
DECODE_CHUNK = 250
"""Bodies of a batch that are decoded before the event loop gets a turn.

The loop must send the next claim and renew leases in between.
"""

MAX_DIGITS = 4_300
"""Digits of an integer that both JSON parsers accept: Python's limit, unless the application sets
another.
"""
MIN_DIGITS_LIMIT = 640
"""The lowest digit limit that Python lets an application set."""
SAMPLES = (
    *(b"-0", b"1e400", b"-0.0", b"0.1e-400", b"1e23", b"[NaN, Infinity, -Infinity]"),
    *(b"12345678901234567890", b"-9223372036854775809", b"1.7976931348623159e308"),
    *(b'{"a": 1, "b": 2, "a": 3}', rb'"\u0000\ud83d\ude00"', b' {"a":[]}\n'),
)
"""Inputs on which JSON parsers differ. A Pydantic version that reads any of them differently is not
used.
"""


class SqlBrokerParser:
    """FastStream's parser and decoder for single messages."""

    log: Callable[..., None] | None = None
    """Logs a `reply_to` that is not a valid queue name; None if the subscriber sends no answers."""

    async def parse_message(self, message: ClaimedMessage) -> SqlBrokerMessage:
        """Convert a row to a message."""
        return self.parse(message)

    def parse(
        self, row: ClaimedMessage, message_type: type[SqlBrokerMessage] = SqlBrokerMessage
    ) -> SqlBrokerMessage:
        """Convert a row to a message without a coroutine."""
        headers = row.headers
        correlation_id = get_stored_correlation_id(headers)
        message = message_type(
            row,
            row.payload,
            headers=headers,
            reply_to=self._get_reply_to(row, headers) if REPLY_TO in headers else "",
            content_type=_get_text_header(headers, CONTENT_TYPE),
            correlation_id=correlation_id or _GENERATED_LATER,
            message_id=_GENERATED_LATER,
        )
        attributes = vars(message)
        attributes.pop("message_id", None)
        if correlation_id is None:
            attributes.pop("correlation_id", None)
        return message

    def _get_reply_to(self, row: ClaimedMessage, headers: dict[str, Any]) -> str:
        """Return the queue for the answer; empty if missing or not a valid name.

        An invalid name is logged instead of raised: the message itself can be handled.
        """
        name = headers[REPLY_TO]
        if name is None or name == "":
            return ""
        if (problem := find_queue_error(name)) is None:
            return str(name)
        if self.log is not None:
            text = (
                f"message {row.id} of queue {row.queue!r} gets no reply, because its reply_to "
                f"{format_value(name)} is not a valid queue: {problem}"
            )
            self.log(logging.WARNING, text, message_id=row.id)
        return ""

    async def decode_message(self, msg: StreamMessage[Any]) -> "DecodedMessage":
        """Decode the body by the content type."""
        if msg.content_type == JSON:
            return cast("DecodedMessage", load_json(msg.body))
        return decode_body(msg)


class SqlBrokerBatchParser(SqlBrokerParser):
    """FastStream's parser and decoder for batches and for the single messages in a batch."""

    async def parse_batch(self, messages: Sequence[ClaimedMessage]) -> SqlBrokerBatchMessage:
        """Convert the rows of a batch to a single message.

        Its headers, content type, correlation id and `reply_to` are those of the first row. Its id
        names the first and the last row.
        """
        first = messages[0]
        last = messages[-1]
        all_headers = [row.headers for row in messages]
        headers = all_headers[0]
        return SqlBrokerBatchMessage(
            tuple(messages),
            [row.payload for row in messages],
            parse=self.parse,
            decoder=self.decode_message,
            headers=headers,
            batch_headers=all_headers,
            reply_to=self._get_reply_to(first, headers) if REPLY_TO in headers else "",
            content_type=_get_text_header(headers, CONTENT_TYPE),
            correlation_id=get_correlation_id(first, headers),
            message_id=f"{first.message_id}_{last.message_id}",
        )

    # FastStream recognises batch decoders by exactly this name.
    async def decode_batch(self, msg: StreamMessage[Any]) -> list["DecodedMessage"]:
        """Decode each body by the message's own content type."""
        if isinstance(msg, SqlBrokerBatchMessage) and not msg.is_opened:
            headers = msg.batch_headers
            if len(headers) != len(msg.raw_message):
                # A custom parser created the batch without all its headers.
                headers = [row.headers for row in msg.raw_message]
            rows = list(zip(_get_payloads(msg), headers, strict=True))
            bodies: list[DecodedMessage] = []
            for start in range(0, len(rows), DECODE_CHUNK):
                if start:
                    await asyncio.sleep(0)
                try:
                    bodies += _decode_bodies(rows[start : start + DECODE_CHUNK])
                except Exception as error:
                    record_fault(error, _find_undecodable(rows))
                    raise
            return bodies
        return [decode_body(message) for message in msg.messages]  # type: ignore[attr-defined]


def _get_payloads(batch: SqlBrokerBatchMessage) -> Sequence[bytes]:
    """Return the undecoded bodies; a middleware may have replaced them if the count matches.

    Otherwise the bodies could not be assigned to their rows, whose own payloads are used then.
    """
    body = batch.body
    if isinstance(body, list | tuple) and len(body) == len(batch.raw_message):
        return body
    return [row.payload for row in batch.raw_message]


def _decode_bodies(rows: Sequence[tuple[bytes, dict[str, Any]]]) -> list["DecodedMessage"]:
    """Decode each body by its own content type; a single error fails all."""
    return [
        load_json(payload)
        if headers.get(CONTENT_TYPE) == JSON
        else decode_body(
            cast("Any", _EncodedBody(payload, _get_text_header(headers, CONTENT_TYPE)))
        )
        for payload, headers in rows
    ]


def _find_undecodable(rows: Sequence[tuple[bytes, dict[str, Any]]]) -> list[int]:
    """Return the positions of the messages that cannot be decoded.

    Called after a batch has failed, to deliver these messages apart from the others.
    """
    positions = []
    for position, row in enumerate(rows):
        try:
            _decode_bodies([row])
        except Exception:  # noqa: BLE001 - the caller raises the first of these errors
            positions.append(position)
    return positions


def _parse_json(body: bytes) -> Any:
    """Parse JSON exactly as json.loads, but faster: 0.8 µs, where json's scanner alone takes 1.4.

    Pydantic's parser refuses some input that json.loads accepts: lone surrogates, other encodings,
    byte order marks, deep nesting. json.loads handles such input, and raises the errors.
    """
    if len(body) > MIN_DIGITS_LIMIT and 0 < sys.get_int_max_str_digits() < MAX_DIGITS:
        return json.loads(body)  # Pydantic's limit is fixed
    try:
        return from_json(body)
    except (TypeError, ValueError):
        return json.loads(body)


def _is_compatible(load: Callable[[bytes], Any]) -> bool:
    """Return True if `load` agrees with json.loads on `SAMPLES`.

    The texts are compared, because NaN equals nothing and -0.0 equals 0.
    """
    try:
        return all(repr(load(body)) == repr(json.loads(body)) for body in SAMPLES)
    except ValueError:
        return False


def _select_loader() -> Callable[[bytes], Any]:
    """Select the function that parses the JSON of bodies.

    FastStream's own choice is kept if it is not json.loads, as with orjson. Otherwise Pydantic's
    parser is used, if the installed version reads everything as json.loads does.
    """
    return _parse_json if json_loads is json.loads and _is_compatible(from_json) else json_loads


load_json = _select_loader()


class _EncodedBody(NamedTuple):
    """The attributes of a message that FastStream's decoder reads."""

    body: bytes
    content_type: str | None


def get_correlation_id(
    row: ClaimedMessage, headers: dict[str, Any], ids: CorrelationIds | None = None
) -> str:
    """Return the correlation id stored in `headers`, else the id generated by `ids` for `row`."""
    return get_stored_correlation_id(headers) or row.build_correlation_id(ids)


def get_stored_correlation_id(headers: dict[str, Any]) -> str | None:
    """Return the correlation id stored in `headers`; None without a text."""
    return _get_text_header(headers, CORRELATION_ID) or None


def _get_text_header(headers: dict[str, Any], name: str) -> str | None:
    value = headers.get(name)
    return value if isinstance(value, str) else None
