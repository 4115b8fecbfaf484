"""A message broker for FastStream in the relational database that you already run."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    # The aliases make the names public to type checkers. ruff: one import a module, not one a name.
    # isort: off
    from faststream import TestApp as TestApp

    from faststream_sqlbroker.annotations import (
        SqlBrokerBatchMessage as SqlBrokerBatchMessage,
        SqlBrokerMessage as SqlBrokerMessage,
        SqlConnection as SqlConnection,
        SqlSession as SqlSession,
    )
    from faststream_sqlbroker.broker.broker import SqlBroker as SqlBroker
    from faststream_sqlbroker.broker.engine_factory import (
        evict_read_only_connections as evict_read_only_connections,
    )
    from faststream_sqlbroker.broker.pipelines import Pipeline as Pipeline, Step as Step
    from faststream_sqlbroker.broker.reservation import (
        ReceivedMessage as ReceivedMessage,
        Reservation as Reservation,
    )
    from faststream_sqlbroker.broker.router import (
        SqlBrokerPublisher as SqlBrokerPublisher,
        SqlBrokerRoute as SqlBrokerRoute,
        SqlBrokerRouter as SqlBrokerRouter,
    )
    from faststream_sqlbroker.control_exceptions import (
        Move as Move,
        NotReadyYet as NotReadyYet,
        Postpone as Postpone,
        RetryPossible as RetryPossible,
    )
    from faststream_sqlbroker.core.depth import MaxDepth as MaxDepth
    from faststream_sqlbroker.core.policies import (
        BlockingWait as BlockingWait,
        Concurrency as Concurrency,
        Debounce as Debounce,
        Delay as Delay,
        Header as Header,
        KeepLast as KeepLast,
        Once as Once,
        Throttle as Throttle,
        Window as Window,
    )
    from faststream_sqlbroker.core.policy_waits import (
        PoliciedQueue as PoliciedQueue,
        PolicyWait as PolicyWait,
    )
    from faststream_sqlbroker.core.retention import Pruned as Pruned, Retention as Retention
    from faststream_sqlbroker.core.retry import (
        ConstantRetryStrategy as ConstantRetryStrategy,
        ConstantWithJitterRetryStrategy as ConstantWithJitterRetryStrategy,
        ExponentialBackoffRetryStrategy as ExponentialBackoffRetryStrategy,
        ExponentialBackoffWithJitterRetryStrategy as ExponentialBackoffWithJitterRetryStrategy,
        LinearRetryStrategy as LinearRetryStrategy,
        NoRetryStrategy as NoRetryStrategy,
        RetryStrategyProto as RetryStrategyProto,
        RetryStrategyTemplate as RetryStrategyTemplate,
    )
    from faststream_sqlbroker.core.routing import (
        DESTINATION as DESTINATION,
        Hops as Hops,
        next_hop as next_hop,
        plan_hops as plan_hops,
    )
    from faststream_sqlbroker.core.rows import UnknownOutcome as UnknownOutcome
    from faststream_sqlbroker.message import SqlBrokerMessageState as SqlBrokerMessageState
    from faststream_sqlbroker.core.status import (
        Explanation as Explanation,
        HeldLock as HeldLock,
        LiveSubscriber as LiveSubscriber,
        PausedQueue as PausedQueue,
        Reason as Reason,
        Schedule as Schedule,
    )
    from faststream_sqlbroker.exceptions import (
        AccessError as AccessError,
        BrokerStoppedError as BrokerStoppedError,
        ConcurrentLoadError as ConcurrentLoadError,
        ConfigError as ConfigError,
        ExportMismatchError as ExportMismatchError,
        HttpError as HttpError,
        LeaseLostError as LeaseLostError,
        LockLostError as LockLostError,
        LockNotAcquiredError as LockNotAcquiredError,
        MessageTooLargeError as MessageTooLargeError,
        MissingExtraError as MissingExtraError,
        NotSupportedError as NotSupportedError,
        PublishError as PublishError,
        QueueFullError as QueueFullError,
        RightsError as RightsError,
        SchemaError as SchemaError,
        SetupError as SetupError,
        SqlBrokerError as SqlBrokerError,
        StoreError as StoreError,
        TransactionEndedError as TransactionEndedError,
        TransientStoreError as TransientStoreError,
        UnknownOutcomeError as UnknownOutcomeError,
    )
    from faststream_sqlbroker.flow.tasks.locks import Lock as Lock
    from faststream_sqlbroker.parser import SqlBrokerParserType as SqlBrokerParserType
    from faststream_sqlbroker.publisher.sync_producer import SqlProducer as SqlProducer
    from faststream_sqlbroker.response import (
        SqlBrokerPublishCommand as SqlBrokerPublishCommand,
        SqlBrokerPublishMessage as SqlBrokerPublishMessage,
        SqlBrokerResponse as SqlBrokerResponse,
    )
    from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig as SqlBrokerSchemaConfig
    from faststream_sqlbroker.schema.tables import include_tables as include_tables
    from faststream_sqlbroker.testing.broker import TestSqlBroker as TestSqlBroker
    from faststream_sqlbroker.testing.clock import VirtualClock as VirtualClock

_MODULES = {
    "AccessError": ".exceptions",
    "BlockingWait": ".core.policies",
    "BrokerStoppedError": ".exceptions",
    "Concurrency": ".core.policies",
    "ConcurrentLoadError": ".exceptions",
    "ConfigError": ".exceptions",
    "ConstantRetryStrategy": ".core.retry",
    "ConstantWithJitterRetryStrategy": ".core.retry",
    "Debounce": ".core.policies",
    "Delay": ".core.policies",
    "DESTINATION": ".core.routing",
    "evict_read_only_connections": ".broker.engine_factory",
    "Explanation": ".core.status",
    "ExponentialBackoffRetryStrategy": ".core.retry",
    "ExponentialBackoffWithJitterRetryStrategy": ".core.retry",
    "ExportMismatchError": ".exceptions",
    "Header": ".core.policies",
    "HeldLock": ".core.status",
    "Hops": ".core.routing",
    "HttpError": ".exceptions",
    "include_tables": ".schema.tables",
    "KeepLast": ".core.policies",
    "LeaseLostError": ".exceptions",
    "LinearRetryStrategy": ".core.retry",
    "LiveSubscriber": ".core.status",
    "Lock": ".flow.tasks.locks",
    "LockLostError": ".exceptions",
    "LockNotAcquiredError": ".exceptions",
    "MaxDepth": ".core.depth",
    "MessageTooLargeError": ".exceptions",
    "MissingExtraError": ".exceptions",
    "Move": ".control_exceptions",
    "next_hop": ".core.routing",
    "NoRetryStrategy": ".core.retry",
    "NotReadyYet": ".control_exceptions",
    "NotSupportedError": ".exceptions",
    "Once": ".core.policies",
    "PausedQueue": ".core.status",
    "Pipeline": ".broker.pipelines",
    "plan_hops": ".core.routing",
    "PoliciedQueue": ".core.policy_waits",
    "PolicyWait": ".core.policy_waits",
    "Postpone": ".control_exceptions",
    "Pruned": ".core.retention",
    "PublishError": ".exceptions",
    "QueueFullError": ".exceptions",
    "Reason": ".core.status",
    "ReceivedMessage": ".broker.reservation",
    "Reservation": ".broker.reservation",
    "Retention": ".core.retention",
    "RetryPossible": ".control_exceptions",
    "RetryStrategyProto": ".core.retry",
    "RetryStrategyTemplate": ".core.retry",
    "RightsError": ".exceptions",
    "Schedule": ".core.status",
    "SchemaError": ".exceptions",
    "SetupError": ".exceptions",
    "SqlBroker": ".broker.broker",
    "SqlBrokerBatchMessage": ".annotations",
    "SqlBrokerError": ".exceptions",
    "SqlBrokerMessage": ".annotations",
    "SqlBrokerMessageState": ".core.states:MessageState",
    "SqlBrokerParserType": ".parser",
    "SqlBrokerPublishCommand": ".response",
    "SqlBrokerPublisher": ".broker.router",
    "SqlBrokerPublishMessage": ".response",
    "SqlBrokerResponse": ".response",
    "SqlBrokerRoute": ".broker.router",
    "SqlBrokerRouter": ".broker.router",
    "SqlBrokerSchemaConfig": ".schema.config",
    "SqlConnection": ".annotations",
    "SqlProducer": ".publisher.sync_producer",
    "SqlSession": ".annotations",
    "Step": ".broker.pipelines",
    "StoreError": ".exceptions",
    "TestApp": "faststream",
    "TestSqlBroker": ".testing.broker",
    "Throttle": ".core.policies",
    "TransactionEndedError": ".exceptions",
    "TransientStoreError": ".exceptions",
    "UnknownOutcome": ".core.rows",
    "UnknownOutcomeError": ".exceptions",
    "VirtualClock": ".testing.clock",
    "Window": ".core.policies",
}
"""The module of each public name.

A module is imported on first use, so a process loads only the parts that it needs.
"""

__all__ = tuple(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name, or the submodule `name`.

    Names in the pattern of FastStream's brokers, such as `SqlRouter`, resolve to `SqlBrokerRouter`
    and so on.
    """
    if name == "__version__":
        return import_module("importlib.metadata").version("sqlbroker")
    public_name = name if name in _MODULES else name.replace("Sql", "SqlBroker", 1)
    if public_name not in _MODULES:
        if find_spec(f".{name}", __name__) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f".{name}", __name__)
    module, _, original_name = _MODULES[public_name].partition(":")
    value = getattr(import_module(module, __name__), original_name or public_name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
