"""What is wrong with the body of a request: what was given, what is allowed, and what to do.

Pydantic's own texts tell neither what was given, nor what a pattern stands for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from faststream_sqlbroker.core.text import short

MOST_TOLD = 3
"""Mistakes of a body that the answer names."""
LONGEST = 1_000
"""Characters of the answer."""
SECRET = frozenset({"lease_token"})
"""Fields whose values no answer repeats."""
ALLOWED: Mapping[str, str] = {
    "lease_token": "what reserve has answered as lease_token",
    "content_type": "1 to 200 printable ASCII characters",
    "delay": 'seconds, or text like "1.5h"',
    "expires_in": 'seconds, or text like "1.5h"',
}
"""By field: what a pattern, or one type of several, stands for."""
_SHOULD = ("Input should ", "String should ", "List should ", "Value should ")
_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    type(None): "null",
}
_UNKNOWN = "extra_forbidden"
_MISSING = "missing"
_NO_JSON = "json_invalid"


def kind_of(value: object) -> str:
    """What a value of JSON is: a body itself is not repeated."""
    return f"{_KINDS.get(type(value), 'a number')} of JSON"


def mistakes(error: ValidationError, model: type[BaseModel]) -> str:
    """The first ones, each with the field's place in the body; `model` has read the body."""
    found: dict[str, str] = {}
    for each in error.errors(include_url=False):
        # A field that may have several types has a mistake for each of them.
        loc = each["loc"]
        at = next((n for n, part in enumerate(loc) if part in ALLOWED), len(loc) - 1)
        place = _place(loc[: at + 1])
        found.setdefault(place, _mistake(each, place, model))
    return "; ".join(list(found.values())[:MOST_TOLD])[:LONGEST]


def _mistake(error: Mapping[str, Any], place: str, model: type[BaseModel]) -> str:
    kind = error["type"]
    given = error["input"]
    if kind == _NO_JSON:
        return f"the body must be a JSON object, and is no JSON: {error['ctx']['error']}"
    if not error["loc"]:
        return f"the body must be a JSON object, got {kind_of(given)}"
    name = next((part for part in error["loc"] if part in ALLOWED), error["loc"][-1])
    if kind == _UNKNOWN:
        return f"there is no field {place[: LONGEST // 10]}{_known(error['loc'], model)}"
    allowed = f"be {ALLOWED[name]}" if name in ALLOWED else _must(error["msg"])
    if kind == _MISSING:
        return f"{place} is missing" + (f": it must {allowed}" if name in ALLOWED else ": give it")
    told = "another text" if isinstance(given, str) else kind_of(given)
    return f"{place} must {allowed}, got {told if name in SECRET else short(given)}"


def _must(text: str) -> str:
    """Pydantic's text after the word "should", without what it says of its own work."""
    text = text.replace(" after validation", "")
    for begin in _SHOULD:
        if text.startswith(begin):
            return text.removeprefix(begin)
    return f"be valid ({text})"


def _known(loc: Sequence[int | str], model: type[BaseModel]) -> str:
    """The fields that there are, of the body itself."""
    if len(loc) > 1:
        return ": leave it out"
    return f"; there are {', '.join(model.model_fields)}"


def _place(loc: Sequence[int | str]) -> str:
    """As in JavaScript."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).removeprefix(".")
