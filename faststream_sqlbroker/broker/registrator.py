"""`subscriber` and `publisher`, for the broker and its routers."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

from faststream._internal.broker.registrator import Registrator
from faststream._internal.constants import EMPTY
from typing_extensions import Unpack, override

from faststream_sqlbroker.broker.pipelines import Pipeline, Step, check_pipeline, check_steps
from faststream_sqlbroker.broker.scheduling import SqlBrokerScheduling
from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.routing import Destination, PipelineStep
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.publisher.config import (
    QueuePublisherConfig,
    QueuePublisherSpecificationConfig,
)
from faststream_sqlbroker.publisher.specification import QueuePublisherSpecification
from faststream_sqlbroker.publisher.usecase import QueuePublisher
from faststream_sqlbroker.subscriber.checks import no_handler
from faststream_sqlbroker.subscriber.factory import create_subscriber
from faststream_sqlbroker.subscriber.options import SubscriberOptions, make_settings
from faststream_sqlbroker.subscriber.usecase import QueueSubscriber

if TYPE_CHECKING:
    from fast_depends.dependencies import Dependant
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import CustomCallable


class EndpointOptions(TypedDict, total=False):
    """FastStream's own arguments of a subscriber."""

    dependencies: "Sequence[Dependant]"
    """Dependencies of every handler."""
    parser: "CustomCallable | None"
    """Takes the place of the broker's parser."""
    decoder: "CustomCallable | None"
    """Takes the place of the broker's decoder."""
    codec: "CodecProto | None"
    """Decodes bodies; in place of a decoder."""
    no_reply: bool
    """Whether answers to messages with reply_to are dropped; default False."""
    persistent: bool
    """Whether the broker keeps the subscriber alive; False leaves that to the caller. Default True.
    """
    title: str | None
    """Title in AsyncAPI documents."""
    description: str | None
    """Description there; default the handler's docstring."""
    include_in_schema: bool
    """Whether it is documented; default True."""


class AllSubscriberOptions(SubscriberOptions, EndpointOptions, total=False):
    """Every keyword argument of `subscriber`."""


class SqlBrokerRegistrator(SqlBrokerScheduling, Registrator[Any, Any]):
    """Where subscribers and publishers are declared."""

    @override
    def subscriber(  # type: ignore[override]
        self,
        queues: str | Sequence[str] | Mapping[str, int] = (),
        *more_queues: str,
        **options: Unpack[AllSubscriberOptions],
    ) -> QueueSubscriber:
        """Subscribe a handler to one or several queues.

        Args:
            queues: A name or a list of names; more names may follow. A mapping of names to weights
                shares what is claimed: of 600 messages while both queues have some, {"high": 5,
                "low": 1} takes 500 and 100; a queue without messages leaves its share to the
                others.
            more_queues: More names.
            options: See `SubscriberOptions` for those of this broker, all with defaults that give
                low latency on an idle queue and full batches on a busy one; `EndpointOptions` for
                FastStream's.

        Raises:
            SetupError: an option that there is not, or a value that cannot work.
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
        """Declare one service made of queues whose messages are moved on: a subscriber for each
        step.

        Each message is moved from one step to the next in the transaction that settles it, under
        the same id and with its body as it is.

        Args:
            name: Of the service, as documents and `explain` show it.
            steps: In their order, each a queue with the options of its subscriber.
            forward_to: The queue to which the last step moves messages, or `DESTINATION`.
            description: Description of every step in AsyncAPI documents; default: which step it is.
            include_in_schema: Whether the steps are documented.

        Raises:
            SetupError: no step, a queue twice, a name twice, or options that cannot work.
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
        """The services declared by `pipeline`, those of included routers too."""
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
    ) -> QueueSubscriber:
        endpoint: dict[str, Any] = {
            name: value
            for name, value in options.items()
            if name in EndpointOptions.__annotations__
        }
        own: Any = {name: value for name, value in options.items() if name not in endpoint}
        if own.get("forward_to") is not None:
            no_handler([name for name in _OF_HANDLERS if endpoint.get(name)])
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
    ) -> QueuePublisher:
        """Declare a publisher: to stack on subscribers, to call, and to document.

        Args:
            queue: Where to; "" leaves it to each call.
            headers: Under those of each message.
            reply_to: Queue for the answers to its messages, unless they name another; its full
                name.
            batch: Whether a list or tuple that a stacked handler returns is several messages,
                written in one transaction; none if it is empty. Else it is one message.
            persistent: Whether the broker keeps it alive.
            title: Title in AsyncAPI documents.
            description: Description there.
            schema: Type of the body there; default the stacked handler's return type.
            include_in_schema: Whether it is documented.

        Raises:
            SetupError: `queue`, `headers` or `batch` of the wrong type, or a `reply_to` that cannot
                be a queue.
        """
        if not isinstance(queue, str):
            msg = f"a publisher's queue must be a string, got {queue!r}"
            raise SetupError(msg)
        if headers is not None and not isinstance(headers, dict):
            msg = f"a publisher's headers must be a dict of JSON values, got {headers!r}"
            raise SetupError(msg)
        if reply_to != "" and (problem := name_problem(reply_to)) is not None:
            msg = f"a publisher's reply_to cannot be {short(reply_to)}: {problem}"
            raise SetupError(msg)
        if not isinstance(batch, bool):
            msg = f"a publisher's batch must be True or False, got {short(batch)}"
            raise SetupError(msg)
        publisher = QueuePublisher(
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
        super().publisher(publisher, persistent=persistent)
        return publisher


_OF_HANDLERS = "dependencies", "parser", "decoder", "codec", "no_reply"


def _names(queues: str | Sequence[str] | Mapping[str, int], more: tuple[str, ...]) -> Any:
    if not more:
        return queues
    if isinstance(queues, Mapping):
        msg = f"queues with weights are all given in one mapping, got {short(more[0])} after {short(queues)}"
        raise SetupError(msg)
    return [*([queues] if isinstance(queues, str) else queues), *more]
