"""What a retry strategy is, the bounds of its arguments and delays, and the base class that a
strategy of your own derives from.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Protocol, cast

from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, seconds_or_zero
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


class RetryStrategyProto(Protocol):
    """Decides whether and when a failed message is tried again.

    `exception` is what the handler raised, or None after a plain nack. It may be left out of the
    signature: strategies with the three other arguments are called without it. A strategy that
    raises ends the message as FAILED.
    """

    def get_next_attempt_at(
        self,
        *,
        first_attempt_at: datetime,
        last_attempt_at: datetime,
        attempts_count: int,
        exception: BaseException | None = None,
    ) -> datetime | None:
        """Return when to try again, or None to give up.

        The time is aware if `last_attempt_at` is, else naive.
        """
        ...


def attempts_limit(strategy: RetryStrategyProto | None) -> int | None:
    """Return `strategy.max_attempts`, or None if it is not a whole number of 1 or more."""
    limit = getattr(strategy, "max_attempts", None)
    return limit if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1 else None


def most_attempts(strategy: RetryStrategyProto | None) -> int | None:
    """Return the most attempts `strategy` allows: 1 without a strategy, None if it does not say."""
    return 1 if strategy is None else attempts_limit(strategy)


def retries_after(strategy: RetryStrategyProto | None, exception: BaseException | None) -> bool:
    """Whether `strategy` tries again after `exception`; without a method `retries` it does.

    Raises:
        Exception: Whatever that method raises.
    """
    retries = getattr(strategy, "retries", None)
    return exception is None or not callable(retries) or bool(retries(exception))


def next_delay(
    strategy: RetryStrategyProto | None,
    *,
    first_attempt_at: datetime,
    last_attempt_at: datetime,
    attempts_count: int,
    exception: BaseException | None = None,
) -> float | None:
    """Ask `strategy` how long to wait before the next attempt; `attempts_count` 0 counts as 1.

    Returns:
        Seconds from `last_attempt_at`, 0 or more; None to give up (always so without a strategy).

    Raises:
        TypeError: The strategy returned something else than a datetime or None.
        Exception: Whatever the strategy raises.
    """
    if strategy is None:
        return None
    method: Any = strategy.get_next_attempt_at
    extra = (
        {"exception": exception} if _takes_exception(getattr(method, "__func__", method)) else {}
    )
    due = method(
        first_attempt_at=first_attempt_at,
        last_attempt_at=last_attempt_at,
        attempts_count=max(attempts_count, 1),
        **extra,
    )
    if due is None:
        return None
    if not isinstance(due, datetime):
        raise TypeError(
            f"{type(strategy).__name__}.get_next_attempt_at must return a datetime or None, "
            f"got {type(due).__name__}"
        )
    return bounded((due - last_attempt_at).total_seconds())


@lru_cache(maxsize=256)
def _takes_exception(function: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    found = parameters.get("exception")
    return found is not None and found.kind is not found.POSITIONAL_ONLY


# The base class for strategies of your own.

_Classes = tuple[type[BaseException], ...]


@dataclass(kw_only=True)
class RetryStrategyTemplate(ABC):
    """Base of strategies. A subclass says how long to wait; this class decides when to give up.

    It gives up when `attempts_count` has reached `max_attempts`, or when the next attempt would
    begin more than `max_total_delay_seconds` after the first. None is no limit.

    It also gives up at once, with the reason `not_retried`, after an exception of a class in
    `no_retry_on`, or, if `retry_on` is given, of no class in `retry_on`. `no_retry_on` wins. Each
    is an exception class or several; subclasses count, causes do not. An exception group is
    retried if all exceptions in it are, or if its own class is named. A nack without an exception,
    or with its own delay, is not judged by its class. To decide otherwise, override `retries`.

    Raises:
        SetupError: `max_attempts` is below 1, `max_total_delay_seconds` below 0, or what should be
            exception classes is not.
    """

    max_total_delay_seconds: Duration | None = None
    max_attempts: int | None = None
    retry_on: ErrorClasses | None = None
    no_retry_on: ErrorClasses | None = None

    def __post_init__(self) -> None:
        """Check the limits; a subclass that checks its own arguments calls this too."""
        if self.max_attempts is not None:
            whole_number("max_attempts", self.max_attempts, other=", or None for no limit")
        for each in fields(self):
            is_given = getattr(self, each.name) is not None
            if each.type == Duration or (each.type == Duration | None and is_given):
                setattr(self, each.name, self._seconds(each.name))
        if self.retry_on is not None:
            self.retry_on = error_classes(self.retry_on, "retry_on")
        if self.no_retry_on is not None:
            self.no_retry_on = error_classes(self.no_retry_on, "no_retry_on")

    def retries(self, exception: BaseException) -> bool:
        """Return whether an attempt that ended in `exception` is worth another."""
        # error_classes() has made tuples of both.
        never = cast("_Classes | None", self.no_retry_on)
        only = cast("_Classes | None", self.retry_on)
        if never is not None and matches(exception, never, whole=False):
            return False
        return only is None or matches(exception, only, whole=True)

    @abstractmethod
    def get_delay_seconds(self, attempts_count: int) -> float:
        """Return the seconds to wait after attempt `attempts_count` (1 or more)."""

    def get_next_attempt_at(
        self,
        *,
        first_attempt_at: datetime,
        last_attempt_at: datetime,
        attempts_count: int,
        exception: BaseException | None = None,
    ) -> datetime | None:
        """Return `last_attempt_at` plus the delay, or None when a limit is reached or `exception`
        is not retried.

        Raises:
            ValueError: `attempts_count` is below 1, or the subclass returned NaN.
        """
        steps(attempts_count)
        if exception is not None and not self.retries(exception):
            return None
        if self.max_attempts is not None and attempts_count >= self.max_attempts:
            return None
        delay = timedelta(seconds=bounded(self.get_delay_seconds(attempts_count)))
        total = (last_attempt_at - first_attempt_at + delay).total_seconds()
        if self.max_total_delay_seconds is not None and total > self._seconds(
            "max_total_delay_seconds"
        ):
            return None
        return last_attempt_at + delay

    def _seconds(self, name: str) -> float:
        return seconds_or_zero(name, getattr(self, name))
