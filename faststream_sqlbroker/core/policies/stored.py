"""Policies as JSON, as subscribers tell them to each other, and the texts of older versions."""

import ast
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import time
from functools import lru_cache
from typing import Any

from faststream_sqlbroker.core.policies.checks import KINDS, Policy
from faststream_sqlbroker.core.policies.header import Header
from faststream_sqlbroker.core.policies.window import Window
from faststream_sqlbroker.exceptions import SetupError

VERSION = 1
"""Raise it if what version 1 says of a policy would mislead a process that reads it. Such a process
reads the texts instead. It leaves out arguments that it does not know."""
_KINDS = {kind.__name__: kind for kind in KINDS}

_TEXT = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ARGUMENT = re.compile(
    rf"(?:(?P<name>\w+)=)?"
    rf"(?:Header\((?P<header>{_QUOTED})\)|(?P<quoted>{_QUOTED})|(?P<plain>(?:[^,]|,(?! ))*))"
    rf"(?:, |$)",
    re.DOTALL,
)
_LENGTH = re.compile(r"([0-9.e+-]+)s")


def policies_json(policies: Iterable[Policy]) -> dict[str, Any]:
    """`policies` as a JSON value, with its version."""
    told = [{"kind": type(policy).__name__, **policy.as_json()} for policy in policies]
    return {"version": VERSION, "policies": told}


def read_policies(told: Any, texts: Sequence[str]) -> tuple[Policy, ...]:
    """What `policies_json` has written as `told`; else what `str` has written as `texts`.

    What this version does not know is left out.
    """
    listed = told.get("policies") if isinstance(told, Mapping) else None
    if isinstance(listed, list) and told.get("version") == VERSION:
        found = [_read(each) for each in listed]
    else:
        found = [_read(_arguments(text)) for text in texts]
    return tuple(policy for policy in found if policy is not None)


def _read(told: Any) -> Policy | None:
    if not isinstance(told, Mapping):
        return None
    try:
        return _built(json.dumps(told, sort_keys=True))
    except (SetupError, TypeError, ValueError, KeyError):
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
    if name in {"start", "end"}:
        return "24:00" if (name, value) == ("end", "00:00") else time.fromisoformat(value)
    return value


# Versions before told the texts only: `Throttle(10, per=1s, key=Header('tenant'), scope='mail')`.


def _arguments(text: str) -> dict[str, Any] | None:
    """The JSON value of the policy that `str` wrote as `text`; None for other text."""
    match = _TEXT.fullmatch(text)
    if match is None or match[1] not in _KINDS:
        return None
    kind = _KINDS[match[1]]
    found: dict[str, Any] = {"kind": match[1]}
    first = next(iter(inspect.signature(kind).parameters))
    for part in _ARGUMENT.finditer(match[2]):
        found.setdefault(part["name"] or first, _argument(part))
    if kind is Window:
        hours, _, found["tz"] = str(found["start"]).partition(" ")
        found["start"], _, found["end"] = hours.partition("-")
        if "days" in found:
            found["days"] = found["days"].split(",")
    return found


def _argument(part: re.Match[str]) -> Any:
    if part["header"] is not None:
        return {"header": ast.literal_eval(part["header"])}
    if part["quoted"] is not None:
        return ast.literal_eval(part["quoted"])
    plain: str = part["plain"]
    if (length := _LENGTH.fullmatch(plain)) is not None:
        return float(length[1])
    if plain.isdecimal():
        return int(plain)
    return True if plain == "True" else plain
