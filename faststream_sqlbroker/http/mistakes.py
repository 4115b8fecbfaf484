"""Validation errors of requests: the value, what is allowed, and a remedy.

Pydantic's messages contain neither the value nor the meaning of a pattern.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.http.responses import Problem, describe_kind

MAX_MISTAKES = 3
"""Mistakes per response."""
MAX_LENGTH = 1_000
"""Characters of the message."""
SECRET_FIELDS = frozenset({"lease_token", "X-Broker-Lease"})
"""Fields whose values are never repeated."""
REQUIREMENTS: Mapping[str, str] = {
    "lease_token": "the lease_token that reserve returned",
    "content_type": "1 to 200 printable ASCII characters",
    "delay": 'seconds, or text like "1.5h"',
    "expires_in": 'seconds, or text like "1.5h"',
    "X-Broker-Lease": "the UUID that the claim returned",
    "X-Broker-Dedup-Id": "1 to 255 printable ASCII characters",
    "Name": "the Name of a record of GET /v1/mirror",
}
"""Meaning of a pattern or of a union of types, by field."""
_PREFIXES = ("Input should ", "String should ", "List should ", "Value should ", "Value error, ")


def create_problem(errors: Sequence[Mapping[str, Any]], model: type[BaseModel] | None) -> Problem:
    """Create a problem from the first mistakes, with the paths of the fields in `model`.

    `errors` are Pydantic's. A mistake in the path of the request is a 404, any other a 400.
    """
    messages: dict[str, str] = {}
    for error in errors:
        source, *loc = error["loc"]
        loc = loc or [source]
        if source == "path":
            reason = "use publish or consume"
            text = reason if loc == ["role"] else "use the number that the server returned"
            return Problem(404, f"{loc[0]} {format_value(error['input'])} does not exist: {text}")
        # A field with several types has an error for each type.
        # `index` is the position of a field whose types share one description, else of the last
        # part.
        index = next((n for n, part in enumerate(loc) if part in REQUIREMENTS), len(loc) - 1)
        path = _format_path(loc[: index + 1])
        messages.setdefault(path, _format_mistake(error, loc, path, model))
    return Problem(400, "; ".join(list(messages.values())[:MAX_MISTAKES])[:MAX_LENGTH])


def _format_mistake(
    error: Mapping[str, Any], loc: Sequence[int | str], path: str, model: type[BaseModel] | None
) -> str:
    """Describe an error of Pydantic in a sentence; `path` is the formatted `loc`.

    `loc` is the way to the field through the request's body, as Pydantic reports it. Values of
    `SECRET_FIELDS` are described by their type only.
    """
    kind = error["type"]
    value = error["input"]
    name = next((str(part) for part in loc if part in REQUIREMENTS), str(loc[-1]))
    if kind == "extra_forbidden":
        hint = ": omit it"
        if model is not None and len(loc) == 1:
            hint = f": use {', '.join(model.model_fields)}"
        return f"unknown field {path[: MAX_LENGTH // 10]}{hint}"
    allowed = (
        f"be {REQUIREMENTS[name]}" if name in REQUIREMENTS else _format_requirement(error["msg"])
    )
    if kind == "missing":
        return f"{path} is missing" + (
            f": it must {allowed}" if name in REQUIREMENTS else ": add it"
        )
    description = "another text" if isinstance(value, str) else describe_kind(value)
    if name not in SECRET_FIELDS:
        description = format_value(value)
    return f"{path} must {allowed}, got {description}"


def _format_requirement(text: str) -> str:
    """Return Pydantic's message after the word "should", without details of Pydantic itself.

    The caller puts "must" before it.
    """
    text = text.replace(" after validation", "")
    for prefix in _PREFIXES:
        if text.startswith(prefix):
            return text.removeprefix(prefix)
    return f"be valid ({text})"


def _format_path(loc: Sequence[int | str]) -> str:
    """Format a path as in JavaScript."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).removeprefix(".")
