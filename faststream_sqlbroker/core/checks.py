"""Checks of options and of queue names; every error says what was given and what is allowed."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError

Name = TypeVar("Name")


def whole_number(name: str, value: object, *, most: int | None = None, other: str = "") -> int:
    """`value` if it is a whole number from 1 to `most` (None: any).

    Raises:
        SetupError: it is not; `other` says what else is allowed.
    """
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < 1
        or (most is not None and value > most)
    ):
        allowed = "of 1 or more" if most is None else f"from 1 to {most}"
        raise SetupError(f"{name} must be a whole number {allowed}{other}, got {value!r}")
    return value


def flag(name: str, value: object) -> None:
    """Refuse what is not a bool."""
    if not isinstance(value, bool):
        raise SetupError(f"{name} must be True or False, got {value!r}")


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse what is not among `allowed`."""
    if value not in allowed:
        raise SetupError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def nearest(name: str, names: Iterable[str]) -> str:
    """What a mistaken name may mean."""
    choices = list(names)
    near = difflib.get_close_matches(name, choices, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(choices) or 'none'}"


class UnknownOptionError(SetupError, TypeError):
    """An option that does not exist."""


def refuse_unknown(
    what: str, options: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str]
) -> None:
    """Refuse `options` of `what` that are not `known`; `elsewhere` says of some what to do.

    Raises:
        UnknownOptionError: one is not; also a TypeError.
    """
    if unknown := set(options) - set(known):
        name = min(unknown)
        text = elsewhere.get(name) or nearest(name, known)
        raise UnknownOptionError(f"{what} has no option {name!r}: {text}")


def advice(*pairs: tuple[str, str]) -> dict[str, str]:
    """What to do in place of each option, of pairs such as ("topic subject", "use queue")."""
    return {name: text for names, text in pairs for name in names.split()}


# What may be the name of a queue; the same on every database.

LONGEST_NAME = 255
"""Characters; the length of the columns that hold names and keys."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_PLACEHOLDER = re.compile(r"(?<!\{)\{([a-zA-Z0-9_]+)\}(?!\})")
"""What FastStream takes for a parameter of an address, as in `logs.{level}`."""

REPLY_QUEUES = "sqlbroker.replies."
"""What the names of queues of replies begin with; each process has one."""


def name_problem(value: object) -> str | None:
    """Say what is wrong with `value` as a queue's name, or return None if nothing is.

    A name is 1 to 255 characters that can be encoded, without NUL and without a space at its end
    (MySQL and MariaDB compare "a " and "a" as equal, the others do not).
    """
    if not isinstance(value, str):
        return f"it must be a string, not {type(value).__name__}"
    return _text_problem(str(value))


def queue_problem(value: object) -> str | None:
    """The same for a queue that messages are published to or subscribed from.

    FastStream's other brokers take `logs.{level}` as a template that many queues match. Here it
    would be one queue of that name, which is not what its author means. No URL leads to `.` or
    `..`, which are steps of a path.
    """
    return name_problem(value) or _queue_problem(str(value))


def checked_name(value: Name, what: str = "the name of a queue") -> Name:
    """Return `value`, if `name_problem` finds nothing.

    Raises:
        SetupError: it cannot be `what`.
    """
    if problem := name_problem(value):
        raise SetupError(f"{short(value)} cannot be {what}: {problem}")
    return value


def checked_queue(value: Name) -> Name:
    """Return `value`, if `queue_problem` finds nothing.

    Raises:
        SetupError: it cannot.
    """
    if problem := queue_problem(value):
        raise SetupError(f"{short(value)} cannot be the name of a queue: {problem}")
    return value


@lru_cache(maxsize=1024)
def _queue_problem(value: str) -> str | None:
    if value in {".", ".."}:
        return "no URL can name it, as it is a step of a path there: use another name"
    found = _PLACEHOLDER.search(value)
    if found is None:
        return None
    return (
        f"{found[0]} makes it a template, and a queue has one name: name each queue, or use one "
        f"queue and put {found[1]!r} into the body or a header, by which "
        "@subscriber(filter=...) chooses a handler"
    )


@lru_cache(maxsize=1024)
def _text_problem(value: str) -> str | None:
    problems = (
        (not value, "it must not be empty"),
        (
            len(value) > LONGEST_NAME,
            f"it has {len(value)} characters, at most {LONGEST_NAME} are allowed",
        ),
        ("\x00" in value, "it must not hold a NUL character"),
        (_SURROGATE.search(value), "it must not hold a lone surrogate"),
        (value.endswith(" "), "it must not end in a space"),
    )
    return next((text for found, text in problems if found), None)
