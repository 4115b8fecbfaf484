"""How many messages of each queue a subscriber has ended lately, for its sign of life."""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from faststream_sqlbroker.core.rates import SHORTEST
from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement

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
