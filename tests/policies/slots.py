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


def earliest(throttles: Sequence[Throttle], slots: Sequence[int], at: int) -> int:
    """The first moment at `at` or later, and not before the last of `slots`, that keeps to all
    limits with them."""
    found = max([at, *slots[-1:]])
    for most, length in limits(throttles):
        if len(slots) >= most:
            # Slots come in order, so the one that must be left behind is known.
            found = max(found, int(slots[-most] + length) + 1)
    return found
