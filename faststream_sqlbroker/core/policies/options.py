"""Checks that the policies' arguments share."""

from collections.abc import Sequence

from faststream_sqlbroker.core.duration import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

MICROSECONDS = 1_000_000
WITHOUT_KEY = ("deliver", "dead_letter")
"""What may become of a message without the key that a policy needs."""


def microseconds(name: str, value: Duration, *, zero: bool = False) -> int:
    """`value` in whole microseconds.

    Raises:
        SetupError: it is no length of time, negative, or 0 unless `zero`.
    """
    seconds = parse_duration(value, name=name)
    length = round(seconds * MICROSECONDS)
    if length < 0 or (length == 0 and not zero):
        raise SetupError(f"{name} must be {'0 or more' if zero else 'longer than 0'} seconds, got {value!r}")
    return length


def whole_number(name: str, value: object, most: int) -> int:
    """`value` if it is a whole number from 1 to `most`.

    Raises:
        SetupError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise SetupError(f"{name} must be a whole number from 1 to {most}, got {value!r}")
    return value


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse what is not among `allowed`."""
    if value not in allowed:
        raise SetupError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def without_key(name: str, value: object, *, keyed: bool, mend: str) -> None:
    """Refuse what is no answer, and an answer where no key is asked for."""
    one_of(f"{name}'s without_key", value, WITHOUT_KEY)
    if not keyed and value != WITHOUT_KEY[0]:
        raise SetupError(
            f"{name}'s without_key={value!r} says what becomes of messages without a key, but without {mend} it does "
            f"not look at keys: add {mend}, or leave without_key out"
        )


def flag(name: str, value: object) -> None:
    """Refuse what is not a bool."""
    if not isinstance(value, bool):
        raise SetupError(f"{name} must be True or False, got {value!r}")


def seconds(length: int) -> str:
    """A length in microseconds as people write it."""
    return f"{length / MICROSECONDS:g}s"
