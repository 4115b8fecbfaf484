"""Validate the values of a publish and create its row, before anything is written."""

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Any

from faststream_sqlbroker.core.checks import find_name_error, find_queue_error
from faststream_sqlbroker.core.mirror import validate_info
from faststream_sqlbroker.core.routing import (
    DESTINATION_HEADER,
    LOOKUP_HEADER,
    PUBLISH_AFTER_HEADER,
    from_unix_time,
)
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration, parse_delay, parse_positive
from faststream_sqlbroker.exceptions import PublishError, SetupError
from faststream_sqlbroker.parser import CONTENT_TYPE, CORRELATION_ID, REPLY_TO

PRIORITIES = range(-100, 101)
"""Valid priorities; higher priorities are claimed first. The column is a small integer; 100 levels
each way are enough.
"""
EARLIEST = datetime(1000, 1, 1, tzinfo=timezone.utc)
"""The first time that MySQL's DATETIME can store; an earlier time is replaced by this one and is
due now.
"""
LATEST = datetime(9999, 1, 1, tzinfo=timezone.utc)
"""A time that every database can store in every time zone; a later time is replaced by this one."""

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
"""An encoder created once; `json.dumps` with these options would create one for each message."""
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""A NUL character in JSON text, written as an escape; PostgreSQL cannot store it."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which has no UTF-8 encoding."""
MAX_HEADER_DEPTH = 30
"""Maximum nesting of headers; MariaDB reads at most 31 levels of JSON."""
MAX_HEADER_NAME = 65_535
"""Maximum bytes of a name within headers; a limit of MySQL."""
MAX_NUMBER = int(sys.float_info.max)
"""The largest number in headers; MySQL cannot store larger numbers."""
MAX_SAFE_LENGTH = sys.float_info.max_10_exp
"""Maximum length of text that cannot contain a number larger than `MAX_NUMBER`."""
_NUMBER = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{1,30})?")
"""A number as text: the command line passes all values as text."""


def check_not_one_list(messages: Sequence[Any]) -> None:
    """Refuse a batch whose only message is a list, tuple or iterator; probably a * is missing.

    Raises:
        PublishError: the only message is of such a type.
    """
    if len(messages) == 1 and isinstance(messages[0], list | tuple | Iterator):
        [only] = messages
        size = f" of {len(only)}" if isinstance(only, Sized) else ""
        msg = (
            "publish_batch takes each message as an argument, got one "
            f"{type(only).__name__}{size}: use publish_batch(*messages), or publish if the list is "
            "one message"
        )
        raise PublishError(msg)


def make_row(
    queue: object,
    payload: bytes,
    content_type: str | None,
    options: Mapping[str, Any],
    *,
    headers: Any = None,
    correlation_id: str | None = None,
    reply_to: str = "",
) -> NewMessage:
    """Create the row of a message.

    Args:
        queue: The full name of the queue.
        payload: The encoded body.
        content_type: The codec's content type; a header of that name takes precedence.
        options: priority, key, dedup_id, delay, next_attempt_at, expires_in, destination, lookup,
            info; all optional.
        headers: JSON values by name.
        correlation_id: Stored as a header if not empty.
        reply_to: Stored as a header if not empty.

    Raises:
        PublishError: A value cannot be stored; the text names the value and the allowed values.
    """
    if (problem := find_queue_error(queue)) is not None:
        msg = f"{format_value(queue)} cannot be the name of a queue: {problem}"
        raise PublishError(msg)
    if not isinstance(payload, bytes):
        msg = f"the codec must return bytes, got {type(payload).__name__}"
        raise PublishError(msg)
    if reply_to:
        _parse_name("reply_to", reply_to, find_queue_error)
    argument_headers = content_type, correlation_id, reply_to
    if not options:  # most messages have none
        return NewMessage(str(queue), payload, _render_all_headers(headers, *argument_headers))
    delay, next_attempt_at = _parse_due_time(options)
    lookup = _parse_name("lookup", options.get("lookup"))
    info = validate_info(options.get("info"))
    if info is not None and lookup is None:
        raise PublishError(f"info={format_value(info)} needs lookup=, under which it is stored")
    return NewMessage(
        str(queue),
        payload,
        headers=_render_all_headers(_add_destination(headers, options, lookup), *argument_headers),
        priority=_parse_priority(options.get("priority", 0)),
        key=_parse_name("key", options.get("key")),
        dedup_id=_parse_name("dedup_id", options.get("dedup_id")),
        delay=delay,
        next_attempt_at=next_attempt_at,
        expires_in=_parse_expiry(options.get("expires_in")),
        lookup=lookup,
        info=info,
    )


def _render_all_headers(
    headers: Any, content_type: str | None, correlation_id: str | None, reply_to: str
) -> str | None:
    """Render `headers` and the headers passed as arguments as JSON; None without headers.

    A message with nothing but a content type is so common that its text is cached.
    """
    if not (correlation_id or reply_to) and (headers is None or headers == {}):
        return _render_content_type(content_type) if content_type else None
    argument_headers = {
        CONTENT_TYPE: content_type,
        CORRELATION_ID: correlation_id,
        REPLY_TO: reply_to,
    }
    return _render_headers(
        headers, {name: value for name, value in argument_headers.items() if value}
    )


@lru_cache(maxsize=64)
def _render_content_type(value: str) -> str | None:
    """Render the headers of a message that has only a content type, the most common case."""
    return _render_headers(None, {CONTENT_TYPE: value})


def _render_headers(headers: Any, argument_headers: dict[str, Any]) -> str | None:
    """Render `argument_headers`, overridden by `headers`, as JSON; None without headers.

    Raises:
        PublishError: a header is not JSON, or the database could not store it.
    """
    if headers is not None and not isinstance(headers, Mapping):
        msg = f"headers must be a mapping of names to JSON values, got {format_value(headers)}"
        raise PublishError(msg)
    merged = {**argument_headers, **(headers or {})}
    if not merged:
        return None
    for name in merged:
        if not isinstance(name, str):
            msg = f"the name of a header must be a string, got {name!r} ({type(name).__name__})"
            raise PublishError(msg)
    text = _encode_headers(merged)
    if _is_unstorable(text):
        options = frozenset(argument_headers) - frozenset(headers or {})
        raise _make_header_error(merged, options)
    return text


def _encode_headers(headers: Mapping[str, Any]) -> str:
    """Encode `headers` within the limits of all databases.

    Raises:
        PublishError: the headers are not JSON values, or exceed a limit.
    """
    try:
        text = _encode(headers)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"headers must be JSON values (str, int, float, bool, None, list, dict): {error}"
        raise PublishError(msg) from error
    # Nearly all headers are too short to exceed a limit, which is quick to check.
    if len(text) > MAX_SAFE_LENGTH or text.count("[") + text.count("{") > MAX_HEADER_DEPTH:
        _check_header_limits(headers)
    return text


def _check_header_limits(value: Any, level: int = 1) -> None:
    """Refuse headers that only some of the databases can store.

    Raises:
        PublishError: the nesting is too deep, or a name or a number is too large.
    """
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise PublishError("a number in headers must be at most 1.8e308: pass it as text")
    if not isinstance(value, Mapping | list | tuple):
        return
    if level > MAX_HEADER_DEPTH:
        raise PublishError(
            f"headers must have at most {MAX_HEADER_DEPTH} levels: pass deeper values as text"
        )
    for name in value if isinstance(value, Mapping) else ():
        if len(str(name).encode()) > MAX_HEADER_NAME:
            msg = (
                f"the name of a header must have at most {MAX_HEADER_NAME} bytes, got "
                f"{format_value(name)}"
            )
            raise PublishError(msg)
    for item in value.values() if isinstance(value, Mapping) else value:
        _check_header_limits(item, level + 1)


def _is_unstorable(text: str) -> bool:
    """Return True if the JSON `text` has a NUL character or half of a surrogate pair.

    Some of the databases cannot store such text. A surrogate pair is two code units for one
    character; half of it has no UTF-8 encoding.
    """
    # Nearly every text is ASCII without the escape, which is quicker to check than the patterns.
    if text.isascii() and "\\u0000" not in text:
        return False
    return bool(_NUL.search(text) or _SURROGATE.search(text))


def _make_header_error(headers: Mapping[str, Any], options: frozenset[str]) -> PublishError:
    """Create the error for the first header that cannot be stored.

    `options` are the names of headers that came from arguments, such as reply_to; the caller does
    not know them as headers.
    """
    name = next(
        n for n, v in headers.items() if _is_unstorable(json.dumps({n: v}, ensure_ascii=False))
    )
    label = name if name in options else f"the header {format_value(name)}"
    return PublishError(
        f"{label} must not hold a NUL character or a lone surrogate, got "
        f"{format_value(headers[name])}"
    )


def _add_destination(headers: Any, options: Mapping[str, Any], lookup: str | None) -> Any:
    """Add the headers of the options `destination` and `lookup` of a message to be forwarded.

    A subscriber with forward_to=DESTINATION reads them, and moves the message to its destination.
    They replace headers of the same names. A message without a delay gets a header that says so:
    the subscriber cannot know that of a row that another program inserted.
    """
    name = _parse_name("destination", options.get("destination"), find_queue_error)
    if name is None or not (headers is None or isinstance(headers, Mapping)):
        return headers
    is_delayed = options.get("delay") is not None or options.get("next_attempt_at") is not None
    no_delay: dict[str, Any] = {} if is_delayed else {PUBLISH_AFTER_HEADER: 0}
    mirrored = {} if lookup is None else {LOOKUP_HEADER: lookup}
    return {**no_delay, **(headers or {}), DESTINATION_HEADER: name, **mirrored}


def _parse_number(value: Any) -> Any:
    """Convert a plain number as text to a float: `faststream publish --delay 0.5` passes text."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _parse_priority(value: object) -> int:
    """Return the priority as an int; the command line passes text."""
    if isinstance(value, str) and _NUMBER.fullmatch(value) and "." not in value:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value not in PRIORITIES:
        limits = f"from {PRIORITIES[0]} to {PRIORITIES[-1]}"
        raise PublishError(f"priority must be a whole number {limits}, got {value!r}")
    return value


def _parse_name(
    option: str, value: object, problem_of: Callable[[object], str | None] = find_name_error
) -> str | None:
    """Return a name as str, or None; `problem_of` returns the error in a name."""
    if value is None:
        return None
    if (problem := problem_of(value)) is not None:
        msg = f"{option} cannot be {format_value(value)}: {problem}"
        raise PublishError(msg)
    return str(value)


def _parse_delay(value: Duration | None) -> float | None:
    """Return the delay in seconds, or None; a negative delay means now."""
    if value is None:
        return None
    # The parser also serves options of the broker, whose errors are SetupErrors.
    try:
        return parse_delay(value)
    except SetupError as error:
        raise PublishError(str(error)) from error


def _parse_expiry(value: Duration | None) -> float | None:
    """Return `expires_in` in seconds, or None."""
    if value is None:
        return None
    try:
        return parse_positive("expires_in", value)
    except SetupError as error:
        raise PublishError(str(error)) from error


def _parse_due_time(options: Mapping[str, Any]) -> tuple[float | None, datetime | None]:
    """Return the delay in seconds, and the absolute due time; at most one of both is set.

    With neither, the message is due now. `next_attempt_at` may also be relative, like a delay.
    """
    delay = options.get("delay")
    next_attempt_at = _parse_number(options.get("next_attempt_at"))
    if delay is not None and next_attempt_at is not None:
        raise PublishError(
            "give delay or next_attempt_at, not both: "
            f"got delay={delay!r} and next_attempt_at={next_attempt_at!r}"
        )
    if isinstance(next_attempt_at, str | timedelta):
        return _parse_relative_time(next_attempt_at), None
    return _parse_delay(delay), _parse_timestamp(next_attempt_at)


def _parse_relative_time(value: str | timedelta) -> float:
    """Return the seconds from now, by the database's clock, until the next attempt."""
    try:
        return parse_delay(value)
    except SetupError as error:
        raise _make_timestamp_error(value) from error


def _parse_timestamp(value: object) -> datetime | None:
    """Return an absolute due time in UTC, limited to the storable range; None if not set."""
    if value is None or isinstance(value, str | timedelta):
        return None
    timestamp: datetime | None = None
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, datetime) and value.utcoffset() is not None:
            timestamp = value.astimezone(timezone.utc)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            timestamp = from_unix_time(value)
    if timestamp is None:
        raise _make_timestamp_error(value)
    return min(max(timestamp, EARLIEST), LATEST)


def _make_timestamp_error(value: object) -> PublishError:
    return PublishError(
        "next_attempt_at must be a datetime with a time zone, Unix seconds (years 1 to 9999 in "
        f'UTC) or a time from now such as "2h45m", got {format_value(value)}: use '
        "datetime.now(timezone.utc), time.time() or delay"
    )
