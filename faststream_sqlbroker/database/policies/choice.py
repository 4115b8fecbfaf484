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


class Choice:
    """What the policies have said by now is in its attributes."""

    def __init__(
        self,
        intake: Intake,
        slots: Slots,
        wanted: PolicyClaimRequest,
        suspicion: Suspicion | None,
        cursors: Cursors,
        following: NextLook,
    ) -> None:
        """`following` is told when to look again; `cursors` are moved."""
        self._intake = intake
        self._slots = slots
        self._wanted = wanted
        self._suspicion = suspicion
        self._cursors = cursors
        self._next = following
        self.starts = 0
        """How many find a free worker."""
        self.bursts: BurstHeads | NewestHeads | None = None
        self.behind: Debounce | KeepLast | None = None
        """The policy that has not seen all messages yet."""
        self.per_key: int | None = None
        """The most leases of a key."""

    def choose(self, limit: int, *, pass_over: bool = False) -> list[int]:
        """The messages to lease, in order; with `pass_over` no suspects."""
        if limit < 1:
            return []
        suspicion = self._suspicion
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
        limited = self.per_key is not None or self._slots.keys is not None
        return self._wanted.ordered or (limited and self.bursts is None)

    def _due(self, size: int, others: Suspicion | None) -> list[Due]:
        """The first due messages, by priority."""
        intake = self._intake
        due: list[Due] = []
        for pair in intake.pairs:
            if len(due) < size:
                due += intake.rows.due(
                    pair.priority,
                    before=intake.before,
                    now=intake.now,
                    size=size - len(due),
                    others=others,
                    only=self._wanted.only,
                )
        return due

    def _of_bursts(
        self, bursts: BurstHeads | NewestHeads, limit: int, others: Suspicion | None
    ) -> list[int]:
        size = max(100, 2 * limit)
        due = self._due(size, others)
        crowded = len(due) == size
        if self.behind is not None:
            due = self._intake.catch_up(self.behind, due)
        if self._slots.keys is not None:
            due = self._with_slot(self._slots.keys, due, crowded=crowded)
        chosen = bursts.choose(due, limit)
        self._next.waits += [self._next.seconds_to(at) for at in bursts.later]
        self._next.more |= crowded and len(chosen) < limit
        return chosen

    def _with_slot(self, keys: KeySlots, due: list[Due], *, crowded: bool) -> list[Due]:
        """Those of `due` whose key has a slot now; the others make way if they are all there is."""
        keys.look(key for _, key, _ in due if key is not None)
        found = [each for each in due if keys.is_open(each[1])]
        if crowded:
            # Not until their slots: another rate, or none, must not find them put off for long.
            blocked = {
                message: min(keys.next(key), self._intake.now + LONGEST_PUT_OFF)
                for message, key, _ in due
                if key is not None and not keys.is_open(key)
            }
            self._intake.rows.shift(blocked, 0)
        return found

    def _choose_by_key(self, limit: int, others: Suspicion | None) -> list[int]:
        heads = Heads(
            self._intake.rows.connection,
            self._intake.rows.dialect.sql,
            limit,
            others=others,
            mask=self._intake.before,
            per_key=None if self._wanted.ordered else self.per_key or UNLIMITED,
            starting=self.starts,
            gate=self._slots.keys,
            by_header=self._intake.rows.by_header,
        )
        if self._wanted.only is not None:
            return [i for i, _, _ in self._due(1, None) if heads.may_start(self._intake.queue, i)]
        if heads.scan(self._intake.pairs, self._cursors):
            # Not at once: all keys may be held, and there may be many.
            self._next.waits.append(0.0)
        elif not heads.full and (soon := heads.soonest()) is not None:
            self._next.waits.append(soon)
        return heads.ids[:limit]
