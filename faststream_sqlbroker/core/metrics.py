"""The metrics of the broker, and the protocol of the recorder that keeps their values.

The loops report claims, flushes and polls, never single messages. `flow/metrics.py` turns these
reports into calls of a `Recorder`.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from faststream_sqlbroker.core.reasons import MEANINGS
from faststream_sqlbroker.core.rows import AckSettlement, Settlement
from faststream_sqlbroker.core.states import MessageState

Labels = tuple[str, ...]
"""Values of a metric's labels, in the order of the metric's label names."""


class Kind(Enum):
    """The type of a metric."""

    COUNTER = "counter"
    """A value that only grows until the process ends."""
    HISTOGRAM = "histogram"
    """A count of the observed durations."""
    GAUGE = "gauge"
    """The last measured value."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of a metric for all exporters."""

    name: str
    """Name without prefix and suffix: `ready_messages`."""
    kind: Kind
    unit: str
    """The unit: messages, seconds and so on."""
    labels: Labels
    meaning: str
    buckets: tuple[float, ...] = ()
    """Upper bounds of the buckets of a histogram."""


STATEMENT_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""Seconds: from a statement on the same machine to the default `statement_timeout`."""
LEASE_MARGIN_BUCKETS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 40.0, 60.0, 300.0, 600.0)
"""Seconds: a waiting message is leased for 20, a running one for `release_stuck_timeout`, by
default 600."""
WAIT_BUCKETS = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
"""Seconds: from the slot of a throttle to opening hours."""


def _make_message_counter(name: str, labels: Labels, meaning: str) -> Metric:
    return Metric(name, Kind.COUNTER, "messages", labels, meaning)


def _make_histogram(name: str, labels: Labels, meaning: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, "seconds", labels, meaning, buckets)


def _make_gauge(name: str, unit: str, labels: Labels, meaning: str) -> Metric:
    return Metric(name, Kind.GAUGE, unit, labels, meaning)


CLAIMED = _make_message_counter(
    "claimed_messages", ("queue",), "Messages that this process has leased: one for each delivery."
)
SETTLED = _make_message_counter(
    "settled_messages",
    ("queue", "outcome", "reason"),
    "Deliveries whose outcome is written.",
)
RETRIED = _make_message_counter(
    "retried_messages", ("queue",), "Messages that failed and are to be tried again."
)
LOST = _make_message_counter(
    "lost_messages",
    ("queue", "outcome"),
    "Deliveries that this process could not settle, because their lease was gone. `outcome` is "
    "`lost`; or `unknown`, where an earlier COMMIT without an answer may have settled them.",
)
RELEASED = _make_message_counter(
    "expired_messages",
    ("subscriber",),
    "Messages of which this process found the lease of another, or its own, run out, and gave them "
    "back.",
)
SURPLUS = _make_message_counter(
    "surplus_messages",
    ("subscriber",),
    "Messages that a claim had leased and that were given back, uncharged, because more than "
    "`max_prefetch_bytes` would have waited for a worker.",
)
REFUSED = _make_message_counter(
    "refused_messages",
    ("queue", "how"),
    "Messages that were not published, as the queue had as many due ones as `max_depth` allows. "
    "`how` is `raised`, also after a wait that was too long, or `dropped`.",
)
PUBLISHED_OVER_HTTP = _make_message_counter(
    "http_published_messages",
    ("queue",),
    "Messages and jobs that clients have published over HTTP. FastStream's own metrics of "
    "publishes have them, too, so do not add the two.",
)
CLAIM_SECONDS = _make_histogram(
    "claim_seconds",
    ("subscriber",),
    "A claim, with the look for what is due before it, also one that found nothing.",
    STATEMENT_BUCKETS,
)
FLUSH_SECONDS = _make_histogram(
    "flush_seconds",
    ("subscriber",),
    "The write of a batch of outcomes, also one that failed.",
    STATEMENT_BUCKETS,
)
LEASE_MARGIN = _make_histogram(
    "lease_margin_seconds",
    ("subscriber",),
    "What was left of the shortest lease held here, at each look of the loop that renews leases. 0 "
    "is a lease that has run out, or nearly.",
    LEASE_MARGIN_BUCKETS,
)
POLICY_WAIT = _make_histogram(
    "policy_wait_seconds",
    ("subscriber", "wait"),
    "Waits for a policy. `wait` is `claim`, where it held back all that is due; `slot`, where a "
    "claimed message waits for its start; or `rest`, after a failure (`BlockingWait`).",
    WAIT_BUCKETS,
)
SLOTS = Metric(
    "throttle_slots",
    Kind.COUNTER,
    "slots",
    ("subscriber", "use"),
    "Slots of a `Throttle`. `use` is `started`; `missed`, where the handler could not start in "
    "time and the message went back; or `unused`, where it was not to start any more.",
)
FULL_WAIT = _make_histogram(
    "queue_full_wait_seconds",
    ("queue",),
    "Waits of publishes for room in a queue with a `max_depth`, also those in vain.",
    WAIT_BUCKETS,
)
HELD = _make_gauge(
    "held_messages",
    "messages",
    ("subscriber", "stage"),
    "Messages held by this process. `stage` is `waiting` for a worker, `running`, or `settling`: "
    "its outcome waits to be written.",
)
HEALTHY = _make_gauge(
    "subscriber_healthy",
    "1 or 0",
    ("subscriber",),
    "1 if all loops of the subscriber work, as `broker.ping` asks; else 0.",
)
WRITABLE = _make_gauge(
    "database_writable",
    "1 or 0",
    ("database",),
    "1 if the database takes this process's writes, as `broker.ping` asks; else 0.",
)
POOL_USED = _make_gauge(
    "pool_used_connections",
    "connections",
    ("database",),
    "Connections of the engine's pool that are in use, by the application too.",
)
POOL_LIMIT = _make_gauge(
    "pool_limit_connections",
    "connections",
    ("database",),
    "Connections that the pool gives at most. Without a limit it is not exported.",
)
READY = _make_gauge(
    "ready_messages", "messages", ("queue",), "Messages that are due and wait for a claim."
)
DELAYED = _make_gauge("delayed_messages", "messages", ("queue",), "Messages that are not due yet.")
IN_FLIGHT = _make_gauge(
    "in_flight_messages", "messages", ("queue",), "Messages leased by any process of the fleet."
)
OLDEST_DUE = _make_gauge(
    "oldest_due_age_seconds",
    "seconds",
    ("queue",),
    "For how long the first message to be claimed of those that wait longest has been due; 0 if "
    "none is.",
)
STANDBY = _make_gauge(
    "standby_messages",
    "messages",
    ("queue",),
    "Messages that stand by for a newer one of their key, which is delivered in their place "
    "(`Debounce`, `KeepLast`). They are neither ready nor delayed.",
)
STANDBY_OVERDUE = _make_gauge(
    "standby_overdue_seconds",
    "seconds",
    ("queue",),
    "For how long claims have not looked at what stands by, though it was time to; 0 if they have. "
    "It grows while the queue is paused, or has no subscriber.",
)
LIVE_SUBSCRIBERS = _make_gauge(
    "live_subscribers",
    "subscribers",
    ("queue",),
    "Subscribers of the fleet that have lately given a sign of life.",
)
FINDINGS = _make_gauge(
    "findings",
    "findings",
    ("kind", "level", "queue"),
    "What `broker.admin.findings` finds, once a minute. `level` is `error` or `warning`; `queue` "
    "is empty where it is about none. A process whose database user lacks the rights of operators "
    "exports none; else that of `no subscriber` without a queue is always there, 0.",
)

METRICS = tuple(value for value in list(vars().values()) if isinstance(value, Metric))
"""All metrics."""
PROCESS_GAUGES = (HELD, HEALTHY, WRITABLE, POOL_USED, POOL_LIMIT)
"""Gauges that each process exports about itself."""
FLEET_GAUGES = tuple(
    metric for metric in METRICS if metric.kind is Kind.GAUGE and metric not in PROCESS_GAUGES
)
"""Gauges that one process of the fleet reads from the database and exports."""


class Recorder(Protocol):
    """The destination of the broker's metrics: `SqlBroker(metrics=…)`.

    Its methods are called in the event loop's thread and must neither block nor await. If a method
    raises, the error is logged and the value is lost; messages are not affected.
    """

    sample_interval: float
    """Seconds between two reads of the gauges."""

    def count(self, metric: Metric, labels: Labels, amount: int) -> None:
        """Add `amount` to a counter."""

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """Add a value to a histogram."""

    def gauge(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        """Set all values of a gauge; label values missing in `values` are no longer known."""


# Labels of outcomes.

ACKED = "acked"
_STATE_LABELS = {
    MessageState.COMPLETED: ACKED,
    MessageState.FAILED: "failed",
    MessageState.RETRYABLE: "retried",
    MessageState.DISCARDED: "discarded",
}
OUTCOMES = {
    "acked": "it is done",
    "retried": "it failed and is tried again",
    "failed": "it is FAILED in the archive",
    "dead_lettered": "it failed for good and went to the `dead_letter_queue`",
    "moved": "it went to another queue",
    "postponed": "it is due again later, without an attempt",
    "abandoned": "it comes back, and the delivery counts: cancelled, or its COMMIT failed",
    "released": "it was given back before it started",
    "discarded": "it was dropped without a run",
}
"""The values of the label `outcome` of `SETTLED`, with their meanings."""
OTHER_REASON = "other"
"""The label `reason` for a text from a handler, because there must be few labels."""

OutcomeLabels = tuple[str, str]
"""Outcome and reason."""
_ACK_LABELS: OutcomeLabels = (ACKED, "")


def get_outcome_labels(settlement: Settlement) -> OutcomeLabels:
    """Return the labels `outcome` and `reason` of a settlement."""
    if settlement.__class__ is AckSettlement:
        return _ACK_LABELS  # a shortcut for nearly all settlements
    reason = settlement.reason or ""
    if reason and reason not in MEANINGS:
        reason = OTHER_REASON
    state = settlement.state
    if state is None:
        return "released", reason
    if state in _STATE_LABELS:
        return _STATE_LABELS[state], reason
    if settlement.queue is not None:
        return "dead_lettered" if reason else "moved", reason
    return "postponed" if settlement.uncharge else "abandoned", reason


def count_outcomes(settlements: Collection[Settlement]) -> Counter[OutcomeLabels]:
    """Count `settlements` by their labels."""
    kinds = Counter(map(type, settlements))
    if kinds.keys() == {AckSettlement}:
        return Counter({_ACK_LABELS: kinds[AckSettlement]})
    return Counter(map(get_outcome_labels, settlements))


@dataclass(frozen=True, slots=True)
class QueueState:
    """The messages waiting in a queue at a time of the database."""

    queue: str
    ready: int
    delayed: int
    in_flight: int
    oldest_due_age: float
    """Age in seconds."""
    live_subscribers: int
    standing: int = 0
    """Messages that stand by."""
    standing_overdue: float = 0.0
    """Seconds since claims should have checked the first standby message; 0 if they have."""
