"""What operators see: subscribers, pauses, locks, schedules, and why a message waits.

Times are the database's (aware, UTC).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta, timezone
from typing import Any, Literal
from uuid import UUID

from faststream_sqlbroker.core.ended import rates_of
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.policies.stored import policies_json, read_policies
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.times import length_text

HOLDER_BYTES = 8
"""Bytes at the beginning of a lease token that name the subscriber which holds the lease."""
ORDERED_WAY = "ordered=True"
"""How the option is named among policies."""


@dataclass(frozen=True, slots=True)
class PausedQueue:
    """A queue from which no process claims."""

    queue: str
    since: datetime
    until: datetime | None
    """When it ends by itself; None: only when an operator resumes the queue."""
    by: str
    """Who paused it: the name given, else host and process id."""
    reason: str | None


@dataclass(frozen=True, slots=True)
class LiveSubscriber:
    """One subscriber of one process, as it last registered itself."""

    worker: str
    """Host, process id and a random number: no other subscriber has this name."""
    queues: tuple[str, ...]
    since: datetime
    """When it was started."""
    lease_expires_at: datetime
    """Until when it counts as alive without another heartbeat."""
    max_workers: int
    ordered: bool
    paused: bool
    """Whether `subscriber.pause()` was called in its process."""
    stopping: bool
    """Whether it is about to stop: it does not claim any more."""
    policies: tuple[str, ...]
    transactional: bool = False
    """Whether its handlers run in a transaction that holds their messages."""
    ended_per_minute: Mapping[str, float] | None = field(default=None, compare=False)
    """Messages that it has ended in the minute before its last heartbeat, by queue; None: its
    heartbeats are too rare to tell, or it runs an older version."""
    drained: bool = False
    """Whether an operator has drained it: it lives, but claims nothing."""
    rules: tuple[Policy, ...] = field(default=(), repr=False, compare=False)
    """Its policies, but for those that this version does not know; `policies` are their texts."""

    @property
    def claims(self) -> bool:
        """Whether it takes messages from its queues that are not paused."""
        return not self.paused and not self.stopping and not self.drained

    @property
    def process(self) -> str:
        """Host and process id of its process."""
        return self.worker.rpartition(":")[0]

    @property
    def way(self) -> str:
        """Its `ordered` and its policies, as text: equal for subscribers that go together."""
        given = [*([ORDERED_WAY] if self.ordered else []), *self.policies]
        return " and ".join(given) if given else "plain"

    def holds(self, lease_token: UUID | None) -> bool:
        """Whether a lease with this token was given to it."""
        return lease_token is not None and self.worker.endswith(
            f":{lease_token.bytes[:HOLDER_BYTES].hex()}"
        )


def by_way(queue: str, subscribers: Iterable[LiveSubscriber]) -> dict[str, list[LiveSubscriber]]:
    """The subscribers of `queue` that are not about to stop, grouped by `way`.

    With more than one way, none of them is guaranteed.
    """
    found: dict[str, list[LiveSubscriber]] = {}
    for subscriber in subscribers:
        if queue in subscriber.queues and not subscriber.stopping:
            found.setdefault(subscriber.way, []).append(subscriber)
    return found


def names_text(subscribers: Sequence[LiveSubscriber]) -> str:
    """The first of them by name, and how many others there are."""
    more = len(subscribers) - 1
    return subscribers[0].worker + (f" and {more} more" if more else "")


def ways_text(ways: Mapping[str, Sequence[LiveSubscriber]]) -> str:
    """Name the subscribers that have each way."""
    return ", ".join(f"{names_text(those)} ({way})" for way, those in sorted(ways.items()))


MIXED = (
    "what policies and ordered=True promise holds only while every subscriber of a queue has the "
    "same: give all of them the same, or let the change of the fleet end"
)


def worker_name(process: str, holder: bytes) -> str:
    """The name of the subscriber whose lease tokens begin with `holder`."""
    return f"{process[:200]}:{holder.hex()}"


def describe(
    *,
    queues: Sequence[str],
    max_workers: int,
    ordered: bool,
    policies: Sequence[Policy],
    paused: bool,
    stopping: bool,
    transactional: bool = False,
) -> dict[str, Any]:
    """What a subscriber tells of itself, as JSON: `subscriber_of` reads it."""
    return {
        "queues": list(queues),
        "max_workers": max_workers,
        "ordered": ordered,
        "paused": paused,
        "stopping": stopping,
        # The texts are for people: they also tell of policies that a reader does not know.
        "policies": [str(policy) for policy in policies],
        "rules": policies_json(policies),
        **({"transactional": True} if transactional else {}),
    }


def subscriber_of(
    worker: str,
    info: Mapping[str, Any],
    since: datetime,
    lease_expires_at: datetime,
    *,
    drained: bool = False,
) -> LiveSubscriber:
    """A subscriber from its description; what is missing there gets its default."""
    return LiveSubscriber(
        worker,
        _texts(info.get("queues")),
        since,
        lease_expires_at,
        int(info.get("max_workers", 1)),
        bool(info.get("ordered")),
        bool(info.get("paused")),
        bool(info.get("stopping")),
        _texts(info.get("policies")),
        bool(info.get("transactional")),
        rates_of(info.get("ended")),
        drained,
        read_policies(info.get("rules")),
    )


def _texts(value: Sequence[Any] | None) -> tuple[str, ...]:
    return tuple(str(item) for item in value or ())


# Locks, as operators see them.


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that a process holds. Times are the database's (aware, UTC)."""

    key: str
    fence: int
    """How often the lock was taken, this time included."""
    acquired_at: datetime
    held_until: datetime
    """When its lease runs out unless it is renewed."""
    worker: str
    """Host and process id of the holder."""


# Schedules, as stored. Times are the database's (aware, UTC).

Missed = Literal["one", "all", "skip"]
MISSED: tuple[Missed, ...] = ("one", "all", "skip")


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule of the fleet, as stored."""

    name: str
    expression: str
    tz: str
    last_fire_at: datetime | None
    """The last fire time whose message was published; None: none was."""
    next_fire_at: datetime | None
    """The next fire time; if it is in the past, it is late. None: none within 50 years."""
    failures_count: int
    """Failures in a row of the schedule's function for that fire time."""
    paused_at: datetime | None = None
    """Since when an operator has paused it; None: it is not paused."""
    paused_by: str | None = None
    """Who paused it."""
    run_at: datetime | None = None
    """When an operator asked for a run that is not published yet; None: none is to come."""
    running: bool = False
    """Whether a process has it now: its function runs, or its message is written."""


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """State of a schedule between two fire times."""

    expression: str
    tz: str
    next_at: datetime | None
    last_at: datetime | None = None
    decided_at: datetime | None = None
    """The last fire time of the run that has begun; None: no run has begun."""
    failures_count: int = 0
    becomes: tuple[str, str] | None = None
    """The expression and zone that apply after that run; None: the same."""
    paused_at: datetime | None = None
    paused_by: str | None = None
    skipped_until: datetime | None = None
    """Fire times up to then were due during a pause; None: there is none to leave out."""
    run_at: datetime | None = None
    """When an operator asked for a run besides the fire times; None: none is to come."""

    @property
    def due_at(self) -> datetime | None:
        """From when on a process has to publish something; None: never, as it is now."""
        if self.paused_at is not None:
            return None
        return self.run_at or self.next_at

    def begun(self, now: datetime) -> "ScheduleState":
        """The state of a process that has it now: what is due by now belongs to its run."""
        if self.decided_at is None and self.next_at is not None and self.next_at <= now:
            return replace(self, decided_at=now)
        return self

    def paused(self, at: datetime, by: str) -> "ScheduleState":
        """The state after an operator has paused it: a run that has begun is over."""
        expression, tz = self.definition_to_come
        return ScheduleState(expression, tz, self.next_at, self.last_at, paused_at=at, paused_by=by)

    def resumed(self, at: datetime) -> "ScheduleState":
        """The state after an operator has ended the pause; what is due by then is left out."""
        late = self.next_at is not None and self.next_at <= at
        return replace(self, paused_at=None, paused_by=None, skipped_until=at if late else None)

    def fired(self, at: datetime | None, next_at: datetime | None) -> "ScheduleState":
        """The state after fire time `at` was published (None: there was nothing to publish).

        The same run goes on with the fire time `next_at`.
        """
        return replace(self, last_at=at or self.last_at, next_at=next_at, failures_count=0)

    def ended(self, at: datetime | None, next_at: datetime | None) -> "ScheduleState":
        """As `fired`, for the last fire time of the run."""
        expression, tz = self.definition_to_come
        return ScheduleState(expression, tz, next_at, at or self.last_at)

    @property
    def definition_to_come(self) -> tuple[str, str]:
        """The expression and zone that decide when it fires next."""
        return self.becomes or (self.expression, self.tz)

    def listed(self, name: str) -> Schedule:
        """As operators see it."""
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
        """As JSON; `load_state` reads it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: _utc(value).isoformat() if isinstance(value, datetime) else value
            for name, value in values.items()
        }


def load_state(info: Mapping[str, Any] | None) -> ScheduleState | None:
    """Read a state as `dump` wrote it; None if the row has no readable state."""
    readers = {"expression": str, "tz": str, "failures_count": int, "paused_by": str}
    try:
        given = {
            each.name: readers.get(each.name, _read)(info[each.name])
            for each in fields(ScheduleState)
            if info is not None and info.get(each.name) is not None
        }
        return ScheduleState(**{"next_at": None, **given})
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def _read(value: Any) -> Any:
    """Read a moment, or an expression and its zone."""
    if isinstance(value, str):
        return _utc(datetime.fromisoformat(value))
    return str(value[0]), str(value[1])


def _utc(value: datetime) -> datetime:
    return value.astimezone(timezone.utc)


# Why a message is where it is: text for people, codes for programs.

SHOWN_ERROR = 200
"""Characters of an error that an explanation shows: about two lines of a terminal."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason why a message does not run; docs/howto/operating.md lists them."""

    code: str
    text: str
    until: datetime | None = None
    """When it ends by itself (aware, UTC); None: not by time, or not known."""
    message_id: int | None = None
    """The other message that the reason is about."""
    worker: str | None = None
    """The subscriber that the reason is about, as `admin.subscribers` names it."""
    policy: str | None = None
    """The policy that the reason is about, as `admin.subscribers` shows it."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a message is where it is, at one moment. `str()` is for people."""

    message_id: int
    state: MessageState | None
    """None: there is no such message, live or archived."""
    queue: str | None
    reasons: tuple[Reason, ...]
    """At least one; those that keep the message from its handler come first."""
    pipeline: str | None = None
    """Its place, such as "step 2 of 3 of Email"; None: its queue belongs to no pipeline."""

    def __str__(self) -> str:
        """A line for the message and one for each reason."""
        if self.state is None:
            head = f"message {self.message_id}"
        else:
            place = "" if self.pipeline is None else f" ({self.pipeline})"
            head = f"message {self.message_id} of queue {self.queue!r}{place} is {self.state.name}"
        return "\n".join(
            [f"{head}:", *(f"- {reason.code}: {reason.text}" for reason in self.reasons)]
        )

    def at_place(self, pipelines: Iterable[Any]) -> "Explanation":
        """The same, naming the first of `pipelines` that its queue belongs to.

        Each has a `name` and `steps`: names of queues in their order, or things with a `queue` or
        `queues`.
        """
        if self.queue is None:
            return self
        for pipeline in pipelines:
            steps = [_queues(step) for step in pipeline.steps]
            for number, queues in enumerate(steps, 1):
                if self.queue in queues:
                    return replace(
                        self, pipeline=f"step {number} of {len(steps)} of {pipeline.name}"
                    )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMessage:
    """A PENDING or RETRYABLE message, as `explain` read it at the database's time `now`."""

    id: int
    queue: str
    key: str | None
    state: MessageState
    attempts_count: int
    deliveries_count: int
    next_attempt_at: datetime
    expired: bool
    policy_marks: int
    now: datetime


def moment_text(at: datetime, now: datetime) -> str:
    """A time and how far it is from `now`."""
    return f"{at:%Y-%m-%d %H:%M:%S} UTC ({_distance(at - now)})"


def _distance(length: timedelta) -> str:
    seconds = length.total_seconds()
    text = length_text(abs(seconds))
    return f"in {text}" if seconds > 0 else f"{text} ago"


def error_text(error: str | None) -> str:
    """The first line of an error, ready to follow a sentence; nothing without one."""
    lines = (error or "").strip().splitlines()
    return f"; last error: {lines[0][:SHOWN_ERROR]}" if lines else ""


def _queues(step: Any) -> tuple[str, ...]:
    if isinstance(step, str):
        return (step,)
    queues = getattr(step, "queues", None)
    return (step.queue,) if queues is None else tuple(queues)
