"""The messages that one subscriber holds, and the requests of its loops to each other.

`outcomes` keeps the state of each delivery.
"""

import asyncio
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from typing_extensions import override

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Release
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement, Unit
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.database.policies.slot_use import SlotUse
from faststream_sqlbroker.flow.deliver.outcome_states import (
    DeliveryState,
    OutcomeBatch,
    OutcomeEvent,
    get_next_state,
)
from faststream_sqlbroker.flow.deliver.outcomes import Outcomes
from faststream_sqlbroker.flow.deliver.prefetch import (
    HandlerTimes,
    PrefetchLimiter,
    count_body_bytes,
    get_prefetch_lease,
)
from faststream_sqlbroker.flow.deliver.signals import Signals
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.metrics import SubscriberMetrics
from faststream_sqlbroker.flow.publish_on_ack import CurrentDelivery


def create_release(row: ClaimedMessage) -> Settlement:
    """Create the settlement that puts back a row that was not started, as before the claim.

    The delivery is not charged: it does not count towards `max_deliveries`.
    """
    return settle(row, Release(), SettleRules(), ended_after=0.0, attempted=False)


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch that waits for more messages."""

    task: "asyncio.Task[Any] | None"
    """The task of the worker."""
    missing_count: int = 0
    """Number of messages that still fit in."""
    held_size: tuple[int, int] = (0, 0)
    """Bytes and number of the batch's messages."""
    is_finished: bool = False
    """True if the batch is to start with what it has."""


class Inflight(Outcomes):
    """Rows leased to a subscriber of this process, until their outcomes are written or lost."""

    def __init__(
        self,
        log: Log = lambda *_, **__: None,
        clock: Clock | None = None,
        signals: Signals | None = None,
        metrics: SubscriberMetrics | None = None,
    ) -> None:
        """Hold nothing; `log` and `metrics` get lost leases."""
        super().__init__(log, clock, signals, metrics)
        self.running = 0
        """Number of running handlers."""
        self.busy = 0
        """Number of workers with rows: their handlers run, or are about to."""
        self._pending_batches: list[PendingBatch] = []
        """Batches that workers are filling."""
        self.times = HandlerTimes(self.clock)
        self.prefetch = PrefetchLimiter()
        self.slots = SlotUse(self.clock)
        self.current_deliveries: WeakValueDictionary[Any, CurrentDelivery] = WeakValueDictionary()
        """Current deliveries of the workers, by their tasks."""
        self.low_water = 0
        """Workers request more rows when no more than this number wait."""
        self.is_capacity_requested = False
        """True if the fetch loop waits for signal `capacity_free`."""

    @property
    def is_empty(self) -> bool:
        """True if nothing is held, and nothing waits to be written.

        Quarantined outcomes do not count: they stay for an unknown time, and if the process died,
        their messages would come back anyhow.
        """
        if self.running or self.queued:
            return False
        if any(
            b.state is DeliveryState.WRITING
            and b.origin in (DeliveryState.QUEUED, DeliveryState.RUNNING)
            for b in self.batches
        ):
            return False
        # Then all held rows are those of quarantined outcomes. An overtaken delivery, whose message
        # was claimed again, has an outcome but is not in `held`.
        return len(self.held) <= self.quarantined_count - len(self._overtaken)

    def count_stages(self) -> dict[str, int]:
        """Count the messages by stage, for metrics.

        "settling" are those whose outcomes are not written yet. The counts are taken from several
        collections, so "running" is what remains.
        """
        waiting = self.waiting.qsize()
        settling = len(self.queued) + sum(len(batch.parts) for batch in self.batches)
        running = max(0, len(self.held) - waiting - settling)
        return {"waiting": waiting, "running": running, "settling": settling}

    @contextmanager
    def add_pending_batch(self) -> Iterator[PendingBatch]:
        """Register the batch of a worker that waits for more messages, inside of the block.

        The fetch loop then claims the missing messages, although no worker is free, and a stop can
        end the wait.
        """
        batch = PendingBatch(asyncio.current_task())
        self._pending_batches.append(batch)
        try:
            yield batch
        finally:
            batch.is_finished = True
            self._pending_batches.remove(batch)

    @property
    def first_pending_batch(self) -> PendingBatch | None:
        """The batch that gets the next messages."""
        return self._pending_batches[0] if self._pending_batches else None

    @property
    def missing_count(self) -> int:
        """Number of messages that batches wait for. They start at once though no worker is free."""
        return (
            sum(batch.missing_count for batch in self._pending_batches)
            if self._pending_batches
            else 0
        )

    def measure_prefetched(self) -> tuple[int, int]:
        """Return the bytes and the number of messages that wait for a worker or inside a batch.

        `max_prefetch_bytes` limits these bytes; a batch that is being filled has not started.
        """
        items = self.waiting.items
        size = count_body_bytes(items)
        count = len(items)
        for batch in self._pending_batches:
            size += batch.held_size[0]
            count += batch.held_size[1]
        return size, count

    def finish_batches(self) -> None:
        """Let incomplete batches start, because no more messages will come soon.

        That is so during a stop or a pause, and while a message must wait until no other does.
        """
        for batch in self._pending_batches:
            batch.is_finished = True
        self.waiting.interrupt()

    def request_capacity(self) -> None:
        """Let workers send signal `capacity_free` as soon as there may be capacity.

        Called when the fetch loop has found none, and waits for that signal.
        """
        self.is_capacity_requested = True

    def set_low_water(self, count: int) -> None:
        """Let workers request more rows when no more than `count` rows wait."""
        self.low_water = count

    def on_capacity(self) -> None:
        """Send signal `capacity_free` if the fetch loop waits for capacity.

        Called whenever there may be capacity, by workers and after a flush; a single signal answers
        a request.
        """
        if self.is_capacity_requested:
            self.is_capacity_requested = False
            self.signals.capacity_free()

    def release(self, rows: Iterable[ClaimedMessage]) -> None:
        """Queue the release of unstarted rows, and flush soon. Lost rows are skipped.

        A released row is as before its claim, so other processes should see it soon.
        """
        for row in rows:
            # The next claim takes back the slot, if any: the start that a Throttle had granted.
            self.slots.record_end(row)
            if not row.lease_lost:
                self.queue_outcome(create_release(row))
        self.signals.flush_now()

    @override
    def drop(self, rows: Iterable[ClaimedMessage]) -> None:
        """Forget `rows` as `Outcomes.drop` does, and report the end of their slots.

        A slot is a start that a Throttle has granted; the next claim stores whether it was used.
        """
        rows = list(rows)
        for row in rows:
            self.slots.record_end(row)
        super().drop(rows)

    @override
    def _lose(self, rows: Sequence[ClaimedMessage], phase: str, consequence: str) -> None:
        """Lose `rows` as `Outcomes._lose` does, and report the end of their slots.

        A slot is a start that a Throttle has granted; the next claim stores whether it was used.
        """
        for row in rows:
            self.slots.record_end(row)
        super()._lose(rows, phase, consequence)

    def _remove_waiting(self, is_removed: Callable[[ClaimedMessage], bool]) -> list[ClaimedMessage]:
        """Remove and return the waiting rows for which `is_removed` is True.

        The other rows keep their order, and sentinels (None), which end workers, stay.
        """
        items = self.waiting.items
        removed = [row for row in items if row is not None and is_removed(row)]
        if removed:
            # By identity: rows compare by value, which is slow.
            ids = set(map(id, removed))
            retained = [row for row in items if id(row) not in ids]
            items.clear()
            items.extend(retained)
        return removed

    def remove_waiting(self, row: ClaimedMessage) -> None:
        """Remove `row` from the rows that wait for a worker; the caller queues an outcome."""
        self._remove_waiting(lambda waiting_row: waiting_row is row)

    def release_waiting(self) -> None:
        """Release all rows that wait for a worker, before a stop or for a message that runs alone.

        Workers that fill a batch start with what they have.
        """
        self.finish_batches()
        items = self.waiting.items
        rows = [row for row in items if row is not None and not row.lease_lost]
        items.clear()
        self.release(rows)

    def release_surplus(self, surplus: Collection[ClaimedMessage]) -> None:
        """Release the rows of `surplus` that still wait for a worker.

        Surplus are the rows of a claim whose bodies would exceed `max_prefetch_bytes`. None of them
        has started.
        """
        ids = set(map(id, surplus))
        removed = self._remove_waiting(lambda row: id(row) in ids)
        self.release(removed)
        for row in removed:
            # The rows are held until the release is written, and their size is the problem.
            row.payload = b""

    def release_stale(self, max_wait: float) -> None:
        """Release rows that have waited for a worker for more than `max_wait` seconds.

        Their workers are busy for longer than expected; other processes may start the rows sooner.
        """
        waiting_before = self.clock.monotonic() - max_wait
        if stale := self._remove_waiting(lambda row: _get_waiting_since(row) < waiting_before):
            self.release(stale)

    def get_stale_wait(self, max_wait: float) -> float | None:
        """Return the seconds until the first row has waited for `max_wait`; None if none waits.

        The fetch loop then releases the row, because another process may start it sooner.
        """
        items = self.waiting.items
        first = items[0] if items else None
        if first is None:
            return None
        return max(0.0, _get_waiting_since(first) + max_wait - self.clock.monotonic())

    def release_other_queues(self, queues: Container[str]) -> None:
        """Release waiting rows of queues that are not in `queues`: of queues that are paused now.

        Batches that wait for more messages start with what they have.
        """
        self.finish_batches()
        if other_rows := self._remove_waiting(lambda row: row.queue not in queues):
            self.release([row for row in other_rows if not row.lease_lost])

    def nack_denied(
        self, batch: OutcomeBatch, denied: Collection[Unit], error: BaseException
    ) -> None:
        """Queue failed attempts for the units `denied`, whose publish on ack lacks a right.

        A unit is the set of outcomes that are written together with such messages. Without a GRANT
        no repetition could write it, so its messages are retried or become dead letters.
        """
        self._drop_overtaken(batch)
        units = dict.fromkeys(s.unit for s in batch.parts if s.unit in denied)
        batch.set_parts([s for s in batch.parts if s.unit not in units])
        # Raises an error unless the transition exists.
        get_next_state(batch.state, OutcomeEvent.ANSWER_DENIED)
        for unit in units:
            if unit is not None and unit.fallback is not None:
                self.queue_outcomes(unit.fallback(error))

    def list_due_for_renewal(self, lease: float, max_lease: float | None) -> list[ClaimedMessage]:
        """Return rows held longer than a third of their lease, or two thirds while being written.

        A row that another transaction has locked is due again after a quarter of a third: the lock
        may be short, and the lease was not lengthened.

        Omitted are rows whose handlers have extended their lease beyond `lease`, because a renewal
        would shorten it, cancelled rows whose handlers go on, and rows held for `max_lease`
        seconds.
        """
        now = self.clock.monotonic()
        being_written = self.get_writing()
        third = lease / 3
        prefetch_third = get_prefetch_lease(lease) / 3

        def is_old(row: ClaimedMessage) -> bool:
            lease_age = now - row.renewed_monotonic
            limit = prefetch_third if row.prefetched else third
            # A row that is being written is most likely done in a moment: it is renewed only if the
            # write takes long.
            return (
                lease_age >= limit
                and now - row.locked_monotonic >= limit / 4
                and (lease_age >= 2 * limit or (row.id, row.lease_token) not in being_written)
            )

        return [
            row
            for row in self.held.values()
            if is_old(row)
            and row.held_until <= now + lease
            and (row.cancelled is None or row.outcome is not None)
            # A handler may ask for a longer time than `max_lease` (`held_until`).
            and (
                max_lease is None or now - row.claimed_monotonic < max_lease or now < row.held_until
            )
        ]


def _get_waiting_since(row: ClaimedMessage) -> float:
    """Return the time since when `row` waits for a worker (monotonic seconds).

    A row with a slot (a start that a Throttle allows) waits only from its slot on: before, no other
    process could start it either.
    """
    earliest = row.claimed_monotonic if row.slot is None else row.slot.earliest
    return max(row.claimed_monotonic, earliest)
