"""Names of schemas in an AsyncAPI document, in which FastStream keeps one schema of each name."""

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

_DEFINITION = "#/$defs/"
Payloads = list[tuple[dict[str, Any], str]]


def with_own_names(payloads: Payloads, config: Any) -> Payloads:
    """Put a number behind each name that another schema of the document has.

    Args:
        payloads: JSON schemas with their definitions, each with the name of its handler.
        config: The broker's; it keeps the names.
    """
    return [(_renamed(payload, config.payload_names), handler) for payload, handler in payloads]


def _renamed(payload: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    schemas: dict[str, Any] = dict(payload.get("$defs", {}))
    title = payload.get("title")
    if title is not None:
        schemas[title] = {key: value for key, value in payload.items() if key != "$defs"}
    renamed = {}
    for name in schemas:
        text = _text(name, schemas)
        unique = name
        for number in count(2):
            if names.setdefault(unique, text) == text:
                break
            unique = f"{name}{number}"
        renamed[name] = unique
    result: dict[str, Any] = _with_references(payload, renamed)
    if "$defs" in result:
        result["$defs"] = {renamed[name]: schema for name, schema in result["$defs"].items()}
    if title is not None:
        result["title"] = renamed[title]
    return result


def _text(name: str, schemas: dict[str, Any]) -> str:
    """Return the schema called `name` as text, with all that it refers to."""
    reached = [name]
    for each in reached:
        reached += [to for to in _references(schemas[each]) if to in schemas and to not in reached]
    parts = {each: schemas[each] for each in reached}
    return json.dumps(parts, sort_keys=True, default=repr)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.startswith(_DEFINITION):
        yield value.removeprefix(_DEFINITION)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _references(part)


def _with_references(value: Any, renamed: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _with_references(part, renamed) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_references(part, renamed) for part in value]
    for name in _references(value):
        return _DEFINITION + renamed.get(name, name)
    return value
