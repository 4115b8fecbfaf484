"""Retry strategies: they decide when a failed message is tried again.

In the formulas *n* is `attempts_count`, the number of attempts made, including the one that
just failed (1 or more). All delays are seconds and begin at the end of the last attempt.
Arguments named `*_seconds` take seconds, a timedelta or text like "1.5h". No delay is longer
than 100 years.
"""

from faststream_sqlbroker.core.retry.base import (
    RetryStrategyProto,
    RetryStrategyTemplate,
    compute_delay,
    get_max_attempts,
    get_strategy_limit,
    is_retried,
)
from faststream_sqlbroker.core.retry.strategies import (
    ConstantRetryStrategy,
    ConstantWithJitterRetryStrategy,
    ExponentialBackoffRetryStrategy,
    ExponentialBackoffWithJitterRetryStrategy,
    LinearRetryStrategy,
    NoRetryStrategy,
    default_retry_strategy,
)

__all__ = (
    "ConstantRetryStrategy",
    "ConstantWithJitterRetryStrategy",
    "ExponentialBackoffRetryStrategy",
    "ExponentialBackoffWithJitterRetryStrategy",
    "LinearRetryStrategy",
    "NoRetryStrategy",
    "RetryStrategyProto",
    "RetryStrategyTemplate",
    "compute_delay",
    "default_retry_strategy",
    "get_max_attempts",
    "get_strategy_limit",
    "is_retried",
)
