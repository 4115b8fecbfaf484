"""A publisher bound to a queue: called directly, or stacked on a subscriber."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, overload

from faststream._internal.endpoint.publisher import PublisherUsecase
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream.response import PublishCommand
from typing_extensions import Unpack, override

from faststream_sqlbroker.exceptions import NotSupportedError, PublishError
from faststream_sqlbroker.publisher.config import QueuePublisherConfig
from faststream_sqlbroker.publisher.rows import new_correlation_id, refuse_one_list
from faststream_sqlbroker.publisher.specification import QueuePublisherSpecification
from faststream_sqlbroker.response import (
    PlainPublishOptions,
    PublishOptions,
    SqlBrokerPublishCommand,
)

if TYPE_CHECKING:
    from faststream._internal.producer import ProducerProto
    from faststream._internal.types import PublisherMiddleware


class QueuePublisher(PublisherUsecase):
    """What `broker.publisher(queue)` returns."""

    def __init__(
        self, config: QueuePublisherConfig, specification: QueuePublisherSpecification
    ) -> None:
        # FastStream leaves out its type arguments.
        super().__init__(config, specification)  # type: ignore[arg-type]
        self.config = config
        self.headers = config.headers

    @property
    def queue(self) -> str:
        """The queue, with the routers' prefix; "" when each call names one."""
        return f"{self._outer_config.prefix}{self.config.queue}" if self.config.queue else ""

    @overload
    async def publish(
        self, message: Any = None, queue: str = "", **options: Unpack[PlainPublishOptions]
    ) -> int: ...

    @overload
    async def publish(
        self, message: Any = None, queue: str = "", **options: Unpack[PublishOptions]
    ) -> int | None: ...

    @override
    async def publish(
        self, message: Any = None, queue: str = "", **options: Unpack[PublishOptions]
    ) -> int | None:
        """Publish to this publisher's queue, or to `queue`; see `SqlBroker.publish`.

        Raises:
            PublishError: as `SqlBroker.publish`; or `message` is a list and the publisher has
                batch=True.
        """
        if self.config.batch and isinstance(message, list | tuple):
            raise PublishError(
                "publish takes one message, and with batch=True a list is several: "
                "write publish_batch(*messages)"
            )
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
        # As in SqlBroker.publish_batch: a first body of None would be no message.
        bodies = tuple(b"" if body is None else body for body in messages)
        cmd = self._command(bodies, queue, options)
        result: list[int | None] = await self._basic_publish_batch(
            cmd, producer=self._outer_config.producer, _extra_middlewares=()
        )
        return result

    def _command(
        self, messages: tuple[Any, ...], queue: str, options: PublishOptions
    ) -> SqlBrokerPublishCommand:
        cmd = SqlBrokerPublishCommand(*messages, queue=queue or self.queue, **options)
        cmd.correlation_id = cmd.correlation_id or new_correlation_id(self._outer_config)
        return self._completed(cmd)

    def _completed(self, cmd: SqlBrokerPublishCommand) -> SqlBrokerPublishCommand:
        """`cmd` with this publisher's headers, reply_to and codec."""
        cmd.add_headers(self.headers, override=False)
        cmd.reply_to = cmd.reply_to or self.config.reply_to
        # As for subscribers, FastStream takes the outermost codec: the broker's, else a router's.
        cmd.codec = self._outer_config.broker_codec
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
    async def request(self, message: Any = None, queue: str = "", **options: Any) -> Any:
        """Not supported.

        Raises:
            NotSupportedError: always.
        """
        msg = "request is not supported; publish with reply_to= and subscribe to that queue"
        raise NotSupportedError(msg)


class ReplyPublisher(FakePublisher):
    """Sends a handler's answer to the queue that its message asked for."""

    def __init__(self, producer: "ProducerProto[Any]", queue: str) -> None:
        """Send to `queue`: the reply_to of the handler's message."""
        super().__init__(producer=producer)
        self.queue = queue

    @override
    def patch_command(self, cmd: PublishCommand) -> SqlBrokerPublishCommand:
        """The command of the answer, addressed to `queue`."""
        real = SqlBrokerPublishCommand.from_cmd(super().patch_command(cmd))
        real.destination = self.queue
        real.stacked = True
        return real
