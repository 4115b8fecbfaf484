"""Write settled rows in batches, fenced by their lease tokens; report lost leases.

A batch that the database refuses (not one that could not be sent) is halved until the culprit is alone, so
that one bad outcome never delays the others.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.rows import Settlement, SettleResult
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.inflight import Inflight
from faststream_sqlbroker.flow.loop import Log

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

SETTLE_ERROR = "settle_error"


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
        self._unknown = False
        self._hurried = False
        self._timer: asyncio.TimerHandle | None = None
        self.wake: Callable[[], None] = lambda: None

    def outcome_added(self) -> None:
        """Start the timer with the first outcome; flush a full batch at once."""
        waiting = len(self._inflight.outcomes)
        if waiting >= self._batch_size:
            self.hurry()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self.hurry)

    def hurry(self) -> None:
        """Flush now if anything waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._inflight.outcomes:
            self._hurried = True
            self.wake()

    async def tick(self) -> float | None:
        """Write one batch if it is time; None waits for `hurry`."""
        if not self._hurried:
            return None
        self._hurried = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self.flush_one()
        if self._inflight.outcomes:
            self._hurried = True
            return 0.0
        return None

    async def flush_one(self) -> None:
        """Write up to a batch of outcomes; on a passing failure they stay, in order.

        Raises:
            TransientStoreError: nothing is known to be written; call again.
        """
        inflight = self._inflight
        batch = inflight.outcomes[: self._batch_size]
        del inflight.outcomes[: self._batch_size]
        inflight.flushing |= {s.id for s in batch}
        result = SettleResult()
        try:
            await self._write(batch, result)
        except TransientStoreError as error:
            # Halves that were written before the failure are not to be written again.
            written = [s for s in batch if s.id in result.settled or s.id in result.lost]
            self._report(written, result)
            self._unknown = self._unknown or isinstance(error, UnknownOutcomeError)
            inflight.outcomes[:0] = [s for s in batch if s not in written]
            self._hurried = True
            raise
        finally:
            inflight.flushing -= {s.id for s in batch}
        self._report(batch, result)
        self._unknown = False

    async def _write(self, batch: Sequence[Settlement], result: SettleResult) -> None:
        """Write `batch`, in halves if it is refused, adding to `result` as it goes."""
        try:
            written = await self._store.settle(batch)
        except TransientStoreError:
            raise
        except StoreError as error:
            if len(batch) > 1:
                half = len(batch) // 2
                await self._write(batch[:half], result)
                await self._write(batch[half:], result)
                return
            written = await self._write_stripped(batch[0], error)
        result.settled |= written.settled
        result.lost |= written.lost

    async def _write_stripped(self, settlement: Settlement, error: StoreError) -> SettleResult:
        """Settle without the texts and the body that may be what the database refuses."""
        self._log(
            logging.ERROR,
            f"the outcome of message {settlement.id} was refused by the database; it is settled as FAILED "
            f"({SETTLE_ERROR}): {error}",
            message_id=settlement.id,
        )
        stripped = replace(
            settlement, state=MessageState.FAILED, archive=True, reason=SETTLE_ERROR,
            error=ascii(str(error))[:1_000], queue=None, payload=None, delay=None,
        )  # fmt: skip
        try:
            return await self._store.settle([stripped])
        except TransientStoreError:
            raise
        except StoreError as again:
            self._log(
                logging.CRITICAL,
                f"message {settlement.id} cannot be settled at all, its lease will run out: {again}",
                message_id=settlement.id,
            )
            return SettleResult(lost={settlement.id})

    def _report(self, batch: Sequence[Settlement], result: SettleResult) -> None:
        inflight = self._inflight
        inflight.written([s.id for s in batch], {s.id: s.lease_token for s in batch})
        inflight.settled_count += len(result.settled)
        if not result.lost:
            return
        if self._unknown:
            # An earlier COMMIT without an answer may have written these already.
            inflight.settle_unknown_count += len(result.lost)
        else:
            inflight.lease_lost_count += len(result.lost)
        for settlement in batch:
            if settlement.id in result.lost:
                what = "settle unknown" if self._unknown else "lease lost"
                self._log(
                    logging.WARNING,
                    f"{what}: message {settlement.id} (phase flush); its outcome was not written now",
                    message_id=settlement.id,
                )
