"""Bodies as JSON text, by the rules of `decode_payload`, without Spark."""

import json
from typing import Any


def to_json_text(payload: bytes, headers: str | None) -> str | None:
    """Convert a body to JSON text; None for other content, or bytes that are not UTF-8.

    JSON stays as it was published; a text becomes a JSON string. As for `decode_payload`, the
    header content-type decides, a message without this header is read as JSON, and an object that
    names a field twice is no JSON.
    """
    media = _get_media_type(headers)
    try:
        text = payload.decode()
        if media.startswith("text/"):
            return json.dumps(text, ensure_ascii=False)
        if media not in ("", "application/json") and not media.endswith("+json"):
            return None
        json.loads(text, object_pairs_hook=_parse_unique_fields, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None
    return text


def _get_media_type(headers: str | None) -> str:
    """Return the content type in the headers, without parameters and in lower case; "" if none."""
    try:
        fields = json.loads(headers or "{}")
    except ValueError:
        fields = {}
    if not isinstance(fields, dict):
        return ""
    # Names of headers keep their case in the table.
    values = [value for name, value in fields.items() if name.lower() == "content-type"]
    value = fields.get("content-type", values[0] if values else None)
    return "" if value is None else str(value).partition(";")[0].strip().lower()


def _parse_unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object, or raise ValueError if a name comes twice.

    Python's parser would take the last value; Spark refuses such an object as VARIANT.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field is named twice")
    return fields


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
