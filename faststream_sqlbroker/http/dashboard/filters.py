"""The search for messages, as an address and as a form have it."""

from collections.abc import Callable, Mapping
from typing import Any

from faststream_sqlbroker.core.states import ARCHIVED_STATES, MessageState
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.dashboard.asked import Settings, moment_or_age

NAMES = (
    "queue",
    "state",
    "key",
    "error",
    "reason",
    "fingerprint",
    "header",
    "value",
    "since",
    "until",
    "archived",
)
"""Of the fields of the search."""
STATES = tuple(state.name for state in MessageState)
_TEXTS = ("queue", "state", "key", "error", "reason", "fingerprint")


def given_filter(given: Callable[[str], str | None]) -> dict[str, str]:
    """What was filled in, by the names of the fields; `given` reads a field."""
    return {name: value for name in NAMES if (value := given(name)) is not None}


def search_of(fields: Mapping[str, str], settings: Settings) -> dict[str, Any]:
    """The arguments of `admin.messages`.

    Raises:
        Problem: the name of a header and its value do not come together (400), or headers are
            hidden (403): who may search by them can guess them.
    """
    if not settings.bodies and {"header", "value"} & fields.keys():
        raise Problem(403, "headers are hidden here, so there is no search by them")
    found: dict[str, Any] = {name: fields[name] for name in _TEXTS if name in fields}
    for name in ("since", "until"):
        if name in fields:
            found[name] = moment_or_age(fields[name])
    if ("header" in fields) != ("value" in fields):
        raise Problem(400, "a search by a header needs its name and its value")
    if "header" in fields:
        found["headers"] = {fields["header"]: fields["value"]}
    if is_archived(fields):
        found["archived"] = True
    return found


def is_archived(fields: Mapping[str, str]) -> bool:
    """Whether the search looks into the archive."""
    state = fields.get("state", "").upper()
    ended = state in {each.name for each in ARCHIVED_STATES}
    return ended or bool({"archived", "reason", "fingerprint"} & fields.keys())
