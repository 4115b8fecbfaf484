"""What one subscriber holds: claimed rows, their leases, and the outcomes not yet written."""

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from uuid import UUID

from faststream_sqlbroker.core.outcome import Release
from faststream_sqlbroker.core.rows import Acked, ClaimedMessage, Holder, Settlement, SettleResult
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.flow.buffer import Buffer
from faststream_sqlbroker.flow.chain import due_queues
from faststream_sqlbroker.flow.loop import Log

MOST_REFUSED = 1_000
"""Refused outcomes that are kept before claims stop: each is a message that nobody else can have."""


def _filled(settlement: Settlement) -> set[str]:
    """Queues in which something is due at once since `settlement` is written."""
    moved = set() if settlement.queue is None or settlement.delay else {settlement.queue}
    return moved | due_queues(settlement.chained)


def release(row: ClaimedMessage) -> Settlement:
    """Hand a row back that was not started: as before the claim, uncharged."""
    return settle(row, Release(), SettleRules(), ended_after=0.0, attempted=False)


@dataclass(slots=True)
class RefusedOutcome:
    """An outcome that the database refused; `due` is when to try it again (monotonic seconds)."""

    settlement: Settlement
    due: float
    tries: int = 1


class Inflight:
    """The rows leased to one subscriber of this process, from the claim until the flush has written them.

    `doubtful` are the outcomes of which an earlier COMMIT was not answered: they may be written already.

    A row is in exactly one place: `waiting` (claimed, not started), with a worker, in `outcomes` (settled,
    not written) or in `refused` (settled, refused by the database). `held` knows them all by id, for renewal.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self.waiting: Buffer[ClaimedMessage | None] = Buffer()
        self.held: dict[int, ClaimedMessage] = {}
        self.outcomes: list[Settlement] = []
        self.refused: list[RefusedOutcome] = []
        self.flushing: list[Sequence[Settlement]] = []
        """The batches that are being written: kept whole, as it is rarely asked what is in them."""
        self.doubtful: set[tuple[int, UUID]] = set()
        self._older: dict[tuple[int, UUID], ClaimedMessage] = {}
        """Deliveries that came to us again while their outcomes were being written."""
        self.running = 0
        self.wants_room = False
        self.notify_at = 1
        """Outcomes of which `on_outcome` is to be told next: a call a message would say nothing new."""
        self.on_outcome: Callable[[], None] = lambda: None
        self.on_room: Callable[[], None] = lambda: None
        self.hurry: Callable[[], None] = lambda: None
        self.on_settled: Callable[[], None] = lambda: None
        self.on_chained: Callable[[set[str]], None] = lambda _queues: None
        self.holder: Holder | None = None
        """Given to each row for what its handler may ask."""
        self.claimed_count = 0
        self.settled_count = 0
        self.lease_lost_count = 0
        self.settle_unknown_count = 0

    @property
    def flushing_count(self) -> int:
        """Outcomes of which the database has not said yet whether they are written."""
        return sum(map(len, self.flushing))

    @property
    def unwritten(self) -> int:
        """Outcomes that wait to be written, or for the answer."""
        return len(self.outcomes) + self.flushing_count + len(self.refused)

    @property
    def empty(self) -> bool:
        """Whether nothing is held, nor waits to be written."""
        # What was refused stays for an unknown time; were the process to die, it would come back anyhow.
        busy = self.running or self.outcomes or self.flushing
        return not busy and len(self.held) <= len(self.refused)

    def add(self, rows: Iterable[ClaimedMessage]) -> list[ClaimedMessage]:
        """Take in freshly claimed rows; the older deliveries of the same messages, whose leases were lost.

        Not those whose outcomes are being written: such an outcome may be what made the row claimable, so it is
        counted when the database has answered (`written`, `without_overtaken`).
        """
        now, older, rows, holder = monotonic(), [], list(rows), self.holder
        for row in rows:
            row.claimed_monotonic = row.renewed_monotonic = now
            row.holder = holder
            if row.id in self.held:
                older.append(self.held[row.id])
            self.held[row.id] = row
        self.claimed_count += len(rows)
        self.waiting.extend(rows)
        being_written = self.being_written() if older else set()
        lost = []
        for row in older:
            self.forget(row)
            mark = (row.id, row.lease_token)
            if mark in being_written:
                self._older[mark] = row
            else:
                lost.append(row)
        return lost

    def forget(self, row: ClaimedMessage) -> None:
        """The row's lease is gone: nothing of it may be written any more."""
        row.lease_lost = True
        if self.held.get(row.id) is row:
            del self.held[row.id]
        void = (row.id, row.lease_token)
        self._older.pop(void, None)
        self.outcomes = [s for s in self.outcomes if (s.id, s.lease_token) != void]
        self.refused = [r for r in self.refused if (r.settlement.id, r.settlement.lease_token) != void]

    def finish(self, settlement: Settlement) -> None:
        """Queue a settlement for the flush."""
        self.outcomes.append(settlement)
        if len(self.outcomes) >= self.notify_at:
            self.on_outcome()

    def finish_all(self, settlements: Iterable[Settlement]) -> None:
        """`finish` for what ended together."""
        self.outcomes += settlements
        if len(self.outcomes) >= self.notify_at:
            self.on_outcome()

    def has_no_outcome(self, row: ClaimedMessage) -> bool:
        """Whether `row` is ours and nothing is queued for it, or being written."""
        if self.held.get(row.id) is not row or (row.id, row.lease_token) in self.being_written():
            return False
        return all(s.id != row.id for s in (*self.outcomes, *(r.settlement for r in self.refused)))

    def give_back(self, rows: Iterable[ClaimedMessage]) -> None:
        """Queue the release of rows that were not started, and flush soon."""
        for row in rows:
            self.finish(release(row))
        self.hurry()

    def give_back_waiting(self) -> None:
        """Give back everything that waits for a worker."""
        rows = []
        while not self.waiting.empty():
            row = self.waiting.get_nowait()
            if row is not None and not row.lease_lost:
                rows.append(row)
        self.give_back(rows)

    def keep_waiting(self, queues: Container[str]) -> None:
        """Give back what waits for a worker and is of none of `queues`."""
        items = self.waiting.items
        others = [row for row in items if row is not None and row.queue not in queues]
        if others:
            kept = [row for row in items if row is None or row.queue in queues]
            items.clear()
            items.extend(kept)
            self.give_back([row for row in others if not row.lease_lost])

    @contextmanager
    def writing(self, batch: Sequence[Settlement]) -> Iterator[None]:
        """`batch` is being written meanwhile."""
        self.flushing.append(batch)
        try:
            yield
        finally:
            self.flushing = [other for other in self.flushing if other is not batch]

    def being_written(self) -> set[tuple[int, UUID]]:
        """The deliveries whose outcomes are being written: message and token."""
        return {(s.id, s.lease_token) for batch in self.flushing for s in batch}

    def _overtaken(self, settlement: Settlement) -> bool:
        if self._older and (settlement.id, settlement.lease_token) in self._older:
            return True
        row = self.held.get(settlement.id)
        # Nearly always the same object; comparing UUIDs is Python code.
        return not (
            row is None
            or row.lease_token is settlement.lease_token
            or row.lease_token == settlement.lease_token
        )

    def without_overtaken(self, batch: Sequence[Settlement], log: Log) -> list[Settlement]:
        """What of `batch`, which the database has not dealt with, is still to be written.

        Where a later delivery of the same message has come to us meanwhile, the older is counted as lost.
        """
        kept = []
        for settlement in batch:
            if not self._overtaken(settlement):
                kept.append(settlement)
                continue
            what = self._lost(settlement, self.let_go(settlement), "settle")
            text = f"{what}; it came back to us, and the older outcome will not be written"
            log(logging.WARNING, text, message_id=settlement.id)
        return kept

    def let_go(self, settlement: Settlement) -> ClaimedMessage | None:
        """The delivery, which is ours no more."""
        if self._overtaken(settlement):
            return self._older.pop((settlement.id, settlement.lease_token), None)
        return self.held.pop(settlement.id, None)

    def _lost(self, settlement: Settlement, row: ClaimedMessage | None, phase: str) -> str:
        which = "" if row is None else f"delivery {row.deliveries_count}, "
        return f"{self.count_lost(settlement)}: message {settlement.id} ({which}phase {phase})"

    def count_lost(self, delivery: Settlement | ClaimedMessage) -> str:
        """Count a delivery that the database does not know any more; what to call it."""
        mark = (delivery.id, delivery.lease_token)
        if mark in self.doubtful:
            self.doubtful.discard(mark)
            self.settle_unknown_count += 1
            return "settle unknown"
        self.lease_lost_count += 1
        return "lease lost"

    def written(self, batch: Sequence[Settlement], result: SettleResult, log: Log) -> None:
        """The database has dealt with `batch`.

        Args:
            batch: Settlements of different rows.
            result: What came of them; those in neither set are left out here.
            log: Told of lost leases.
        """
        chained: set[str] = set()
        if len(result.settled) == len(batch) and not self.doubtful:
            batch = self._written_acks(batch)
        for settlement in batch:
            lost = settlement.id in result.lost
            if not lost and settlement.id not in result.settled:
                continue
            row = self.let_go(settlement)
            if lost:
                text = f"{self._lost(settlement, row, 'flush')}; its outcome was not written now"
                log(logging.WARNING, text, message_id=settlement.id)
                continue
            self.settled_count += 1
            if self.doubtful:
                self.doubtful.discard((settlement.id, settlement.lease_token))
            if settlement.chained or settlement.queue is not None:
                chained |= _filled(settlement)
        if result.settled:
            self.on_settled()
        if chained:
            self.on_chained(chained)

    def _written_acks(self, batch: Sequence[Settlement]) -> list[Settlement]:
        """Let go of the plain acks of `batch`, which were all written; the others."""
        others, held = [], self.held
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

    def due_for_renewal(self, lease: float, max_lease: float | None) -> list[ClaimedMessage]:
        """Rows held longer than a third of their lease; those being written right now, two thirds.

        Not those whose handlers have asked for more than `lease`, which would be shortened.
        """
        now, being_written = monotonic(), self.being_written()
        old = now - lease / 3
        return [
            row
            for row in self.held.values()
            if row.renewed_monotonic <= old
            and row.held_until <= now + lease
            and (
                row.renewed_monotonic <= now - lease * 2 / 3 or (row.id, row.lease_token) not in being_written
            )
            and (max_lease is None or now - row.claimed_monotonic < max_lease or now < row.held_until)
        ]
