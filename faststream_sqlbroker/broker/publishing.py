"""`publish`, `publish_batch`, `publish_sync` and `request` of the broker."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from faststream.response import Response
from sqlalchemy.ext.asyncio import AsyncEngine
from typing_extensions import Unpack, override

from faststream_sqlbroker.adapter.broker import BrokerUsecase
from faststream_sqlbroker.broker.config import SqlBrokerConfig
from faststream_sqlbroker.broker.plain_publish import PlainPublish
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import PublishError
from faststream_sqlbroker.flow.publish_on_ack import get_due_queues
from faststream_sqlbroker.flow.tasks.requests import parse_request_timeout
from faststream_sqlbroker.publisher.rows import check_not_one_list
from faststream_sqlbroker.response import (
    OTHER_OPTIONS,
    MessageOptions,
    PublishOptions,
    RequestOptions,
    SqlBrokerPublishCommand,
    get_only_transaction,
    make_request,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from faststream_sqlbroker.database.store import Store
    from faststream_sqlbroker.flow.wakeup import Wakeups
    from faststream_sqlbroker.message import SqlBrokerMessage


class SqlBrokerPublishing(BrokerUsecase[Any, AsyncEngine, SqlBrokerConfig]):
    """The publish methods of the broker."""

    _plain: PlainPublish
    _store: "Store"
    _wakeups: "Wakeups"

    @override
    async def publish(
        self, message: Any = None, queue: str = "", **options: Unpack[PublishOptions]
    ) -> int | None:
        """Publish a message and return the id.

        Without `connection` or `session` the message is committed when this method returns. With
        either, the message is part of the caller's transaction, which is neither begun, committed
        nor flushed here. In a handler, `with_ack=True` writes the message in the transaction that
        acks the handler's message; if that is not acked, nothing is published. In a handler with
        transactional=True, and in tasks that it starts, a publish is part of the handler's
        transaction; `with_ack=False` commits it immediately.

        Args:
            message: The body: bytes and str unchanged, anything else as JSON.
            queue: Full name of the queue.
            options: See `PublishOptions`.

        Returns:
            The message's id. None with `with_ack`, if the queue already has a message with the same
            dedup_id, or if the queue is full and its `max_depth` drops messages.

        Raises:
            PublishError: a value cannot be stored, a connection cannot be used, the handler's
                transaction has ended, or `with_ack` finds no ack to join; nothing was written.
            NotSupportedError: `with_ack=False` in a handler with transactional=True on SQLite.
            QueueFullError: the queue has reached its `max_depth`; nothing was written.
            UnknownOutcomeError: the answer to the COMMIT was lost; the message may be committed.
            StoreError: the database refused the message or could not be reached; nothing was
                written.
        """
        transaction = get_only_transaction(options)
        if transaction is not OTHER_OPTIONS and not isinstance(message, Response):
            plain = self._plain.find_producer(self)
            if plain is not None:
                return await plain.publish_plain(message, queue, transaction)
        cmd = SqlBrokerPublishCommand(message, queue=queue, **options)
        cmd.id_generator = self.config.id_generator
        await self.connect()
        result: int | None = await self._basic_publish(cmd, producer=self.config.producer)
        return result

    @override
    async def publish_batch(
        self, *messages: Any, queue: str = "", **options: Unpack[PublishOptions]
    ) -> list[int | None]:
        """Publish several messages in a single transaction: either all are stored, or none.

        Args:
            messages: Bodies, or `SqlBrokerResponse`s with their own options. Without messages
                nothing happens.
            queue: Full name of the queue.
            options: Options of all messages; see `PublishOptions`.

        Returns:
            The ids in the order of the messages; an id is None in the same cases as with `publish`.

        Raises:
            PublishError: as for `publish`; or the only argument is a list of messages.
            QueueFullError: as for `publish`; a queue that drops messages omits only its own.
            StoreError: as for `publish`.
        """
        if not messages:
            return []
        check_not_one_list(messages)
        cmd = SqlBrokerPublishCommand(*messages, queue=queue, **options)
        cmd.id_generator = self.config.id_generator
        await self.connect()
        result: list[int | None] = await self._basic_publish_batch(
            cmd, producer=self.config.producer
        )
        return result

    async def _publish_audited(
        self, message: Any, queue: str, by: str, options: dict[str, Any]
    ) -> int | None:
        """Publish for the operator `by`, with an audit entry in the same transaction.

        Implements `admin.publish`. Middlewares run as for any publish.
        """
        allowed = MessageOptions.__annotations__
        if unknown := options.keys() - allowed:
            names = ", ".join(sorted(allowed))
            raise PublishError(f"admin.publish has no option {min(unknown)}: use {names}")
        cmd = SqlBrokerPublishCommand(message, queue=queue, **options)
        cmd.id_generator = self.config.id_generator
        await self.connect()
        producer: Any = self.config.producer

        async def write(cmd: SqlBrokerPublishCommand) -> int | None:
            row = await producer.make_row(cmd)
            await producer.wait_for_room(row.queue)
            message_id = await self._store.repairs.publish(row, by)
            if due := get_due_queues([row]):
                self._wakeups.notify_published(due)
            return message_id

        # The middlewares only need this method of a producer.
        message_id: int | None = await self._basic_publish(
            cmd, producer=cast("Any", SimpleNamespace(publish=write))
        )
        return message_id

    async def wait_for_room(self, queue: str) -> None:
        """Wait until `queue` has fewer due messages than the limit `max_depth`.

        Returns immediately for a queue without a limit.

        A publish in your own transaction does not wait for capacity: call this before the
        transaction begins.

        Raises:
            QueueFullError: there was no capacity within the timeout of the limit.
            StoreError: the database could not be queried.
        """
        await self.connect()
        producer: Any = self.config.producer
        await producer.wait_for_room(queue)

    def publish_sync(
        self,
        message: Any = None,
        queue: str = "",
        *,
        connection: "Connection | None" = None,
        session: "Session | None" = None,
        **options: Unpack[MessageOptions],
    ) -> int | None:
        """Publish a message in the transaction of synchronous code; no middleware runs.

        Subscribers find the message by polling.

        Args:
            message: As for `publish`.
            queue: Full name of the queue.
            connection: A synchronous Connection to the broker's database.
            session: A synchronous Session on that database. Pass either a session or a connection.
            options: See `MessageOptions`.

        Returns:
            The message's id; None if the queue already has a message with the same dedup_id.

        Raises:
            PublishError: as for `publish`; or neither or both of connection and session were
                passed.
            QueueFullError: the queue has reached its `max_depth`, even if the limit would wait.
            SetupError: the codec awaits something.
        """
        if (connection is None) == (session is None) or "with_ack" in options:
            msg = "publish_sync writes in your transaction: give either connection= or session="
            raise PublishError(msg)
        cmd = SqlBrokerPublishCommand(message, queue=queue, **options)
        cmd.id_generator = self.config.id_generator
        producer: Any = self.config.producer
        serializer = self.config.fd_config._serializer  # noqa: SLF001
        producer.connect(serializer, self.config.broker_codec)
        result: int | None = producer.publish_sync(cmd, connection if session is None else session)
        return result

    @override
    async def request(  # type: ignore[override]
        self,
        message: Any = None,
        queue: str = "",
        *,
        timeout: Duration | None = 30.0,
        **options: Unpack[RequestOptions],
    ) -> "SqlBrokerMessage":
        """Publish a message, wait for the handler's answer, and return the answer as a message.

        The request is committed immediately, in its own transaction, also in a handler with
        transactional=True. A request that no handler has started before the timeout expires. The
        effects of the handler are not undone when the caller stops waiting. A handler that fails
        sends no reply; if it is retried in time, the reply comes then.

        Args:
            message: As for `publish`.
            queue: Full name of the queue.
            timeout: Maximum wait, including the publish: seconds, a timedelta or text like "1.5s";
                None is one day, the longest possible wait.
            options: See `RequestOptions`.

        Returns:
            The reply. It is no longer in the database and needs no `ack`.

        Raises:
            TimeoutError: no reply came in time; the request may have been handled.
            PublishError: as for `publish`; or an option that only `publish` takes, such as
                `connection`.
            NotSupportedError: on SQLite, in a handler with transactional=True, whose transaction
                keeps the request from being written.
            RightsError: the database user may not read or delete replies.
            BrokerStoppedError: the broker was stopped.
            StoreError: as for `publish`.
        """
        cmd = make_request(message, queue, parse_request_timeout(timeout), options)
        cmd.id_generator = self.config.id_generator
        await self.connect()
        reply: SqlBrokerMessage = await self._basic_request(cmd, producer=self.config.producer)
        return reply
