"""Keep a message that may have killed its process away from the others.

A process that dies costs every message it held a delivery. Without care, the neighbours of a poison message
would reach the delivery limit together with it, unhandled. So a message with two or more lost leases, a
suspect, runs alone: only in a process that holds nothing else, one at a time, those with the fewest losses
first (most of them are neighbours), and every other claim is for the rest. The price is bounded: the rest
waits at most `ALONE` seconds for a suspect that runs, and `HOLD` seconds of every `HOLD` + `PAUSE` for the
process to become free of others; a suspect that has waited `PATIENCE` seconds runs in company.
"""

from collections.abc import Sequence
from enum import Enum

from faststream_sqlbroker.core.rows import SUSPECT_AFTER, ClaimedMessage

ALONE = 10.0
"""Seconds a suspect may keep everything else waiting; what kills its process does so soon."""
HOLD = 2.0
PAUSE = 10.0
PATIENCE = 300.0


def lost_leases(row: ClaimedMessage) -> int:
    """Earlier deliveries of `row` that ended without an attempt."""
    return row.deliveries_count - 1 - row.attempts_count


class Turn(Enum):
    """What the next claim is for."""

    ANY = "whatever is due"
    OTHERS = "what is due, but no suspects"
    SUSPECT = "one known suspect"
    NONE = "nothing: a suspect runs"
    DRAIN = "nothing: give back what has not started, so that a suspect can run"


class Isolation:
    """Decides whose turn it is. Times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        """Nothing is suspected."""
        self._known: dict[int, int] = {}  # id → lost leases
        self._others_next = False
        self._alone_until: float | None = None
        self._hold_until: float | None = None
        self._pause_until = self._company_at = float("-inf")

    def turn(self, *, alone: bool, now: float) -> Turn:
        """What to claim; `alone` says that the process holds nothing."""
        if self._alone_until is not None and (alone or now >= self._alone_until):
            self._alone_until = None
        if self._alone_until is not None:
            return Turn.NONE
        if not self._known:
            return Turn.ANY
        if self._others_next or now < self._pause_until:
            return Turn.OTHERS
        if alone or now >= self._company_at:
            self._hold_until = None
            return Turn.SUSPECT
        if self._hold_until is None:
            self._hold_until = now + HOLD
        if now < self._hold_until:
            return Turn.DRAIN
        self._hold_until, self._pause_until = None, now + PAUSE
        return Turn.OTHERS

    def waits(self, now: float) -> bool:
        """Whether a suspect waits for its turn."""
        return bool(self._known) and not self._others_next and now >= self._pause_until

    def next_suspect(self) -> int:
        """The id of the suspect with the fewest losses; it is no longer known."""
        chosen = min(self._known, key=self._known.__getitem__)
        del self._known[chosen]
        return chosen

    def started(self, *, alone: bool, now: float) -> None:
        """A suspect has been claimed."""
        self._others_next = True
        self._company_at = now + PATIENCE
        if alone:
            self._alone_until = now + ALONE

    def sort_out(self, rows: Sequence[ClaimedMessage], now: float) -> Sequence[ClaimedMessage]:
        """Take note of the suspects among `rows`, which are to be given back; the others."""
        self._others_next = False
        suspects = {row.id: lost_leases(row) for row in rows if lost_leases(row) >= SUSPECT_AFTER}
        if not suspects:
            return rows
        if not self._known:
            self._company_at = now + PATIENCE
        self._known |= suspects
        return [row for row in rows if row.id not in suspects]
