"""Policies, retry strategies and other objects that options take, as fields of a file."""

import re
from typing import Any

from faststream_sqlbroker.config.declared import options_of_class
from faststream_sqlbroker.config.fields import Age, built, choice, derived
from faststream_sqlbroker.core import retry
from faststream_sqlbroker.core.channels import Channel, Channels, Consumer
from faststream_sqlbroker.core.depth import MaxDepth
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.policies.checks import KINDS
from faststream_sqlbroker.core.queue_api import Queues, QueueTokens
from faststream_sqlbroker.core.retention import Retention
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig

STRATEGIES = (
    retry.ConstantRetryStrategy,
    retry.ConstantWithJitterRetryStrategy,
    retry.LinearRetryStrategy,
    retry.ExponentialBackoffRetryStrategy,
    retry.ExponentialBackoffWithJitterRetryStrategy,
    retry.NoRetryStrategy,
)


def key_of(kind: type) -> str:
    """How a file writes a class: KeepLast is keep_last, NoRetryStrategy is no_retry."""
    name = kind.__name__.removesuffix("Strategy")
    if name != "NoRetry":
        name = name.removesuffix("Retry")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _meaning(kind: type) -> str:
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


def _object(kind: type, *, short: bool = False, known: Any = None) -> Any:
    options = options_of_class(kind)
    needed = [option.name for option in options if option.needed]
    model = derived(kind.__name__, options, known=known)
    return built(model, kind, short=needed[0] if short and len(needed) == 1 else None)


def _choice(name: str, kinds: tuple[type, ...], *, short: bool) -> Any:
    return choice(
        name,
        {key_of(kind): _object(kind, short=short) for kind in kinds},
        {key_of(kind): _meaning(kind) for kind in kinds},
    )


PolicyField = _choice("Policy", KINDS, short=True)
StrategyField = _choice("RetryStrategy", STRATEGIES, short=False)

_CONSUMER = _object(Consumer)
_CHANNEL = _object(Channel, known={Consumer: _CONSUMER})
OBJECTS: dict[Any, Any] = {
    Channels: _object(Channels, known={Channel: _CHANNEL}),
    Policy: PolicyField,
    retry.RetryStrategyProto: StrategyField,
    MaxDepth: _object(MaxDepth),
    Queues: _object(
        Queues,
        known={QueueTokens: _object(QueueTokens), retry.RetryStrategyProto: StrategyField},
    ),
    Retention: _object(Retention, known={Duration | None: Age | None}),
    SqlBrokerSchemaConfig: _object(SqlBrokerSchemaConfig),
}
"""Types of fields, by the types of what options take."""
