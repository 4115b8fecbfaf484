"""Checks of options and queue names. Errors contain the given and the allowed values."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeGuard, TypeVar

from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import SetupError

Name = TypeVar("Name")


def is_whole_number(value: object) -> TypeGuard[int]:
    """Return True for a whole number, but not for a bool, which is an int in Python."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for an int or a float, but not for a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def validate_integer(
    name: str, value: object, *, maximum: int | None = None, other: str = ""
) -> int:
    """Check and return a whole number from 1 to `maximum` (None: no maximum).

    Raises:
        SetupError: the value is invalid; `other` names further allowed values.
    """
    if not is_whole_number(value) or value < 1 or (maximum is not None and value > maximum):
        allowed = "of 1 or more" if maximum is None else f"from 1 to {maximum}"
        raise SetupError(f"{name} must be a whole number {allowed}{other}, got {value!r}")
    return value


def check_bool(name: str, value: object) -> None:
    """Refuse a value that is not a bool."""
    if not isinstance(value, bool):
        raise SetupError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a value that is not among `allowed`."""
    if value not in allowed:
        raise SetupError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def suggest_name(name: str, names: Iterable[str]) -> str:
    """Suggest the most similar of `names`, or list all names."""
    choices = list(names)
    matches = difflib.get_close_matches(name, choices, n=1)
    if matches:
        return f"did you mean {matches[0]!r}?"
    return f"choose from {', '.join(choices)}" if choices else "none exists"


class UnknownOptionError(SetupError, TypeError):
    """An option that does not exist."""


def reject_unknown_options(
    subject: str, options: Iterable[str], allowed: Iterable[str], hints: Mapping[str, str]
) -> None:
    """Refuse `options` of `subject` that are not `allowed`; `hints` has texts for some options.

    Raises:
        UnknownOptionError: an option is unknown; also a TypeError.
    """
    if unknown := set(options) - set(allowed):
        name = min(unknown)
        text = hints.get(name) or suggest_name(name, allowed)
        raise UnknownOptionError(f"{subject} has no option {name!r}: {text}")


def build_hints(*pairs: tuple[str, str]) -> dict[str, str]:
    """Build hints by option name from pairs such as ("topic subject", "use queue")."""
    return {name: text for names, text in pairs for name in names.split()}


# Names of queues; the rules are the same on every database.

MAX_NAME_LENGTH = 255
"""Maximum length in characters: the length of the columns of names and keys."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_PLACEHOLDER = re.compile(r"(?<!\{)\{([a-zA-Z0-9_]+)\}(?!\})")
"""A parameter of an address to FastStream, as in `logs.{level}`."""

REPLY_QUEUES = "sqlbroker.replies."
"""Prefix of the names of reply queues; each process has one reply queue."""


def find_name_error(value: object) -> str | None:
    """Return the error in a name of a queue, or None if the name is valid.

    A name is 1 to 255 characters that can be encoded, without NUL and without a space at its end
    (MySQL and MariaDB compare "a " and "a" as equal, the other databases do not).
    """
    if not isinstance(value, str):
        return f"it must be a string, not {type(value).__name__}"
    return _find_text_error(str(value))


def find_queue_error(value: object) -> str | None:
    """Return the error in the name of a queue to publish to or subscribe from, or None.

    FastStream's other brokers take `logs.{level}` as a template that many queues match. Here it
    would be a single queue of that name, which is not what its author intended. No URL can contain
    `.` or `..`, which are steps of a path.
    """
    return find_name_error(value) or _find_queue_error(str(value))


def validate_name(value: Name, subject: str = "the name of a queue") -> Name:
    """Return `value` if `find_name_error` returns None.

    Raises:
        SetupError: the value cannot be `subject`.
    """
    if error := find_name_error(value):
        raise SetupError(f"{format_value(value)} cannot be {subject}: {error}")
    return value


def validate_queue(value: Name, subject: str = "the name of a queue") -> Name:
    """Return `value` if `find_queue_error` returns None.

    Raises:
        SetupError: the value cannot be `subject`.
    """
    if error := find_queue_error(value):
        raise SetupError(f"{format_value(value)} cannot be {subject}: {error}")
    return value


@lru_cache(maxsize=1024)
def _find_queue_error(value: str) -> str | None:
    """Return the error of a name that is a path step or a template, or None.

    Cached, because each publish checks its queue.
    """
    if value in {".", ".."}:
        return "a URL cannot contain it, because it is a path step there: use another name"
    match = _PLACEHOLDER.search(value)
    if match is None:
        return None
    return (
        f"templates such as {match[0]} are not supported: name each queue, or use one queue, put "
        f"{match[1]!r} into the body or a header, and choose the handler with "
        "@subscriber(filter=...)"
    )


@lru_cache(maxsize=1024)
def _find_text_error(value: str) -> str | None:
    """Return the error of a name that some database cannot store or compare, or None.

    Cached, because each publish checks its queue and key.
    """
    errors = (
        (not value, "it must not be empty"),
        (
            len(value) > MAX_NAME_LENGTH,
            f"it has {len(value)} characters, at most {MAX_NAME_LENGTH} are allowed",
        ),
        ("\x00" in value, "it must not contain a NUL character"),
        (_SURROGATE.search(value), "it must not contain a lone surrogate"),
        (value.endswith(" "), "it must not end in a space"),
    )
    return next((text for is_error, text in errors if is_error), None)
