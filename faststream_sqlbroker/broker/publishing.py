"""Publishing by the broker itself."""

from typing import TYPE_CHECKING, Any, overload

from faststream._internal.broker import BrokerUsecase
from sqlalchemy.ext.asyncio import AsyncEngine
from typing_extensions import Unpack, override

from faststream_sqlbroker.broker.config import SqlBrokerConfig
from faststream_sqlbroker.exceptions import NotSupportedError, PublishError
from faststream_sqlbroker.publisher.rows import new_correlation_id, refuse_one_list
from faststream_sqlbroker.response import (
    MessageOptions,
    PlainOptions,
    PlainPublishOptions,
    PublishOptions,
    SqlBrokerPublishCommand,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session


class SqlBrokerPublishing(BrokerUsecase[Any, AsyncEngine, SqlBrokerConfig]):
    """`publish`, `publish_batch` and `publish_sync`."""

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
        """Publish one message.

        Without `connection` or `session` it is committed when this returns. With one of them it
        belongs to the caller's transaction, which is neither begun, committed nor flushed here.
        `with_ack=True` inside a handler leaves it to the transaction that acks the handler's
        message, and drops it if that is not acked.

        Args:
            message: The body: bytes and str as they are, anything else as JSON.
            queue: Where to.
            options: See `PublishOptions`.

        Returns:
            The message's id; None if its dedup_id exists already, or with `with_ack`.

        Raises:
            PublishError: a value that cannot be stored, a connection that cannot be used, or
                `with_ack` where there is no ack to join; nothing was written.
            StoreError: the database refused or could not be reached; after an `UnknownOutcomeError`
                the message may have been committed.
        """
        cmd = SqlBrokerPublishCommand(message, queue=queue, **options)
        cmd.correlation_id = cmd.correlation_id or new_correlation_id(self.config)
        await self.connect()
        result: int | None = await self._basic_publish(cmd, producer=self.config.producer)
        return result

    @override
    async def publish_batch(
        self, *messages: Any, queue: str = "", **options: Unpack[PublishOptions]
    ) -> list[int | None]:
        """Publish several messages in one transaction; as `publish`.

        Args:
            messages: Bodies, or `SqlBrokerResponse`s with options of their own; none does nothing.
            queue: Where to.
            options: Of all messages.

        Returns:
            The ids in the order of the messages.

        Raises:
            PublishError: as `publish`; or one list is given in place of messages.
        """
        if not messages:
            return []
        refuse_one_list(messages)
        # FastStream's batch command takes a first body of None for no message.
        bodies = [b"" if body is None else body for body in messages]
        cmd = SqlBrokerPublishCommand(*bodies, queue=queue, **options)
        cmd.correlation_id = cmd.correlation_id or new_correlation_id(self.config)
        await self.connect()
        result: list[int | None] = await self._basic_publish_batch(
            cmd, producer=self.config.producer
        )
        return result

    @overload
    def publish_sync(
        self,
        message: Any = None,
        queue: str = "",
        *,
        connection: "Connection | None" = None,
        session: "Session | None" = None,
        **options: Unpack[PlainOptions],
    ) -> int: ...

    @overload
    def publish_sync(
        self,
        message: Any = None,
        queue: str = "",
        *,
        connection: "Connection | None" = None,
        session: "Session | None" = None,
        **options: Unpack[MessageOptions],
    ) -> int | None: ...

    def publish_sync(
        self,
        message: Any = None,
        queue: str = "",
        *,
        connection: "Connection | None" = None,
        session: "Session | None" = None,
        **options: Unpack[MessageOptions],
    ) -> int | None:
        """Publish one message in the transaction of synchronous code; no middleware runs.

        Subscribers of other processes find it by polling.

        Args:
            message: As `publish`.
            queue: Where to.
            connection: A synchronous Connection to the broker's database.
            session: A synchronous Session on it; give one of both.
            options: See `MessageOptions`.

        Returns:
            The message's id; None if its dedup_id exists already.

        Raises:
            PublishError: as `publish`, or neither connection nor session given.
        """
        if (connection is None) == (session is None) or "with_ack" in options:
            msg = "publish_sync takes part in a transaction: give either connection= or session="
            raise PublishError(msg)
        cmd = SqlBrokerPublishCommand(message, queue=queue, **options)
        cmd.correlation_id = cmd.correlation_id or new_correlation_id(self.config)
        producer: Any = self.config.producer
        producer.connect(self.config.fd_config._serializer, self.config.broker_codec)  # noqa: SLF001
        result: int | None = producer.publish_sync(cmd, connection if session is None else session)
        return result

    @override
    async def request(self, message: Any = None, queue: str = "", **options: Any) -> Any:  # type: ignore[override]
        """Not there.

        Raises:
            NotSupportedError: always.
        """
        msg = "request is not supported; publish with reply_to= and subscribe to that queue"
        raise NotSupportedError(msg)
