"""Write settled rows in batches, fenced by their lease tokens; report lost leases.

A batch that the database refuses (not one that could not be sent) is halved until the culprit is alone and
set aside (`refused`), so that one bad outcome never delays the others.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.rows import Settlement, SettleResult
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.inflight import Inflight
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.refused import RefusedOutcomes

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store


LOCKED_PAUSE = 0.5
"""Seconds to the next look when all that is left is locked by somebody else."""

Culprits = list[tuple[Settlement, StoreError]]


class Flusher:
    """Empties `inflight.outcomes` into the database.

    Flushes when `flush_batch_size` outcomes wait, when `flush_interval` seconds have passed since the
    first, or at once when `hurry` is called (the workers are idle).
    """

    def __init__(
        self, store: "Store", inflight: Inflight, log: Log, *, batch_size: int, interval: float
    ) -> None:
        """`interval` in seconds."""
        self._store, self._inflight, self._log = store, inflight, log
        self._batch_size, self._interval = batch_size, interval
        self.refused = RefusedOutcomes(store, inflight, log)
        self._hurried = self._careful = False
        self._timer: asyncio.TimerHandle | None = None
        self.wake: Callable[[], None] = lambda: None

    def outcome_added(self) -> None:
        """Start the timer with the first outcome; flush a full batch at once."""
        if len(self._inflight.outcomes) >= self._batch_size:
            self.hurry()
            return
        self._inflight.notify_at = self._batch_size
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self.hurry)

    def hurry(self) -> None:
        """Flush now if anything waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._inflight.notify_at = 1
        if self._inflight.outcomes:
            self._hurried, self._inflight.notify_at = True, sys.maxsize
            self.wake()

    async def tick(self) -> float | None:
        """Write one batch if it is time, and what was refused; None waits for `hurry`."""
        if self._hurried:
            self._hurried, self._inflight.notify_at = False, 1
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            some = await self.flush_one()
            if self._inflight.outcomes and not some:
                self._hurried = True
                return LOCKED_PAUSE
            idle = not self._inflight.running and self._inflight.waiting.empty()
            if self._inflight.outcomes:
                (self.hurry if idle else self.outcome_added)()
            if self._hurried:
                return 0.0
        return await self.refused.tick()

    async def flush_one(self) -> bool:
        """Write up to a batch of outcomes; on a passing failure they stay, in order.

        After one, rows that somebody else has locked are passed over: it may have been for them.

        Returns:
            Whether any was dealt with.

        Raises:
            TransientStoreError: nothing is known to be written; call again.
        """
        inflight = self._inflight
        batch = inflight.outcomes[: _group_end(inflight.outcomes, self._batch_size)]
        del inflight.outcomes[: len(batch)]
        result, culprits = SettleResult(), Culprits()
        try:
            with inflight.writing(batch):
                await self._write(batch, result, culprits)
        except BaseException as error:
            # A half that was written before the failure is not to be written again.
            done = result.settled | result.lost
            left = [s for s in batch if s.id not in done]
            # Cancelled in the middle, it may have been committed too.
            if isinstance(error, UnknownOutcomeError) or not isinstance(error, Exception):
                inflight.doubtful |= {(s.id, s.lease_token) for s in left}
            inflight.outcomes[:0] = inflight.without_overtaken(left, self._log)
            self._hurried = self._careful = True
            inflight.written(batch, result, self._log)
            raise
        inflight.written(batch, result, self._log)
        if len(result.settled) == len(batch):
            self._careful = False
            return True
        return self._keep_locked(batch, result, culprits)

    def _keep_locked(self, batch: Sequence[Settlement], result: SettleResult, culprits: Culprits) -> bool:
        """Keep what was refused, and what somebody else has locked; whether anything else was in `batch`."""
        inflight = self._inflight
        if culprits:
            refused = inflight.without_overtaken([s for s, _ in culprits], self._log)
            self.refused.add(refused, culprits[0][1])
        done = result.settled | result.lost | {s.id for s, _ in culprits}
        locked = inflight.without_overtaken([s for s in batch if s.id not in done], self._log)
        inflight.outcomes += locked
        self._careful = bool(locked)
        return len(locked) < len(batch)

    async def _write(self, batch: Sequence[Settlement], result: SettleResult, culprits: Culprits) -> None:
        """Write `batch`, in halves if it is refused, adding to `result` and `culprits` as it goes."""
        try:
            written = await self._store.settle(batch, skip_locked=self._careful)
        except TransientStoreError:
            raise
        except StoreError as error:
            half = _group_end(batch, len(batch) // 2)
            if half == len(batch):
                half = _group_end(batch, 1)
            if half == len(batch):
                culprits += [(settlement, error) for settlement in batch]
                return
            await self._write(batch[:half], result, culprits)
            await self._write(batch[half:], result, culprits)
            return
        result.settled |= written.settled
        result.lost |= written.lost


def _group_end(batch: Sequence[Settlement], end: int) -> int:
    """`end`, or further, so that what belongs into one transaction stays together."""
    end = min(max(end, 1), len(batch))
    while end < len(batch) and batch[end - 1].with_next:
        end += 1
    return end
