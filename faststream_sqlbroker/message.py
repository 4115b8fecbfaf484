"""What a handler sees of a claimed row, and how it says what the delivery ended in.

`ack`, `nack` and `reject` only record an outcome on the row; the subscriber writes it, together with others,
after the handler has ended. The first outcome recorded wins.
"""

import sys
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from faststream.exceptions import HandlerException
from faststream.message import AckStatus, StreamMessage

from faststream_sqlbroker.core.duration import Duration, parse_duration
from faststream_sqlbroker.core.outcome import Ack, Discard, Move, Nack, Outcome, Reject
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.states import MessageState as SqlBrokerMessageState
from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from faststream._internal.types import AsyncCallable

_ACK = Ack()

__all__ = ("SqlBrokerBatchMessage", "SqlBrokerMessage", "SqlBrokerMessageState")


class SqlBrokerMessage(StreamMessage[ClaimedMessage]):
    """One delivery of one message."""

    @property
    def queue(self) -> str:
        """The queue it was claimed from."""
        return self.raw_message.queue

    @property
    def key(self) -> str | None:
        """The key it was published with."""
        return self.raw_message.key

    @property
    def priority(self) -> int:
        """-100 to 100; higher ones are claimed first."""
        return self.raw_message.priority

    @property
    def attempts_count(self) -> int:
        """Handlers that were started for it and came to an end, before this delivery."""
        return self.raw_message.attempts_count

    @property
    def deliveries_count(self) -> int:
        """Times it was claimed, this delivery included."""
        return self.raw_message.deliveries_count

    @property
    def publish_count(self) -> int:
        """Times it was published: 1, and one more for each replay."""
        return self.raw_message.publish_count

    @property
    def created_at(self) -> datetime:
        """When it was published, by the database's clock (aware, UTC)."""
        return self.raw_message.created_at

    async def ack(self) -> None:
        """Record that it is done: COMPLETED."""
        self._settle(_ACK)
        await super().ack()

    async def nack(self, *, delay: Duration | None = None) -> None:
        """Record that it is to be tried again, if the retry strategy's limit on attempts allows it.

        Args:
            delay: Time until the next attempt, 0 or more, in place of the strategy's: seconds, a timedelta
                or text like "1.5h".

        Raises:
            SetupError: `delay` is negative or no length of time.
        """
        self._settle(_nack_or_refuse(delay, self._settle))
        await super().nack()

    async def reject(self, *, reason: str | None = None) -> None:
        """Record that it is never to be tried again: FAILED.

        Args:
            reason: Why, in a few words; stored in the archive's column `reason`.

        Raises:
            SetupError: `reason` is not a string.
        """
        self._settle(_reject(reason))
        await super().reject()

    def _settle(self, outcome: Outcome) -> None:
        self.raw_message.settle_as(outcome)
        if self.committed is None:
            # Another object over the same row may have been first.
            self.committed = _status(self.raw_message.outcome)


class SqlBrokerBatchMessage(StreamMessage[tuple[ClaimedMessage, ...]]):
    """The messages of one call of a batch handler.

    `ack`, `nack` and `reject` are for those of `messages` that have not been settled one by one.
    """

    def __init__(
        self,
        raw_message: tuple[ClaimedMessage, ...],
        body: Any,
        *,
        parse: Callable[[ClaimedMessage], SqlBrokerMessage],
        decoder: "AsyncCallable",
        **kwargs: Any,
    ) -> None:
        """`parse` and `decoder` are for the single messages, if somebody asks for them; the rest is FastStream's."""
        super().__init__(raw_message, body, **kwargs)
        self._parse, self._decoder = parse, decoder
        self._messages: list[SqlBrokerMessage] | None = None

    @property
    def opened(self) -> bool:
        """Whether somebody has asked for the single messages."""
        return self._messages is not None

    @property
    def messages(self) -> list[SqlBrokerMessage]:
        """The single messages, in order."""
        if self._messages is None:
            self._messages = [self._parse(row) for row in self.raw_message]
            for message in self._messages:
                message.set_decoder(self._decoder)
        return self._messages

    def set_decoder(self, decoder: "AsyncCallable") -> None:
        """Decode with `decoder`; a codec's `decode_batch` brings its `decode` for the single messages."""
        super().set_decoder(decoder)
        decode = getattr(getattr(decoder, "__self__", None), "decode", None)
        if callable(decode):
            self._decoder = decode
            for message in self._messages or ():
                message.set_decoder(decode)

    async def ack(self) -> None:
        """`SqlBrokerMessage.ack` for every message not settled yet."""
        if self._messages is None:
            for row in self.raw_message:
                row.settle_as(_ACK)
        else:
            for message in self._messages:
                await message.ack()
        await super().ack()

    async def nack(self, *, delay: Duration | None = None) -> None:
        """`SqlBrokerMessage.nack` for every message not settled yet."""
        for message in self.messages:
            await message.nack(delay=delay)
        await super().nack()

    async def reject(self, *, reason: str | None = None) -> None:
        """`SqlBrokerMessage.reject` for every message not settled yet."""
        _reject(reason)
        for message in self.messages:
            await message.reject(reason=reason)
        await super().reject()


def _nack(delay: Duration | None) -> Nack:
    if delay is None:
        return Nack(error=_current_error())
    seconds = parse_duration(delay, name="delay")
    if seconds < 0:
        raise SetupError(f"delay must be 0 or more seconds, got {delay!r}")
    return Nack(delay=seconds, error=_current_error())


def _nack_or_refuse(delay: Duration | None, settle: Callable[[Outcome], None]) -> Nack:
    """The nack; one that is refused still records that the delivery failed, so that it is tried again."""
    try:
        return _nack(delay)
    except SetupError as error:
        settle(Nack(error=error))
        raise


def _reject(reason: str | None) -> Reject:
    if reason is not None and not isinstance(reason, str):
        raise SetupError(f"reason must be a string or None, got {reason!r}")
    return Reject(reason=reason, error=_current_error())


def _current_error() -> BaseException | None:
    """The exception being handled: in a handler's `except`, and in FastStream's acknowledgement."""
    error = sys.exception()
    while isinstance(error, HandlerException):
        # `raise NackMessage() from error` is an instruction; what went wrong is behind it.
        error = error.__cause__ or error.__context__
    return error


def _status(outcome: Outcome | None) -> AckStatus:
    if isinstance(outcome, Ack | Move):
        return AckStatus.ACKED
    if isinstance(outcome, Reject | Discard):
        return AckStatus.REJECTED
    return AckStatus.NACKED
