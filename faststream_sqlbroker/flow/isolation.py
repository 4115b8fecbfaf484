"""Keep a message that may have killed its process away from the others.

A process that dies costs every message it held a delivery. Without care, the neighbours of a poison message
would reach the delivery limit together with it, unhandled. So a message with two or more lost leases, a
suspect, runs alone: only in a process that holds nothing else, one at a time, those with the fewest losses
first (most of them are neighbours). The price is bounded. The rest waits at most `ALONE` seconds for a
suspect that runs, and then has at least as long, and `SLICE` seconds, for itself; it waits at most `HOLD`
seconds of every `HOLD` + `PAUSE` for the process to become free. A suspect that has waited `PATIENCE`
seconds runs in company.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from faststream_sqlbroker.core.rows import SUSPECT_AFTER, ClaimedMessage

ALONE = 10.0
"""Seconds a suspect may keep everything else waiting; what kills its process does so soon."""
SLICE = 1.0
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
        self._known: dict[int, tuple[int, float]] = {}  # id → lost leases, when it was first seen
        self._started_at: float | None = None
        self._hold_until: float | None = None
        self._others_until = float("-inf")

    def turn(self, *, alone: bool, now: float) -> Turn:
        """What to claim; `alone` says that the process holds nothing."""
        if self._started_at is not None:
            ran = now - self._started_at
            if not alone and ran < ALONE:
                return Turn.NONE
            self._started_at, self._others_until = None, now + max(SLICE, min(ran, ALONE))
        if not self._known:
            return Turn.ANY
        if now < self._others_until:
            return Turn.OTHERS
        if alone or self._impatient(now):
            self._hold_until = None
            return Turn.SUSPECT
        if self._hold_until is None:
            self._hold_until = now + HOLD
        if now < self._hold_until:
            return Turn.DRAIN
        self._hold_until, self._others_until = None, now + PAUSE
        return Turn.OTHERS

    def waits(self, now: float) -> bool:
        """Whether a suspect waits for its turn, and the rest has had its time."""
        return bool(self._known) and now >= self._others_until

    def next_suspect(self, now: float) -> int:
        """The id of the suspect with the fewest losses (of those without patience, if any); it is no longer known."""
        candidates = self._impatient(now) or self._known
        chosen = min(candidates, key=lambda i: self._known[i])
        del self._known[chosen]
        return chosen

    def started(self, *, alone: bool, now: float) -> None:
        """A suspect has been claimed."""
        if alone:
            self._started_at = now

    def sort_out(self, rows: Sequence[ClaimedMessage], now: float) -> Sequence[ClaimedMessage]:
        """Take note of the suspects among `rows`, which are to be given back; the others."""
        if not rows:
            self._others_until = now  # there are no others
        suspects = {row.id: lost_leases(row) for row in rows if lost_leases(row) >= SUSPECT_AFTER}
        self.note(suspects, now)
        return [row for row in rows if row.id not in suspects] if suspects else rows

    def note(self, suspects: Mapping[int, int], now: float) -> None:
        """Know suspects by the leases they have lost."""
        for message_id, lost in suspects.items():
            _, first_seen = self._known.get(message_id, (lost, now))
            self._known[message_id] = (lost, first_seen)

    def _impatient(self, now: float) -> list[int]:
        return [i for i, (_, first_seen) in self._known.items() if now - first_seen >= PATIENCE]
