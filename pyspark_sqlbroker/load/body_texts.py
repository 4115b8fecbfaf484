"""A body as JSON text, by the rules of `decode_payload`, without Spark."""

import json
from typing import Any


def to_json_text(payload: bytes, headers: str | None) -> str | None:
    """The body as JSON text: JSON as it was published, a text as a JSON string; None if it is
    neither, or not UTF-8.

    As for `decode_payload`, the header content-type decides, a message without it is read as JSON,
    and an object that names a field twice is no JSON.
    """
    media = _media_type(headers)
    try:
        text = payload.decode()
        if media.startswith("text/"):
            return json.dumps(text, ensure_ascii=False)
        if media not in ("", "application/json") and not media.endswith("+json"):
            return None
        json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return text


def _media_type(headers: str | None) -> str:
    """The content type without parameters, in lower case; "" if there is none."""
    try:
        given = json.loads(headers or "{}")
    except ValueError:
        given = {}
    if not isinstance(given, dict):
        return ""
    # Names of headers keep their case in the table.
    named = [value for name, value in given.items() if name.lower() == "content-type"]
    value = given.get("content-type", named[0] if named else None)
    return "" if value is None else str(value).partition(";")[0].strip().lower()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field is named twice")
    return fields


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
