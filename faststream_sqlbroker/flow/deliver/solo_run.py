"""Keep a message that may have killed its process away from the others.

A process that dies costs every message it held a delivery. Without care, the neighbours of a poison
message would reach the delivery limit together with it, unhandled. So a message with two or more
lost leases (with `max_deliveries` 2 one), or with a single delivery left, a suspect, runs alone:
only where its subscriber holds nothing else, one at a time, those with the fewest lost leases first
(most of them are neighbours). No claim leases a suspect together with others, which would charge it
with what they do; it is told of it (`core.suspects`). The price is bounded. The rest waits at most
`ALONE` seconds for a suspect that runs, and then has at least as long, and `SLICE` seconds, for
itself; it waits at most `SOLO_WAIT` seconds of every `SOLO_WAIT` + `SOLO_PAUSE` for the process to
become free. A suspect that has waited `SOLO_LIMIT` seconds runs in company, unless it has a single
delivery left: for that, each wait is twice as long as the one before, and so is the pause after it.
"""

from collections.abc import Mapping
from enum import Enum

from faststream_sqlbroker.core.suspects import Suspect

ALONE = 10.0
"""Seconds a suspect may keep everything else waiting; what kills its process does so soon."""
SLICE = 1.0
"""Least seconds that the rest has for itself after a suspect."""
SOLO_WAIT = 2.0
"""Seconds that the rest waits for the process to become free for a suspect."""
SOLO_PAUSE = 10.0
"""Least seconds from such a wait that was in vain to the next."""
SOLO_LIMIT = 300.0
"""Seconds after which a suspect that is not on its last delivery runs in company."""


class Turn(Enum):
    """What the next claim is for."""

    ANY = "whatever is due"
    OTHERS = "what is due, but no suspects"
    SUSPECT = "one known suspect"
    NONE = "nothing: a suspect runs"
    DRAIN = "nothing: give back what has not started, so that a suspect can run"


class SoloRuns:
    """Decides whose turn it is. Times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[Suspect, float]
        ] = {}  # id → what it is, when it was first seen
        self._started_at: float | None = None
        self._hold_until: float | None = None
        self._hold = SOLO_WAIT
        """The length of the last hold."""
        self._others_until = float("-inf")

    def _still_runs(self, *, alone: bool, now: float) -> bool:
        """Whether a suspect runs that may keep everything else waiting; else the others' time
        begins.
        """
        if self._started_at is None:
            return False
        ran = now - self._started_at
        if not alone and ran < ALONE:
            return True
        self._started_at = None
        self._others_until = now + max(SLICE, min(ran, ALONE))
        return False

    def turn(self, *, alone: bool, now: float) -> Turn:
        """What to claim; `alone` says that the process holds nothing."""
        if self._still_runs(alone=alone, now=now):
            return Turn.NONE
        if not self._known:
            return Turn.ANY
        if now < self._others_until:
            return Turn.OTHERS
        if alone or self._impatient(now):
            self._hold_until = None
            return Turn.SUSPECT
        if self._hold_until is None:
            self._hold = 2 * self._hold if self._old(now) else SOLO_WAIT
            self._hold_until = now + self._hold
        if now < self._hold_until:
            return Turn.DRAIN
        self._hold_until = None
        self._others_until = now + max(SOLO_PAUSE, self._hold)
        return Turn.OTHERS

    def waits(self, now: float) -> bool:
        """Whether a suspect waits for its turn, and the rest has had its time."""
        return bool(self._known) and now >= self._others_until

    def next_suspect(self, now: float, *, alone: bool) -> int:
        """The id of the suspect with the fewest lost leases (of those that are old, if any); it is
        no longer known.
        """
        candidates = (self._old(now) or self._known) if alone else self._impatient(now)
        chosen = min(candidates, key=lambda i: self._known[i])
        del self._known[chosen]
        return chosen

    def started(self, *, alone: bool, now: float) -> None:
        """A suspect has been claimed."""
        if alone:
            self._started_at = now
            self._hold = SOLO_WAIT

    def met(self, suspects: Mapping[int, Suspect], now: float) -> None:
        """A claim has met `suspects`."""
        for message_id, suspect in suspects.items():
            _, first_seen = self._known.get(message_id, (suspect, now))
            self._known[message_id] = (suspect, first_seen)

    def nothing_else(self, now: float) -> None:
        """There are no others than suspects."""
        self._others_until = now

    def _old(self, now: float) -> list[int]:
        return [i for i, (_, first_seen) in self._known.items() if now - first_seen >= SOLO_LIMIT]

    def _impatient(self, now: float) -> list[int]:
        """Those who run in company by now."""
        return [i for i in self._old(now) if not self._known[i][0].last]
