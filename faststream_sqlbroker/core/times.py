"""Durations as users write them, moments as whole microseconds, and time zones."""

import math
import re
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError

Duration = float | timedelta | str
"""Seconds, a timedelta, or text such as "500ms", "60s", "1.5h", "2h45m", "30d" or "0"."""

LONGEST_SECONDS = 1e11
"""No length may exceed this many seconds (about 3 170 years): a timedelta must be able to hold it.
"""

_UNITS = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_PART = r"([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(ms|s|m|h|d)"
_PARTS = re.compile(_PART)
_WHOLE = re.compile(rf"([+-]?)(0|(?:{_PART}){{1,20}})")

_ALLOWED = 'it takes seconds, a timedelta, or text like "500ms", "60s", "1.5h", "2h45m" or "30d"'


def parse_duration(value: Duration, *, name: str = "duration") -> float:
    """Turn `value` into seconds.

    Text is an optional sign followed by decimal numbers, each with its unit: ms, s, m, h or d (24
    hours). "0" needs no unit. Digits may be missing on one side of the point (".5s", "1.s"). Parts
    add up, in any order; the sign is that of the whole; spaces are not allowed. The sum is exact
    before it becomes a float.

    Args:
        value: Seconds, a timedelta or text.
        name: What the value is for; the error message begins with it.

    Returns:
        Seconds; negative if the value is.

    Raises:
        SetupError: Any other type, NaN, an infinity, text that does not follow the grammar (a
            number other than 0 without its unit does not), or more than 1e11 seconds either way.
    """
    if isinstance(value, str):
        seconds = _parse_text(value, name)
    elif isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = _to_float(value)
    else:
        raise SetupError(f"{name} cannot be {value!r} of type {type(value).__name__}: {_ALLOWED}")
    if not math.isfinite(seconds) or abs(seconds) > LONGEST_SECONDS:
        raise SetupError(
            f"{name} must be a finite length of at most {LONGEST_SECONDS:.0e} seconds, got "
            f"{_short(value)}"
        )
    return seconds


def delay_seconds(value: Duration, *, name: str = "delay") -> float:
    """Return in how many seconds something is due. A negative `value` gives 0: at once.

    Raises:
        SetupError: It is not a valid duration; the message begins with `name`.
    """
    return max(0.0, parse_duration(value, name=name))


def seconds_or_zero(name: str, value: Duration) -> float:
    """Return `value` in seconds.

    Raises:
        SetupError: It is not a valid duration, or negative; the message begins with `name`.
    """
    seconds = parse_duration(value, name=name)
    if seconds < 0:
        raise SetupError(f"{name} must be 0 or more seconds, got {value!r}")
    return seconds


def positive_seconds(name: str, value: Duration) -> float:
    """Return `value` in seconds.

    Raises:
        SetupError: It is not a duration above 0; the message begins with `name`.
    """
    seconds = parse_duration(value, name=name)
    if seconds <= 0:
        raise SetupError(f"{name} must be longer than 0 seconds, got {value!r}")
    return seconds


def _parse_text(text: str, name: str) -> float:
    match = _WHOLE.fullmatch(text)
    if match is None:
        raise SetupError(
            f"{name} cannot be {_short(text)}: {_ALLOWED}, each number with its unit, no spaces"
        )
    total = sum(
        (Fraction(number) * _UNITS[unit] for number, unit in _PARTS.findall(match[2])), Fraction()
    )
    return float(-total if match[1] == "-" else total)


def _to_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short(value: Duration) -> str:
    # An int of many thousand digits has no repr: Python refuses to make it.
    if isinstance(value, int) and abs(value) > LONGEST_SECONDS:
        return "a larger integer"
    return short(value)


# Leases and waits, as users write them, in seconds.


def lease_seconds(lease: Duration) -> float:
    """A lease in seconds.

    Raises:
        SetupError: it is not a duration above 0.
    """
    return positive_seconds("lease", lease)


def wait_seconds(wait: Duration | None) -> float | None:
    """How long to wait, in seconds; None: without a limit.

    Raises:
        SetupError: it is not a valid duration, or negative.
    """
    if wait is None:
        return None
    seconds = parse_duration(wait, name="wait")
    if seconds < 0:
        raise SetupError(f"wait must be 0 or more seconds, or None for no limit, got {wait!r}")
    return seconds


# Times as whole microseconds since 1970 (UTC). Integers are exact; floats of seconds are not.

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
TICK = timedelta(microseconds=1)
"""The resolution of every time that the broker stores."""


def to_microseconds(moment: datetime) -> int:
    """An aware datetime as microseconds."""
    return (moment - EPOCH) // TICK


def from_microseconds(microseconds: int) -> datetime:
    """Microseconds as an aware datetime (UTC)."""
    return EPOCH + timedelta(microseconds=microseconds)


FIRST_MOMENT = to_microseconds(datetime.min.replace(tzinfo=timezone.utc))
LAST_MOMENT = to_microseconds(datetime.max.replace(tzinfo=timezone.utc))
"""The years 1 to 9999, which Python knows. In SQLite text and bytes, which any column takes, sort
after all numbers."""


# Time zones by their names.


def find_zone(name: str, of: str) -> ZoneInfo:
    """The time zone called `name` in the IANA database.

    Args:
        name: Of the zone.
        of: The owner of the option, such as "Window's"; the error message begins with it.

    Raises:
        SetupError: there is no zone of that name, or no database of time zones.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, TypeError, AttributeError, OSError) as error:
        if not available_timezones():
            raise SetupError(
                f"{of} tz cannot be {short(name)}: this machine has no time zone database at all; "
                "pip install tzdata, or install the operating system's package of that name"
            ) from error
        raise SetupError(
            f'{of} tz cannot be {short(name)}: it is a name of the IANA database such as "UTC" or '
            '"Europe/Berlin"'
        ) from error


def length_text(seconds: float) -> str:
    """Return a length of time for people, in its largest unit."""
    for limit, unit, one in ((120, "s", 1), (7_200, "min", 60), (172_800, "h", 3_600)):
        if abs(seconds) < limit:
            return f"{seconds / one:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
