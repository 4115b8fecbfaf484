"""The request and the result of a claim under policies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.suspects import Suspect, Suspicion
from faststream_sqlbroker.dialects.ordered import Cursors
from faststream_sqlbroker.dialects.policy_intake import IntakePosition


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


@dataclass
class ScanPosition:
    """Where the last claims of one process stopped reading."""

    intake: IntakePosition = field(default_factory=IntakePosition)
    cursors: Cursors = field(default_factory=Cursors)

    def copy(self) -> "ScanPosition":
        """One to change while it is not known whether the claim will be committed."""
        return ScanPosition(self.intake.copy(), self.cursors.copy())
