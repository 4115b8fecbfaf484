"""A message broker for FastStream that lives in the relational database you already run."""

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
from faststream_sqlbroker.broker.router import SqlBrokerPublisher, SqlBrokerRoute, SqlBrokerRouter
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
from faststream_sqlbroker.flow.locks import Lock
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
