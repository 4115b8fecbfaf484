"""Text that every database can store and a person can read, and exceptions as such text."""

import contextlib
import json
import re
import traceback
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from faststream_sqlbroker.exceptions import StoreError

DEFAULT_LIMIT = 8192
"""Maximum length of an error text in bytes of UTF-8."""

_MIN_LIMIT = 64
"""Minimum limit in bytes: "[...]" with a little text before and after it."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_REPLACEMENT = "\ufffd"
_GAP = "\n[...]\n"
_MAX_FRAMES = 10
"""Maximum number of traceback frames; the innermost ones are kept, as they say most."""
_MAX_RELATED = 5
"""Maximum number of causes and group members to name; an exception may have any number."""

MAX_REPR_LENGTH = 80
"""Maximum length in characters of a value in an error message."""


def format_value(value: object) -> str:
    """Return `repr(value)`, truncated for an error message."""
    text = repr(value)
    return text if len(text) <= MAX_REPR_LENGTH else text[: MAX_REPR_LENGTH - 3] + "..."


def replace_invisible(text: str) -> str:
    """Replace control characters, lone surrogates and marks that change the text direction.

    In a terminal such characters could move the cursor, or hide or reorder the text around them;
    surrogates cannot be written at all.
    """
    return _INVISIBLE.sub(_REPLACEMENT, text)


def is_storable(text: str) -> bool:
    """Return True if every database stores `text` unchanged, apart from the length."""
    return _UNSTORABLE.search(text) is None


def clean_text(text: str, *, limit: int = DEFAULT_LIMIT) -> str:
    """Make `text` storable in every database: no NUL, no lone surrogate, limited length.

    Each unstorable character becomes U+FFFD. Text that is too long keeps its beginning and its end,
    with "[...]" on a line between them: an error's type is at the beginning, the frame that raised
    it at the end.

    Args:
        text: Any string.
        limit: Maximum number of bytes of UTF-8 in the result; at least 64.

    Raises:
        ValueError: `limit` is below 64.
    """
    if limit < _MIN_LIMIT:
        raise ValueError(f"limit must be at least {_MIN_LIMIT} bytes, got {limit!r}")
    if len(text) <= limit:
        cleaned = _replace_unstorable(text)
        if len(cleaned.encode()) <= limit:
            return cleaned
    available = limit - len(_GAP)
    # A character takes at least a byte, so slices of `limit` characters are long enough.
    head = _replace_unstorable(text[:limit]).encode()[: available // 2]
    tail = _replace_unstorable(text[-limit:]).encode()[-(available - available // 2) :]
    return head.decode(errors="ignore") + _GAP + tail.decode(errors="ignore")


def describe_exception(error: BaseException, *, limit: int = DEFAULT_LIMIT) -> str:
    """Describe `error` in text that every database stores; never fails, whatever `error` does.

    For the column last_error and the log. The first line has type and message. Then come its
    causes, the members of a group (five each), and the last ten frames of its traceback, ending
    with the one that raised it.

    Args:
        error: An exception with or without a traceback.
        limit: Maximum number of bytes of UTF-8 in the result; at least 64.
    """
    try:
        text = "\n".join(_iter_description(error))
    except Exception:  # noqa: BLE001 - calls the error's own code, which may raise
        text = f"{type.__getattribute__(type(error), '__name__')}: (it cannot be described)"
    return clean_text(text, limit=limit)


def _iter_description(error: BaseException) -> Iterator[str]:
    """Yield the parts of `describe_exception`: error, causes, group members, frames."""
    yield _format_headline(error)
    for cause in islice(_iter_causes(error), _MAX_RELATED):
        yield f"caused by {_format_headline(cause)}"
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions[:_MAX_RELATED]:
            yield f"contains {_format_headline(member)}"
    if error.__traceback__ is not None:
        frames = traceback.extract_tb(error.__traceback__, limit=-_MAX_FRAMES)
        yield "".join(traceback.format_list(frames)).rstrip("\n")


def _format_headline(error: BaseException) -> str:
    """Return type and message of `error`, whose own `__str__` may raise."""
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - see describe_exception
        message = "(its message cannot be read)"
    return f"{name}: {message}" if message else name


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions that led to `error`, the nearest first.

    As in Python's tracebacks, `__cause__` comes before an unsuppressed `__context__`. A cycle ends
    the chain, which would otherwise be endless.
    """
    seen = {id(error)}
    # A StoreError is caused by an SQLAlchemy error, whose text contains the statement with its
    # binds. These include bodies and headers, which must not get into logs.
    while not isinstance(error, StoreError):
        context = None if error.__suppress_context__ else error.__context__
        cause = error.__cause__ if error.__cause__ is not None else context
        if cause is None or id(cause) in seen:
            return
        seen.add(id(cause))
        yield cause
        error = cause


def _replace_unstorable(text: str) -> str:
    return _UNSTORABLE.sub(_REPLACEMENT, text)


# Stored headers and texts. Another program may have stored anything there.

MAX_CACHED_HEADERS = 256
"""Maximum length in characters of headers whose decoded form is cached; longer ones seldom
repeat."""


def replace_headers(stored: Any, changes: Mapping[str, Any]) -> str:
    """Apply `changes` to stored headers and return JSON text; None removes a header.

    Stored headers that cannot be encoded again are dropped: another program may have nested them
    too deeply. The changes are always written.
    """
    try:
        return json.dumps(merge_headers(load_headers(stored), changes))
    except (ValueError, RecursionError):
        return json.dumps(merge_headers({}, changes))


def merge_headers(headers: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `headers` with `changes`; None removes a header.

    A stored header with the value None stays: only a change removes.
    """
    return {
        name: value
        for name, value in {**headers, **changes}.items()
        if value is not None or name not in changes
    }


def load_text(value: Any) -> str | None:
    """Decode a text as selected. SQLite may return bytes; invalid UTF-8 is replaced."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def load_headers(value: Any) -> dict[str, Any]:
    """Decode headers as selected: JSON text, a decoded object or NULL.

    Another program may store anything, and the message must still reach its handler. Any value
    but an object becomes {"value": ...}. Text that Python cannot parse stays text: not JSON,
    nested too deeply, or with an integer of more than 4300 digits.
    """
    if value is None:
        return {}
    if value.__class__ is str and len(value) <= MAX_CACHED_HEADERS:
        return (
            dict(cached)
            if (cached := parse_flat_headers(value)) is not None
            else _parse_headers(value)
        )
    return _parse_headers(value)


@lru_cache(maxsize=128)
def parse_flat_headers(value: str) -> dict[str, Any] | None:
    """Decode headers without nested values; return None for other headers.

    Many messages have the same headers, so the decoded form is cached. The caller must copy the
    result before changing it. A shallow copy is enough, as the values are immutable.
    """
    loaded = _parse_headers(value)
    nested = any(isinstance(item, dict | list) for item in loaded.values())
    return None if nested else loaded


def _parse_headers(value: Any) -> dict[str, Any]:
    """Decode headers as `load_headers` does, without a cache."""
    loaded = load_text(value)
    if isinstance(loaded, str):
        with contextlib.suppress(ValueError, RecursionError):
            loaded = json.loads(loaded)
    return loaded if isinstance(loaded, dict) else {"value": loaded}


def pluralize(count: int, nouns: str) -> str:
    """Return "1 message" or "1,200 messages"; `nouns` is the plural of a noun."""
    return f"{count:,} {nouns.removesuffix('s') if count == 1 else nouns}"


def format_size(size: float) -> str:
    """Format a number of bytes in the largest suitable unit."""
    units = ["TiB", "GiB", "MiB", "KiB", "bytes"]
    while round(size) >= 1024 and units[1:]:  # noqa: PLR2004 - a KiB
        size /= 1024
        units.pop()
    number = f"{size:.0f}" if size >= 100 else f"{size:.3g}"  # noqa: PLR2004 - three digits
    return f"{number} {units[-1]}"
