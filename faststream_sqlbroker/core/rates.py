"""Messages a minute: what a count of some seconds means, and what subscribers tell of theirs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SHORTEST = 5.0
"""Seconds: what has just started is told as if it had run for so long, as one message of its first
moment would be thousands a minute."""


def per_minute(count: int, *, seconds: float) -> float:
    """`count` of `seconds`, for a minute; a window of less than a millisecond counts as one."""
    return round(count * 60.0 / max(seconds, 0.001), 1)


def rates_of(told: Mapping[str, Any] | None) -> dict[str, float] | None:
    """Messages a minute by queue, as `EndedCounts.tell` tells them; None if it is not told."""
    if told is None:
        return None
    seconds = float(told.get("seconds", SHORTEST))
    queues = told.get("queues", {})
    return {str(queue): per_minute(int(n), seconds=seconds) for queue, n in queues.items()}


def summed(
    subscribers: Iterable[tuple[Sequence[str], Mapping[str, float] | None]],
) -> dict[str, float]:
    """The sum over all subscribers, each given as its queues and its rates.

    A queue with a subscriber that does not tell is left out: its sum would be too small.
    """
    total: dict[str, float] = {}
    unknown = set[str]()
    for queues, rates in subscribers:
        if rates is None:
            unknown.update(queues)
            continue
        for queue in queues:
            total[queue] = round(total.get(queue, 0.0) + rates.get(queue, 0.0), 1)
    return {queue: rate for queue, rate in total.items() if queue not in unknown}
