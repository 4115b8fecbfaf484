"""FastStream's producer: encodes bodies and hands rows to `flow.publish`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.parser import BatchCodecProto, DefaultCodec
from faststream._internal.producer import ProducerProto
from typing_extensions import override

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.exceptions import (
    NotSupportedError,
    PublishError,
    SetupError,
    SqlBrokerError,
)
from faststream_sqlbroker.flow.publish import Publisher
from faststream_sqlbroker.parser import SqlBrokerParser
from faststream_sqlbroker.publisher.rows import make_row
from faststream_sqlbroker.response import SqlBrokerPublishCommand, SqlBrokerResponse

if TYPE_CHECKING:
    from fast_depends.library.serializer import SerializerProto
    from faststream import StreamMessage
    from faststream._internal.context import ContextRepo
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import CustomCallable
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session


class SqlBrokerProducer(ProducerProto[SqlBrokerPublishCommand]):
    """Turns commands into rows."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        parser: "CustomCallable | None" = None,
        decoder: "CustomCallable | None" = None,
    ) -> None:
        """Serializer and codec come with `connect`."""
        default = SqlBrokerParser()
        self._publisher = publisher
        self._parser = ParserComposition(parser, default.parse_message)
        self._decoder = ParserComposition(decoder, default.decode_message)
        self.serializer: SerializerProto | None = None
        self.codec: CodecProto = DefaultCodec()
        self._context: Callable[[], ContextRepo | None] = lambda: None

    def connect(
        self,
        serializer: "SerializerProto | None",
        codec: "CodecProto | None",
        context: "Callable[[], ContextRepo] | None" = None,
    ) -> None:
        """Use the application's serializer, codec and context, which may change until a message is
        handled.
        """
        self.serializer = serializer
        self.codec = codec or DefaultCodec()
        self._context = context or self._context

    @override
    async def publish(self, cmd: SqlBrokerPublishCommand) -> int | None:
        """Write one message; its id, or None where its dedup_id exists already or it waits for the
        ack.
        """
        row = await self._row(cmd, cmd.body)
        if (cmd.with_ack or cmd.stacked) and self._join([row], required=cmd.with_ack):
            return None
        [message_id] = await self._publisher.publish([row], connection=cmd.connection)
        return message_id

    @override
    async def publish_batch(self, cmd: SqlBrokerPublishCommand) -> list[int | None]:
        """Write all bodies in one transaction; ids in their order."""
        rows = await self._rows(cmd)
        if (cmd.with_ack or cmd.stacked) and self._join(rows, required=cmd.with_ack):
            return [None] * len(rows)
        return await self._publisher.publish(rows, connection=cmd.connection)

    async def make_row(self, cmd: SqlBrokerPublishCommand) -> NewMessage:
        """The row of one message, for somebody else to write.

        Raises:
            PublishError: a value that cannot be stored, or more than the database takes.
        """
        row = await self._row(cmd, cmd.body)
        self._publisher.check_size(row)
        return row

    @override
    async def request(self, cmd: SqlBrokerPublishCommand) -> Any:
        """Not there.

        Raises:
            NotSupportedError: always.
        """
        msg = (
            "request is not supported: an answer through a table comes no sooner than a subscriber looks; "
            "publish with reply_to= and subscribe to that queue"
        )
        raise NotSupportedError(msg)

    def publish_sync(
        self, cmd: SqlBrokerPublishCommand, connection: "Connection | Session"
    ) -> int | None:
        """Write one message in a synchronous caller's transaction."""
        encoding = self.codec.encode(cmd.body, self.serializer)
        try:
            encoding.send(None)
        except StopIteration as done:
            payload, content_type = done.value
        except Exception as error:
            raise _unencodable(cmd.body, error) from error
        else:
            encoding.close()
            msg = f"the codec {type(self.codec).__name__} awaits something, so it cannot serve publish_sync"
            raise SetupError(msg)
        row = _make_row(cmd, cmd.body, payload, content_type)
        [message_id] = self._publisher.publish_sync([row], connection=connection)
        return message_id

    async def encode(self, body: Any) -> tuple[bytes, str | None]:
        """`body` as `publish` encodes it, and its content type.

        Raises:
            PublishError: the codec gave no bytes, or more than the database takes; or `body` brings
                options of its own.
        """
        if isinstance(body, SqlBrokerResponse):
            msg = "the new body of a message has no options of its own: give the body itself"
            raise PublishError(msg)
        payload, content_type = await self._encoded(self.codec, body)
        if not isinstance(payload, bytes):
            msg = f"the codec must give bytes, it gave {type(payload).__name__}"
            raise PublishError(msg)
        self._publisher.check_size(NewMessage("", payload))
        return payload, content_type

    async def decode(self, row: ClaimedMessage) -> Any:
        """The body of `row`, by the broker's parser and its codec or decoder, as subscribers decode
        it.
        """
        message: StreamMessage[Any] = await self._parser(row)
        message.set_decoder(
            self._decoder if type(self.codec) is DefaultCodec else self.codec.decode
        )
        return await message.decode()

    def _join(self, rows: list[NewMessage], *, required: bool) -> bool:
        context = self._context()
        message = None if context is None else context.get_local("message")
        raw = getattr(message, "raw_message", None)
        delivery = raw if isinstance(raw, tuple | list) else (raw,)
        ours = [row for row in delivery if isinstance(row, ClaimedMessage)]
        return self._publisher.join(rows, ours, required=required)

    async def _row(self, cmd: SqlBrokerPublishCommand, body: Any) -> NewMessage:
        payload, content_type = await self._encoded(cmd.codec or self.codec, _content(body))
        return _make_row(cmd, body, payload, content_type)

    async def _encoded(self, codec: "CodecProto", body: Any) -> tuple[bytes, str | None]:
        try:
            return await codec.encode(body, self.serializer)
        except Exception as error:
            raise _unencodable(body, error) from error

    async def _rows(self, cmd: SqlBrokerPublishCommand) -> list[NewMessage]:
        codec, bodies = cmd.codec or self.codec, cmd.batch_bodies
        if not isinstance(codec, BatchCodecProto):
            return [await self._row(cmd, body) for body in bodies]
        contents = [_content(body) for body in bodies]
        try:
            encoded = await codec.encode_batch(contents, self.serializer)
        except Exception as error:
            raise _unencodable(contents, error) from error
        if len(encoded) != len(bodies):
            msg = (
                f"{type(codec).__name__}.encode_batch must give a body for each message, it gave {len(encoded)} "
                f"for {len(bodies)}"
            )
            raise PublishError(msg)
        return [_make_row(cmd, body, *one) for body, one in zip(bodies, encoded, strict=True)]


def _content(body: Any) -> Any:
    return body.body if isinstance(body, SqlBrokerResponse) else body


def _unencodable(body: Any, error: Exception) -> Exception:
    """What a codec has raised, as the fault of the body."""
    if isinstance(error, SqlBrokerError):
        return error
    return PublishError(f"a body of type {type(body).__name__} cannot be encoded: {error}")


def _make_row(
    cmd: SqlBrokerPublishCommand, body: Any, payload: bytes, content_type: str | None
) -> NewMessage:
    queue, headers, options = cmd.destination, cmd.headers, cmd.options
    correlation_id, reply_to = cmd.correlation_id, cmd.reply_to
    if isinstance(body, SqlBrokerResponse):
        given = {name: value for name, value in body.options.items() if value is not None}
        # A delay of the message's own replaces a moment of the call's, and the other way round.
        if "delay" in given or "next_attempt_at" in given:
            options = {**options, "delay": None, "next_attempt_at": None}
        options = {**options, **given}
        queue, headers = body.queue or queue, {**(headers or {}), **body.headers}
        correlation_id = body.correlation_id or correlation_id
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
