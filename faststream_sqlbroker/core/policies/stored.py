"""Policies as JSON, as subscribers publish them to each other."""

import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import time
from functools import lru_cache
from typing import Any

from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.policies.combinations import POLICY_CLASSES, Policy
from faststream_sqlbroker.core.policies.header import Header
from faststream_sqlbroker.core.policies.window import DAYS
from faststream_sqlbroker.exceptions import SetupError

_CLASSES_BY_NAME = {kind.__name__: kind for kind in POLICY_CLASSES}
_LENGTHS = frozenset({"delay", "max_wait", "per", "ttl", "wait", "window"})
"""Arguments that are durations; they are stored as microseconds."""


def dump_policies(policies: Iterable[Policy]) -> list[dict[str, Any]]:
    """Convert `policies` to JSON values.

    A subscriber stores them in its registration, where other processes read them: to apply the
    lowest limit, and to explain why a message waits.
    """
    return [
        {
            "kind": type(policy).__name__,
            **{
                attribute.name: _to_json(getattr(policy, attribute.name))
                for attribute in fields(policy)
                if attribute.init
            },
        }
        for policy in policies
    ]


def _to_json(value: Any) -> Any:
    """Convert an argument of a policy to a JSON value; `_parse_value` is the inverse."""
    match value:
        case Header():
            return {"header": value.name}
        case time():
            return value.isoformat()
        case frozenset():
            return [DAYS[day] for day in sorted(value)]
    return value


def read_policies(stored: Any) -> tuple[Policy, ...]:
    """Read policies written by `dump_policies`, without unknown kinds and arguments.

    Another version of the package, which knows other policies, may have written them.
    """
    policies = map(_parse_policy, stored if isinstance(stored, list) else ())
    return tuple(policy for policy in policies if policy is not None)


def _parse_policy(stored: Any) -> Policy | None:
    """Return the stored policy, or None if this version of the package does not know the policy."""
    try:
        return _build_policy(json.dumps(stored, sort_keys=True))
    except (SetupError, AttributeError, TypeError, ValueError, KeyError):
        return None


@lru_cache(maxsize=1024)
def _build_policy(stored: str) -> Policy:
    """Build a policy from JSON text; `_parse_policy` catches the errors.

    Cached, because all registrations are read once a second and are mostly equal. Text, because the
    cache needs a hashable argument.
    """
    arguments = json.loads(stored)
    policy_class = _CLASSES_BY_NAME[arguments.pop("kind")]
    parameters = inspect.signature(policy_class).parameters
    policy: Policy = policy_class(
        **{
            name: _parse_value(name, value)
            for name, value in arguments.items()
            if name in parameters
        }
    )
    return policy


def _parse_value(name: str, value: Any) -> Any:
    """Convert a stored argument for the policy's constructor, which takes durations in seconds.

    `_to_json` is the inverse, except that policies store durations in microseconds.
    """
    if isinstance(value, Mapping):
        return Header(value["header"])
    if name in _LENGTHS and value is not None:
        return value / MICROSECONDS
    if name in {"start", "end"}:
        # A Window stores 24:00, the end of the day, as 00:00.
        return "24:00" if (name, value) == ("end", "00:00:00") else time.fromisoformat(value)
    return value
