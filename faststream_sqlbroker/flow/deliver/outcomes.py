"""States of a subscriber's deliveries, from the claim until the outcome is written or lost.

Only the methods of `Outcomes` move a delivery from one state to another, by the transitions in
`outcome_states.TRANSITIONS`. A plain message has no object of its own: its state is the collection
that holds it. Outcomes that were sent to the database, or that it has not accepted, are in a batch,
whose state is theirs.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.ended import EndedCounts
from faststream_sqlbroker.core.outcome import Abandon
from faststream_sqlbroker.core.rows import (
    AckSettlement,
    ClaimedMessage,
    HandlerServices,
    Settlement,
    SettleResult,
    record_claim,
)
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.exceptions import UnknownOutcomeError
from faststream_sqlbroker.flow.deliver.outcome_states import (
    CLAIMED_AGAIN,
    QUARANTINE_STATES,
    DeliveryKey,
    DeliveryState,
    LostLeaseLog,
    OutcomeBatch,
    OutcomeEvent,
    Units,
    add_unit,
    can_split,
    find_least_tried,
    find_unit_end,
    get_next_state,
    split_parts,
)
from faststream_sqlbroker.flow.deliver.prefetch import Buffer
from faststream_sqlbroker.flow.deliver.signals import Signals
from faststream_sqlbroker.flow.loop import Log, Outages, backoff
from faststream_sqlbroker.flow.metrics import SubscriberMetrics
from faststream_sqlbroker.flow.publish_on_ack import get_filled_queues

if TYPE_CHECKING:
    from faststream_sqlbroker.flow.debug_log import DebugLog

MAX_QUARANTINED = 1_000
"""Quarantined outcomes at which claims stop: no other process can have their messages."""


class Outcomes:
    """The deliveries of a subscriber, each in a single state."""

    def __init__(
        self,
        log: Log = lambda *_, **__: None,
        clock: Clock | None = None,
        signals: Signals | None = None,
        metrics: SubscriberMetrics | None = None,
    ) -> None:
        """Hold nothing; `log` gets each lost delivery once."""
        self.clock = clock or Clock()
        """The broker's clock, which all loops of the subscriber use."""
        self.signals = Signals() if signals is None else signals
        """Signals to the other parts of the subscriber, which all use this object."""
        self.metrics = SubscriberMetrics() if metrics is None else metrics
        """Metrics, recorded once per batch; the other parts use this object."""
        self.outages = Outages(log, self.clock)
        """The outages of the broker, which all parts of the subscriber use."""
        self.lost_leases = LostLeaseLog(log, self.metrics)
        self.held: dict[int, ClaimedMessage] = {}
        """Held rows by message id."""
        self.waiting: Buffer[ClaimedMessage | None] = Buffer()
        """Deliveries in state WAITING, and the sentinels that end workers."""
        self.queued: list[Settlement] = []
        """Outcomes in state QUEUED."""
        self.batches: list[OutcomeBatch] = []
        """Batches in state WRITING, QUARANTINED or REFUSED."""
        self._overtaken: dict[DeliveryKey, ClaimedMessage] = {}
        """Deliveries in state WRITING whose messages were claimed again: the database's answer
        decides."""
        self._notify_count = 1
        """Number of waiting outcomes that sends `outcome_added`: a call per message would say
        nothing new."""
        self.claimed_count = 0
        self.settled_count = 0
        self.ended: EndedCounts | None = None
        """Counts of ended messages for the heartbeat; None if they are not reported."""
        self.debug: DebugLog | None = None
        """Log of single messages; None if no message can request it."""
        self.rules = SettleRules()
        """The subscriber's options for settling."""

    @property
    def lease_lost_count(self) -> int:
        """Number of deliveries whose leases were lost."""
        return self.lost_leases.lost_count

    @property
    def settle_unknown_count(self) -> int:
        """Number of lost deliveries whose outcome an unanswered COMMIT may have written."""
        return self.lost_leases.unknown_count

    # -- current states ----------------------------------------------------------------------------

    @property
    def writing_count(self) -> int:
        """Number of outcomes that were sent and not answered yet."""
        return sum([len(b.parts) for b in self.batches if b.state is DeliveryState.WRITING])

    @property
    def quarantined_count(self) -> int:
        """Number of quarantined outcomes, including outcomes being sent again.

        An outcome is quarantined when it was set apart after transient failures, or refused.
        """
        # While a batch is sent again its state is WRITING; only `origin`, the state before that,
        # shows that it was quarantined.
        return sum(
            [
                len(b.parts)
                for b in self.batches
                if b.origin in QUARANTINE_STATES or b.state in QUARANTINE_STATES
            ]
        )

    @property
    def unwritten(self) -> list[int]:
        """Ids of messages whose outcomes wait to be written, or for the answer."""
        return sorted(
            s.id for parts in (self.queued, *(b.parts for b in self.batches)) for s in parts
        )

    def get_writing(self) -> set[DeliveryKey]:
        """Return the keys (id and lease token) of the deliveries in state WRITING.

        Their outcomes were sent, and the database has not answered yet.
        """
        return {
            key for b in self.batches if b.state is DeliveryState.WRITING for key in b.delivery_keys
        }

    def has_no_outcome(self, row: ClaimedMessage) -> bool:
        """Return True if `row` is held, and WAITING or RUNNING."""
        return self.find_state(row) in (DeliveryState.WAITING, DeliveryState.RUNNING)

    def find_state(self, row: ClaimedMessage) -> DeliveryState:
        """Return the state of `row`; too slow to be called for each message.

        No object stores the state of a plain message: the collection that holds the row, or its
        outcome, tells it.
        """
        key = row.id, row.lease_token
        for batch in self.batches:
            if key in batch.delivery_keys:
                return batch.state
        if row.lease_lost:
            return DeliveryState.LOST
        if any((s.id, s.lease_token) == key for s in self.queued):
            return DeliveryState.QUEUED
        # Compared by identity: a newer delivery of the same message has the same id.
        if self.held.get(row.id) is not row:
            return DeliveryState.WRITTEN
        return (
            DeliveryState.WAITING
            if any(item is row for item in self.waiting.items)
            else DeliveryState.RUNNING
        )

    # -- to WAITING and QUEUED ---------------------------------------------------------------------

    def add(
        self,
        rows: Sequence[ClaimedMessage],
        holder: HandlerServices | None = None,
        requested_at: float | None = None,
    ) -> None:
        """Add freshly claimed rows, which wait for a worker.

        `holder` is given to each row, for the requests of its handler, such as a longer lease. The
        leases count from `requested_at`, when the claim was sent (monotonic seconds; None: now).
        """
        record_claim(rows, self.clock.monotonic(), holder, requested_at)
        self._hold_rows(rows)
        self.waiting.extend(rows)

    def _hold_rows(self, rows: Sequence[ClaimedMessage]) -> None:
        """Hold `rows`; older deliveries of the same messages are lost.

        A message may be claimed again by its own process, for example after its lease expired. An
        older delivery that is being written is kept as overtaken: that very write may have made
        the row claimable, so the database's answer decides whether it was written or lost.
        """
        older = []
        for row in rows:
            if row.id in self.held:
                older.append(self.held[row.id])
            self.held[row.id] = row
        self.claimed_count += len(rows)
        if older:
            writing = self.get_writing()
            self._overtaken |= {
                key: row for row in older if (key := (row.id, row.lease_token)) in writing
            }
            self._lose(
                [row for row in older if (row.id, row.lease_token) not in writing],
                "claim",
                CLAIMED_AGAIN,
            )
        if self.debug is not None:
            self.debug.log_claimed(rows)

    def set_notify_count(self, count: int) -> None:
        """Send signal `outcome_added` when `count` outcomes wait, and for each later outcome.

        The flusher asks for the first outcome, to start its timer, and then only for a full batch.
        """
        self._notify_count = count

    def queue_outcome(self, settlement: Settlement) -> None:
        """Queue a settlement, the outcome in the form to be written, for the next flush.

        The flusher is signalled only once as many wait as `set_notify_count` says.
        """
        if self.debug is not None:
            self.debug.log_settled((settlement,))
        self.queued.append(settlement)
        if len(self.queued) >= self._notify_count:
            self.signals.outcome_added()

    def queue_outcomes(self, settlements: Sequence[Settlement]) -> None:
        """Queue the settlements of a handler call, which stay next to each other in the queue.

        The flusher is signalled at most once for all, see `set_notify_count`.
        """
        if self.debug is not None:
            self.debug.log_settled(settlements)
        self.queued += settlements
        if len(self.queued) >= self._notify_count:
            self.signals.outcome_added()

    # -- to WRITING --------------------------------------------------------------------------------

    def start_batch(self, size: int) -> OutcomeBatch:
        """Move the first `size` outcomes of the queue to a new batch in state WRITING.

        The batch may be larger, so that units stay whole: outcomes that one transaction must write
        together, with the messages published on ack.
        """
        parts = self.queued[: find_unit_end(self.queued, size)]
        del self.queued[: len(parts)]
        batch = OutcomeBatch(
            parts, get_next_state(DeliveryState.QUEUED, OutcomeEvent.SENT), DeliveryState.QUEUED
        )
        self.batches.append(batch)
        if self.debug is not None:
            self.debug.log_writing(batch.parts)
        return batch

    def start_due_batch(self, now: float) -> OutcomeBatch | None:
        """Restart the due quarantined batch with the fewest tries; return None if none is due.

        A quarantined batch has failed or was refused, and is written apart from the queue. The
        batch with the fewest failures is the least likely to hang again.
        """
        batch = find_least_tried(self.batches, now)
        if batch is None:
            return None
        batch.restart()
        return batch

    def get_next_due(self) -> float | None:
        """Return the time of the next quarantined batch (monotonic seconds); None without any."""
        return min([b.due for b in self.batches if b.state in QUARANTINE_STATES], default=None)

    @contextmanager
    def track_writing(self, settlements: Sequence[Settlement]) -> Iterator[OutcomeBatch]:
        """Track outcomes that a worker writes itself, inside of the block.

        In the block they are in state WRITING, so that no renewal or new claim counts them as lost.
        Outcomes without an answer at the end are RUNNING again, in the worker's hands.
        """
        batch = OutcomeBatch(
            list(settlements),
            get_next_state(DeliveryState.RUNNING, OutcomeEvent.SENT_BY_WORKER),
            DeliveryState.RUNNING,
        )
        self.batches.append(batch)
        try:
            yield batch
        except UnknownOutcomeError:
            self.mark_unanswered(batch)
            raise
        finally:
            self._finish_writing(batch, OutcomeEvent.ROLLED_BACK)

    def mark_unanswered(self, batch: OutcomeBatch) -> None:
        """Mark the rest of `batch` as possibly written, because the COMMIT got no answer.

        If its rows are not found later, they may have been written: that is logged as "settle
        unknown", and does not count as a lost lease.
        """
        self.lost_leases.unanswered |= batch.delivery_keys

    # -- from WRITING ------------------------------------------------------------------------------

    def apply_result(
        self,
        batch: OutcomeBatch,
        result: SettleResult,
        phase: str = "flush",
        consequence: str = "this write of its outcome had no effect",
    ) -> None:
        """Apply the database's answer to `batch`; rows in neither set of `result` stay.

        Such rows were not sent, or were skipped because another session had locked them: their
        outcomes are not written yet.

        Args:
            batch: The batch; each row occurs once.
            result: The ids that were settled, and those whose lease was lost.
            phase: Name of the operation in the log.
            consequence: Consequence of a lost lease, for the log.
        """
        parts: Sequence[Settlement] = batch.parts
        if self.debug is not None:
            self.debug.log_written(parts, result)
        if self.metrics.is_enabled and result.settled_ids:
            self.metrics.record_settled(parts, result.settled_ids, self.held)
        if self.ended is not None and result.settled_ids:
            self.ended.record_settled(parts, result.settled_ids, self.held)
        # The shortcut for acks does not look at marks of unanswered COMMITs, so there must be none.
        if len(result.settled_ids) == len(parts) and not self.lost_leases.unanswered:
            parts = self._remove_written_acks(parts)
        done = result.settled_ids | result.lost_ids
        batch.set_parts([s for s in parts if s.id not in done])
        changed_queues = self._remove_written([s for s in parts if s.id in result.settled_ids])
        if result.lost_ids:
            self._handle_lost(
                batch, [s for s in parts if s.id in result.lost_ids], phase, consequence
            )
        if not batch.parts:
            self.batches.remove(batch)
        if result.settled_ids:
            self.signals.settled()
        if changed_queues:
            self.signals.chained(changed_queues)

    def _remove_written(self, settlements: Sequence[Settlement]) -> set[str]:
        """Remove written outcomes; return the queues in which new messages are due.

        The same write has moved messages there, or inserted messages published on ack. Subscribers
        of these queues are woken.
        """
        filled = set[str]()
        for settlement in settlements:
            self._remove_held(settlement)
            self.lost_leases.unanswered.discard((settlement.id, settlement.lease_token))
            if settlement.unit is not None or settlement.queue is not None:
                filled |= get_filled_queues(settlement)
        self.settled_count += len(settlements)
        return filled

    def _handle_lost(
        self, batch: OutcomeBatch, lost_settlements: list[Settlement], phase: str, consequence: str
    ) -> None:
        """Remove the deliveries of `batch` that the database no longer has, and break their units.

        A unit is the set of outcomes that are written together with the messages published on ack.
        If one row has lost its lease, the others are sent back: their messages are delivered again.
        """
        units: Units = {}
        for settlement in lost_settlements:
            self._record_lost(settlement, phase, consequence, units)
        # The other rows of these units were found: no earlier COMMIT has written them.
        self.lost_leases.unanswered -= {
            (s.id, s.lease_token) for s in batch.parts if s.unit in units
        }
        if units:
            # Not sent back, because the later delivery may have an outcome in the queue.
            self._drop_overtaken(batch)
        if batch.origin is not DeliveryState.RUNNING:
            self._break_units(batch.parts, units)

    def _remove_written_acks(self, batch: Sequence[Settlement]) -> list[Settlement]:
        """Remove the plain acks of `batch`, which was written completely; return the rest.

        A shortcut for the most frequent outcome: an ack that publishes and moves nothing. A row
        that is no longer the held delivery of its message is left to the full procedure.
        """
        other_settlements = []
        held_rows = self.held
        for settlement in batch:
            row = held_rows.pop(settlement.id, None)
            if (
                settlement.__class__ is AckSettlement
                and row is not None
                # The ack has the token object of its own row; comparing UUIDs would be slow.
                and row.lease_token is settlement.lease_token
            ):
                continue
            # Removed too early, to save a look-up in the usual case.
            if row is not None:
                held_rows[row.id] = row
            other_settlements.append(settlement)
        self.settled_count += len(batch) - len(other_settlements)
        return other_settlements

    def requeue(self, batch: OutcomeBatch, *, first: bool) -> None:
        """Queue the rest of `batch` again, `first` or last, after a failure or for locked rows.

        After a failure the order is kept. Locked rows go last, so that the next batch has others.
        """
        self._finish_writing(batch, OutcomeEvent.PUT_BACK)
        position = 0 if first else len(self.queued)
        self.queued[position:position] = batch.parts

    def quarantine(self, batch: OutcomeBatch) -> None:
        """Quarantine `batch`, which has failed again and again for a transient reason.

        It is written apart from the queue, so that other outcomes need not wait for it, and in two
        parts if it has several units: a single message may be the cause.
        """
        self._finish_writing(batch, OutcomeEvent.FAILED)
        for part in split_parts(batch.parts):
            self._add_quarantined(OutcomeBatch(part, batch.state, DeliveryState.QUEUED))

    def quarantine_refused(self, batch: OutcomeBatch, settlements: Collection[Settlement]) -> None:
        """Quarantine the units `settlements` of `batch`, each by itself; the batch keeps the rest.

        A unit is the set of outcomes that are written together with the messages published on ack,
        or a single outcome.
        """
        # The outcome of a message that was claimed again must not be sent a second time.
        self._drop_overtaken(batch)
        ids = {s.id for s in settlements}
        refused_settlements = [s for s in batch.parts if s.id in ids]
        batch.set_parts([s for s in batch.parts if s.id not in ids])
        state = get_next_state(batch.state, OutcomeEvent.REFUSED)
        while refused_settlements:
            end = find_unit_end(refused_settlements, 1)
            self._add_quarantined(
                OutcomeBatch(refused_settlements[:end], state, DeliveryState.QUEUED)
            )
            del refused_settlements[:end]

    def retry_later(self, batch: OutcomeBatch, *, has_failed: bool) -> None:
        """Schedule the rest of a repeated batch again, a little later after a failure.

        A batch that failed for a transient reason is split in two to find the culprit, while other
        batches can be written. While none can be, it is split into a few parts only: a long outage
        would otherwise leave each outcome with a transaction of its own.
        """
        is_split = (
            has_failed
            and batch.origin is DeliveryState.QUARANTINED
            and can_split(batch, self.batches, self.settled_count)
        )
        self._finish_writing(
            batch,
            OutcomeEvent.REFUSED if batch.origin is DeliveryState.REFUSED else OutcomeEvent.FAILED,
        )
        parts = split_parts(batch.parts) if is_split else [batch.parts]
        # A new, smaller part begins with no tries, and so with a short pause.
        for part in parts:
            self._add_quarantined(
                OutcomeBatch(
                    part, batch.state, batch.origin, batch.tries if len(parts) == 1 else 0
                ),
                has_failed=has_failed,
            )

    def _add_quarantined(self, batch: OutcomeBatch, *, has_failed: bool = True) -> None:
        """Keep `batch` apart from the queue, to be written again after a growing pause.

        Without `has_failed` the pause does not grow: the batch is here again only because its rows
        were locked or the try said nothing about it.
        """
        if not batch.parts:
            return
        batch.tries += has_failed
        retry_at = self.clock.monotonic() + backoff(max(1, batch.tries), self.clock)
        batch.schedule_retry(retry_at, self.settled_count)
        self.batches.append(batch)
        self.signals.outcome_quarantined()

    def _finish_writing(self, batch: OutcomeBatch, event: OutcomeEvent) -> None:
        """End state WRITING of `batch`; `event` determines the next state.

        No effect if the batch was written completely: `apply_result` has removed it. The caller
        decides where the outcomes left in `batch.parts` go.
        """
        if batch in self.batches:
            self._drop_overtaken(batch)
            self.batches.remove(batch)
            batch.apply_event(event)

    # -- to LOST -----------------------------------------------------------------------------------

    def lose(self, rows: Iterable[ClaimedMessage], phase: str, consequence: str) -> None:
        """Lose the leases of `rows`, except rows that are no longer held or are being written.

        The answer to the write decides whether a row that is being written is lost.

        Args:
            rows: Deliveries.
            phase: Name of the operation in the log.
            consequence: Consequence of the loss, for the log.
        """
        if held_rows := [row for row in rows if self.held.get(row.id) is row]:
            writing = self.get_writing()
            self._lose(
                [row for row in held_rows if (row.id, row.lease_token) not in writing],
                phase,
                consequence,
            )

    def drop(self, rows: Iterable[ClaimedMessage]) -> None:
        """Forget `rows`, which are with a worker: their outcomes must not be written any more.

        If the rows are still leased, they are delivered again when the leases expire. This logs
        nothing; callers log the reason where there is something to report.
        """
        for row in rows:
            row.mark_lease_lost()
            self.lost_leases.unanswered.discard((row.id, row.lease_token))
            if self.held.get(row.id) is row:
                del self.held[row.id]

    def _lose(self, rows: Sequence[ClaimedMessage], phase: str, consequence: str) -> None:
        """Report the loss of `rows`, and remove the rows with their outcomes.

        Called with rows whose lease has gone, or that this process has claimed again. An outcome
        that still waits would match no row in the database.
        """
        if not rows:
            return
        if self.debug is not None:
            self.debug.log_lost(rows, phase)
        keys = {(row.id, row.lease_token) for row in rows}
        for row in rows:
            self.lost_leases.report(row, row, phase, consequence)
        self.drop(rows)
        self._remove_outcomes(keys)

    def _remove_outcomes(self, keys: set[DeliveryKey]) -> None:
        """Remove the outcomes of lost deliveries from the queue and the quarantine.

        A unit (outcomes that are written together) must not be written without them, so its other
        messages are delivered again.
        """
        quarantined = [b for b in self.batches if b.state in QUARANTINE_STATES]
        units: Units = {}
        for parts in (self.queued, *(b.parts for b in quarantined)):
            _remove_marked(parts, keys, units)
        for parts in (self.queued, *(b.parts for b in quarantined)):
            self._break_units(parts, units)
        self.batches = [b for b in self.batches if b.parts or b not in quarantined]

    def _drop_overtaken(self, batch: OutcomeBatch) -> None:
        """Lose deliveries of `batch` that were claimed again during the write.

        They are still in the batch, so their outcomes were not written, and the newer delivery of
        the message has the lease.
        """
        if not self._overtaken:
            return
        overtaken = batch.delivery_keys & self._overtaken.keys()
        units = Units()
        for settlement in batch.parts:
            if (settlement.id, settlement.lease_token) in overtaken:
                self._record_lost(settlement, "settle", CLAIMED_AGAIN, units)
        batch.set_parts([s for s in batch.parts if (s.id, s.lease_token) not in overtaken])
        if batch.origin is not DeliveryState.RUNNING:
            self._break_units(batch.parts, units)

    def _break_units(self, parts: list[Settlement], units: Units) -> None:
        """Replace the outcomes in `parts` that belong to `units`, which have lost rows.

        The rest of such a unit must not be written without these rows. Their messages are delivered
        again; under the policy Once they end as unknown outcomes. `parts` is changed in place: the
        queue, or a batch that no worker writes itself (origin RUNNING).
        """
        # Nearly every flush loses nothing, and `parts` may be long.
        broken = [s for s in parts if s.unit in units] if units else []
        if broken:
            parts[:] = [s for s in parts if s.unit not in units]
            self.lost_leases.report_broken(broken, units)
            self.queue_outcomes(
                [
                    settle(row, Abandon(), self.rules, ended_after=settlement.ended_after)
                    for settlement in broken
                    if (row := self.held.get(settlement.id)) is not None
                    and row.lease_token == settlement.lease_token
                ]
            )

    def _remove_held(self, settlement: Settlement) -> ClaimedMessage | None:
        """Remove and return the delivery of `settlement`; None if this process has lost the row.

        A newer delivery of the same message, which has another token, stays.
        """
        # The message was claimed again during the write: `held` has the newer delivery.
        if self._overtaken:
            row = self._overtaken.pop((settlement.id, settlement.lease_token), None)
            if row is not None:
                return row
        row = self.held.get(settlement.id)
        if row is None or row.lease_token != settlement.lease_token:
            return None
        return self.held.pop(settlement.id)

    def _record_lost(
        self, settlement: Settlement, phase: str, consequence: str, units: Units
    ) -> None:
        """Remove and report the lost delivery of `settlement`; add the unit, if any, to `units`.

        The caller then breaks `units`: the other outcomes of each must not be written without this.
        """
        row = self._remove_held(settlement)
        self.lost_leases.report(settlement, row, phase, consequence)
        if row is not None:
            row.mark_lease_lost()
        add_unit(units, settlement)


def _remove_marked(parts: list[Settlement], keys: set[DeliveryKey], units: Units) -> None:
    """Remove the outcomes of the deliveries `keys` from `parts`; add their units to `units`.

    `parts` is changed in place, as it is the queue or belongs to a batch. A unit is a set of
    outcomes that are written together; without the removed ones the caller breaks it.
    """
    lost_settlements = [s for s in parts if (s.id, s.lease_token) in keys]
    for settlement in lost_settlements:
        add_unit(units, settlement)
    if lost_settlements:
        parts[:] = [s for s in parts if (s.id, s.lease_token) not in keys]
