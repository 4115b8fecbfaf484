"""Why a message is where it is, in words for people and codes for programs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from faststream_sqlbroker.core.states import MessageState

SHOWN_ERROR = 200
"""Characters of an error that an explanation repeats."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that stands between a message and its handler; docs/howto/operating.md lists the codes."""

    code: str
    text: str
    until: datetime | None = None
    """When it ends by itself (aware, UTC); None: not by time, or nobody knows."""
    message_id: int | None = None
    """The other message that it is about."""
    worker: str | None = None
    """The subscriber that it is about, by the name that `admin.subscribers` gives."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of a message at one moment. `str()` is for people."""

    message_id: int
    state: MessageState | None
    """None: there is no such message, neither live nor archived."""
    queue: str | None
    reasons: tuple[Reason, ...]
    """One at least; what stands in the way first."""
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

        Each has a `name` and `steps`: names of queues in their order, or things with a `queue` or `queues`.
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
    """A PENDING or RETRYABLE message, as an explanation has read it at the database's time `now`."""

    id: int
    queue: str
    priority: int
    key: str | None
    state: MessageState
    attempts_count: int
    deliveries_count: int
    created_at: datetime
    next_attempt_at: datetime
    expires_at: datetime | None
    policy_marks: int
    last_error: str | None
    now: datetime


def moment_text(at: datetime, now: datetime) -> str:
    """A time and how far it is from `now`."""
    return f"{at:%Y-%m-%d %H:%M:%S} UTC ({_distance(at - now)})"


def _distance(length: timedelta) -> str:
    seconds = length.total_seconds()
    size = abs(seconds)
    for limit, unit, one in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if size < limit:
            text = f"{size / one:.0f} {unit}"
            break
    else:
        text = f"{size / 86_400:.0f} days"
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
