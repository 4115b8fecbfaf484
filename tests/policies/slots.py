"""The definition of Throttle: how many slots may lie in a period."""

from collections.abc import Sequence
from fractions import Fraction

from faststream_sqlbroker.core.policies import Throttle

Limit = tuple[int, Fraction]
"""Slots, and the length of time (microseconds, both ends included) that may hold no more of them.
"""


def limits(throttles: Sequence[Throttle]) -> list[Limit]:
    """Each throttle's: its rate in its period, its burst in the burst's share of it."""
    return [
        limit
        for t in throttles
        for limit in ((t.rate, Fraction(t.per)), (t.burst, Fraction(t.per * t.burst, t.rate)))
    ]


def allowed(of: Sequence[Limit], slots: Sequence[int]) -> bool:
    """Whether `slots` keep to all limits, wherever the time begins."""
    ordered = sorted(slots)
    return all(
        late - early > length
        for most, length in of
        for early, late in zip(ordered, ordered[most:], strict=False)
    )


def earliest(
    throttles: Sequence[Throttle],
    slots: Sequence[int],
    at: int,
    deadlines: Sequence[int] | None = None,
) -> int:
    """The first moment at `at` or later that keeps to all limits: bursts with `slots`, rates with
    the latest moments at which those that have them may start; None: each starts at its slot.
    """
    starts = sorted(slots if deadlines is None else deadlines)
    spaced = sorted(slots)
    found = at
    for t in throttles:
        if len(starts) >= t.rate:
            found = max(found, starts[-t.rate] + t.per + 1)
        if t.burst < t.rate:
            found = max([found, *spaced[-1:]])
            if len(spaced) >= t.burst:
                found = max(found, int(spaced[-t.burst] + Fraction(t.per * t.burst, t.rate)) + 1)
    return found
