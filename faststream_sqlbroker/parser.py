"""Makes FastStream messages of claimed rows.

Other programs may insert rows, too, so the headers may hold any JSON.
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
from faststream_sqlbroker.batch_start import note_fault
from faststream_sqlbroker.core.checks import queue_problem
from faststream_sqlbroker.core.correlation import CorrelationIds
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.message import SqlBrokerBatchMessage, SqlBrokerMessage

if TYPE_CHECKING:
    from faststream_sqlbroker.adapter.messages import DecodedMessage

SqlBrokerParserType: TypeAlias = ParserProto[ClaimedMessage]
"""A class that makes a message of a row, as FastStream's other brokers name theirs."""
CONTENT_TYPE = "content-type"
CORRELATION_ID = "correlation_id"
REPLY_TO = "reply_to"
JSON = "application/json"
AT_ONCE = 250
"""Bodies of a batch decoded in one go. Then the event loop has a turn: it must send the next claim
and renew leases."""

DIGITS = 4_300
"""Digits of an integer that both parsers take: Python's limit, unless the application sets it."""
LOWEST_DIGITS = 640
"""The lowest limit that can be set."""
SAMPLES = (
    *(b"-0", b"1e400", b"-0.0", b"0.1e-400", b"1e23", b"[NaN, Infinity, -Infinity]"),
    *(b"12345678901234567890", b"-9223372036854775809", b"1.7976931348623159e308"),
    *(b'{"a": 1, "b": 2, "a": 3}', rb'"\u0000\ud83d\ude00"', b' {"a":[]}\n'),
)
"""Where parsers of JSON differ. A version of Pydantic that reads one differently is not used."""


class SqlBrokerParser:
    """FastStream's parser and decoder of single messages."""

    log: Callable[..., None] | None = None
    """Logs a `reply_to` that is not a valid queue name; None if the subscriber sends no answers."""

    async def parse_message(self, message: ClaimedMessage) -> SqlBrokerMessage:
        """One row as a message."""
        return self.parse(message)

    def parse(
        self, row: ClaimedMessage, kind: type[SqlBrokerMessage] = SqlBrokerMessage
    ) -> SqlBrokerMessage:
        """`parse_message` without a coroutine."""
        headers = row.headers
        own_id = str(row.id)
        return kind(
            row,
            row.payload,
            headers=headers,
            reply_to=self._reply_to(row, headers) if REPLY_TO in headers else "",
            content_type=_text(headers, CONTENT_TYPE),
            correlation_id=correlation_id_of(row, headers),
            message_id=own_id,
        )

    def _reply_to(self, row: ClaimedMessage, headers: dict[str, Any]) -> str:
        """The queue for the answer; empty if there is none or its name is not valid."""
        name = headers[REPLY_TO]
        if name is None or name == "":
            return ""
        if (problem := queue_problem(name)) is None:
            return str(name)
        if self.log is not None:
            text = (
                f"message {row.id} of queue {row.queue!r} gets no answer: "
                f"its reply_to is {short(name)}: {problem}"
            )
            self.log(logging.WARNING, text, message_id=row.id)
        return ""

    async def decode_message(self, msg: StreamMessage[Any]) -> "DecodedMessage":
        """The body, decoded by its content type."""
        if msg.content_type == JSON:
            return cast("DecodedMessage", load_json(msg.body))
        return decode_body(msg)


class SqlBrokerBatchParser(SqlBrokerParser):
    """FastStream's parser and decoder of batches, and of the single messages in them."""

    async def parse_batch(self, messages: Sequence[ClaimedMessage]) -> SqlBrokerBatchMessage:
        """The rows of one call as one message.

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
            reply_to=self._reply_to(first, headers) if REPLY_TO in headers else "",
            content_type=_text(headers, CONTENT_TYPE),
            correlation_id=correlation_id_of(first, headers),
            message_id=f"{first.id}-{last.id}",
        )

    # FastStream recognises batch decoders by this very name.
    async def decode_batch(self, msg: StreamMessage[Any]) -> list["DecodedMessage"]:
        """The bodies, each decoded by its content type."""
        if isinstance(msg, SqlBrokerBatchMessage) and not msg.opened:
            headers = msg.batch_headers
            if len(headers) != len(msg.raw_message):
                # A custom parser made the batch without all its headers.
                headers = [row.headers for row in msg.raw_message]
            rows = list(zip(_payloads(msg), headers, strict=True))
            bodies: list[DecodedMessage] = []
            for start in range(0, len(rows), AT_ONCE):
                if start:
                    await asyncio.sleep(0)
                try:
                    bodies += _bodies(rows[start : start + AT_ONCE])
                except Exception as error:
                    note_fault(error, _undecodable(rows))
                    raise
            return bodies
        return [decode_body(message) for message in msg.messages]  # type: ignore[attr-defined]


def _payloads(batch: SqlBrokerBatchMessage) -> Sequence[bytes]:
    """The undecoded bodies: what a middleware has put in their place, if it is one for each row."""
    given = batch.body
    if isinstance(given, list | tuple) and len(given) == len(batch.raw_message):
        return given
    return [row.payload for row in batch.raw_message]


def _bodies(rows: Sequence[tuple[bytes, dict[str, Any]]]) -> list["DecodedMessage"]:
    return [
        load_json(payload)
        if of.get(CONTENT_TYPE) == JSON
        else decode_body(cast("Any", _Encoded(payload, _text(of, CONTENT_TYPE))))
        for payload, of in rows
    ]


def _undecodable(rows: Sequence[tuple[bytes, dict[str, Any]]]) -> list[int]:
    """Positions of the messages that cannot be decoded."""
    places = []
    for place, row in enumerate(rows):
        try:
            _bodies([row])
        except Exception:  # noqa: BLE001 - the caller raises the first of these errors
            places.append(place)
    return places


def _json_loads(body: bytes) -> Any:
    """The same as json.loads, in less time: 0.8 µs, where its scanner alone takes 1.4.

    Pydantic's parser refuses some of what json.loads takes: lone surrogates, other encodings, byte
    order marks, deep nesting. json.loads handles the rest, and raises the errors.
    """
    if len(body) > LOWEST_DIGITS and 0 < sys.get_int_max_str_digits() < DIGITS:
        return json.loads(body)  # Pydantic's limit is a fixed one
    try:
        return from_json(body)
    except (TypeError, ValueError):
        return json.loads(body)


def _agrees(load: Callable[[bytes], Any]) -> bool:
    """Whether `load` agrees with json.loads on `SAMPLES`."""
    try:
        return all(repr(load(body)) == repr(json.loads(body)) for body in SAMPLES)
    except ValueError:
        return False


def _chosen_loader() -> Callable[[bytes], Any]:
    """FastStream's loader where it is not json.loads: orjson's, if that is installed."""
    return _json_loads if json_loads is json.loads and _agrees(from_json) else json_loads


load_json = _chosen_loader()


class _Encoded(NamedTuple):
    """The attributes of a message that FastStream's decoder reads."""

    body: bytes
    content_type: str | None


def correlation_id_of(
    row: ClaimedMessage, headers: dict[str, Any], ids: CorrelationIds | None = None
) -> str:
    """The one that is stored in `headers` of `row`, else the one of `ids`, or of its holder's."""
    stored = headers.get(CORRELATION_ID)
    if stored and isinstance(stored, str):
        return stored
    if ids is None and row.holder is not None:
        ids = row.holder.correlation_ids
    return str(row.id) if ids is None else ids.of(row.id)


def _text(headers: dict[str, Any], name: str) -> str | None:
    value = headers.get(name)
    return value if isinstance(value, str) else None
