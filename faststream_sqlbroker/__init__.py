"""A message broker for FastStream in the relational database that you already run."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    # The aliases make the names public to type checkers. ruff: one import a module, not one a name.
    from faststream import TestApp as TestApp

    from faststream_sqlbroker.annotations import (
        SqlBrokerBatchMessage as SqlBrokerBatchMessage,
    )
    from faststream_sqlbroker.annotations import (
        SqlBrokerMessage as SqlBrokerMessage,
    )
    from faststream_sqlbroker.annotations import (
        SqlConnection as SqlConnection,
    )
    from faststream_sqlbroker.annotations import (
        SqlSession as SqlSession,
    )
    from faststream_sqlbroker.broker.broker import SqlBroker as SqlBroker
    from faststream_sqlbroker.broker.pipelines import Pipeline as Pipeline
    from faststream_sqlbroker.broker.pipelines import Step as Step
    from faststream_sqlbroker.broker.reservation import (
        ReceivedMessage as ReceivedMessage,
    )
    from faststream_sqlbroker.broker.reservation import (
        Reservation as Reservation,
    )
    from faststream_sqlbroker.broker.router import (
        SqlBrokerPublisher as SqlBrokerPublisher,
    )
    from faststream_sqlbroker.broker.router import (
        SqlBrokerRoute as SqlBrokerRoute,
    )
    from faststream_sqlbroker.broker.router import (
        SqlBrokerRouter as SqlBrokerRouter,
    )
    from faststream_sqlbroker.control_exceptions import (
        Move as Move,
    )
    from faststream_sqlbroker.control_exceptions import (
        NotReadyYet as NotReadyYet,
    )
    from faststream_sqlbroker.control_exceptions import (
        Postpone as Postpone,
    )
    from faststream_sqlbroker.control_exceptions import (
        RetryPossible as RetryPossible,
    )
    from faststream_sqlbroker.core.depth import MaxDepth as MaxDepth
    from faststream_sqlbroker.core.policies import (
        BlockingWait as BlockingWait,
    )
    from faststream_sqlbroker.core.policies import (
        Concurrency as Concurrency,
    )
    from faststream_sqlbroker.core.policies import (
        Debounce as Debounce,
    )
    from faststream_sqlbroker.core.policies import (
        Delay as Delay,
    )
    from faststream_sqlbroker.core.policies import (
        Header as Header,
    )
    from faststream_sqlbroker.core.policies import (
        KeepLast as KeepLast,
    )
    from faststream_sqlbroker.core.policies import (
        Once as Once,
    )
    from faststream_sqlbroker.core.policies import (
        Throttle as Throttle,
    )
    from faststream_sqlbroker.core.policies import (
        Window as Window,
    )
    from faststream_sqlbroker.core.policy_waits import (
        PoliciedQueue as PoliciedQueue,
    )
    from faststream_sqlbroker.core.policy_waits import (
        PolicyWait as PolicyWait,
    )
    from faststream_sqlbroker.core.retention import Pruned as Pruned
    from faststream_sqlbroker.core.retention import Retention as Retention
    from faststream_sqlbroker.core.retry import (
        ConstantRetryStrategy as ConstantRetryStrategy,
    )
    from faststream_sqlbroker.core.retry import (
        ConstantWithJitterRetryStrategy as ConstantWithJitterRetryStrategy,
    )
    from faststream_sqlbroker.core.retry import (
        ExponentialBackoffRetryStrategy as ExponentialBackoffRetryStrategy,
    )
    from faststream_sqlbroker.core.retry import (
        ExponentialBackoffWithJitterRetryStrategy as ExponentialBackoffWithJitterRetryStrategy,
    )
    from faststream_sqlbroker.core.retry import (
        LinearRetryStrategy as LinearRetryStrategy,
    )
    from faststream_sqlbroker.core.retry import (
        NoRetryStrategy as NoRetryStrategy,
    )
    from faststream_sqlbroker.core.retry import (
        RetryStrategyProto as RetryStrategyProto,
    )
    from faststream_sqlbroker.core.retry import (
        RetryStrategyTemplate as RetryStrategyTemplate,
    )
    from faststream_sqlbroker.core.routing import (
        DESTINATION as DESTINATION,
    )
    from faststream_sqlbroker.core.routing import (
        Hops as Hops,
    )
    from faststream_sqlbroker.core.routing import (
        next_hop as next_hop,
    )
    from faststream_sqlbroker.core.routing import (
        plan_hops as plan_hops,
    )
    from faststream_sqlbroker.core.rows import UnknownOutcome as UnknownOutcome
    from faststream_sqlbroker.core.status import (
        Explanation as Explanation,
    )
    from faststream_sqlbroker.core.status import (
        HeldLock as HeldLock,
    )
    from faststream_sqlbroker.core.status import (
        LiveSubscriber as LiveSubscriber,
    )
    from faststream_sqlbroker.core.status import (
        PausedQueue as PausedQueue,
    )
    from faststream_sqlbroker.core.status import (
        Reason as Reason,
    )
    from faststream_sqlbroker.core.status import (
        Schedule as Schedule,
    )
    from faststream_sqlbroker.exceptions import (
        AccessError as AccessError,
    )
    from faststream_sqlbroker.exceptions import (
        BrokerStoppedError as BrokerStoppedError,
    )
    from faststream_sqlbroker.exceptions import (
        ConcurrentLoadError as ConcurrentLoadError,
    )
    from faststream_sqlbroker.exceptions import (
        ConfigError as ConfigError,
    )
    from faststream_sqlbroker.exceptions import (
        ExportMismatchError as ExportMismatchError,
    )
    from faststream_sqlbroker.exceptions import (
        HttpError as HttpError,
    )
    from faststream_sqlbroker.exceptions import (
        LeaseLostError as LeaseLostError,
    )
    from faststream_sqlbroker.exceptions import (
        LockLostError as LockLostError,
    )
    from faststream_sqlbroker.exceptions import (
        LockNotAcquiredError as LockNotAcquiredError,
    )
    from faststream_sqlbroker.exceptions import (
        MessageTooLargeError as MessageTooLargeError,
    )
    from faststream_sqlbroker.exceptions import (
        MissingExtraError as MissingExtraError,
    )
    from faststream_sqlbroker.exceptions import (
        NotSupportedError as NotSupportedError,
    )
    from faststream_sqlbroker.exceptions import (
        PublishError as PublishError,
    )
    from faststream_sqlbroker.exceptions import (
        QueueFullError as QueueFullError,
    )
    from faststream_sqlbroker.exceptions import (
        RightsError as RightsError,
    )
    from faststream_sqlbroker.exceptions import (
        SchemaError as SchemaError,
    )
    from faststream_sqlbroker.exceptions import (
        SetupError as SetupError,
    )
    from faststream_sqlbroker.exceptions import (
        SqlBrokerError as SqlBrokerError,
    )
    from faststream_sqlbroker.exceptions import (
        StoreError as StoreError,
    )
    from faststream_sqlbroker.exceptions import (
        TransactionEndedError as TransactionEndedError,
    )
    from faststream_sqlbroker.exceptions import (
        TransientStoreError as TransientStoreError,
    )
    from faststream_sqlbroker.exceptions import (
        UnknownOutcomeError as UnknownOutcomeError,
    )
    from faststream_sqlbroker.flow.tasks.locks import Lock as Lock
    from faststream_sqlbroker.message import SqlBrokerMessageState as SqlBrokerMessageState
    from faststream_sqlbroker.parser import SqlBrokerParserType as SqlBrokerParserType
    from faststream_sqlbroker.publisher.sync_producer import SqlProducer as SqlProducer
    from faststream_sqlbroker.response import (
        SqlBrokerPublishCommand as SqlBrokerPublishCommand,
    )
    from faststream_sqlbroker.response import (
        SqlBrokerPublishMessage as SqlBrokerPublishMessage,
    )
    from faststream_sqlbroker.response import (
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
