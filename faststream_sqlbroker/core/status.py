"""Subscribers, pauses, locks, schedules and explanations as operators see them.

Times are the database's (aware, UTC).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta, timezone
from typing import Any, Literal
from uuid import UUID

from faststream_sqlbroker.core.ended import parse_rates
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.policies.stored import dump_policies, read_policies
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.times import format_duration

HOLDER_BYTES = 8
"""Bytes at the beginning of a lease token that identify the subscriber holding the lease."""
ORDERED_MODE = "ordered=True"
"""Name of the option in a list of policies."""


@dataclass(frozen=True, slots=True)
class PausedQueue:
    """A queue from which no process claims."""

    queue: str
    since: datetime
    until: datetime | None
    """End of the pause; None if only an operator can resume the queue."""
    by: str
    """Name of the person who paused the queue, else host and process id."""
    reason: str | None


@dataclass(frozen=True, slots=True)
class LiveSubscriber:
    """A subscriber of a process, as last registered."""

    worker: str
    """Host, process id and a random number; unique in the fleet."""
    queues: tuple[str, ...]
    since: datetime
    """Time of the start."""
    lease_expires_at: datetime
    """Time until which the subscriber counts as alive without another heartbeat."""
    max_workers: int
    ordered: bool
    paused: bool
    """True if `subscriber.pause()` was called in its process."""
    stopping: bool
    """True if the subscriber is about to stop and no longer claims."""
    policies: tuple[str, ...]
    transactional: bool = False
    """True if its handlers run in a transaction that holds their messages."""
    ended_per_minute: Mapping[str, float] | None = field(default=None, compare=False)
    """Messages ended in the minute before the last heartbeat, by queue. None if heartbeats are too
    rare for a rate, or if the subscriber runs an older version."""
    drained: bool = False
    """True if an operator has drained the subscriber: it is alive but claims nothing."""
    rules: tuple[Policy, ...] = field(default=(), repr=False, compare=False)
    """Its policies, without those unknown to this version; `policies` has their texts."""
    max_deliveries: int | None = field(default=None, repr=False, compare=False)
    """Maximum deliveries without an attempt; None without a limit, or if an older version runs."""

    @property
    def claims(self) -> bool:
        """True if the subscriber claims messages from queues that are not paused."""
        return not self.paused and not self.stopping and not self.drained

    @property
    def process(self) -> str:
        """Host and process id."""
        return self.worker.rpartition(":")[0]

    @property
    def mode(self) -> str:
        """`ordered` and the policies as text, equal for subscribers that are compatible."""
        options = [*([ORDERED_MODE] if self.ordered else []), *self.policies]
        return " and ".join(options) if options else "plain"

    def holds(self, lease_token: UUID | None) -> bool:
        """Return True if this subscriber was given the lease with this token.

        Each subscriber draws its lease tokens with the same first 8 bytes, and its name ends with
        them as hexadecimal digits. So the token of a row shows who has leased the row.
        """
        return lease_token is not None and self.worker.endswith(
            f":{lease_token.bytes[:HOLDER_BYTES].hex()}"
        )


def find_holder(subscribers: Iterable[LiveSubscriber], lease_token: UUID | None) -> str | None:
    """Return the name of the subscriber that was given the lease, or None."""
    return next((s.worker for s in subscribers if s.holds(lease_token)), None)


def group_by_mode(
    queue: str, subscribers: Iterable[LiveSubscriber]
) -> dict[str, list[LiveSubscriber]]:
    """Group the subscribers of `queue` that are not about to stop by their `mode`.

    A mode is the text of a subscriber's policies and its option `ordered`. With more than one
    group, no policy is guaranteed.
    """
    groups: dict[str, list[LiveSubscriber]] = {}
    for subscriber in subscribers:
        if queue in subscriber.queues and not subscriber.stopping:
            groups.setdefault(subscriber.mode, []).append(subscriber)
    return groups


def format_names(subscribers: Sequence[LiveSubscriber]) -> str:
    """Return the name of the first subscriber and the number of further subscribers."""
    remaining = len(subscribers) - 1
    return subscribers[0].worker + (f" and {remaining} more" if remaining else "")


def format_modes(modes: Mapping[str, Sequence[LiveSubscriber]]) -> str:
    """List the subscribers of each mode."""
    return ", ".join(
        f"{format_names(subscribers)} ({mode})" for mode, subscribers in sorted(modes.items())
    )


MIXED_HINT = (
    "policies and ordered=True are guaranteed only while all subscribers of a queue have the same "
    "options: give them the same options, or finish the deployment"
)


def build_worker_name(process: str, holder: bytes) -> str:
    """Return the name of the subscriber whose lease tokens begin with `holder`.

    `process` is its host and process id, cut so that the name fits into its column.
    """
    return f"{process[:200]}:{holder.hex()}"


def build_description(
    *,
    queues: Sequence[str],
    max_workers: int,
    ordered: bool,
    policies: Sequence[Policy],
    paused: bool,
    stopping: bool,
    transactional: bool = False,
    max_deliveries: int | None = None,
) -> dict[str, Any]:
    """Build a subscriber's description of itself as JSON; `parse_subscriber` reads the result.

    The process writes it to the database with its heartbeats, for operators and other processes.
    """
    return {
        "queues": list(queues),
        "max_workers": max_workers,
        "ordered": ordered,
        "paused": paused,
        "stopping": stopping,
        # The texts are for people: they also show policies that an older version does not know.
        "policies": [str(policy) for policy in policies],
        "rules": dump_policies(policies),
        "max_deliveries": max_deliveries,
        **({"transactional": True} if transactional else {}),
    }


def parse_subscriber(
    worker: str,
    info: Mapping[str, Any],
    since: datetime,
    lease_expires_at: datetime,
    *,
    drained: bool = False,
) -> LiveSubscriber:
    """Build a subscriber from a description, with defaults for missing values.

    A process with another version of the package may have written the description.
    """
    return LiveSubscriber(
        worker,
        _to_strings(info.get("queues")),
        since,
        lease_expires_at,
        int(info.get("max_workers", 1)),
        bool(info.get("ordered")),
        bool(info.get("paused")),
        bool(info.get("stopping")),
        _to_strings(info.get("policies")),
        bool(info.get("transactional")),
        parse_rates(info.get("ended")),
        drained,
        read_policies(info.get("rules")),
        info.get("max_deliveries"),
    )


def _to_strings(value: Sequence[Any] | None) -> tuple[str, ...]:
    return tuple(str(item) for item in value or ())


# Locks.


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that a process holds. Times are the database's (aware, UTC)."""

    key: str
    fence: int
    """Number of times that the lock was acquired, including this time."""
    acquired_at: datetime
    held_until: datetime
    """End of the lease unless the lock is renewed."""
    worker: str
    """Host and process id of the holder."""


# Schedules, as stored. Times are the database's (aware, UTC).

MissedRuns = Literal["one", "all", "skip"]
MISSED_RUNS: tuple[MissedRuns, ...] = ("one", "all", "skip")


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule of the fleet, as stored."""

    name: str
    expression: str
    tz: str
    last_fire_at: datetime | None
    """The last fire time whose message was published; None if there was none."""
    next_fire_at: datetime | None
    """The next fire time. A time in the past means that the schedule is late; None means that there
    is none within 50 years."""
    failures_count: int
    """Consecutive failures of the schedule's function for that fire time."""
    paused_at: datetime | None = None
    """Time at which an operator paused the schedule; None if it is not paused."""
    paused_by: str | None = None
    """Name of the person who paused the schedule."""
    run_at: datetime | None = None
    """Time at which an operator requested a run that is not published yet; None without a
    request."""
    running: bool = False
    """True if a process has claimed the schedule: its function runs, or its message is being
    written."""


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """State of a schedule between two fire times."""

    expression: str
    tz: str
    next_at: datetime | None
    last_at: datetime | None = None
    decided_at: datetime | None = None
    """The last fire time of the run that has begun; None if no run has begun."""
    failures_count: int = 0
    becomes: tuple[str, str] | None = None
    """Expression and time zone that apply after that run; None if they do not change."""
    paused_at: datetime | None = None
    paused_by: str | None = None
    skipped_until: datetime | None = None
    """Fire times up to this time were due during a pause; None if there is nothing to skip."""
    run_at: datetime | None = None
    """Time at which an operator requested a run besides the fire times; None without a request."""

    @property
    def due_at(self) -> datetime | None:
        """Time from which a process must publish a message.

        None while paused, or without a further fire time or request.
        """
        if self.paused_at is not None:
            return None
        return self.run_at or self.next_at

    def start_run(self, now: datetime) -> "ScheduleState":
        """Return the state of a process that has claimed the schedule.

        A run publishes the messages of all fire times that are due when it starts, at `now`. A run
        that another process has begun and not ended, because it failed or stopped, is continued.
        """
        if self.decided_at is None and self.next_at is not None and self.next_at <= now:
            return replace(self, decided_at=now)
        return self

    def pause(self, at: datetime, by: str) -> "ScheduleState":
        """Return the state after a pause by an operator; a run that has begun is over.

        The rest of that run is not published, even after the pause ends.
        """
        expression, tz = self.next_definition
        return ScheduleState(expression, tz, self.next_at, self.last_at, paused_at=at, paused_by=by)

    def resume(self, at: datetime) -> "ScheduleState":
        """Return the state after the end of a pause, without the fire times due by then.

        `skipped_until` tells the next run to skip them.
        """
        is_overdue = self.next_at is not None and self.next_at <= at
        return replace(
            self, paused_at=None, paused_by=None, skipped_until=at if is_overdue else None
        )

    def record_fire(self, at: datetime | None, next_at: datetime | None) -> "ScheduleState":
        """Return the state after fire time `at` was published (None: there was nothing to publish).

        The same run continues with the fire time `next_at`. A success ends the count of failures.
        """
        return replace(self, last_at=at or self.last_at, next_at=next_at, failures_count=0)

    def end_run(self, at: datetime | None, next_at: datetime | None) -> "ScheduleState":
        """Return the state after the last fire time of a run; otherwise like `record_fire`.

        A definition that was changed during the run applies from now on.
        """
        expression, tz = self.next_definition
        return ScheduleState(expression, tz, next_at, at or self.last_at)

    @property
    def next_definition(self) -> tuple[str, str]:
        """The expression and time zone that determine the next fire time."""
        return self.becomes or (self.expression, self.tz)

    def to_schedule(self, name: str) -> Schedule:
        """Return the schedule for operators."""
        return Schedule(
            name,
            self.expression,
            self.tz,
            self.last_at,
            self.next_at,
            self.failures_count,
            self.paused_at,
            self.paused_by,
            self.run_at,
        )

    def dump(self) -> dict[str, Any]:
        """Return the state as JSON; `load_state` reads the result."""
        values = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        return {
            name: _to_utc(value).isoformat() if isinstance(value, datetime) else value
            for name, value in values.items()
        }


def load_state(info: Mapping[str, Any] | None) -> ScheduleState | None:
    """Read a state written by `dump`; returns None if the row has no readable state.

    Another version may have written it, so missing values get their defaults.
    """
    readers = {"expression": str, "tz": str, "failures_count": int, "paused_by": str}
    try:
        values = {
            attribute.name: readers.get(attribute.name, _parse_value)(info[attribute.name])
            for attribute in fields(ScheduleState)
            if info is not None and info.get(attribute.name) is not None
        }
        return ScheduleState(**{"next_at": None, **values})
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def _parse_value(value: Any) -> Any:
    """Parse a time, or an expression with a time zone."""
    if isinstance(value, str):
        return _to_utc(datetime.fromisoformat(value))
    return str(value[0]), str(value[1])


def _to_utc(value: datetime) -> datetime:
    return value.astimezone(timezone.utc)


# Reasons for a message's state: text for people, codes for programs.

MAX_DISPLAYED_ERROR = 200
"""Characters of an error in an explanation: about two lines of a terminal."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why a message does not run; docs/howto/operating.md lists the codes."""

    code: str
    text: str
    until: datetime | None = None
    """Time at which the reason ends by itself (aware, UTC); None if it does not, or if that is
    unknown."""
    message_id: int | None = None
    """Id of the other message that the reason refers to."""
    worker: str | None = None
    """Subscriber that the reason refers to, with its name in `admin.subscribers`."""
    policy: str | None = None
    """Policy that the reason refers to, as shown by `admin.subscribers`."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons for a message's current state. `str()` is for people."""

    message_id: int
    state: MessageState | None
    """None if there is no such message, live or archived."""
    queue: str | None
    reasons: tuple[Reason, ...]
    """At least one reason; reasons that keep the message from its handler come first."""
    pipeline: str | None = None
    """Position in a pipeline, such as "step 2 of 3 of Email"; None if its queue belongs to no
    pipeline."""

    def __str__(self) -> str:
        """Return a line for the message and a line for each reason."""
        if self.state is None:
            head = f"message {self.message_id}"
        else:
            position = "" if self.pipeline is None else f" ({self.pipeline})"
            head = (
                f"message {self.message_id} of queue {self.queue!r}{position} is {self.state.name}"
            )
        return "\n".join(
            [f"{head}:", *(f"- {reason.code}: {reason.text}" for reason in self.reasons)]
        )

    def at_place(self, pipelines: Iterable[Any]) -> "Explanation":
        """Return the explanation with the first of `pipelines` that contains the queue.

        A pipeline is a chain of queues through which a message is moved. Each has a `name` and
        `steps`: queue names in their order, or objects with a `queue` or `queues`.
        """
        if self.queue is None:
            return self
        for pipeline in pipelines:
            steps = [_get_queues(step) for step in pipeline.steps]
            for number, queues in enumerate(steps, 1):
                if self.queue in queues:
                    return replace(
                        self, pipeline=f"step {number} of {len(steps)} of {pipeline.name}"
                    )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMessage:
    """A PENDING or RETRYABLE message, as read by `explain` at the database's time `now`."""

    id: int
    queue: str
    key: str | None
    """The key by which claims choose; that of Once may be another."""
    state: MessageState
    attempts_count: int
    deliveries_count: int
    next_attempt_at: datetime
    expired: bool
    policy_marks: int
    now: datetime


def format_timestamp(at: datetime, now: datetime) -> str:
    """Format a time and the distance from `now`."""
    return f"{at:%Y-%m-%d %H:%M:%S} UTC ({_format_distance(at - now)})"


def _format_distance(duration: timedelta) -> str:
    """Format a duration from now, such as "in 5 min" or "5 min ago"."""
    seconds = duration.total_seconds()
    text = format_duration(abs(seconds))
    return f"in {text}" if seconds > 0 else f"{text} ago"


def format_error(error: str | None) -> str:
    """Return the first line of an error, to be appended to a sentence; empty without an error."""
    lines = (error or "").strip().splitlines()
    return f"; last error: {lines[0][:MAX_DISPLAYED_ERROR]}" if lines else ""


def _get_queues(step: Any) -> tuple[str, ...]:
    """Return the queues of a pipeline's step: a name, or an object with `queue` or `queues`."""
    if isinstance(step, str):
        return (step,)
    queues = getattr(step, "queues", None)
    return (step.queue,) if queues is None else tuple(queues)
