"""Checks the values of a publish and makes its row, before anything is written."""

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Any

from faststream_sqlbroker.core.checks import name_problem, queue_problem
from faststream_sqlbroker.core.mirror import checked_info
from faststream_sqlbroker.core.routing import (
    DESTINATION_HEADER,
    LOOKUP_HEADER,
    PUBLISH_AFTER_HEADER,
    unix_time,
)
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, delay_seconds, positive_seconds
from faststream_sqlbroker.exceptions import PublishError, SetupError
from faststream_sqlbroker.parser import CONTENT_TYPE, CORRELATION_ID, REPLY_TO

PRIORITIES = range(-100, 101)
"""Higher ones are claimed first. The column is a small integer; 100 levels each way are enough."""
EARLIEST = datetime(1000, 1, 1, tzinfo=timezone.utc)
"""The first moment that MySQL's DATETIME can store; an earlier one becomes this and is due now."""
LATEST = datetime(9999, 1, 1, tzinfo=timezone.utc)
"""A moment that every database can store in every time zone; a later one becomes this."""

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
"""`json.dumps` with these options would make an encoder for each message."""
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""A NUL character in JSON text, where it is written as an escape; PostgreSQL stores no NUL."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which has no UTF-8."""
DEEPEST = 30
"""Levels of headers; MariaDB reads no JSON of more than 31."""
LONGEST_NAME = 65_535
"""Bytes of a name within headers; MySQL stores no longer one."""
LARGEST = int(sys.float_info.max)
"""The largest number in headers; MySQL stores larger ones not at all."""
DIGITS = sys.float_info.max_10_exp
"""Digits of a number that may be larger."""
_NUMBER = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{1,30})?")
"""A number as text: the command line gives all values as text."""


def refuse_one_list(messages: Sequence[Any]) -> None:
    """Refuse a batch whose only message is a list, tuple or iterator; most likely a * is missing.

    Raises:
        PublishError: the only message is one of these.
    """
    if len(messages) == 1 and isinstance(messages[0], list | tuple | Iterator):
        [only] = messages
        size = f" of {len(only)}" if isinstance(only, Sized) else ""
        msg = (
            f"publish_batch takes each message as an argument, got one {type(only).__name__}"
            f"{size}: write publish_batch(*messages), or use publish for one message that is a list"
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
    """The row of one message.

    Args:
        queue: Its full name.
        payload: The encoded body.
        content_type: The codec's; a header of that name overrides it.
        options: priority, key, dedup_id, delay, next_attempt_at, expires_in, destination, lookup,
            info; any may be missing.
        headers: JSON values by name.
        correlation_id: Stored as a header if not empty.
        reply_to: Stored as a header if not empty.

    Raises:
        PublishError: A value cannot be stored; the text names the value and what is allowed.
    """
    if (problem := queue_problem(queue)) is not None:
        msg = f"{short(queue)} cannot be the name of a queue: {problem}"
        raise PublishError(msg)
    if not isinstance(payload, bytes):
        msg = f"the codec must give bytes, it gave {type(payload).__name__}"
        raise PublishError(msg)
    if reply_to:
        _name("reply_to", reply_to, queue_problem)
    own = content_type, correlation_id, reply_to
    if not options:  # most messages have none
        return NewMessage(str(queue), payload, _all_headers(headers, *own))
    delay, next_attempt_at = _due(options)
    lookup = _name("lookup", options.get("lookup"))
    info = checked_info(options.get("info"))
    if info is not None and lookup is None:
        raise PublishError(f"info={short(info)} needs lookup=: a message is mirrored by that")
    return NewMessage(
        str(queue),
        payload,
        headers=_all_headers(_with_destination(headers, options, lookup), *own),
        priority=_priority(options.get("priority", 0)),
        key=_name("key", options.get("key")),
        dedup_id=_name("dedup_id", options.get("dedup_id")),
        delay=delay,
        next_attempt_at=next_attempt_at,
        expires_in=_expiry(options.get("expires_in")),
        lookup=lookup,
        info=info,
    )


def _all_headers(
    given: Any, content_type: str | None, correlation_id: str | None, reply_to: str
) -> str | None:
    """The headers `given`, and those that are arguments, as JSON; None if there are none."""
    if not (correlation_id or reply_to) and (given is None or given == {}):
        return _content_type(content_type) if content_type else None
    own = {CONTENT_TYPE: content_type, CORRELATION_ID: correlation_id, REPLY_TO: reply_to}
    return _headers(given, {name: value for name, value in own.items() if value})


@lru_cache(maxsize=64)
def _content_type(value: str) -> str | None:
    """The headers of a message that has this one only; most messages are such."""
    return _headers(None, {CONTENT_TYPE: value})


def _headers(given: Any, own: dict[str, Any]) -> str | None:
    """The headers `own`, overridden by those `given`, as JSON; None if there are none."""
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
    text = _as_json(merged)
    if _unstorable(text):
        options = frozenset(own) - frozenset(given or {})
        raise _unstorable_header(merged, options)
    return text


def _as_json(headers: Mapping[str, Any]) -> str:
    """The text of `headers`, which is no more than all databases take.

    Raises:
        PublishError: they are no JSON values, or too much.
    """
    try:
        text = _encode(headers)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"headers must be JSON values (str, int, float, bool, None, list, dict): {error}"
        raise PublishError(msg) from error
    # Nearly all are too short for it, which is found out fast.
    if len(text) > DIGITS or text.count("[") + text.count("{") > DEEPEST:
        _refuse_too_much(headers)
    return text


def _refuse_too_much(value: Any, level: int = 1) -> None:
    """Refuse headers that only some of the databases store.

    Raises:
        PublishError: they are nested too deeply, or a name or a number is too large.
    """
    if isinstance(value, int) and abs(value) > LARGEST:
        raise PublishError("a number in headers must be 1.8e308 at most: give it as text")
    if not isinstance(value, Mapping | list | tuple):
        return
    if level > DEEPEST:
        raise PublishError(f"headers must have {DEEPEST} levels at most: give the rest as text")
    for name in value if isinstance(value, Mapping) else ():
        if len(str(name).encode()) > LONGEST_NAME:
            msg = f"a name in headers must have {LONGEST_NAME} bytes at most, got {short(name)}"
            raise PublishError(msg)
    for each in value.values() if isinstance(value, Mapping) else value:
        _refuse_too_much(each, level + 1)


def _unstorable(text: str) -> bool:
    """Whether the JSON `text` has characters that not every database can store."""
    # Nearly every text is ASCII without the escape, which is found out faster than by patterns.
    if text.isascii() and "\\u0000" not in text:
        return False
    return bool(_NUL.search(text) or _SURROGATE.search(text))


def _unstorable_header(headers: Mapping[str, Any], options: frozenset[str]) -> PublishError:
    """The error for the first header that cannot be stored; `options` came as arguments."""
    name = next(
        n for n, v in headers.items() if _unstorable(json.dumps({n: v}, ensure_ascii=False))
    )
    what = name if name in options else f"the header {short(name)}"
    return PublishError(
        f"{what} must not hold a NUL character or a lone surrogate, got {short(headers[name])}"
    )


def _with_destination(given: Any, options: Mapping[str, Any], lookup: str | None) -> Any:
    """The headers with the option `destination`, and the lookup value with which it is mirrored
    until it gets there; they replace headers of these names.

    A message without a delay gets a header that says it has none. The subscriber that forwards it
    then knows that no delay was lost, which it cannot know of a row that another program inserted.
    """
    name = _name("destination", options.get("destination"), queue_problem)
    if name is None or not (given is None or isinstance(given, Mapping)):
        return given
    delayed = options.get("delay") is not None or options.get("next_attempt_at") is not None
    at_once: dict[str, Any] = {} if delayed else {PUBLISH_AFTER_HEADER: 0}
    mirrored = {} if lookup is None else {LOOKUP_HEADER: lookup}
    return {**at_once, **(given or {}), DESTINATION_HEADER: name, **mirrored}


def _number(value: Any) -> Any:
    """A plain number as text becomes a float: `faststream publish --delay 0.5` gives text."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _priority(value: object) -> int:
    if isinstance(value, str) and _NUMBER.fullmatch(value) and "." not in value:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value not in PRIORITIES:
        limits = f"from {PRIORITIES[0]} to {PRIORITIES[-1]}"
        raise PublishError(f"priority must be a whole number {limits}, got {value!r}")
    return value


def _name(
    option: str, value: object, problem_of: Callable[[object], str | None] = name_problem
) -> str | None:
    if value is None:
        return None
    if (problem := problem_of(value)) is not None:
        msg = f"{option} cannot be {short(value)}: {problem}"
        raise PublishError(msg)
    return str(value)


def _delay(value: Duration | None) -> float | None:
    if value is None:
        return None
    try:
        return delay_seconds(value)
    except SetupError as error:
        raise PublishError(str(error)) from error


def _expiry(value: Duration | None) -> float | None:
    if value is None:
        return None
    try:
        return positive_seconds("expires_in", value)
    except SetupError as error:
        raise PublishError(str(error)) from error


def _due(options: Mapping[str, Any]) -> tuple[float | None, datetime | None]:
    """Seconds from now or a moment, at most one of them; a message with neither is due now."""
    delay = options.get("delay")
    at = _number(options.get("next_attempt_at"))
    if delay is not None and at is not None:
        raise PublishError(
            "give delay or next_attempt_at, not both: "
            f"got delay={delay!r} and next_attempt_at={at!r}"
        )
    if isinstance(at, str | timedelta):
        return _from_now(at), None
    return _delay(delay), _moment(at)


def _from_now(value: str | timedelta) -> float:
    """Seconds from now, by the database's clock, until the next attempt."""
    try:
        return delay_seconds(value)
    except SetupError as error:
        raise _no_moment(value) from error


def _moment(value: object) -> datetime | None:
    if value is None or isinstance(value, str | timedelta):
        return None
    moment: datetime | None = None
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, datetime) and value.utcoffset() is not None:
            moment = value.astimezone(timezone.utc)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            moment = unix_time(value)
    if moment is None:
        raise _no_moment(value)
    return min(max(moment, EARLIEST), LATEST)


def _no_moment(value: object) -> PublishError:
    return PublishError(
        "next_attempt_at must be a datetime with a time zone, or Unix seconds, of the years 1 to "
        f'9999 in UTC, or a time from now like "2h45m", got {short(value)}: '
        "use datetime.now(timezone.utc), time.time(), or delay"
    )
