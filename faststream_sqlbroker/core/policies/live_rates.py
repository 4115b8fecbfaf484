"""The rates of the subscribers that live, also of those that get no slot: the lowest holds.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.slot_log import Limit
from faststream_sqlbroker.core.policies.throttle import OTHERS_LIVE

UNTOLD = 5 * MICROSECONDS
"""For so long after its last slot the rate of another subscriber counts, though no sign of life
tells of it: it has just started, or just stopped (microseconds)."""

Place = tuple[str, str]
"""Where slots are stored: scope and key; those of a queue's keys have none."""


@dataclass
class LiveRates:
    """By place, the limits of the subscribers that live; empty, only slots tell of others."""

    known: dict[Place, set[Limit]] = field(default_factory=dict)
    unsure: set[Place] = field(default_factory=set)
    """Places of subscribers whose sign of life may be old: they may have ended."""
    read_at: float = float("-inf")
    """Monotonic seconds."""

    def others(self, place: Place, noted: Mapping[Limit, int], now: int) -> dict[Limit, int]:
        """The limits that hold at `place`, and when each was last seen.

        `noted` are those by which slots were taken.
        """
        if (live := self.known.get(place)) is None:
            return dict(noted)
        untold = OTHERS_LIVE if place in self.unsure else UNTOLD
        found = {
            limit: seen for limit, seen in noted.items() if limit in live or seen + untold >= now
        }
        return {**found, **{limit: max(now, found.get(limit, now)) for limit in live}}
