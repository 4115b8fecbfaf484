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
"""Bytes of UTF-8 that an error text may take."""

_SMALLEST_LIMIT = 64
"""Bytes; room for "[...]" with a little text before and after it."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_REPLACEMENT = "\ufffd"
_GAP = "\n[...]\n"
_MAX_FRAMES = 10
"""Frames of a traceback that are kept: the innermost ones, which say most."""
_MAX_RELATED = 5
"""Causes of an exception, and members of a group, that are named: there may be any number."""

SHOWN = 80
"""Characters of a value that an error message shows."""


def short(value: object) -> str:
    """`repr(value)`, cut for an error message."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def visible(text: str) -> str:
    """The text without control characters, lone surrogates and marks that change its direction.

    In a terminal such characters could move the cursor, or hide or reorder the text around them;
    surrogates cannot be written at all.
    """
    return _UNSEEN.sub(_REPLACEMENT, text)


def storable(text: str) -> bool:
    """Whether every database stores `text` as it is, if it is short enough."""
    return _UNSTORABLE.search(text) is None


def clean_text(text: str, *, limit: int = DEFAULT_LIMIT) -> str:
    """Make `text` storable in every database: no NUL, no lone surrogate, bounded.

    Each unstorable character becomes U+FFFD. Text that is too long keeps its beginning and its end,
    with "[...]" on a line between them: an error's type stands first, the frame that raised it
    last.

    Args:
        text: Any string.
        limit: Most bytes of UTF-8 in the result; at least 64.

    Raises:
        ValueError: `limit` is below 64.
    """
    if limit < _SMALLEST_LIMIT:
        raise ValueError(f"limit must be at least {_SMALLEST_LIMIT} bytes, got {limit!r}")
    if len(text) <= limit:
        cleaned = _replace(text)
        if len(cleaned.encode()) <= limit:
            return cleaned
    room = limit - len(_GAP)
    # A character takes a byte or more, so slices of `limit` characters hold all that can be kept.
    head = _replace(text[:limit]).encode()[: room // 2]
    tail = _replace(text[-limit:]).encode()[-(room - room // 2) :]
    return head.decode(errors="ignore") + _GAP + tail.decode(errors="ignore")


def describe_exception(error: BaseException, *, limit: int = DEFAULT_LIMIT) -> str:
    """Describe `error` in text that every database stores; never fails, whatever its methods do.

    First line: type and message. Then what caused it, what it groups (five each), and the last ten
    frames of its traceback, the one that raised it at the end.

    Args:
        error: With or without a traceback.
        limit: Most bytes of UTF-8 in the result; at least 64.
    """
    try:
        text = "\n".join(_describe(error))
    except Exception:  # noqa: BLE001 - calls the error's own code, which may raise
        text = f"{type.__getattribute__(type(error), '__name__')}: (it cannot be described)"
    return clean_text(text, limit=limit)


def _describe(error: BaseException) -> Iterator[str]:
    yield _headline(error)
    for cause in islice(_causes(error), _MAX_RELATED):
        yield f"caused by {_headline(cause)}"
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions[:_MAX_RELATED]:
            yield f"contains {_headline(member)}"
    if error.__traceback__ is not None:
        frames = traceback.extract_tb(error.__traceback__, limit=-_MAX_FRAMES)
        yield "".join(traceback.format_list(frames)).rstrip("\n")


def _headline(error: BaseException) -> str:
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


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    # A StoreError is caused by an error of SQLAlchemy. The text of that one holds the statement
    # with its binds: bodies and headers, which must not get into logs.
    while not isinstance(error, StoreError):
        context = None if error.__suppress_context__ else error.__context__
        cause = error.__cause__ if error.__cause__ is not None else context
        if cause is None or id(cause) in seen:
            return
        seen.add(id(cause))
        yield cause
        error = cause


def _replace(text: str) -> str:
    return _UNSTORABLE.sub(_REPLACEMENT, text)


# Headers and texts as they are stored. Another program may have stored anything there.

LONGEST_KEPT = 256
"""Characters of headers up to which their decoded form is cached; longer ones seldom repeat."""


def replace_headers(stored: Any, changes: Mapping[str, Any]) -> str:
    """Headers as selected, with `changes` (None takes a header away), as JSON text.

    Stored headers that cannot be encoded again are dropped: another program may have nested them
    too deeply. The changes are always written.
    """
    try:
        return json.dumps(changed_headers(load_headers(stored), changes))
    except (ValueError, RecursionError):
        return json.dumps(changed_headers({}, changes))


def changed_headers(headers: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`headers` with `changes`; None takes a header away."""
    return {
        name: value
        for name, value in {**headers, **changes}.items()
        if value is not None or name not in changes
    }


def load_text(value: Any) -> str | None:
    """A text as selected. SQLite may give bytes; those that are not UTF-8 are replaced."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def load_headers(value: Any) -> dict[str, Any]:
    """Decode headers as selected: JSON text, a decoded object or NULL.

    Another program may store anything, and the message must still reach its handler. Any value
    but an object becomes {"value": ...}. Text that Python cannot parse stays text: not JSON,
    nested too deeply, or with an integer of more than 4300 digits.
    """
    if value is None:
        return {}
    if value.__class__ is str and len(value) <= LONGEST_KEPT:
        return dict(known) if (known := plain_headers(value)) is not None else _parse_headers(value)
    return _parse_headers(value)


@lru_cache(maxsize=128)
def plain_headers(value: str) -> dict[str, Any] | None:
    """Headers without nested values, else None. The caller copies them before they are changed.

    Many messages have the same headers, so the decoded form is cached. A copy is enough, as no
    value in it can be changed.
    """
    loaded = _parse_headers(value)
    nested = any(isinstance(item, dict | list) for item in loaded.values())
    return None if nested else loaded


def _parse_headers(value: Any) -> dict[str, Any]:
    loaded = load_text(value)
    if isinstance(loaded, str):
        with contextlib.suppress(ValueError, RecursionError):
            loaded = json.loads(loaded)
    return loaded if isinstance(loaded, dict) else {"value": loaded}


def size_text(size: float) -> str:
    """Return a number of bytes for people, in its largest unit."""
    units = ["TiB", "GiB", "MiB", "KiB", "bytes"]
    while round(size) >= 1024 and units[1:]:  # noqa: PLR2004 - a KiB
        size /= 1024
        units.pop()
    number = f"{size:.0f}" if size >= 100 else f"{size:.3g}"  # noqa: PLR2004 - three digits
    return f"{number} {units[-1]}"
