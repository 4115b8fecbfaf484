"""Messages that the application has taken itself, outside of handlers."""

from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.outcome import Abandon, Ack, Nack, Outcome, Reject, Relocate
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.core.text import clean_text, short
from faststream_sqlbroker.core.times import Duration, delay_seconds, lease_seconds
from faststream_sqlbroker.dialects.direct_claim import Replaced
from faststream_sqlbroker.exceptions import LeaseLostError, SetupError, SqlBrokerError
from faststream_sqlbroker.flow.direct_claim import DirectClaimer
from faststream_sqlbroker.parser import CONTENT_TYPE
from faststream_sqlbroker.publisher.producer import SqlBrokerProducer


class SameBody:
    """Stands for the body that the message has."""

    def __repr__(self) -> str:
        return "SAME_BODY"


SAME_BODY = SameBody()


class ReceivedMessage:
    """A message that `broker.pop` has removed, or `broker.reserve` has leased."""

    def __init__(self, row: ClaimedMessage, decoded: Callable[[], Any]) -> None:
        """`decoded` gives the decoded body, or raises what the decoder has raised."""
        self._row, self._decoded = row, decoded
        self._headers = row.headers

    @property
    def id(self) -> int:
        """Its id, the one that `publish` has returned."""
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
        """-100 to 100; higher ones are taken first."""
        return self._row.priority

    @property
    def headers(self) -> dict[str, Any]:
        """The headers by name, content-type among them."""
        return self._headers

    @property
    def raw(self) -> bytes:
        """The body as it is stored."""
        return self._row.payload

    @property
    def body(self) -> Any:
        """The body as a subscriber would decode it: by the broker's codec or decoder, and the
        content type.

        Raises:
            Exception: what the decoder has raised, each time; the message can be settled all the
                same.
        """
        return self._decoded()

    @property
    def attempts_count(self) -> int:
        """Attempts that came to an end before."""
        return self._row.attempts_count

    @property
    def deliveries_count(self) -> int:
        """Times it was claimed, this one included."""
        return self._row.deliveries_count

    @property
    def publish_count(self) -> int:
        """Times it was published: 1, and one more for each replay."""
        return self._row.publish_count

    @property
    def created_at(self) -> datetime:
        """When it was published, by the database's clock (aware, UTC)."""
        return self._row.created_at

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of queue {self.queue!r}>"


class Reservation(ReceivedMessage):
    """A message leased to the application, which says what it ends in; made by `broker.reserve`.

    The lease is not renewed by itself. Once it has run out the message may be given to somebody
    else; from then on nothing that is written here changes anything, and `LeaseLostError` says so.
    As a context manager it commits at a normal end and rolls back on an exception, unless it was
    settled inside.

    Raises (from every operation):
        LeaseLostError: the lease is gone; nothing was written.
        SetupError: the reservation has ended already, or an argument cannot be used; nothing was
            written.
        UnknownOutcomeError: the answer to the COMMIT was lost, twice: it may be written.
        StoreError: the database refused or could not be reached; nothing was written, try again.
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
        """`lease` in seconds."""
        super().__init__(row, decoded)
        self._direct_claimer, self._producer, self._rules, self._lease = (
            direct_claimer,
            producer,
            rules,
            lease,
        )
        self._held_until = row.renewed_monotonic + lease
        self._end = ""

    @property
    def held(self) -> bool:
        """Whether it is ours to settle, as far as is known here: by this process's clock the lease
        still runs.
        """
        return not self._end and self._direct_claimer.clock.monotonic() < self._held_until

    async def commit(self, body: Any = SAME_BODY) -> None:
        """It is done: COMPLETED.

        Args:
            body: What the archive keeps in place of the body, encoded as by `publish`.
        """
        await self._settle(Ack(), "committed", body=body)

    async def rollback(
        self, delay: Duration | None = None, *, error: BaseException | str | None = None
    ) -> None:
        """It failed: an attempt is counted, and it is due again; FAILED when the retry strategy
        allows no more.

        Args:
            delay: Time until then; a negative one is at once, None leaves it to the retry strategy.
            error: What went wrong, for `last_error`; the retry strategy is told of an exception.
        """
        exception = error if isinstance(error, BaseException) else None
        seconds = None if delay is None else delay_seconds(delay)
        text = None if exception is not None or error is None else clean_text(str(error))
        await self._settle(Nack(seconds, exception), "rolled back", text=text)

    async def reject(
        self, reason: str | None = None, *, error: BaseException | None = None
    ) -> None:
        """It is never to be tried again: FAILED.

        Args:
            reason: Why, in a few words; None is "rejected".
            error: What went wrong, for `last_error`.
        """
        await self._settle(Reject(reason, error), "rejected")

    async def move_to(
        self, queue: str, body: Any = SAME_BODY, *, delay: Duration | None = None
    ) -> None:
        """It goes to `queue` under the same id, its counters reset.

        Args:
            queue: Where to.
            body: Its new body, encoded as by `publish`.
            delay: Time until it is due there; None, or a negative one, is at once.
        """
        if (problem := name_problem(queue)) is not None:
            raise SetupError(f"{short(queue)} cannot be the name of a queue: {problem}")
        seconds = 0.0 if delay is None else delay_seconds(delay)
        await self._settle(Relocate(queue), "moved", body=body, delay=seconds)

    async def extend(self, lease: Duration | None = None) -> None:
        """Lengthen the lease from now on, by the database's clock; also one that has run out, if
        nobody has it since.

        Never shortens it.

        Args:
            lease: How long; None is as long as at `reserve`.
        """
        self._check_open()
        seconds = self._lease if lease is None else lease_seconds(lease)
        if not await self._direct_claimer.extend(self._row, seconds):
            raise self._lost()
        self._held_until = max(self._held_until, self._row.renewed_monotonic + seconds)

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """Commit, or roll back after an exception; one that only cuts off, as a cancellation, costs
        no attempt.
        """
        if self._end:
            return
        if exc_val is None:
            await self.commit()
            return
        try:
            if isinstance(exc_val, Exception):
                await self._settle(Nack(error=exc_val), "rolled back")
            else:
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
        row, attempted = self._row, not isinstance(outcome, Abandon)
        ended_after = self._direct_claimer.clock.monotonic() - row.claimed_monotonic
        settlement = settle(row, outcome, self._rules, ended_after=ended_after, attempted=attempted)
        settlement.delay = settlement.delay if delay is None else delay
        settlement.error = settlement.error if text is None else text
        if not await self._direct_claimer.settle(settlement, replaced, self.queue):
            raise self._lost()
        self._end = end

    async def _replaced(self, body: Any) -> Replaced:
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
                f"message {self.id} of queue {self.queue!r} was {self._end} already; reserve another"
            )

    def _lost(self) -> LeaseLostError:
        self._end = _LOST
        return LeaseLostError(
            f"lease lost: message {self.id} of queue {self.queue!r} is not ours any more, so nothing was written; "
            "give reserve() a longer lease, or extend() it in time"
        )


_LOST = "lost"
