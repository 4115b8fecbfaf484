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
    description: str
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


def _make_message_counter(name: str, labels: Labels, description: str) -> Metric:
    return Metric(name, Kind.COUNTER, "messages", labels, description)


def _make_histogram(
    name: str, labels: Labels, description: str, buckets: tuple[float, ...]
) -> Metric:
    return Metric(name, Kind.HISTOGRAM, "seconds", labels, description, buckets)


def _make_gauge(name: str, unit: str, labels: Labels, description: str) -> Metric:
    return Metric(name, Kind.GAUGE, unit, labels, description)


CLAIMED = _make_message_counter(
    "claimed_messages", ("queue",), "Messages claimed by this process, one for each delivery."
)
SETTLED = _make_message_counter(
    "settled_messages",
    ("queue", "outcome", "reason"),
    "Deliveries whose outcome was written.",
)
RETRIED = _make_message_counter(
    "retried_messages", ("queue",), "Messages that failed and will be retried."
)
LOST = _make_message_counter(
    "lost_messages",
    ("queue", "outcome"),
    "Deliveries that this process could not settle because their lease was lost. `outcome` is "
    "`lost`, or `unknown` if an earlier COMMIT without an answer may have settled them.",
)
RELEASED = _make_message_counter(
    "expired_messages",
    ("subscriber",),
    "Messages that this process released because their lease, held by this or another process, had "
    "expired.",
)
SURPLUS = _make_message_counter(
    "surplus_messages",
    ("subscriber",),
    "Messages that were released right after their claim, without counting the delivery, because "
    "more than `max_prefetch_bytes` would have waited for a worker.",
)
REFUSED = _make_message_counter(
    "refused_messages",
    ("queue", "how"),
    "Messages that were not published because their queue had reached `max_depth`. `how` is "
    "`raised`, also after a wait that timed out, or `dropped`.",
)
PUBLISHED_OVER_HTTP = _make_message_counter(
    "http_published_messages",
    ("queue",),
    "Messages and jobs that clients published over HTTP. FastStream's own publish metrics include "
    "them, so do not add the two.",
)
CLAIM_SECONDS = _make_histogram(
    "claim_seconds",
    ("subscriber",),
    "Duration of a claim with the poll before it, including claims without a message.",
    STATEMENT_BUCKETS,
)
FLUSH_SECONDS = _make_histogram(
    "flush_seconds",
    ("subscriber",),
    "Duration of the write of a batch of outcomes, including failed writes.",
    STATEMENT_BUCKETS,
)
LEASE_MARGIN = _make_histogram(
    "lease_margin_seconds",
    ("subscriber",),
    "Remaining time of the shortest lease that the subscriber holds, at each pass of the loop that "
    "renews leases. 0 means that the lease has expired, or is about to.",
    LEASE_MARGIN_BUCKETS,
)
POLICY_WAIT = _make_histogram(
    "policy_wait_seconds",
    ("subscriber", "wait"),
    "Waits for a policy. `wait` is `claim` if the policy held back all due messages, `slot` if a "
    "claimed message waited for its start, or `rest` after a failure (`BlockingWait`).",
    WAIT_BUCKETS,
)
SLOTS = Metric(
    "throttle_slots",
    Kind.COUNTER,
    "slots",
    ("subscriber", "use"),
    "Slots of a `Throttle`. `use` is `started`; `missed` if the handler could not start in time "
    "and the message was released; or `unused` if the message no longer had to start.",
)
FULL_WAIT = _make_histogram(
    "queue_full_wait_seconds",
    ("queue",),
    "Waits of publishes for capacity in a queue with `max_depth`, including those that timed out.",
    WAIT_BUCKETS,
)
HELD = _make_gauge(
    "held_messages",
    "messages",
    ("subscriber", "stage"),
    "Messages held by this process. `stage` is `waiting` for a worker, `running`, or `settling` "
    "until the outcome is written.",
)
HEALTHY = _make_gauge(
    "subscriber_healthy",
    "1 or 0",
    ("subscriber",),
    "1 if all loops of the subscriber work, as `broker.ping` checks; else 0.",
)
WRITABLE = _make_gauge(
    "database_writable",
    "1 or 0",
    ("database",),
    "1 if the database accepts this process's writes, as `broker.ping` checks; else 0.",
)
POOL_USED = _make_gauge(
    "pool_used_connections",
    "connections",
    ("database",),
    "Connections of the engine's pool in use, including those of the application.",
)
POOL_LIMIT = _make_gauge(
    "pool_limit_connections",
    "connections",
    ("database",),
    "Maximum connections of the pool; not exported without a limit.",
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
    "Time since the oldest ready message became due; 0 without a ready message.",
)
STANDBY = _make_gauge(
    "standby_messages",
    "messages",
    ("queue",),
    "Standby messages: a newer message of their key is delivered in their place (`Debounce`, "
    "`KeepLast`). They are neither ready nor delayed.",
)
STANDBY_OVERDUE = _make_gauge(
    "standby_overdue_seconds",
    "seconds",
    ("queue",),
    "Time by which the check of standby messages is overdue; 0 if it is not. It grows while the "
    "queue is paused, or has no subscriber.",
)
LIVE_SUBSCRIBERS = _make_gauge(
    "live_subscribers",
    "subscribers",
    ("queue",),
    "Subscribers of the fleet with a recent heartbeat.",
)
FINDINGS = _make_gauge(
    "findings",
    "findings",
    ("kind", "level", "queue"),
    "Findings of `broker.admin.findings`, once a minute. `level` is `error` or `warning`; `queue` "
    "is empty for a finding without a queue. A process whose database user lacks the rights of "
    "operators exports no finding; others always export `no subscriber` without a queue, as 0.",
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
    "retried": "it failed and will be retried",
    "failed": "it is FAILED in the archive",
    "dead_lettered": "it failed for good and moved to the `dead_letter_queue`",
    "moved": "it moved to another queue",
    "postponed": "it is due again later, without an attempt",
    "abandoned": "it will be delivered again, and this delivery counts: its run was cancelled, its "
    "COMMIT failed, or another message of its batch has lost its lease",
    "released": "it was released before it started",
    "discarded": "it is DISCARDED, for example expired or cancelled",
}
"""The values of the label `outcome` of `SETTLED`, with their meanings."""
OTHER_REASON = "other"
"""The label `reason` for a text from a handler, because there must be few labels."""

OutcomeLabels = tuple[str, str]
"""Outcome and reason."""
_ACK_LABELS: OutcomeLabels = (ACKED, "")


def get_outcome_labels(settlement: Settlement) -> OutcomeLabels:
    """Return the labels `outcome` and `reason` of a settlement.

    A text that a handler gave as the reason counts as "other": labels must be few.
    """
    if settlement.__class__ is AckSettlement:
        return _ACK_LABELS  # a shortcut for nearly all settlements
    reason = settlement.reason or ""
    if reason and reason not in MEANINGS:
        reason = OTHER_REASON
    state = settlement.state
    if state is None:
        # The row returns to the state before its claim: no handler started, or an HTTP client
        # released the message.
        return "released", reason
    if state in _STATE_LABELS:
        return _STATE_LABELS[state], reason
    # Only PENDING is left: the message waits again, in another queue or in its own.
    if settlement.queue is not None:
        # A dead letter has the reason of its failure, a move of the handler has none.
        return "dead_lettered" if reason else "moved", reason
    # A delivery that is uncharged was postponed on purpose; any other was cut short.
    return "postponed" if settlement.uncharge else "abandoned", reason


def count_outcomes(settlements: Collection[Settlement]) -> Counter[OutcomeLabels]:
    """Count `settlements` by their labels.

    Nearly every flush contains only plain acks, which are counted by type, without a call for each.
    """
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
