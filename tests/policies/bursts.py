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
    late: set[int] = field(default_factory=set)
    """Messages of it that became known after its end."""
    open: bool = True
    """Whether others may still join."""
    delivered: bool = False

    @property
    def end(self) -> int:
        """When it ends if no other message arrives."""
        start = self.arrivals[0][0]
        last = max(at for at, _ in self.arrivals)
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
        return {message for _, message in self.arrivals} - {self.chosen} | self.late

    def takes_late(self, arrival: Arrival) -> bool:
        """Whether one that becomes known when the next burst has begun belongs to this one, and
        changes nothing."""
        at, message = arrival
        return at <= self.end and (self.policy.edge == "leading" or message < self.chosen)


def partition(policy: Debounce, arrivals: Iterable[Arrival]) -> list[Burst]:
    """The bursts of one key, none of which was delivered in between."""
    bursts: list[Burst] = []
    for arrival in arrivals:
        if len(bursts) > 1 and bursts[-2].takes_late(arrival):
            bursts[-2].late.add(arrival[1])
            continue
        if not bursts or arrival[0] > bursts[-1].end:
            bursts.append(Burst(policy))
        bursts[-1].arrivals.append(arrival)
    return bursts
