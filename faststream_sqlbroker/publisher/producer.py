"""FastStream's producer: encodes bodies and hands rows to `flow.publish`."""

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
    REPLY_ID,
    REPLY_WITHIN,
    SHORTEST_EXPIRY,
    Requests,
    request_timeout,
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
    """Turns commands into rows."""

    def __init__(
        self,
        publisher: Publisher,
        requests: Requests,
        *,
        parser: "CustomCallable | None" = None,
        decoder: "CustomCallable | None" = None,
    ) -> None:
        """Encode with FastStream's default codec until `connect` gives the application's.

        Args:
            publisher: Writes the rows.
            requests: Wait for replies.
            parser: The broker's; makes a message of a row for `decode`.
            decoder: The broker's; decodes its body for `decode`.
        """
        default = SqlBrokerParser()
        self._publisher = publisher
        self._requests = requests
        self._parser = ParserComposition(parser, default.parse_message)
        self._decoder: AsyncCallable = ParserComposition(decoder, default.decode_message)
        self._own_decoder = self._decoder
        self.serializer: SerializerProto | None = None
        self.codec: CodecProto = DefaultCodec()
        self._context: Callable[[], ContextRepo | None] = lambda: None

    def connect(
        self,
        serializer: "SerializerProto | None",
        codec: "CodecProto | None",
        context: "Callable[[], ContextRepo] | None" = None,
    ) -> None:
        """Use the application's serializer, codec and context.

        Called again whenever they may have changed: they are final only when the broker starts.
        """
        self.serializer = serializer
        self.codec = codec or DefaultCodec()
        self._decoder = self._own_decoder if codec is None else codec.decode
        self._context = context or self._context

    @override
    async def publish(self, cmd: SqlBrokerPublishCommand) -> int | None:
        """Write one message.

        Returns:
            The message's id. None if the queue has a message with its dedup_id already, or if the
            message is written later, with the ack of the handler's message.
        """
        [message_id] = await self._insert(cmd, [await self._row(cmd, cmd.body, 0)])
        return message_id

    async def publish_plain(self, body: Any, queue: str, connection: Any = None) -> int | None:
        """`publish` of a command with no option but a connection, which the default codec encodes;
        its id.
        """
        payload, content_type = self._encoded_plainly(body)
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
        """`publish` of a handler's answer to `delivery`, which the default codec encodes."""
        payload, content_type = self._encoded_plainly(body)
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

    def _encoded_plainly(self, body: Any) -> tuple[bytes, str | None]:
        try:
            return encode_message(body, self.serializer)
        except Exception as error:
            raise _unencodable(body, error) from error

    @override
    async def publish_batch(self, cmd: SqlBrokerPublishCommand) -> list[int | None]:
        """Write all bodies in one transaction; the ids are in the order of the bodies.

        An id is None in the same cases as with `publish`.
        """
        return await self._insert(cmd, await self.make_rows(cmd))

    async def _insert(
        self, cmd: SqlBrokerPublishCommand, rows: list[NewMessage]
    ) -> list[int | None]:
        if (cmd.with_ack or cmd.stacked) and self._join(rows, required=bool(cmd.with_ack)):
            return [None] * len(rows)
        at_once = cmd.with_ack is False
        return await self._publisher.publish(rows, connection=cmd.connection, at_once=at_once)

    async def make_row(self, cmd: SqlBrokerPublishCommand) -> NewMessage:
        """The row of one message; the caller writes it.

        Raises:
            PublishError: a value cannot be stored, or the message exceeds the database's limit.
        """
        row = await self._row(cmd, cmd.body, 0)
        self._publisher.check_size(row)
        return row

    @override
    async def request(self, cmd: SqlBrokerPublishCommand) -> Any:
        """Publish in a transaction of its own, and wait for the reply; its row.

        Raises:
            TimeoutError: no reply came within `cmd.timeout` seconds.
            PublishError: as `publish`.
            StoreError: as `publish`.
        """
        timeout = request_timeout(cmd.timeout)
        address = self._requests.address()
        cmd.reply_to = address.queue
        cmd.add_headers({REPLY_ID: address.id, REPLY_WITHIN: timeout})
        cmd.options.setdefault("expires_in", max(timeout, SHORTEST_EXPIRY))
        correlation_id = cmd.correlation_id
        row = await self._row(cmd, cmd.body, 0)
        return await self._requests.ask(row, address, correlation_id, timeout)

    async def write(self, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows`, which are made already, in one transaction; their ids, None for one whose
        dedup_id its queue has already.

        Raises:
            QueueFullError: a queue is full: none is written.
            StoreError: as `publish`.
        """
        return await self._publisher.publish(rows, droppable=False)

    async def wait_for_room(self, queue: str) -> None:
        """Wait until `queue` has fewer due messages than its `max_depth`.

        Raises:
            QueueFullError: that took longer than the limit's timeout.
        """
        await self._publisher.wait_for_room(queue)

    def publish_sync(
        self, cmd: SqlBrokerPublishCommand, connection: "Connection | Session"
    ) -> int | None:
        """Write one message in a synchronous caller's transaction.

        Raises:
            PublishError: the codec cannot encode the body, or the message cannot be stored.
            SetupError: the codec awaits something.
        """
        payload, content_type = encode_now(self.codec, cmd.body, self.serializer)
        row = command_row(cmd, 0, payload, content_type)
        [message_id] = self._publisher.publish_sync([row], connection=connection)
        return message_id

    async def encode(self, body: Any) -> tuple[bytes, str | None]:
        """Encode `body` as `publish` does; the bytes and their content type.

        Raises:
            PublishError: the codec failed or did not return bytes; the bytes exceed the database's
                limit; or `body` is a SqlBrokerResponse, which has options of its own.
        """
        if isinstance(body, SqlBrokerResponse):
            msg = "a new body cannot be a SqlBrokerResponse: give the body itself"
            raise PublishError(msg)
        payload, content_type = await self._encoded(self.codec, body)
        if not isinstance(payload, bytes):
            msg = f"the codec must give bytes, it gave {type(payload).__name__}"
            raise PublishError(msg)
        self._publisher.check_size(NewMessage("", payload))
        return payload, content_type

    async def decode(self, row: ClaimedMessage) -> Any:
        """Decode the body of `row` as subscribers do: with the broker's parser, decoder, codec."""
        message: StreamMessage[Any] = await self._parser(row)
        message.set_decoder(self._decoder)
        return await message.decode()

    def _join(self, rows: list[NewMessage], *, required: bool) -> bool:
        """Add `rows` to the ack of the message whose handler runs in this context."""
        context = self._context()
        message = None if context is None else context.get_local("message")
        raw = getattr(message, "raw_message", None)
        delivery = raw if isinstance(raw, tuple | list) else (raw,)
        ours = [row for row in delivery if isinstance(row, ClaimedMessage)]
        return self._publisher.join(rows, ours, required=required)

    async def _row(self, cmd: SqlBrokerPublishCommand, body: Any, place: int) -> NewMessage:
        payload, content_type = await self._encoded(cmd.codec or self.codec, body)
        return command_row(cmd, place, payload, content_type)

    async def _encoded(self, codec: "CodecProto", body: Any) -> tuple[bytes, str | None]:
        try:
            return await codec.encode(body, self.serializer)
        except Exception as error:
            raise _unencodable(body, error) from error

    async def make_rows(self, cmd: SqlBrokerPublishCommand) -> list[NewMessage]:
        """The rows of all bodies; the caller writes them.

        Raises:
            PublishError: a value cannot be stored.
        """
        codec = cmd.codec or self.codec
        bodies = cmd.batch_bodies
        if not isinstance(codec, BatchCodecProto):
            return [await self._row(cmd, body, place) for place, body in enumerate(bodies)]
        try:
            encoded = await codec.encode_batch(bodies, self.serializer)
        except Exception as error:
            raise _unencodable(bodies, error) from error
        if len(encoded) != len(bodies):
            msg = (
                f"{type(codec).__name__}.encode_batch must give a body for each message, "
                f"it gave {len(encoded)} for {len(bodies)}"
            )
            raise PublishError(msg)
        return [command_row(cmd, place, *content) for place, content in enumerate(encoded)]


_PUBLISH = SqlBrokerProducer.publish


def is_plain(producer: Any) -> bool:
    """Whether all of `producer` is this package's own, with FastStream's codec."""
    return (
        producer.__class__ is SqlBrokerProducer
        and producer.codec.__class__ is DefaultCodec
        and SqlBrokerProducer.publish is _PUBLISH
        and "publish" not in producer.__dict__
    )


def encode_now(
    codec: "CodecProto", body: Any, serializer: "SerializerProto | None"
) -> tuple[bytes, str | None]:
    """The bytes of `body` and their content type, without an event loop.

    Raises:
        PublishError: the codec cannot encode the body.
        SetupError: the codec awaits something.
    """
    # A codec's `encode` is a coroutine function. One that awaits nothing ends at the first `send`,
    # so no event loop is needed.
    encoding = codec.encode(body, serializer)
    try:
        encoding.send(None)
    except StopIteration as done:
        found: tuple[bytes, str | None] = done.value
        return found
    except Exception as error:
        raise _unencodable(body, error) from error
    encoding.close()
    name = type(codec).__name__
    raise SetupError(f"synchronous code needs a codec that awaits nothing, {name} does")


def _unencodable(body: Any, error: Exception) -> Exception:
    """The error to raise for a codec's `error`; errors of this package stay as they are."""
    if isinstance(error, SqlBrokerError):
        return error
    return PublishError(f"a body of type {type(body).__name__} cannot be encoded: {error}")


def command_row(
    cmd: SqlBrokerPublishCommand, place: int, payload: bytes, content_type: str | None
) -> NewMessage:
    """The row of the message at `place` in `cmd`, whose body is encoded as `payload`.

    Raises:
        PublishError: a value cannot be stored.
    """
    queue = cmd.destination
    headers = cmd.headers
    options = cmd.options
    correlation_id = cmd.stored_correlation_id
    reply_to = cmd.reply_to
    # A middleware may have added bodies.
    response = cmd.responses[place] if place < len(cmd.responses) else None
    if response is not None:
        given = {name: value for name, value in response.options.items() if value is not None}
        # The message's delay overrides the call's next_attempt_at, and the other way round. Without
        # this both would be set, which is an error.
        if "delay" in given or "next_attempt_at" in given:
            options = {**options, "delay": None, "next_attempt_at": None}
        options = {**options, **given}
        queue = response.queue or queue
        headers = {**(headers or {}), **response.headers}
        correlation_id = response.correlation_id or correlation_id
        reply_to = str(given.get("reply_to") or reply_to)
    return make_row(
        queue,
        payload,
        content_type,
        options,
        headers=headers,
        correlation_id=correlation_id,
        reply_to=reply_to,
    )
