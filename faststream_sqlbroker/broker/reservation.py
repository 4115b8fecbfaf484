"""The messages that `broker.pop` and `broker.reserve` return."""

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from faststream_sqlbroker.control_exceptions import KEPT
from faststream_sqlbroker.core.checks import checked_queue
from faststream_sqlbroker.core.correlation import CorrelationIds
from faststream_sqlbroker.core.outcome import Abandon, Ack, Nack, Outcome, Reject, Relocate
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.text import clean_text
from faststream_sqlbroker.core.times import Duration, delay_seconds, lease_seconds
from faststream_sqlbroker.exceptions import SetupError, SqlBrokerError
from faststream_sqlbroker.flow.tasks.direct_claim import DirectClaimer, DirectClaimRequest
from faststream_sqlbroker.flow.tasks.held import Held
from faststream_sqlbroker.message import ClaimedProperties
from faststream_sqlbroker.parser import CONTENT_TYPE, correlation_id_of
from faststream_sqlbroker.publisher.producer import SqlBrokerProducer

if TYPE_CHECKING:
    from faststream_sqlbroker.database.messages.direct_claim import Replaced

_ENDS = {Ack: "committed", Reject: "rejected", Relocate: "moved"}
"""What an outcome is called that ended a reservation; any other rolled it back."""
_ADVICE = "give reserve() a longer lease, or call extend() in time"


class ReceivedMessage(ClaimedProperties):
    """A message that `broker.pop` removed or `broker.reserve` leased."""

    def __init__(
        self, row: ClaimedMessage, decoded: Callable[[], Any], correlation_ids: CorrelationIds
    ) -> None:
        """`decoded` returns the decoded body, or raises the decoder's error; `correlation_ids` are
        the database's.
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
        """The headers by name, content-type among them."""
        return self._headers

    @property
    def correlation_id(self) -> str:
        """The one that it was published with, else the one that handlers see."""
        return correlation_id_of(self.raw_message, self._headers, self._correlation_ids)

    @property
    def raw(self) -> bytes:
        """The body as it is stored."""
        return self.raw_message.payload

    @property
    def body(self) -> Any:
        """The body, decoded as by a subscriber.

        Raises:
            Exception: the decoder's error, each time. The message can be settled nevertheless.
        """
        return self._decoded()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of queue {self.queue!r}>"


class Reservation(ReceivedMessage):
    """A message leased to the application, which settles it; made by `broker.reserve`.

    The lease is not renewed automatically. Once it has run out, another worker may claim the
    message; then every operation raises `LeaseLostError` and writes nothing. What settles the
    message is written to its end, also if its caller is cancelled. Used as a context manager, it
    commits at a normal end and rolls back on an exception, unless it was settled inside.

    Raises (from every operation):
        LeaseLostError: the lease is lost; nothing was written.
        SetupError: the message is settled already, or an argument is not valid; nothing was
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
        """`direct_claimer` has leased `row` as `wanted`; `producer` encodes new bodies."""
        super().__init__(row, decoded, direct_claimer.correlation_ids)
        self._held = Held(row, wanted, direct_claimer, _ADVICE)
        self._producer = producer

    @property
    def held(self) -> bool:
        """Whether the lease still runs, by this process's clock; the database is not asked."""
        return self._held.leased

    async def commit(self, body: Any = KEPT) -> None:
        """Settle the message as COMPLETED.

        Args:
            body: Replaces the body in the archive; encoded as by `publish`.
        """
        await self._settle(Ack(), body)

    async def rollback(
        self, delay: Duration | None = None, *, error: BaseException | str | None = None
    ) -> None:
        """Count a failed attempt. The message is due again, or FAILED if no attempt is left.

        Args:
            delay: Time until it is due: seconds, a timedelta or text like "1.5h"; a negative value
                means now. None: the retry strategy decides.
            error: Stored in `last_error`; the retry strategy gets it if it is an exception.
        """
        exception = error if isinstance(error, BaseException) else None
        seconds = None if delay is None else delay_seconds(delay)
        text = None if exception is not None or error is None else clean_text(str(error))
        await self._settle(Nack(seconds, exception), error=text)

    async def reject(
        self, reason: str | None = None, *, error: BaseException | None = None
    ) -> None:
        """Settle the message as FAILED: it is never tried again.

        Args:
            reason: Why, in a few words, for the archive's column `reason`; None is "rejected".
            error: Stored in `last_error`.
        """
        await self._settle(Reject(reason, error))

    async def move_to(self, queue: str, body: Any = KEPT, *, delay: Duration | None = None) -> None:
        """Move the message to `queue`; it keeps its id, and its counters start again from 0.

        Args:
            queue: Full name of the queue.
            body: A new body, encoded as by `publish`. Without it the message keeps its body.
            delay: Time until it is due there; None or a negative value means now.
        """
        checked_queue(queue)
        seconds = 0.0 if delay is None else delay_seconds(delay)
        await self._settle(Relocate(queue, delay=seconds), body)

    async def extend(self, lease: Duration | None = None) -> None:
        """Extend the lease to `lease` from now, by the database's clock; never shorten it.

        A lease that has run out can be extended, too, if no other worker has claimed the message.

        Args:
            lease: Seconds, a timedelta or text like "1m"; None is the lease given to `reserve`.
        """
        self._refuse_ended()
        await self._held.extend(self._held.lease if lease is None else lease_seconds(lease))

    async def __aenter__(self) -> Self:
        """Return the reservation."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """Commit, or roll back after an exception; a cancellation counts no attempt."""
        if not self._held.open:
            return
        if exc_val is None:
            await self.commit()
            return
        try:
            is_failure = isinstance(exc_val, Exception)
            await self._held.settle(Nack(error=exc_val) if is_failure else Abandon())
        except SqlBrokerError as error:
            exc_val.add_note(
                f"message {self.id} of queue {self.queue!r} was not rolled back: {error}"
            )

    async def _settle(self, outcome: Outcome, body: Any = KEPT, error: str | None = None) -> None:
        self._refuse_ended()
        replaced = None if body is KEPT else await self._replaced(body)
        if not await self._held.settle(outcome, replaced, error):
            self._refuse_ended()

    def _refuse_ended(self) -> None:
        ended = self._held.ended
        if ended is not None:
            raise SetupError(
                f"message {self.id} of queue {self.queue!r} is "
                f"{_ENDS.get(type(ended), 'rolled back')} already; reserve another one"
            )

    async def _replaced(self, body: Any) -> "Replaced":
        from faststream_sqlbroker.database.messages.direct_claim import Replaced  # noqa: PLC0415

        payload, content_type = await self._producer.encode(body)
        if content_type == self._headers.get(CONTENT_TYPE):
            return Replaced(payload)
        others = {name: value for name, value in self._headers.items() if name != CONTENT_TYPE}
        return Replaced(payload, {**others, CONTENT_TYPE: content_type} if content_type else others)
