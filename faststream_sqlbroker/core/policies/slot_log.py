"""The slots that a throttle has granted, as few numbers: equal ones, or those of a short time, are
counted together.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Self

Limit = tuple[int, int, int]
"""Rate, period (microseconds) and burst of those who take slots."""
Need = tuple[int, int]
"""How many of the last slots are needed, and within how many microseconds they may be one group."""


class SlotLog:
    """Slots in the order of time; whole microseconds.

    A group of slots has the time of its last one. So a slot never seems to be longer ago than it
    is, and what is decided by the log never lets too many start.
    """

    __slots__ = ("_counts", "_times", "others")

    def __init__(self, slots: Iterable[int] = ()) -> None:
        """Equal ones of `slots` are one group."""
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
        """The `n`th slot from the end, of 1 to as many as there are; never too early."""
        return self._times[bisect_right(self._counts, len(self) - n)]

    def count_since(self, at: int) -> int:
        """How many slots are at `at` or later."""
        groups = bisect_left(self._times, at)
        return len(self) - (self._counts[groups - 1] if groups else 0)

    def append(self, slot: int, count: int = 1) -> None:
        """Add `count` slots at `slot`, which is the last or later."""
        total = len(self) + count
        if self._times and slot == self._times[-1]:
            self._counts[-1] = total
        else:
            self._times.append(slot)
            self._counts.append(total)

    def add(self, slots: Iterable[int]) -> Self:
        """Append each of `slots`; returns the log."""
        for slot, same in groupby(slots):
            self.append(slot, sum(1 for _ in same))
        return self

    def copy(self) -> "SlotLog":
        """One to change."""
        log = SlotLog()
        log._times = self._times.copy()
        log._counts = self._counts.copy()
        log.others = self.others
        return log

    def runs(self, needs: Sequence[Need]) -> list[int]:
        """The groups of the last slots, as many as `needs` say: pairs of a time and a count; each
        time but the first is the distance to the one before.

        Each group is as long as the strictest of those allows that need its newest slot.
        """
        most = max(needed for needed, _ in needs)
        before = max(0, len(self) - most)
        first = bisect_right(self._counts, before)
        found: list[int] = []
        since = 0
        for time, count in self._merged(first, needs):
            found += (time - since, count - before)
            since = time
            before = count
        return found

    def _merged(self, first: int, needs: Sequence[Need]) -> Iterable[tuple[int, int]]:
        groups = zip(self._times[first:], self._counts[first:], strict=True)
        if all(grain == 1 for _, grain in needs):
            return groups
        found: list[tuple[int, int]] = []
        for time, count in groups:
            newest = len(self) - count + 1
            grain = min(grain for needed, grain in needs if needed >= newest)
            if found and found[-1][0] // grain == time // grain:
                found[-1] = time, count
            else:
                found.append((time, count))
        return found

    def add_runs(self, runs: Sequence[int]) -> None:
        """Append what `runs` has returned."""
        at = 0
        for distance, count in zip(runs[::2], runs[1::2], strict=True):
            at += distance
            self.append(at, count)
