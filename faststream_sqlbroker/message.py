"""What a handler sees of a claimed row, and how it says what the delivery ended in.

`ack`, `nack`, `reject`, `postpone`, `move_to` and `republish` only record an outcome on the row;
the subscriber writes it, together with others, after the handler has ended, if the lease is still
held. The first outcome recorded wins.
"""

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from faststream.message import AckStatus, StreamMessage

from faststream_sqlbroker.batch_start import note_fault
from faststream_sqlbroker.control_exceptions import (
    KEPT,
    MoveTarget,
    Said,
    extend,
    follow,
    follow_raised,
    nack_or_refuse,
    reject_outcome,
    warn_of_ignored,
)
from faststream_sqlbroker.core.outcome import Ack, Defer, Discard, Outcome, Reject, Relocate
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.states import MessageState as SqlBrokerMessageState
from faststream_sqlbroker.core.times import Duration, delay_seconds

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
        """Times it was published: 1, and one more for each `republish` and each replay."""
        return self.raw_message.publish_count

    @property
    def created_at(self) -> datetime:
        """When it was published, by the database's clock (aware, UTC)."""
        return self.raw_message.created_at

    async def ack(self, *, instead: Said | None = None, **ignored: Any) -> None:
        """Record that it is done: COMPLETED; `instead` is for FastStream, with what a handler has
        raised.

        Options of other brokers are `ignored`, here and below, with one warning.
        """
        if ignored:
            warn_of_ignored([self.raw_message], "ack", ignored, "no options")
        if instead is None:
            self._settle(_ACK)
        else:
            await self._follow_raised(instead)
        await super().ack()

    async def nack(
        self, *, delay: Duration | None = None, instead: Said | None = None, **ignored: Any
    ) -> None:
        """Record that it is to be tried again, if the retry strategy's limit on attempts allows it.

        Args:
            delay: Time until the next attempt in place of the strategy's: seconds, a timedelta or
                text like "1.5h"; a negative one is at once.
            instead: For FastStream, with what a handler has raised.
            ignored: Options of other brokers.

        Raises:
            SetupError: `delay` is no length of time.
        """
        if ignored:
            warn_of_ignored([self.raw_message], "nack", ignored, "delay")
        if instead is None:
            self._settle(nack_or_refuse(delay, self._settle))
        else:
            await self._follow_raised(instead)
        await super().nack()

    async def reject(self, *, reason: str | None = None, **ignored: Any) -> None:
        """Record that it is never to be tried again: FAILED.

        Args:
            reason: Why, in a few words; stored in the archive's column `reason`.
            ignored: Options of other brokers.

        Raises:
            SetupError: `reason` is not a string.
        """
        if ignored:
            warn_of_ignored([self.raw_message], "reject", ignored, "reason")
        self._settle(reject_outcome(reason))
        await super().reject()

    async def postpone(self, delay: Duration) -> None:
        """Record that it is due again after `delay`; neither the attempt nor the delivery is
        charged.

        Args:
            delay: Seconds, a timedelta or text like "1.5h"; a negative one is at once.

        Raises:
            SetupError: `delay` is no length of time; under ACK_FIRST the message is gone.
        """
        await follow([self.raw_message], Defer(delay_seconds(delay)))
        self.note_outcome()

    async def move_to(self, queue: str, *, body: Any = KEPT, delay: Duration = 0.0) -> None:
        """Record that it goes to another queue; see `Move`.

        Args:
            queue: Its name, to which no router adds a prefix.
            body: Another body, encoded as `publish` does; left out, it stays as it is.
            delay: Time until it is due there; a negative one is at once.

        Raises:
            SetupError: a queue that cannot be one, or a delay that is no length of time; under
                ACK_FIRST the message is gone.
            Exception: the codec cannot encode `body`; nothing is recorded.
        """
        await follow([self.raw_message], MoveTarget(queue, body, delay))
        self.note_outcome()

    async def republish(self, queue: str | None = None, *, delay: Duration = 0.0) -> None:
        """Record that it is published again: `publish_count` is one higher when it comes.

        It is written as `move_to` is, in the transaction that settles the message, with what was
        published with its ack: the same id, body, headers, key, priority and times of publishing
        and expiry. Attempts and deliveries begin anew, so nothing but its expiry and its handler
        ends it: read `publish_count`, and give up. Within `Once` a message that stays in its queue
        gives its key back. `move_to`, `forward_to` and the retries of the retry strategy leave
        `publish_count` alone.

        Args:
            queue: Its name, to which no router adds a prefix; None is the queue that it is in.
            delay: Time until it is due: seconds, a timedelta or text like "1.5h"; a negative one is
                at once.

        Raises:
            SetupError: as `move_to`.
        """
        await follow([self.raw_message], MoveTarget(queue, KEPT, delay, published_again=True))
        self.note_outcome()

    async def extend_lease(self, duration: Duration) -> bool:
        """Hold it for at least `duration` from now, past `max_lease` too; never shortens its lease.

        Nothing is needed to hold it while the handler awaits: leases are renewed. It is for
        handlers that block the event loop longer than `release_stuck_timeout`, or need more than
        `max_lease`. With transactional=True the row's lock is the lease, which is only looked
        after.

        Args:
            duration: Longer than 0: seconds, a timedelta or text like "1.5h".

        Returns:
            Whether the lease is still held; if not, whatever the handler says of the message counts
            for nothing.

        Raises:
            SetupError: `duration` is no such length of time; under ACK_FIRST the message is gone.
            StoreError: the database could not be asked, or somebody else had the row locked for too
                long.
        """
        return await extend([self.raw_message], duration)

    async def _follow_raised(self, said: Said) -> None:
        try:
            await follow_raised([self.raw_message], said)
        finally:
            self.note_outcome()

    def _settle(self, outcome: Outcome) -> None:
        self.raw_message.settle_as(outcome)
        self.note_outcome()

    def note_outcome(self) -> None:
        """Tell FastStream what the delivery ended in, as far as it has ended."""
        if self.committed is None and self.raw_message.outcome is not None:
            # Another object over the same row may have been first.
            self.committed = _status(self.raw_message.outcome)


class SqlBrokerBatchMessage(StreamMessage[tuple[ClaimedMessage, ...]]):
    """The messages of one call of a batch handler.

    `ack`, `nack`, `reject`, `postpone`, `move_to` and `republish` are for those of `messages` that
    have not been settled one by one.
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
        """`parse` and `decoder` are for the single messages, if somebody asks for them; the rest is
        FastStream's.
        """
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
        """Decode with `decoder`; a codec's `decode_batch` brings its `decode` for the single
        messages.
        """
        super().set_decoder(decoder)
        decode = getattr(getattr(decoder, "__self__", None), "decode", None)
        if callable(decode):
            self._decoder = decode
            for message in self._messages or ():
                message.set_decoder(decode)

    async def decode(self) -> Any:
        """The bodies, as the decoder makes them."""
        try:
            return await super().decode()
        except Exception as error:
            note_fault(error)
            raise

    async def ack(self, *, instead: Said | None = None, **ignored: Any) -> None:
        """`SqlBrokerMessage.ack` for every message not settled yet."""
        if ignored:
            warn_of_ignored(self.raw_message, "ack", ignored, "no options")
        if instead is not None:
            await self._follow_raised(instead)
        elif self._messages is None:
            for row in self.raw_message:
                row.settle_as(_ACK)
        else:
            for message in self._messages:
                await message.ack()
        await super().ack()

    async def nack(
        self, *, delay: Duration | None = None, instead: Said | None = None, **ignored: Any
    ) -> None:
        """`SqlBrokerMessage.nack` for every message not settled yet."""
        if ignored:
            warn_of_ignored(self.raw_message, "nack", ignored, "delay")
        if instead is not None:
            await self._follow_raised(instead)
        else:
            for message in self.messages:
                await message.nack(delay=delay)
        await super().nack()

    async def reject(self, *, reason: str | None = None, **ignored: Any) -> None:
        """`SqlBrokerMessage.reject` for every message not settled yet."""
        if ignored:
            warn_of_ignored(self.raw_message, "reject", ignored, "reason")
        reject_outcome(reason)
        for message in self.messages:
            await message.reject(reason=reason)
        await super().reject()

    async def postpone(self, delay: Duration) -> None:
        """`SqlBrokerMessage.postpone` for every message not settled yet."""
        await follow(self.raw_message, Defer(delay_seconds(delay)))
        self._note_outcomes()
        await super().nack()

    async def move_to(self, queue: str, *, body: Any = KEPT, delay: Duration = 0.0) -> None:
        """`SqlBrokerMessage.move_to` for every message not settled yet, all with the same body if
        one is given.
        """
        await follow(self.raw_message, MoveTarget(queue, body, delay))
        self._note_outcomes()
        await super().ack()

    async def republish(self, queue: str | None = None, *, delay: Duration = 0.0) -> None:
        """`SqlBrokerMessage.republish` for every message not settled yet; None leaves each in its
        queue.
        """
        await follow(self.raw_message, MoveTarget(queue, KEPT, delay, published_again=True))
        self._note_outcomes()
        await super().ack()

    async def extend_lease(self, duration: Duration) -> bool:
        """`SqlBrokerMessage.extend_lease` for all of them at once; whether all are still held."""
        return await extend(self.raw_message, duration)

    async def _follow_raised(self, said: Said) -> None:
        try:
            await follow_raised(self.raw_message, said)
        finally:
            self._note_outcomes()

    def _note_outcomes(self) -> None:
        for message in self._messages or ():
            message.note_outcome()


def _status(outcome: Outcome | None) -> AckStatus:
    if isinstance(outcome, Ack | Relocate):
        return AckStatus.ACKED
    if isinstance(outcome, Reject | Discard):
        return AckStatus.REJECTED
    return AckStatus.NACKED
