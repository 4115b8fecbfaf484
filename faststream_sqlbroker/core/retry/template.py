"""The base that a strategy of one's own derives from."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

from faststream_sqlbroker.core.duration import Duration
from faststream_sqlbroker.core.retry.checks import (
    ErrorClasses,
    as_seconds,
    bounded,
    check_max_attempts,
    error_classes,
    matches,
    steps,
)

_Classes = tuple[type[BaseException], ...]


@dataclass(kw_only=True)
class RetryStrategyTemplate(ABC):
    """Base of strategies: a subclass says how long to wait, this class when to give up.

    It gives up when `attempts_count` has reached `max_attempts`, or when the next attempt would begin more
    than `max_total_delay_seconds` after the first. None is no limit.

    It also gives up at once, with the reason `not_retried`, after an exception that is of no class in `retry_on`, if
    that is given, or of one in `no_retry_on`, which goes before. Each is an exception class or several; subclasses
    count, causes do not. An exception group is worth a retry if all that it holds is, or its own class is named. A nack
    without an exception, or with a delay of its own, is not asked about. To decide otherwise, override `retries`.

    Raises:
        SetupError: `max_attempts` is below 1, `max_total_delay_seconds` below 0, or what should be exception classes
            is not.
    """

    max_total_delay_seconds: Duration | None = None
    max_attempts: int | None = None
    retry_on: ErrorClasses | None = None
    no_retry_on: ErrorClasses | None = None

    def __post_init__(self) -> None:
        """Check the limits; a subclass that checks its own arguments calls this too."""
        check_max_attempts(self.max_attempts)
        if self.max_total_delay_seconds is not None:
            self._take_seconds("max_total_delay_seconds")
        if self.retry_on is not None:
            self.retry_on = error_classes(self.retry_on, "retry_on")
        if self.no_retry_on is not None:
            self.no_retry_on = error_classes(self.no_retry_on, "no_retry_on")

    def retries(self, exception: BaseException) -> bool:
        """Return whether an attempt that ended in `exception` is worth another."""
        # error_classes() has made tuples of both.
        never, only = (
            cast("_Classes | None", self.no_retry_on),
            cast("_Classes | None", self.retry_on),
        )
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
        """Return `last_attempt_at` plus the delay, or None when a limit is reached or `exception` is not retried.

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

    def _take_seconds(self, *names: str) -> None:
        """Check these arguments and replace each by its seconds."""
        for name in names:
            setattr(self, name, self._seconds(name))

    def _seconds(self, name: str) -> float:
        return as_seconds(getattr(self, name), name)
