"""What the loops of one subscriber tell of their work, and the recorder that is told.

Each call stands for a batch, or for something rare. Without a recorder nothing is computed.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from faststream_sqlbroker.core.metrics import (
    CLAIM_SECONDS,
    CLAIMED,
    FLUSH_SECONDS,
    LEASE_MARGIN,
    LOST,
    POLICY_WAIT,
    PUBLISHED_OVER_HTTP,
    RELEASED,
    RETRIED,
    SETTLED,
    SLOTS,
    SURPLUS,
    Labels,
    Metric,
    Recorder,
    count_settled,
    settled_as,
)
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement
from faststream_sqlbroker.flow.loop import Log, is_told

Held = Mapping[int, ClaimedMessage]


class SubscriberMetrics:
    """Is told, and forgets."""

    on = False
    """Whether anything is recorded: else the caller need not find out what to tell."""

    def claimed(self, rows: Sequence[ClaimedMessage]) -> None:
        """A claim has leased `rows`."""

    def claim_took(self, seconds: float) -> None:
        """So long took a claim, whatever it has found."""

    def settled(self, parts: Sequence[Settlement], done: Collection[int], held: Held) -> None:
        """Those of `parts` whose ids are in `done` are written; `held` has still all of them."""

    def flush_took(self, seconds: float) -> None:
        """So long took a write of outcomes."""

    def lost(self, queue: str, *, unknown: bool) -> None:
        """A delivery from `queue` could not be settled; `unknown`: perhaps it was before."""

    def released(self, count: int) -> None:
        """So many leases had run out and were given back."""

    def gave_back(self, count: int) -> None:
        """So many messages of a claim were given back: their bodies were too large."""

    def lease_margin(self, seconds: float) -> None:
        """So much is left of the shortest lease."""

    def policy_wait(self, wait: str, seconds: float) -> None:
        """A policy makes wait: `claim`, `slot` or `rest`."""

    def slots_used(self, counts: Mapping[str, int]) -> None:
        """What became of slots: `started`, `missed` or `unused`."""


class GuardedRecorder:
    """A recorder that cannot disturb its caller: what it raises is logged."""

    def __init__(self, recorder: Recorder, log: Log) -> None:
        """Pass everything on to `recorder`."""
        self._recorder = recorder
        self._log = log
        self._failures = 0
        self.sample_interval = recorder.sample_interval

    def count(self, metric: Metric, labels: Labels, amount: int) -> None:
        """As the recorder's."""
        self._call(self._recorder.count, metric, labels, amount)

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """As the recorder's."""
        self._call(self._recorder.observe, metric, labels, value)

    def gauge(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        """As the recorder's."""
        self._call(self._recorder.gauge, metric, values)

    def _call(self, method: Callable[..., None], metric: Metric, *values: Any) -> None:
        try:
            method(metric, *values)
        except Exception as error:  # noqa: BLE001 - an application's own recorder
            self._failures += 1
            if is_told(self._failures):
                text = (
                    f"the metric {metric.name} could not be recorded ({self._failures} failures "
                    f"until now); messages go on: {error!r}"
                )
                self._log(logging.ERROR, text, exc_info=error)


class RecordedMetrics(SubscriberMetrics):
    """Is told, and tells a recorder."""

    on = True

    def __init__(self, recorder: Recorder, queues: Sequence[str]) -> None:
        """Of the subscriber of `queues`."""
        self._recorder = recorder
        self._only = queues[0] if len(queues) == 1 else None
        self._name = (subscriber_name(queues),)
        self._begin(queues)

    def _begin(self, queues: Sequence[str]) -> None:
        """Let counters be seen at 0: the growth of one that begins at 1 is not known."""
        self._recorder.count(RELEASED, self._name, 0)
        self._recorder.count(SURPLUS, self._name, 0)
        for queue in queues:
            self._recorder.count(CLAIMED, (queue,), 0)
            self._recorder.count(RETRIED, (queue,), 0)
            self._recorder.count(SETTLED, (queue, "acked", ""), 0)
            self._recorder.count(LOST, (queue, "lost"), 0)

    def claimed(self, rows: Sequence[ClaimedMessage]) -> None:
        """Count them by queue."""
        self._count(CLAIMED, self._by_queue(rows))

    def claim_took(self, seconds: float) -> None:
        """Observe it."""
        self._recorder.observe(CLAIM_SECONDS, self._name, seconds)

    def settled(self, parts: Sequence[Settlement], done: Collection[int], held: Held) -> None:
        """Count them by queue, outcome and reason."""
        written = parts if len(parts) == len(done) else [s for s in parts if s.id in done]
        counts: Counter[tuple[str, str, str]]
        if self._only is not None:
            counts = Counter({(self._only, *what): n for what, n in count_settled(written).items()})
        else:
            counts = Counter((_queue_of(s, held), *settled_as(s)) for s in written)
        self._count(SETTLED, counts)
        for (queue, outcome, _), n in counts.items():
            if outcome == "retried":
                self._recorder.count(RETRIED, (queue,), n)

    def flush_took(self, seconds: float) -> None:
        """Observe it."""
        self._recorder.observe(FLUSH_SECONDS, self._name, seconds)

    def lost(self, queue: str, *, unknown: bool) -> None:
        """Count it."""
        self._recorder.count(LOST, (queue, "unknown" if unknown else "lost"), 1)

    def released(self, count: int) -> None:
        """Count them."""
        self._recorder.count(RELEASED, self._name, count)

    def gave_back(self, count: int) -> None:
        """Count them."""
        self._recorder.count(SURPLUS, self._name, count)

    def lease_margin(self, seconds: float) -> None:
        """Observe it."""
        self._recorder.observe(LEASE_MARGIN, self._name, max(0.0, seconds))

    def policy_wait(self, wait: str, seconds: float) -> None:
        """Observe it."""
        self._recorder.observe(POLICY_WAIT, (*self._name, wait), seconds)

    def slots_used(self, counts: Mapping[str, int]) -> None:
        """Count them."""
        self._count(SLOTS, {(*self._name, use): n for use, n in counts.items()})

    def _by_queue(self, rows: Sequence[ClaimedMessage]) -> Mapping[tuple[str], int]:
        if self._only is not None:
            return {(self._only,): len(rows)} if rows else {}
        return Counter((row.queue,) for row in rows)

    def _count(self, metric: Metric, counts: Mapping[Any, int]) -> None:
        for labels, amount in counts.items():
            self._recorder.count(metric, labels, amount)


class DirectMetrics:
    """What direct claims and pulls tell of their messages, one at a time."""

    def __init__(self, recorder: Recorder | None) -> None:
        """None: nothing is recorded."""
        self._recorder = recorder

    def taken(self, rows: Sequence[ClaimedMessage], written: Sequence[Settlement]) -> None:
        """A claim has leased `rows`, and has settled some of them as `written`."""
        if self._recorder is None:
            return
        queue_of = {row.id: row.queue for row in rows}
        for queue in queue_of.values():
            self._recorder.count(CLAIMED, (queue,), 1)
        for settlement in written:
            self.settled(settlement, queue_of[settlement.id])

    def published(self, rows: Sequence[NewMessage], ids: Sequence[int | None]) -> None:
        """A request has stored those of `rows` that have an id."""
        if self._recorder is None:
            return
        stored = (row.queue for row, each in zip(rows, ids, strict=True) if each is not None)
        for queue, amount in Counter(stored).items():
            self._recorder.count(PUBLISHED_OVER_HTTP, (queue,), amount)

    def settled(self, settlement: Settlement, queue: str) -> None:
        """`settlement` of a message from `queue` is written."""
        if self._recorder is None:
            return
        outcome, reason = settled_as(settlement)
        self._recorder.count(SETTLED, (queue, outcome, reason), 1)
        if outcome == "retried":
            self._recorder.count(RETRIED, (queue,), 1)

    def lost(self, queue: str, *, unknown: bool) -> None:
        """A message from `queue` could not be settled; `unknown`: perhaps it was before."""
        if self._recorder is not None:
            self._recorder.count(LOST, (queue, "unknown" if unknown else "lost"), 1)


def subscriber_name(queues: Iterable[str]) -> str:
    """The label `subscriber`: its queues."""
    return ",".join(queues)


def metrics_of(recorder: Recorder | None, queues: Sequence[str]) -> SubscriberMetrics:
    """What the loops of a subscriber of `queues` tell."""
    return SubscriberMetrics() if recorder is None else RecordedMetrics(recorder, queues)


def _queue_of(settlement: Settlement, held: Held) -> str:
    # A later delivery of the same message may be held in its place: of the same queue.
    row = held.get(settlement.id)
    return "" if row is None else row.queue
