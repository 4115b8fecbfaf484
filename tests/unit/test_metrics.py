"""What outcomes are called, and what the loops tell a recorder, without a database."""

import logging
from collections.abc import Mapping
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from faststream_sqlbroker.core.metrics import (
    CLAIMED,
    FLEET_GAUGES,
    METRICS,
    OUTCOMES,
    PROCESS_GAUGES,
    RETRIED,
    SETTLED,
    Kind,
    Labels,
    Metric,
    count_outcomes,
    get_outcome_labels,
)
from faststream_sqlbroker.core.outcome import (
    Abandon,
    Ack,
    Defer,
    Discard,
    Nack,
    NotReady,
    Reject,
    Release,
    Relocate,
    Skip,
)
from faststream_sqlbroker.core.reasons import EXPIRED, MAX_ATTEMPTS, REJECTED, SKIPPED
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import AckSettlement, ClaimedMessage, SettleResult
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.inflight import create_release as release
from faststream_sqlbroker.flow.metrics import (
    GuardedRecorder,
    RecordedMetrics,
    SubscriberMetrics,
    create_metrics,
)

RETRIES = ConstantRetryStrategy(delay_seconds=1, max_total_delay_seconds=None, max_attempts=3)
PLAIN = SettleRules(retry_strategy=RETRIES)
NO_RETRIES = SettleRules()
TO_DEAD_LETTERS = SettleRules(dead_letter_queue="dead")


class Kept:
    """Keeps everything."""

    sample_interval = 1.0

    def __init__(self) -> None:
        self.counted: dict[tuple[str, Labels], int] = {}
        self.begun: set[tuple[str, Labels]] = set()
        self.observed: list[tuple[str, Labels, float]] = []
        self.gauges: dict[str, Mapping[Labels, float]] = {}

    def count(self, metric: Metric, labels: Labels, amount: int) -> None:
        key = metric.name, labels
        if not amount:
            self.begun.add(key)
            return
        self.counted[key] = self.counted.get(key, 0) + amount

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        self.observed.append((metric.name, labels, value))

    def gauge(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        self.gauges[metric.name] = values


def row(number: int = 1, queue: str = "q") -> ClaimedMessage:
    now = datetime.now(timezone.utc)
    return ClaimedMessage(
        number, queue, b"", None, 0, None, 0, 1, 1, now, now, None, None, None, now, uuid4()
    )


@pytest.mark.parametrize(
    ("outcome", "rules", "name"),
    [
        (Ack(), PLAIN, ("acked", "")),
        (Skip(), PLAIN, ("acked", SKIPPED)),
        (Nack(), PLAIN, ("retried", "")),
        (Nack(), NO_RETRIES, ("failed", MAX_ATTEMPTS)),
        (Reject(), PLAIN, ("failed", REJECTED)),
        (Reject("no such customer 4711"), PLAIN, ("failed", "other")),
        (Reject(), TO_DEAD_LETTERS, ("dead_lettered", REJECTED)),
        (Nack(), TO_DEAD_LETTERS, ("dead_lettered", MAX_ATTEMPTS)),
        (Defer(1.0), PLAIN, ("postponed", "")),
        (NotReady(1.0, 10.0), PLAIN, ("postponed", "")),
        (Abandon(), PLAIN, ("abandoned", "")),
        (Relocate("other"), PLAIN, ("moved", "")),
        (Release(), PLAIN, ("released", "")),
        (Discard(EXPIRED), PLAIN, ("discarded", EXPIRED)),
    ],
)
def test_each_outcome_has_a_name(outcome: Any, rules: SettleRules, name: tuple[str, str]) -> None:
    assert get_outcome_labels(settle(row(), outcome, rules, ended_after=0.0)) == name
    assert name[0] in OUTCOMES


def test_all_names_of_outcomes_are_reached_above() -> None:
    parameters = test_each_outcome_has_a_name.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {name[0] for *_, name in parameters} == set(OUTCOMES)


def test_what_is_given_back_has_a_name() -> None:
    assert get_outcome_labels(release(row()))[0] == "released"


def test_outcomes_of_a_batch_are_counted_together() -> None:
    acks = [AckSettlement(n, uuid4(), 0.0, True) for n in range(5)]
    assert count_outcomes(acks) == {("acked", ""): 5}
    nack = settle(row(), Nack(), PLAIN, ended_after=0.0)
    assert count_outcomes([*acks, nack]) == {("acked", ""): 5, ("retried", ""): 1}
    assert count_outcomes([]) == {}


def test_each_metric_is_complete() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.description.endswith(".")
        assert metric.labels, "without a label it could not be forgotten"
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(metric.buckets)
    gauges = {metric for metric in METRICS if metric.kind is Kind.GAUGE}
    assert gauges == {*FLEET_GAUGES, *PROCESS_GAUGES}


def test_a_subscriber_of_one_queue_counts_without_looking_at_rows() -> None:
    kept = Kept()
    metrics = RecordedMetrics(kept, ["q"])
    metrics.record_claim([row(n) for n in range(3)])
    metrics.record_claim([])
    nack = settle(row(9), Nack(), PLAIN, ended_after=0.0)
    parts = [AckSettlement(1, uuid4(), 0.0, True), AckSettlement(2, uuid4(), 0.0, True), nack]
    metrics.record_settled(parts, {1, 9}, {})
    assert kept.counted == {
        (CLAIMED.name, ("q",)): 3,
        (SETTLED.name, ("q", "acked", "")): 1,
        (SETTLED.name, ("q", "retried", "")): 1,
        (RETRIED.name, ("q",)): 1,
    }


def test_a_subscriber_of_several_queues_counts_by_queue() -> None:
    kept = Kept()
    metrics = RecordedMetrics(kept, ["a", "b"])
    rows = [row(1, "a"), row(2, "b"), row(3, "b")]
    metrics.record_claim(rows)
    metrics.record_settled(
        [AckSettlement(r.id, r.lease_token, 0.0, True) for r in rows],
        {1, 2, 3},
        {r.id: r for r in rows},
    )
    metrics.record_claim_duration(0.25)
    assert kept.counted == {
        (CLAIMED.name, ("a",)): 1,
        (CLAIMED.name, ("b",)): 2,
        (SETTLED.name, ("a", "acked", "")): 1,
        (SETTLED.name, ("b", "acked", "")): 2,
    }
    assert kept.observed == [("claim_seconds", ("a,b",), 0.25)]


def test_counters_that_alerts_watch_begin_at_0() -> None:
    """What grows from nothing to 1 at once does not grow for Prometheus."""
    kept = Kept()
    RecordedMetrics(kept, ["a", "b"])
    assert kept.counted == {}
    assert {("lost_messages", (queue, "lost")) for queue in "ab"} <= kept.begun
    assert {(name, ("a,b",)) for name in ("expired_messages", "surplus_messages")} <= kept.begun


def test_a_batch_that_is_written_is_counted_once() -> None:
    """Also where the answer names only some of it, and the rest is written later."""
    kept = Kept()
    held = Inflight(metrics=RecordedMetrics(kept, ["q"]))
    rows = [row(n) for n in range(4)]
    held.add(rows)
    held.waiting.items.clear()
    held.queue_outcomes([AckSettlement(r.id, r.lease_token, 0.0, True) for r in rows])
    batch = held.start_batch(10)
    held.apply_result(batch, SettleResult({0, 1}, {2}))
    held.requeue(batch, first=True)
    held.apply_result(held.start_batch(10), SettleResult({3}))
    assert kept.counted == {
        (SETTLED.name, ("q", "acked", "")): 3,
        ("lost_messages", ("q", "lost")): 1,
    }
    assert held.settled_count == 3


def test_without_a_recorder_nothing_is_told() -> None:
    assert type(create_metrics(None, ["q"])) is SubscriberMetrics
    assert not SubscriberMetrics.is_enabled
    assert type(Inflight().metrics) is SubscriberMetrics


def test_a_recorder_that_raises_disturbs_nothing_else() -> None:
    told: list[tuple[int, str]] = []

    def fail(*_: Any) -> None:
        raise RuntimeError("full")

    bad: Any = SimpleNamespace(sample_interval=1.0, count=fail, observe=fail, gauge=fail)
    guarded = GuardedRecorder(bad, lambda level, text, **_: told.append((level, text)))
    metrics = RecordedMetrics(guarded, ["q"])
    for _ in range(7):
        metrics.record_claim([row()])
    guarded.observe(CLAIMED, ("q",), 1.0)
    guarded.gauge(CLAIMED, {})
    assert [level for level, _ in told] == [logging.ERROR] * 4, "the 1st, 2nd, 4th and 8th failure"
    assert "claimed_messages" in told[-1][1]
    assert "full" in told[-1][1]
