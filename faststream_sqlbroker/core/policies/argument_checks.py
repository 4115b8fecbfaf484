"""Shared checks of the policies' arguments."""

from faststream_sqlbroker.core.checks import check_choice
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

MICROSECONDS = 1_000_000
"""Microseconds in a second; policies use whole microseconds, as the databases do."""
CLOCK_STEP = 60 * MICROSECONDS
"""If a stored time is later than possible by more than this, the database's clock was set back
(microseconds)."""
WITHOUT_KEY = ("deliver", "dead_letter")
"""What may happen to a message without the key that a policy needs."""


def set_attributes(policy: object, **values: object) -> None:
    """Set attributes of a frozen `policy`.

    Policies convert their arguments in `__init__`, where a frozen dataclass cannot assign.
    """
    for name, value in values.items():
        object.__setattr__(policy, name, value)


def parse_microseconds(name: str, value: Duration) -> int:
    """Return `value` in whole microseconds.

    Raises:
        SetupError: the value is not a duration above 0.
    """
    length = round(parse_duration(value, name=name) * MICROSECONDS)
    if length <= 0:
        raise SetupError(f"{name} must be longer than 0 seconds, got {value!r}")
    return length


def check_without_key(name: str, value: object, *, has_key: bool, option: str) -> None:
    """Refuse an unknown value, and any but the default if the policy does not use keys.

    There the option would have no effect. `option` is the argument that turns on keys.
    """
    check_choice(f"{name}'s without_key", value, WITHOUT_KEY)
    if not has_key and value != WITHOUT_KEY[0]:
        raise SetupError(
            f"{name}'s without_key={value!r} applies to messages without a key, but without "
            f"{option} the policy ignores keys: add {option}, or omit without_key"
        )


def format_seconds(microseconds: int) -> str:
    """Format a number of microseconds as a duration."""
    return f"{microseconds / MICROSECONDS:g}s"
