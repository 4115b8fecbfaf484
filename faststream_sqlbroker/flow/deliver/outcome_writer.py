"""Write batches of outcomes, and repeat failed ones apart from the queue.

A batch that is refused is sent again in halves until each culprit is found. So no outcome delays
another. Nothing is dropped and no acked message becomes a dead letter: the same outcome is tried
first, every time, because the cause may have gone (a renamed archive, withdrawn rights, a
transaction that has ended). An outcome that fails for a transient reason is never changed. Only an
outcome that is refused again and again, and carries something of its own that may be the cause, is
settled without it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.halving import write_in_halves
from faststream_sqlbroker.core.reasons import SETTLE_ERROR
from faststream_sqlbroker.core.rows import Settlement, SettleResult
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.exceptions import (
    AccessError,
    StoreError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcome_states import (
    DeliveryState,
    OutcomeBatch,
    split_in_halves,
)
from faststream_sqlbroker.flow.deliver.outcomes import Outcomes
from faststream_sqlbroker.flow.loop import Log, is_logged

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


WriteErrors = list[tuple[Settlement, StoreError]]


async def write_batch(
    store: "Store", outcomes: Outcomes, batch: OutcomeBatch, *, skip_locked: bool
) -> WriteErrors:
    """Write `batch`; settlements without an answer of the database stay in the batch.

    If the database refuses the batch, halves of it are written until each culprit is alone.

    Args:
        store: The store to write to.
        outcomes: Gets the database's answers, also before an error.
        batch: A batch in state WRITING.
        skip_locked: Skip rows that other sessions have locked, with their units.

    Returns:
        The units that were refused by themselves, with the errors; they stay in `batch`.

    Raises:
        TransientStoreError: the settlements left in `batch` are not known to be written.
    """
    result = SettleResult()
    write_errors = WriteErrors()

    async def settle(parts: list[Settlement]) -> None:
        answer = await store.settle(parts, skip_locked=skip_locked)
        # Collected, because a later half may fail.
        result.settled_ids |= answer.settled_ids
        result.lost_ids |= answer.lost_ids

    try:
        await write_in_halves(batch.parts, settle, partial(_iterate_smaller, write_errors))
    except BaseException as error:
        # Do not write a half again that was written before the failure.
        outcomes.apply_result(batch, result)
        mark_unanswered(outcomes, batch, error)
        raise
    outcomes.apply_result(batch, result)
    return write_errors


def mark_unanswered(outcomes: Outcomes, batch: OutcomeBatch, error: BaseException) -> None:
    """Mark the rest of `batch` as possibly written after `error`.

    That is so if the answer to its COMMIT was lost, or if the write was cancelled in the middle.
    After any other error nothing of that rest was committed.
    """
    if isinstance(error, UnknownOutcomeError) or not isinstance(error, Exception):
        outcomes.mark_unanswered(batch)


def _iterate_smaller(
    write_errors: WriteErrors, parts: list[Settlement], error: StoreError
) -> Iterator[list[Settlement]]:
    """Yield smaller parts to send instead of `parts`, which the database has refused.

    Sending halves finds the outcome that the database refuses. A unit is never split: its
    settlements are written together or not at all. A unit that is refused by itself is added to
    `write_errors`, after the parts before it were sent.
    """
    # An answer is a message published on ack, which may need a right that the user lacks.
    if isinstance(error, AccessError) and error.only_answers:
        # Settlements without an answer do not wait for the search among the others.
        plain, parts = _split_by_answer(parts)
        if error.every_answer:
            write_errors += [(settlement, error) for settlement in parts]
            parts = []
        if plain:
            yield plain
    halves = split_in_halves(parts) if parts else []
    if len(halves) == 1:
        write_errors += [(settlement, error) for settlement in parts]
    else:
        yield from halves


def _split_by_answer(parts: list[Settlement]) -> tuple[list[Settlement], list[Settlement]]:
    """Split `parts` into settlements without and with messages published on ack.

    Called if the database refuses only such messages: a right to publish is missing.
    """
    plain = [s for s in parts if s.unit is None or not s.unit.on_ack]
    answering = [s for s in parts if s.unit is not None and s.unit.on_ack]
    return plain, answering


REFUSED_TEXT = "(the text of the error was refused by the database)"
REDUCE_AFTER = 5
"""Refusals after which a reduced outcome is tried, too."""
DEAD_LETTER_AFTER = 10
"""Refusals after which a message becomes a dead letter: after about 40 s, so that a transient fault
costs no message.
"""


OnDenied = Callable[[bool], None]


class QuarantineWriter:
    """Sends refused and quarantined outcomes again, with growing pauses."""

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        log: Log,
        *,
        on_denied: OnDenied = lambda _denied: None,
    ) -> None:
        """Share the subscriber's `inflight`.

        `on_denied(True)` is called when a right or a table is missing for outcomes that carry
        nothing of their own, and `on_denied(False)` when this is over.
        """
        self._store = store
        self._inflight = inflight
        self._log = log
        self._on_denied = on_denied
        self._denied_count = 0
        """Number of messages whose answers may not be published."""
        self._log_at_count = 1
        """Value of `_denied_count` at which the log reports it next: a producer may send many."""
        self._settled_count_at_failure = -1
        """`settled_count` at the last failure."""

    @property
    def healthy(self) -> bool:
        """True if nothing is quarantined, or an outcome was written since the last failure.

        Quarantined outcomes have failed and are repeated apart from the queue. A single bad outcome
        does not make the subscriber unhealthy while the others are written.
        """
        return (
            not self._inflight.quarantined_count
            or self._inflight.settled_count != self._settled_count_at_failure
        )

    def add_refused(self, batch: OutcomeBatch, write_errors: WriteErrors) -> None:
        """Quarantine the `write_errors` units of `batch`: repeat each apart from the queue.

        A unit is a single outcome, or all that must be written together. If a right is missing for
        plain outcomes, the subscriber stops claiming until this is over.
        """
        write_errors = self._nack_denied_answers(batch, write_errors)
        if not write_errors:
            return
        parts = [settlement for settlement, _ in write_errors]
        self._inflight.quarantine_refused(batch, parts)
        if any(isinstance(error, AccessError) and s.unit is None for s, error in write_errors):
            self._on_denied(True)
        self.log_kept(parts, write_errors[0][1], "were refused by the database", logging.ERROR)

    def _nack_denied_answers(self, batch: OutcomeBatch, write_errors: WriteErrors) -> WriteErrors:
        """Nack units that were refused for their answer alone; return the other refused units.

        An answer is a message published on ack, for which the database user lacks a right. No
        repetition could write such a unit without a GRANT, so the attempts of its messages fail.
        """
        denied = {
            s.unit: error
            for s, error in write_errors
            if s.unit is not None and _is_answer_only(error)
        }
        if not denied:
            return write_errors
        error = next(iter(denied.values()))
        nacked = [s for s, _ in write_errors if s.unit in denied]
        self._inflight.nack_denied(batch, set(denied), error)
        self._denied_count += len(nacked)
        if self._denied_count >= self._log_at_count:
            self._log_at_count = 2 * self._denied_count
            text = (
                "the database user may not publish messages with the acks of "
                f"{self._denied_count} messages so far ({_format_ids(nacked)}), so their attempts "
                "have failed; grant the right, or set no_reply=True on the subscriber to drop "
                f"replies requested by reply_to: {error}"
            )
            self._log(logging.ERROR, text, message_id=nacked[0].id)
        return [(s, error) for s, error in write_errors if s.unit not in denied]

    def quarantine(self, batch: OutcomeBatch, error: BaseException) -> None:
        """Quarantine `batch`, which fails again and again for a transient reason.

        It is repeated unchanged, apart from the queue: other outcomes need not wait for it.
        """
        parts = list(batch.parts)
        self._inflight.quarantine(batch)
        self.log_kept(parts, error)

    def log_kept(
        self,
        parts: Sequence[Settlement],
        error: object,
        failure: str = "could not be written",
        level: int = logging.WARNING,
    ) -> None:
        """Log outcomes that could not be written, unless a general outage is the reason.

        An outage is logged once for all loops, by `Outages`.
        """
        if isinstance(error, TransientStoreError) and self._inflight.outages.is_general:
            return  # an outage, not caused by these messages
        text = (
            f"the outcomes of {len(parts)} messages {failure} ({_format_ids(parts)}); they are "
            f"kept and tried again: {error}"
        )
        self._log(level, text, message_id=parts[0].id)

    async def tick(self) -> float | None:
        """Send a due batch; return the seconds until the next batch, or None without any."""
        batch = self._inflight.start_due_batch(self._inflight.clock.monotonic())
        if batch is not None:
            await self._send(batch)
        due = self._inflight.get_next_due()
        if due is None:
            # Nothing is refused any more, so the subscriber may claim again.
            self._on_denied(False)
        return None if due is None else max(0.0, due - self._inflight.clock.monotonic())

    async def _send(self, batch: OutcomeBatch) -> None:
        """Send a quarantined batch again; schedule what is left for a later try.

        With `has_failed` that try comes after a longer pause, and a batch that fails for a
        transient reason may be split.
        """
        inflight = self._inflight
        try:
            if batch.origin is DeliveryState.REFUSED:
                failed = await self._write_refused(batch)
            else:
                write_errors = await write_batch(self._store, inflight, batch, skip_locked=True)
                self.add_refused(batch, write_errors)
                failed = False
        except TransientStoreError as error:
            self._settled_count_at_failure = inflight.settled_count
            if batch.parts and is_logged(batch.tries):
                self.log_kept(batch.parts, error)
            # Tries of a refused outcome count refusals, and this was none.
            inflight.retry_later(batch, has_failed=batch.origin is not DeliveryState.REFUSED)
        except BaseException:
            inflight.retry_later(batch, has_failed=True)
            raise
        else:
            inflight.retry_later(batch, has_failed=failed)

    async def _write_refused(self, batch: OutcomeBatch) -> bool:
        """Write the refused unit or a reduced version; return True if all versions were refused.

        A reduced version leaves out a part that may be the cause, such as the error text. A unit is
        the set of outcomes that are written together with the messages published on ack.
        """
        parts = batch.parts
        # The original first, every time: the cause of the refusal may be gone by now.
        versions = (
            parts,
            *iterate_reduced(parts, batch.tries, archive=self._store.dialect.has_archive),
        )
        for reduction, version in enumerate(versions):
            result = await self._try_settle(batch, version)
            if result is None:
                continue
            self._inflight.apply_result(batch, result)
            if result.settled_ids and reduction:
                self._log_reduced(version, batch.tries)
            elif result.settled_ids and parts[0].unit is None:
                # A plain outcome was written as it is: no right is missing any more.
                self._on_denied(False)
            return False
        return True

    async def _try_settle(
        self, batch: OutcomeBatch, version: Sequence[Settlement]
    ) -> SettleResult | None:
        """Write `version` of `batch`, which may leave out a part; return None after a refusal.

        The caller then tries the next version. A transient failure says nothing about the version,
        and is raised. Locked rows are skipped, and are in neither set of the result.
        """
        try:
            return await self._store.settle(version, skip_locked=True)
        except BaseException as error:
            if isinstance(error, StoreError) and not isinstance(error, TransientStoreError):
                return None
            mark_unanswered(self._inflight, batch, error)
            raise

    def _log_reduced(self, version: Sequence[Settlement], tries: int) -> None:
        """Log that a reduced version of an outcome was written after `tries` refusals."""
        first = version[0]
        self._log(
            logging.ERROR,
            f"the outcome of messages {[s.id for s in version]} was refused {tries} times; it is "
            f"settled as {first.state and first.state.name} without the part that may be the cause",
            message_id=first.id,
        )


def _format_ids(parts: Sequence[Settlement]) -> str:
    """Format the first ids of `parts` for a log line."""
    max_ids = 5
    return ", ".join(str(s.id) for s in parts[:max_ids]) + (", …" if len(parts) > max_ids else "")


def _is_answer_only(error: BaseException) -> bool:
    return isinstance(error, AccessError) and error.only_answers


def iterate_reduced(
    parts: Sequence[Settlement], tries: int, *, archive: bool
) -> Iterator[Sequence[Settlement]]:
    """Yield versions of a unit that was refused `tries` times, with the smallest loss first.

    Nothing is yielded for an ack, a nack without an error, a postponement or a release: they carry
    nothing of their own that could be the cause. Where messages are published on ack, all rows fall
    back to nacks. An error text is left out. A message that cannot go to another queue becomes a
    dead letter, where there is an `archive` to keep it.
    """
    if tries < REDUCE_AFTER:
        return
    unit = parts[0].unit
    if unit is None:
        [settlement] = parts
        yield from _iterate_reduced_single(settlement, tries, archive=archive)
    elif unit.fallback is not None:
        yield unit.fallback(None)


def _iterate_reduced_single(
    settlement: Settlement, tries: int, *, archive: bool
) -> Iterator[Sequence[Settlement]]:
    """Yield reduced versions of `settlement`, with the smallest loss first.

    The lookup record is left out first, then the error text, then the reason. Last, a message that
    cannot be moved to another queue becomes a dead letter in the archive.
    """
    # In the order of loss: the lookup record, the text, the reason with it, at last the queue.
    if settlement.lookup is not None:
        yield [replace(settlement, lookup=None)]
    if settlement.error is not None:
        yield [replace(settlement, error=REFUSED_TEXT)]
    if settlement.is_final and settlement.reason is not None:
        yield [replace(settlement, error=REFUSED_TEXT, reason=SETTLE_ERROR)]
    if settlement.queue is not None and archive and tries >= DEAD_LETTER_AFTER:
        yield [
            replace(
                settlement,
                state=MessageState.FAILED,
                archive=True,
                reason=settlement.reason or SETTLE_ERROR,
                error=REFUSED_TEXT,
                queue=None,
                payload=None,
                headers=None,
                lookup=None,
                delay=None,
            )
        ]
