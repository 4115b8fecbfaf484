"""Run suspected poison messages alone, so that they do no harm to other messages.

A process that dies costs each message that it held a delivery. Without care, the neighbours of a
poison message would reach the delivery limit together with it, unhandled. So a message with two or
more lost leases (with `max_deliveries` 2 one), or with a single delivery left, is a suspect and
runs alone: only where its subscriber holds nothing else, one at a time, beginning with the fewest
lost leases (most suspects are neighbours). No claim leases a suspect together with other messages,
which would charge it with what they do; the claim only reports it (`core.suspects`).

The price is bounded. Other messages wait at most `MAX_SOLO_TIME` seconds for a running suspect, and
then have at least as long, and `MIN_OTHERS_TIME` seconds, for themselves. They wait at most
`SOLO_WAIT` seconds of every `SOLO_WAIT` + `SOLO_PAUSE` for the process to become free. A suspect
that has waited `SOLO_LIMIT` seconds runs together with others, unless it has a single delivery
left: for that, each wait is twice as long as the one before, and so is the pause after it.
"""

from collections.abc import Mapping
from enum import Enum

from faststream_sqlbroker.core.suspects import Suspect

MAX_SOLO_TIME = 10.0
"""Seconds a suspect may keep everything else waiting; a message that kills its process does so
soon.
"""
MIN_OTHERS_TIME = 1.0
"""Minimum seconds for other messages after a suspect."""
SOLO_WAIT = 2.0
"""Seconds that other messages wait for the process to become free for a suspect."""
SOLO_PAUSE = 10.0
"""Minimum seconds from such a wait, if it was in vain, to the next."""
SOLO_LIMIT = 300.0
"""Seconds after which a suspect runs together with other messages, unless this is its last
delivery.
"""


class ClaimTarget(Enum):
    """Purpose of the next claim."""

    ANY = "all due messages"
    OTHERS = "due messages, but no suspects"
    SUSPECT = "one known suspect"
    NONE = "no message: a suspect runs"
    DRAIN = "no message: release unstarted messages, so that a suspect can run"


class SoloScheduler:
    """Decides whether the next claim is for suspects or for other messages.

    Times are seconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self._suspects: dict[
            int, tuple[Suspect, float]
        ] = {}  # id → the suspect, when it was first seen
        self._waited: dict[int, tuple[float, float]] = {}
        """Suspects that were waited for in vain, and may be gone.

        When each was first seen, and when it was last waited for.
        """
        self._logged_at: dict[int, float] = {}
        """When suspects were returned as new."""
        self._started_at: float | None = None
        self._drain_until: float | None = None
        self._drain_seconds = SOLO_WAIT
        """Duration of the last wait for the process to become free."""
        self._others_until = float("-inf")

    def _check_running_suspect(self, *, is_alone: bool, now: float) -> bool:
        """Return True while a running suspect keeps other messages from being claimed.

        A suspect is a message that may have killed its process. After it has ended (`is_alone`: the
        process holds nothing), or after `MAX_SOLO_TIME` seconds, other messages get at least as
        much time.
        """
        if self._started_at is None:
            return False
        elapsed = now - self._started_at
        if not is_alone and elapsed < MAX_SOLO_TIME:
            return True
        self._started_at = None
        self._others_until = now + max(MIN_OTHERS_TIME, min(elapsed, MAX_SOLO_TIME))
        return False

    def choose_target(self, *, is_alone: bool, now: float) -> ClaimTarget:
        """Return the purpose of the next claim; `is_alone` is True if the process holds nothing.

        A suspect, a message that may have killed its process, runs while nothing else does. For
        that, claims stop for some seconds (DRAIN). If that was in vain, other messages get time.
        """
        if self._check_running_suspect(is_alone=is_alone, now=now):
            return ClaimTarget.NONE
        if not self._suspects:
            return ClaimTarget.ANY
        if now < self._others_until:
            return ClaimTarget.OTHERS
        if is_alone or self._list_overdue(now):
            self._drain_until = None
            return ClaimTarget.SUSPECT
        if self._drain_until is None:
            # An old suspect, which still may not run with others, is on its last delivery.
            self._drain_seconds = 2 * self._drain_seconds if self._list_old(now) else SOLO_WAIT
            self._drain_until = now + self._drain_seconds
        if now < self._drain_until:
            return ClaimTarget.DRAIN
        self._drain_until = None
        self._others_until = now + max(SOLO_PAUSE, self._drain_seconds)
        # Another process may have handled them: only a claim that reports them again counts.
        self._waited |= {i: (self._suspects.pop(i)[1], now) for i in self._list_old(now)}
        return ClaimTarget.OTHERS

    def has_waiting(self, now: float) -> bool:
        """Return True if a suspect waits, and other messages have had their time.

        A suspect is a message that may have killed its process. The next claim then comes at once.
        """
        return bool(self._suspects) and now >= self._others_until

    def pop_suspect(self, now: float, *, is_alone: bool) -> int:
        """Remove the next suspect and return the message id.

        A suspect (a message that may have killed its process) is claimed by itself. Suspects that
        have waited for `SOLO_LIMIT` seconds come first, then those with the fewest lost leases.
        """
        candidates = (
            (self._list_old(now) or self._suspects) if is_alone else self._list_overdue(now)
        )
        message_id = min(candidates, key=lambda i: self._suspects[i])
        del self._suspects[message_id]
        return message_id

    def record_start(self, *, is_alone: bool, now: float) -> None:
        """Record that a suspect was claimed, which blocks other claims if `is_alone`.

        A suspect is a message that may have killed its process. Otherwise it runs with others.
        """
        if is_alone:
            self._started_at = now
            self._drain_seconds = SOLO_WAIT

    def add_suspects(self, suspects: Mapping[int, Suspect], now: float) -> list[int]:
        """Add the `suspects` of a claim: messages that may kill their process, left unclaimed.

        A suspect that is reported again keeps the time since when it waits. Returns the ids of new
        suspects, each at most once in `SOLO_LIMIT` seconds: one that is delivered again and again
        is reported after each delivery.
        """
        # A message that is reported only much later, such as after a redrive, is a new suspect.
        self._waited = {i: w for i, w in self._waited.items() if now - w[1] < SOLO_LIMIT}
        self._logged_at = {i: at for i, at in self._logged_at.items() if now - at < SOLO_LIMIT}
        new_ids = [i for i in suspects if i not in self._suspects and i not in self._logged_at]
        self._logged_at |= dict.fromkeys(new_ids, now)
        for message_id, suspect in suspects.items():
            since, _ = self._waited.pop(message_id, (now, now))
            _, first_seen = self._suspects.get(message_id, (suspect, since))
            self._suspects[message_id] = (suspect, first_seen)
        return new_ids

    def skip_others(self, now: float) -> None:
        """End the time of other messages, because only suspects are due."""
        self._others_until = now

    def _list_old(self, now: float) -> list[int]:
        """Return the suspects that have waited for `SOLO_LIMIT` seconds to run alone.

        Not all may run with other messages now, see `_list_overdue`.
        """
        return [
            i for i, (_, first_seen) in self._suspects.items() if now - first_seen >= SOLO_LIMIT
        ]

    def _list_overdue(self, now: float) -> list[int]:
        """Return the suspects that have waited too long to run alone, and may run with others.

        A suspect (a message that may kill its process) on its last delivery still waits to run
        alone.
        """
        return [i for i in self._list_old(now) if not self._suspects[i][0].is_last]
