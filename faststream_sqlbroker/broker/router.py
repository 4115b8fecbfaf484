"""Routers: subscribers and publishers that are declared before their broker exists."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from faststream_sqlbroker.adapter.broker import ArgsContainer, BrokerRouter, SubscriberRoute
from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.broker.config import SqlBrokerRouterConfig
from faststream_sqlbroker.broker.registrator import (
    AllSubscriberOptions,
    PublisherOptions,
    SqlBrokerRegistrator,
)
from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from fast_depends.dependencies import Dependant
    from faststream import AckPolicy

    from faststream_sqlbroker.adapter.broker import UnderlyingDriverAnnotations
    from faststream_sqlbroker.adapter.messages import CodecProto
    from faststream_sqlbroker.adapter.values import BrokerMiddleware, CustomCallable


class SqlBrokerPublisher(ArgsContainer):
    """The arguments of a publisher in a `SqlBrokerRoute`."""

    def __init__(self, queue: str = "", **options: Unpack[PublisherOptions]) -> None:
        """Store the arguments, which are the same as for `SqlBroker.publisher`."""
        super().__init__(queue, **options)


class SqlBrokerRoute(SubscriberRoute):
    """A handler and the arguments of a subscriber, for the `handlers` of a router.

    With `forward_to` there is no handler, and `call` must be None.
    """

    def __init__(
        self,
        call: Callable[..., Any] | None,
        queues: str | Sequence[str] | Mapping[str, int],
        *more_queues: str,
        publishers: Iterable[SqlBrokerPublisher] = (),
        **options: Unpack[AllSubscriberOptions],
    ) -> None:
        """Store the arguments, which are the same as for `SqlBroker.subscriber`.

        `publishers` publish the result of `call`.

        Raises:
            SetupError: neither `call` nor `forward_to` is passed, or publishers without `call`.
        """
        if call is None and (options.get("forward_to") is None or publishers):
            msg = "a route without a handler needs forward_to= and takes no publishers"
            raise SetupError(msg)
        # FastStream's annotation of `call` does not allow None.
        route: Any = call
        super().__init__(route, queues, *more_queues, publishers=publishers, **options)


class SqlBrokerRouter(SqlBrokerRegistrator, BrokerRouter[Any, Any]):
    """A group of subscribers and publishers; `broker.include_router` adds the group to a broker."""

    def __init__(
        self,
        prefix: str = "",
        handlers: Iterable[SqlBrokerRoute] = (),
        *,
        dependencies: "Sequence[Dependant]" = (),
        middlewares: "Sequence[BrokerMiddleware[Any, Any]]" = (),
        routers: Iterable[SqlBrokerRegistrator] = (),
        parser: "CustomCallable | None" = None,
        decoder: "CustomCallable | None" = None,
        codec: "CodecProto | None" = None,
        ack_policy: "AckPolicy" = EMPTY,
        include_in_schema: bool | None = None,
        underlying_driver_annotations: "UnderlyingDriverAnnotations | None" = None,
    ) -> None:
        """Create a router.

        Args:
            prefix: Prepended to the queue names of its subscribers and publishers.
            handlers: Routes: handlers that are declared without a decorator.
            dependencies: Dependencies of every handler.
            middlewares: Middlewares of every handler.
            routers: Routers to include in this one.
            parser: Default parser of its subscribers.
            decoder: Default decoder of its subscribers.
            codec: Codec of its subscribers and publishers, if the broker has none.
            ack_policy: Default ack policy of its subscribers.
            include_in_schema: Include its subscribers and publishers in AsyncAPI documents.
            underlying_driver_annotations: As for `SqlBroker`, for the handlers of this router.
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
            underlying_driver_annotations=underlying_driver_annotations or {},
        )
        routes = tuple(handlers)
        super().__init__(
            config=config, handlers=[r for r in routes if _has_handler(r)], routers=routers
        )
        for route in routes:
            if not _has_handler(route):
                self.subscriber(*route.args, **route.kwargs)


def _has_handler(route: SqlBrokerRoute) -> bool:
    call: Any = route.call
    return call is not None
