"""The request and the result of a claim under policies, and checks of the leased messages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from uuid import UUID

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Reject
from faststream_sqlbroker.core.policies import (
    Header,
    Once,
    Policy,
    find_key_header,
    find_once,
    get_policy_key,
)
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.policies.live_rates import SlotLogKey
from faststream_sqlbroker.core.policies.scopes import MEMBER_RENEWAL_INTERVAL
from faststream_sqlbroker.core.reasons import NO_KEY, THROTTLED
from faststream_sqlbroker.core.rows import ClaimedMessage, Slot
from faststream_sqlbroker.core.suspects import Suspect, SuspectRule
from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.database.parts.ordered import Cursors
from faststream_sqlbroker.database.policies.intake import IntakePosition
from faststream_sqlbroker.database.policies.slot_use import ReadTime, SlotUse

MAX_DURATIONS = 8
"""Number of claims whose durations are remembered."""
MIN_REFRESH = 1.0
"""Seconds for which values read from other processes are valid at least, ..."""
REFRESH_FACTOR = 30
"""... and at least this many times the duration of a claim that reads them, ..."""
MAX_REFRESH = MEMBER_RENEWAL_INTERVAL / MICROSECONDS
"""... but no longer than this: a claim that reads them also renews the values of this process."""


@dataclass(frozen=True)
class PolicyClaimRequest:
    """The claim that a subscriber requests."""

    queues: Sequence[str]
    """In the order in which they are scanned."""
    limit: int
    lease: float
    """Seconds."""
    token: UUID
    policies: Sequence[Policy]
    ordered: bool = False
    keep: bool = True
    """True if discarded messages are archived."""
    suspect_rule: SuspectRule | None = None
    """Suspects are not leased, except the message `only`."""
    only: int | None = None
    """Claim only this message."""
    starting: int | None = None
    """Number of `limit` messages that start at once; the others wait for a worker. None: all. A
    negative number: so many messages wait already.
    """
    wave: int = 1
    """Expected number of waiting messages that start together, ..."""
    wave_time: float = 0.0
    """... and the seconds between two such groups."""
    batch_wait: float = 0.0
    """Seconds for which a batch may wait for more messages after its first one."""

    @property
    def immediate_starts(self) -> int:
        """Number of messages that start at once."""
        return self.limit if self.starting is None else max(0, min(self.limit, self.starting))

    def get_wait_seconds(self, count: int) -> float:
        """Return for how many seconds a message waits for the workers, after `count` messages.

        Messages beyond the free workers start in waves: `wave` of them every `wave_time` seconds. A
        throttle grants their slots for that time.
        """
        free = self.limit if self.starting is None else self.starting
        return max(0, count - free) / max(1, self.wave) * self.wave_time

    @property
    def header(self) -> Header | None:
        """The header by whose values the claim chooses; None for the keys of the publish."""
        return find_key_header(self.policies, ordered=self.ordered)

    @property
    def scopes(self) -> list[str]:
        """The budgets shared with other queues, sorted."""
        names = (getattr(policy, "scope", None) for policy in self.policies)
        return sorted({name for name in names if name is not None})


@dataclass(slots=True)
class PolicyClaim:
    """The result of a claim under policies."""

    rows: list[ClaimedMessage]
    next_claim_in: float | None
    """Seconds after the read until the next claim: 0 if another claim is running; None if not
    known.
    """
    is_blocked: bool
    """True if nothing more can start before that time, whatever arrives."""
    has_more: bool = False
    """True if more remains to be scanned immediately."""
    suspects: Mapping[int, Suspect] = field(default_factory=dict)
    """By id, messages that could start and were left for a claim of their own."""
    read: ReadTime | None = None
    """The reading of the database's clock; None if no queue was locked: nothing was due, or other
    claims hold the locks.
    """


@dataclass
class ScanPosition:
    """The positions at which the last claims of a process stopped reading."""

    intake: IntakePosition = field(default_factory=IntakePosition)
    cursors: Cursors = field(default_factory=Cursors)
    durations: list[float] = field(default_factory=list)
    """Seconds from reading the clock until the answer to COMMIT, for the last claims."""
    total_durations: list[float] = field(default_factory=list)
    """Seconds from the start until the answer to COMMIT, including the wait for the lock."""
    swap_durations: list[float] = field(default_factory=list)
    """Seconds of the last claims by compare and swap."""
    slot_use: SlotUse = field(default_factory=lambda: SlotUse(Clock()))
    """The use of slots; shared by all copies."""
    reported: dict[SlotLogKey, int] = field(default_factory=dict)
    """Number of uses that this claim has reported, by slot key."""

    def copy(self) -> "ScanPosition":
        """Return a copy to change while the outcome of the claim's commit is unknown.

        If the transaction is repeated or fails, the next claim starts at the original again.
        `slot_use` is shared, and the reports of the copy start empty.
        """
        return ScanPosition(
            self.intake.copy(),
            self.cursors.copy(),
            self.durations[:],
            self.total_durations[:],
            self.swap_durations[:],
            self.slot_use,
        )

    def record_claim(self, duration: float, total_duration: float) -> None:
        """Record the seconds that a claim took since reading the clock, and since the start."""
        self.durations = [*self.durations[1 - MAX_DURATIONS :], duration]
        self.total_durations = [*self.total_durations[1 - MAX_DURATIONS :], total_duration]

    def record_swap(self, duration: float) -> None:
        """Record the seconds that a claim by compare and swap took."""
        self.swap_durations = [*self.swap_durations[1 - MAX_DURATIONS :], duration]

    def is_old(self, read_at: float, now: float) -> bool:
        """Return True if values read at `read_at` from other processes must be read again.

        These are their limits and rates. They are read under the queue's lock; where that takes
        long, it would slow down every claim, so they are read less often.
        """
        usual = median(self.durations) if self.durations else 0.0
        return now >= read_at + min(max(MIN_REFRESH, REFRESH_FACTOR * usual), MAX_REFRESH)


def set_once_keys(rows: Iterable[ClaimedMessage], policies: Sequence[Policy]) -> None:
    """Set the keys of leased `rows` for policy Once, if that uses a header.

    They are read from the rows themselves: the stored `policy_key` may be that of another policy,
    or of a header that an earlier deployment named. By it, other messages would be duplicates.
    """
    once = find_once(policies)
    if once is not None and isinstance(once.key, Header):
        for row in rows:
            row.once_header_key = (once.key.key(row.headers),)


def reject_unstartable(
    rows: Iterable[ClaimedMessage], policies: Sequence[Policy], dead: Collection[int] = ()
) -> None:
    """Set the outcome of `rows` that are claimed only to become dead letters.

    These are the rows in `dead`, which a throttle refused, and those without a key that `policies`
    do not deliver. Only a leased message can be settled as FAILED, so they are claimed, but never
    handled.
    """
    needs_once_key = must_reject_keyless([p for p in policies if isinstance(p, Once)])
    needs_key = must_reject_keyless([p for p in policies if not isinstance(p, Once)])
    for row in rows:
        if row.id in dead:
            row.record_outcome(Reject(THROTTLED))
        elif (needs_key and row.policy_key is None) or (needs_once_key and row.once_key is None):
            row.record_outcome(Reject(NO_KEY))


def must_reject_keyless(policies: Sequence[Policy]) -> bool:
    """Return True if messages without a key become dead letters.

    That is so if a policy that uses keys has `without_key="dead_letter"`.
    """
    return any(
        getattr(policy, "without_key", "") == "dead_letter" and get_policy_key(policy)
        for policy in policies
    )


def limit_starts(closes_at: int, rows: Iterable[ClaimedMessage], read: ReadTime) -> None:
    """Set the latest start of `rows` to the end of the Window, at `closes_at`.

    Some of the rows wait for a worker in this process after the claim. A row that has not started
    by then is given back. `read` converts the database's time to this process's, on the early side.
    """
    latest = read.to_time_before(closes_at)
    for row in rows:
        slot = row.slot
        if slot is None:
            row.slot = Slot(0.0, latest)
        elif latest < slot.latest:
            row.slot = replace(slot, latest=latest)


def has_expired(row: ClaimedMessage) -> bool:
    """Return True if a message had expired when leased, so that no slot is taken."""
    return row.expires_at is not None and row.expires_at <= row.acquired_at


def may_start(row: ClaimedMessage) -> bool:
    """Return True if the handler of a leased row may start.

    Not if the row has an outcome already, or expires before its slot, the time at which a throttle
    lets it start. Such a row is leased only to end, and counts as not delivered for its burst.
    """
    if row.outcome is not None or has_expired(row):
        return False
    if row.expires_at is None or row.slot is None or row.slot.granted_at is None:
        return True
    return row.expires_at > from_microseconds(row.slot.granted_at)
