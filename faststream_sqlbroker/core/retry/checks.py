"""Bounds of the arguments and delays of retry strategies."""

import math
from collections.abc import Sequence

from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, parse_duration
from faststream_sqlbroker.exceptions import SetupError

LONGEST_DELAY_SECONDS = 100 * 365 * 86400.0
"""100 years. Longer delays are cut to this, so that every database can store the due time."""

ErrorClasses = type[BaseException] | Sequence[type[BaseException]]
"""An exception class, or several."""

_MOST_STEPS = 10**15
"""More make no difference to a delay, and a float still counts them one by one."""
"""Attempts; every integer up to this is exact as a float."""

LARGEST = 1e300
"""The largest factor allowed; well below the largest float, 1.8e308."""


def bounded(delay: float) -> float:
    """Return `delay` (seconds) cut to 0..100 years.

    Raises:
        ValueError: `delay` is NaN.
    """
    if math.isnan(delay):
        raise ValueError(f"a delay must be a number of seconds, got {delay!r}")
    return min(max(delay, 0.0), LONGEST_DELAY_SECONDS)


def steps(attempts_count: int) -> int:
    """Return n - 1, how often the delay has grown; at most `_MOST_STEPS`.

    Raises:
        ValueError: `attempts_count` is below 1.
    """
    if attempts_count < 1:
        raise ValueError(
            "attempts_count must be 1 or more (the attempt that just ended counts), got "
            f"{attempts_count!r}"
        )
    return min(attempts_count - 1, _MOST_STEPS)


def as_seconds(value: Duration, name: str) -> float:
    """Return `value` in seconds.

    Raises:
        SetupError: It is not a valid duration, or negative.
    """
    seconds = parse_duration(value, name=name)
    if seconds < 0:
        raise SetupError(f"{name} must be 0 or more seconds, got {value!r}")
    return seconds


def check_factor(value: float, name: str, *, least: float) -> None:
    """Check that `value` is a finite number of at least `least`.

    Raises:
        SetupError: It is not.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and least <= value <= LARGEST):
        raise SetupError(f"{name} must be a finite number of {least:g} or more, got {value!r}")


def error_classes(value: object, name: str) -> tuple[type[BaseException], ...]:
    """Return `value`, an exception class or several, as a tuple.

    Raises:
        SetupError: It is something else, or empty.
    """
    classes = tuple(value) if isinstance(value, tuple | list | set | frozenset) else (value,)
    wrong = [
        each for each in classes if not (isinstance(each, type) and issubclass(each, BaseException))
    ]
    if wrong or not classes:
        got = (
            f"{short(wrong[0])} in {short(value)}"
            if wrong and value is not wrong[0]
            else short(value)
        )
        raise SetupError(
            f"{name} must be an exception class, or a tuple or list of one or more, such as "
            f"(ConnectionError, TimeoutError), got {got}; leave it out to make no difference "
            "between errors"
        )
    return classes


def matches(
    exception: BaseException, classes: tuple[type[BaseException], ...], *, whole: bool
) -> bool:
    """Whether `exception` is of `classes`.

    Of an exception group, all members must be if `whole`, else one of them.
    """
    if isinstance(exception, classes):
        return True
    if not isinstance(exception, BaseExceptionGroup):
        return False
    inner = (matches(each, classes, whole=whole) for each in exception.exceptions)
    return all(inner) if whole else any(inner)


def check_max_attempts(value: int | None) -> None:
    """Check that `value` is None or a whole number of at least 1.

    Raises:
        SetupError: It is not.
    """
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SetupError(
            f"max_attempts must be a whole number of 1 or more, or None for no limit, got {value!r}"
        )
