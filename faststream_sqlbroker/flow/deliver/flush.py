"""Write settled rows in batches, fenced by their lease tokens, and report lost leases.

Outcomes that the database refuses, and a batch that fails again and again for a transient reason,
are quarantined: they are repeated apart from the queue, so that one bad outcome never delays the
others for long.
"""

import sys
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Timer
from faststream_sqlbroker.core.rows import Settlement
from faststream_sqlbroker.database.errors import UnavailableError
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcome_states import (
    MAX_PARTS,
    SPLIT_AFTER,
    DeliveryState,
    split_parts,
)
from faststream_sqlbroker.flow.deliver.outcome_writer import OnDenied, QuarantineWriter, write_batch
from faststream_sqlbroker.flow.loop import Log

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


LOCKED_PAUSE = 0.5
"""Seconds to the next try when other sessions have locked all remaining rows."""
LOCKED_LOG_INTERVAL = 10.0
"""Seconds with locked rows until a log line, and until each further one."""
QUARANTINE_AFTER = 2
"""Transient failures in a row after which a batch is quarantined: each may take the full timeout.

"""


class Flusher:
    """Writes the queued outcomes of a subscriber.

    It flushes when `flush_batch_size` outcomes wait, when `flush_interval` seconds have passed
    since the first, or at once after `flush_soon` (the workers are idle).
    """

    def __init__(
        self,
        store: "Store",
        inflight: Inflight,
        log: Log,
        *,
        batch_size: int,
        interval: float,
        on_denied: OnDenied = lambda _denied: None,
    ) -> None:
        """Take `interval` in seconds; `on_denied` belongs to the quarantine."""
        self._store = store
        self._inflight = inflight
        self._clock = inflight.clock
        self._batch_size = batch_size
        self._interval = interval
        self.quarantine = QuarantineWriter(store, inflight, log, on_denied=on_denied)
        self._is_due = False
        self._skip_locked = False
        """Skip locked rows in the next flush, because the last one may have failed on them."""
        self._failures = 0
        self._settled_count_then = -1
        """`settled_count` when a batch was quarantined last."""
        self._log_locked_at = inf
        """Time from which locked rows are logged; each flush since then must have met some."""
        self._timer: Timer | None = None

    def on_outcome_added(self) -> None:
        """Start the timer with the first outcome; flush a full batch at once.

        Listener of signal `outcome_added`. While the timer runs, only a full batch is signalled.
        """
        if len(self._inflight.queued) >= self._batch_size:
            self.flush_soon()
            return
        self._inflight.set_notify_count(self._batch_size)
        if self._timer is None:
            self._timer = self._clock.call_later(self._interval, self.flush_soon)

    def flush_soon(self) -> None:
        """Flush now if anything waits.

        Called when a batch is full, when the timer ends, when the workers are idle, and for
        outcomes that must not wait, such as releases. The flush loop is woken, and its `tick`
        writes.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._inflight.set_notify_count(1)
        if self._inflight.queued:
            self._is_due = True
            # The flush comes anyhow: outcomes until then need no signal.
            self._inflight.set_notify_count(sys.maxsize)
            self._inflight.signals.flush_due()

    async def tick(self) -> float | None:
        """Write a batch if due; return the seconds until the next tick.

        None waits for `flush_soon`.
        """
        if not self._is_due:
            return None
        self._is_due = False
        self._inflight.set_notify_count(1)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        has_progress = await self.flush_batch()
        if self._inflight.queued and not has_progress:
            # Other sessions have locked all rows of the batch.
            self._is_due = True
            return LOCKED_PAUSE
        idle = not self._inflight.running and self._inflight.waiting.empty()
        if self._inflight.queued:
            # More outcomes have come, did not fit into the batch, or were put back because their
            # rows are locked. Idle workers will not fill the batch.
            (self.flush_soon if idle else self.on_outcome_added)()
        return 0.0 if self._is_due else None

    async def flush_batch(self) -> bool:
        """Write up to a batch of outcomes, which stay or are quarantined after a transient failure.

        After a failure, rows that other sessions have locked are skipped: they may be the cause.

        Returns:
            True if the database has dealt with any outcome.

        Raises:
            TransientStoreError: nothing is known to be written; call again.
        """
        if not self._inflight.queued:
            return False
        batch = self._inflight.start_batch(self._batch_size)
        size = len(batch.parts)
        started_at = self._clock.monotonic()
        try:
            write_errors = await write_batch(
                self._store, self._inflight, batch, skip_locked=self._skip_locked
            )
        except BaseException as error:
            self._is_due = self._skip_locked = True
            # The batch is empty if all its failed messages were claimed again.
            if batch.parts and self._count_failure(error):
                self.quarantine.quarantine(batch, error)
                # Progress, though nothing is written: the batch no longer delays the queue.
                return True
            self._inflight.requeue(batch, first=True)
            raise
        finally:
            self._inflight.metrics.record_flush_duration(self._clock.monotonic() - started_at)
        self.quarantine.add_refused(batch, write_errors)
        locked_count = len(batch.parts)
        self._inflight.requeue(batch, first=False)
        self._skip_locked = locked_count > 0
        self._report_locked(batch.parts)
        if not locked_count:
            # The rows may be locked by the last try, which the server has not given up yet.
            self._failures = 0
        return locked_count < size

    def _report_locked(self, parts: Sequence[Settlement]) -> None:
        """Log outcomes that have waited for locked rows: `parts`, of the last flush.

        Another transaction may lock rows for long, and no statement fails because of that.
        """
        now = self._clock.monotonic()
        if parts and now >= self._log_locked_at:
            self._log_locked_at = inf
            self.quarantine.log_kept(parts, "other sessions have locked their rows")
        self._log_locked_at = min(self._log_locked_at, now + LOCKED_LOG_INTERVAL) if parts else inf

    async def flush_all(self) -> None:
        """Flush until nothing is queued.

        Raises:
            TransientStoreError: as `flush_batch`.
        """
        while self._inflight.queued:
            if not await self.flush_batch():
                # Other sessions have locked all rows of the batch.
                await self._clock.sleep(LOCKED_PAUSE)

    def _count_failure(self, error: BaseException) -> bool:
        """Count a failed flush; return True if the transient `error` may be the batch's own fault.

        The batch is then quarantined: repeated apart from the queue, so that other outcomes need
        not wait for it. While nothing else can be written, one quarantined batch is enough to find
        out.
        """
        if not isinstance(error, TransientStoreError) or isinstance(error, UnavailableError):
            return False
        self._failures += 1
        settled = self._inflight.settled_count
        if self._failures < QUARANTINE_AFTER:
            return False
        # Nothing was written since a batch was quarantined last: probably a general outage.
        if settled == self._settled_count_then and not self._can_quarantine_more():
            return False
        self._failures = 0
        self._settled_count_then = settled
        return True

    def _can_quarantine_more(self) -> bool:
        """Return True if another batch may be quarantined though nothing was written since.

        During a general outage more quarantined batches would not help. But several single outcomes
        may be the cause: a few are allowed, and any number once the queue has failed for long.
        """
        if self._failures >= SPLIT_AFTER:
            return True
        quarantined = [
            b for b in self._inflight.batches if DeliveryState.QUARANTINED in (b.origin, b.state)
        ]
        return len(quarantined) < MAX_PARTS and all(
            len(split_parts(b.parts)) == 1 for b in quarantined
        )
