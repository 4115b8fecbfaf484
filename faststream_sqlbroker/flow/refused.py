"""Outcomes that the database refused: each is tried again by itself, so that none delays another.

Nothing is dropped and no acked message becomes a dead letter: the same is tried first, every time, as the
cause may have gone (a renamed archive, withdrawn rights). Only what is refused again and again, and carries
something of its own that may be the cause, is settled without it.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.rows import Settlement, SettleResult
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.inflight import Inflight, RefusedOutcome
from faststream_sqlbroker.flow.loop import Log, backoff

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

SETTLE_ERROR = "settle_error"
NO_TEXT = "(the text of the error was refused by the database)"
LESS_AFTER = 5
DEAD_AFTER = 10
"""Refusals, after about 3 and 40 seconds: a fault that passes costs neither text nor message."""
PER_TICK = 20
"""Most tries of one tick: each is a transaction, and others wait for the flush loop."""


class RefusedOutcomes:
    """Tries what is in `inflight.refused` again, with growing pauses."""

    def __init__(self, store: "Store", inflight: Inflight, log: Log) -> None:
        """Share the subscriber's `inflight`."""
        self._store, self._inflight, self._log = store, inflight, log

    def add(self, settlements: Sequence[Settlement], error: StoreError) -> None:
        """Keep `settlements`, which were refused one by one."""
        if not settlements:
            return
        ids = ", ".join(str(s.id) for s in settlements[:5]) + (", …" if len(settlements) > 5 else "")  # noqa: PLR2004
        self._log(
            logging.ERROR,
            f"the outcomes of {len(settlements)} messages were refused by the database ({ids}); they are kept "
            f"and tried again: {error}",
            message_id=settlements[0].id,
        )
        due = monotonic() + backoff(1)
        self._inflight.refused += [RefusedOutcome(s, due) for s in settlements]

    async def tick(self) -> float | None:
        """Try what is due; seconds until the next, None without any."""
        for entry in [e for e in self._inflight.refused if e.due <= monotonic()][:PER_TICK]:
            try:
                await self._retry(entry)
            except TransientStoreError:
                # The flush's own business, which notices too; this one may hang on a lock of its own.
                entry.due = monotonic() + backoff(entry.tries)
                break
        refused = self._inflight.refused
        return max(0.0, min(e.due for e in refused) - monotonic()) if refused else None

    async def _retry(self, entry: RefusedOutcome) -> None:
        settlement, batch = entry.settlement, [entry.settlement]
        try:
            with self._inflight.writing(batch):
                result = await self._settle(entry)
        except BaseException as error:
            if isinstance(error, UnknownOutcomeError) or not isinstance(error, Exception):
                self._inflight.doubtful.add((settlement.id, settlement.lease_token))
            self._inflight.without_overtaken(batch, self._log)
            raise
        if result is None:
            self._inflight.without_overtaken(batch, self._log)
            entry.tries += 1
            entry.due = monotonic() + backoff(entry.tries)
            return
        self._inflight.refused = [e for e in self._inflight.refused if e is not entry]
        self._inflight.written(batch, result, self._log)

    async def _settle(self, entry: RefusedOutcome) -> SettleResult | None:
        """The settlement, or what can be written of it; None if all of it is refused."""
        settlement = entry.settlement
        less = lesser(settlement, entry.tries, archive=self._store.dialect.has_archive)
        for n, version in enumerate((settlement, *less)):
            try:
                result = await self._store.settle([version])
            except TransientStoreError:
                raise
            except StoreError:
                continue
            if n:
                self._log(
                    logging.ERROR,
                    f"the outcome of message {settlement.id} was refused {entry.tries} times; it is settled as "
                    f"{version.state and version.state.name} without what may be the cause",
                    message_id=settlement.id,
                )
            return result
        return None


def lesser(settlement: Settlement, tries: int, *, archive: bool) -> Iterator[Settlement]:
    """What may be written in place of a settlement that was refused `tries` times, the best first.

    Nothing for an ack, a nack without an error, a postponement or a release: they carry nothing of their
    own that could be the cause. What was chained to an ack falls back to a nack; a text is left out; what cannot
    go to another queue becomes a dead letter, where there is an `archive` to keep it.
    """
    if tries < LESS_AFTER:
        return
    if settlement.fallback is not None:
        yield settlement.fallback
        return
    if settlement.error is not None:
        yield replace(settlement, error=NO_TEXT)
    if settlement.leaves and settlement.reason is not None:
        yield replace(settlement, error=NO_TEXT, reason=SETTLE_ERROR)
    if settlement.queue is not None and archive and tries >= DEAD_AFTER:
        yield replace(
            settlement, state=MessageState.FAILED, archive=True, reason=settlement.reason or SETTLE_ERROR,
            error=NO_TEXT, queue=None, payload=None, headers=None, delay=None,
        )  # fmt: skip
