"""The slots of Throttle at a claim: how many messages may start, and when.

A throttle that refuses what is above its rate drops, dead-letters or backs off. It looks at a
message once: that is let in if there is a slot for it now, else it is refused. It takes the slot
when it is leased. A message that was let in is never refused any more: if it could not start in
time, or comes again for a retry, it waits for the next slot, and then goes before what is new.

Times are microseconds since 1970.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.flags import (
    HELD,
    LET_IN,
    MOST_BACKOFFS,
    PUT_OFF,
    SLOT,
    backoffs,
    of_backoffs,
)
from faststream_sqlbroker.core.policies.live_rates import Place
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.throttle import (
    AHEAD,
    MOST_REACH,
    first_slot,
    next_slots,
)
from faststream_sqlbroker.core.reasons import THROTTLED
from faststream_sqlbroker.core.rows import ClaimedMessage, Slot
from faststream_sqlbroker.database.policies.intake import Intake, slot_scope
from faststream_sqlbroker.database.policies.key_slots import KeySlots, TakenSlots
from faststream_sqlbroker.database.policies.request import (
    PolicyClaimRequest,
    ScanPosition,
    has_expired,
)
from faststream_sqlbroker.database.policies.rows import Arrival, Live
from faststream_sqlbroker.database.policies.slot_use import SHARED_SLOTS, ReadTime, SlotLogs, States

LONGEST_WAIT = 5 * MICROSECONDS
"""A message that was let in and has no slot is looked at again after this (microseconds): another
rate, or none, must not find it put off for long. There are few, as each had a slot before."""
STATEMENTS = 10
"""A claim under the lock takes about so many times as long as reading the clock."""
UNKNOWN = MICROSECONDS
"""The answer to the first claim of a process may come so late for its slots. That costs nothing:
the next claim tells when the starts were."""


class QueueSlots:
    """The throttles of one queue in one claim whose slots belong to no message."""

    def __init__(
        self,
        states: States,
        queue: str,
        read: ReadTime,
        wanted: PolicyClaimRequest,
        memory: ScanPosition,
        told: dict[Place, int],
        took: Sequence[float],
        statements: int = 2,
        whole_took: Sequence[float] = (),
    ) -> None:
        """Read what is known of the queue's own slots.

        No other claim changes `states` before this one is written; then `told` says what of
        `memory.use` is stored. So many seconds the last such claims `took`, from the reading of the
        clock and, if that is not the same, as a whole; with none, as long as so many `statements`,
        the first of which read the clock.
        """
        self._states = states
        self._wanted = wanted
        self._now = read.now
        # Throttles are numbered among themselves. Adding another policy must not change the scope
        # under which their slots are stored.
        numbered = [p for p in wanted.policies if isinstance(p, Throttle)]
        self.spent = bool(numbered)
        """Whether a lease spends a slot."""
        supposed = took or [statements * read.took]
        self._reach, self.lead, rest = _reach_and_lead(supposed, whole_took or supposed)
        late = rest if took else max(rest, UNKNOWN)
        late = max(late, round(wanted.gathers * MICROSECONDS))
        gates = {n: policy for n, policy in enumerate(numbered) if policy.gates}
        self._throttles = list(gates.values())
        self._places = [
            (slot_scope(queue, n), "") if policy.scope is None else (SHARED_SLOTS, policy.scope)
            for n, policy in gates.items()
        ]
        """Where their slots are stored."""
        if self.spent:
            memory.use.read(read)
            self._logs_of = SlotLogs(memory.use, memory.intake.rates, self._now, told, late)
        self._logs = [
            self._logs_of.load(policy, place, states.states(place[0], [place[1]]).get(place[1]))
            for policy, place in zip(self._throttles, self._places, strict=True)
        ]
        self._granted: list[int] | None = None
        self._looked_from = self._now + self.lead
        """From when the last of them were looked for: before, no worker is likely to be free."""
        self.seconds_behind = 0.0
        """How long what waits for a worker waits behind what does so already."""

    @property
    def _until(self) -> int:
        """Slots up to this time are granted now: those that come while the next claim runs."""
        return self._now + self._reach + AHEAD

    def room(self, limit: int, starts: int) -> int:
        """Count the messages that may start within a short time, with so many free workers.

        What waits for a worker gets a slot for when it is likely to have one.
        """
        if not self._throttles:
            return limit
        logs = [log.copy() for log in self._logs]
        patience = self._logs_of.patience
        at = self._now + self.lead
        size = min(limit, starts)
        wave = max(1, self._wanted.wave)
        granted = next_slots(self._throttles, logs, at, self._until, size, patience)
        at += round(self.seconds_behind * MICROSECONDS)
        while size <= len(granted) < limit:
            at += max(1, round(self._wanted.wave_time * MICROSECONDS))
            size = min(wave, limit - len(granted))
            found = next_slots(self._throttles, logs, at, self._until, size, patience)
            granted += found
            if len(found) < size:
                break
            size = len(granted)
        self._granted = granted
        self._looked_from = at
        return len(granted)

    def next_look(self, taken: int) -> int | None:
        """Say when to look again, if all slots that there are were taken, and stored."""
        if self._granted is None or taken < len(self._granted):
            return None
        # Those of now will have started at their slots, or shortly after, and the next claim tells.
        logs = [log.copy() for log in self._logs]
        for policy, log in zip(self._throttles, logs, strict=True):
            for slot in self._granted:
                policy.report(log, slot + self._logs_of.patience, slot)
        next_slot = first_slot(self._throttles, logs, self._looked_from)
        # So early that the claim has ended when the slot comes.
        return next_slot - self.lead - (self._reach + AHEAD) // 2

    def spend(self, starting: int) -> bool:
        """Store the slots of so many messages that start, and what is to be told of others; whether
        there was anything to store.
        """
        granted = (self._granted or [])[:starting]
        stored = False
        for policy, place, log in zip(self._throttles, self._places, self._logs, strict=True):
            for slot in granted:
                log.add(slot, slot + self._logs_of.patience)
            if granted or place in self._logs_of.changed:
                state = self._logs_of.dump(policy, place, log)
                self._states.keep(place[0], {place[1]: state})
                stored = True
        return stored

    def tell(self, starting: Sequence[ClaimedMessage]) -> dict[int, int]:
        """Tell the rows that start when they may; the slots by id, of those that have one."""
        started: dict[int, int] = {}
        slots: dict[tuple[int, tuple[Place, ...]], Slot] = {}
        shared = tuple(self._places)
        for number, row in enumerate(starting if self.spent else ()):
            at, place = self._start(number, row)
            places = shared if place is None else (*shared, place)
            if not places:
                continue
            started[row.id] = at
            # A fast throttle gives many rows the same.
            if (slot := slots.get((at, places))) is None:
                deadline = at + self._logs_of.patience
                slot = self._logs_of.use.slot(at, deadline, places)
                slots[at, places] = slot
            row.slot = slot
        return started

    def _start(self, number: int, row: ClaimedMessage) -> tuple[int, Place | None]:  # noqa: ARG002
        """When the message may start, the `number`th of those that do, and where its own slot is
        stored.
        """
        return self._now if self._granted is None else self._granted[number], None


class Slots(QueueSlots):
    """The throttles of one queue in one claim, under the queue's lock; some by key, some that let
    no message wait.
    """

    def __init__(
        self, intake: Intake, read: ReadTime, wanted: PolicyClaimRequest, memory: ScanPosition
    ) -> None:
        """As `QueueSlots`; `intake` is that of the same claim."""
        super().__init__(
            intake.rows,
            intake.queue,
            read,
            wanted,
            memory,
            memory.told,
            memory.took,
            STATEMENTS,
            memory.whole_took,
        )
        self.own: OwnSlots | None = None
        """Those of a throttle that refuses what is above its rate."""
        self.keys: KeySlots | None = None
        """The slots of each key, if messages wait for those."""
        throttles = enumerate(p for p in wanted.policies if isinstance(p, Throttle))
        number, each = next(((n, p) for n, p in throttles if not p.gates), (0, None))
        if each is not None:
            first = self._now + self.lead
            # One that refuses has those of one that lets messages wait: a deployment may change
            # the one to the other.
            scope = slot_scope(intake.queue, None if each.key else number)
            if each.when_exceeded == "wait":
                # A slot may be moved to that of a gate, which is later. If all are equal before,
                # no period has more starts for that.
                until = first if self._throttles else first + self._reach
                self.keys = KeySlots(intake, each, self._logs_of, scope, first, until)
            else:
                self.own = OwnSlots(intake, each, self._logs_of, scope, first, first)
        self.later: list[int] = []
        """The slots of messages that were put off."""

    def on_time(self, chosen: Sequence[int], live: Mapping[int, Live], limit: int) -> list[int]:
        """Up to `limit` of `chosen` that may start; each takes the slot that it needs."""
        if self.keys is not None:
            return self.keys.on_time(chosen, live, limit)
        if self.own is not None:
            starting = self.own.on_time(chosen, live, limit)
            self.later += self.own.later
            return starting
        return list(chosen[:limit])

    def give(self, rows: Sequence[ClaimedMessage]) -> int:
        """Tell each row when it may start, and store the slots taken; how many rows start."""
        starting = [row for row in rows if row.outcome is None and not has_expired(row)]
        self.spend(len(starting))
        started = self.tell(starting)
        if (own := self.keys or self.own) is not None:
            own.keep(started)
        return len(starting)

    def _start(self, number: int, row: ClaimedMessage) -> tuple[int, Place | None]:
        at, _ = super()._start(number, row)
        if (own := self.keys or self.own) is None or (slot := own.slot(row.id)) is None:
            return at, None
        own_at, place = slot
        return max(at, own_at), place


@dataclass(eq=False)
class OwnSlots(TakenSlots):
    """The slots of a throttle that refuses, of the queue or of its keys."""

    _late: dict[int, int | None] = field(default_factory=dict, init=False)
    later: list[int] = field(default_factory=list, init=False)
    """When messages that were put off are looked at again."""
    dropped: dict[str, int] = field(default_factory=dict, init=False)
    """By its key, the newest message that was dropped."""

    def let_in(self, limit: int) -> bool:
        """Look at what has come: let it in, or refuse it; whether all was looked at.

        At most `limit` are let in now, as no more could start; those above them wait for the next
        claim. The expired need no slot.
        """
        intake = self.intake
        arrivals, whole = intake.arrivals(SLOT)
        intake.before |= SLOT
        self.look(key for a in arrivals if (key := self._key(a.key)) is not None)
        trial = {key: log.copy() for key, log in self._logs.items()}
        found: list[int] = []
        left: list[int] = []
        put_off: dict[int, dict[int, int | None]] = defaultdict(dict)
        dropped: dict[int, Discard] = {}
        # Each message changes the log that the next one of its key sees, so all cases are one loop.
        for a in arrivals:
            key = None if a.expired else self._key(a.key)
            if (
                key is not None
                and (slot := self.policy.next_slot(trial[key], self.first)) > self.first
            ):
                if a.delivered:
                    # Until its own slot, as far as is known: who takes that is open until then.
                    put_off[0][a.id] = min(slot, intake.now + LONGEST_WAIT)
                elif self.policy.when_exceeded == "backoff":
                    before = backoffs(a.marks)
                    wait = round(intake.clock.jitter(self.policy.backoff(before)))
                    put_off[min(before + 1, MOST_BACKOFFS)][a.id] = intake.now + wait
                elif self.policy.when_exceeded == "drop":
                    dropped[a.id] = Discard(THROTTLED)
                else:
                    intake.dead.append(a.id)
                    left.append(a.due)  # until it is claimed as one
            elif len(found) >= limit:
                left.append(a.due)
            else:
                found.append(a.id)
                if key is not None:
                    self._grant(trial[key])
        intake.rows.discard(dropped, keep=intake.keep)
        self.dropped = _newest_by_key(arrivals, dropped)
        for count, due in put_off.items():
            self._put_off(due, count)
        # The mark is what the choice goes by, which may be of keys or bursts. It promises no slot:
        # what a choice leaves out must not hold one.
        intake.mark(found, SLOT | LET_IN)
        intake.scan_back(SLOT, min(left, default=intake.now))
        return whole and (limit < 1 or len(left) == len(intake.dead))

    def on_time(self, chosen: Sequence[int], live: Mapping[int, Live], limit: int) -> list[int]:
        """As `TakenSlots`, of messages that were let in; put off what has no slot."""
        starting = super().on_time(chosen, live, limit)
        self._put_off(self._late)
        self.later = [at for at in self._late.values() if at is not None]
        return starting

    def _wait(self, slot: int, message: int | None = None) -> None:
        # One that was let in before it, and could not be leased then, has taken it.
        if message is not None:
            self._late[message] = min(slot, self.intake.now + LONGEST_WAIT)

    def keep(self, started: Mapping[int, int]) -> None:
        """Store the slots of the messages `started`, each at its time, its own slot or later, and
        what is to be told of others.
        """
        taken, told = self._spend(started)
        states = {
            key: self.shared.dump(self.policy, (self.scope, key), self._logs[key])
            for key in taken.keys() | told
        }
        self.intake.rows.keep(self.scope, states)

    def _put_off(self, due: Mapping[int, int | None], count: int = 0) -> None:
        """They are arrivals again when they come back; `count`: how often each has backed off."""
        intake = self.intake
        kept = ~(SLOT | HELD | of_backoffs(MOST_BACKOFFS)) | PUT_OFF | of_backoffs(count)
        intake.rows.shift(due, PUT_OFF | of_backoffs(count), kept)
        intake.later += [at for at in due.values() if at is not None]


def _reach_and_lead(took: Sequence[float], whole_took: Sequence[float]) -> tuple[int, int, int]:
    """How far ahead slots are granted because claims take long, and how far ahead the first one is,
    as slots that come before the answer to COMMIT would be missed; and by how much that may be too
    little (microseconds).

    The first slot that the next claim can grant comes when this one and all of that have ended.
    """
    usual = min(round(median(took) * MICROSECONDS), MOST_REACH)
    # That one claim took long is no reason to wait.
    long = round(sorted(took)[-2:][0] * MICROSECONDS)
    reach = round(2 * median(whole_took) * MICROSECONDS)
    return min(reach, MOST_REACH), usual, max(0, long - usual)


def _newest_by_key(arrivals: Iterable[Arrival], ids: Collection[int]) -> dict[str, int]:
    keyed = ((a.id, a.key) for a in arrivals if a.id in ids and a.key is not None)
    return {key: message for message, key in sorted(keyed)}
