"""The strategies that come with the package."""

from dataclasses import dataclass, field
from datetime import datetime
from random import Random

from faststream_sqlbroker.core.retry.base import (
    LONGEST_DELAY_SECONDS,
    RetryStrategyTemplate,
    bounded,
    check_factor,
    steps,
)
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError


@dataclass(kw_only=True)
class ConstantRetryStrategy(RetryStrategyTemplate):
    """The same delay each time: `delay_seconds`."""

    delay_seconds: Duration

    def get_delay_seconds(self, attempts_count: int) -> float:
        """Return `delay_seconds`."""
        steps(attempts_count)
        return bounded(self._seconds("delay_seconds"))


@dataclass(kw_only=True)
class ConstantWithJitterRetryStrategy(RetryStrategyTemplate):
    """Drawn evenly from `base_delay_seconds` ± `jitter_seconds`, never below 0."""

    base_delay_seconds: Duration
    jitter_seconds: Duration
    _random: Random = field(default_factory=Random, repr=False, compare=False)

    def get_delay_seconds(self, attempts_count: int) -> float:
        """Return max(0, base + a number from [-jitter, +jitter])."""
        steps(attempts_count)
        jitter = self._seconds("jitter_seconds")
        return bounded(self._seconds("base_delay_seconds") + self._random.uniform(-jitter, jitter))


@dataclass(kw_only=True)
class LinearRetryStrategy(RetryStrategyTemplate):
    """Grows by a step: `initial_delay_seconds` + `step_seconds` * (n - 1)."""

    initial_delay_seconds: Duration
    step_seconds: Duration

    def get_delay_seconds(self, attempts_count: int) -> float:
        """Return initial + step * (n - 1)."""
        growth = self._seconds("step_seconds") * steps(attempts_count)
        return bounded(self._seconds("initial_delay_seconds") + growth)


@dataclass(kw_only=True)
class ExponentialBackoffRetryStrategy(RetryStrategyTemplate):
    """Grows by a factor: min(`initial_delay_seconds` * `multiplier` ** (n - 1),
    `max_delay_seconds`).

    `multiplier` is 1 or more; `max_delay_seconds` None is no cap.
    """

    initial_delay_seconds: Duration
    multiplier: float = 2.0
    max_delay_seconds: Duration | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        check_factor(self.multiplier, "multiplier", least=1)

    def get_delay_seconds(self, attempts_count: int) -> float:
        """Return min(initial * multiplier ** (n - 1), max_delay)."""
        initial = self._seconds("initial_delay_seconds")
        exponent = steps(attempts_count)
        if initial == 0:
            return 0.0
        try:
            delay = initial * float(self.multiplier) ** exponent
        except OverflowError:
            delay = LONGEST_DELAY_SECONDS
        return self._capped(delay)

    def _capped(self, delay: float) -> float:
        if self.max_delay_seconds is not None:
            delay = min(delay, self._seconds("max_delay_seconds"))
        return bounded(delay)


@dataclass(kw_only=True)
class ExponentialBackoffWithJitterRetryStrategy(ExponentialBackoffRetryStrategy):
    """The exponential delay plus an even draw from 0 to `jitter_factor` times it.

    `jitter_factor` is 0 or more. Jitter never takes a delay above `max_delay_seconds`.
    """

    jitter_factor: float = 0.5
    _random: Random = field(default_factory=Random, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        check_factor(self.jitter_factor, "jitter_factor", least=0)

    def get_delay_seconds(self, attempts_count: int) -> float:
        """Return min(delay + a number from [0, delay * jitter_factor], max_delay)."""
        delay = super().get_delay_seconds(attempts_count)
        return self._capped(delay + self._random.uniform(0.0, delay * self.jitter_factor))


@dataclass(kw_only=True)
class NoRetryStrategy:
    """Gives up after the first attempt. `max_attempts` is 1 and can be nothing else."""

    max_attempts: int = 1

    def __post_init__(self) -> None:
        """Check the argument."""
        if self.max_attempts != 1 or isinstance(self.max_attempts, bool):
            raise SetupError(
                f"max_attempts of NoRetryStrategy must be 1, got {self.max_attempts!r}; "
                "use ConstantRetryStrategy for more attempts"
            )

    def get_next_attempt_at(
        self,
        *,
        first_attempt_at: datetime,  # noqa: ARG002 - the protocol's signature
        last_attempt_at: datetime,  # noqa: ARG002 - the protocol's signature
        attempts_count: int,
        exception: BaseException | None = None,  # noqa: ARG002 - the protocol's signature
    ) -> datetime | None:
        """Return None.

        Raises:
            ValueError: `attempts_count` is below 1.
        """
        steps(attempts_count)
        return None


def default_retry_strategy() -> ExponentialBackoffWithJitterRetryStrategy:
    """Return the default of a subscriber: 1 s, doubled up to 5 minutes, 10 attempts."""
    return ExponentialBackoffWithJitterRetryStrategy(
        initial_delay_seconds=1.0, multiplier=2.0, max_delay_seconds=300.0, max_attempts=10
    )
