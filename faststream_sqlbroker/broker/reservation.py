"""The messages that `broker.pop` and `broker.reserve` return."""

from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.correlation import CorrelationIds
from faststream_sqlbroker.core.outcome import Abandon, Ack, Nack, Outcome, Reject, Relocate
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.core.text import clean_text, short
from faststream_sqlbroker.core.times import Duration, delay_seconds, lease_seconds
from faststream_sqlbroker.exceptions import LeaseLostError, SetupError, SqlBrokerError
from faststream_sqlbroker.flow.tasks.direct_claim import DirectClaimer
from faststream_sqlbroker.parser import CONTENT_TYPE, correlation_id_of
from faststream_sqlbroker.publisher.producer import SqlBrokerProducer

if TYPE_CHECKING:
    from faststream_sqlbroker.database.messages.direct_claim import Replaced


class SameBody:
    """The type of SAME_BODY."""

    def __repr__(self) -> str:
        return "SAME_BODY"


SAME_BODY = SameBody()
"""Stands for the body that the message has; None is a body of its own."""


class ReceivedMessage:
    """A message that `broker.pop` removed or `broker.reserve` leased."""

    def __init__(
        self, row: ClaimedMessage, decoded: Callable[[], Any], correlation_ids: CorrelationIds
    ) -> None:
        """`decoded` returns the decoded body, or raises the decoder's error; `correlation_ids` are
        the database's.
        """
        self._row = row
        self._decoded = decoded
        self._headers = row.headers
        self._correlation_ids = correlation_ids

    @property
    def id(self) -> int:
        """The message's id, as returned by `publish`."""
        return self._row.id

    @property
    def queue(self) -> str:
        """The queue it was taken from."""
        return self._row.queue

    @property
    def key(self) -> str | None:
        """The key it was published with."""
        return self._row.key

    @property
    def priority(self) -> int:
        """-100 to 100; higher ones are claimed first."""
        return self._row.priority

    @property
    def headers(self) -> dict[str, Any]:
        """The headers by name, content-type among them."""
        return self._headers

    @property
    def correlation_id(self) -> str:
        """The one that it was published with, else the one that handlers see."""
        return correlation_id_of(self._row, self._headers, self._correlation_ids)

    @property
    def raw(self) -> bytes:
        """The body as it is stored."""
        return self._row.payload

    @property
    def body(self) -> Any:
        """The body, decoded as by a subscriber.

        Raises:
            Exception: the decoder's error, each time. The message can be settled nevertheless.
        """
        return self._decoded()

    @property
    def attempts_count(self) -> int:
        """Attempts that ended before this claim."""
        return self._row.attempts_count

    @property
    def deliveries_count(self) -> int:
        """Times it was claimed, this claim included."""
        return self._row.deliveries_count

    @property
    def publish_count(self) -> int:
        """How often it was published: 1, plus one for each `republish` and each replay."""
        return self._row.publish_count

    @property
    def created_at(self) -> datetime:
        """When it was published, by the database's clock (aware, UTC)."""
        return self._row.created_at

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of queue {self.queue!r}>"


class Reservation(ReceivedMessage):
    """A message leased to the application, which settles it; made by `broker.reserve`.

    The lease is not renewed automatically. Once it has run out, another worker may claim the
    message; then every operation raises `LeaseLostError` and writes nothing. Used as a context
    manager, it commits at a normal end and rolls back on an exception, unless it was settled
    inside.

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
        direct_claimer: DirectClaimer,
        producer: SqlBrokerProducer,
        rules: SettleRules,
        lease: float,
    ) -> None:
        """`lease` is in seconds."""
        super().__init__(row, decoded, direct_claimer.correlation_ids)
        self._direct_claimer = direct_claimer
        self._producer = producer
        self._rules = rules
        self._lease = lease
        self._held_until = row.renewed_monotonic + lease
        self._end = ""

    @property
    def held(self) -> bool:
        """Whether the lease still runs, by this process's clock; the database is not asked."""
        return not self._end and self._direct_claimer.clock.monotonic() < self._held_until

    async def commit(self, body: Any = SAME_BODY) -> None:
        """Settle the message as COMPLETED.

        Args:
            body: Replaces the body in the archive; encoded as by `publish`.
        """
        await self._settle(Ack(), "committed", body=body)

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
        await self._settle(Nack(seconds, exception), "rolled back", text=text)

    async def reject(
        self, reason: str | None = None, *, error: BaseException | None = None
    ) -> None:
        """Settle the message as FAILED: it is never tried again.

        Args:
            reason: Why, in a few words, for the archive's column `reason`; None is "rejected".
            error: Stored in `last_error`.
        """
        await self._settle(Reject(reason, error), "rejected")

    async def move_to(
        self, queue: str, body: Any = SAME_BODY, *, delay: Duration | None = None
    ) -> None:
        """Move the message to `queue`; it keeps its id, and its counters start again from 0.

        Args:
            queue: Full name of the queue.
            body: A new body, encoded as by `publish`. Without it the message keeps its body.
            delay: Time until it is due there; None or a negative value means now.
        """
        if (problem := name_problem(queue)) is not None:
            raise SetupError(f"{short(queue)} cannot be the name of a queue: {problem}")
        seconds = 0.0 if delay is None else delay_seconds(delay)
        await self._settle(Relocate(queue), "moved", body=body, delay=seconds)

    async def extend(self, lease: Duration | None = None) -> None:
        """Extend the lease to `lease` from now, by the database's clock; never shorten it.

        A lease that has run out can be extended, too, if no other worker has claimed the message.

        Args:
            lease: Seconds, a timedelta or text like "1m"; None is the lease given to `reserve`.
        """
        self._check_open()
        seconds = self._lease if lease is None else lease_seconds(lease)
        if not await self._direct_claimer.extend(self._row, seconds):
            raise self._lost()
        self._held_until = max(self._held_until, self._row.renewed_monotonic + seconds)

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
        if self._end:
            return
        if exc_val is None:
            await self.commit()
            return
        try:
            if isinstance(exc_val, Exception):
                await self._settle(Nack(error=exc_val), "rolled back")
            else:
                # A second cancellation must not cut off the statement: its outcome would be open.
                await self._direct_claimer.shielded.run(self._settle(Abandon(), "rolled back"))
        except SqlBrokerError as error:
            exc_val.add_note(
                f"message {self.id} of queue {self.queue!r} was not rolled back: {error}"
            )

    async def _settle(
        self,
        outcome: Outcome,
        end: str,
        *,
        body: Any = SAME_BODY,
        delay: float | None = None,
        text: str | None = None,
    ) -> None:
        self._check_open()
        replaced = None if isinstance(body, SameBody) else await self._replaced(body)
        row = self._row
        attempted = not isinstance(outcome, Abandon)
        ended_after = self._direct_claimer.clock.monotonic() - row.claimed_monotonic
        settlement = settle(row, outcome, self._rules, ended_after=ended_after, attempted=attempted)
        settlement.delay = settlement.delay if delay is None else delay
        settlement.error = settlement.error if text is None else text
        if not await self._direct_claimer.settle(settlement, replaced, self.queue):
            raise self._lost()
        self._end = end

    async def _replaced(self, body: Any) -> "Replaced":
        from faststream_sqlbroker.database.messages.direct_claim import Replaced  # noqa: PLC0415

        payload, content_type = await self._producer.encode(body)
        if content_type == self._headers.get(CONTENT_TYPE):
            return Replaced(payload)
        others = {name: value for name, value in self._headers.items() if name != CONTENT_TYPE}
        return Replaced(payload, {**others, CONTENT_TYPE: content_type} if content_type else others)

    def _check_open(self) -> None:
        if self._end == _LOST:
            raise self._lost()
        if self._end:
            raise SetupError(
                f"message {self.id} of queue {self.queue!r} is {self._end} already; "
                "reserve another one"
            )

    def _lost(self) -> LeaseLostError:
        self._end = _LOST
        return LeaseLostError(
            f"lease lost: message {self.id} of queue {self.queue!r} may have another worker, so "
            "nothing was written; give reserve() a longer lease, or call extend() in time"
        )


_LOST = "lost"
"""The value of `_end` after a lost lease; every later operation raises LeaseLostError again."""
