"""The messages that `broker.pop` and `broker.reserve` return."""

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from faststream_sqlbroker.control_exceptions import UNCHANGED
from faststream_sqlbroker.core.checks import validate_queue
from faststream_sqlbroker.core.correlation import CorrelationIds
from faststream_sqlbroker.core.outcome import Abandon, Ack, Nack, Outcome, Reject, Relocate
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.text import clean_text
from faststream_sqlbroker.core.times import Duration, parse_delay, parse_lease
from faststream_sqlbroker.exceptions import SetupError, SqlBrokerError
from faststream_sqlbroker.flow.tasks.direct_claim import DirectClaimer, DirectClaimRequest
from faststream_sqlbroker.flow.tasks.held import HeldMessage
from faststream_sqlbroker.message import ClaimedProperties
from faststream_sqlbroker.parser import CONTENT_TYPE, get_correlation_id
from faststream_sqlbroker.publisher.producer import SqlBrokerProducer

if TYPE_CHECKING:
    from faststream_sqlbroker.database.messages.single_claim import Replacement

_OUTCOME_LABELS = {Ack: "committed", Reject: "rejected", Relocate: "moved"}
"""The label of each outcome that ended a reservation; any other outcome rolled it back."""
_LEASE_HINT = "give reserve() a longer lease, or call extend() in time"


class ReceivedMessage(ClaimedProperties):
    """A message that `broker.pop` removed or `broker.reserve` leased."""

    def __init__(
        self, row: ClaimedMessage, decoded: Callable[[], Any], correlation_ids: CorrelationIds
    ) -> None:
        """Create a message from a row.

        `decoded` returns the decoded body, or raises the decoder's error; `correlation_ids` are the
        database's.
        """
        self.raw_message = row
        self._decoded = decoded
        self._headers = row.headers
        self._correlation_ids = correlation_ids

    @property
    def id(self) -> int:
        """The message's id, as returned by `publish`."""
        return self.raw_message.id

    @property
    def headers(self) -> dict[str, Any]:
        """The headers by name, including content-type."""
        return self._headers

    @property
    def correlation_id(self) -> str:
        """The correlation id of the publish, or else the generated id that handlers see."""
        return get_correlation_id(self.raw_message, self._headers, self._correlation_ids)

    @property
    def raw(self) -> bytes:
        """The stored body."""
        return self.raw_message.payload

    @property
    def body(self) -> Any:
        """The body, decoded as by a subscriber.

        Raises:
            Exception: the decoder's error, on every access. The message can be settled
                nevertheless.
        """
        return self._decoded()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of queue {self.queue!r}>"


class Reservation(ReceivedMessage):
    """A leased message that the application settles, created by `broker.reserve`.

    The lease is not renewed automatically. Once it has expired, another worker may claim the
    message; then every operation raises `LeaseLostError` and writes nothing. An operation that
    settles the message is completed even if its caller is cancelled. As a context manager, a
    reservation commits at a normal end and rolls back on an exception, unless it was settled inside
    the block.

    Raises (from every operation):
        LeaseLostError: the lease is lost; nothing was written.
        SetupError: the message is already settled, or an argument is not valid; nothing was
            written.
        UnknownOutcomeError: the answer to the COMMIT was lost twice; the outcome may be written.
        StoreError: the database refused the statement or could not be reached; nothing was written.
            Try again.
    """

    def __init__(
        self,
        row: ClaimedMessage,
        decoded: Callable[[], Any],
        *,
        wanted: DirectClaimRequest,
        direct_claimer: DirectClaimer,
        producer: SqlBrokerProducer,
    ) -> None:
        """Create a reservation of `row`, which `direct_claimer` leased for the request `wanted`.

        `producer` encodes new bodies.
        """
        super().__init__(row, decoded, direct_claimer.correlation_ids)
        self._held = HeldMessage(row, wanted, direct_claimer, _LEASE_HINT)
        self._producer = producer

    @property
    def is_held(self) -> bool:
        """True while the lease runs by this process's clock; the database is not queried."""
        return self._held.is_leased

    async def commit(self, body: Any = UNCHANGED) -> None:
        """Settle the message as COMPLETED.

        Args:
            body: Replaces the body in the archive; encoded as by `publish`.
        """
        await self._settle(Ack(), body)

    async def rollback(
        self, delay: Duration | None = None, *, error: BaseException | str | None = None
    ) -> None:
        """Count a failed attempt: the message is due again, or FAILED if no attempt remains.

        Args:
            delay: Time until the message is due: seconds, a timedelta or text like "1.5h"; a
                negative value means now. None leaves the decision to the retry strategy.
            error: Stored in `last_error`; an exception is also passed to the retry strategy.
        """
        exception = error if isinstance(error, BaseException) else None
        seconds = None if delay is None else parse_delay(delay)
        text = None if exception is not None or error is None else clean_text(str(error))
        await self._settle(Nack(seconds, exception), error=text)

    async def reject(
        self, reason: str | None = None, *, error: BaseException | None = None
    ) -> None:
        """Settle the message as FAILED, without another attempt.

        Args:
            reason: A short reason for the archive's column `reason`; None is "rejected".
            error: Stored in `last_error`.
        """
        await self._settle(Reject(reason, error))

    async def move_to(
        self, queue: str, body: Any = UNCHANGED, *, delay: Duration | None = None
    ) -> None:
        """Move the message to `queue`; the id stays, and the counters restart at 0.

        Args:
            queue: Full name of the queue.
            body: A new body, encoded as by `publish`. By default the message keeps its body.
            delay: Time until the message is due in that queue; None or a negative value means now.
        """
        validate_queue(queue)
        seconds = 0.0 if delay is None else parse_delay(delay)
        await self._settle(Relocate(queue, delay=seconds), body)

    async def extend(self, lease: Duration | None = None) -> None:
        """Extend the lease to `lease` from now, by the database's clock.

        A lease is never shortened.

        An expired lease can be extended, too, if no other worker has claimed the message.

        Args:
            lease: Seconds, a timedelta or text like "1m"; None is the lease passed to `reserve`.
        """
        self._check_open()
        await self._held.extend(self._held.lease if lease is None else parse_lease(lease))

    async def __aenter__(self) -> Self:
        """Return the reservation."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """Commit, or roll back after an exception; a cancellation does not count as an attempt.

        If the rollback fails, the block's own exception is raised, with the failure as a note.
        """
        if not self._held.is_open:
            return
        if exc_val is None:
            await self.commit()
            return
        try:
            is_failure = isinstance(exc_val, Exception)
            # `rollback` would raise if another task has settled the message by now.
            await self._held.settle(Nack(error=exc_val) if is_failure else Abandon())
        except SqlBrokerError as error:
            exc_val.add_note(
                f"message {self.id} of queue {self.queue!r} was not rolled back: {error}"
            )

    async def _settle(
        self, outcome: Outcome, body: Any = UNCHANGED, error: str | None = None
    ) -> None:
        """Write the outcome; refuse a reservation that is already settled, also by another task.

        `body` replaces the stored body, unless it is UNCHANGED; `error` is the text for
        `last_error`.
        """
        self._check_open()
        replacement = None if body is UNCHANGED else await self._encode_replacement(body)
        if not await self._held.settle(outcome, replacement, error):
            # Another task has settled it during the write: raise the same error as before.
            self._check_open()

    def _check_open(self) -> None:
        """Raise SetupError if the reservation is settled."""
        outcome = self._held.outcome
        if outcome is not None:
            raise SetupError(
                f"message {self.id} of queue {self.queue!r} is already "
                f"{_OUTCOME_LABELS.get(type(outcome), 'rolled back')}: reserve another message"
            )

    async def _encode_replacement(self, body: Any) -> "Replacement":
        """Encode a new body for a commit or a move.

        The stored headers include the content type of the old body, so they are replaced only if
        the new body has another one.
        """
        from faststream_sqlbroker.database.messages.single_claim import Replacement  # noqa: PLC0415

        payload, content_type = await self._producer.encode(body)
        if content_type == self._headers.get(CONTENT_TYPE):
            return Replacement(payload)
        other_headers = {
            name: value for name, value in self._headers.items() if name != CONTENT_TYPE
        }
        return Replacement(
            payload,
            {**other_headers, CONTENT_TYPE: content_type} if content_type else other_headers,
        )
