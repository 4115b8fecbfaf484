"""List all problems that an operator should know, for `sqlbroker check` and the dashboard's
overview.
"""

from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from faststream_sqlbroker.admin.health import HealthReport
from faststream_sqlbroker.admin.messages import MessageQueries
from faststream_sqlbroker.admin.queues import QueueOperations
from faststream_sqlbroker.admin.schedules import ScheduleOperations
from faststream_sqlbroker.admin.workers import WorkerOperations
from faststream_sqlbroker.core.findings import (
    Finding,
    explain_late,
    find_archive_growth,
    find_dead_letters,
    find_mixed_subscribers,
    find_overdue_schedules,
    find_queue_problems,
)
from faststream_sqlbroker.core.health import OLD_TRANSACTION, Health
from faststream_sqlbroker.core.overview import QueueOverview
from faststream_sqlbroker.core.retention import ArchiveSize
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import LiveSubscriber
from faststream_sqlbroker.core.text import pluralize
from faststream_sqlbroker.core.times import Duration, parse_positive
from faststream_sqlbroker.exceptions import StoreError

MAX_AGE = 600.0
"""Maximum seconds that a due message may wait."""
MAX_EXPLAINED_QUEUES = {"late": 100, "failing": 20}
"""Number of queues whose messages are read: late queues with policies, and failing queues."""
MAX_UNKNOWN = 1_000
"""Maximum number of unknown outcomes to count."""
MAX_SCHEDULES = 100_000
"""Maximum number of schedules to check."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Problems that an operator should check, with the underlying results."""

    health: Health
    queues: tuple[QueueOverview, ...]
    """Empty if tables are missing."""
    findings: tuple[Finding, ...]
    """Findings of the database and of this process first."""
    archive: ArchiveSize | None = None
    """Size and growth of the archive; None if unknown."""

    @property
    def errors(self) -> list[Finding]:
        """Findings that are not just warnings."""
        return [finding for finding in self.findings if finding.is_error]

    @property
    def counts(self) -> Counter[tuple[str, ...]]:
        """Number of findings by kind, level ("error" or "warning") and queue ("" for none)."""
        levels = {True: "error", False: "warning"}
        return Counter(
            (finding.kind, levels[finding.is_error], finding.queue or "")
            for finding in self.findings
        )


class FindingsReport(
    QueueOperations, WorkerOperations, MessageQueries, ScheduleOperations, HealthReport
):
    """Reads everything that an operator watches."""

    async def findings(
        self,
        *,
        max_age: Duration = MAX_AGE,
        old_transaction: Duration = OLD_TRANSACTION,
        queues: Sequence[QueueOverview] | None = None,
    ) -> Findings:
        """Check the database, the queues, the schedules, the subscribers and the dead letters.

        Nothing is written to the database. docs/howto/operating.md lists the kinds of findings, and
        which are errors. The check reads the data of `health`, `queues`, `schedules`,
        `subscribers`, `dead_letters` of the last 24 hours and `unknown`; for up to 100 late queues
        the data of `policies`; one message of up to 20 failing queues; and the archive's size by
        the server's statistics.

        Args:
            max_age: How long a due message may wait: seconds, a timedelta or text like "10m".
            old_transaction: As for `health`.
            queues: A recent result of `queues`; None reads it.

        Raises:
            SetupError: a value is not a duration, or not longer than 0.
        """
        max_age_seconds = parse_positive("max_age", max_age)
        health = await self.health(old_transaction=old_transaction)
        findings = [
            Finding(kind, text) for kind, texts in health.findings().items() for text in texts
        ]
        if health.schema:
            # All other checks read the tables, and would fail with one of these problems.
            return Findings(health, tuple(queues or ()), tuple(findings))
        collector = FindingCollector(list(queues or ()))
        if queues is None:
            await collector.collect("the queues", self._read_queues(collector))
        await collector.collect("the subscribers", self._read_subscribers(collector))
        await self._check_queues(collector, max_age_seconds)
        await collector.collect("the schedules", self._check_schedules(collector))
        await collector.collect("the dead letters", self._check_dead_letters(collector))
        await collector.collect("the unknown outcomes", self._check_unknown(collector))
        await collector.collect("the archive's size", self._check_archive_size(collector))
        findings += collector.findings
        return Findings(health, tuple(collector.queues), tuple(findings), collector.archive)

    async def _read_queues(self, collector: "FindingCollector") -> None:
        """Read the overviews, from which the later checks of queues are made."""
        collector.queues = await self.queues()

    async def _read_subscribers(self, collector: "FindingCollector") -> None:
        collector.subscribers = await self.subscribers()

    async def _check_queues(self, collector: "FindingCollector", max_age: float) -> None:
        """Check each queue, and explain findings of queues that are late or fail.

        An explanation reads messages, so the number of explained queues is limited. A late queue is
        explained only if its subscribers have policies, which may be the cause.
        """
        subscribers = collector.subscribers
        queues_with_policies = {
            name for subscriber in subscribers if subscriber.rules for name in subscriber.queues
        }
        remaining = Counter(MAX_EXPLAINED_QUEUES)
        for queue in collector.queues:
            for finding in find_queue_problems(queue, max_age):
                result = finding
                has_cause = finding.kind != "late" or queue.queue in queues_with_policies
                if has_cause and remaining[finding.kind]:
                    remaining[finding.kind] -= 1
                    with suppress(StoreError):  # then the finding has no explanation
                        result = await self._add_explanation(finding, queue, subscribers)
                collector.findings.append(result)
        collector.findings += find_mixed_subscribers(subscribers)

    async def _add_explanation(
        self, finding: Finding, queue: QueueOverview, subscribers: Sequence[LiveSubscriber]
    ) -> Finding:
        """Return `finding` with details from the messages.

        A late queue may become a warning, if its policies make the messages wait. A failing queue
        gets the error of a message that waits for its next attempt.
        """
        if finding.kind == "late":
            queue_policies = await self.policies(queue.queue)
            return (
                explain_late(finding, queue, queue_policies[0], subscribers)
                if queue_policies
                else finding
            )
        page = await self.messages(queue=queue.queue, state=MessageState.RETRYABLE, limit=1)
        for message in page.messages:
            attempts = pluralize(message.attempts_count, "attempts")
            text = f"{finding.text}; message {message.id} after {attempts}"
            return replace(finding, text=text, error=message.last_error)
        return finding

    async def _check_schedules(self, collector: "FindingCollector") -> None:
        """Find overdue schedules: no process declares them, a process is still running them, or
        their function fails.
        """
        now = await self._store.server.read_now()
        collector.findings += find_overdue_schedules(await self.schedules(limit=MAX_SCHEDULES), now)

    async def _check_dead_letters(self, collector: "FindingCollector") -> None:
        """Find errors of the last day that have made messages fail for good."""
        if self._store.messages.has_archive:
            now = await self._store.server.read_now()
            collector.findings += find_dead_letters(await self.dead_letters(since="1d"), now)

    async def _check_archive_size(self, collector: "FindingCollector") -> None:
        """Read the size of the archive, and find an archive that will soon fill the disk."""
        if self._store.messages.has_archive:
            collector.archive = await self._store.archive_growth.read_size()
        if collector.archive is not None:
            collector.findings += find_archive_growth(collector.archive)

    async def _check_unknown(self, collector: "FindingCollector") -> None:
        """Find messages of AckPolicy.ACK_FIRST whose handler may or may not have run.

        They were removed before the handler started. Then their process died, the answer to the
        COMMIT was lost, or the handler was cut off at a stop.
        """
        if unknown := await self.unknown(limit=MAX_UNKNOWN):
            at_least = "at least " if len(unknown) == MAX_UNKNOWN else ""
            count = f"{at_least}{pluralize(len(unknown), 'messages')}"
            text = f"the handler of {count} may or may not have run"
            collector.findings.append(Finding("unknown outcomes", text))


@dataclass
class FindingCollector:
    """Collects the findings of each part; a part that cannot be read does not hide other parts."""

    queues: list[QueueOverview]
    subscribers: list[LiveSubscriber] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    archive: ArchiveSize | None = None

    async def collect(self, label: str, check: Awaitable[None]) -> None:
        """Await a check; if the database fails, add the finding "not read" and continue.

        `label` names the part that is checked, such as "the queues".
        """
        try:
            await check
        except StoreError as error:
            self.findings.append(Finding("not read", f"{label} could not be read: {error}"))
