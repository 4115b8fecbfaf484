"""Debounce as design says it: a burst, who is in it, when it ends, which of it is delivered."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from faststream_sqlbroker.core.policies import Debounce

Arrival = tuple[int, int]
"""Time and id."""


@dataclass
class Burst:
    """Messages of one key that have come with no more than the window between them."""

    policy: Debounce
    arrivals: list[Arrival] = field(default_factory=list)
    """In the order in which they became known."""

    @property
    def end(self) -> int:
        """When it ends if nobody else comes."""
        start, last = self.arrivals[0][0], max(at for at, _ in self.arrivals)
        if self.policy.edge == "leading":
            return start + self.policy.window
        quiet = last + self.policy.window
        return quiet if self.policy.max_wait is None else min(quiet, start + self.policy.max_wait)

    @property
    def chosen(self) -> int:
        """The one that is delivered."""
        ids = [message for _, message in self.arrivals]
        return ids[0] if self.policy.edge == "leading" else max(ids)

    @property
    def due(self) -> int:
        """When."""
        return self.arrivals[0][0] if self.policy.edge == "leading" else self.end

    @property
    def gone(self) -> set[int]:
        """The others, which are superseded."""
        return {message for _, message in self.arrivals} - {self.chosen}


def partition(policy: Debounce, arrivals: Iterable[Arrival]) -> list[Burst]:
    """The bursts of one key, of which none was delivered meanwhile."""
    bursts: list[Burst] = []
    for arrival in arrivals:
        if not bursts or arrival[0] > bursts[-1].end:
            bursts.append(Burst(policy))
        bursts[-1].arrivals.append(arrival)
    return bursts
