"""What an operator has to look at: each finding is an error or a warning.

Times are the database's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from faststream_sqlbroker.core.overview import DeadLetters, QueueOverview
from faststream_sqlbroker.core.policy_waits import PoliciedQueue
from faststream_sqlbroker.core.status import MIXED, LiveSubscriber, Schedule, by_way, ways_text
from faststream_sqlbroker.core.times import length_text

MIN_FAILING = 5
"""Fewer messages that have failed before are no finding."""
FAILING_SHARE = 0.5
"""A queue is failing if this share or more of its waiting messages have failed before."""
SCHEDULE_LATE = timedelta(minutes=2)
"""A process looks at its schedules each half minute. One that is later than this has none."""
MAX_GROUPS = 5
"""Groups of dead letters that are told."""
RATES = frozenset({"throttled", "outside_window"})
"""Reasons to wait that an application asked for, however long it takes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that an operator has to look at."""

    kind: str
    """As in the table of findings in docs/howto/operating.md."""
    text: str
    """What is wrong, and what to do."""
    queue: str | None = None
    is_error: bool = True
    """Whether `sqlbroker check` fails for it; a warning is only shown."""
    error: str | None = None
    """The last error of a message that it is about, which may hold parts of a body."""

    def __str__(self) -> str:
        """The text, with the first line of the error."""
        return self.text if self.error is None else f"{self.text}: {self.error.splitlines()[0]}"


def queue_findings(queue: QueueOverview, max_age: float) -> list[Finding]:
    """Judge one queue, in which due messages may wait for `max_age` seconds."""
    name = queue.queue
    paused = ""
    findings = []
    if queue.paused is not None:
        why = f": {queue.paused.reason}" if queue.paused.reason else ""
        paused = f"paused by {queue.paused.by}{why}"
        findings.append(Finding("paused", paused, name, is_error=False))
    if queue.problem is not None:
        kind = "no subscriber" if queue.used else "unused"
        findings.append(Finding(kind, queue.problem, name, is_error=queue.used))
    elif late := _late_text(queue, max_age):
        findings.append(Finding("late", f"{late}; {paused}" if paused else late, name))
    if is_failing(queue):
        text = (
            f"{queue.retrying} of {queue.waiting} waiting messages have failed before, and "
            f"{queue.out_per_minute or 0:.3g} a minute end"
        )
        findings.append(Finding("failing", text, name))
    return findings


def is_failing(queue: QueueOverview) -> bool:
    """Return whether most of what waits has failed before, and less than that ends in a minute.

    A queue of which many messages end has always some that wait for another attempt.
    """
    failed = queue.retrying.value
    enough = failed >= max(MIN_FAILING, FAILING_SHARE * queue.waiting)
    return enough and (queue.out_per_minute or 0.0) < failed


def _late_text(queue: QueueOverview, max_age: float) -> str | None:
    if queue.oldest_due_age > max_age:
        return f"a due message has waited for {length_text(queue.oldest_due_age)}"
    return queue.late_standing if queue.standing_overdue > max_age else None


def explain_late(late: Finding, waits: PoliciedQueue, queue: QueueOverview) -> Finding:
    """Make `late` a warning where the queue's policies want its messages to wait."""
    ruled = [wait for wait in waits.waits if wait.code in RATES]
    limits = [way for way in waits.ways if "Throttle(" in way or "Window(" in way]
    # Between two claims a slot may be free, and no message waits for one.
    if not ruled and not (limits and queue.out_per_minute):
        return late
    policy = ruled[0].policy if ruled else limits[0]
    text = f"{late.text}, as {policy} lets no more start"
    if ruled and ruled[0].until_last is not None:
        text += f"; the last of them waits until {ruled[0].until_last:%Y-%m-%d %H:%M:%S} UTC"
    return Finding("waits for policy", text, late.queue, is_error=False)


def mixed_findings(subscribers: Sequence[LiveSubscriber]) -> list[Finding]:
    """Find the queues whose live subscribers have different policies."""
    findings = []
    for queue in sorted({name for each in subscribers for name in each.queues}):
        ways = by_way(queue, subscribers)
        if len(ways) > 1:
            text = f"its subscribers differ: {ways_text(ways)}; {MIXED}"
            findings.append(Finding("mixed subscribers", text, queue))
    return findings


def schedule_findings(schedules: Iterable[Schedule], now: datetime) -> list[Finding]:
    """Find the schedules that should have fired."""
    findings = []
    for each in schedules:
        due = each.run_at or each.next_fire_at
        if each.paused_at is None and due is not None and now - due > SCHEDULE_LATE:
            text = (
                f"{each.name} was due at {due:%Y-%m-%d %H:%M:%S} UTC, "
                f"{length_text((now - due).total_seconds())} ago, and has not fired"
            )
            if each.failures_count:
                text += f": its function failed {each.failures_count} times, see the log"
            else:
                text += (
                    ": no process that declares it runs; start one, or remove it with `sqlbroker "
                    "forget-schedule`"
                )
            findings.append(Finding("overdue schedule", text))
    return findings


def dead_letter_findings(dead: DeadLetters, now: datetime) -> list[Finding]:
    """Tell of the largest groups of dead letters."""
    findings = []
    for group in dead.groups[:MAX_GROUPS]:
        queues = ", ".join(group.queues)
        ago = length_text((now - group.last_at).total_seconds())
        count = "a dead letter" if group.count == 1 else f"{group.count} dead letters"
        text = f"{count} since yesterday in {queues}, the last {ago} ago"
        if group.error is None:
            reasons = ", ".join(reason or "no reason" for reason in group.reasons)
            text += f": {reasons}"
        queue = next(iter(group.queues))
        findings.append(Finding("dead letters", text, queue, is_error=False, error=group.error))
    return findings
