"""The base that a strategy of one's own derives from."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime, timedelta

from faststream_sqlbroker.core.duration import Duration
from faststream_sqlbroker.core.retry.checks import as_seconds, bounded, check_max_attempts, steps


@dataclass(kw_only=True)
class RetryStrategyTemplate(ABC):
    """Base of strategies: a subclass says how long to wait, this class when to give up.

    It gives up when `attempts_count` has reached `max_attempts`, or when the next attempt would begin more
    than `max_total_delay_seconds` after the first. None is no limit. To decide by the handler's exception,
    override `get_next_attempt_at` and look at `exception` before calling the inherited one.

    Raises:
        SetupError: `max_attempts` is below 1 or `max_total_delay_seconds` below 0.
    """

    max_total_delay_seconds: Duration | None = None
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        """Check the limits; a subclass that checks its own arguments calls this too."""
        check_max_attempts(self.max_attempts)
        if self.max_total_delay_seconds is not None:
            self._take_seconds("max_total_delay_seconds")

    @abstractmethod
    def get_delay_seconds(self, attempts_count: int) -> float:
        """Return the seconds to wait after attempt `attempts_count` (1 or more)."""

    def get_next_attempt_at(
        self,
        *,
        first_attempt_at: datetime,
        last_attempt_at: datetime,
        attempts_count: int,
        exception: BaseException | None = None,  # noqa: ARG002 - for subclasses that decide by it
    ) -> datetime | None:
        """Return `last_attempt_at` plus the delay, or None when a limit is reached.

        Raises:
            ValueError: `attempts_count` is below 1, or the subclass returned NaN.
        """
        steps(attempts_count)
        if self.max_attempts is not None and attempts_count >= self.max_attempts:
            return None
        delay = timedelta(seconds=bounded(self.get_delay_seconds(attempts_count)))
        total = (last_attempt_at - first_attempt_at + delay).total_seconds()
        if self.max_total_delay_seconds is not None and total > self._seconds("max_total_delay_seconds"):
            return None
        return last_attempt_at + delay

    def _take_seconds(self, *names: str) -> None:
        """Check these arguments and replace each by its seconds."""
        for name in names:
            setattr(self, name, self._seconds(name))

    def _seconds(self, name: str) -> float:
        return as_seconds(getattr(self, name), name)
