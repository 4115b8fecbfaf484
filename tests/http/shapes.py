"""What an OpenAPI document says to a client, without what is said to its reader."""

from typing import Any

TEXTS = {"title", "description", "summary", "operationId"}

UNSAID = (("required", False), ("default", None))


def shapes(document: dict[str, Any]) -> dict[str, Any]:
    """Paths, parameters, statuses and bodies, their schemas in place of references."""
    found: dict[str, Any] = {}
    for path, operations in document["paths"].items():
        for method, told in operations.items():
            shape = _plain(told, document)
            parameters = {(each["in"], each["name"]): each for each in shape.pop("parameters", ())}
            found[f"{method} {path}"] = {**shape, "parameters": parameters}
    return {"paths": found, "schemes": _plain(document["components"]["securitySchemes"], document)}


def _plain(value: Any, document: dict[str, Any], *, names: bool = False) -> Any:
    """`names`: the keys are names that a client uses, such as "description" of a property."""
    if isinstance(value, list):
        return [_plain(each, document) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return _plain(document["components"]["schemas"][name], document)
    return {
        key: _plain(each, document, names=not names and key == "properties")
        for key, each in value.items()
        # What is not required, or null if it is missing, may say so, or say nothing.
        if names or (key not in TEXTS and (key, each) not in UNSAID)
    }
