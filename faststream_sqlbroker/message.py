"""The messages that handlers receive, and the methods that choose their outcome.

`ack`, `nack`, `reject`, `postpone`, `move_to` and `republish` only record an outcome on the row.
The subscriber writes it after the handler has ended, together with others, if the lease is still
held. The first recorded outcome wins.
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
from faststream_sqlbroker.core.text import clean_text, short
from faststream_sqlbroker.core.times import Duration, delay_seconds
from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from faststream_sqlbroker.adapter.values import AsyncCallable

__all__ = (
    "SqlBrokerBatchMessage",
    "SqlBrokerMessage",
    "SqlBrokerMessageState",
)


_MAX_PROGRESS_TEXT = 1_000
"""Bytes of the text that a handler says of its progress; longer text is cut."""


async def _report(row: ClaimedMessage, fraction: float, text: str | None) -> bool:
    """Write how far the handler of `row` has come; whether the lease is held, as far as is known.

    Raises:
        SetupError: an argument is not valid, or no running subscriber holds the row.
    """
    number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if not number or not 0 <= fraction <= 1:
        raise SetupError(f"fraction must be a number from 0 to 1, got {short(fraction)}")
    if text is not None and not isinstance(text, str):
        raise SetupError(f"text must be text, got {short(text)}")
    holder = row.holder
    if holder is None or holder.progress is None or holder.ack_first:
        raise SetupError(
            "only a message that a subscriber has leased tells of its progress; ACK_FIRST has "
            "removed it before its handler starts"
        )
    said = None if text is None else clean_text(text, limit=_MAX_PROGRESS_TEXT)
    return await holder.progress(row, float(fraction), said)


_ACK = Ack()


class ClaimedProperties:
    """What the row of a claimed message says of it."""

    raw_message: ClaimedMessage

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
        """Handler runs that started and ended before this delivery."""
        return self.raw_message.attempts_count

    @property
    def deliveries_count(self) -> int:
        """Times it was claimed, this delivery included."""
        return self.raw_message.deliveries_count

    @property
    def publish_count(self) -> int:
        """How often it was published: 1, plus one for each `republish` and each replay."""
        return self.raw_message.publish_count

    @property
    def created_at(self) -> datetime:
        """When it was published, by the database's clock (aware, UTC)."""
        return self.raw_message.created_at


class SqlBrokerMessage(ClaimedProperties, StreamMessage[ClaimedMessage]):
    """One delivery of one message."""

    async def ack(self, *, instead: Said | None = None, **ignored: Any) -> None:
        """Record the outcome COMPLETED.

        Args:
            instead: Only FastStream passes it: the decision of an exception that the handler
                raised.
            ignored: Options of other brokers; they have no effect. One warning per subscriber names
                them.

        Raises:
            SetupError: `requeue` is given.
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
        """Record that the message is to be tried again, if the retry strategy allows an attempt.

        Args:
            delay: Time until the next attempt, in place of the strategy's: seconds, a timedelta or
                text like "1.5h"; a negative value means now.
            instead: Only FastStream passes it: the decision of an exception that the handler
                raised.
            ignored: Options of other brokers; they have no effect.

        Raises:
            SetupError: `delay` is not a valid duration, or `requeue` is given.
        """
        if ignored:
            warn_of_ignored([self.raw_message], "nack", ignored, "delay")
        if instead is None:
            self._settle(nack_or_refuse(delay, self._settle))
        else:
            await self._follow_raised(instead)
        await super().nack()

    async def reject(
        self, *, reason: str | None = None, error: BaseException | None = None, **ignored: Any
    ) -> None:
        """Record the outcome FAILED: the message is never tried again.

        Args:
            reason: Why, in a few words; stored in the archive's column `reason`.
            error: Stored in `last_error`; None is the exception that is being handled.
            ignored: Options of other brokers; they have no effect.

        Raises:
            SetupError: `reason` is not a string, `error` is not an exception, or `requeue` is
                given.
        """
        if ignored:
            warn_of_ignored([self.raw_message], "reject", ignored, "reason and error")
        self._settle(reject_outcome(reason, error))
        await super().reject()

    async def postpone(self, delay: Duration) -> None:
        """Record that the message is due again after `delay`.

        Neither the attempt nor the delivery is counted.

        Args:
            delay: Seconds, a timedelta or text like "1.5h"; a negative value means now.

        Raises:
            SetupError: `delay` is not a valid duration, or ACK_FIRST has removed the message.
        """
        await follow([self.raw_message], Defer(delay_seconds(delay)))
        self.note_outcome()

    async def move_to(self, queue: str, *, body: Any = KEPT, delay: Duration = 0.0) -> None:
        """Record that the message moves to another queue; see `Move`.

        Args:
            queue: Its full name; no router adds a prefix.
            body: A new body, encoded as by `publish`. Without it the message keeps its body.
            delay: Time until the message is due there: seconds, a timedelta or text like "1.5h"; a
                negative value means now.

        Raises:
            SetupError: `queue` is not a valid name, `delay` is not a valid duration, or ACK_FIRST
                has removed the message.
            Exception: the codec cannot encode `body`; nothing is recorded.
        """
        await follow([self.raw_message], MoveTarget(queue, body, delay))
        self.note_outcome()

    async def republish(self, queue: str | None = None, *, delay: Duration = 0.0) -> None:
        """Record that the message is published again; `publish_count` grows by one.

        The transaction that settles the message writes it, as with `move_to`, together with
        messages published with the ack. It keeps its id, body, headers, key, priority, publishing
        time and expiry. Attempts and deliveries start again from 0, so the retry strategy never
        ends it: the handler must check `publish_count` and stop. With `Once`, a message that stays
        in its queue frees its key. `move_to`, `forward_to` and retries do not change
        `publish_count`.

        Args:
            queue: Its full name; no router adds a prefix. None: the queue that it is in.
            delay: Time until the message is due: seconds, a timedelta or text like "1.5h"; a
                negative value means now.

        Raises:
            SetupError: as `move_to`.
        """
        await follow([self.raw_message], MoveTarget(queue, KEPT, delay, published_again=True))
        self.note_outcome()

    async def extend_lease(self, duration: Duration) -> bool:
        """Extend the lease to at least `duration` from now, even past `max_lease`.

        It never shortens the lease. Most handlers do not need it: leases are renewed while the
        handler awaits. It is for handlers that block the event loop longer than
        `release_stuck_timeout`, or that need more than `max_lease`. With transactional=True the
        row's lock is the lease; then this only checks that it is held.

        Args:
            duration: Longer than 0: seconds, a timedelta or text like "1.5h".

        Returns:
            Whether the lease is still held. If it is not, no outcome of this delivery is written.

        Raises:
            SetupError: `duration` is not a duration above 0, or ACK_FIRST has removed the message.
            StoreError: the database did not answer, or another transaction locked the row for too
                long.
        """
        return await extend([self.raw_message], duration)

    async def progress(self, fraction: float, text: str | None = None) -> bool:
        """Tell operators how far the handler has come: `admin.message(id)` shows it.

        At most one call a second is written, in a transaction of its own; the others cost nothing.
        A database that fails ends no handler. In a handler with transactional=True on SQLite
        nothing is written: its own transaction is the only one that can write there.

        Args:
            fraction: From 0 to 1.
            text: For people, such as "page 40 of 100"; cut to 1 000 bytes.

        Returns:
            False if the lease is lost, so that no outcome of this delivery is written.

        Raises:
            SetupError: an argument is not valid, or ACK_FIRST has removed the message.
        """
        return await _report(self.raw_message, fraction, text)

    async def _follow_raised(self, said: Said) -> None:
        try:
            await follow_raised([self.raw_message], said)
        finally:
            self.note_outcome()

    def _settle(self, outcome: Outcome) -> None:
        self.raw_message.settle_as(outcome)
        self.note_outcome()

    def note_outcome(self) -> None:
        """Give FastStream the outcome of the delivery, if there is one."""
        if self.committed is None and self.raw_message.outcome is not None:
            # The row's outcome, not the caller's: another object of the same row may have settled
            # it first.
            self.committed = _status(self.raw_message.outcome)


class SqlBrokerBatchMessage(StreamMessage[tuple[ClaimedMessage, ...]]):
    """The messages of one call of a batch handler.

    `ack`, `nack`, `reject`, `postpone`, `move_to` and `republish` apply to those of `messages` that
    were not settled one by one.
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
        """Make the batch; the single messages are made when `messages` is first read.

        Args:
            raw_message: The rows.
            body: Their payloads.
            parse: Makes a single message of a row.
            decoder: Decodes the body of a single message.
            kwargs: Those of FastStream's StreamMessage.
        """
        super().__init__(raw_message, body, **kwargs)
        self._parse = parse
        self._decoder = decoder
        self._messages: list[SqlBrokerMessage] | None = None

    @property
    def opened(self) -> bool:
        """Whether `messages` was read."""
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
        """Decode with `decoder`. Of a codec's `decode_batch`, single messages use its `decode`."""
        super().set_decoder(decoder)
        decode = getattr(getattr(decoder, "__self__", None), "decode", None)
        if callable(decode):
            self._decoder = decode
            for message in self._messages or ():
                message.set_decoder(decode)

    async def decode(self) -> Any:
        """The decoded bodies; an error of the decoder is recorded for splitting the batch."""
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

    async def reject(
        self, *, reason: str | None = None, error: BaseException | None = None, **ignored: Any
    ) -> None:
        """`SqlBrokerMessage.reject` for every message not settled yet."""
        if ignored:
            warn_of_ignored(self.raw_message, "reject", ignored, "reason and error")
        reject_outcome(reason, error)
        for message in self.messages:
            await message.reject(reason=reason, error=error)
        await super().reject()

    async def postpone(self, delay: Duration) -> None:
        """`SqlBrokerMessage.postpone` for every message not settled yet."""
        await follow(self.raw_message, Defer(delay_seconds(delay)))
        self._note_outcomes()
        await super().nack()

    async def move_to(self, queue: str, *, body: Any = KEPT, delay: Duration = 0.0) -> None:
        """`SqlBrokerMessage.move_to` for every message not settled yet; `body` is for each."""
        await follow(self.raw_message, MoveTarget(queue, body, delay))
        self._note_outcomes()
        await super().ack()

    async def republish(self, queue: str | None = None, *, delay: Duration = 0.0) -> None:
        """`SqlBrokerMessage.republish` for every message not settled yet.

        Without `queue` each message stays in its own queue.
        """
        await follow(self.raw_message, MoveTarget(queue, KEPT, delay, published_again=True))
        self._note_outcomes()
        await super().ack()

    async def extend_lease(self, duration: Duration) -> bool:
        """`SqlBrokerMessage.extend_lease` for the whole batch; whether all are still held."""
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
