"""Single messages for the application: what `get_one` and `async for` of a subscriber give."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from faststream_sqlbroker.adapter.messages import ParserComposition, process_msg
from faststream_sqlbroker.control_exceptions import KEPT
from faststream_sqlbroker.core.outcome import Abandon, Nack
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import NotSupportedError, SetupError, StoreError
from faststream_sqlbroker.flow.shielded import quietly
from faststream_sqlbroker.flow.tasks.pulled import PulledMessages
from faststream_sqlbroker.message import SqlBrokerMessage
from faststream_sqlbroker.parser import SqlBrokerParser

if TYPE_CHECKING:
    from faststream.middlewares import BaseMiddleware

    from faststream_sqlbroker.adapter.values import AsyncCallable, CustomCallable
    from faststream_sqlbroker.subscriber.options import SubscriberSettings


class HasHandlerError(SetupError, AssertionError):
    """Single messages were asked for, and the subscriber has a handler.

    It is an AssertionError, too, as with FastStream's other brokers.
    """


class PulledMessage(SqlBrokerMessage):
    """A message that the application settles itself: each method writes the outcome at once.

    Raises (from every method that settles):
        LeaseLostError: the lease is lost; nothing was written.
        UnknownOutcomeError: the answer to the COMMIT was lost twice; the outcome may be written.
        StoreError: nothing was written. Try again.
    """

    _pulled: PulledMessages
    _written = False

    def held_by(self, pulled: PulledMessages) -> None:
        """Keep the lease from now on; `pulled` writes the outcome."""
        self._pulled = pulled
        self._turn = asyncio.Lock()
        pulled.hold(self, self.raw_message)

    @override
    async def ack(self, **options: Any) -> None:
        await self._write(super().ack(**options))

    @override
    async def nack(self, **options: Any) -> None:
        await self._write(super().nack(**options))

    @override
    async def reject(self, **options: Any) -> None:
        await self._write(super().reject(**options))

    @override
    async def postpone(self, delay: Duration) -> None:
        await self._write(super().postpone(delay))

    @override
    async def move_to(self, queue: str, *, body: Any = KEPT, delay: Duration = 0.0) -> None:
        await self._write(super().move_to(queue, body=body, delay=delay))

    @override
    async def republish(self, queue: str | None = None, *, delay: Duration = 0.0) -> None:
        await self._write(super().republish(queue, delay=delay))

    async def _write(self, record: Coroutine[Any, Any, None]) -> None:
        try:
            await record
        finally:
            # A nack with an invalid delay is recorded as a plain one before it raises.
            async with self._turn:
                if not self._written and self.raw_message.outcome is not None:
                    await self._write_once()

    async def _write_once(self) -> None:
        try:
            await self._pulled.settle(self.raw_message)
        except StoreError:
            # Another outcome may be chosen now.
            self.raw_message.settle_anew(None)
            self.committed = None
            raise
        self._written = True


class PullingParser(SqlBrokerParser):
    """Makes messages that the application settles itself."""

    @override
    async def parse_message(self, message: ClaimedMessage) -> PulledMessage:
        parsed = self.parse(message, PulledMessage)
        assert isinstance(parsed, PulledMessage)  # noqa: S101 - for the type checker
        return parsed


class Pulling:
    """Turns the rows that one subscriber takes into messages."""

    def __init__(
        self,
        pulled: PulledMessages,
        middlewares: "Callable[[ClaimedMessage], list[BaseMiddleware]]",
        parser: "CustomCallable | None",
        decoder: "AsyncCallable",
        log: Callable[..., None],
    ) -> None:
        """Take from `pulled`.

        Args:
            pulled: What is taken and held.
            middlewares: Makes those of one message.
            parser: The user's, if there is one.
            decoder: Decodes bodies.
            log: Logs a `reply_to` that is not valid.
        """
        own = PullingParser()
        own.log = log
        self.pulled = pulled
        self._middlewares = middlewares
        self._parser = ParserComposition(parser, own.parse_message)
        self._decoder = decoder

    async def get_one(self, wait: float | None) -> PulledMessage | None:
        """The first due message; None if there was none for `wait` seconds."""
        row = await self.pulled.take(wait)
        return None if row is None else await self._message(row)

    async def messages(self) -> AsyncIterator[PulledMessage]:
        """One message after the other; asking for the next acks the last."""
        message: PulledMessage | None = None
        row: ClaimedMessage | None = None
        try:
            while (row := await self.pulled.next()) is not None:
                message = await self._message(row)
                yield message
                await self.pulled.finish(message, row)
        finally:
            # The consumer has gone, or something has failed.
            if row is not None:
                await self.pulled.give_back(row)

    async def _message(self, row: ClaimedMessage) -> PulledMessage:
        try:
            message = await process_msg(
                msg=row,
                middlewares=self._middlewares(row),
                parser=self._parser,
                decoder=self._decoder,
            )
            pulled = _own(message)
        except BaseException as error:
            outcome = Nack(error=error) if isinstance(error, Exception) else Abandon()
            row.settle_anew(outcome)
            await quietly(lambda: self.pulled.settle(row))
            raise
        pulled.held_by(self.pulled)
        return pulled


def _own(message: object) -> PulledMessage:
    if not isinstance(message, PulledMessage):
        raise SetupError(_FOREIGN)
    return message


def refuse_options(settings: "SubscriberSettings", what: str) -> None:
    """Refuse options that single messages cannot keep to.

    Raises:
        NotSupportedError: there is one; the text names it.
    """
    for name in ("policies", "ordered", "batch", "transactional", "task_per_message", "forward_to"):
        if value := getattr(settings, name):
            raise NotSupportedError(
                f"{what} takes single messages, to which {name}={value!r} does not apply: "
                "leave the option out, or give the subscriber a handler"
            )


def refuse_handlers(calls: Any, what: str) -> None:
    """Refuse a subscriber with a handler: its messages are the handler's.

    Raises:
        HasHandlerError: it has one.
    """
    if calls:
        raise HasHandlerError(
            f"{what} takes messages of a subscriber without a handler, and this one has one: use "
            "another broker.subscriber(queue) for single messages"
        )


_FOREIGN = (
    "the parser must return the message that the parser it is given has made, so that the "
    "application can settle it"
)
