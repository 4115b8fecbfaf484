"""Checks of options, whoever takes them; every error says what was given and what is allowed."""

from collections.abc import Sequence

from faststream_sqlbroker.exceptions import SetupError


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
