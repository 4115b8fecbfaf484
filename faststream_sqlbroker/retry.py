"""The retry strategies, which `faststream_sqlbroker` has as well."""

from faststream_sqlbroker.core.retry import (
    ConstantRetryStrategy,
    ConstantWithJitterRetryStrategy,
    ExponentialBackoffRetryStrategy,
    ExponentialBackoffWithJitterRetryStrategy,
    LinearRetryStrategy,
    NoRetryStrategy,
    RetryStrategyProto,
    RetryStrategyTemplate,
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
)
