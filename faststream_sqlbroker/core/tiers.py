"""Waits over delay tiers: for relays to brokers that have no delay of their own, only queues of fixed durations.

Inside this broker nothing of it is needed: an index finds what is due.
"""

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from faststream_sqlbroker.core.duration import Duration, parse_duration
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError


class Hops(NamedTuple):
    """A tier that a message goes through `times` times in a row, waiting `seconds` each time."""

    seconds: float
    times: int


def next_hop(remaining: Duration, tiers: Iterable[Duration]) -> float | None:
    """The tier to send a message to that has to wait for `remaining`.

    Args:
        remaining: What is left of its wait.
        tiers: Durations of the tiers, in any order.

    Returns:
        The largest duration that is not longer than `remaining`, else the shortest, in seconds; None if
        nothing remains.

    Raises:
        SetupError: no tier, one that is not longer than 0, or what is no duration.
    """
    plan = plan_hops(remaining, tiers)
    return plan[0].seconds if plan else None


def plan_hops(wait: Duration, tiers: Iterable[Duration]) -> list[Hops]:
    """All hops of a message that has to wait for `wait`: each as `next_hop` says, until nothing remains.

    8 minutes over tiers of 5 and 1 minute are one hop of 5 and three of 1. Together the hops are never
    shorter than `wait`, and longer by less than the shortest tier.

    Args:
        wait: How long; 0 or less needs no hop.
        tiers: Durations of the tiers, in any order.

    Returns:
        The hops in their order, those of one tier together: no more entries than there are tiers, and one.

    Raises:
        SetupError: no tier, one that is not longer than 0, or what is no duration.
    """
    sizes = _sizes(tiers)
    # Exact, as floats would add up to a hop too few or too many.
    left, plan = Fraction(parse_duration(wait, name="wait")), list[Hops]()
    for size in sizes:
        times = int(left // Fraction(size)) if left > 0 else 0
        if times:
            plan.append(Hops(size, times))
            left -= times * Fraction(size)
    if left > 0:
        last = Hops(sizes[-1], 1)
        if plan and plan[-1].seconds == last.seconds:
            last = Hops(last.seconds, plan.pop().times + 1)
        plan.append(last)
    return plan


def _sizes(tiers: Iterable[Duration]) -> list[float]:
    """The tiers in seconds, the longest first."""
    if isinstance(tiers, str) or not isinstance(tiers, Iterable):
        raise SetupError(
            f'tiers must be a list of durations such as ["1m", "5m"], got {short(tiers)}'
        )
    sizes = sorted({parse_duration(tier, name="a tier") for tier in tiers}, reverse=True)
    if not sizes:
        raise SetupError("tiers is empty: give the duration of at least one queue")
    if sizes[-1] <= 0:
        raise SetupError(f"a tier must be longer than 0 seconds, got {sizes[-1]!r}")
    return sizes
