"""`subscriber`, `pipeline` and `publisher` of the broker and its routers."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from typing_extensions import Unpack, override

from faststream_sqlbroker.adapter.broker import Registrator
from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.broker.pipelines import Pipeline, Step, check_pipeline, check_steps
from faststream_sqlbroker.broker.scheduling import SqlBrokerScheduling
from faststream_sqlbroker.core.checks import queue_problem
from faststream_sqlbroker.core.routing import Destination, PipelineStep
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.subscriber.checks import no_handler
from faststream_sqlbroker.subscriber.options import SubscriberOptions, make_settings

if TYPE_CHECKING:
    from fast_depends.dependencies import Dependant

    from faststream_sqlbroker.adapter.messages import CodecProto
    from faststream_sqlbroker.adapter.values import BrokerMiddleware, CustomCallable
    from faststream_sqlbroker.publisher.usecase import BatchQueuePublisher, QueuePublisher
    from faststream_sqlbroker.subscriber.usecase import QueueSubscriber


class HandlerOptions(TypedDict, total=False):
    """FastStream's own arguments of a subscriber, without its dependencies."""

    parser: "CustomCallable | None"
    """Replaces the broker's parser."""
    decoder: "CustomCallable | None"
    """Replaces the broker's decoder."""
    codec: "CodecProto | None"
    """Decodes bodies; give it or a decoder, not both."""
    no_reply: bool
    """Drops the handler's answer to messages with reply_to; default False."""
    persistent: bool
    """The broker keeps a reference to the subscriber; with False the caller must. Default True."""
    title: str | None
    """Title in AsyncAPI documents."""
    description: str | None
    """Description in AsyncAPI documents; default the handler's docstring."""
    include_in_schema: bool
    """The subscriber is part of AsyncAPI documents; default True."""


class EndpointOptions(HandlerOptions, total=False):
    """FastStream's own arguments of a subscriber."""

    dependencies: "Sequence[Dependant]"
    """Dependencies of every handler."""


class AllSubscriberOptions(SubscriberOptions, EndpointOptions, total=False):
    """Every keyword argument of `subscriber`."""


class PublisherOptions(TypedDict, total=False):
    """The keyword arguments of `publisher` but batch, for type checkers."""

    headers: dict[str, Any] | None
    reply_to: str
    persistent: bool
    title: str | None
    description: str | None
    schema: Any | None
    include_in_schema: bool


class SqlBrokerRegistrator(SqlBrokerScheduling, Registrator[Any, Any]):
    """Declares subscribers, pipelines and publishers."""

    @property
    @override
    def subscribers(self) -> "list[Any]":
        """Its own and those of its routers, in the order in which they were declared."""
        return sorted(super().subscribers, key=_NUMBER)

    @property
    @override
    def publishers(self) -> "list[Any]":
        """Its own and those of its routers, in the order in which they were declared."""
        return sorted(super().publishers, key=_NUMBER)

    @override
    def subscriber(  # type: ignore[override]
        self,
        queues: str | Sequence[str] | Mapping[str, int] = (),
        *more_queues: str,
        **options: Unpack[AllSubscriberOptions],
    ) -> "QueueSubscriber":
        """Subscribe a handler to one or several queues.

        Args:
            queues: A name or a list of names; more names may follow. A mapping of names to weights
                divides the claims: while both queues have messages, {"high": 5, "low": 1} takes 500
                of 600 from "high" and 100 from "low". A queue without messages leaves its share to
                the others.
            more_queues: More names.
            options: See `SubscriberOptions` for those of this broker and `EndpointOptions` for
                those of FastStream. All have defaults, made for low latency on an idle queue and
                full batches on a busy one.

        Raises:
            SetupError: an unknown option, a value that is not valid, or options that exclude each
                other.
        """
        return self._subscribe(_names(queues, more_queues), options)

    def pipeline(
        self,
        name: str,
        *steps: Step,
        forward_to: str | Destination,
        description: str | None = None,
        include_in_schema: bool = True,
    ) -> Pipeline:
        """Declare one service of several queues that pass messages on; each gets a subscriber.

        The transaction that settles a message in one step also moves it to the next. The message
        keeps its id and its body.

        Args:
            name: The service's name in AsyncAPI documents and in `broker.admin.explain`.
            steps: The steps in their order, each a queue with the options of its subscriber.
            forward_to: The queue to which the last step moves messages, or `DESTINATION`.
            description: Description of every step in AsyncAPI documents; default the step's number.
            include_in_schema: The steps are part of AsyncAPI documents.

        Raises:
            SetupError: no step, the same queue or name twice, or options that are not valid.
        """
        check_pipeline(name, steps, forward_to, [pipeline.name for pipeline in self._pipelines])
        hops = (*(step.queue for step in steps), forward_to)
        check_steps(steps, hops[1:])
        endpoint = {"description": description, "include_in_schema": include_in_schema}
        subscribers = [
            self._subscribe(
                step.queue,
                {**step.options, **endpoint, "forward_to": hops[n]},
                PipelineStep(name, n, hops),
            )
            for n, step in enumerate(steps, 1)
        ]
        pipeline = Pipeline(name, tuple(subscribers))
        self._pipelines.append(pipeline)
        return pipeline

    @property
    def pipelines(self) -> list[Pipeline]:
        """The pipelines declared here and in included routers."""
        routers: list[Any] = self.routers
        return [
            *self._pipelines,
            *(p for router in routers for p in getattr(router, "pipelines", ())),
        ]

    @cached_property
    def _pipelines(self) -> list[Pipeline]:
        return []

    def _subscribe(
        self, names: Any, options: Mapping[str, Any], place: PipelineStep | None = None
    ) -> "QueueSubscriber":
        endpoint: dict[str, Any] = {
            name: value
            for name, value in options.items()
            if name in EndpointOptions.__annotations__
        }
        own: Any = {name: value for name, value in options.items() if name not in endpoint}
        if own.get("forward_to") is not None:
            no_handler([name for name in _OF_HANDLERS if endpoint.get(name)])
        # A process that only publishes needs none of what runs handlers.
        from faststream_sqlbroker.subscriber.factory import create_subscriber  # noqa: PLC0415

        subscriber = create_subscriber(
            make_settings(names, own),
            outer_config=self.config,
            ack_policy=own.get("ack_policy", EMPTY),
            no_reply=endpoint.get("no_reply", False),
            title=endpoint.get("title"),
            description=endpoint.get("description"),
            include_in_schema=endpoint.get("include_in_schema", True),
            place=place,
        )
        subscriber.number = next(_NUMBERS)
        super().subscriber(subscriber, persistent=endpoint.get("persistent", True))
        subscriber.add_call(
            parser_=endpoint.get("parser") or self._parser,
            decoder_=endpoint.get("decoder") or self._decoder,
            codec_=endpoint.get("codec"),
            dependencies_=tuple(endpoint.get("dependencies", ())),
        )
        return subscriber

    @overload
    def publisher(
        self, queue: str = "", *, batch: Literal[True], **options: Unpack[PublisherOptions]
    ) -> "BatchQueuePublisher": ...

    @overload
    def publisher(
        self, queue: str = "", *, batch: bool = False, **options: Unpack[PublisherOptions]
    ) -> "QueuePublisher": ...

    @override
    def publisher(  # type: ignore[override]
        self,
        queue: str = "",
        *,
        headers: dict[str, Any] | None = None,
        reply_to: str = "",
        batch: bool = False,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        schema: Any | None = None,
        include_in_schema: bool = True,
    ) -> "QueuePublisher":
        """Declare a publisher: stack it on a handler, or call its `publish`.

        Args:
            queue: The queue to publish to; "" leaves it to each call.
            headers: Added to each message; a header of the message itself overrides them.
            reply_to: Full name of the queue for answers, unless the message names another.
            batch: A list or tuple that a stacked handler returns becomes several messages, written
                in one transaction; an empty one publishes nothing. With False it is one message.
                `publish` then takes several messages, as `publish_batch`.
            persistent: The broker keeps a reference to the publisher; with False the caller must.
            title: Title in AsyncAPI documents.
            description: Description in AsyncAPI documents.
            schema: Type of the body in AsyncAPI documents; default the stacked handler's return
                type.
            include_in_schema: The publisher is part of AsyncAPI documents.

        Raises:
            SetupError: `queue` or `reply_to` is not a valid queue name, or `headers` or `batch`
                has the wrong type.
        """
        if queue != "" and (problem := queue_problem(queue)) is not None:
            msg = f"a publisher's queue cannot be {short(queue)}: {problem}"
            raise SetupError(msg)
        if headers is not None and not isinstance(headers, dict):
            msg = f"a publisher's headers must be a dict of JSON values, got {headers!r}"
            raise SetupError(msg)
        if reply_to != "" and (problem := queue_problem(reply_to)) is not None:
            msg = f"a publisher's reply_to cannot be {short(reply_to)}: {problem}"
            raise SetupError(msg)
        if not isinstance(batch, bool):
            msg = f"a publisher's batch must be True or False, got {short(batch)}"
            raise SetupError(msg)
        # `broker.publish` needs none of it.
        from faststream_sqlbroker.publisher.usecase import (  # noqa: PLC0415
            BatchQueuePublisher,
            QueuePublisher,
            QueuePublisherConfig,
            QueuePublisherSpecification,
            QueuePublisherSpecificationConfig,
        )

        publisher = (BatchQueuePublisher if batch else QueuePublisher)(
            QueuePublisherConfig(
                _outer_config=self.config,  # type: ignore[arg-type]
                queue=queue,
                headers=headers or {},
                reply_to=reply_to,
                batch=batch,
            ),
            QueuePublisherSpecification(
                self.config,  # type: ignore[arg-type]
                QueuePublisherSpecificationConfig(
                    queue=queue,
                    title_=title,
                    description_=description,
                    schema_=schema,
                    include_in_schema=include_in_schema,
                ),
            ),
        )
        publisher.number = next(_NUMBERS)
        super().publisher(publisher, persistent=persistent)
        return publisher

    @override
    def include_router(
        self,
        router: "SqlBrokerRegistrator",  # type: ignore[override]
        *,
        prefix: str = "",
        dependencies: "Sequence[Dependant]" = (),
        middlewares: "Sequence[BrokerMiddleware[Any, Any]]" = (),
        include_in_schema: bool | None = None,
    ) -> None:
        """Add the subscribers, pipelines, publishers and schedules of `router`.

        Args:
            router: A `SqlBrokerRouter`.
            prefix: Put before the queue names of its subscribers and publishers.
            dependencies: Dependencies of every handler.
            middlewares: Middlewares of every handler.
            include_in_schema: Its subscribers and publishers are part of AsyncAPI documents.

        Raises:
            SetupError: it is a router of another broker.
        """
        if not isinstance(router, SqlBrokerRegistrator):
            kind = type(router)
            raise SetupError(
                f"include_router takes a SqlBrokerRouter, got {kind.__module__}.{kind.__name__}: "
                "include it in a broker of its own kind"
            )
        super().include_router(
            router,
            prefix=prefix,
            dependencies=dependencies,
            middlewares=middlewares,
            include_in_schema=include_in_schema,
        )


_NUMBERS = count()
_NUMBER = attrgetter("number")
_OF_HANDLERS = "dependencies", "parser", "decoder", "codec", "no_reply"
"""Options that a subscriber with `forward_to` cannot have: it has no handler."""


def _names(queues: str | Sequence[str] | Mapping[str, int], more: tuple[str, ...]) -> Any:
    if not more:
        return queues
    if isinstance(queues, Mapping):
        raise SetupError(
            "give all queues with weights in one mapping, "
            f"got {short(more[0])} after {short(queues)}"
        )
    return [*([queues] if isinstance(queues, str) else queues), *more]
