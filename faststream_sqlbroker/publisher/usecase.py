"""A publisher bound to a queue, with its configuration and AsyncAPI documentation.

Publishers are called directly or stacked on a subscriber. This module also has the publisher of a
handler's replies.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from faststream.response import PublishCommand
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message, Operation, PublisherSpec
from typing_extensions import Unpack, override

from faststream_sqlbroker.adapter.broker import BrokerConfig
from faststream_sqlbroker.adapter.endpoints import (
    FakePublisher,
    PublisherSpecification,
    PublisherSpecificationConfig,
    PublisherUsecase,
    PublisherUsecaseConfig,
)
from faststream_sqlbroker.call_assertions import SqlCallAssertions, SqlHandlerCallWrapper
from faststream_sqlbroker.core.checks import is_number
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.flow.tasks.requests import (
    MIN_EXPIRY,
    REPLY_ID,
    REPLY_WITHIN,
    parse_request_timeout,
)
from faststream_sqlbroker.handler_calls import ensure_name
from faststream_sqlbroker.payload_names import make_names_unique
from faststream_sqlbroker.publisher.rows import check_not_one_list
from faststream_sqlbroker.response import (
    PublishOptions,
    RequestOptions,
    SqlBrokerPublishCommand,
    make_request,
)

if TYPE_CHECKING:
    from faststream.message import StreamMessage

    from faststream_sqlbroker.adapter.messages import ProducerProto
    from faststream_sqlbroker.adapter.values import (
        P_HandlerParams,
        PublisherMiddleware,
        T_HandlerReturn,
    )
    from faststream_sqlbroker.message import SqlBrokerMessage


class ReplyPublisher(FakePublisher):
    """Sends a handler's answer to the reply queue of the message.

    The reply to a request names the request, and expires when no caller waits for it any more.
    """

    def __init__(
        self, producer: "ProducerProto[Any]", message: "StreamMessage[Any]", clock: Clock
    ) -> None:
        """Create a publisher to `message.reply_to`.

        A request has the id of its reply in a header; another message has only `reply_to`.
        """
        super().__init__(producer=producer)
        self.queue = message.reply_to
        self._reply_id = message.headers.get(REPLY_ID)
        self._expires_in = None if self._reply_id is None else _get_remaining_time(message, clock)

    @override
    async def _publish(
        self, cmd: PublishCommand, *, _extra_middlewares: "Iterable[PublisherMiddleware]"
    ) -> Any:
        """Send the answer, unless the caller of a request has stopped waiting."""
        if self._expires_in is not None and self._expires_in < MIN_EXPIRY:
            return None
        return await super()._publish(cmd, _extra_middlewares=_extra_middlewares)

    @override
    def patch_command(self, cmd: PublishCommand) -> SqlBrokerPublishCommand:
        """Return the command of the answer, addressed to `queue`.

        FastStream calls it before it publishes. A reply names its request, so that the caller finds
        it, and expires when the caller stops waiting.
        """
        command = SqlBrokerPublishCommand.from_cmd(super().patch_command(cmd))
        command.destination = self.queue
        # The answer joins the ack of the handler's message if possible.
        command.stacked = True
        if self._reply_id is not None:
            command.headers = {**(command.headers or {}), REPLY_ID: self._reply_id}
        if self._expires_in is not None:
            command.options["expires_in"] = self._expires_in
        return command


def _get_remaining_time(message: "StreamMessage[Any]", clock: Clock) -> float | None:
    """Return the seconds for which the caller of a request still waits; None if unknown.

    The request's header has the caller's timeout. The wait in the queue is measured by two times of
    the database, the time since the claim by this process's clock, so clocks are not mixed.
    """
    timeout = message.headers.get(REPLY_WITHIN)
    if not is_number(timeout):
        return None
    raw = message.raw_message
    row = raw[0] if isinstance(raw, tuple) and raw else raw
    if not isinstance(row, ClaimedMessage):
        return float(timeout)
    queued: timedelta = row.acquired_at - row.created_at
    elapsed = clock.monotonic() - row.claimed_monotonic
    return timeout - queued.total_seconds() - elapsed


@dataclass(kw_only=True)
class QueuePublisherConfig(PublisherUsecaseConfig):
    """The arguments of `broker.publisher`; `queue` is without the routers' prefix."""

    queue: str = ""
    headers: dict[str, Any] = field(default_factory=dict)
    reply_to: str = ""
    batch: bool = False


@dataclass(kw_only=True)
class QueuePublisherSpecificationConfig(PublisherSpecificationConfig):
    """The data of a publisher's AsyncAPI documentation."""

    queue: str = ""


class QueuePublisherSpecification(
    PublisherSpecification[BrokerConfig, QueuePublisherSpecificationConfig]
):
    """Documents the queue as a channel without bindings; AsyncAPI has none for SQL."""

    @property
    def address(self) -> str:
        """The queue, with the routers' prefix."""
        return f"{self._outer_config.prefix}{self.config.queue}"

    @property
    def name(self) -> str:
        """The channel's key."""
        return self.config.title_ or f"{self.address}:Publisher"

    @override
    def get_payloads(self) -> list[tuple[dict[str, Any], str]]:
        """Return the configured schema, or the schemas of the handlers' results."""
        return make_names_unique(super().get_payloads(), self._outer_config)

    def get_schema(self) -> dict[str, PublisherSpec]:
        """Return the channel by key."""
        return {
            self.name: PublisherSpec(
                address=self.address,
                description=self.config.description_,
                operation=Operation(
                    message=Message(
                        title=f"{self.name}:Message",
                        payload=resolve_payloads(self.get_payloads(), "Publisher"),
                    ),
                    bindings=None,
                ),
                bindings=None,
            )
        }


class QueuePublisher(SqlCallAssertions, PublisherUsecase):
    """A publisher, returned by `broker.publisher(queue)`."""

    _call_wrapper_class = SqlHandlerCallWrapper
    number: int
    """Position in the order in which subscribers and publishers were declared."""

    def __init__(
        self, config: QueuePublisherConfig, specification: QueuePublisherSpecification
    ) -> None:
        # FastStream leaves out its type arguments.
        super().__init__(config, specification)  # type: ignore[arg-type]
        self.config = config
        self.headers = config.headers

    @override
    def __call__(
        self, func: "Callable[P_HandlerParams, T_HandlerReturn]"
    ) -> "SqlHandlerCallWrapper[P_HandlerParams, T_HandlerReturn]":
        """Stack the publisher on the handler `func`, to publish the handler's results."""
        wrapper: Any = super().__call__(ensure_name(func))
        return cast("SqlHandlerCallWrapper[P_HandlerParams, T_HandlerReturn]", wrapper)

    @property
    def queue(self) -> str:
        """The queue, with the routers' prefix; "" if each call names a queue."""
        return f"{self._outer_config.prefix}{self.config.queue}" if self.config.queue else ""

    @override
    async def publish(
        self, message: Any = None, queue: str = "", **options: Unpack[PublishOptions]
    ) -> int | None:
        """Publish to this publisher's queue, or to `queue`; see `SqlBroker.publish`.

        Raises:
            PublishError: as for `SqlBroker.publish`.
        """
        cmd = self._make_command((message,), queue, options)
        result: int | None = await self._basic_publish(
            cmd, producer=self._outer_config.producer, _extra_middlewares=()
        )
        return result

    async def publish_batch(
        self, *messages: Any, queue: str = "", **options: Unpack[PublishOptions]
    ) -> list[int | None]:
        """Publish several messages in a single transaction; see `SqlBroker.publish_batch`."""
        if not messages:
            return []
        check_not_one_list(messages)
        cmd = self._make_command(messages, queue, options)
        result: list[int | None] = await self._basic_publish_batch(
            cmd, producer=self._outer_config.producer, _extra_middlewares=()
        )
        return result

    def _make_command(
        self, messages: tuple[Any, ...], queue: str, options: PublishOptions
    ) -> SqlBrokerPublishCommand:
        """Create the command of a direct publish, with this publisher's defaults."""
        return self._complete_command(
            SqlBrokerPublishCommand(*messages, queue=queue or self.queue, **options)
        )

    def _complete_command(self, cmd: SqlBrokerPublishCommand) -> SqlBrokerPublishCommand:
        """Add this publisher's headers, reply_to and codec to `cmd`.

        Called for direct publishes and handlers' answers. Headers and reply_to of the message stay.
        """
        cmd.add_headers(self.headers, override=False)
        cmd.reply_to = cmd.reply_to or self.config.reply_to
        cmd.id_generator = self._outer_config.id_generator
        # As for subscribers, FastStream uses the outermost codec: the broker's, else a router's.
        cmd.codec = self._outer_config.broker_codec
        cmd.publisher = self
        return cmd

    @override
    async def _publish(
        self, cmd: PublishCommand, *, _extra_middlewares: "Iterable[PublisherMiddleware]"
    ) -> None:
        """Publish a handler's answer by this publisher, which is stacked on the handler.

        FastStream calls it. The answer joins the ack of the handler's message if possible.
        """
        is_batch = self.config.batch and isinstance(cmd.body, list | tuple)
        if is_batch and not cmd.body:
            return
        command = self._complete_command(SqlBrokerPublishCommand.from_cmd(cmd, batch=is_batch))
        command.destination = self.queue or command.destination
        command.stacked = True
        send = self._basic_publish_batch if is_batch else self._basic_publish
        await send(
            command, producer=self._outer_config.producer, _extra_middlewares=_extra_middlewares
        )

    @override
    async def request(
        self,
        message: Any = None,
        queue: str = "",
        *,
        timeout: Duration | None = 30.0,
        **options: Unpack[RequestOptions],
    ) -> "SqlBrokerMessage":
        """Publish a request to this publisher's queue, or to `queue`; see `SqlBroker.request`."""
        cmd = make_request(message, queue or self.queue, parse_request_timeout(timeout), options)
        reply: SqlBrokerMessage = await self._basic_request(
            self._complete_command(cmd), producer=self._outer_config.producer
        )
        return reply


class BatchQueuePublisher(QueuePublisher):
    """A publisher of lists, returned by `broker.publisher(queue, batch=True)`."""

    @override
    async def publish(  # type: ignore[override]
        self, *messages: Any, queue: str = "", **options: Unpack[PublishOptions]
    ) -> list[int | None]:
        """Publish each of `messages` in a single transaction, like `publish_batch`."""
        return await self.publish_batch(*messages, queue=queue, **options)
