"""`subscriber`, `pipeline` and `publisher` of the broker and its routers."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypedDict

from typing_extensions import Unpack, override

from faststream_sqlbroker.adapter.broker import Registrator
from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.broker.pipelines import Pipeline, Step, check_pipeline, check_step_options
from faststream_sqlbroker.broker.scheduling import SqlBrokerScheduling
from faststream_sqlbroker.core.checks import check_bool, find_queue_error, reject_unknown_options
from faststream_sqlbroker.core.routing import Destination, PipelineStep
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.response import FOREIGN_OPTIONS
from faststream_sqlbroker.subscriber.option_checks import check_no_handler_options, merge_queues
from faststream_sqlbroker.subscriber.options import SubscriberOptions, make_settings

if TYPE_CHECKING:
    from fast_depends.dependencies import Dependant

    from faststream_sqlbroker.adapter.messages import CodecProto
    from faststream_sqlbroker.adapter.values import CustomCallable
    from faststream_sqlbroker.publisher.usecase import QueuePublisher
    from faststream_sqlbroker.subscriber.usecase import QueueSubscriber


class RegistrationOptions(TypedDict, total=False):
    """FastStream's own arguments of a subscriber, except the dependencies."""

    parser: "CustomCallable | None"
    """Replaces the broker's parser."""
    decoder: "CustomCallable | None"
    """Replaces the broker's decoder."""
    codec: "CodecProto | None"
    """Decodes bodies; cannot be combined with a decoder."""
    no_reply: bool
    """Drop the handler's answer to messages with reply_to; default False."""
    persistent: bool
    """Keep a reference to the subscriber in the broker; with False the caller must keep it. Default
    True.
    """
    title: str | None
    """Title in AsyncAPI documents."""
    description: str | None
    """Description in AsyncAPI documents; default: the handler's docstring."""
    include_in_schema: bool
    """Include the subscriber in AsyncAPI documents; default True."""


class EndpointOptions(RegistrationOptions, total=False):
    """FastStream's own arguments of a subscriber."""

    dependencies: "Sequence[Dependant]"
    """Dependencies of every handler."""


class AllSubscriberOptions(SubscriberOptions, EndpointOptions, total=False):
    """All keyword arguments of `subscriber`."""


class PublisherOptions(TypedDict, total=False):
    """Keyword arguments of `publisher`."""

    headers: dict[str, Any] | None
    """Headers added to each message; a header of the message itself takes precedence."""
    reply_to: str
    """Full name of the queue for answers, unless the message names another."""
    persistent: bool
    """Keep a reference to the publisher in the broker; with False the caller must keep it. Default
    True.
    """
    title: str | None
    """Title in AsyncAPI documents."""
    description: str | None
    """Description in AsyncAPI documents."""
    schema: Any | None
    """Type of the body in AsyncAPI documents; default: the return type of the stacked handler."""
    include_in_schema: bool
    """Include the publisher in AsyncAPI documents; default True."""
    batch: bool
    """Publish each item of a list or tuple that a stacked handler returns as a message of its own,
    all in one transaction; an empty list publishes no message. `publish` then accepts several
    messages, like `publish_batch`. Default False: the list is one message.
    """


class SqlBrokerRegistrator(SqlBrokerScheduling, Registrator[Any, Any]):
    """Registers subscribers, pipelines and publishers."""

    @property
    @override
    def subscribers(self) -> "list[Any]":
        """The subscribers declared here and in included routers, in the order of declaration."""
        return sorted(super().subscribers, key=_NUMBER)

    @property
    @override
    def publishers(self) -> "list[Any]":
        """The publishers declared here and in included routers, in the order of declaration."""
        return sorted(super().publishers, key=_NUMBER)

    @override
    def subscriber(  # type: ignore[override]
        self,
        queues: str | Sequence[str] | Mapping[str, int] = (),
        *more_queues: str,
        **options: Unpack[AllSubscriberOptions],
    ) -> "QueueSubscriber":
        """Subscribe a handler to a queue or to several queues.

            @broker.subscriber("orders", max_workers=10)
            async def handle(order: Order) -> None: ...

        Args:
            queues: A name or a list of names; more names may follow. A mapping of names to weights
                divides the claims: while both queues have messages, {"high": 5, "low": 1} takes 500
                of 600 messages from "high" and 100 from "low". A queue without messages leaves its
                share to the others.
            more_queues: More names.
            options: See `SubscriberOptions` for the options of this broker and `EndpointOptions`
                for those of FastStream. All options have defaults, chosen for low latency on an
                idle queue and full batches on a busy one.

        Raises:
            SetupError: an option is unknown, a value is not valid, or options exclude each other.
        """
        if more_queues and isinstance(queues, Mapping):
            raise SetupError(
                "queues with weights must be in one mapping, got "
                f"{format_value(more_queues[0])} after {format_value(queues)}"
            )
        return self._add_subscriber(merge_queues(queues, more_queues), options)

    def pipeline(
        self,
        name: str,
        *steps: Step,
        forward_to: str | Destination,
        description: str | None = None,
        include_in_schema: bool = True,
    ) -> Pipeline:
        """Declare a service of several queues that pass messages on; each queue gets a subscriber.

        The transaction that settles a message in one step also moves it to the next. The message
        keeps its id and its body.

        Args:
            name: The service's name in AsyncAPI documents and in `broker.admin.explain`.
            steps: The steps in order, each a queue with the options of its subscriber.
            forward_to: The queue to which the last step moves messages, or `DESTINATION`.
            description: Description of every step in AsyncAPI documents; default: the number of the
                step.
            include_in_schema: Include the steps in AsyncAPI documents.

        Raises:
            SetupError: there is no step, a queue or name is used twice, or an option is not valid.
        """
        check_pipeline(name, steps, forward_to, [pipeline.name for pipeline in self._pipelines])
        hops = (*(step.queue for step in steps), forward_to)
        check_step_options(steps, hops[1:])
        endpoint = {"description": description, "include_in_schema": include_in_schema}
        subscribers = [
            self._add_subscriber(
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

    def _add_subscriber(
        self, names: Any, options: Mapping[str, Any], pipeline_step: PipelineStep | None = None
    ) -> "QueueSubscriber":
        """Create and register a subscriber for `subscriber` and for each step of `pipeline`.

        Endpoint options, such as `parser` and `title`, go to FastStream; all others become the
        subscriber's settings. `pipeline_step` is the step that the subscriber runs, if any.
        """
        endpoint: dict[str, Any] = {
            name: value
            for name, value in options.items()
            if name in EndpointOptions.__annotations__
        }
        subscriber_options: Any = {
            name: value for name, value in options.items() if name not in endpoint
        }
        if subscriber_options.get("forward_to") is not None:
            check_no_handler_options([name for name in _HANDLER_OPTIONS if endpoint.get(name)])
        # Imported here, because a process that only publishes runs no handlers.
        from faststream_sqlbroker.subscriber.factory import create_subscriber  # noqa: PLC0415

        subscriber = create_subscriber(
            make_settings(names, subscriber_options),
            outer_config=self.config,
            ack_policy=subscriber_options.get("ack_policy", EMPTY),
            no_reply=endpoint.get("no_reply", False),
            title=endpoint.get("title"),
            description=endpoint.get("description"),
            include_in_schema=endpoint.get("include_in_schema", True),
            pipeline_step=pipeline_step,
        )
        # FastStream keeps endpoints in sets; the number restores the order of declaration.
        subscriber.number = next(_NUMBERS)
        super().subscriber(subscriber, persistent=endpoint.get("persistent", True))
        subscriber.add_call(
            parser_=endpoint.get("parser") or self._parser,
            decoder_=endpoint.get("decoder") or self._decoder,
            codec_=endpoint.get("codec"),
            dependencies_=tuple(endpoint.get("dependencies", ())),
        )
        return subscriber

    @override
    def publisher(  # type: ignore[override]
        self, queue: str = "", **options: Unpack[PublisherOptions]
    ) -> "QueuePublisher":
        """Declare a publisher, to stack on a handler or to call by `publish`.

        Args:
            queue: The queue to publish to; "" leaves the queue to each call.
            options: See `PublisherOptions`.

        Raises:
            SetupError: an option is unknown, `queue` or `reply_to` is not a valid queue name, or
                `headers` or `batch` has the wrong type.
        """
        reject_unknown_options(
            "a publisher", options, PublisherOptions.__annotations__, FOREIGN_OPTIONS
        )
        headers = options.get("headers")
        reply_to = options.get("reply_to", "")
        for name, value in (("queue", queue), ("reply_to", reply_to)):
            if value != "" and (problem := find_queue_error(value)) is not None:
                raise SetupError(f"a publisher's {name} cannot be {format_value(value)}: {problem}")
        if headers is not None and not isinstance(headers, dict):
            raise SetupError(
                f"a publisher's headers must be a dict of JSON values, got {headers!r}"
            )
        batch = options.get("batch", False)
        check_bool("a publisher's batch", batch)
        # Imported here, because `broker.publish` does not need publishers.
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
                    title_=options.get("title"),
                    description_=options.get("description"),
                    schema_=options.get("schema"),
                    include_in_schema=options.get("include_in_schema", True),
                ),
            ),
        )
        publisher.number = next(_NUMBERS)
        super().publisher(publisher, persistent=options.get("persistent", True))
        return publisher

    @override
    def include_router(self, router: Any, **options: Any) -> None:
        """Add the subscribers, pipelines, publishers and schedules of `router`.

        Args:
            router: A `SqlBrokerRouter`.
            options: FastStream's options: `prefix` is prepended to the queue names of the router's
                subscribers and publishers; `dependencies` and `middlewares` apply to every handler;
                `include_in_schema=False` omits the router from AsyncAPI documents.

        Raises:
            SetupError: the router belongs to another broker.
        """
        if not isinstance(router, SqlBrokerRegistrator):
            name = f"{type(router).__module__}.{type(router).__name__}"
            raise SetupError(f"{name} belongs to another broker: include a SqlBrokerRouter")
        super().include_router(router, **options)


_NUMBERS = count()
_NUMBER = attrgetter("number")
_HANDLER_OPTIONS = "dependencies", "parser", "decoder", "codec", "no_reply"
"""Options that a subscriber with `forward_to` cannot have: it has no handler."""
