"""Routers: subscribers and publishers declared apart from the broker."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from faststream._internal.broker.router import ArgsContainer, BrokerRouter, SubscriberRoute
from faststream._internal.constants import EMPTY
from typing_extensions import Unpack

from faststream_sqlbroker.broker.config import SqlBrokerRouterConfig
from faststream_sqlbroker.broker.registrator import AllSubscriberOptions, SqlBrokerRegistrator
from faststream_sqlbroker.exceptions import SetupError

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
        reply_to: str = "",
        batch: bool = False,
        title: str | None = None,
        description: str | None = None,
        schema: Any | None = None,
        include_in_schema: bool = True,
    ) -> None:
        """As `SqlBroker.publisher`."""
        super().__init__(
            queue,
            headers=headers,
            reply_to=reply_to,
            batch=batch,
            title=title,
            description=description,
            schema=schema,
            include_in_schema=include_in_schema,
        )


class SqlBrokerRoute(SubscriberRoute):
    """A handler with the arguments of `subscriber`, for a router's `handlers`.

    `call` is None for a subscriber without a handler, which `forward_to` makes.
    """

    def __init__(
        self,
        call: Callable[..., Any] | None,
        queues: str | Sequence[str] | Mapping[str, int],
        *more_queues: str,
        publishers: Iterable[SqlBrokerPublisher] = (),
        **options: Unpack[AllSubscriberOptions],
    ) -> None:
        """As `SqlBroker.subscriber`; `publishers` get what `call` returns.

        Raises:
            SetupError: neither `call` nor `forward_to` is given, or publishers without `call`.
        """
        if call is None and (options.get("forward_to") is None or publishers):
            msg = "a route without a handler needs forward_to=, and has no publishers"
            raise SetupError(msg)
        super().__init__(call, queues, *more_queues, publishers=publishers, **options)  # type: ignore[arg-type]


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
            codec: Default codec of its subscribers and publishers, if the broker has none.
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
