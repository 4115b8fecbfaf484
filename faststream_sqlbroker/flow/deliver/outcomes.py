"""Where each delivery of a subscriber is, from its claim until its outcome is written or lost: one
place, one owner.

Only the methods of `Outcomes` lead from one `State` to another, by the ways in
`outcome_states.TRANSITIONS`. A plain message has no object of its own: its state is the collection
that it is in. Outcomes that the database has, or has not taken, are in a `Batch`, whose state is
theirs.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.ended import EndedCounts
from faststream_sqlbroker.core.rows import (
    Acked,
    ClaimedMessage,
    Holder,
    Settlement,
    SettleResult,
    note_claimed,
)
from faststream_sqlbroker.core.settle import sent_back
from faststream_sqlbroker.exceptions import UnknownOutcomeError
from faststream_sqlbroker.flow.deliver.outcome_states import (
    APART_STATES,
    CAME_BACK,
    Batch,
    Event,
    LostLeases,
    Mark,
    State,
    Units,
    after,
    cut,
    least_tried,
    may_cut,
    note_unit,
    unit_end,
)
from faststream_sqlbroker.flow.deliver.prefetch import Buffer
from faststream_sqlbroker.flow.deliver.signals import Signals
from faststream_sqlbroker.flow.loop import Log, backoff
from faststream_sqlbroker.flow.metrics import SubscriberMetrics
from faststream_sqlbroker.flow.publish_on_ack import filled_queues

if TYPE_CHECKING:
    from faststream_sqlbroker.flow.debug_log import DebugLog

MOST_APART = 1_000
"""Outcomes that are refused or set apart before claims stop: each is a message that no other
process can have."""


class Outcomes:
    """The deliveries of one subscriber, each in one `State`."""

    def __init__(
        self,
        log: Log = lambda *_, **__: None,
        clock: Clock | None = None,
        signals: Signals | None = None,
        metrics: SubscriberMetrics | None = None,
    ) -> None:
        """Hold nothing; `log` is told of each lost delivery, once."""
        self.clock = clock or Clock()
        """The broker's; the loops of the subscriber take it from here."""
        self.signals = Signals() if signals is None else signals
        """The other parts of the subscriber, each of which takes them from here."""
        self.metrics = SubscriberMetrics() if metrics is None else metrics
        """Told of what is done, once a batch; the other parts take it from here."""
        self.lost_leases = LostLeases(log, self.metrics)
        self.held: dict[int, ClaimedMessage] = {}
        """All that are ours, by message."""
        self.waiting: Buffer[ClaimedMessage | None] = Buffer()
        """WAITING, and the sentinels that end workers."""
        self.queued: list[Settlement] = []
        """QUEUED."""
        self.batches: list[Batch] = []
        """WRITING, SET_APART and REFUSED."""
        self._overtaken: dict[Mark, ClaimedMessage] = {}
        """WRITING, while their messages have come to us again: the database's answer decides."""
        self._notify_at = 1
        """Outcomes of which `outcome_added` is given next: a call a message would say nothing new.
        """
        self.claimed_count = 0
        self.settled_count = 0
        self.ended: EndedCounts | None = None
        """Counts what ends, for the sign of life; None: it is not told."""
        self.debug: DebugLog | None = None
        """Told of each step of single messages; None: no message can ask for it."""

    @property
    def lease_lost_count(self) -> int:
        """Deliveries whose leases were lost."""
        return self.lost_leases.lost_count

    @property
    def settle_unknown_count(self) -> int:
        """Deliveries that are gone, whose outcome an unanswered COMMIT may have written."""
        return self.lost_leases.unknown_count

    # -- what is where -----------------------------------------------------------------------------

    @property
    def writing_count(self) -> int:
        """Outcomes of which the database has not said yet whether they are written."""
        return sum([len(b.parts) for b in self.batches if b.state is State.WRITING])

    @property
    def apart_count(self) -> int:
        """Outcomes that are refused or set apart, also while being sent again."""
        return sum(
            [
                len(b.parts)
                for b in self.batches
                if b.origin in APART_STATES or b.state in APART_STATES
            ]
        )

    @property
    def unwritten(self) -> list[int]:
        """Messages whose outcomes wait to be written, or for the answer."""
        return sorted(
            s.id for parts in (self.queued, *(b.parts for b in self.batches)) for s in parts
        )

    def being_written(self) -> set[Mark]:
        """The deliveries in state WRITING."""
        return {mark for b in self.batches if b.state is State.WRITING for mark in b.marks}

    def has_no_outcome(self, row: ClaimedMessage) -> bool:
        """Whether `row` is ours, and WAITING or RUNNING."""
        return self.state(row) in (State.WAITING, State.RUNNING)

    def state(self, row: ClaimedMessage) -> State:
        """Where `row` is; not for each message."""
        mark = row.id, row.lease_token
        for batch in self.batches:
            if mark in batch.marks:
                return batch.state
        if row.lease_lost:
            return State.LOST
        if any((s.id, s.lease_token) == mark for s in self.queued):
            return State.QUEUED
        if self.held.get(row.id) is not row:
            return State.WRITTEN
        return State.WAITING if any(item is row for item in self.waiting.items) else State.RUNNING

    # -- to WAITING and QUEUED ---------------------------------------------------------------------

    def add(
        self,
        rows: Sequence[ClaimedMessage],
        holder: Holder | None = None,
        asked: float | None = None,
    ) -> None:
        """Take in freshly claimed rows, which wait for a worker.

        `holder` is given to each of them, for what its handler may ask. The claim was sent at
        `asked` (monotonic seconds; None: now).
        """
        note_claimed(rows, self.clock.monotonic(), holder, asked)
        self._take_in(rows)
        self.waiting.extend(rows)

    def _take_in(self, rows: Sequence[ClaimedMessage]) -> None:
        """Hold `rows`; older deliveries of the same messages are lost.

        Not those that are being written: such an outcome may be what made the row claimable, so the
        database decides.
        """
        older = []
        for row in rows:
            if row.id in self.held:
                older.append(self.held[row.id])
            self.held[row.id] = row
        self.claimed_count += len(rows)
        if older:
            writing = self.being_written()
            self._overtaken |= {
                mark: row for row in older if (mark := (row.id, row.lease_token)) in writing
            }
            self._lose(
                [row for row in older if (row.id, row.lease_token) not in writing],
                "claim",
                CAME_BACK,
            )
        if self.debug is not None:
            self.debug.claimed(rows)

    def notify_at(self, count: int) -> None:
        """Give `outcome_added` when so many outcomes wait, and with each that comes then."""
        self._notify_at = count

    def finish(self, settlement: Settlement) -> None:
        """Queue a settlement for the flush."""
        if self.debug is not None:
            self.debug.settled((settlement,))
        self.queued.append(settlement)
        if len(self.queued) >= self._notify_at:
            self.signals.outcome_added()

    def finish_all(self, settlements: Sequence[Settlement]) -> None:
        """`finish` for what ended together."""
        if self.debug is not None:
            self.debug.settled(settlements)
        self.queued += settlements
        if len(self.queued) >= self._notify_at:
            self.signals.outcome_added()

    # -- to WRITING --------------------------------------------------------------------------------

    def take(self, size: int) -> Batch:
        """The first of the queue, `size` or a few more: units stay whole."""
        parts = self.queued[: unit_end(self.queued, size)]
        del self.queued[: len(parts)]
        batch = Batch(parts, after(State.QUEUED, Event.SENT), State.QUEUED)
        self.batches.append(batch)
        if self.debug is not None:
            self.debug.writing(batch.parts)
        return batch

    def take_due(self, now: float) -> Batch | None:
        """What is refused or set apart and due again, the least tried first: it may not hang as
        others do.
        """
        batch = least_tried(self.batches, now)
        if batch is None:
            return None
        batch.send_again()
        return batch

    def next_due(self) -> float | None:
        """When something of it is due next (monotonic seconds); None without any."""
        return min([b.due for b in self.batches if b.state in APART_STATES], default=None)

    @contextmanager
    def writing(self, settlements: Sequence[Settlement]) -> Iterator[Batch]:
        """A worker writes the outcomes itself; those that were not `answered` at the end are in its
        hands again.
        """
        batch = Batch(list(settlements), after(State.RUNNING, Event.SENT_BY_WORKER), State.RUNNING)
        self.batches.append(batch)
        try:
            yield batch
        except UnknownOutcomeError:
            self.note_unanswered(batch)
            raise
        finally:
            self._leave(batch, Event.ROLLED_BACK)

    def note_unanswered(self, batch: Batch) -> None:
        """What is left of `batch` may be written: if its rows are not found later, that is not
        called a lost lease.
        """
        self.lost_leases.unanswered |= batch.marks

    # -- from WRITING ------------------------------------------------------------------------------

    def answered(
        self,
        batch: Batch,
        result: SettleResult,
        phase: str = "flush",
        rest: str = "its outcome was not written now",
    ) -> None:
        """The database has dealt with `batch`; what is in neither set of `result` stays in it.

        Args:
            batch: Different rows.
            result: What came of them.
            phase: What to call this in the log.
            rest: What a lost lease means.
        """
        parts: Sequence[Settlement] = batch.parts
        if self.debug is not None:
            self.debug.written(parts, result)
        if self.metrics.on and result.settled:
            self.metrics.settled(parts, result.settled, self.held)
        if self.ended is not None and result.settled:
            self.ended.settled(parts, result.settled, self.held)
        if len(result.settled) == len(parts) and not self.lost_leases.unanswered:
            parts = self._written_acks(parts)
        done = result.settled | result.lost
        batch.keep([s for s in parts if s.id not in done])
        filled = self._written([s for s in parts if s.id in result.settled])
        if result.lost:
            self._answered_lost(batch, [s for s in parts if s.id in result.lost], phase, rest)
        if not batch.parts:
            self.batches.remove(batch)
        if result.settled:
            self.signals.settled()
        if filled:
            self.signals.chained(filled)

    def _written(self, settlements: Sequence[Settlement]) -> set[str]:
        """Let go of what was written; the queues in which something is due at once since."""
        filled = set[str]()
        for settlement in settlements:
            self._let_go(settlement)
            self.lost_leases.unanswered.discard((settlement.id, settlement.lease_token))
            if settlement.unit is not None or settlement.queue is not None:
                filled |= filled_queues(settlement)
        self.settled_count += len(settlements)
        return filled

    def _answered_lost(self, batch: Batch, lost: list[Settlement], phase: str, rest: str) -> None:
        units: Units = {}
        for settlement in lost:
            self._note_lost(settlement, phase, rest, units)
        # The rest of these units was found: no earlier COMMIT has written them.
        self.lost_leases.unanswered -= {
            (s.id, s.lease_token) for s in batch.parts if s.unit in units
        }
        if units:
            # Not sent back: the later delivery may have an outcome in the queue.
            self._drop_overtaken(batch)
        self._break(batch, units)

    def _written_acks(self, batch: Sequence[Settlement]) -> list[Settlement]:
        """Let go of the plain acks of `batch`, which were all written; the others."""
        others = []
        held = self.held
        for settlement in batch:
            row = held.pop(settlement.id, None)
            if (
                settlement.__class__ is Acked
                and row is not None
                and row.lease_token is settlement.lease_token
            ):
                continue
            if row is not None:
                held[row.id] = row
            others.append(settlement)
        self.settled_count += len(batch) - len(others)
        return others

    def put_back(self, batch: Batch, *, first: bool) -> None:
        """Queue what is left of `batch`, as the `first` to be written or the last."""
        self._leave(batch, Event.PUT_BACK)
        at = 0 if first else len(self.queued)
        self.queued[at:at] = batch.parts

    def set_apart(self, batch: Batch) -> None:
        """`batch` has failed again and again for a passing reason: repeat its parts apart from the
        queue.
        """
        self._leave(batch, Event.FAILED)
        for part in cut(batch.parts):
            self._keep(Batch(part, batch.state, State.QUEUED))

    def refuse(self, batch: Batch, refused: Collection[Settlement]) -> None:
        """The database has refused the units `refused` of `batch`, each by itself; the rest stays
        in it.
        """
        self._drop_overtaken(batch)
        ids = {s.id for s in refused}
        ours = [s for s in batch.parts if s.id in ids]
        batch.keep([s for s in batch.parts if s.id not in ids])
        state = after(batch.state, Event.REFUSED)
        while ours:
            end = unit_end(ours, 1)
            self._keep(Batch(ours[:end], state, State.QUEUED))
            del ours[:end]

    def keep(self, batch: Batch, *, failed: bool) -> None:
        """What is left of `batch`, which was sent again, waits for the next time, a little longer
        if it has `failed`.

        What failed for a passing reason is cut in two to find the culprit, where others can be
        written. While nothing can be, it is cut into a few parts only: a whole outage would leave
        each outcome with a transaction of its own.
        """
        cut_up = (
            failed
            and batch.origin is State.SET_APART
            and may_cut(batch, self.batches, self.settled_count)
        )
        self._leave(batch, Event.REFUSED if batch.origin is State.REFUSED else Event.FAILED)
        parts = cut(batch.parts) if cut_up else [batch.parts]
        for part in parts:
            self._keep(
                Batch(part, batch.state, batch.origin, batch.tries if len(parts) == 1 else 0),
                failed=failed,
            )

    def _keep(self, batch: Batch, *, failed: bool = True) -> None:
        if not batch.parts:
            return
        batch.tries += failed
        until = self.clock.monotonic() + backoff(max(1, batch.tries), self.clock)
        batch.wait(until, self.settled_count)
        self.batches.append(batch)
        self.signals.apart_added()

    def _leave(self, batch: Batch, event: Event) -> None:
        """`batch` leaves WRITING; where it goes says `event`."""
        if batch in self.batches:
            self._drop_overtaken(batch)
            self.batches.remove(batch)
            batch.move(event)

    # -- to LOST -----------------------------------------------------------------------------------

    def lose(self, rows: Iterable[ClaimedMessage], phase: str, rest: str) -> None:
        """The leases of `rows` are gone. Those that are not ours any more, or being written, are
        left out.

        Args:
            rows: Deliveries.
            phase: What to call this in the log.
            rest: What it means.
        """
        if ours := [row for row in rows if self.held.get(row.id) is row]:
            writing = self.being_written()
            self._lose(
                [row for row in ours if (row.id, row.lease_token) not in writing], phase, rest
            )

    def drop(self, rows: Iterable[ClaimedMessage]) -> None:
        """Nothing of `rows`, which are with a worker, may be written any more; the caller has
        logged why.
        """
        for row in rows:
            row.lose()
            self.lost_leases.unanswered.discard((row.id, row.lease_token))
            if self.held.get(row.id) is row:
                del self.held[row.id]

    def _lose(self, rows: Sequence[ClaimedMessage], phase: str, rest: str) -> None:
        if not rows:
            return
        if self.debug is not None:
            self.debug.lost(rows, phase)
        marks = {(row.id, row.lease_token) for row in rows}
        for row in rows:
            self.lost_leases.tell(row, row, phase, rest)
        self.drop(rows)
        self._take_out(marks)

    def _take_out(self, marks: set[Mark]) -> None:
        """Take the outcomes of lost deliveries from the queue and from what waits apart."""
        waits = [b for b in self.batches if b.state in APART_STATES]
        units: Units = {}
        for parts in (self.queued, *(b.parts for b in waits)):
            _take_from(parts, marks, units)
        if units:
            self._break_queued(units)
            for batch in waits:
                self._break(batch, units)
        self.batches = [b for b in self.batches if b.parts or b not in waits]

    def _drop_overtaken(self, batch: Batch) -> None:
        """What of `batch` was not written, and has come to us again, is lost."""
        if not self._overtaken:
            return
        overtaken = batch.marks & self._overtaken.keys()
        units = Units()
        for settlement in batch.parts:
            if (settlement.id, settlement.lease_token) in overtaken:
                self._note_lost(settlement, "settle", CAME_BACK, units)
        batch.keep([s for s in batch.parts if (s.id, s.lease_token) not in overtaken])
        self._break(batch, units)

    def _break(self, batch: Batch, units: Units) -> None:
        """Send back what `batch` has of `units`, each with the ids that it has lost: it must not be
        written without them.
        """
        broken = [s for s in batch.parts if s.unit in units]
        if broken and batch.origin is not State.RUNNING:
            after(batch.state, Event.BROKEN)
            batch.keep([s for s in batch.parts if s.unit not in units])
            self.lost_leases.tell_broken(broken, units)
            self.finish_all([sent_back(s) for s in broken])

    def _break_queued(self, units: Units) -> None:
        broken = [s for s in self.queued if s.unit in units]
        if broken:
            self.lost_leases.tell_broken(broken, units)
            self.queued[:] = [sent_back(s) if s.unit in units else s for s in self.queued]

    def _let_go(self, settlement: Settlement) -> ClaimedMessage | None:
        """The delivery, which is ours no more."""
        if self._overtaken:
            row = self._overtaken.pop((settlement.id, settlement.lease_token), None)
            if row is not None:
                return row
        row = self.held.get(settlement.id)
        if row is None or row.lease_token != settlement.lease_token:
            return None
        return self.held.pop(settlement.id)

    def _note_lost(self, settlement: Settlement, phase: str, rest: str, units: Units) -> None:
        row = self._let_go(settlement)
        self.lost_leases.tell(settlement, row, phase, rest)
        if row is not None:
            row.lose()
        note_unit(units, settlement)


def _take_from(parts: list[Settlement], marks: set[Mark], units: Units) -> None:
    """Take the deliveries `marks` out of `parts`, and note in `units` what is broken by that."""
    lost = [s for s in parts if (s.id, s.lease_token) in marks]
    for settlement in lost:
        note_unit(units, settlement)
    if lost:
        parts[:] = [s for s in parts if (s.id, s.lease_token) not in marks]
