"""Which due messages of a queue a claim under its lock leases, and in which order.

Times are microseconds since 1970.
"""

from dataclasses import dataclass, field

from faststream_sqlbroker.core.policies import Debounce, KeepLast
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.database.parts.ordered import UNLIMITED, Cursors, Heads
from faststream_sqlbroker.database.policies.intake import Due, Intake
from faststream_sqlbroker.database.policies.key_heads import BurstHeads, NewestHeads
from faststream_sqlbroker.database.policies.key_slots import KeySlots
from faststream_sqlbroker.database.policies.request import PolicyClaimRequest
from faststream_sqlbroker.database.policies.slots import Slots

LONGEST_PUT_OFF = 5 * MICROSECONDS
"""A message that waits for a slot of its key behind a burst is looked at again after this, if many
do (microseconds)."""


@dataclass
class NextLook:
    """When to look at a queue again."""

    now: int
    waits: list[float] = field(default_factory=list)
    """In how many seconds."""
    more: bool = False
    """Whether there is more to look at, at once."""

    def seconds_to(self, at: int) -> float:
        """From now."""
        return max(0.001, (at - self.now) / MICROSECONDS)


@dataclass(eq=False)
class Choice:
    """What the policies have said by now is in these attributes."""

    intake: Intake
    slots: Slots
    wanted: PolicyClaimRequest
    suspicion: Suspicion | None
    cursors: Cursors
    """Moved by a choice that goes from key to key."""
    next: NextLook
    """Told when to look again."""
    starts: int = 0
    """How many find a free worker."""
    bursts: BurstHeads | NewestHeads | None = None
    behind: Debounce | KeepLast | None = None
    """The policy that has not seen all messages yet."""
    per_key: int | None = None
    """The most leases of a key."""

    def choose(self, limit: int, *, pass_over: bool = False) -> list[int]:
        """The messages to lease, in order; with `pass_over` no suspects."""
        if limit < 1:
            return []
        suspicion = self.suspicion
        told = suspicion is not None and suspicion.told and not pass_over
        others = None if told else suspicion
        if self._is_by_key:
            return self._choose_by_key(limit, others)
        if self.bursts is None:
            return [message for message, _, _ in self._due(limit, others)]
        return self._of_bursts(self.bursts, limit, others)

    @property
    def _is_by_key(self) -> bool:
        """Whether a claim goes from key to key."""
        limited = self.per_key is not None or self.slots.keys is not None
        return self.wanted.ordered or (limited and self.bursts is None)

    def _due(self, size: int, others: Suspicion | None) -> list[Due]:
        """The first due messages, by priority."""
        intake = self.intake
        due: list[Due] = []
        for pair in intake.pairs:
            if len(due) < size:
                due += intake.rows.due(
                    pair.priority,
                    before=intake.before,
                    now=intake.now,
                    size=size - len(due),
                    others=others,
                    only=self.wanted.only,
                )
        return due

    def _of_bursts(
        self, bursts: BurstHeads | NewestHeads, limit: int, others: Suspicion | None
    ) -> list[int]:
        size = max(100, 2 * limit)
        due = self._due(size, others)
        crowded = len(due) == size
        if self.behind is not None:
            due = self.intake.catch_up(self.behind, due)
        if self.slots.keys is not None:
            due = self._with_slot(self.slots.keys, due, crowded=crowded)
        chosen = bursts.choose(due, limit)
        self.next.waits += [self.next.seconds_to(at) for at in bursts.later]
        self.next.more |= crowded and len(chosen) < limit
        return chosen

    def _with_slot(self, keys: KeySlots, due: list[Due], *, crowded: bool) -> list[Due]:
        """Those of `due` whose key has a slot now; the others make way if they are all there is."""
        keys.look(key for _, key, _ in due if key is not None)
        found = [each for each in due if keys.is_open(each[1])]
        if crowded:
            # Not until their slots: another rate, or none, must not find them put off for long.
            blocked = {
                message: min(keys.next(key), self.intake.now + LONGEST_PUT_OFF)
                for message, key, _ in due
                if key is not None and not keys.is_open(key)
            }
            self.intake.rows.shift(blocked, 0)
        return found

    def _choose_by_key(self, limit: int, others: Suspicion | None) -> list[int]:
        heads = Heads(
            self.intake.rows.connection,
            self.intake.rows.dialect.sql,
            limit,
            others=others,
            mask=self.intake.before,
            per_key=None if self.wanted.ordered else self.per_key or UNLIMITED,
            starting=self.starts,
            gate=self.slots.keys,
            by_header=self.intake.rows.by_header,
        )
        if self.wanted.only is not None:
            return [i for i, _, _ in self._due(1, None) if heads.may_start(self.intake.queue, i)]
        if heads.scan(self.intake.pairs, self.cursors):
            # Not at once: all keys may be held, and there may be many.
            self.next.waits.append(0.0)
        elif not heads.full and (soon := heads.soonest()) is not None:
            self.next.waits.append(soon)
        return heads.ids[:limit]
