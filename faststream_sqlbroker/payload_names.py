"""Unique schema names for AsyncAPI documents, in which FastStream keeps one schema per name."""

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

_DEFINITION = "#/$defs/"
Payloads = list[tuple[dict[str, Any], str]]


def make_names_unique(payloads: Payloads, config: Any) -> Payloads:
    """Append a number to each name that another schema of the document already uses.

    An AsyncAPI document identifies schemas by their names, which are those of the models.

    Args:
        payloads: JSON schemas with their definitions, each with the name of its handler.
        config: The broker's configuration, which stores the names.
    """
    return [
        (_rename_schemas(payload, config.payload_names), handler) for payload, handler in payloads
    ]


def _rename_schemas(payload: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Rename the schemas of a payload whose names the document uses for other schemas.

    Two modules may define models of the same name. `names` has the text of each schema so far. An
    equal schema keeps its name; a different one gets the next free number.
    """
    schemas: dict[str, Any] = dict(payload.get("$defs", {}))
    title = payload.get("title")
    if title is not None:
        schemas[title] = {key: value for key, value in payload.items() if key != "$defs"}
    new_names = {}
    for name in schemas:
        schema_text = _serialize_schema(name, schemas)
        unique_name = name
        for number in count(2):
            if names.setdefault(unique_name, schema_text) == schema_text:
                break
            unique_name = f"{name}{number}"
        new_names[name] = unique_name
    result: dict[str, Any] = _replace_references(payload, new_names)
    if "$defs" in result:
        result["$defs"] = {new_names[name]: schema for name, schema in result["$defs"].items()}
    if title is not None:
        result["title"] = new_names[title]
    return result


def _serialize_schema(name: str, schemas: dict[str, Any]) -> str:
    """Serialize the schema `name` with all referenced schemas, for comparison.

    Two schemas are the same only if the schemas below them are the same, too.
    """
    reachable = [name]
    for reference in reachable:
        reachable += [
            target
            for target in _iter_references(schemas[reference])
            if target in schemas and target not in reachable
        ]
    parts = {reference: schemas[reference] for reference in reachable}
    return json.dumps(parts, sort_keys=True, default=repr)


def _iter_references(value: Any) -> Iterator[str]:
    """Yield the names of the definitions that a part of a JSON schema refers to."""
    if isinstance(value, str) and value.startswith(_DEFINITION):
        yield value.removeprefix(_DEFINITION)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _iter_references(part)


def _replace_references(value: Any, new_names: dict[str, str]) -> Any:
    """Return a copy of a part of a JSON schema that refers to the new names."""
    if isinstance(value, dict):
        return {key: _replace_references(part, new_names) for key, part in value.items()}
    if isinstance(value, list):
        return [_replace_references(part, new_names) for part in value]
    for name in _iter_references(value):
        return _DEFINITION + new_names.get(name, name)
    return value
