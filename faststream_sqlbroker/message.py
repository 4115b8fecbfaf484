"""The messages that handlers receive, and the methods that choose their outcome.

`ack`, `nack`, `reject`, `postpone`, `move_to` and `republish` only record an outcome on the row.
The subscriber writes it after the handler has ended, together with other outcomes, if the lease is
still held. The first recorded outcome wins.
"""

from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from faststream.message import AckStatus, StreamMessage

from faststream_sqlbroker.batch_start import record_fault
from faststream_sqlbroker.control_exceptions import (
    UNCHANGED,
    Decision,
    MoveTarget,
    apply_decision,
    apply_raised,
    build_nack,
    build_reject,
    extend_leases,
    warn_ignored_options,
)
from faststream_sqlbroker.core.checks import is_number
from faststream_sqlbroker.core.outcome import Ack, Defer, Discard, Outcome, Reject, Relocate
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.states import MessageState as SqlBrokerMessageState
from faststream_sqlbroker.core.text import clean_text, format_value
from faststream_sqlbroker.core.times import Duration, parse_delay
from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from faststream_sqlbroker.adapter.values import AsyncCallable

__all__ = (
    "SqlBrokerBatchMessage",
    "SqlBrokerMessage",
    "SqlBrokerMessageState",
)


_MAX_PROGRESS_BYTES = 1_000
"""Maximum bytes of a handler's progress text; longer text is cut."""


async def _report_progress(row: ClaimedMessage, fraction: float, text: str | None) -> bool:
    """Write the progress of the handler of `row`; return False if the lease is known to be lost.

    Called by the handler through `message.progress`; operators see the last report.

    Raises:
        SetupError: an argument is not valid, or no running subscriber holds the row.
    """
    if not is_number(fraction) or not 0 <= fraction <= 1:
        raise SetupError(f"fraction must be a number from 0 to 1, got {format_value(fraction)}")
    if text is not None and not isinstance(text, str):
        raise SetupError(f"text must be a string or None, got {format_value(text)}")
    services = row.services
    if services is None or services.progress is None or services.ack_first:
        raise SetupError(
            "only a message that a running subscriber has leased can report progress; "
            "AckPolicy.ACK_FIRST acks it before its handler starts"
        )
    cleaned = None if text is None else clean_text(text, limit=_MAX_PROGRESS_BYTES)
    return await services.progress(row, float(fraction), cleaned)


_ACK = Ack()


class ClaimedProperties:
    """Properties of a claimed message that are read from the row."""

    raw_message: ClaimedMessage

    # Built on the first read, because most handlers never read it. No property: it may be set.
    message_id: str = cast("str", cached_property(lambda self: self.raw_message.message_id))
    """The idempotency key: the same at every delivery, and no other message ever has it.

    It is the id that `publish` returned, and the time of the publish, because a database that loses
    commits gives their ids again.
    """

    @property
    def queue(self) -> str:
        """The queue that the message was claimed from."""
        return self.raw_message.queue

    @property
    def key(self) -> str | None:
        """The key that was passed to `publish`."""
        return self.raw_message.key

    @property
    def priority(self) -> int:
        """The priority, -100 to 100; higher priorities are claimed first."""
        return self.raw_message.priority

    @property
    def attempts_count(self) -> int:
        """The number of handler runs that started and ended before this delivery."""
        return self.raw_message.attempts_count

    @property
    def deliveries_count(self) -> int:
        """The number of claims, including this delivery."""
        return self.raw_message.deliveries_count

    @property
    def publish_count(self) -> int:
        """The number of publishes: 1, plus 1 for each `republish` and each replay."""
        return self.raw_message.publish_count

    @property
    def created_at(self) -> datetime:
        """The time of the publish by the database's clock (aware, UTC)."""
        return self.raw_message.created_at


class SqlBrokerMessage(ClaimedProperties, StreamMessage[ClaimedMessage]):
    """A single delivery of a message."""

    correlation_id: str = cast(
        "str", cached_property(lambda self: self.raw_message.build_correlation_id())
    )
    """The correlation id of the publish, or else the generated one."""

    async def ack(self, *, instead: Decision | None = None, **ignored: Any) -> None:
        """Record the outcome COMPLETED.

        Args:
            instead: Passed only by FastStream: the decision of an exception that the handler
                raised.
            ignored: Options of other brokers, without effect. One warning per subscriber names
                them.

        Raises:
            SetupError: `requeue` is passed.
        """
        if ignored:
            warn_ignored_options([self.raw_message], "ack", ignored, "no options")
        if instead is None:
            self._record_outcome(_ACK)
        else:
            await self._apply_raised(instead)
        await super().ack()

    async def nack(
        self, *, delay: Duration | None = None, instead: Decision | None = None, **ignored: Any
    ) -> None:
        """Record a failed attempt: the message is tried again if the retry strategy allows.

        Args:
            delay: Time until the next attempt, instead of the strategy's: seconds, a timedelta or
                text like "1.5h"; a negative value means now.
            instead: Passed only by FastStream: the decision of an exception that the handler
                raised.
            ignored: Options of other brokers, without effect.

        Raises:
            SetupError: `delay` is not a valid duration, or `requeue` is passed.
        """
        if ignored:
            warn_ignored_options([self.raw_message], "nack", ignored, "delay")
        if instead is None:
            self._record_outcome(build_nack(delay, self._record_outcome))
        else:
            await self._apply_raised(instead)
        await super().nack()

    async def reject(
        self, *, reason: str | None = None, error: BaseException | None = None, **ignored: Any
    ) -> None:
        """Record the outcome FAILED: the message is never tried again.

        Args:
            reason: A short reason, stored in the archive's column `reason`.
            error: Stored in `last_error`; by default the exception being handled.
            ignored: Options of other brokers, without effect.

        Raises:
            SetupError: `reason` is not a string, `error` is not an exception, or `requeue` is
                passed.
        """
        if ignored:
            warn_ignored_options([self.raw_message], "reject", ignored, "reason and error")
        self._record_outcome(build_reject(reason, error))
        await super().reject()

    async def postpone(self, delay: Duration) -> None:
        """Record that the message is due again after `delay`.

        It counts no delivery and no attempt.

        Args:
            delay: Seconds, a timedelta or text like "1.5h"; a negative value means now.

        Raises:
            SetupError: `delay` is not a valid duration, or ACK_FIRST has removed the message.
        """
        await apply_decision([self.raw_message], Defer(parse_delay(delay)))
        self.note_outcome()

    async def move_to(self, queue: str, *, body: Any = UNCHANGED, delay: Duration = 0.0) -> None:
        """Record a move of the message to another queue; see `Move`.

        Args:
            queue: The full name of the queue, to which no router adds a prefix.
            body: A new body, encoded as by `publish`. By default the message keeps its body.
            delay: Time until the message is due in that queue: seconds, a timedelta or text like
                "1.5h"; a negative value means now.

        Raises:
            SetupError: `queue` is not a valid name, `delay` is not a valid duration, or ACK_FIRST
                has removed the message.
            Exception: the codec cannot encode `body`; nothing is recorded.
        """
        await apply_decision([self.raw_message], MoveTarget(queue, body, delay))
        self.note_outcome()

    async def republish(self, queue: str | None = None, *, delay: Duration = 0.0) -> None:
        """Record that the message is published again; `publish_count` increases by 1.

        Like `move_to`, the republish is written in the transaction that settles the message,
        together with messages published with the ack. The message keeps its id, body, headers, key,
        priority, publishing time and expiry. Attempts and deliveries restart at 0, so the retry
        strategy never ends the message: the handler must check `publish_count` and stop. With
        `Once`, a message that stays in its queue frees its key. `move_to`, `forward_to` and retries
        do not change `publish_count`.

        Args:
            queue: The full name of the queue, to which no router adds a prefix. None keeps the
                current queue.
            delay: Time until the message is due: seconds, a timedelta or text like "1.5h"; a
                negative value means now.

        Raises:
            SetupError: as for `move_to`.
        """
        await apply_decision(
            [self.raw_message], MoveTarget(queue, UNCHANGED, delay, is_republish=True)
        )
        self.note_outcome()

    async def extend_lease(self, duration: Duration) -> bool:
        """Extend the lease to at least `duration` from now, even past `max_lease`.

        The lease is never shortened. Most handlers do not need this method, because leases are
        renewed while the handler awaits. It is for handlers that block the event loop longer than
        `release_stuck_timeout`, or that need more than `max_lease`. With transactional=True the
        row's lock is the lease; then this only checks that it is still held.

        Args:
            duration: Greater than 0: seconds, a timedelta or text like "1.5h".

        Returns:
            True if the lease is still held. Otherwise no outcome of this delivery is written.

        Raises:
            SetupError: `duration` is not a duration greater than 0, or ACK_FIRST has removed the
                message.
            StoreError: the database did not answer, or another transaction locked the row for too
                long.
        """
        return await extend_leases([self.raw_message], duration)

    async def progress(self, fraction: float, text: str | None = None) -> bool:
        """Report the progress of the handler, shown to operators by `admin.message(id)`.

        At most one call per second is written, in its own transaction; further calls cost nothing.
        A failing database does not fail the handler. In a handler with transactional=True on SQLite
        nothing is written, because the handler's transaction is the only one that can write there.

        Args:
            fraction: From 0 to 1.
            text: A description for operators, such as "page 40 of 100", cut to 1 000 bytes.

        Returns:
            False if the lease is lost, so that no outcome of this delivery is written.

        Raises:
            SetupError: an argument is not valid, or ACK_FIRST has removed the message.
        """
        return await _report_progress(self.raw_message, fraction, text)

    async def _apply_raised(self, decision: Decision) -> None:
        """Apply the decision of an exception that the handler raised, and update the status.

        The decision is an outcome, or the target of a move.
        """
        try:
            await apply_raised([self.raw_message], decision)
        finally:
            self.note_outcome()

    def _record_outcome(self, outcome: Outcome) -> None:
        self.raw_message.record_outcome(outcome)
        self.note_outcome()

    def note_outcome(self) -> None:
        """Update FastStream's acknowledgement status from the recorded outcome, if any.

        The status `committed` is FastStream's record of the acknowledgement. The worker writes the
        outcome.
        """
        if self.committed is None and self.raw_message.outcome is not None:
            # Use the row's outcome, not the caller's: another object of the same row may have
            # settled it first.
            self.committed = _get_ack_status(self.raw_message.outcome)


class SqlBrokerBatchMessage(StreamMessage[tuple[ClaimedMessage, ...]]):
    """The messages of a batch handler's call.

    `ack`, `nack`, `reject`, `postpone`, `move_to` and `republish` apply to all messages that were
    not settled individually.
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
        """Create the batch; the single messages are created on the first read of `messages`.

        Args:
            raw_message: The rows.
            body: The payloads of the rows.
            parse: Creates a single message from a row.
            decoder: Decodes the body of a single message.
            kwargs: Arguments of FastStream's StreamMessage.
        """
        super().__init__(raw_message, body, **kwargs)
        self._parse = parse
        self._decoder = decoder
        self._messages: list[SqlBrokerMessage] | None = None

    @property
    def is_opened(self) -> bool:
        """True if `messages` was read."""
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
        """Set the decoder; single messages use `decode` of a codec instead of `decode_batch`.

        FastStream calls it with the decoder of the whole batch.
        """
        super().set_decoder(decoder)
        decode = getattr(getattr(decoder, "__self__", None), "decode", None)
        # The decoder of a codec is its bound method `decode_batch`.
        if callable(decode):
            self._decoder = decode
            for message in self._messages or ():
                message.set_decoder(decode)

    async def decode(self) -> Any:
        """Return the decoded bodies; a decoder error is recorded so that the batch can be split."""
        try:
            return await super().decode()
        except Exception as error:
            record_fault(error)
            raise

    async def ack(self, *, instead: Decision | None = None, **ignored: Any) -> None:
        """Ack every message that is not settled yet; see `SqlBrokerMessage.ack`."""
        if ignored:
            warn_ignored_options(self.raw_message, "ack", ignored, "no options")
        if instead is not None:
            await self._apply_raised(instead)
        elif self._messages is None:
            # No handler has read the single messages, so they need not be created.
            for row in self.raw_message:
                row.record_outcome(_ACK)
        else:
            for message in self._messages:
                await message.ack()
        await super().ack()

    async def nack(
        self, *, delay: Duration | None = None, instead: Decision | None = None, **ignored: Any
    ) -> None:
        """Nack every message that is not settled yet; see `SqlBrokerMessage.nack`."""
        if ignored:
            warn_ignored_options(self.raw_message, "nack", ignored, "delay")
        if instead is not None:
            await self._apply_raised(instead)
        else:
            for message in self.messages:
                await message.nack(delay=delay)
        await super().nack()

    async def reject(
        self, *, reason: str | None = None, error: BaseException | None = None, **ignored: Any
    ) -> None:
        """Reject every message that is not settled yet; see `SqlBrokerMessage.reject`."""
        if ignored:
            warn_ignored_options(self.raw_message, "reject", ignored, "reason and error")
        build_reject(reason, error)
        for message in self.messages:
            await message.reject(reason=reason, error=error)
        await super().reject()

    async def postpone(self, delay: Duration) -> None:
        """Postpone every message that is not settled yet; see `SqlBrokerMessage.postpone`."""
        await apply_decision(self.raw_message, Defer(parse_delay(delay)))
        self._update_statuses()
        await super().nack()

    async def move_to(self, queue: str, *, body: Any = UNCHANGED, delay: Duration = 0.0) -> None:
        """Move every message that is not settled yet; see `SqlBrokerMessage.move_to`.

        A new `body` is used for each message.
        """
        await apply_decision(self.raw_message, MoveTarget(queue, body, delay))
        self._update_statuses()
        await super().ack()

    async def republish(self, queue: str | None = None, *, delay: Duration = 0.0) -> None:
        """Republish every message that is not settled yet; see `SqlBrokerMessage.republish`.

        Without `queue` each message stays in its own queue.
        """
        await apply_decision(
            self.raw_message, MoveTarget(queue, UNCHANGED, delay, is_republish=True)
        )
        self._update_statuses()
        await super().ack()

    async def extend_lease(self, duration: Duration) -> bool:
        """Extend the leases of the whole batch; return True if all are still held.

        See `SqlBrokerMessage.extend_lease`.
        """
        return await extend_leases(self.raw_message, duration)

    async def _apply_raised(self, decision: Decision) -> None:
        """Apply the decision of an exception that the handler raised to all unsettled messages.

        The decision is an outcome, or the target of a move. The exception counts for the whole
        batch.
        """
        try:
            await apply_raised(self.raw_message, decision)
        finally:
            self._update_statuses()

    def _update_statuses(self) -> None:
        for message in self._messages or ():
            message.note_outcome()


def _get_ack_status(outcome: Outcome | None) -> AckStatus:
    """Return FastStream's status for an outcome; a moved message counts as acked."""
    if isinstance(outcome, Ack | Relocate):
        return AckStatus.ACKED
    if isinstance(outcome, Reject | Discard):
        return AckStatus.REJECTED
    return AckStatus.NACKED
