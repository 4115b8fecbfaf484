"""Metrics of one subscriber's loops, and the recorder that gets them.

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
    count_outcomes,
    get_outcome_labels,
)
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement
from faststream_sqlbroker.flow.loop import Log, is_logged

HeldRows = Mapping[int, ClaimedMessage]


class SubscriberMetrics:
    """Metrics that are ignored, for brokers without a recorder."""

    is_enabled = False
    """True if anything is recorded; else the caller need not compute the values."""

    def record_claim(self, rows: Sequence[ClaimedMessage]) -> None:
        """Record that a claim has leased `rows`."""

    def record_claim_duration(self, seconds: float) -> None:
        """Record the duration of a claim, whatever the result."""

    def record_settled(
        self, parts: Sequence[Settlement], done: Collection[int], held: HeldRows
    ) -> None:
        """Record the settlements of `parts` whose ids are in `done`; `held` still has all rows."""

    def record_flush_duration(self, seconds: float) -> None:
        """Record the duration of a write of outcomes."""

    def record_lost(self, queue: str, *, unknown: bool) -> None:
        """Record a delivery from `queue` that was not settled; `unknown` if that is uncertain."""

    def record_released(self, count: int) -> None:
        """Record the number of released leases that had expired."""

    def record_surplus(self, count: int) -> None:
        """Record the number of claimed messages that were released because of their size."""

    def record_lease_margin(self, seconds: float) -> None:
        """Record the remaining seconds of the shortest lease."""

    def record_policy_wait(self, wait: str, seconds: float) -> None:
        """Record a wait because of a policy: `claim`, `slot` or `rest`."""

    def record_slots(self, counts: Mapping[str, int]) -> None:
        """Record the use of slots: `started`, `missed` or `unused`."""


class GuardedRecorder:
    """A recorder that cannot disturb the caller: errors are logged."""

    def __init__(self, recorder: Recorder, log: Log) -> None:
        """Pass everything on to `recorder`."""
        self._recorder = recorder
        self._log = log
        self._failures = 0
        self.sample_interval = recorder.sample_interval

    def count(self, metric: Metric, labels: Labels, amount: int) -> None:
        """Count, as the recorder does."""
        self._call(self._recorder.count, metric, labels, amount)

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Observe a value, as the recorder does."""
        self._call(self._recorder.observe, metric, labels, value)

    def gauge(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        """Set a gauge, as the recorder does."""
        self._call(self._recorder.gauge, metric, values)

    def _call(self, method: Callable[..., None], metric: Metric, *values: Any) -> None:
        """Call the recorder; log an error, which must not stop the delivery of messages.

        Errors are logged ever more rarely: a broken recorder fails with each batch.
        """
        try:
            method(metric, *values)
        except Exception as error:  # noqa: BLE001 - an application's own recorder
            self._failures += 1
            if is_logged(self._failures):
                text = (
                    f"could not record metric {metric.name} ({self._failures} failures so far); "
                    f"messages are not affected: {error!r}"
                )
                self._log(logging.ERROR, text, exc_info=error)


class RecordedMetrics(SubscriberMetrics):
    """Metrics that are passed to a recorder."""

    is_enabled = True

    def __init__(self, recorder: Recorder, queues: Sequence[str]) -> None:
        """Record for the subscriber of `queues`."""
        self._recorder = recorder
        self._single_queue = queues[0] if len(queues) == 1 else None
        self._name = (format_subscriber_name(queues),)
        self._init_counters(queues)

    def _init_counters(self, queues: Sequence[str]) -> None:
        """Set counters to 0 at the start, so that the first event shows as growth from 0 to 1.

        Prometheus computes rates from growth, and does not see a counter before its first value.
        """
        self._recorder.count(RELEASED, self._name, 0)
        self._recorder.count(SURPLUS, self._name, 0)
        for queue in queues:
            self._recorder.count(CLAIMED, (queue,), 0)
            self._recorder.count(RETRIED, (queue,), 0)
            self._recorder.count(SETTLED, (queue, "acked", ""), 0)
            self._recorder.count(LOST, (queue, "lost"), 0)

    def record_claim(self, rows: Sequence[ClaimedMessage]) -> None:
        """Count the rows by queue."""
        self._count(CLAIMED, self._count_by_queue(rows))

    def record_claim_duration(self, seconds: float) -> None:
        """Observe the duration."""
        self._recorder.observe(CLAIM_SECONDS, self._name, seconds)

    def record_settled(
        self, parts: Sequence[Settlement], done: Collection[int], held: HeldRows
    ) -> None:
        """Count the written settlements by queue, outcome and reason.

        With a single queue, the queue of each settlement need not be looked up in `held`.
        """
        written = parts if len(parts) == len(done) else [s for s in parts if s.id in done]
        counts: Counter[tuple[str, str, str]]
        if self._single_queue is not None:
            counts = Counter(
                {(self._single_queue, *labels): n for labels, n in count_outcomes(written).items()}
            )
        else:
            counts = Counter((_find_queue(s, held), *get_outcome_labels(s)) for s in written)
        self._count(SETTLED, counts)
        for (queue, outcome, _), n in counts.items():
            if outcome == "retried":
                self._recorder.count(RETRIED, (queue,), n)

    def record_flush_duration(self, seconds: float) -> None:
        """Observe the duration."""
        self._recorder.observe(FLUSH_SECONDS, self._name, seconds)

    def record_lost(self, queue: str, *, unknown: bool) -> None:
        """Count the delivery."""
        self._recorder.count(LOST, (queue, "unknown" if unknown else "lost"), 1)

    def record_released(self, count: int) -> None:
        """Count the leases."""
        self._recorder.count(RELEASED, self._name, count)

    def record_surplus(self, count: int) -> None:
        """Count the messages."""
        self._recorder.count(SURPLUS, self._name, count)

    def record_lease_margin(self, seconds: float) -> None:
        """Observe the remaining time."""
        self._recorder.observe(LEASE_MARGIN, self._name, max(0.0, seconds))

    def record_policy_wait(self, wait: str, seconds: float) -> None:
        """Observe the wait."""
        self._recorder.observe(POLICY_WAIT, (*self._name, wait), seconds)

    def record_slots(self, counts: Mapping[str, int]) -> None:
        """Count the slots."""
        self._count(SLOTS, {(*self._name, use): n for use, n in counts.items()})

    def _count_by_queue(self, rows: Sequence[ClaimedMessage]) -> Mapping[tuple[str], int]:
        if self._single_queue is not None:
            return {(self._single_queue,): len(rows)} if rows else {}
        return Counter((row.queue,) for row in rows)

    def _count(self, metric: Metric, counts: Mapping[Any, int]) -> None:
        for labels, amount in counts.items():
            self._recorder.count(metric, labels, amount)


class DirectMetrics:
    """Metrics of direct claims and HTTP consumers, recorded per message."""

    def __init__(self, recorder: Recorder | None) -> None:
        """Record nothing if `recorder` is None."""
        self._recorder = recorder

    def record_claim(
        self, rows: Sequence[ClaimedMessage], settlements: Sequence[Settlement]
    ) -> None:
        """Record that a claim has leased `rows`, and has settled some rows (`settlements`).

        A claim settles a message that must not be delivered, such as an expired message.
        """
        if self._recorder is None:
            return
        queue_of = {row.id: row.queue for row in rows}
        for queue in queue_of.values():
            self._recorder.count(CLAIMED, (queue,), 1)
        for settlement in settlements:
            self.record_settled(settlement, queue_of[settlement.id])

    def record_published(self, rows: Sequence[NewMessage], ids: Sequence[int | None]) -> None:
        """Record that a request has stored the rows that have an id."""
        if self._recorder is None:
            return
        stored = (
            row.queue for row, message_id in zip(rows, ids, strict=True) if message_id is not None
        )
        for queue, amount in Counter(stored).items():
            self._recorder.count(PUBLISHED_OVER_HTTP, (queue,), amount)

    def record_settled(self, settlement: Settlement, queue: str) -> None:
        """Record that `settlement` of a message from `queue` is written."""
        if self._recorder is None:
            return
        outcome, reason = get_outcome_labels(settlement)
        self._recorder.count(SETTLED, (queue, outcome, reason), 1)
        if outcome == "retried":
            self._recorder.count(RETRIED, (queue,), 1)

    def record_lost(self, queue: str, *, unknown: bool) -> None:
        """Record a message from `queue` that was not settled; `unknown` if that is uncertain."""
        if self._recorder is not None:
            self._recorder.count(LOST, (queue, "unknown" if unknown else "lost"), 1)


def format_subscriber_name(queues: Iterable[str]) -> str:
    """Return the label `subscriber`: the names of the queues."""
    return ",".join(queues)


def create_metrics(recorder: Recorder | None, queues: Sequence[str]) -> SubscriberMetrics:
    """Create the metrics for a subscriber of `queues`."""
    return SubscriberMetrics() if recorder is None else RecordedMetrics(recorder, queues)


def _find_queue(settlement: Settlement, held: HeldRows) -> str:
    """Return the queue of the message of `settlement`; empty if the message is not held.

    `held` has the rows that this process has claimed, by id. A later delivery of the same message
    may be there instead: it has the same queue.
    """
    row = held.get(settlement.id)
    return "" if row is None else row.queue
