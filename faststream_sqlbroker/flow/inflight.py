"""What one subscriber holds: claimed rows, their leases, and the outcomes not yet written."""

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic

from faststream_sqlbroker.core.outcome import Release
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement
from faststream_sqlbroker.core.settle import SettleRules, settle


def release(row: ClaimedMessage) -> Settlement:
    """Hand a row back that was not started: as before the claim, uncharged."""
    return settle(row, Release(), SettleRules(), ended_after=0.0, attempted=False)


class Inflight:
    """The rows leased to one subscriber of this process, from the claim until the flush has written them.

    A row is in exactly one place: `waiting` (claimed, not started), with a worker, or in `outcomes`
    (settled, not written). `held` knows them all by id, for renewal.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self.waiting: asyncio.Queue[ClaimedMessage | None] = asyncio.Queue()
        self.held: dict[int, ClaimedMessage] = {}
        self.outcomes: list[Settlement] = []
        self.flushing: set[int] = set()
        self.running = 0
        self.wants_room = False
        self.on_outcome: Callable[[], None] = lambda: None
        self.on_room: Callable[[], None] = lambda: None
        self.claimed_count = 0
        self.settled_count = 0
        self.lease_lost_count = 0
        self.settle_unknown_count = 0

    def add(self, rows: Iterable[ClaimedMessage]) -> None:
        """Take in freshly claimed rows."""
        now = monotonic()
        for row in rows:
            row.claimed_monotonic = row.renewed_monotonic = now
            older = self.held.get(row.id)
            if older is not None:
                # Its lease ran out and the row came back to us: the older outcome is void.
                self.forget(older)
            self.held[row.id] = row
            self.claimed_count += 1
            self.waiting.put_nowait(row)

    def forget(self, row: ClaimedMessage) -> None:
        """The row's lease is gone: nothing of it may be written any more."""
        row.lease_lost = True
        if self.held.get(row.id) is row:
            del self.held[row.id]
        self.outcomes = [s for s in self.outcomes if s.id != row.id or s.lease_token != row.lease_token]

    @property
    def empty(self) -> bool:
        """Whether nothing is held, nor waits to be written."""
        return not (self.held or self.outcomes or self.flushing or self.running)

    def finish(self, settlement: Settlement) -> None:
        """Queue a settlement for the flush."""
        self.outcomes.append(settlement)
        self.on_outcome()

    def written(self, ids: Iterable[int], tokens: dict[int, object]) -> None:
        """The flush has dealt with these rows."""
        for message_id in ids:
            row = self.held.get(message_id)
            if row is not None and row.lease_token == tokens.get(message_id):
                del self.held[message_id]

    def due_for_renewal(self, lease: float, max_lease: float | None) -> list[ClaimedMessage]:
        """Rows held longer than a third of their lease, but those being written right now."""
        now = monotonic()
        old = now - lease / 3
        return [
            row
            for row in self.held.values()
            if row.renewed_monotonic <= old
            and row.id not in self.flushing
            and (max_lease is None or now - row.claimed_monotonic < max_lease)
        ]
