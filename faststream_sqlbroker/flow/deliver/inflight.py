"""What one subscriber holds: its deliveries (`outcomes`), and what its loops ask of each other
about them.
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
from faststream_sqlbroker.flow.deliver.outcome_states import Batch, Event, State, after
from faststream_sqlbroker.flow.deliver.outcomes import Outcomes
from faststream_sqlbroker.flow.deliver.prefetch import (
    HandlerTimes,
    PrefetchBytes,
    body_bytes,
    prefetch_lease,
)
from faststream_sqlbroker.flow.deliver.signals import Signals
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.metrics import SubscriberMetrics
from faststream_sqlbroker.flow.publish_on_ack import CurrentDelivery


def release(row: ClaimedMessage) -> Settlement:
    """Hand a row back that was not started: as before the claim, uncharged."""
    return settle(row, Release(), SettleRules(), ended_after=0.0, attempted=False)


@dataclass(slots=True, eq=False)
class Gathering:
    """A batch that waits for more messages."""

    task: "asyncio.Task[Any] | None"
    """The worker's."""
    missing: int = 0
    """How many it has room for."""
    held: tuple[int, int] = (0, 0)
    """Bytes and number of its messages."""
    ended: bool = False
    """Whether it is to start with what it has."""


class Inflight(Outcomes):
    """The rows leased to one subscriber of this process, from the claim until their outcomes are
    written or lost.
    """

    def __init__(
        self,
        log: Log = lambda *_, **__: None,
        clock: Clock | None = None,
        signals: Signals | None = None,
        metrics: SubscriberMetrics | None = None,
    ) -> None:
        """Hold nothing; `log` and `metrics` are told of lost leases."""
        super().__init__(log, clock, signals, metrics)
        self.running = 0
        """Handlers that run."""
        self.busy = 0
        """Workers that have taken rows: their handlers run, or are about to."""
        self._gatherings: list[Gathering] = []
        """Batches that workers are filling."""
        self.times = HandlerTimes(self.clock)
        self.prefetch = PrefetchBytes()
        self.slots = SlotUse(self.clock)
        self.places: WeakValueDictionary[Any, CurrentDelivery] = WeakValueDictionary()
        """Where its workers work, by their tasks."""
        self.low_water = 0
        """The fetch loop is asked for more when no more than so many rows wait."""
        self.wants_room = False
        """Whether the fetch loop waits for signal `room`."""

    @property
    def empty(self) -> bool:
        """Whether nothing is held, nor waits to be written.

        What is refused or set apart does not count: it stays for an unknown time, and were the
        process to die, it would come back anyhow.
        """
        if self.running or self.queued:
            return False
        if any(
            b.state is State.WRITING and b.origin in (State.QUEUED, State.RUNNING)
            for b in self.batches
        ):
            return False
        return len(self.held) <= self.apart_count - len(self._overtaken)

    def stages(self) -> dict[str, int]:
        """Numbers of messages by stage, for metrics."""
        waiting = self.waiting.qsize()
        settling = len(self.queued) + sum(len(batch.parts) for batch in self.batches)
        running = max(0, len(self.held) - waiting - settling)
        return {"waiting": waiting, "running": running, "settling": settling}

    @contextmanager
    def gathering(self) -> Iterator[Gathering]:
        """A worker waits for more messages of its batch, and says how many."""
        one = Gathering(asyncio.current_task())
        self._gatherings.append(one)
        try:
            yield one
        finally:
            one.ended = True
            self._gatherings.remove(one)

    @property
    def first_gathering(self) -> Gathering | None:
        """The batch that gets the next messages."""
        return self._gatherings[0] if self._gatherings else None

    @property
    def missing(self) -> int:
        """Messages that batches wait for: they start at once, though no worker is free."""
        return sum(one.missing for one in self._gatherings) if self._gatherings else 0

    def prefetched(self) -> tuple[int, int]:
        """Bytes and number of the messages that wait: for a worker, or in a batch for more."""
        items = self.waiting.items
        size = body_bytes(items)
        count = len(items)
        for one in self._gatherings:
            size += one.held[0]
            count += one.held[1]
        return size, count

    def end_gathering(self) -> None:
        """Let batches start with what they have: no more will come soon."""
        for one in self._gatherings:
            one.ended = True
        self.waiting.interrupt()

    def want_room(self) -> None:
        """Give signal `room` as soon as there may be room: the fetch loop has found none."""
        self.wants_room = True

    def ask_below(self, count: int) -> None:
        """Ask the fetch loop for more when no more than `count` rows wait."""
        self.low_water = count

    def made_room(self) -> None:
        """Give signal `room`, if the fetch loop waits for that."""
        if self.wants_room:
            self.wants_room = False
            self.signals.room()

    def give_back(self, rows: Iterable[ClaimedMessage]) -> None:
        """Queue the release of rows that were not started, and flush soon; lost ones are no longer
        ours.
        """
        for row in rows:
            self.slots.tell(row)
            if not row.lease_lost:
                self.finish(release(row))
        self.signals.flush_now()

    @override
    def drop(self, rows: Iterable[ClaimedMessage]) -> None:
        rows = list(rows)
        for row in rows:
            self.slots.tell(row)
        super().drop(rows)

    @override
    def _lose(self, rows: Sequence[ClaimedMessage], phase: str, rest: str) -> None:
        for row in rows:
            self.slots.tell(row)
        super()._lose(rows, phase, rest)

    def _take_waiting(self, is_taken: Callable[[ClaimedMessage], bool]) -> list[ClaimedMessage]:
        """Take out what waits for a worker, as far as `is_taken` says so."""
        items = self.waiting.items
        taken = [row for row in items if row is not None and is_taken(row)]
        if taken:
            ids = set(map(id, taken))
            kept = [row for row in items if id(row) not in ids]
            items.clear()
            items.extend(kept)
        return taken

    def take_out(self, row: ClaimedMessage) -> None:
        """`row`, which waits for a worker, goes to none; its outcome follows."""
        self._take_waiting(lambda each: each is row)

    def give_back_waiting(self) -> None:
        """Give back everything that waits for a worker."""
        self.end_gathering()
        items = self.waiting.items
        rows = [row for row in items if row is not None and not row.lease_lost]
        items.clear()
        self.give_back(rows)

    def give_back_surplus(self, surplus: Collection[ClaimedMessage]) -> None:
        """Give back `surplus`, of which some may wait for a worker; nothing of it has started."""
        ids = set(map(id, surplus))
        taken = self._take_waiting(lambda row: id(row) in ids)
        self.give_back(taken)
        for row in taken:
            # They are held until this is written, and it is about their size.
            row.payload = b""

    def give_back_stale(self, longest: float) -> None:
        """Give back what has waited for a worker for more than `longest` seconds: others may begin
        it sooner.
        """
        before = self.clock.monotonic() - longest
        if stale := self._take_waiting(lambda row: _waits_since(row) < before):
            self.give_back(stale)

    def stale_in(self, longest: float) -> float | None:
        """Seconds until a row has waited for `longest`; None if none waits."""
        items = self.waiting.items
        first = items[0] if items else None
        if first is None:
            return None
        return max(0.0, _waits_since(first) + longest - self.clock.monotonic())

    def keep_waiting(self, queues: Container[str]) -> None:
        """Give back what waits for a worker and is of none of `queues`."""
        self.end_gathering()
        if others := self._take_waiting(lambda row: row.queue not in queues):
            self.give_back([row for row in others if not row.lease_lost])

    def nack(self, batch: Batch, denied: Collection[Unit], error: BaseException) -> None:
        """The answers of the units `denied` of `batch` may not be published: queue failed attempts
        in their place.
        """
        self._drop_overtaken(batch)
        units = dict.fromkeys(s.unit for s in batch.parts if s.unit in denied)
        batch.keep([s for s in batch.parts if s.unit not in units])
        # Raises unless the table of transitions has this arrow.
        after(batch.state, Event.ANSWER_DENIED)
        for unit in units:
            if unit is not None and unit.fallback is not None:
                self.finish_all(unit.fallback(error))

    def due_for_renewal(self, lease: float, max_lease: float | None) -> list[ClaimedMessage]:
        """Rows held longer than a third of their lease; those being written right now, two thirds.

        What was locked by another transaction is due again after a quarter of a third: the lock
        may have lasted for a moment only, and the lease was not lengthened.

        Not those whose handlers have asked for more than `lease`, which would be shortened, nor
        those that are to be cancelled while their handlers go on.
        """
        now = self.clock.monotonic()
        being_written = self.being_written()
        third = lease / 3
        shorter = prefetch_lease(lease) / 3

        def is_old(row: ClaimedMessage) -> bool:
            held = now - row.renewed_monotonic
            limit = shorter if row.prefetched else third
            # A row that is being written is most likely gone in a moment: it is renewed only if
            # that takes long.
            return (
                held >= limit
                and now - row.locked_monotonic >= limit / 4
                and (held >= 2 * limit or (row.id, row.lease_token) not in being_written)
            )

        return [
            row
            for row in self.held.values()
            if is_old(row)
            and row.held_until <= now + lease
            and (row.cancelled is None or row.outcome is not None)
            and (
                max_lease is None or now - row.claimed_monotonic < max_lease or now < row.held_until
            )
        ]


def _waits_since(row: ClaimedMessage) -> float:
    """From when `row` waits for a worker (monotonic seconds): before its slot, it could start
    nowhere else.
    """
    earliest = row.claimed_monotonic if row.slot is None else row.slot.earliest
    return max(row.claimed_monotonic, earliest)
