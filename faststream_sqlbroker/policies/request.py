"""The request and the result of a claim under policies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from faststream_sqlbroker.core.policies import Header, Policy, header_of
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.suspects import Suspect, Suspicion
from faststream_sqlbroker.dialects.ordered import Cursors
from faststream_sqlbroker.policies.intake import IntakePosition

REMEMBERED = 8
"""Claims of which it is known how long they took."""


@dataclass(frozen=True)
class PolicyClaimRequest:
    """What a subscriber wants to claim."""

    queues: Sequence[str]
    """In the order in which they are looked at."""
    limit: int
    lease: float
    """Seconds."""
    token: UUID
    policies: Sequence[Policy]
    ordered: bool = False
    keep: bool = True
    """Whether what is discarded is archived."""
    suspicion: Suspicion | None = None
    """No suspect is leased, unless it is `only`."""
    only: int | None = None
    """Nothing but this message."""
    starting: int | None = None
    """How many of `limit` start at once: the first ones; the others wait for a worker. None: all.
    """

    @property
    def starts(self) -> int:
        """How many start at once."""
        return self.limit if self.starting is None else min(self.limit, self.starting)

    @property
    def header(self) -> Header | None:
        """Where the keys are that the policies go by; None: they go by those of the publish."""
        return header_of(self.policies)

    @property
    def scopes(self) -> list[str]:
        """The budgets that it shares with other queues, sorted."""
        found = (getattr(policy, "scope", None) for policy in self.policies)
        return sorted({name for name in found if name is not None})


@dataclass(slots=True)
class Claim:
    """What came of it."""

    rows: list[ClaimedMessage]
    again: float | None
    """In how many seconds to claim again: 0 if another claim runs right now; None: not known."""
    gated: bool
    """Whether nothing more can start before, whatever comes."""
    more: bool = False
    """Whether there is more to look at, at once."""
    suspects: Mapping[int, Suspect] = field(default_factory=dict)
    """By id, messages that could start and were left for a claim of their own."""
    read_at: float | None = None
    """When the database's clock was read (monotonic seconds); None: nothing was due."""


@dataclass
class ScanPosition:
    """Where the last claims of one process stopped reading."""

    intake: IntakePosition = field(default_factory=IntakePosition)
    cursors: Cursors = field(default_factory=Cursors)
    took: list[float] = field(default_factory=list)
    """Seconds from reading the clock until the answer to COMMIT, of the last claims."""

    def copy(self) -> "ScanPosition":
        """One to change while it is not known whether the claim will be committed."""
        return ScanPosition(self.intake.copy(), self.cursors.copy(), list(self.took))

    def note(self, took: float) -> None:
        """A claim was answered so many seconds after it had read the clock."""
        self.took = [*self.took[1 - REMEMBERED :], took]
