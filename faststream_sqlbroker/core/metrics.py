"""The metrics of the broker: what each is, and the recorder that keeps their values.

The loops tell of a claim, of a flush, of a look: never of each message. `flow/metrics.py` turns
what they tell into calls of a `Recorder`.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from faststream_sqlbroker.core.reasons import MEANINGS
from faststream_sqlbroker.core.rows import Acked, Settlement
from faststream_sqlbroker.core.states import MessageState

Labels = tuple[str, ...]
"""Values of a metric's labels, in the order in which it names them."""


class Kind(Enum):
    """How a metric is read."""

    COUNTER = "counter"
    """Only grows, until the process ends."""
    HISTOGRAM = "histogram"
    """How often each length was seen."""
    GAUGE = "gauge"
    """What was found last."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, whatever it is exported to."""

    name: str
    """Without prefix and suffix: `ready_messages`."""
    kind: Kind
    unit: str
    """messages, seconds and others."""
    labels: Labels
    meaning: str
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram."""


QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds: from a statement on the same machine to the default `statement_timeout`."""
MARGINS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 40.0, 60.0, 300.0, 600.0)
"""Seconds: what waits is leased for 20, what runs for `release_stuck_timeout`, by default 600."""
WAITS = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
"""Seconds: from a throttle's slot to opening hours."""


def _of_messages(name: str, labels: Labels, meaning: str) -> Metric:
    return Metric(name, Kind.COUNTER, "messages", labels, meaning)


def _seconds(name: str, labels: Labels, meaning: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, "seconds", labels, meaning, buckets)


def _now(name: str, unit: str, labels: Labels, meaning: str) -> Metric:
    return Metric(name, Kind.GAUGE, unit, labels, meaning)


CLAIMED = _of_messages(
    "claimed_messages", ("queue",), "Messages that this process has leased: one for each delivery."
)
SETTLED = _of_messages(
    "settled_messages",
    ("queue", "outcome", "reason"),
    "Deliveries whose outcome is written.",
)
RETRIED = _of_messages(
    "retried_messages", ("queue",), "Messages that failed and are to be tried again."
)
LOST = _of_messages(
    "lost_messages",
    ("queue", "outcome"),
    "Deliveries that this process could not settle, because their lease was gone. `outcome` is "
    "`lost`; or `unknown`, where an earlier COMMIT without an answer may have settled them.",
)
RELEASED = _of_messages(
    "expired_messages",
    ("subscriber",),
    "Messages of which this process found the lease of another, or its own, run out, and gave them "
    "back.",
)
SURPLUS = _of_messages(
    "surplus_messages",
    ("subscriber",),
    "Messages that a claim had leased and that were given back, uncharged, because more than "
    "`max_prefetch_bytes` would have waited for a worker.",
)
REFUSED = _of_messages(
    "refused_messages",
    ("queue", "how"),
    "Messages that were not published, as the queue had as many due ones as `max_depth` allows. "
    "`how` is `raised`, also after a wait that was too long, or `dropped`.",
)
PUBLISHED_OVER_HTTP = _of_messages(
    "http_published_messages",
    ("queue",),
    "Messages and jobs that clients have published over HTTP. FastStream's own metrics of "
    "publishes have them, too, so do not add the two.",
)
CLAIM_SECONDS = _seconds(
    "claim_seconds",
    ("subscriber",),
    "A claim, with the look for what is due before it, also one that found nothing.",
    QUICK,
)
FLUSH_SECONDS = _seconds(
    "flush_seconds",
    ("subscriber",),
    "The write of a batch of outcomes, also one that failed.",
    QUICK,
)
LEASE_MARGIN = _seconds(
    "lease_margin_seconds",
    ("subscriber",),
    "What was left of the shortest lease held here, at each look of the loop that renews leases. 0 "
    "is a lease that has run out, or nearly.",
    MARGINS,
)
POLICY_WAIT = _seconds(
    "policy_wait_seconds",
    ("subscriber", "wait"),
    "Waits for a policy. `wait` is `claim`, where it held back all that is due; `slot`, where a "
    "claimed message waits for its start; or `rest`, after a failure (`BlockingWait`).",
    WAITS,
)
SLOTS = Metric(
    "throttle_slots",
    Kind.COUNTER,
    "slots",
    ("subscriber", "use"),
    "Slots of a `Throttle`. `use` is `started`; `missed`, where the handler could not start in "
    "time and the message went back; or `unused`, where it was not to start any more.",
)
FULL_WAIT = _seconds(
    "queue_full_wait_seconds",
    ("queue",),
    "Waits of publishes for room in a queue with a `max_depth`, also those in vain.",
    WAITS,
)
HELD = _now(
    "held_messages",
    "messages",
    ("subscriber", "stage"),
    "Messages held by this process. `stage` is `waiting` for a worker, `running`, or `settling`: "
    "its outcome waits to be written.",
)
HEALTHY = _now(
    "subscriber_healthy",
    "1 or 0",
    ("subscriber",),
    "1 if all loops of the subscriber work, as `broker.ping` asks; else 0.",
)
WRITABLE = _now(
    "database_writable",
    "1 or 0",
    ("database",),
    "1 if the database takes this process's writes, as `broker.ping` asks; else 0.",
)
POOL_USED = _now(
    "pool_used_connections",
    "connections",
    ("database",),
    "Connections of the engine's pool that are in use, by the application too.",
)
POOL_LIMIT = _now(
    "pool_limit_connections",
    "connections",
    ("database",),
    "Connections that the pool gives at most. Without a limit it is not exported.",
)
READY = _now(
    "ready_messages", "messages", ("queue",), "Messages that are due and wait for a claim."
)
DELAYED = _now("delayed_messages", "messages", ("queue",), "Messages that are not due yet.")
IN_FLIGHT = _now(
    "in_flight_messages", "messages", ("queue",), "Messages leased by any process of the fleet."
)
OLDEST_DUE = _now(
    "oldest_due_age_seconds",
    "seconds",
    ("queue",),
    "For how long the first message to be claimed of those that wait longest has been due; 0 if "
    "none is.",
)
STANDING = _now(
    "standby_messages",
    "messages",
    ("queue",),
    "Messages that stand by for a newer one of their key, which is delivered in their place "
    "(`Debounce`, `KeepLast`). They are neither ready nor delayed.",
)
STANDING_OVERDUE = _now(
    "standby_overdue_seconds",
    "seconds",
    ("queue",),
    "For how long claims have not looked at what stands by, though it was time to; 0 if they have. "
    "It grows while the queue is paused, or has no subscriber.",
)
LIVE_SUBSCRIBERS = _now(
    "live_subscribers",
    "subscribers",
    ("queue",),
    "Subscribers of the fleet that have lately given a sign of life.",
)
FINDINGS = _now(
    "findings",
    "findings",
    ("kind", "level", "queue"),
    "What `broker.admin.findings` finds, once a minute. `level` is `error` or `warning`; `queue` "
    "is empty where it is about none. A process whose database user lacks the rights of operators "
    "exports none; else that of `no subscriber` without a queue is always there, 0.",
)

METRICS = tuple(each for each in list(vars().values()) if isinstance(each, Metric))
"""All of them."""
OF_PROCESS = (HELD, HEALTHY, WRITABLE, POOL_USED, POOL_LIMIT)
"""Gauges that each process exports of itself."""
OF_FLEET = tuple(each for each in METRICS if each.kind is Kind.GAUGE and each not in OF_PROCESS)
"""Those that one process of the fleet reads from the database and exports."""


class Recorder(Protocol):
    """Where the broker's metrics go: `SqlBroker(metrics=…)`.

    Its methods are called in the event loop's thread and must neither block nor await. One that
    raises is told to the log and loses that value; messages go on.
    """

    sample_interval: float
    """Seconds between two looks at what gauges tell."""

    def count(self, metric: Metric, labels: Labels, amount: int) -> None:
        """A counter has grown by `amount`."""

    def observe(self, metric: Metric, labels: Labels, value: float) -> None:
        """A histogram has one more value."""

    def gauge(self, metric: Metric, values: Mapping[Labels, float]) -> None:
        """A gauge has these values, and no others: what is missing is not known any more."""


# What outcomes are called.

ACKED = "acked"
_FINAL = {
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
"""The values of the label `outcome` of `SETTLED`, and what each means."""
OTHER = "other"
"""The label `reason` of a text that a handler has given: labels must be few."""

Settled = tuple[str, str]
"""Outcome and reason."""
_PLAIN: Settled = (ACKED, "")


def settled_as(settlement: Settlement) -> Settled:
    """The labels `outcome` and `reason` of what was written."""
    if settlement.__class__ is Acked:
        return _PLAIN  # nearly all of them
    reason = settlement.reason or ""
    if reason and reason not in MEANINGS:
        reason = OTHER
    state = settlement.state
    if state is None:
        return "released", reason
    if state in _FINAL:
        return _FINAL[state], reason
    if settlement.queue is not None:
        return "dead_lettered" if reason else "moved", reason
    return "postponed" if settlement.uncharge else "abandoned", reason


def count_settled(settlements: Collection[Settlement]) -> Counter[Settled]:
    """How many of `settlements` ended in what."""
    kinds = Counter(map(type, settlements))
    if kinds.keys() == {Acked}:
        return Counter({_PLAIN: kinds[Acked]})
    return Counter(map(settled_as, settlements))


@dataclass(frozen=True, slots=True)
class QueueState:
    """What waits in one queue, at one moment of the database."""

    queue: str
    ready: int
    delayed: int
    in_flight: int
    oldest_due_age: float
    """Seconds."""
    live_subscribers: int
    standing: int = 0
    """Messages that stand by."""
    standing_overdue: float = 0.0
    """Seconds since claims should have looked at the first of them; 0 if they have."""
