"""Check a publish and make its row; whatever is wrong is said before anything is written."""

import contextlib
import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from faststream_sqlbroker.core.duration import parse_duration
from faststream_sqlbroker.core.names import name_problem
from faststream_sqlbroker.core.routing import DESTINATION_HEADER, unix_time
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import PublishError, SetupError
from faststream_sqlbroker.parser import CONTENT_TYPE, CORRELATION_ID, REPLY_TO

PRIORITIES = range(-100, 101)

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_SURROGATE = re.compile("[\ud800-\udfff]")


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
    """The row of one message.

    Args:
        queue: Its name.
        payload: The encoded body.
        content_type: What the codec says of it; a header of that name goes before it.
        options: priority, key, dedup_id, delay, next_attempt_at, expires_in, destination; any may be missing.
        headers: JSON values by name.
        correlation_id: Kept as a header if given.
        reply_to: Kept as a header if given.

    Raises:
        PublishError: A value that cannot be stored; the message says which and what is allowed.
    """
    if (problem := name_problem(queue)) is not None:
        msg = f"{short(queue)} cannot be the name of a queue: {problem}"
        raise PublishError(msg)
    if not isinstance(payload, bytes):
        msg = f"the codec must give bytes, it gave {type(payload).__name__}"
        raise PublishError(msg)
    if not (options or correlation_id or reply_to) and (headers is None or headers == {}):
        return NewMessage(str(queue), payload, _content_type(content_type) if content_type else None)
    own = {CONTENT_TYPE: content_type, CORRELATION_ID: correlation_id, REPLY_TO: reply_to}
    delay, at = options.get("delay"), options.get("next_attempt_at")
    if delay is not None and at is not None:
        msg = f"give delay or next_attempt_at, not both: got delay={delay!r} and next_attempt_at={at!r}"
        raise PublishError(msg)
    return NewMessage(
        str(queue),
        payload,
        headers=_headers(_with_destination(headers, options), {n: v for n, v in own.items() if v}),
        priority=_priority(options.get("priority", 0)),
        key=_name("key", options.get("key")),
        dedup_id=_name("dedup_id", options.get("dedup_id")),
        delay=_seconds("delay", delay, zero=True),
        next_attempt_at=_moment(at),
        expires_in=_seconds("expires_in", options.get("expires_in"), zero=False),
    )


@lru_cache(maxsize=64)
def _content_type(value: str) -> str | None:
    """The headers of a message that has no other, which most have."""
    return _headers(None, {CONTENT_TYPE: value})


def _headers(given: Any, own: dict[str, Any]) -> str | None:
    if given is not None and not isinstance(given, Mapping):
        msg = f"headers must be a mapping of names to JSON values, got {short(given)}"
        raise PublishError(msg)
    merged = {**own, **(given or {})}
    if not merged:
        return None
    for name in merged:
        if not isinstance(name, str):
            msg = f"the header {name!r} must have a string as its name, not {type(name).__name__}"
            raise PublishError(msg)
    try:
        text = json.dumps(merged, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"headers must be JSON values (str, int, float, bool, None, list, dict): {error}"
        raise PublishError(msg) from error
    if _NUL.search(text) or _SURROGATE.search(text):
        msg = f"headers must not hold a NUL character or a lone surrogate, got {short(given)}"
        raise PublishError(msg)
    return text


def _with_destination(given: Any, options: Mapping[str, Any]) -> Any:
    """The headers with the option `destination` in place of one that was handed on."""
    name = _name("destination", options.get("destination"))
    if name is None or not (given is None or isinstance(given, Mapping)):
        return given
    return {**(given or {}), DESTINATION_HEADER: name}


def _priority(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value not in PRIORITIES:
        msg = f"priority must be a whole number from {PRIORITIES[0]} to {PRIORITIES[-1]}, got {value!r}"
        raise PublishError(msg)
    return value


def _name(option: str, value: object) -> str | None:
    if value is None:
        return None
    if (problem := name_problem(value)) is not None:
        msg = f"{option} cannot be {short(value)}: {problem}"
        raise PublishError(msg)
    return str(value)


def _seconds(option: str, value: Any, *, zero: bool) -> float | None:
    if value is None:
        return None
    try:
        seconds = parse_duration(value, name=option)
    except SetupError as error:
        raise PublishError(str(error)) from error
    if seconds < 0 or (seconds == 0 and not zero):
        msg = f"{option} must be {'0 or more' if zero else 'longer than 0'} seconds, got {value!r}"
        raise PublishError(msg)
    return seconds


def _moment(value: object) -> datetime | None:
    if value is None:
        return None
    if isinstance(value, datetime) and value.utcoffset() is not None:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return unix_time(value)
    msg = (
        f"next_attempt_at must be a datetime with a time zone, or Unix seconds up to the year 9999, got "
        f"{short(value)}: use datetime.now(timezone.utc), time.time(), or delay"
    )
    raise PublishError(msg)
