"""The slots that a throttle has granted, as few numbers: equal ones, or those of a short time, are
counted together.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Self

Limit = tuple[int, int, int]
"""Rate, period (microseconds) and burst of those who take slots."""


class SlotLog:
    """Slots in the order of time; whole microseconds.

    A group of slots has the time of its last one. So a slot never seems to be longer ago than it
    is, and what is decided by the log never lets too many start.
    """

    __slots__ = ("_counts", "_grain", "_times", "others")

    def __init__(self, grain: int = 1, slots: Iterable[int] = ()) -> None:
        """Slots of the same `grain` microseconds are one group; 1: only equal ones."""
        self._grain = grain
        self._times: list[int] = []
        """Of each group."""
        self._counts: list[int] = []
        """How many slots there are up to the end of each group."""
        self.others: dict[Limit, int] = {}
        """By which limits slots were taken, and when the last one was: old and new processes may
        run at the same time."""
        self.add(slots)

    def __len__(self) -> int:
        """How many slots are known."""
        return self._counts[-1] if self._counts else 0

    @property
    def last(self) -> int:
        """The last slot; 0 if there is none."""
        return self._times[-1] if self._times else 0

    def nth_last(self, n: int) -> int:
        """The `n`th slot from the end, of 1 to as many as there are; at most a grain too late."""
        return self._times[bisect_right(self._counts, len(self) - n)]

    def append(self, slot: int, count: int = 1) -> None:
        """Add `count` slots at `slot`, which is the last or later."""
        total = len(self) + count
        if self._times and slot // self._grain == self._times[-1] // self._grain:
            self._times[-1] = slot
            self._counts[-1] = total
        else:
            self._times.append(slot)
            self._counts.append(total)

    def add(self, slots: Iterable[int]) -> Self:
        """Append each of `slots`; returns the log."""
        for slot in slots:
            self.append(slot)
        return self

    def copy(self) -> "SlotLog":
        """One to change."""
        log = SlotLog(self._grain)
        log._times = self._times.copy()
        log._counts = self._counts.copy()
        log.others = self.others
        return log

    def runs(self, most: int) -> list[int]:
        """The groups of the last `most` slots: pairs of a time and a count; each time but the first
        is the distance to the one before.
        """
        first = bisect_right(self._counts, max(0, len(self) - most))
        before = max(0, len(self) - most)
        found: list[int] = []
        since = 0
        for time, count in zip(self._times[first:], self._counts[first:], strict=True):
            found += (time - since, count - before)
            since = time
            before = count
        return found

    def add_runs(self, runs: Sequence[int]) -> None:
        """Append what `runs` has returned, which need not have the same grain."""
        at = 0
        for distance, count in zip(runs[::2], runs[1::2], strict=True):
            at += distance
            self.append(at, count)
