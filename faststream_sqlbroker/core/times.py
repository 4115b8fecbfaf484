"""Durations as users write them, times as whole microseconds, and time zones."""

import math
import re
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from faststream_sqlbroker.core.checks import is_number
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import SetupError

Duration = float | timedelta | str
"""Seconds, a timedelta, or text such as "500ms", "60s", "1.5h", "2h45m", "30d" or "0"."""

MAX_SECONDS = 1e11
"""Maximum duration in seconds (about 3 170 years): a timedelta must be able to hold it."""

_UNITS = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_PART = r"([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(ms|s|m|h|d)"
_PARTS = re.compile(_PART)
_DURATION = re.compile(rf"([+-]?)(0|(?:{_PART}){{1,20}})")

_ALLOWED = 'use seconds, a timedelta, or text like "500ms", "60s", "1.5h", "2h45m" or "30d"'


def parse_duration(value: Duration, *, name: str = "duration") -> float:
    """Convert a duration to seconds.

    Text is an optional sign followed by decimal numbers, each with its unit: ms, s, m, h or d (24
    hours). "0" needs no unit. Digits may be missing on one side of the point (".5s", "1.s"). Parts
    add up, in any order; the sign applies to the sum; spaces are not allowed. The sum is exact
    before it becomes a float.

    Args:
        value: Seconds, a timedelta or text.
        name: Name of the option; the error message begins with it.

    Returns:
        Seconds; negative if the value is.

    Raises:
        SetupError: Any other type, NaN, an infinity, text that does not follow the grammar (such
            as a number other than 0 without its unit), or more than 1e11 seconds either way.
    """
    if isinstance(value, str):
        seconds = _parse_text(value, name)
    elif isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif is_number(value):
        seconds = _to_float(value)
    else:
        raise SetupError(f"{name} cannot be {value!r} of type {type(value).__name__}: {_ALLOWED}")
    if not math.isfinite(seconds) or abs(seconds) > MAX_SECONDS:
        raise SetupError(
            f"{name} must be a finite duration of at most {MAX_SECONDS:.0e} seconds, got "
            f"{_format_value(value)}"
        )
    return seconds


def parse_delay(value: Duration, *, name: str = "delay") -> float:
    """Return a delay in seconds; a negative `value` gives 0.

    Raises:
        SetupError: The value is not a valid duration; the message begins with `name`.
    """
    return max(0.0, parse_duration(value, name=name))


def parse_non_negative(name: str, value: Duration) -> float:
    """Return a duration of 0 or more in seconds.

    Raises:
        SetupError: The value is not a valid duration, or negative; the message begins with `name`.
    """
    seconds = parse_duration(value, name=name)
    if seconds < 0:
        raise SetupError(f"{name} must be 0 or more seconds, got {value!r}")
    return seconds


def parse_positive(name: str, value: Duration) -> float:
    """Return a duration above 0 in seconds.

    Raises:
        SetupError: The value is not a duration above 0; the message begins with `name`.
    """
    seconds = parse_duration(value, name=name)
    if seconds <= 0:
        raise SetupError(f"{name} must be longer than 0 seconds, got {value!r}")
    return seconds


def _parse_text(text: str, name: str) -> float:
    """Convert duration text to seconds; `parse_duration` describes the grammar."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise SetupError(
            f"{name} cannot be {_format_value(text)}: {_ALLOWED}, each number with its "
            "unit and without spaces"
        )
    # Fractions are exact, so the sum is rounded only once.
    total = sum(
        (Fraction(number) * _UNITS[unit] for number, unit in _PARTS.findall(match[2])), Fraction()
    )
    return float(-total if match[1] == "-" else total)


def _to_float(value: float) -> float:
    """Convert a number to a float; integers that are too large become infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _format_value(value: Duration) -> str:
    """Return `value` as text for an error message."""
    # Python refuses to convert an int of many thousand digits to text.
    if isinstance(value, int) and abs(value) > MAX_SECONDS:
        return "a larger integer"
    return format_value(value)


# Options for leases and waits.


def parse_lease(lease: Duration) -> float:
    """Return the length of a lease in seconds.

    Raises:
        SetupError: the value is not a duration above 0.
    """
    return parse_positive("lease", lease)


def parse_wait(wait: Duration | None) -> float | None:
    """Return the maximum wait in seconds; None means no limit.

    Raises:
        SetupError: the value is not a valid duration, or negative.
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


def to_microseconds(timestamp: datetime) -> int:
    """Convert an aware datetime to microseconds since 1970."""
    return (timestamp - EPOCH) // TICK


def from_microseconds(microseconds: int) -> datetime:
    """Convert microseconds since 1970 to an aware datetime (UTC)."""
    return EPOCH + timedelta(microseconds=microseconds)


MIN_TIMESTAMP = to_microseconds(datetime.min.replace(tzinfo=timezone.utc))
MAX_TIMESTAMP = to_microseconds(datetime.max.replace(tzinfo=timezone.utc))
"""The years 1 to 9999, the range of Python's datetimes. In SQLite text and bytes, which any column
accepts, sort after all numbers."""


# Time zones.


def find_zone(name: str, owner: str) -> ZoneInfo:
    """Return the time zone called `name` in the IANA database.

    Args:
        name: Name of the zone.
        owner: The owner of the option, such as "Window's"; the error message begins with it.

    Raises:
        SetupError: there is no zone of that name, or no database of time zones.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, TypeError, AttributeError, OSError) as error:
        if not available_timezones():
            raise SetupError(
                f"{owner} tz cannot be {format_value(name)}: this machine has no time zone "
                "database: pip install tzdata, or install the operating system's package tzdata"
            ) from error
        raise SetupError(
            f"{owner} tz cannot be {format_value(name)}: use a name of the IANA database such "
            'as "UTC" or "Europe/Berlin"'
        ) from error


def format_duration(seconds: float) -> str:
    """Format a duration in the largest suitable unit."""
    for limit, unit, divisor in ((120, "s", 1), (7_200, "min", 60), (172_800, "h", 3_600)):
        if abs(seconds) < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
