"""The last starts under a throttle, stored compactly: equal or close times are counted together."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Self

Limit = tuple[int, int, int]
"""Rate, period (microseconds) and burst of a process that takes slots."""
Need = tuple[int, int]
"""Time for which a start counts, and the number of microseconds within which starts may be
grouped."""


class Times:
    """Sorted times with repetitions, in whole microseconds.

    A group of times has the time of its last member. So no time seems longer ago than it is, and
    decisions based on the groups never allow too many starts.
    """

    __slots__ = ("_counts", "_times")

    def __init__(self, times: Iterable[int] = ()) -> None:
        """Group equal values of `times`, which must be sorted."""
        self._times: list[int] = []
        """Of each group."""
        self._counts: list[int] = []
        """How many times there are up to the end of each group."""
        for at, same in groupby(times):
            self.add(at, sum(1 for _ in same))

    def __len__(self) -> int:
        """Return the number of times."""
        return self._counts[-1] if self._counts else 0

    @property
    def last(self) -> int:
        """The last time; 0 if there is none."""
        return self._times[-1] if self._times else 0

    def get_nth_last(self, n: int) -> int:
        """Return the `n`th time from the end, of 1 to as many as there are.

        Times of a group count as its latest, so the result may be later than the real time, never
        earlier.
        """
        return self._times[bisect_right(self._counts, len(self) - n)]

    def count_since(self, at: int) -> int:
        """Count the times at `at` or later."""
        groups = bisect_left(self._times, at)
        return len(self) - (self._counts[groups - 1] if groups else 0)

    def add(self, at: int, count: int = 1) -> None:
        """Add `at`, `count` times.

        Usually at the end. A time in the middle raises the counts of all later groups, as each is
        the total up to its end.
        """
        if not self._times or at > self._times[-1]:
            self._times.append(at)
            self._counts.append((self._counts[-1] if self._counts else 0) + count)
            return
        group = bisect_left(self._times, at)
        if self._times[group] != at:
            self._times.insert(group, at)
            self._counts.insert(group, self._counts[group - 1] if group else 0)
        self._add_to_counts(group, count)

    def remove(self, at: int, grain: int) -> bool:
        """Remove `at` once, or a time of the same group; return True if found.

        A group has the time of its last member, so `at` is found if both are in the same grain.

        Args:
            at: The time as it was added.
            grain: Times of so many microseconds may be one group.
        """
        group = bisect_left(self._times, at)
        if group == len(self._times) or self._times[group] // grain != at // grain:
            return False
        self._add_to_counts(group, -1)
        if self._counts[group] == (self._counts[group - 1] if group else 0):
            del self._times[group], self._counts[group]
        return True

    def _add_to_counts(self, first: int, count: int) -> None:
        for group in range(first, len(self._counts)):
            self._counts[group] += count

    def copy(self) -> "Times":
        """Return a copy that can be changed."""
        copied = Times()
        copied._times = self._times.copy()
        copied._counts = self._counts.copy()
        return copied

    def shift(self, offset: int) -> None:
        """Move all times by `offset` microseconds."""
        self._times = [at + offset for at in self._times]

    def to_runs(self, needs: Sequence[Need], now: int, max_count: int | None = None) -> list[int]:
        """Return the times that still count at `now` as a flat list of time, count, time, count ...

        A need is a length, for which a start counts, and a grain: starts within one grain may
        become one pair. The strictest grain of the needs for which a start counts applies. Each
        time but the first is the distance to the one before, which keeps the JSON short. Only the
        last `max_count` times are returned.
        """
        max_length = max(length for length, _ in needs)
        first = bisect_left(self._times, now - max_length)
        skipped = self._counts[first - 1] if first else 0
        if max_count is not None and len(self) - max_count > skipped:
            skipped = len(self) - max_count
            first = bisect_right(self._counts, skipped)
        runs: list[int] = []
        since = 0
        for at, count in self._merge_groups(first, needs, now):
            runs += (at - since, count - skipped)
            since = at
            skipped = count
        return runs

    def _merge_groups(
        self, first: int, needs: Sequence[Need], now: int
    ) -> Iterable[tuple[int, int]]:
        """Return (time, total count) of the groups from `first` on, merged if `needs` allow.

        Fewer groups keep the stored log small. A need says for how long a start counts, and within
        how many microseconds (a grain) starts may be one group. A merged group has its latest time,
        so that no start seems older than it is.
        """
        groups = zip(self._times[first:], self._counts[first:], strict=True)
        if all(grain == 1 for _, grain in needs):
            return groups
        merged: list[tuple[int, int]] = []
        for at, count in groups:
            grain = min(grain for length, grain in needs if at >= now - length)
            if merged and merged[-1][0] // grain == at // grain:
                merged[-1] = at, count
            else:
                merged.append((at, count))
        return merged

    def add_runs(self, runs: Sequence[int]) -> Self:
        """Add the result of `to_runs`, pairs of distance and count; returns self.

        A distance is the time since the pair before; for the first pair, since 1970.
        """
        at = 0
        for distance, count in zip(runs[::2], runs[1::2], strict=True):
            at += distance
            self.add(at, count)
        return self


class SlotLog:
    """The slots granted recently."""

    __slots__ = ("other_limits", "spaced", "starts")

    def __init__(self, starts: Times | None = None, spaced: Times | None = None) -> None:
        """Start empty, or with the given starts."""
        self.starts = Times() if starts is None else starts
        """The latest moment at which each start may be, or was."""
        self.spaced = spaced
        """The slots, which are the earliest moments of starts; None: no burst asks for them."""
        self.other_limits: dict[Limit, int] = {}
        """By which limits slots were taken, and when the last one was: old and new processes may
        run at the same time."""

    def __len__(self) -> int:
        """Return the number of known starts."""
        return len(self.starts)

    def add(self, slot: int, deadline: int, count: int = 1) -> None:
        """Add `count` starts at `slot` or later, but not after `deadline`.

        The starts count at the deadline, so that no period gets too many, however late they really
        are. The slots themselves are stored only if a throttle limits their distance.
        """
        self.starts.add(deadline, count)
        if self.spaced is not None:
            self.spaced.add(slot, count)

    def copy(self) -> "SlotLog":
        """Return a copy that can be changed."""
        log = SlotLog(self.starts.copy(), None if self.spaced is None else self.spaced.copy())
        log.other_limits = self.other_limits
        return log

    def shift(self, offset: int) -> None:
        """Move all starts by `offset` microseconds."""
        self.starts.shift(offset)
        if self.spaced is not None:
            self.spaced.shift(offset)
        self.other_limits = {limit: seen + offset for limit, seen in self.other_limits.items()}
