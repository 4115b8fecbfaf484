"""Rates of the messages that a subscriber has recently ended, for its heartbeat."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from faststream_sqlbroker.core.rows import ClaimedMessage, Settlement

MIN_SECONDS = 5.0
"""Minimum duration in seconds for a rate. Otherwise a single message in the first moments after a
start would count as thousands a minute."""


def compute_rate(count: int, *, seconds: float) -> float:
    """Convert `count` in `seconds` to a rate per minute; shorter times count as a millisecond."""
    return round(count * 60.0 / max(seconds, 0.001), 1)


def parse_rates(counts: Mapping[str, Any] | None) -> dict[str, float] | None:
    """Convert the result of `EndedCounts.take_report` to messages a minute; None stays None.

    Each subscriber reports with its heartbeats how many messages it has ended, by queue.
    """
    if counts is None:
        return None
    seconds = float(counts.get("seconds", MIN_SECONDS))
    queues = counts.get("queues", {})
    return {
        str(queue): compute_rate(int(count), seconds=seconds) for queue, count in queues.items()
    }


def sum_rates(
    subscribers: Iterable[tuple[Sequence[str], Mapping[str, float] | None]],
) -> dict[str, float]:
    """Sum the rates of all subscribers, each given as (queues, rates).

    A rate is the messages of a queue that a subscriber has ended per minute; each process reports
    its own. A queue is left out if one of its subscribers reports no rates: the sum would be too
    small.
    """
    total: dict[str, float] = {}
    unknown_queues = set[str]()
    for queues, rates in subscribers:
        if rates is None:
            unknown_queues.update(queues)
            continue
        for queue in queues:
            total[queue] = round(total.get(queue, 0.0) + rates.get(queue, 0.0), 1)
    return {queue: rate for queue, rate in total.items() if queue not in unknown_queues}


WINDOW_SECONDS = 60.0
"""Length of the reported period in seconds."""


class EndedCounts:
    """Counters of ended messages, and their values at the heartbeats of the last minute."""

    def __init__(self, queues: Sequence[str], now: float) -> None:
        """Start with empty counters at `now` (monotonic seconds)."""
        self._single_queue = queues[0] if len(queues) == 1 else None
        self._total = Counter[str]()
        self._snapshots: deque[tuple[float, Counter[str]]] = deque([(now, Counter())])

    def record_settled(
        self,
        settlements: Sequence[Settlement],
        settled_ids: Collection[int],
        rows: Mapping[int, ClaimedMessage],
    ) -> None:
        """Count the `settlements` whose ids are in `settled_ids`.

        A settlement is the write that ends a delivery; only final ones end the message. `rows` must
        still contain the rows of all settlements, which name the queue.
        """
        written = (
            settlements
            if len(settlements) == len(settled_ids)
            else [settlement for settlement in settlements if settlement.id in settled_ids]
        )
        # With a single queue no row must be looked up.
        if self._single_queue is not None:
            self._total[self._single_queue] += sum([settlement.is_final for settlement in written])
            return
        for settlement in written:
            row = rows.get(settlement.id)
            if row is not None and settlement.is_final:
                self._total[row.queue] += 1

    def take_report(self, now: float) -> dict[str, Any]:
        """Return the counts of the last minute as JSON; empty if no message ended.

        A snapshot is a copy of the counters at a heartbeat. The counts are the difference from the
        snapshot of a minute ago, or of the start.
        """
        snapshots = self._snapshots
        # Keep one snapshot that is at least a minute old, if there is such a snapshot.
        while len(snapshots) > 1 and snapshots[1][0] <= now - WINDOW_SECONDS:
            snapshots.popleft()
        if now - snapshots[-1][0] >= 1.0:
            snapshots.append((now, self._total.copy()))
        started_at, old_counts = snapshots[0]
        counts = {
            queue: count - old_counts[queue]
            for queue, count in self._total.items()
            if count > old_counts[queue]
        }
        if not counts:
            return {}
        return {"seconds": round(max(now - started_at, MIN_SECONDS), 1), "queues": counts}
