"""What is wrong, in one list: for `sqlbroker check` and the dashboard's overview."""

from collections.abc import Sequence
from dataclasses import dataclass

from faststream_sqlbroker.admin.health import HealthReport
from faststream_sqlbroker.admin.messages import Messages
from faststream_sqlbroker.admin.queues import Queues
from faststream_sqlbroker.admin.schedules import Schedules
from faststream_sqlbroker.admin.workers import Workers
from faststream_sqlbroker.core.findings import (
    Finding,
    dead_letter_findings,
    explain_late,
    mixed_findings,
    queue_findings,
    schedule_findings,
)
from faststream_sqlbroker.core.health import OLD_TRANSACTION, Health
from faststream_sqlbroker.core.overview import QueueOverview
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.times import Duration, positive_seconds

MAX_AGE = 600.0
"""Seconds that a due message may wait."""
MAX_EXPLAINED = 20
"""Late and failing queues whose messages are looked at."""
EXPLAINED = frozenset({"late", "failing"})
MAX_UNKNOWN = 1_000
"""Unknown outcomes that are counted."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What an operator has to look at, and what it was found in."""

    health: Health
    queues: tuple[QueueOverview, ...]
    """None if tables or rights are missing."""
    findings: tuple[Finding, ...]
    """Those of the database and of this process first."""

    @property
    def errors(self) -> list[Finding]:
        """Those that are no warnings."""
        return [finding for finding in self.findings if finding.is_error]


class FindingsReport(Queues, Workers, Messages, Schedules, HealthReport):
    """Looks at all that an operator watches."""

    async def findings(
        self,
        *,
        max_age: Duration = MAX_AGE,
        old_transaction: Duration = OLD_TRANSACTION,
        queues: Sequence[QueueOverview] | None = None,
    ) -> Findings:
        """Look at the database, the queues, the schedules, the subscribers and the dead letters.

        Nothing is written. docs/howto/operating.md lists the kinds of findings, and which are
        errors. It reads what `health`, `queues`, `schedules`, `subscribers`, `dead_letters` of the
        last 24 hours and `unknown` read, and for up to 20 late or failing queues what `policies`
        reads and one message.

        Args:
            max_age: How long a due message may wait: seconds, a timedelta or text like "10m".
            old_transaction: As for `health`.
            queues: What `queues` has told lately; None: it is read.

        Raises:
            SetupError: a duration is not one, or not longer than 0.
        """
        longest = positive_seconds("max_age", max_age)
        health = await self.health(old_transaction=old_transaction)
        findings = [
            Finding(kind, text) for kind, texts in health.findings().items() for text in texts
        ]
        if health.schema or health.lacks:
            # What follows reads the tables, and would fail with one of these problems.
            return Findings(health, (), tuple(findings))
        if queues is None:
            queues = await self.queues()
        now = await self._store.server.now()
        findings += await self._queue_findings(queues, longest)
        findings += mixed_findings(await self.subscribers())
        findings += schedule_findings(await self.schedules(), now)
        if self._store.messages.has_archive:
            findings += dead_letter_findings(await self.dead_letters(since="1d"), now)
        if unknown := await self.unknown(limit=MAX_UNKNOWN):
            count = "a message" if len(unknown) == 1 else f"{len(unknown)} messages"
            text = f"{count} whose handler may or may not have run"
            findings.append(Finding("unknown outcomes", text))
        return Findings(health, tuple(queues), tuple(findings))

    async def _queue_findings(
        self, queues: Sequence[QueueOverview], max_age: float
    ) -> list[Finding]:
        findings = []
        looked_at = 0
        for queue in queues:
            for finding in queue_findings(queue, max_age):
                looked_at += finding.kind in EXPLAINED
                is_looked_at = looked_at <= MAX_EXPLAINED
                findings.append(await self._explained(finding, queue) if is_looked_at else finding)
        return findings

    async def _explained(self, finding: Finding, queue: QueueOverview) -> Finding:
        """Return `finding` with what its messages tell."""
        if finding.kind == "late":
            waits = await self.policies(queue.queue)
            return explain_late(finding, waits[0], queue) if waits else finding
        if finding.kind == "failing":
            page = await self.messages(queue=queue.queue, state=MessageState.RETRYABLE, limit=1)
            for message in page.messages:
                text = (
                    f"{finding.text}; message {message.id} after {message.attempts_count} attempts"
                )
                return Finding(finding.kind, text, finding.queue, error=message.last_error)
        return finding
