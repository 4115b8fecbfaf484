"""FastStream's producer: encodes bodies and passes rows to `flow.publish`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from faststream.message import encode_message
from typing_extensions import override

from faststream_sqlbroker.adapter.messages import (
    BatchCodecProto,
    DefaultCodec,
    ParserComposition,
    ProducerProto,
)
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.exceptions import PublishError, SetupError, SqlBrokerError
from faststream_sqlbroker.flow.publish import Publisher
from faststream_sqlbroker.flow.tasks.requests import (
    MIN_EXPIRY,
    REPLY_ID,
    REPLY_WITHIN,
    Requests,
    parse_request_timeout,
)
from faststream_sqlbroker.parser import SqlBrokerParser
from faststream_sqlbroker.publisher.rows import make_row
from faststream_sqlbroker.response import SqlBrokerPublishCommand, SqlBrokerResponse

if TYPE_CHECKING:
    from fast_depends.library.serializer import SerializerProto
    from faststream import ContextRepo, StreamMessage
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from faststream_sqlbroker.adapter.messages import CodecProto
    from faststream_sqlbroker.adapter.values import AsyncCallable, CustomCallable


class SqlBrokerProducer(ProducerProto[SqlBrokerPublishCommand]):
    """Converts publish commands to rows."""

    def __init__(
        self,
        publisher: Publisher,
        requests: Requests,
        *,
        parser: "CustomCallable | None" = None,
        decoder: "CustomCallable | None" = None,
    ) -> None:
        """Create a producer with FastStream's default codec; `connect` sets the application's.

        Args:
            publisher: Writes the rows.
            requests: Waits for replies.
            parser: The broker's parser, which creates a message from a row for `decode`.
            decoder: The broker's decoder, for `decode`.
        """
        default = SqlBrokerParser()
        self._publisher = publisher
        self._requests = requests
        self._parser = ParserComposition(parser, default.parse_message)
        self._decoder: AsyncCallable = ParserComposition(decoder, default.decode_message)
        self._default_decoder = self._decoder
        self.serializer: SerializerProto | None = None
        self.codec: CodecProto = DefaultCodec()
        self._context: Callable[[], ContextRepo | None] = lambda: None

    def connect(
        self,
        serializer: "SerializerProto | None",
        codec: "CodecProto | None",
        context: "Callable[[], ContextRepo] | None" = None,
    ) -> None:
        """Set the application's serializer, codec and context.

        The codec encodes bodies. Called again whenever they may have changed: they are final only
        when the broker starts.
        """
        self.serializer = serializer
        self.codec = codec or DefaultCodec()
        self._decoder = self._default_decoder if codec is None else codec.decode
        self._context = context or self._context

    @override
    async def publish(self, cmd: SqlBrokerPublishCommand) -> int | None:
        """Write a message.

        Returns:
            The message's id. None if the queue already has a message with its dedup_id, or if the
            message is written later, with the ack of the handler's message.
        """
        [message_id] = await self._insert(cmd, [await self._encode_row(cmd, cmd.body, 0)])
        return message_id

    async def publish_plain(self, body: Any, queue: str, connection: Any = None) -> int | None:
        """Write a message without options, encoded by the default codec; return the id.

        A shortcut around FastStream's commands and middlewares, for the most frequent publishes.
        The only option is a connection or session.
        """
        payload, content_type = self._encode_plain(body)
        row = make_row(queue, payload, content_type, {})
        [message_id] = await self._publisher.publish([row], connection=connection)
        return message_id

    async def publish_answer(
        self,
        body: Any,
        queue: str,
        *,
        headers: Any,
        correlation_id: str | None,
        reply_to: str,
        delivery: "Sequence[ClaimedMessage]",
    ) -> None:
        """Write a handler's answer to `delivery`, encoded by the default codec.

        `delivery` has the rows that the handler received. The answer is written in the transaction
        that acks them, or immediately if that is not possible.
        """
        payload, content_type = self._encode_plain(body)
        row = make_row(
            queue,
            payload,
            content_type,
            {},
            headers=headers,
            correlation_id=correlation_id,
            reply_to=reply_to,
        )
        if not self._publisher.join([row], delivery, required=False):
            await self._publisher.publish([row])

    def _encode_plain(self, body: Any) -> tuple[bytes, str | None]:
        """Encode a body by FastStream's default codec, for publishes that bypass the pipeline."""
        try:
            return encode_message(body, self.serializer)
        except Exception as error:
            raise _make_encoding_error(body, error) from error

    @override
    async def publish_batch(self, cmd: SqlBrokerPublishCommand) -> list[int | None]:
        """Write all bodies in a single transaction; return the ids in the order of the bodies.

        An id is None in the same cases as with `publish`.
        """
        return await self._insert(cmd, await self.make_rows(cmd))

    async def _insert(
        self, cmd: SqlBrokerPublishCommand, rows: list[NewMessage]
    ) -> list[int | None]:
        """Write the rows now, or with the ack of the handler's message.

        `with_ack=True` requires the ack. A stacked publisher publishes the handler's answer, which
        joins the ack if possible. In both cases the ids are not known yet, so they are None.
        """
        if (cmd.with_ack or cmd.stacked) and self._join_ack(rows, required=bool(cmd.with_ack)):
            return [None] * len(rows)
        # Not even the transaction of the handler, if any, may delay such a publish.
        commits_now = cmd.with_ack is False
        return await self._publisher.publish(rows, connection=cmd.connection, at_once=commits_now)

    async def make_row(self, cmd: SqlBrokerPublishCommand) -> NewMessage:
        """Create the row of a message, which the caller writes.

        Raises:
            PublishError: a value cannot be stored, or the message exceeds the database's limit.
        """
        row = await self._encode_row(cmd, cmd.body, 0)
        self._publisher.check_size(row)
        return row

    @override
    async def request(self, cmd: SqlBrokerPublishCommand) -> Any:
        """Publish in a separate transaction, wait for the reply, and return the row of the reply.

        Raises:
            TimeoutError: no reply came within `cmd.timeout` seconds.
            PublishError: as for `publish`.
            StoreError: as for `publish`.
        """
        timeout = parse_request_timeout(cmd.timeout)
        address = self._requests.create_address()
        cmd.reply_to = address.queue
        cmd.add_headers({REPLY_ID: address.id, REPLY_WITHIN: timeout})
        cmd.options.setdefault("expires_in", max(timeout, MIN_EXPIRY))
        correlation_id = cmd.correlation_id
        row = await self._encode_row(cmd, cmd.body, 0)
        return await self._requests.send(row, address, correlation_id, timeout)

    async def write(self, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert existing `rows` in a single transaction; return the ids, or None for duplicates.

        For publishes over HTTP, whose rows exist already. A row is a duplicate if its queue already
        has a message with its dedup_id. Messages are never dropped: a client could not tell.

        Raises:
            QueueFullError: a queue is full; nothing was written.
            StoreError: as for `publish`.
        """
        return await self._publisher.publish(rows, droppable=False)

    async def wait_for_room(self, queue: str) -> None:
        """Wait until `queue` has fewer due messages than the limit `max_depth`.

        Raises:
            QueueFullError: the timeout of the limit passed.
        """
        await self._publisher.wait_for_capacity(queue)

    def publish_sync(
        self, cmd: SqlBrokerPublishCommand, connection: "Connection | Session"
    ) -> int | None:
        """Write a message in a synchronous caller's transaction.

        Raises:
            PublishError: the codec cannot encode the body, or the message cannot be stored.
            SetupError: the codec awaits something.
        """
        payload, content_type = encode_sync(self.codec, cmd.body, self.serializer)
        row = make_command_row(cmd, 0, payload, content_type)
        [message_id] = self._publisher.publish_sync([row], connection=connection)
        return message_id

    async def encode(self, body: Any) -> tuple[bytes, str | None]:
        """Encode `body` like `publish`; return the bytes and the content type.

        Raises:
            PublishError: the codec failed or did not return bytes; the bytes exceed the database's
                limit; or `body` is a SqlBrokerResponse, which has options of its own.
        """
        if isinstance(body, SqlBrokerResponse):
            msg = "a new body cannot be a SqlBrokerResponse: pass the body itself"
            raise PublishError(msg)
        payload, content_type = await self._encode_with(self.codec, body)
        if not isinstance(payload, bytes):
            msg = f"the codec must return bytes, got {type(payload).__name__}"
            raise PublishError(msg)
        self._publisher.check_size(NewMessage("", payload))
        return payload, content_type

    async def decode(self, row: ClaimedMessage) -> Any:
        """Decode the body of `row` with the broker's parser, decoder and codec."""
        message: StreamMessage[Any] = await self._parser(row)
        message.set_decoder(self._decoder)
        return await message.decode()

    def _join_ack(self, rows: list[NewMessage], *, required: bool) -> bool:
        """Add `rows` to the ack of the message whose handler runs in this context.

        The transaction that acks the message then also writes the rows. Return False if that is not
        possible, for example outside of a handler; with `required` this is an error.
        """
        context = self._context()
        message = None if context is None else context.get_local("message")
        raw = getattr(message, "raw_message", None)
        delivery = raw if isinstance(raw, tuple | list) else (raw,)
        claimed_rows = [row for row in delivery if isinstance(row, ClaimedMessage)]
        return self._publisher.join(rows, claimed_rows, required=required)

    async def _encode_row(
        self, cmd: SqlBrokerPublishCommand, body: Any, position: int
    ) -> NewMessage:
        """Create the row of a body; `position` selects the body's own options in a batch."""
        payload, content_type = await self._encode_with(cmd.codec or self.codec, body)
        return make_command_row(cmd, position, payload, content_type)

    async def _encode_with(self, codec: "CodecProto", body: Any) -> tuple[bytes, str | None]:
        """Encode a body by `codec`; convert errors to a PublishError."""
        try:
            return await codec.encode(body, self.serializer)
        except Exception as error:
            raise _make_encoding_error(body, error) from error

    async def make_rows(self, cmd: SqlBrokerPublishCommand) -> list[NewMessage]:
        """Create the rows of all bodies, which the caller writes.

        Raises:
            PublishError: a value cannot be stored.
        """
        codec = cmd.codec or self.codec
        bodies = cmd.batch_bodies
        if not isinstance(codec, BatchCodecProto):
            return [
                await self._encode_row(cmd, body, position) for position, body in enumerate(bodies)
            ]
        try:
            encoded = await codec.encode_batch(bodies, self.serializer)
        except Exception as error:
            raise _make_encoding_error(bodies, error) from error
        if len(encoded) != len(bodies):
            msg = (
                f"{type(codec).__name__}.encode_batch must return one body for each message, got "
                f"{len(encoded)} for {len(bodies)}"
            )
            raise PublishError(msg)
        return [
            make_command_row(cmd, position, *content) for position, content in enumerate(encoded)
        ]


_PUBLISH = SqlBrokerProducer.publish


def is_plain(producer: Any) -> bool:
    """Return True if `producer` is entirely this package's own, with FastStream's codec.

    Only then may a publish bypass FastStream. A subclass, another codec, or a method that a test or
    a tool has patched must be called; classes and methods are compared by identity for that.
    """
    return (
        producer.__class__ is SqlBrokerProducer
        and producer.codec.__class__ is DefaultCodec
        and SqlBrokerProducer.publish is _PUBLISH
        and "publish" not in producer.__dict__
    )


def encode_sync(
    codec: "CodecProto", body: Any, serializer: "SerializerProto | None"
) -> tuple[bytes, str | None]:
    """Encode `body` without an event loop; return the bytes and the content type.

    Raises:
        PublishError: the codec cannot encode the body.
        SetupError: the codec awaits something.
    """
    # A codec's `encode` is a coroutine function. If it awaits nothing, it ends at the first `send`,
    # so no event loop is needed.
    encoding = codec.encode(body, serializer)
    try:
        encoding.send(None)
    except StopIteration as done:
        encoded: tuple[bytes, str | None] = done.value
        return encoded
    except Exception as error:
        raise _make_encoding_error(body, error) from error
    encoding.close()
    name = type(codec).__name__
    raise SetupError(f"synchronous code needs a codec whose encode() awaits nothing, got {name}")


def _make_encoding_error(body: Any, error: Exception) -> Exception:
    """Return the error to raise for a codec's `error`; errors of this package stay unchanged.

    A codec may be the user's code and raise anything.
    """
    if isinstance(error, SqlBrokerError):
        return error
    return PublishError(f"a body of type {type(body).__name__} cannot be encoded: {error}")


def make_command_row(
    cmd: SqlBrokerPublishCommand, position: int, payload: bytes, content_type: str | None
) -> NewMessage:
    """Create the row of the message at `position` in `cmd`, with the encoded body `payload`.

    A message of a batch may be a response: a body with options of its own, which override those of
    the command.

    Raises:
        PublishError: a value cannot be stored.
    """
    queue = cmd.destination
    headers = cmd.headers
    options = cmd.options
    correlation_id = cmd.stored_correlation_id
    reply_to = cmd.reply_to
    # A middleware may have added bodies.
    response = cmd.responses[position] if position < len(cmd.responses) else None
    if response is not None:
        response_options = {
            name: value for name, value in response.options.items() if value is not None
        }
        # The message's delay overrides the call's next_attempt_at, and the reverse. Otherwise both
        # would be set, which is an error.
        if "delay" in response_options or "next_attempt_at" in response_options:
            options = {**options, "delay": None, "next_attempt_at": None}
        options = {**options, **response_options}
        queue = response.queue or queue
        headers = {**(headers or {}), **response.headers}
        correlation_id = response.correlation_id or correlation_id
        reply_to = str(response_options.get("reply_to") or reply_to)
    return make_row(
        queue,
        payload,
        content_type,
        options,
        headers=headers,
        correlation_id=correlation_id,
        reply_to=reply_to,
    )
