"""What an operator has to look at: each finding is an error or a warning.

Times are the database's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from faststream_sqlbroker.core.overview import DeadLetters, QueueOverview
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.throttle import Throttle
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
"""Largest groups of dead letters that become findings."""
RATES = frozenset({"throttled", "outside_window"})
"""Reasons to wait that an application asked for, however long it takes."""
USED_RATE = 0.5
"""A Throttle holds a queue up if this share of its rate or more ends in a minute."""


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
        lines = (self.error or "").splitlines()
        return f"{self.text}: {lines[0]}" if lines else self.text


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


def explain_late(
    late: Finding,
    queue: QueueOverview,
    waits: PoliciedQueue,
    subscribers: Iterable[LiveSubscriber],
) -> Finding:
    """Make `late` a warning where the queue's policies want its messages to wait.

    That is so if all due messages wait for a slot or a window, or if the queue's Throttles let
    nearly as many start as they may. Else handlers are too slow, or hang.
    """
    ruled = [wait for wait in waits.waits if wait.code in RATES and wait.due]
    if ruled and sum(wait.due for wait in ruled) >= waits.due:
        policy = ruled[0].policy
        text = f"{late.text}, as {policy} lets no more start"
        if ruled[0].until_last is not None and not ruled[0].capped:
            text += f"; the last of them waits until {ruled[0].until_last:%Y-%m-%d %H:%M:%S} UTC"
    elif (throttle := _used_throttle(queue, subscribers)) is not None:
        # Between two claims a slot may be free, and no message waits for one.
        text = f"{late.text}, as {throttle} lets no more start"
    else:
        return late
    return Finding("waits for policy", text, late.queue, is_error=False)


def _used_throttle(queue: QueueOverview, subscribers: Iterable[LiveSubscriber]) -> Throttle | None:
    """Return the Throttle of which `queue` uses most of the rate."""
    rules = [rule for each in subscribers if queue.queue in each.queues for rule in each.rules]
    for rule in rules:
        if isinstance(rule, Throttle) and not rule.key:
            per_minute = rule.rate * 60 * MICROSECONDS / rule.per
            if (queue.out_per_minute or 0.0) >= USED_RATE * per_minute:
                return rule
    return None


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
            elif each.running:
                text += ": its function runs"
            else:
                text += (
                    ": no process that declares it runs; start one, or remove it with `sqlbroker "
                    "forget-schedule`"
                )
            is_error = not each.running or bool(each.failures_count)
            findings.append(Finding("overdue schedule", text, is_error=is_error))
    return findings


def dead_letter_findings(dead: DeadLetters, now: datetime) -> list[Finding]:
    """Tell of the largest groups of dead letters."""
    findings = []
    for group in dead.groups[:MAX_GROUPS]:
        queues = ", ".join(group.queues)
        ago = length_text((now - group.last_at).total_seconds())
        count = "a dead letter" if group.count == 1 else f"{group.count} dead letters"
        text = f"{count} since yesterday in {queues}, the last {ago} ago"
        if not group.error:
            reasons = ", ".join(reason or "no reason" for reason in group.reasons)
            text += f": {reasons}"
        queue = next(iter(group.queues))
        findings.append(Finding("dead letters", text, queue, is_error=False, error=group.error))
    return findings
