"""A publisher bound to a queue, called directly or stacked on a subscriber; its configuration, and
what AsyncAPI documents show of it. Also the one that sends a handler's answer.
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
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.flow.tasks.requests import (
    REPLY_ID,
    REPLY_WITHIN,
    SHORTEST_EXPIRY,
    request_timeout,
)
from faststream_sqlbroker.handler_calls import ensure_name
from faststream_sqlbroker.payload_names import make_names_unique
from faststream_sqlbroker.publisher.rows import refuse_one_list
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
    """Sends a handler's answer to the queue that its message asked for.

    The reply to a request names the request, and expires when no caller waits for it any more.
    """

    def __init__(
        self, producer: "ProducerProto[Any]", message: "StreamMessage[Any]", clock: Clock
    ) -> None:
        """Send to `message.reply_to`."""
        super().__init__(producer=producer)
        self.queue = message.reply_to
        self._reply_id = message.headers.get(REPLY_ID)
        self._expires_in = None if self._reply_id is None else _time_left(message, clock)

    @override
    async def _publish(
        self, cmd: PublishCommand, *, _extra_middlewares: "Iterable[PublisherMiddleware]"
    ) -> Any:
        """Send the answer, unless it is a reply that comes too late."""
        if self._expires_in is not None and self._expires_in < SHORTEST_EXPIRY:
            return None
        return await super()._publish(cmd, _extra_middlewares=_extra_middlewares)

    @override
    def patch_command(self, cmd: PublishCommand) -> SqlBrokerPublishCommand:
        """The command of the answer, addressed to `queue`."""
        real = SqlBrokerPublishCommand.from_cmd(super().patch_command(cmd))
        real.destination = self.queue
        real.stacked = True
        if self._reply_id is not None:
            real.headers = {**(real.headers or {}), REPLY_ID: self._reply_id}
        if self._expires_in is not None:
            real.options["expires_in"] = self._expires_in
        return real


def _time_left(message: "StreamMessage[Any]", clock: Clock) -> float | None:
    """Seconds for which the caller of a request still waits; None: it does not say.

    Both times are the database's; this process only measures how long the handler took.
    """
    within = message.headers.get(REPLY_WITHIN)
    if not isinstance(within, int | float) or isinstance(within, bool):
        return None
    raw = message.raw_message
    row = raw[0] if isinstance(raw, tuple) and raw else raw
    if not isinstance(row, ClaimedMessage):
        return float(within)
    before: timedelta = row.acquired_at - row.created_at
    handled = clock.monotonic() - row.claimed_monotonic
    return within - before.total_seconds() - handled


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
    """One channel for the queue. AsyncAPI has no bindings for SQL, so they stay empty."""

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
        """What the handlers return, or the given schema."""
        return make_names_unique(super().get_payloads(), self._outer_config)

    def get_schema(self) -> dict[str, PublisherSpec]:
        """The channel by its key."""
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
    """What `broker.publisher(queue)` returns."""

    _call_wrapper_class = SqlHandlerCallWrapper
    number: int
    """Tells which subscribers and publishers were declared before it."""

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
        """Stack it on the handler `func`: what that returns is published."""
        wrapper: Any = super().__call__(ensure_name(func))
        return cast("SqlHandlerCallWrapper[P_HandlerParams, T_HandlerReturn]", wrapper)

    @property
    def queue(self) -> str:
        """The queue, with the routers' prefix; "" when each call names one."""
        return f"{self._outer_config.prefix}{self.config.queue}" if self.config.queue else ""

    @override
    async def publish(
        self, message: Any = None, queue: str = "", **options: Unpack[PublishOptions]
    ) -> int | None:
        """Publish to this publisher's queue, or to `queue`; see `SqlBroker.publish`.

        Raises:
            PublishError: as `SqlBroker.publish`.
        """
        cmd = self._command((message,), queue, options)
        result: int | None = await self._basic_publish(
            cmd, producer=self._outer_config.producer, _extra_middlewares=()
        )
        return result

    async def publish_batch(
        self, *messages: Any, queue: str = "", **options: Unpack[PublishOptions]
    ) -> list[int | None]:
        """Publish several messages in one transaction; see `SqlBroker.publish_batch`."""
        if not messages:
            return []
        refuse_one_list(messages)
        cmd = self._command(messages, queue, options)
        result: list[int | None] = await self._basic_publish_batch(
            cmd, producer=self._outer_config.producer, _extra_middlewares=()
        )
        return result

    def _command(
        self, messages: tuple[Any, ...], queue: str, options: PublishOptions
    ) -> SqlBrokerPublishCommand:
        return self._completed(
            SqlBrokerPublishCommand(*messages, queue=queue or self.queue, **options)
        )

    def _completed(self, cmd: SqlBrokerPublishCommand) -> SqlBrokerPublishCommand:
        """`cmd` with this publisher's headers, reply_to and codec."""
        cmd.add_headers(self.headers, override=False)
        cmd.reply_to = cmd.reply_to or self.config.reply_to
        cmd.id_generator = self._outer_config.id_generator
        # As for subscribers, FastStream takes the outermost codec: the broker's, else a router's.
        cmd.codec = self._outer_config.broker_codec
        cmd.publisher = self
        return cmd

    @override
    async def _publish(
        self, cmd: PublishCommand, *, _extra_middlewares: "Iterable[PublisherMiddleware]"
    ) -> None:
        """Send a handler's answer; FastStream calls this."""
        several = self.config.batch and isinstance(cmd.body, list | tuple)
        if several and not cmd.body:
            return
        own = self._completed(SqlBrokerPublishCommand.from_cmd(cmd, batch=several))
        own.destination = self.queue or own.destination
        own.stacked = True
        send = self._basic_publish_batch if several else self._basic_publish
        await send(own, producer=self._outer_config.producer, _extra_middlewares=_extra_middlewares)

    @override
    async def request(
        self,
        message: Any = None,
        queue: str = "",
        *,
        timeout: Duration | None = 30.0,
        **options: Unpack[RequestOptions],
    ) -> "SqlBrokerMessage":
        """Publish to this publisher's queue, or to `queue`, and wait; see `SqlBroker.request`."""
        cmd = make_request(message, queue or self.queue, request_timeout(timeout), options)
        reply: SqlBrokerMessage = await self._basic_request(
            self._completed(cmd), producer=self._outer_config.producer
        )
        return reply


class BatchQueuePublisher(QueuePublisher):
    """What `broker.publisher(queue, batch=True)` returns."""

    @override
    async def publish(  # type: ignore[override]
        self, *messages: Any, queue: str = "", **options: Unpack[PublishOptions]
    ) -> list[int | None]:
        """Publish each of `messages`, in one transaction; the same as `publish_batch`."""
        return await self.publish_batch(*messages, queue=queue, **options)
