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
from faststream_sqlbroker.core.retention import ArchiveSize
from faststream_sqlbroker.core.status import MIXED, LiveSubscriber, Schedule, by_way, ways_text
from faststream_sqlbroker.core.suspects import SUSPECT_AFTER
from faststream_sqlbroker.core.text import size_text
from faststream_sqlbroker.core.times import length_text

MIN_FAILING = 5
"""Fewer messages that have failed, or lost their leases again, are no finding."""
FAILING_SHARE = 0.5
"""A queue is failing if this share or more of its live messages have failed before, or of those
that ended in the last minute for good."""
SCHEDULE_LATE = timedelta(minutes=2)
"""A process looks at its schedules each half minute. One that is later than this has none."""
MAX_GROUPS = 5
"""Largest groups of dead letters that become findings."""
RATES = frozenset({"throttled", "outside_window"})
"""Reasons to wait that an application asked for, however long it takes."""
FULL_SOON = timedelta(days=2)
"""A disk that is full so soon, at the pace of the last day, is an error."""
FULL_LATER = timedelta(days=14)
"""A disk that is full so soon is a warning."""
FORESEEN = timedelta(days=90)
"""Where the free space is not known, an archive from which nothing is removed is a warning if it
will be of `LARGE_ARCHIVE` by then."""
LARGE_ARCHIVE = 100 * 2**30
"""Bytes."""
CURE = "let the broker remove old messages (`retention=`, `sqlbroker prune`)"
CURE_BEHIND = (
    "retention has not removed what is past its age: see why in the log, and whether exports to "
    "the lake of `unless_loaded_by=` go on"
)
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
            f"{queue.retrying} of {_live(queue)} messages have failed before, and "
            f"{queue.out_per_minute or 0:.3g} a minute end, {queue.failed_per_minute:.3g} as FAILED"
        )
        findings.append(Finding("failing", text, name))
    if queue.suspects.value >= MIN_FAILING:
        text = (
            f"{queue.suspects} messages have lost their lease {SUSPECT_AFTER} times or more: their "
            "handlers block the event loop for longer than `release_stuck_timeout`, or their "
            "processes are killed; the log names them"
        )
        findings.append(Finding("lease storm", text, name))
    return findings


def _live(queue: QueueOverview) -> int:
    return queue.waiting + queue.in_flight.value


def is_failing(queue: QueueOverview) -> bool:
    """Return whether most of what is live has failed before, and less than that ends in a minute;
    or whether most of what ended in the last minute is FAILED.

    A queue of which many messages end has always some that wait for another attempt.
    """
    failed = queue.retrying.value
    out = queue.out_per_minute or 0.0
    if queue.failed_per_minute >= max(MIN_FAILING, FAILING_SHARE * out):
        return True
    return failed >= max(MIN_FAILING, FAILING_SHARE * _live(queue)) and out < failed


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
        text = (
            f"{count} since yesterday in {queues}, {group.last_hour} of the last hour, the last "
            f"{ago} ago"
        )
        if not group.error:
            reasons = ", ".join(reason or "no reason" for reason in group.reasons)
            text += f": {reasons}"
        queue = next(iter(group.queues))
        findings.append(Finding("dead letters", text, queue, is_error=False, error=group.error))
    return findings


def archive_findings(archive: ArchiveSize) -> list[Finding]:
    """Find whether the archive fills the disk."""
    a_day = archive.bytes_per_day
    if not a_day:
        return []
    text = f"it grew by about {size_text(a_day)} in the last 24 hours"
    cure = CURE_BEHIND if archive.is_behind else CURE
    more = FORESEEN if archive.grows_for is None else archive.grows_for
    if archive.free is not None:
        lasts = timedelta(days=min(archive.free / a_day, FORESEEN.days))
        if lasts >= FULL_LATER or more < lasts:
            return []
        text += (
            f", and {size_text(archive.free)} are free: the disk is full in "
            f"{length_text(lasts.total_seconds())}; {cure}, or give it more space"
        )
        return [Finding("archive growth", text, is_error=lasts < FULL_SOON)]
    later = archive.size + a_day * FORESEEN.days
    if archive.grows_for is not None or not archive.is_whole or later < LARGE_ARCHIVE:
        return []
    text += (
        f" to {size_text(archive.size)}, and too little is removed: it has about "
        f"{size_text(later)} in {FORESEEN.days} days, and the server does not tell how much is "
        f"free; {cure}"
    )
    return [Finding("archive growth", text, is_error=False)]
