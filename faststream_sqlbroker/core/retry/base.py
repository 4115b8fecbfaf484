"""The protocol of retry strategies, the limits of their values, and a base class for your own."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Protocol, cast

from faststream_sqlbroker.core.checks import is_number, is_whole_number, validate_integer
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration, parse_non_negative
from faststream_sqlbroker.exceptions import SetupError

MAX_DELAY_SECONDS = 100 * 365 * 86400.0
"""100 years. Longer delays are cut to this, so that every database can store the due time."""

ErrorClasses = type[BaseException] | Sequence[type[BaseException]]
"""An exception class or several."""

_MAX_STEPS = 10**15
"""Maximum number of attempts in a formula. More make no difference to a delay, and every integer up
to this is exact as a float."""

MAX_FACTOR = 1e300
"""Maximum factor, well below the largest float, 1.8e308."""


def clamp_delay(delay: float) -> float:
    """Return `delay` (seconds) cut to 0..100 years.

    Raises:
        ValueError: `delay` is NaN.
    """
    if math.isnan(delay):
        raise ValueError(f"a delay must be a number of seconds, got {delay!r}")
    return min(max(delay, 0.0), MAX_DELAY_SECONDS)


def count_steps(attempts_count: int) -> int:
    """Return n - 1, the number of increases of the delay; at most `_MAX_STEPS`.

    Raises:
        ValueError: `attempts_count` is below 1.
    """
    if attempts_count < 1:
        raise ValueError(
            "attempts_count must be 1 or more (the attempt that just ended counts), got "
            f"{attempts_count!r}"
        )
    return min(attempts_count - 1, _MAX_STEPS)


def check_factor(value: float, name: str, *, minimum: float) -> None:
    """Check that `value` is a finite number of at least `minimum`.

    Raises:
        SetupError: the value is invalid.
    """
    if not (is_number(value) and minimum <= value <= MAX_FACTOR):
        raise SetupError(f"{name} must be a finite number of {minimum:g} or more, got {value!r}")


def validate_error_classes(value: object, name: str) -> tuple[type[BaseException], ...]:
    """Return an exception class, or several, as a tuple.

    Raises:
        SetupError: the value is something else, or empty.
    """
    classes = tuple(value) if isinstance(value, tuple | list | set | frozenset) else (value,)
    invalid = [
        item for item in classes if not (isinstance(item, type) and issubclass(item, BaseException))
    ]
    if invalid or not classes:
        display_value = (
            f"{format_value(invalid[0])} in {format_value(value)}"
            if invalid and value is not invalid[0]
            else format_value(value)
        )
        raise SetupError(
            f"{name} must be an exception class, or a tuple or list of one or more, such as "
            f"(ConnectionError, TimeoutError), got {display_value}; omit it to treat all errors "
            "alike"
        )
    return classes


def is_match(
    exception: BaseException, classes: tuple[type[BaseException], ...], *, require_all: bool
) -> bool:
    """Return True if `exception` is of `classes`.

    For an exception group, all members must match if `require_all`, else at least one.
    """
    if isinstance(exception, classes):
        return True
    if not isinstance(exception, BaseExceptionGroup):
        return False
    inner = (is_match(member, classes, require_all=require_all) for member in exception.exceptions)
    return all(inner) if require_all else any(inner)


class RetryStrategyProto(Protocol):
    """Decides whether and when a failed message is tried again.

    `exception` is the exception raised by the handler, or None after a plain nack. A strategy may
    omit it from the signature: strategies with the three other arguments are called without it. A
    strategy that raises ends the message as FAILED.
    """

    def get_next_attempt_at(
        self,
        *,
        first_attempt_at: datetime,
        last_attempt_at: datetime,
        attempts_count: int,
        exception: BaseException | None = None,
    ) -> datetime | None:
        """Return the time of the next attempt, or None to give up.

        The time is aware if `last_attempt_at` is, else naive.
        """
        ...


def get_strategy_limit(strategy: RetryStrategyProto | None) -> int | None:
    """Return `strategy.max_attempts`, or None unless that is a whole number of 1 or more."""
    limit = getattr(strategy, "max_attempts", None)
    return limit if is_whole_number(limit) and limit >= 1 else None


def get_max_attempts(strategy: RetryStrategyProto | None) -> int | None:
    """Return the maximum attempts of `strategy`: 1 without a strategy, None without a limit."""
    return 1 if strategy is None else get_strategy_limit(strategy)


def is_retried(strategy: RetryStrategyProto | None, exception: BaseException | None) -> bool:
    """Return True if `strategy` tries again after `exception`; always without a method `retries`.

    Raises:
        Exception: Whatever that method raises.
    """
    retries = getattr(strategy, "retries", None)
    return exception is None or not callable(retries) or bool(retries(exception))


def compute_delay(
    strategy: RetryStrategyProto | None,
    *,
    first_attempt_at: datetime,
    last_attempt_at: datetime,
    attempts_count: int,
    exception: BaseException | None = None,
) -> float | None:
    """Ask `strategy` for the delay before the next attempt; `attempts_count` 0 counts as 1.

    Returns:
        Seconds from `last_attempt_at`, 0 or more; None to give up (always without a strategy).

    Raises:
        TypeError: The strategy returned something else than a datetime or None.
        Exception: Whatever the strategy raises.
    """
    if strategy is None:
        return None
    method: Any = strategy.get_next_attempt_at
    error_argument = (
        {"exception": exception} if _accepts_exception(getattr(method, "__func__", method)) else {}
    )
    due = method(
        first_attempt_at=first_attempt_at,
        last_attempt_at=last_attempt_at,
        attempts_count=max(attempts_count, 1),
        **error_argument,
    )
    if due is None:
        return None
    if not isinstance(due, datetime):
        raise TypeError(
            f"{type(strategy).__name__}.get_next_attempt_at must return a datetime or None, "
            f"got {type(due).__name__}"
        )
    return clamp_delay((due - last_attempt_at).total_seconds())


@lru_cache(maxsize=256)
def _accepts_exception(function: Callable[..., object]) -> bool:
    """Return True if a strategy's method takes the optional argument `exception`.

    Cached, because each retry asks.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    parameter = parameters.get("exception")
    return parameter is not None and parameter.kind is not parameter.POSITIONAL_ONLY


# The base class for custom strategies.

_Classes = tuple[type[BaseException], ...]


@dataclass(kw_only=True)
class RetryStrategyTemplate(ABC):
    """Base of strategies. A subclass sets the delay; this class decides when to give up.

    It gives up when `attempts_count` has reached `max_attempts`, or when the next attempt would
    begin more than `max_total_delay_seconds` after the first. None is no limit.

    It also gives up at once, with the reason `not_retried`, after an exception of a class in
    `no_retry_on`, or, if `retry_on` is given, of no class in `retry_on`. `no_retry_on` wins. Each
    is an exception class or several; subclasses count, causes do not. An exception group is
    retried if all exceptions in it are, or if its own class is named. A nack without an exception,
    or with its own delay, is not judged by its class. To decide otherwise, override `retries`.

    Raises:
        SetupError: `max_attempts` is below 1, `max_total_delay_seconds` below 0, or `retry_on` or
            `no_retry_on` has something else than exception classes.
    """

    max_total_delay_seconds: Duration | None = None
    max_attempts: int | None = None
    retry_on: ErrorClasses | None = None
    no_retry_on: ErrorClasses | None = None

    def __post_init__(self) -> None:
        """Validate the limits; a subclass with arguments to validate calls this too."""
        if self.max_attempts is not None:
            validate_integer("max_attempts", self.max_attempts, other=", or None for no limit")
        for attribute in fields(self):
            is_given = getattr(self, attribute.name) is not None
            if attribute.type == Duration or (attribute.type == Duration | None and is_given):
                setattr(self, attribute.name, self._get_seconds(attribute.name))
        if self.retry_on is not None:
            self.retry_on = validate_error_classes(self.retry_on, "retry_on")
        if self.no_retry_on is not None:
            self.no_retry_on = validate_error_classes(self.no_retry_on, "no_retry_on")

    def retries(self, exception: BaseException) -> bool:
        """Return True if `exception` allows another attempt; the limits are checked separately."""
        # __post_init__ has converted both to tuples.
        excluded = cast("_Classes | None", self.no_retry_on)
        included = cast("_Classes | None", self.retry_on)
        if excluded is not None and is_match(exception, excluded, require_all=False):
            return False
        return included is None or is_match(exception, included, require_all=True)

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
        """Return `last_attempt_at` plus the delay, or None to give up.

        None is returned if a limit is reached, or if `exception` is not retried.

        Raises:
            ValueError: `attempts_count` is below 1, or the subclass returned NaN.
        """
        count_steps(attempts_count)
        if exception is not None and not self.retries(exception):
            return None
        if self.max_attempts is not None and attempts_count >= self.max_attempts:
            return None
        delay = timedelta(seconds=clamp_delay(self.get_delay_seconds(attempts_count)))
        total = (last_attempt_at - first_attempt_at + delay).total_seconds()
        if self.max_total_delay_seconds is not None and total > self._get_seconds(
            "max_total_delay_seconds"
        ):
            return None
        return last_attempt_at + delay

    def _get_seconds(self, name: str) -> float:
        return parse_non_negative(name, getattr(self, name))
