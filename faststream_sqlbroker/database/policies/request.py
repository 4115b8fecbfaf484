"""The request and the result of a claim under policies, and what becomes of the messages leased."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from uuid import UUID

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Reject
from faststream_sqlbroker.core.policies import Header, Policy, header_of, key_of
from faststream_sqlbroker.core.policies.live_rates import Place
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.scopes import MEMBER_RENEWED
from faststream_sqlbroker.core.reasons import NO_KEY, THROTTLED
from faststream_sqlbroker.core.rows import ClaimedMessage, Slot
from faststream_sqlbroker.core.suspects import Suspect, Suspicion
from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.database.parts.ordered import Cursors
from faststream_sqlbroker.database.policies.intake import IntakePosition
from faststream_sqlbroker.database.policies.slot_use import ReadTime, SlotUse

REMEMBERED = 8
"""Claims of which it is known how long they took."""
LOOK = 1.0
"""Seconds for which what was read of other processes holds, ..."""
LOOK_SHARE = 30
"""... and at least so many times what a claim takes that reads it, ..."""
LONGEST_LOOK = MEMBER_RENEWED / MICROSECONDS
"""... but no longer than this: a claim that reads it also renews what others know of this one."""


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
    """How many of `limit` start at once: the first ones; the others wait for a worker. None: all;
    less than 0: so many wait already."""
    wave: int = 1
    """How many of those that wait start together, as far as is known, ..."""
    wave_time: float = 0.0
    """... and how many seconds after the ones before."""
    gathers: float = 0.0
    """How many seconds a batch may wait for more messages after its first one."""

    @property
    def starts(self) -> int:
        """How many start at once."""
        return self.limit if self.starting is None else max(0, min(self.limit, self.starting))

    def seconds_behind(self, claimed: int) -> float:
        """How long what waits for a worker waits behind what waits already, after so many were
        `claimed` (seconds).
        """
        free = self.limit if self.starting is None else self.starting
        return max(0, claimed - free) / max(1, self.wave) * self.wave_time

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
    """The result of a claim."""

    rows: list[ClaimedMessage]
    again: float | None
    """In how many seconds after the read to claim again: 0 if another claim runs right now; None:
    not known."""
    gated: bool
    """Whether nothing more can start before, whatever comes."""
    more: bool = False
    """Whether there is more to look at, at once."""
    suspects: Mapping[int, Suspect] = field(default_factory=dict)
    """By id, messages that could start and were left for a claim of their own."""
    read: ReadTime | None = None
    """When the database's clock was read; None: nothing was due."""


@dataclass
class ScanPosition:
    """Where the last claims of one process stopped reading."""

    intake: IntakePosition = field(default_factory=IntakePosition)
    cursors: Cursors = field(default_factory=Cursors)
    took: list[float] = field(default_factory=list)
    """Seconds from reading the clock until the answer to COMMIT, of the last claims."""
    whole_took: list[float] = field(default_factory=list)
    """Seconds from their beginning until then, which have the wait for the lock, too."""
    swaps_took: list[float] = field(default_factory=list)
    """The same of claims by compare and swap."""
    use: SlotUse = field(default_factory=lambda: SlotUse(Clock()))
    """How slots were used; shared by all copies."""
    told: dict[Place, int] = field(default_factory=dict)
    """By place, how much of that this claim has told."""

    def copy(self) -> "ScanPosition":
        """One to change while it is not known whether the claim will be committed."""
        return ScanPosition(
            self.intake.copy(),
            self.cursors.copy(),
            self.took[:],
            self.whole_took[:],
            self.swaps_took[:],
            self.use,
        )

    def note(self, took: float, whole_took: float) -> None:
        """A claim was answered so many seconds after it had read the clock, and had begun."""
        self.took = [*self.took[1 - REMEMBERED :], took]
        self.whole_took = [*self.whole_took[1 - REMEMBERED :], whole_took]

    def note_swap(self, took: float) -> None:
        """The same of a claim by compare and swap."""
        self.swaps_took = [*self.swaps_took[1 - REMEMBERED :], took]

    def is_old(self, read_at: float, asked: float) -> bool:
        """Whether what was read of other processes `read_at` is to be read again: under the lock,
        and where that takes long, not with every claim.
        """
        usual = median(self.took) if self.took else 0.0
        return asked >= read_at + min(max(LOOK, LOOK_SHARE * usual), LONGEST_LOOK)


def refuse(
    rows: Iterable[ClaimedMessage], policies: Sequence[Policy], dead: Collection[int] = ()
) -> None:
    """Record why some of `rows` are claimed only to be made dead letters: those of `dead`, and
    those without a key that `policies` do not deliver.
    """
    keyed = refuses_keyless(policies)
    for row in rows:
        if row.id in dead:
            row.settle_as(Reject(THROTTLED))
        elif keyed and row.policy_key is None:
            row.settle_as(Reject(NO_KEY))


def refuses_keyless(policies: Sequence[Policy]) -> bool:
    """Tell whether a message without a key is a dead letter."""
    return any(
        getattr(policy, "without_key", "") == "dead_letter" and key_of(policy)
        for policy in policies
    )


def end_at(closes: int, rows: Iterable[ClaimedMessage], read: ReadTime) -> None:
    """None of `rows`, some of which wait for a worker, may start when the window has closed."""
    latest = read.surely_before(closes)
    for row in rows:
        slot = row.slot
        if slot is None:
            row.slot = Slot(0.0, latest)
        elif latest < slot.latest:
            row.slot = replace(slot, latest=latest)


def has_expired(row: ClaimedMessage) -> bool:
    """Tell whether a message had expired when leased: it takes no slot."""
    return row.expires_at is not None and row.expires_at <= row.acquired_at


def may_start(row: ClaimedMessage) -> bool:
    """Whether its handler may start: it ends in no other way, and lives to see its slot."""
    if row.outcome is not None or has_expired(row):
        return False
    if row.expires_at is None or row.slot is None or row.slot.at is None:
        return True
    return row.expires_at > from_microseconds(row.slot.at)
