"""Write batches of outcomes; repeat those that the database did not take apart from the queue, so
that none delays another.

A batch that is refused is sent again in halves, so that each culprit is found. Nothing is dropped
and no acked message becomes a dead letter: the same is tried first, every time, as the cause may
have gone (a renamed archive, withdrawn rights, a transaction that has ended). What fails for a
passing reason is never written otherwise. Only what is refused again and again, and carries
something of its own that may be the cause, is settled without it.
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
from faststream_sqlbroker.flow.deliver.outcome_states import Batch, State, unit_end
from faststream_sqlbroker.flow.deliver.outcomes import Outcomes
from faststream_sqlbroker.flow.loop import Log, Outages, is_told

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


Refused = list[tuple[Settlement, StoreError]]


async def write(store: "Store", outcomes: Outcomes, batch: Batch, *, skip_locked: bool) -> Refused:
    """Write `batch`; what the database has not dealt with stays in it.

    Args:
        store: Where to.
        outcomes: Told what the database has dealt with, also before an error.
        batch: In state WRITING.
        skip_locked: Whether rows that other sessions have locked are passed over, with their units.

    Returns:
        The units that were refused by themselves, with the errors; they stay in `batch`.

    Raises:
        TransientStoreError: what is left in `batch` is not known to be written.
    """
    result = SettleResult()
    refused = Refused()

    async def settle(parts: list[Settlement]) -> None:
        written = await store.settle(parts, skip_locked=skip_locked)
        result.settled |= written.settled
        result.lost |= written.lost

    try:
        await write_in_halves(batch.parts, settle, partial(_smaller, refused))
    except BaseException as error:
        # A half that was written before the failure is not to be written again.
        outcomes.answered(batch, result)
        note_unanswered(outcomes, batch, error)
        raise
    outcomes.answered(batch, result)
    return refused


def note_unanswered(outcomes: Outcomes, batch: Batch, error: BaseException) -> None:
    """What is left of `batch` may be written after `error`: cancelled in the middle, it may have
    been committed too.
    """
    if isinstance(error, UnknownOutcomeError) or not isinstance(error, Exception):
        outcomes.note_unanswered(batch)


def _smaller(
    refused: Refused, parts: list[Settlement], error: StoreError
) -> Iterator[list[Settlement]]:
    """What to send in place of `parts`, which the database has refused with `error`.

    A unit that is refused by itself is added to `refused`, after what was sent before it.
    """
    if isinstance(error, AccessError) and error.only_answers:
        # Those without an answer are not held up by the search for the others.
        plain, parts = _by_answer(parts)
        if error.every_answer:
            refused += [(settlement, error) for settlement in parts]
            parts = []
        if plain:
            yield plain
    if parts:
        yield from _halves(parts, refused, error)


def _by_answer(parts: list[Settlement]) -> tuple[list[Settlement], list[Settlement]]:
    """Those that publish nothing with their ack, and those that do."""
    plain = [s for s in parts if s.unit is None or not s.unit.on_ack]
    answering = [s for s in parts if s.unit is not None and s.unit.on_ack]
    return plain, answering


def _halves(
    parts: list[Settlement], refused: Refused, error: StoreError
) -> Iterator[list[Settlement]]:
    """About half of `parts` and the rest, no unit cut; a single unit is refused."""
    half = unit_end(parts, len(parts) // 2)
    if half == len(parts):
        half = unit_end(parts, 1)
    if half == len(parts):
        refused += [(settlement, error) for settlement in parts]
    else:
        yield parts[:half]
        yield parts[half:]


NO_TEXT = "(the text of the error was refused by the database)"
LESS_AFTER = 5
"""Refusals after which a lesser outcome is tried, too."""
DEAD_AFTER = 10
"""Refusals after which a message becomes a dead letter: after about 40 s, so that a fault that
passes costs no message."""


OnDenied = Callable[[bool], None]


class Repeater:
    """Sends again what is refused or set apart, with growing pauses."""

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        log: Log,
        *,
        outages: Outages | None = None,
        on_denied: OnDenied = lambda _denied: None,
    ) -> None:
        """Share the subscriber's `inflight`.

        `on_denied` is told that a right or a table is missing for outcomes that carry nothing of
        their own, and that this is over.
        """
        self._store = store
        self._inflight = inflight
        self._log = log
        self._outages = Outages(log, inflight.clock) if outages is None else outages
        self._on_denied = on_denied
        self._denied_count = 0
        """Messages whose answers may not be published."""
        self._told_at = 1
        """Of how many such messages the log says so next: a producer may send many."""
        self._failed_at = -1
        """What was written when something failed last."""

    @property
    def healthy(self) -> bool:
        """Whether all is written, or something has been since the last failure."""
        return not self._inflight.apart_count or self._inflight.settled_count != self._failed_at

    def refuse(self, batch: Batch, refused: Refused) -> None:
        """Keep the units of `batch` that were `refused` one by one."""
        refused = self._without_answers(batch, refused)
        if not refused:
            return
        self._inflight.refuse(batch, [settlement for settlement, _ in refused])
        if any(isinstance(error, AccessError) and s.unit is None for s, error in refused):
            self._on_denied(True)
        self._tell(
            logging.ERROR, [s for s, _ in refused], "were refused by the database", refused[0][1]
        )

    def _without_answers(self, batch: Batch, refused: Refused) -> Refused:
        """Nack at once what was refused for its answer alone, which no repeat could write without a
        GRANT; the rest.
        """
        denied = {
            s.unit: error for s, error in refused if s.unit is not None and _only_answers(error)
        }
        if not denied:
            return refused
        error = next(iter(denied.values()))
        nacked = [s for s, _ in refused if s.unit in denied]
        self._inflight.nack(batch, set(denied), error)
        self._denied_count += len(nacked)
        if self._denied_count >= self._told_at:
            self._told_at = 2 * self._denied_count
            text = (
                f"the answers of {self._denied_count} messages until now ({_few(nacked)}) may not "
                "be published, so their attempts have failed; grant it, or give the subscriber "
                f"no_reply=True, which drops what producers ask for by reply_to: {error}"
            )
            self._log(logging.ERROR, text, message_id=nacked[0].id)
        return [(s, error) for s, error in refused if s.unit not in denied]

    def set_apart(self, batch: Batch, error: BaseException) -> None:
        """Keep `batch`, which fails again and again for a passing reason."""
        parts = list(batch.parts)
        self._inflight.set_apart(batch)
        self._tell(logging.WARNING, parts, "could not be written", error)

    def _tell(
        self, level: int, parts: Sequence[Settlement], what: str, error: BaseException
    ) -> None:
        if isinstance(error, TransientStoreError) and self._outages.stops_all:
            return  # not for the sake of these messages
        text = (
            f"the outcomes of {len(parts)} messages {what} ({_few(parts)}); they are kept and "
            f"tried again: {error}"
        )
        self._log(level, text, message_id=parts[0].id)

    async def tick(self) -> float | None:
        """Send one batch that is due; seconds until the next, None without any."""
        batch = self._inflight.take_due(self._inflight.clock.monotonic())
        if batch is not None:
            await self._send(batch)
        due = self._inflight.next_due()
        if due is None:
            self._on_denied(False)
        return None if due is None else max(0.0, due - self._inflight.clock.monotonic())

    async def _send(self, batch: Batch) -> None:
        inflight = self._inflight
        try:
            if batch.origin is State.REFUSED:
                failed = await self._write_refused(batch)
            else:
                refused = await write(self._store, inflight, batch, skip_locked=True)
                self.refuse(batch, refused)
                failed = False
        except TransientStoreError as error:
            self._failed_at = inflight.settled_count
            if batch.parts and is_told(batch.tries):
                self._tell(logging.WARNING, batch.parts, "could not be written", error)
            inflight.keep(batch, failed=batch.origin is not State.REFUSED)
        except BaseException:
            inflight.keep(batch, failed=True)
            raise
        else:
            inflight.keep(batch, failed=failed)

    async def _write_refused(self, batch: Batch) -> bool:
        """Write the unit that was refused, or what can be written of it; whether it was refused
        once more.
        """
        parts = batch.parts
        # The same first, every time: the cause of the refusal may be gone by now.
        versions = parts, *lesser(parts, batch.tries, archive=self._store.dialect.has_archive)
        for n, version in enumerate(versions):
            result = await self._answer(batch, version)
            if result is None:
                continue
            self._inflight.answered(batch, result)
            if result.settled and n:
                self._tell_lesser(version, batch.tries)
            elif result.settled and parts[0].unit is None:
                self._on_denied(False)
            return False
        return True

    async def _answer(self, batch: Batch, version: Sequence[Settlement]) -> SettleResult | None:
        """What the database answers to `version` of `batch`; None if it refuses it."""
        try:
            return await self._store.settle(version, skip_locked=True)
        except BaseException as error:
            if isinstance(error, StoreError) and not isinstance(error, TransientStoreError):
                return None
            note_unanswered(self._inflight, batch, error)
            raise

    def _tell_lesser(self, version: Sequence[Settlement], tries: int) -> None:
        first = version[0]
        self._log(
            logging.ERROR,
            f"the outcome of messages {[s.id for s in version]} was refused {tries} times; it is "
            f"settled as {first.state and first.state.name} without what may be the cause",
            message_id=first.id,
        )


def _few(parts: Sequence[Settlement]) -> str:
    """The first ids of `parts`, for a log."""
    few = 5
    return ", ".join(str(s.id) for s in parts[:few]) + (", …" if len(parts) > few else "")


def _only_answers(error: BaseException) -> bool:
    return isinstance(error, AccessError) and error.only_answers


def lesser(
    parts: Sequence[Settlement], tries: int, *, archive: bool
) -> Iterator[Sequence[Settlement]]:
    """What may be written in place of a unit that was refused `tries` times, the best first.

    Nothing for an ack, a nack without an error, a postponement or a release: they carry nothing of
    their own that could be the cause. Where messages are published on ack, all rows fall back to
    nacks; a text is left out; what cannot go to another queue becomes a dead letter, where there is
    an `archive` to keep it.
    """
    if tries < LESS_AFTER:
        return
    unit = parts[0].unit
    if unit is None:
        [settlement] = parts
        yield from _lesser_alone(settlement, tries, archive=archive)
    elif unit.fallback is not None:
        yield unit.fallback(None)


def _lesser_alone(
    settlement: Settlement, tries: int, *, archive: bool
) -> Iterator[Sequence[Settlement]]:
    # The order of loss: a record, the text, the reason with it, at last the queue.
    if settlement.lookup is not None:
        yield [replace(settlement, lookup=None)]
    if settlement.error is not None:
        yield [replace(settlement, error=NO_TEXT)]
    if settlement.leaves and settlement.reason is not None:
        yield [replace(settlement, error=NO_TEXT, reason=SETTLE_ERROR)]
    if settlement.queue is not None and archive and tries >= DEAD_AFTER:
        yield [
            replace(
                settlement,
                state=MessageState.FAILED,
                archive=True,
                reason=settlement.reason or SETTLE_ERROR,
                error=NO_TEXT,
                queue=None,
                payload=None,
                headers=None,
                lookup=None,
                delay=None,
            )
        ]
