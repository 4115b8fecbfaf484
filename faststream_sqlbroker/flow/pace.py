"""When a subscriber claims again: by what its last claim has found."""

from dataclasses import dataclass
from enum import Enum

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import Claimed
from faststream_sqlbroker.flow.settings import ConsumerSettings

FIRST_IDLE_WAIT = 0.01
"""Seconds to the first look after the queue ran dry; each following wait is half as long again."""
IDLE_GROWTH = 1.5
"""By how much each such wait is longer than the one before."""
LONGEST_UNTOLD = 1.0
"""Longest pause of a subscriber that is told of messages, while something is due that it could not
claim: no wake-up says when it can.
"""
UNREAD_SHARE = 3
"""A claim that has to read on pauses for so many times its own length."""


class Found(Enum):
    """What a claim has found."""

    FULL = "as many rows as there was room for, or more that is known to be claimable"
    UNREAD = "not all was read yet, or another claims right now"
    HELD = "nothing more may start before a known time, whatever comes"
    FEWER = "fewer rows than there was room for: no more is due"


@dataclass(slots=True)
class ClaimResult:
    """What came of a claim."""

    rows: Claimed
    again: float | None = None
    """In how many seconds to claim again; None: not known."""
    gated: bool = False
    """Whether nothing more can start before, whatever comes."""
    more: bool = False
    """Whether there is more to claim at once."""

    @property
    def met(self) -> int:
        """How much of its room it has used."""
        return len(self.rows) + len(self.rows.suspects)

    def found(self, limit: int) -> Found:
        """What it has found of `limit` rows that it was to find."""
        if self.met >= limit or self.more or (self.met and self.again == 0):
            return Found.FULL
        if self.again == 0:
            return Found.UNREAD
        return Found.HELD if self.gated and self.again is not None else Found.FEWER


class Pace:
    """Seconds from one claim to the next."""

    def __init__(self, settings: ConsumerSettings, clock: Clock) -> None:
        """`settings` give the shortest and the longest pause."""
        self._shortest = settings.min_fetch_interval
        self._longest = LONGEST_UNTOLD if settings.told_only else settings.max_fetch_interval
        self._clock = clock
        self._first = min(max(self._shortest, FIRST_IDLE_WAIT), self._longest)
        self.idle_wait = self._first
        """The next pause at an empty queue."""
        self._not_before = float("-inf")

    @property
    def too_early(self) -> float:
        """Seconds in which nothing may be claimed, even after a wake-up; 0 or less: none."""
        return self._not_before - self._clock.monotonic()

    @property
    def rests(self) -> bool:
        """Whether the queue has been empty for long: the next pause is the longest."""
        return self.idle_wait >= self._longest

    def quicken(self) -> None:
        """Something may have come: pauses at an empty queue begin with the shortest again."""
        self.idle_wait = self._first

    def after_full(self, *, pause: bool) -> float:
        """There is more: the least pause, which also binds wake-ups; without `pause` none."""
        self.quicken()
        interval = self._shortest if pause else 0.0
        self._not_before = self._clock.monotonic() + interval
        return interval

    def after_unread(self, took: float) -> float:
        """A claim that `took` so long has to read on, or was too late: soon, but for a part of the
        time at most; at random, as those that have met once would meet again.
        """
        return max(self._shortest, self._clock.jitter(UNREAD_SHARE * took))

    def until(self, again: float) -> float:
        """Nothing starts before."""
        return min(again, self._longest)

    def idle(self) -> float:
        """The pause at an empty queue, longer each time."""
        wait = self.idle_wait
        self.idle_wait = min(self._longest, wait * IDLE_GROWTH)
        return wait
