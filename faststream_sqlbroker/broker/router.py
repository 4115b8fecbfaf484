"""Routers: subscribers and publishers declared apart from the broker."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from faststream._internal.broker.router import ArgsContainer, BrokerRouter, SubscriberRoute
from faststream._internal.constants import EMPTY
from typing_extensions import Unpack

from faststream_sqlbroker.broker.config import SqlBrokerRouterConfig
from faststream_sqlbroker.broker.registrator import AllSubscriberOptions, SqlBrokerRegistrator

if TYPE_CHECKING:
    from fast_depends.dependencies import Dependant
    from faststream import AckPolicy
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import BrokerMiddleware, CustomCallable


class SqlBrokerPublisher(ArgsContainer):
    """Arguments of `publisher`, for a route."""

    def __init__(
        self,
        queue: str = "",
        *,
        headers: dict[str, Any] | None = None,
        title: str | None = None,
        description: str | None = None,
        schema: Any | None = None,
        include_in_schema: bool = True,
    ) -> None:
        """As `SqlBroker.publisher`."""
        super().__init__(
            queue,
            headers=headers,
            title=title,
            description=description,
            schema=schema,
            include_in_schema=include_in_schema,
        )


class SqlBrokerRoute(SubscriberRoute):
    """A handler with the arguments of `subscriber`, for a router's `handlers`."""

    def __init__(
        self,
        call: Callable[..., Any],
        queues: str | Sequence[str],
        *more_queues: str,
        publishers: Iterable[SqlBrokerPublisher] = (),
        **options: Unpack[AllSubscriberOptions],
    ) -> None:
        """As `SqlBroker.subscriber`; `publishers` get what `call` returns."""
        super().__init__(call, queues, *more_queues, publishers=publishers, **options)


class SqlBrokerRouter(SqlBrokerRegistrator, BrokerRouter[Any, Any]):
    """Subscribers and publishers to include in a broker."""

    def __init__(
        self,
        prefix: str = "",
        handlers: Iterable[SqlBrokerRoute] = (),
        *,
        dependencies: "Sequence[Dependant]" = (),
        middlewares: "Sequence[BrokerMiddleware[Any]]" = (),
        routers: Iterable[SqlBrokerRegistrator] = (),
        parser: "CustomCallable | None" = None,
        decoder: "CustomCallable | None" = None,
        codec: "CodecProto | None" = None,
        ack_policy: "AckPolicy" = EMPTY,
        include_in_schema: bool | None = None,
    ) -> None:
        """Collect routes.

        Args:
            prefix: Goes before the queues of subscribers and publishers.
            handlers: Routes.
            dependencies: Of every handler.
            middlewares: Around every handler.
            routers: Routers inside this one.
            parser: Default parser of its subscribers.
            decoder: Default decoder.
            codec: Default codec.
            ack_policy: Default policy of its subscribers.
            include_in_schema: Whether they are documented.
        """
        config = SqlBrokerRouterConfig(
            prefix=prefix,
            ack_policy=ack_policy,
            broker_dependencies=dependencies,
            broker_middlewares=middlewares,
            broker_parser=parser,
            broker_decoder=decoder,
            broker_codec=codec,
            include_in_schema=include_in_schema,
        )
        super().__init__(config=config, handlers=handlers, routers=routers)
