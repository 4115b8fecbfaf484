"""Send a batch of outcomes, in halves where the database refuses it: so each culprit is found."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.rows import Settlement, SettleResult
from faststream_sqlbroker.exceptions import (
    AccessError,
    StoreError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.flow.outcome_states import Batch, unit_end
from faststream_sqlbroker.flow.outcomes import Outcomes

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
    try:
        await _write(store, batch.parts, result, refused, skip_locked=skip_locked)
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


async def _write(
    store: "Store",
    parts: list[Settlement],
    result: SettleResult,
    refused: Refused,
    *,
    skip_locked: bool,
) -> None:
    try:
        written = await store.settle(parts, skip_locked=skip_locked)
    except TransientStoreError:
        raise
    except StoreError as error:
        for smaller in _smaller(parts, refused, error):
            await _write(store, smaller, result, refused, skip_locked=skip_locked)
        return
    result.settled |= written.settled
    result.lost |= written.lost


def _smaller(
    parts: list[Settlement], refused: Refused, error: StoreError
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
