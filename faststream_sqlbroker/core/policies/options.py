"""Checks that the policies' arguments share."""

from faststream_sqlbroker.core.checks import one_of
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

MICROSECONDS = 1_000_000
"""In a second; policies count whole ones, as the databases do."""
CLOCK_STEP = 60 * MICROSECONDS
"""A stored time that is so much later than it could have been written shows that the database's
clock was set back (microseconds)."""
WITHOUT_KEY = ("deliver", "dead_letter")
"""What may happen to a message without the key that a policy needs."""


def assign(policy: object, **values: object) -> None:
    """Give a frozen `policy` attributes."""
    for name, value in values.items():
        object.__setattr__(policy, name, value)


def microseconds(name: str, value: Duration) -> int:
    """`value` in whole microseconds.

    Raises:
        SetupError: it is not a duration above 0.
    """
    length = round(parse_duration(value, name=name) * MICROSECONDS)
    if length <= 0:
        raise SetupError(f"{name} must be longer than 0 seconds, got {value!r}")
    return length


def without_key(name: str, value: object, *, keyed: bool, mend: str) -> None:
    """Refuse an unknown value, and any but the default if the policy does not use keys."""
    one_of(f"{name}'s without_key", value, WITHOUT_KEY)
    if not keyed and value != WITHOUT_KEY[0]:
        raise SetupError(
            f"{name}'s without_key={value!r} says what becomes of messages without a key, but "
            f"without {mend} it does not look at keys: add {mend}, or leave without_key out"
        )


def seconds(length: int) -> str:
    """A length in microseconds, as people write lengths."""
    return f"{length / MICROSECONDS:g}s"
