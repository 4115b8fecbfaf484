"""Policies as JSON, as subscribers tell them to each other."""

import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import time
from functools import lru_cache
from typing import Any

from faststream_sqlbroker.core.policies.checks import KINDS, Policy
from faststream_sqlbroker.core.policies.header import Header
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.window import DAYS
from faststream_sqlbroker.exceptions import SetupError

_KINDS = {kind.__name__: kind for kind in KINDS}
_LENGTHS = frozenset({"delay", "max_wait", "per", "ttl", "wait", "window"})
"""Arguments that are lengths of time; they are stored as microseconds."""


def policies_json(policies: Iterable[Policy]) -> list[dict[str, Any]]:
    """`policies` as JSON values."""
    return [
        {
            "kind": type(policy).__name__,
            **{
                each.name: _told(getattr(policy, each.name)) for each in fields(policy) if each.init
            },
        }
        for policy in policies
    ]


def _told(value: Any) -> Any:
    match value:
        case Header():
            return {"header": value.name}
        case time():
            return value.isoformat()
        case frozenset():
            return [DAYS[day] for day in sorted(value)]
    return value


def read_policies(told: Any) -> tuple[Policy, ...]:
    """What `policies_json` has written. Kinds and arguments that this version does not know are
    left out.
    """
    found = map(_read, told if isinstance(told, list) else ())
    return tuple(policy for policy in found if policy is not None)


def _read(told: Any) -> Policy | None:
    try:
        return _built(json.dumps(told, sort_keys=True))
    except (SetupError, AttributeError, TypeError, ValueError, KeyError):
        return None


@lru_cache(maxsize=1024)
def _built(told: str) -> Policy:
    """The policy; cached, as all registrations are read once a second and most say the same."""
    arguments = json.loads(told)
    kind = _KINDS[arguments.pop("kind")]
    known = inspect.signature(kind).parameters
    policy: Policy = kind(
        **{name: _value(name, value) for name, value in arguments.items() if name in known}
    )
    return policy


def _value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return Header(value["header"])
    if name in _LENGTHS and value is not None:
        return value / MICROSECONDS
    if name in {"start", "end"}:
        return "24:00" if (name, value) == ("end", "00:00:00") else time.fromisoformat(value)
    return value
