"""A FastAPI router with a broker: endpoints and handlers share FastAPI's dependencies.

Requires the extra `fastapi`. The names match FastStream's other brokers. In the handlers of this
router, use the annotations of this module, not those of `faststream_sqlbroker`.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypedDict

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from typing_extensions import Unpack, override

from faststream_sqlbroker.broker.broker import SqlBroker as _Broker
from faststream_sqlbroker.broker.registrator import PublisherOptions, RegistrationOptions
from faststream_sqlbroker.core.depth import MaxDepth
from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.retention import Retention
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.database.messages.handler import current_transaction
from faststream_sqlbroker.exceptions import MissingExtraError
from faststream_sqlbroker.message import SqlBrokerBatchMessage as _BatchMessage
from faststream_sqlbroker.message import SqlBrokerMessage as _Message
from faststream_sqlbroker.publisher.usecase import QueuePublisher
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.subscriber.options import SubscriberOptions
from faststream_sqlbroker.subscriber.transactions import TRANSACTION
from faststream_sqlbroker.subscriber.usecase import QueueSubscriber

try:
    from fastapi import Depends, params
    from fastapi.datastructures import Default

    from faststream_sqlbroker.adapter.fastapi import (
        Context,
        ContextRepo,
        Logger,
        StreamMessage,
        StreamRouter,
    )
except ModuleNotFoundError as error:
    missing = f"{error.name!r} is not installed: pip install 'sqlbroker[fastapi]'"
    raise MissingExtraError(missing) from error

if TYPE_CHECKING:
    from fast_depends.library.serializer import SerializerProto
    from fastapi.routing import APIRoute
    from fastapi.types import IncEx
    from faststream import AckPolicy
    from faststream.security import BaseSecurity
    from faststream.specification.base import SpecificationFactory
    from faststream.specification.schema.extra import Tag, TagDict
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Lifespan

    from faststream_sqlbroker.adapter.broker import UnderlyingDriverAnnotations
    from faststream_sqlbroker.adapter.messages import CodecProto
    from faststream_sqlbroker.adapter.values import (
        BrokerMiddleware,
        CustomCallable,
        IdGenerator,
        LoggerProto,
    )

__all__ = (
    "Context",
    "ContextRepo",
    "Logger",
    "SqlBroker",
    "SqlBrokerBatchMessage",
    "SqlBrokerMessage",
    "SqlBrokerRouter",
    "SqlConnection",
    "SqlSession",
    "StreamMessage",
    "shared_session",
)


class _ContextName(NamedTuple):
    """The context name that an annotation requests, checked when the subscriber starts."""

    name: str


SqlBrokerMessage = Annotated[_Message, Context("message")]
"""The message that the handler processes."""
SqlBrokerBatchMessage = Annotated[_BatchMessage, Context("message")]
"""The batch that the handler processes, for subscribers with batch=True."""
SqlBroker = Annotated[_Broker, Context("broker")]
"""The broker that runs the handler."""
SqlConnection = Annotated[
    AsyncConnection,
    Context(f"{TRANSACTION}.connection"),
    _ContextName(f"{TRANSACTION}.connection"),
]
"""The connection whose transaction commits together with the ack; requires transactional=True."""
SqlSession = Annotated[
    AsyncSession, Context(f"{TRANSACTION}.session"), _ContextName(f"{TRANSACTION}.session")
]
"""A session on the connection of `SqlConnection`; requires transactional=True."""


def shared_session(make: Callable[[], AbstractAsyncContextManager[AsyncSession]]) -> params.Depends:
    """Return a dependency that provides an AsyncSession to endpoints and handlers alike.

    In a handler with transactional=True, the session belongs to the handler's transaction, which
    commits together with the ack. Elsewhere it is a new session in its own transaction, committed
    after the endpoint returns and before the response is sent, and rolled back if the endpoint
    raises. `broker.publish(..., session=session)` joins either transaction.

    Args:
        make: Creates a session: an async_sessionmaker on the broker's database.
    """

    async def open_session() -> AsyncIterator[AsyncSession]:
        transaction = current_transaction.get()
        if transaction is not None:
            yield transaction.session
            return
        async with make() as new_session, new_session.begin():
            yield new_session

    # FastAPI ends a dependency of the scope "request" only after the response was sent. The client
    # would not learn of a COMMIT that fails.
    dependency: params.Depends = Depends(open_session, scope="function")
    return dependency


class BrokerOptions(TypedDict, total=False):
    """Keyword arguments of `SqlBroker` that do not come from FastAPI."""

    schema: SqlBrokerSchemaConfig | None
    validate_schema_on_start: bool
    statement_timeout: Duration
    max_connections: int | None
    pgbouncer: bool
    listen_url: URL | str | None
    graceful_timeout: Duration | None
    presence_interval: Duration
    ack_policy: "AckPolicy"
    decoder: "CustomCallable | None"
    parser: "CustomCallable | None"
    codec: "CodecProto | None"
    middlewares: "Sequence[BrokerMiddleware[Any, Any]]"
    security: "BaseSecurity | None"
    specification_url: str | Iterable[str] | None
    protocol: str | None
    protocol_version: str | None
    description: str | None
    logger: "LoggerProto | None"
    log_level: int
    serializer: "SerializerProto | None"
    context: ContextRepo | None
    max_depth: Mapping[str, MaxDepth | int] | None
    max_payload: int | None
    retention: Retention | None
    metrics: Recorder | None
    debug_header: str | None
    health_port: int | str | None
    id_generator: "IdGenerator"
    underlying_driver_annotations: "UnderlyingDriverAnnotations | None"


class RouterOptions(BrokerOptions, total=False):
    """Keyword arguments of `SqlBrokerRouter`: FastAPI's APIRouter plus FastStream's additions."""

    prefix: str
    """Prefix of the endpoints' paths; queues have no prefix."""
    tags: list[str | Enum] | None
    """Tags of the endpoints in OpenAPI."""
    dependencies: Sequence[params.Depends] | None
    """Dependencies of every endpoint and every handler."""
    default_response_class: "type[Response]"
    responses: dict[int | str, dict[str, Any]] | None
    callbacks: "list[BaseRoute] | None"
    routes: "list[BaseRoute] | None"
    redirect_slashes: bool
    default: "ASGIApp | None"
    dependency_overrides_provider: Any | None
    route_class: "type[APIRoute]"
    on_startup: Sequence[Callable[[], Any]] | None
    on_shutdown: Sequence[Callable[[], Any]] | None
    lifespan: "Lifespan[Any] | None"
    deprecated: bool | None
    include_in_schema: bool
    """Include the endpoints in OpenAPI and serve the AsyncAPI document."""
    generate_unique_id_function: "Callable[[APIRoute], str]"
    setup_state: bool
    """Add the broker to the application's state; default True."""
    specification: "SpecificationFactory | None"
    """Creates the AsyncAPI document."""
    specification_tags: "Iterable[Tag | TagDict]"
    """Tags of the server in the AsyncAPI document."""
    schema_url: str | None
    """Path of the AsyncAPI document; default "/asyncapi". None disables it."""


class StreamOptions(SubscriberOptions, RegistrationOptions, total=False):
    """Keyword arguments of `SqlBrokerRouter.subscriber`."""

    dependencies: Iterable[params.Depends]
    """FastAPI dependencies of the handler, in addition to those of the router."""
    response_model: Any
    """Type to which the answer is converted, as in FastAPI."""
    response_model_include: "IncEx | None"
    response_model_exclude: "IncEx | None"
    response_model_by_alias: bool
    response_model_exclude_unset: bool
    response_model_exclude_defaults: bool
    response_model_exclude_none: bool


class SqlBrokerRouter(StreamRouter[ClaimedMessage]):
    """FastAPI's APIRouter with a broker that starts and stops with the application.

    The broker is `router.broker`.
    """

    broker_class: ClassVar[type[_Broker]] = _Broker  # type: ignore[misc]
    broker: _Broker

    def __init__(self, engine: AsyncEngine | URL | str, **options: Unpack[RouterOptions]) -> None:
        """Create a router with a broker.

        Args:
            engine: As for `SqlBroker`.
            options: See `RouterOptions`; the options of the broker are explained at `SqlBroker`.

        Raises:
            SetupError: as for `SqlBroker`.
        """
        arguments: dict[str, Any] = {"context": None, **options}
        super().__init__(engine, **arguments)

    @override
    def subscriber(  # type: ignore[override]
        self,
        queues: str | Sequence[str] | Mapping[str, int] = (),
        *more_queues: str,
        **options: Unpack[StreamOptions],
    ) -> QueueSubscriber:
        """Subscribe a handler whose parameters FastAPI fills; see `SqlBroker.subscriber`.

        Raises:
            SetupError: as for `SqlBroker.subscriber`.
        """
        arguments: dict[str, Any] = {**options}
        if arguments.get("forward_to") is not None:
            return self.broker.subscriber(queues, *more_queues, **arguments)
        subscriber: Any = super().subscriber(
            queues,  # type: ignore[arg-type]
            *more_queues,
            **{**_ROUTE_DEFAULTS, **arguments},
        )
        queue_subscriber: QueueSubscriber = subscriber
        return queue_subscriber

    @override
    def publisher(self, queue: str = "", **options: Unpack[PublisherOptions]) -> QueuePublisher:
        """Declare a publisher; see `SqlBroker.publisher`."""
        return self.broker.publisher(queue, **options)


_ROUTE_DEFAULTS: dict[str, Any] = {
    "dependencies": (),
    "response_model": Default(None),
    "response_model_include": None,
    "response_model_exclude": None,
    "response_model_by_alias": True,
    "response_model_exclude_unset": False,
    "response_model_exclude_defaults": False,
    "response_model_exclude_none": False,
}
"""Arguments that FastStream's router always requires."""
