"""When the last starts under a throttle were, as few numbers: equal ones, or those of a short time,
are counted together.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Self

Limit = tuple[int, int, int]
"""Rate, period (microseconds) and burst of those who take slots."""
Need = tuple[int, int]
"""For how long a start counts, and within how many microseconds starts may be one group."""


class Times:
    """Times in their order, with repetitions; whole microseconds.

    A group of times has that of its last one. So none seems to be longer ago than it is, and what
    is decided by them never lets too many start.
    """

    __slots__ = ("_counts", "_times")

    def __init__(self, times: Iterable[int] = ()) -> None:
        """Equal ones of `times`, which are sorted, are one group."""
        self._times: list[int] = []
        """Of each group."""
        self._counts: list[int] = []
        """How many times there are up to the end of each group."""
        for at, same in groupby(times):
            self.add(at, sum(1 for _ in same))

    def __len__(self) -> int:
        """How many times there are."""
        return self._counts[-1] if self._counts else 0

    @property
    def last(self) -> int:
        """The last time; 0 if there is none."""
        return self._times[-1] if self._times else 0

    def nth_last(self, n: int) -> int:
        """The `n`th time from the end, of 1 to as many as there are; never too early."""
        return self._times[bisect_right(self._counts, len(self) - n)]

    def count_since(self, at: int) -> int:
        """How many times are at `at` or later."""
        groups = bisect_left(self._times, at)
        return len(self) - (self._counts[groups - 1] if groups else 0)

    def add(self, at: int, count: int = 1) -> None:
        """Add `at`, `count` times."""
        if not self._times or at > self._times[-1]:
            self._times.append(at)
            self._counts.append((self._counts[-1] if self._counts else 0) + count)
            return
        group = bisect_left(self._times, at)
        if self._times[group] != at:
            self._times.insert(group, at)
            self._counts.insert(group, self._counts[group - 1] if group else 0)
        self._raise(group, count)

    def remove(self, at: int, grain: int) -> bool:
        """Take `at` out once, or one of the group that it may have joined; whether it was there.

        Args:
            at: As it was added.
            grain: Times of so many microseconds may be one group.
        """
        group = bisect_left(self._times, at)
        if group == len(self._times) or self._times[group] // grain != at // grain:
            return False
        self._raise(group, -1)
        if self._counts[group] == (self._counts[group - 1] if group else 0):
            del self._times[group], self._counts[group]
        return True

    def _raise(self, group: int, count: int) -> None:
        for each in range(group, len(self._counts)):
            self._counts[each] += count

    def copy(self) -> "Times":
        """One to change."""
        copied = Times()
        copied._times = self._times.copy()
        copied._counts = self._counts.copy()
        return copied

    def move(self, by: int) -> None:
        """Let all times be `by` microseconds later."""
        self._times = [at + by for at in self._times]

    def runs(self, needs: Sequence[Need], now: int, most: int | None = None) -> list[int]:
        """The groups that count at `now` or later, as `needs` say, of the last `most` times: pairs
        of a time and a count; each time but the first is the distance to the one before.

        Each group is as long as the strictest of those allows for whom it counts.
        """
        longest = max(length for length, _ in needs)
        first = bisect_left(self._times, now - longest)
        before = self._counts[first - 1] if first else 0
        if most is not None and len(self) - most > before:
            before = len(self) - most
            first = bisect_right(self._counts, before)
        found: list[int] = []
        since = 0
        for at, count in self._merged(first, needs, now):
            found += (at - since, count - before)
            since = at
            before = count
        return found

    def _merged(self, first: int, needs: Sequence[Need], now: int) -> Iterable[tuple[int, int]]:
        groups = zip(self._times[first:], self._counts[first:], strict=True)
        if all(grain == 1 for _, grain in needs):
            return groups
        found: list[tuple[int, int]] = []
        for at, count in groups:
            grain = min(grain for length, grain in needs if at >= now - length)
            if found and found[-1][0] // grain == at // grain:
                found[-1] = at, count
            else:
                found.append((at, count))
        return found

    def add_runs(self, runs: Sequence[int]) -> Self:
        """Add what `runs` has returned; returns itself."""
        at = 0
        for distance, count in zip(runs[::2], runs[1::2], strict=True):
            at += distance
            self.add(at, count)
        return self


class SlotLog:
    """What was granted lately."""

    __slots__ = ("others", "spaced", "starts")

    def __init__(self, starts: Times | None = None, spaced: Times | None = None) -> None:
        """Begin empty, or with these starts."""
        self.starts = Times() if starts is None else starts
        """The latest moment at which each start may be, or was."""
        self.spaced = spaced
        """The slots, which are the earliest moments of starts; None: no
        burst asks for them."""
        self.others: dict[Limit, int] = {}
        """By which limits slots were taken, and when the last one was: old and new processes may
        run at the same time."""

    def __len__(self) -> int:
        """How many starts are known."""
        return len(self.starts)

    def add(self, slot: int, deadline: int, count: int = 1) -> None:
        """`count` starts are to be at `slot` or later, none after `deadline`."""
        self.starts.add(deadline, count)
        if self.spaced is not None:
            self.spaced.add(slot, count)

    def copy(self) -> "SlotLog":
        """One to change."""
        log = SlotLog(self.starts.copy(), None if self.spaced is None else self.spaced.copy())
        log.others = self.others
        return log

    def move(self, by: int) -> None:
        """Let all starts be `by` microseconds later."""
        self.starts.move(by)
        if self.spaced is not None:
            self.spaced.move(by)
        self.others = {limit: seen + by for limit, seen in self.others.items()}
