"""What is wrong with a request: what was given, what is allowed, and what to do.

Pydantic's own texts tell neither what was given, nor what a pattern stands for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.http.answers import Problem, kind_of

MOST_TOLD = 3
"""Mistakes that the answer names."""
LONGEST = 1_000
"""Characters of the answer."""
SECRET = frozenset({"lease_token", "X-Broker-Lease"})
"""Fields whose values no answer repeats."""
ALLOWED: Mapping[str, str] = {
    "lease_token": "what reserve has answered as lease_token",
    "content_type": "1 to 200 printable ASCII characters",
    "delay": 'seconds, or text like "1.5h"',
    "expires_in": 'seconds, or text like "1.5h"',
    "X-Broker-Lease": "the UUID that the claim has answered",
    "X-Broker-Dedup-Id": "1 to 255 printable ASCII characters",
    "Name": "that of a record, as GET /v1/mirror shows it",
}
"""By field: what a pattern, or one type of several, stands for."""
_SHOULD = ("Input should ", "String should ", "List should ", "Value should ", "Value error, ")


def mistakes(errors: Sequence[Mapping[str, Any]], model: type[BaseModel] | None) -> Problem:
    """The first ones, each with the field's place; `model` is that of the body."""
    found: dict[str, str] = {}
    for each in errors:
        where, *loc = each["loc"]
        loc = loc or [where]
        if where == "path":
            known = "a token is for publish or consume"
            text = known if loc == ["role"] else "its id is a number, as it was answered"
            return Problem(404, f"there is no {loc[0]} {short(each['input'])}: {text}")
        # A field that may have several types has a mistake for each of them.
        at = next((n for n, part in enumerate(loc) if part in ALLOWED), len(loc) - 1)
        place = _place(loc[: at + 1])
        found.setdefault(place, _mistake(each, loc, place, model))
    return Problem(400, "; ".join(list(found.values())[:MOST_TOLD])[:LONGEST])


def _mistake(
    error: Mapping[str, Any], loc: Sequence[int | str], place: str, model: type[BaseModel] | None
) -> str:
    kind = error["type"]
    given = error["input"]
    name = next((str(part) for part in loc if part in ALLOWED), str(loc[-1]))
    if kind == "extra_forbidden":
        known = ": leave it out"
        if model is not None and len(loc) == 1:
            known = f"; there are {', '.join(model.model_fields)}"
        return f"there is no field {place[: LONGEST // 10]}{known}"
    allowed = f"be {ALLOWED[name]}" if name in ALLOWED else _must(error["msg"])
    if kind == "missing":
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


def _place(loc: Sequence[int | str]) -> str:
    """As in JavaScript."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).removeprefix(".")
