"""A message broker for FastStream that lives in the relational database you already run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faststream import TestApp

    from faststream_sqlbroker.annotations import (
        SqlBrokerBatchMessage,
        SqlBrokerMessage,
        SqlConnection,
        SqlSession,
    )
    from faststream_sqlbroker.broker.broker import SqlBroker
    from faststream_sqlbroker.broker.pipelines import Pipeline, Step
    from faststream_sqlbroker.broker.reservation import ReceivedMessage, Reservation
    from faststream_sqlbroker.broker.router import (
        SqlBrokerPublisher,
        SqlBrokerRoute,
        SqlBrokerRouter,
    )
    from faststream_sqlbroker.control_exceptions import Move, NotReadyYet, Postpone, RetryPossible
    from faststream_sqlbroker.core.depth import MaxDepth
    from faststream_sqlbroker.core.policies import (
        BlockingWait,
        Concurrency,
        Debounce,
        Delay,
        Header,
        KeepLast,
        Once,
        Throttle,
        Window,
    )
    from faststream_sqlbroker.core.policy_waits import PoliciedQueue, PolicyWait
    from faststream_sqlbroker.core.retention import Pruned, Retention
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
    from faststream_sqlbroker.core.routing import DESTINATION, Hops, next_hop, plan_hops
    from faststream_sqlbroker.core.rows import UnknownOutcome
    from faststream_sqlbroker.core.states import MessageState as SqlBrokerMessageState
    from faststream_sqlbroker.core.status import (
        Explanation,
        HeldLock,
        LiveSubscriber,
        PausedQueue,
        Reason,
        Schedule,
    )
    from faststream_sqlbroker.exceptions import (
        AccessError,
        BrokerStoppedError,
        ConcurrentLoadError,
        ConfigError,
        ExportMismatchError,
        HttpError,
        LeaseLostError,
        LockLostError,
        LockNotAcquiredError,
        MessageTooLargeError,
        MissingExtraError,
        NotSupportedError,
        PublishError,
        QueueFullError,
        RightsError,
        SchemaError,
        SetupError,
        SqlBrokerError,
        StoreError,
        TransactionEndedError,
        TransientStoreError,
        UnknownOutcomeError,
    )
    from faststream_sqlbroker.flow.tasks.locks import Lock
    from faststream_sqlbroker.publisher.sync_producer import SqlProducer
    from faststream_sqlbroker.response import (
        SqlBrokerPublishCommand,
        SqlBrokerPublishMessage,
        SqlBrokerResponse,
    )
    from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
    from faststream_sqlbroker.schema.tables import include_tables
    from faststream_sqlbroker.testing.broker import TestSqlBroker
    from faststream_sqlbroker.testing.clock import VirtualClock

_HOMES = {
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
"""Where each public name lives. Its module is imported when the name is asked for, so a process
imports what it uses."""

__all__ = (
    "DESTINATION",
    "AccessError",
    "BlockingWait",
    "BrokerStoppedError",
    "Concurrency",
    "ConcurrentLoadError",
    "ConfigError",
    "ConstantRetryStrategy",
    "ConstantWithJitterRetryStrategy",
    "Debounce",
    "Delay",
    "Explanation",
    "ExponentialBackoffRetryStrategy",
    "ExponentialBackoffWithJitterRetryStrategy",
    "ExportMismatchError",
    "Header",
    "HeldLock",
    "Hops",
    "HttpError",
    "KeepLast",
    "LeaseLostError",
    "LinearRetryStrategy",
    "LiveSubscriber",
    "Lock",
    "LockLostError",
    "LockNotAcquiredError",
    "MaxDepth",
    "MessageTooLargeError",
    "MissingExtraError",
    "Move",
    "NoRetryStrategy",
    "NotReadyYet",
    "NotSupportedError",
    "Once",
    "PausedQueue",
    "Pipeline",
    "PoliciedQueue",
    "PolicyWait",
    "Postpone",
    "Pruned",
    "PublishError",
    "QueueFullError",
    "Reason",
    "ReceivedMessage",
    "Reservation",
    "Retention",
    "RetryPossible",
    "RetryStrategyProto",
    "RetryStrategyTemplate",
    "RightsError",
    "Schedule",
    "SchemaError",
    "SetupError",
    "SqlBroker",
    "SqlBrokerBatchMessage",
    "SqlBrokerError",
    "SqlBrokerMessage",
    "SqlBrokerMessageState",
    "SqlBrokerPublishCommand",
    "SqlBrokerPublishMessage",
    "SqlBrokerPublisher",
    "SqlBrokerResponse",
    "SqlBrokerRoute",
    "SqlBrokerRouter",
    "SqlBrokerSchemaConfig",
    "SqlConnection",
    "SqlProducer",
    "SqlSession",
    "Step",
    "StoreError",
    "TestApp",
    "TestSqlBroker",
    "Throttle",
    "TransactionEndedError",
    "TransientStoreError",
    "UnknownOutcome",
    "UnknownOutcomeError",
    "VirtualClock",
    "Window",
    "include_tables",
    "next_hop",
    "plan_hops",
)


_SUBMODULES = frozenset(
    {
        "annotations",
        "call_assertions",
        "control_exceptions",
        "exceptions",
        "fastapi",
        "message",
        "opentelemetry",
        "parser",
        "prometheus",
        "response",
        "security",
        "spark",
        "testing",
    }
)
"""Those that users name: `faststream_sqlbroker.exceptions` needs no import of its own."""


def __getattr__(name: str) -> Any:
    """Import the name's module."""
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, renamed = _HOMES[name].partition(":")
    value = getattr(import_module(home, __name__), renamed or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
