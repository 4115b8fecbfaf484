"""Headers and texts as they are stored, which a foreign producer may have filled with anything."""

import contextlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

LONGEST_KEPT = 256
"""Characters of headers whose decoded form is kept for the next message with the same."""


def replace_headers(stored: Any, changes: Mapping[str, Any]) -> str:
    """Headers as selected, with `changes` (None takes a header away), as JSON text.

    What cannot be written again (a foreign producer's, too deep) is left out; the changes are always there.
    """
    try:
        return json.dumps(_changed(load_headers(stored), changes))
    except (ValueError, RecursionError):
        return json.dumps(_changed({}, changes))


def _changed(headers: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in {**headers, **changes}.items()
        if value is not None or name not in changes
    }


def load_text(value: Any) -> str | None:
    """A text as selected; bytes (SQLite, which stores any) with what is no UTF-8 replaced."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def load_headers(value: Any) -> dict[str, Any]:
    """Headers as selected (JSON text, a decoded object or NULL); anything but an object is kept under "value".

    A foreign producer may store anything; it must not keep the message from being handled. What Python
    refuses to parse (no JSON, integers of more than 4300 digits, too deep) stays text.
    """
    if value is None:
        return {}
    if value.__class__ is str and len(value) <= LONGEST_KEPT:
        return (
            dict(known) if (known := _plain_headers(value)) is not None else _parse_headers(value)
        )
    return _parse_headers(value)


@lru_cache(maxsize=128)
def _plain_headers(value: str) -> dict[str, Any] | None:
    """Headers without nested values: messages often share their text, and a copy is enough of them."""
    loaded = _parse_headers(value)
    nested = any(isinstance(item, dict | list) for item in loaded.values())
    return None if nested else loaded


def _parse_headers(value: Any) -> dict[str, Any]:
    loaded = load_text(value)
    if isinstance(loaded, str):
        with contextlib.suppress(ValueError, RecursionError):
            loaded = json.loads(loaded)
    return loaded if isinstance(loaded, dict) else {"value": loaded}
