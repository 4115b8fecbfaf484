"""Findings: errors and warnings that need an operator's attention.

Times are the database's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from faststream_sqlbroker.core.overview import DeadLetters, QueueOverview
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.policies.throttle import Throttle
from faststream_sqlbroker.core.policy_waits import PoliciedQueue
from faststream_sqlbroker.core.retention import ArchiveSize
from faststream_sqlbroker.core.status import (
    MIXED_HINT,
    LiveSubscriber,
    Schedule,
    format_modes,
    group_by_mode,
)
from faststream_sqlbroker.core.suspects import SUSPECT_AFTER
from faststream_sqlbroker.core.text import format_size, pluralize
from faststream_sqlbroker.core.times import format_duration

MIN_FAILING = 5
"""Minimum number of failed messages, or of repeatedly lost leases, for a finding."""
FAILING_SHARE = 0.5
"""A queue is failing if at least this share of its live messages have failed before, or of the
messages that ended in the last minute are FAILED."""
SCHEDULE_LATE = timedelta(minutes=2)
"""A process checks its schedules every half minute. A schedule that is later than this has no
process."""
MAX_GROUPS = 5
"""Number of the largest groups of dead letters that become findings."""
POLICY_REASONS = frozenset({"throttled", "outside_window"})
"""Reasons to wait that the application has asked for, however long they take."""
DISK_FULL_ERROR = timedelta(days=2)
"""If the disk will be full within this time, at the rate of the last day, the finding is an
error."""
DISK_FULL_WARNING = timedelta(days=14)
"""If the disk will be full within this time, the finding is a warning."""
FORECAST = timedelta(days=90)
"""If the free space is unknown, an archive from which nothing is removed is a warning if it will
reach `LARGE_ARCHIVE` within this time."""
LARGE_ARCHIVE = 100 * 2**30
"""Bytes."""
REMEDY = "remove old messages with `retention=` or `sqlbroker prune`"
REMEDY_BEHIND = (
    "retention has not removed messages past their age: check the log, and whether exports to the "
    "lake of `unless_loaded_by=` still run"
)
MIN_USED_RATE = 0.5
"""A Throttle limits a queue if at least this share of its rate ends in a minute."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that needs an operator's attention."""

    kind: str
    """A kind of the table of findings in docs/howto/operating.md."""
    text: str
    """The problem and its remedy."""
    queue: str | None = None
    is_error: bool = True
    """True if `sqlbroker check` fails because of the finding; a warning is only displayed."""
    error: str | None = None
    """The last error of a message that the finding is about; may contain parts of a body."""

    def __str__(self) -> str:
        """Return the text with the first line of the error."""
        lines = (self.error or "").splitlines()
        return f"{self.text}: {lines[0]}" if lines else self.text


def find_queue_problems(queue: QueueOverview, max_age: float) -> list[Finding]:
    """Return the findings about a single queue.

    A finding is a problem that needs an operator's attention. A queue is late if a due message, or
    the check of a standby message, has waited for longer than `max_age` seconds.
    """
    name = queue.queue
    paused = ""
    findings = []
    if queue.paused is not None:
        reason = f": {queue.paused.reason}" if queue.paused.reason else ""
        paused = f"paused by {queue.paused.by}{reason}"
        findings.append(Finding("paused", paused, name, is_error=False))
    if queue.problem is not None:
        kind = "no subscriber" if queue.used else "unused"
        findings.append(Finding(kind, queue.problem, name, is_error=queue.used))
    elif late_text := _format_late(queue, max_age):
        findings.append(Finding("late", f"{late_text}; {paused}" if paused else late_text, name))
    if is_failing(queue):
        text = (
            f"{queue.retrying} of {_count_live(queue)} messages have failed before; "
            f"{queue.out_per_minute or 0:.3g} a minute end, {queue.failed_per_minute:.3g} as FAILED"
        )
        findings.append(Finding("failing", text, name))
    if queue.suspects.value >= MIN_FAILING:
        text = (
            f"{queue.suspects} messages have lost their lease {SUSPECT_AFTER} times or more: their "
            "handlers block the event loop for longer than `release_stuck_timeout`, or their "
            "processes are killed; the log has the number of expired leases"
        )
        findings.append(Finding("lease storm", text, name))
    return findings


def _count_live(queue: QueueOverview) -> int:
    return queue.waiting + queue.in_flight.value


def is_failing(queue: QueueOverview) -> bool:
    """Return True if most messages of the queue fail.

    Either most of the messages that ended in the last minute are FAILED; or most live messages have
    failed before, and fewer messages than these end in a minute. The last condition excludes busy
    queues, which always have messages that wait for another attempt.
    """
    failed = queue.retrying.value
    ended_per_minute = queue.out_per_minute or 0.0
    if queue.failed_per_minute >= max(MIN_FAILING, FAILING_SHARE * ended_per_minute):
        return True
    return (
        failed >= max(MIN_FAILING, FAILING_SHARE * _count_live(queue)) and ended_per_minute < failed
    )


def _format_late(queue: QueueOverview, max_age: float) -> str | None:
    """Return the text of the finding `late`, or None if the queue is not late.

    It is late if a due message has waited longer than `max_age`, or if claims have not checked the
    standby messages for so long. Standby messages wait while a newer message of their key is
    delivered in their place.
    """
    if queue.oldest_due_age > max_age:
        return f"a due message has waited for {format_duration(queue.oldest_due_age)}"
    return queue.late_standing if queue.standing_overdue > max_age else None


def explain_late(
    finding: Finding,
    queue: QueueOverview,
    waits: PoliciedQueue,
    subscribers: Iterable[LiveSubscriber],
) -> Finding:
    """Turn `finding` into a warning if the queue's policies make the messages wait.

    That is so if all due messages wait for a slot (a start that a Throttle allows) or a window, or
    if the queue's Throttles let nearly as many start as they may. Otherwise handlers are too slow,
    or hang.
    """
    # Waits of messages that are not due yet do not explain why the queue is late.
    policy_waits = [wait for wait in waits.waits if wait.code in POLICY_REASONS and wait.due]
    if policy_waits and sum(wait.due for wait in policy_waits) >= waits.due:
        policy = policy_waits[0].policy
        text = f"{finding.text}, because {policy} allows no more starts"
        if policy_waits[0].until_last is not None and not policy_waits[0].capped:
            text += (
                f"; the last message waits until {policy_waits[0].until_last:%Y-%m-%d %H:%M:%S} UTC"
            )
    elif (throttle := _find_limiting_throttle(queue, subscribers)) is not None:
        # Between two claims a slot may be free although the Throttle limits the queue.
        text = f"{finding.text}, because {throttle} allows no more starts"
    else:
        return finding
    return Finding("waits for policy", text, finding.queue, is_error=False)


def _find_limiting_throttle(
    queue: QueueOverview, subscribers: Iterable[LiveSubscriber]
) -> Throttle | None:
    """Return the Throttle of which `queue` uses at least half of the rate, or None.

    Such a Throttle explains why due messages wait: more handlers may not start. Throttles per key
    are ignored: their rate says nothing about the whole queue.
    """
    rules = [
        rule
        for subscriber in subscribers
        if queue.queue in subscriber.queues
        for rule in subscriber.rules
    ]
    for rule in rules:
        if isinstance(rule, Throttle) and not rule.key:
            per_minute = rule.rate * 60 * MICROSECONDS / rule.per
            if (queue.out_per_minute or 0.0) >= MIN_USED_RATE * per_minute:
                return rule
    return None


def find_mixed_subscribers(subscribers: Sequence[LiveSubscriber]) -> list[Finding]:
    """Find the queues whose live subscribers have different policies.

    A policy, such as a Throttle, is a rule for the order or the rate of a queue's messages. It is
    not guaranteed while a subscriber without it claims from the same queue, as during a deployment.
    """
    findings = []
    for queue in sorted({name for subscriber in subscribers for name in subscriber.queues}):
        groups = group_by_mode(queue, subscribers)
        if len(groups) > 1:
            text = f"its subscribers differ: {format_modes(groups)}; {MIXED_HINT}"
            findings.append(Finding("mixed subscribers", text, queue))
    return findings


def find_overdue_schedules(schedules: Iterable[Schedule], now: datetime) -> list[Finding]:
    """Find the schedules that should have fired.

    A schedule that a process is running is only a warning, unless its function has failed.
    """
    findings = []
    for schedule in schedules:
        due = schedule.run_at or schedule.next_fire_at
        if schedule.paused_at is None and due is not None and now - due > SCHEDULE_LATE:
            text = (
                f"{schedule.name} was due at {due:%Y-%m-%d %H:%M:%S} UTC, "
                f"{format_duration((now - due).total_seconds())} ago, and has not fired"
            )
            if schedule.failures_count:
                failures = pluralize(schedule.failures_count, "times")
                text += f": its function failed {failures}, see the log"
            elif schedule.running:
                text += ": a process is running it"
            else:
                text += (
                    ": no running process declares it; start that process, or remove the schedule "
                    "with `sqlbroker forget-schedule`"
                )
            is_error = not schedule.running or bool(schedule.failures_count)
            findings.append(Finding("overdue schedule", text, is_error=is_error))
    return findings


def find_dead_letters(dead: DeadLetters, now: datetime) -> list[Finding]:
    """Return findings for the largest groups of dead letters, which share an error.

    A dead letter is a message that failed for good. Smaller groups are one more finding.
    """
    findings = []
    at_least = "" if dead.scanned_until is None else "at least "
    for group in dead.groups[:MAX_GROUPS]:
        queues = ", ".join(group.queues)
        last_ago = format_duration((now - group.last_at).total_seconds())
        count = at_least + pluralize(group.count, "dead letters")
        text = (
            f"{count} since yesterday in {queues}, {group.last_hour} in the last hour, the "
            f"latest {last_ago} ago"
        )
        if not group.error:
            reasons = ", ".join(reason or "no reason" for reason in group.reasons)
            text += f": {reasons}"
        queue = next(iter(group.queues))
        findings.append(Finding("dead letters", text, queue, is_error=False, error=group.error))
    if len(dead.groups) > MAX_GROUPS:
        text = "smaller groups are not listed here: see `sqlbroker dead --since 1d`"
        findings.append(Finding("dead letters", text, is_error=False))
    return findings


def find_archive_growth(archive: ArchiveSize) -> list[Finding]:
    """Return a finding if the archive will soon fill the disk.

    The forecast assumes the growth of the last 24 hours. Growth ends once as much is removed as is
    added. If the free space is unknown, the finding is about an archive from which nothing is
    removed and that will reach `LARGE_ARCHIVE`.
    """
    bytes_per_day = archive.bytes_per_day
    if not bytes_per_day:
        return []
    text = f"the archive grew by about {format_size(bytes_per_day)} in the last 24 hours"
    remedy = REMEDY_BEHIND if archive.is_behind else REMEDY
    growth_time = FORECAST if archive.grows_for is None else archive.grows_for
    if archive.free is not None:
        time_until_full = timedelta(days=min(archive.free / bytes_per_day, FORECAST.days))
        if time_until_full >= DISK_FULL_WARNING or growth_time < time_until_full:
            return []
        text += (
            f", and {format_size(archive.free)} are free: the disk will be full in "
            f"{format_duration(time_until_full.total_seconds())}; {remedy}, or add disk space"
        )
        return [Finding("archive growth", text, is_error=time_until_full < DISK_FULL_ERROR)]
    future_size = archive.size + bytes_per_day * FORECAST.days
    if archive.grows_for is not None or not archive.is_whole or future_size < LARGE_ARCHIVE:
        return []
    text += (
        f" to {format_size(archive.size)}, and too little is removed: it will have about "
        f"{format_size(future_size)} in {FORECAST.days} days, and the server does not report its "
        f"free space; {remedy}"
    )
    return [Finding("archive growth", text, is_error=False)]
