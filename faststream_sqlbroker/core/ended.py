"""How many messages of each queue a subscriber has ended lately, for its sign of life, and how
many a minute that is.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement

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


WINDOW = 60.0
"""Seconds that are told of."""


class EndedCounts:
    """Counters that only rise, and what they were at the signs of life of the last minute."""

    def __init__(self, queues: Sequence[str], now: float) -> None:
        """Nothing has ended at `now` (monotonic seconds)."""
        self._only = queues[0] if len(queues) == 1 else None
        self._total = Counter[str]()
        self._seen: deque[tuple[float, Counter[str]]] = deque([(now, Counter())])

    def settled(
        self,
        parts: Sequence[Settlement],
        done: Collection[int],
        held: Mapping[int, ClaimedMessage],
    ) -> None:
        """Those of `parts` whose ids are in `done` are written; `held` has still all of them."""
        written = parts if len(parts) == len(done) else [s for s in parts if s.id in done]
        if self._only is not None:
            self._total[self._only] += sum([s.leaves for s in written])
            return
        for settlement in written:
            row = held.get(settlement.id)
            if row is not None and settlement.leaves:
                self._total[row.queue] += 1

    def tell(self, now: float) -> dict[str, Any]:
        """What ended in the last minute, as JSON: `rates_of` reads it. Empty: nothing did."""
        seen = self._seen
        # The first that is kept is at least a minute old, if there is one so old.
        while len(seen) > 1 and seen[1][0] <= now - WINDOW:
            seen.popleft()
        if now - seen[-1][0] >= 1.0:
            seen.append((now, self._total.copy()))
        began, before = seen[0]
        counts = {queue: n - before[queue] for queue, n in self._total.items() if n > before[queue]}
        if not counts:
            return {}
        return {"seconds": round(max(now - began, SHORTEST), 1), "queues": counts}
