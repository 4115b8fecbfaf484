"""What is wrong, in one list: for `sqlbroker check` and the dashboard's overview."""

from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from faststream_sqlbroker.admin.health import HealthReport
from faststream_sqlbroker.admin.messages import Messages
from faststream_sqlbroker.admin.queues import Queues
from faststream_sqlbroker.admin.schedules import Schedules
from faststream_sqlbroker.admin.workers import Workers
from faststream_sqlbroker.core.findings import (
    Finding,
    archive_findings,
    dead_letter_findings,
    explain_late,
    mixed_findings,
    queue_findings,
    schedule_findings,
)
from faststream_sqlbroker.core.health import OLD_TRANSACTION, Health
from faststream_sqlbroker.core.overview import QueueOverview
from faststream_sqlbroker.core.retention import ArchiveSize
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import LiveSubscriber
from faststream_sqlbroker.core.times import Duration, positive_seconds
from faststream_sqlbroker.exceptions import StoreError

MAX_AGE = 600.0
"""Seconds that a due message may wait."""
MAX_LOOKS = {"late": 100, "failing": 20}
"""Queues whose messages are looked at: late ones with policies, and failing ones."""
MAX_UNKNOWN = 1_000
"""Unknown outcomes that are counted."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What an operator has to look at, and what it was found in."""

    health: Health
    queues: tuple[QueueOverview, ...]
    """Empty if tables are missing."""
    findings: tuple[Finding, ...]
    """Those of the database and of this process first."""
    archive: ArchiveSize | None = None
    """How large the archive is, and how fast it grows; None: it is not known."""

    @property
    def errors(self) -> list[Finding]:
        """Those that are no warnings."""
        return [finding for finding in self.findings if finding.is_error]

    @property
    def counts(self) -> Counter[tuple[str, ...]]:
        """How many there are of each kind, level ("error" or "warning") and queue ("": of none)."""
        levels = {True: "error", False: "warning"}
        return Counter((f.kind, levels[f.is_error], f.queue or "") for f in self.findings)


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

        It leaves nothing in the database. docs/howto/operating.md lists the kinds of findings, and
        which are errors. It reads what `health`, `queues`, `schedules`, `subscribers`,
        `dead_letters` of the last 24 hours and `unknown` read, for up to 100 late queues what
        `policies` reads, one message of up to 20 failing ones, and how large the archive is by the
        server's statistics.

        Args:
            max_age: How long a due message may wait: seconds, a timedelta or text like "10m".
            old_transaction: As for `health`.
            queues: A recent result of `queues`; None reads it.

        Raises:
            SetupError: a duration is not one, or not longer than 0.
        """
        longest = positive_seconds("max_age", max_age)
        health = await self.health(old_transaction=old_transaction)
        findings = [
            Finding(kind, text) for kind, texts in health.findings().items() for text in texts
        ]
        if health.schema:
            # What follows reads the tables, and would fail with one of these problems.
            return Findings(health, tuple(queues or ()), tuple(findings))
        collector = Collector(list(queues or ()))
        if queues is None:
            await collector.read("the queues", self._read_queues(collector))
        await collector.read("the subscribers", self._read_subscribers(collector))
        await self._find_in_queues(collector, longest)
        await collector.read("the schedules", self._find_in_schedules(collector))
        await collector.read("the dead letters", self._find_dead_letters(collector))
        await collector.read("the unknown outcomes", self._find_unknown(collector))
        await collector.read("the archive's size", self._find_growth(collector))
        findings += collector.findings
        return Findings(health, tuple(collector.queues), tuple(findings), collector.archive)

    async def _read_queues(self, collector: "Collector") -> None:
        collector.queues = await self.queues()

    async def _read_subscribers(self, collector: "Collector") -> None:
        collector.subscribers = await self.subscribers()

    async def _find_in_queues(self, collector: "Collector", max_age: float) -> None:
        """Judge each queue, and look at messages of those that are late or fail."""
        subscribers = collector.subscribers
        ruled = {name for each in subscribers if each.rules for name in each.queues}
        looks = Counter(MAX_LOOKS)
        for queue in collector.queues:
            for finding in queue_findings(queue, max_age):
                shown = finding
                has_cause = finding.kind != "late" or queue.queue in ruled
                if has_cause and looks[finding.kind]:
                    looks[finding.kind] -= 1
                    with suppress(StoreError):  # Then it is shown without.
                        shown = await self._explained(finding, queue, subscribers)
                collector.findings.append(shown)
        collector.findings += mixed_findings(subscribers)

    async def _explained(
        self, finding: Finding, queue: QueueOverview, subscribers: Sequence[LiveSubscriber]
    ) -> Finding:
        """Return `finding` with what its messages tell."""
        if finding.kind == "late":
            waits = await self.policies(queue.queue)
            return explain_late(finding, queue, waits[0], subscribers) if waits else finding
        page = await self.messages(queue=queue.queue, state=MessageState.RETRYABLE, limit=1)
        for message in page.messages:
            text = f"{finding.text}; message {message.id} after {message.attempts_count} attempts"
            return replace(finding, text=text, error=message.last_error)
        return finding

    async def _find_in_schedules(self, collector: "Collector") -> None:
        now = await self._store.server.now()
        collector.findings += schedule_findings(await self.schedules(), now)

    async def _find_dead_letters(self, collector: "Collector") -> None:
        if self._store.messages.has_archive:
            now = await self._store.server.now()
            collector.findings += dead_letter_findings(await self.dead_letters(since="1d"), now)

    async def _find_growth(self, collector: "Collector") -> None:
        if self._store.messages.has_archive:
            collector.archive = await self._store.archive_growth.size()
        if collector.archive is not None:
            collector.findings += archive_findings(collector.archive)

    async def _find_unknown(self, collector: "Collector") -> None:
        if unknown := await self.unknown(limit=MAX_UNKNOWN):
            count = "a message" if len(unknown) == 1 else f"{len(unknown)} messages"
            text = f"{count} whose handler may or may not have run"
            collector.findings.append(Finding("unknown outcomes", text))


@dataclass
class Collector:
    """Collects the findings of each part; a part that cannot be read hides no other."""

    queues: list[QueueOverview]
    subscribers: list[LiveSubscriber] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    archive: ArchiveSize | None = None

    async def read(self, what: str, look: Awaitable[None]) -> None:
        """Add what `look` finds, or that it fails."""
        try:
            await look
        except StoreError as error:
            self.findings.append(Finding("not read", f"{what} could not be read: {error}"))
