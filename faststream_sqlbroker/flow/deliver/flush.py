"""Write settled rows in batches, fenced by their lease tokens; report lost leases.

What the database refuses by itself, and a batch that fails again and again for a passing reason, is
repeated apart from the queue (`Repeater`), so that one bad outcome never delays the others for
long.
"""

import sys
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Timer
from faststream_sqlbroker.database.errors import NotConnectedError
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcome_states import CUT_ANYWAY, FEW_PARTS, State, cut
from faststream_sqlbroker.flow.deliver.outcome_writer import OnDenied, Repeater, write
from faststream_sqlbroker.flow.loop import Log, Outages, persist

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


LOCKED_PAUSE = 0.5
"""Seconds to the next look when all that is left is locked by other sessions."""
APART_AFTER = 2
"""Failures in a row, for a passing reason, after which a batch is set apart: a failure may cost the
time limit."""


class Flusher:
    """Empties `inflight.queued` into the database.

    Flushes when `flush_batch_size` outcomes wait, when `flush_interval` seconds have passed since
    the first, or at once when `hurry` is called (the workers are idle).
    """

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        log: Log,
        *,
        batch_size: int,
        interval: float,
        outages: Outages | None = None,
        on_denied: OnDenied = lambda _denied: None,
    ) -> None:
        """`interval` in seconds; `outages` and `on_denied` are the repeater's."""
        self._store = store
        self._inflight = inflight
        self._clock = inflight.clock
        self._batch_size = batch_size
        self._interval = interval
        self.repeater = Repeater(store, inflight, log, outages=outages, on_denied=on_denied)
        self._hurried = False
        self._past_locked = False
        """Whether rows that other sessions have locked are passed over: the last flush may have
        failed for them."""
        self._failures = 0
        self._settled_then = -1
        """What was written when a batch was set apart last."""
        self._timer: Timer | None = None

    def outcome_added(self) -> None:
        """Start the timer with the first outcome; flush a full batch at once."""
        if len(self._inflight.queued) >= self._batch_size:
            self.hurry()
            return
        self._inflight.notify_at(self._batch_size)
        if self._timer is None:
            self._timer = self._clock.call_later(self._interval, self.hurry)

    def hurry(self) -> None:
        """Flush now if anything waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._inflight.notify_at(1)
        if self._inflight.queued:
            self._hurried = True
            self._inflight.notify_at(sys.maxsize)
            self._inflight.signals.flush_due()

    async def tick(self) -> float | None:
        """Write one batch if it is time; None waits for `hurry`."""
        if not self._hurried:
            return None
        self._hurried = False
        self._inflight.notify_at(1)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        some = await self.flush_one()
        if self._inflight.queued and not some:
            self._hurried = True
            return LOCKED_PAUSE
        idle = not self._inflight.running and self._inflight.waiting.empty()
        if self._inflight.queued:
            (self.hurry if idle else self.outcome_added)()
        return 0.0 if self._hurried else None

    async def flush_one(self) -> bool:
        """Write up to a batch of outcomes; on a passing failure they stay, in order, or are set
        apart.

        After a failure, rows that other sessions have locked are passed over: they may be the
        cause.

        Returns:
            Whether any was dealt with.

        Raises:
            TransientStoreError: nothing is known to be written; call again.
        """
        if not self._inflight.queued:
            return False
        batch = self._inflight.take(self._batch_size)
        size = len(batch.parts)
        began = self._clock.monotonic()
        try:
            refused = await write(self._store, self._inflight, batch, skip_locked=self._past_locked)
        except BaseException as error:
            self._hurried = self._past_locked = True
            # Nothing is left of a batch of which all that failed had come back to us.
            if batch.parts and self._to_be_set_apart(error):
                self.repeater.set_apart(batch, error)
                return True
            self._inflight.put_back(batch, first=True)
            raise
        finally:
            self._inflight.metrics.flush_took(self._clock.monotonic() - began)
        self.repeater.refuse(batch, refused)
        locked = len(batch.parts)
        self._inflight.put_back(batch, first=False)
        self._past_locked = locked > 0
        if not locked:
            # What is locked may be so by our own last try, which the server has not given up yet.
            self._failures = 0
        return locked < size

    async def empty(self) -> None:
        """Flush until nothing is queued.

        Raises:
            TransientStoreError: as `flush_one`.
        """
        while self._inflight.queued:
            if not await self.flush_one():
                await self._clock.sleep(LOCKED_PAUSE)

    async def empty_until(self, deadline: float) -> None:
        """`empty`, whatever fails, but no longer than `deadline` (the event loop's time)."""
        await persist(self.empty, deadline, self._clock)

    def _to_be_set_apart(self, error: BaseException) -> bool:
        """Whether `error` may be the batch's own fault. One is enough to find out while nothing
        else can be written.
        """
        if not isinstance(error, TransientStoreError) or isinstance(error, NotConnectedError):
            return False
        self._failures += 1
        settled = self._inflight.settled_count
        if self._failures < APART_AFTER:
            return False
        if settled == self._settled_then and not self._may_add_apart():
            return False
        self._failures = 0
        self._settled_then = settled
        return True

    def _may_add_apart(self) -> bool:
        """Whether to set one more batch apart, though nothing was written since the last one: it
        may be a whole outage.

        What is apart is few units, each by itself, which prove no outage; or the queue has failed
        for long.
        """
        if self._failures >= CUT_ANYWAY:
            return True
        apart = [b for b in self._inflight.batches if State.SET_APART in (b.origin, b.state)]
        return len(apart) < FEW_PARTS and all(len(cut(b.parts)) == 1 for b in apart)
