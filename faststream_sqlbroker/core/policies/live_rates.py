"""The rates of all live subscribers, including those that get no slot: the lowest applies.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.policies.slot_log import Limit
from faststream_sqlbroker.core.policies.throttle import OTHER_LIMITS_LIFETIME

UNREPORTED_LIFETIME = 5 * MICROSECONDS
"""Time after its last slot during which the rate of a subscriber counts without a heartbeat: it has
just started, or just stopped (microseconds)."""

SlotLogKey = tuple[str, str]
"""Scope and key of a stored slot log. The logs of single keys of a queue have no such entry."""


@dataclass
class LiveRates:
    """The limits of the live subscribers, by slot log; if empty, only slots show other limits."""

    limits: dict[SlotLogKey, set[Limit]] = field(default_factory=dict)
    uncertain: set[SlotLogKey] = field(default_factory=set)
    """Slot logs of subscribers whose heartbeat may be old: they may have ended."""
    read_at: float = float("-inf")
    """Monotonic seconds."""

    def get_limits(
        self, log_key: SlotLogKey, recorded: Mapping[Limit, int], now: int
    ) -> dict[Limit, int]:
        """Return the limits that apply to a slot log, and the time at which each was last seen.

        A slot log holds the recent starts under a Throttle, a limit is a rate, period and burst.
        `recorded` are the limits by which its slots were taken. The limits of live subscribers are
        added; the limit of a subscriber that is no longer live soon ceases to apply.
        """
        if (live := self.limits.get(log_key)) is None:
            return dict(recorded)
        lifetime = OTHER_LIMITS_LIFETIME if log_key in self.uncertain else UNREPORTED_LIFETIME
        limits = {
            limit: seen
            for limit, seen in recorded.items()
            if limit in live or seen + lifetime >= now
        }
        return {**limits, **{limit: max(now, limits.get(limit, now)) for limit in live}}
