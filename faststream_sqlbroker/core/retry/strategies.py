"""The retry strategies of the package."""

from dataclasses import dataclass, field
from datetime import datetime
from random import Random

from faststream_sqlbroker.core.retry.base import (
    MAX_DELAY_SECONDS,
    RetryStrategyTemplate,
    check_factor,
    clamp_delay,
    count_steps,
)
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError


@dataclass(kw_only=True)
class ConstantRetryStrategy(RetryStrategyTemplate):
    """The same delay after each attempt: `delay_seconds`."""

    delay_seconds: Duration

    def get_delay_seconds(self, attempts_count: int) -> float:
        """Return `delay_seconds`."""
        count_steps(attempts_count)
        return clamp_delay(self._get_seconds("delay_seconds"))


@dataclass(kw_only=True)
class ConstantWithJitterRetryStrategy(RetryStrategyTemplate):
    """A random delay from `base_delay_seconds` ± `jitter_seconds`, never below 0."""

    base_delay_seconds: Duration
    jitter_seconds: Duration
    _random: Random = field(default_factory=Random, repr=False, compare=False)

    def get_delay_seconds(self, attempts_count: int) -> float:
        """Return max(0, base + a number from [-jitter, +jitter])."""
        count_steps(attempts_count)
        jitter = self._get_seconds("jitter_seconds")
        return clamp_delay(
            self._get_seconds("base_delay_seconds") + self._random.uniform(-jitter, jitter)
        )


@dataclass(kw_only=True)
class LinearRetryStrategy(RetryStrategyTemplate):
    """A delay that grows by a step: `initial_delay_seconds` + `step_seconds` * (n - 1)."""

    initial_delay_seconds: Duration
    step_seconds: Duration

    def get_delay_seconds(self, attempts_count: int) -> float:
        """Return initial + step * (n - 1)."""
        growth = self._get_seconds("step_seconds") * count_steps(attempts_count)
        return clamp_delay(self._get_seconds("initial_delay_seconds") + growth)


@dataclass(kw_only=True)
class ExponentialBackoffRetryStrategy(RetryStrategyTemplate):
    """A delay that grows by a factor.

    The delay is min(`initial_delay_seconds` * `multiplier` ** (n - 1), `max_delay_seconds`).
    `multiplier` is 1 or more; `max_delay_seconds` None is no limit.
    """

    initial_delay_seconds: Duration
    multiplier: float = 2.0
    max_delay_seconds: Duration | None = None

    def __post_init__(self) -> None:
        """Validate the arguments."""
        super().__post_init__()
        check_factor(self.multiplier, "multiplier", minimum=1)

    def get_delay_seconds(self, attempts_count: int) -> float:
        """Return min(initial * multiplier ** (n - 1), max_delay)."""
        initial = self._get_seconds("initial_delay_seconds")
        exponent = count_steps(attempts_count)
        if initial == 0:
            return 0.0
        try:
            delay = initial * float(self.multiplier) ** exponent
        except OverflowError:
            delay = MAX_DELAY_SECONDS
        return self._apply_max_delay(delay)

    def _apply_max_delay(self, delay: float) -> float:
        """Limit `delay` to `max_delay_seconds`, if given, and to 100 years."""
        if self.max_delay_seconds is not None:
            delay = min(delay, self._get_seconds("max_delay_seconds"))
        return clamp_delay(delay)


@dataclass(kw_only=True)
class ExponentialBackoffWithJitterRetryStrategy(ExponentialBackoffRetryStrategy):
    """The exponential delay plus a random part from 0 to `jitter_factor` times this delay.

    `jitter_factor` is 0 or more. Jitter never raises a delay above `max_delay_seconds`.
    """

    jitter_factor: float = 0.5
    _random: Random = field(default_factory=Random, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate the arguments."""
        super().__post_init__()
        check_factor(self.jitter_factor, "jitter_factor", minimum=0)

    def get_delay_seconds(self, attempts_count: int) -> float:
        """Return min(delay + a number from [0, delay * jitter_factor], max_delay)."""
        delay = super().get_delay_seconds(attempts_count)
        return self._apply_max_delay(delay + self._random.uniform(0.0, delay * self.jitter_factor))


@dataclass(kw_only=True)
class NoRetryStrategy:
    """Gives up after the first attempt. `max_attempts` is always 1."""

    max_attempts: int = 1

    def __post_init__(self) -> None:
        """Validate the argument."""
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
        count_steps(attempts_count)
        return None


def default_retry_strategy() -> ExponentialBackoffWithJitterRetryStrategy:
    """Return the default of a subscriber: 1 s, doubled up to 5 minutes, 10 attempts."""
    return ExponentialBackoffWithJitterRetryStrategy(
        initial_delay_seconds=1.0, multiplier=2.0, max_delay_seconds=300.0, max_attempts=10
    )
