"""Claims under scheduling policies: one claim of a queue at a time, in one transaction.

The race: two claims that read before either has committed could each find room for one more
message. So a claim first locks the queue's row of the policy state, and then reads (READ COMMITTED)
what the claim before it has committed. A claim that finds the row locked does not wait; it is
repeated soon. Running messages are counted by their leases: there is no counter that a crash could
leave too high.
"""

from sqlalchemy import Connection

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies import (
    Concurrency,
    Debounce,
    Delay,
    KeepLast,
    Policy,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.rows import Claimed, ClaimedMessage, ReadyPair
from faststream_sqlbroker.core.suspects import Suspect, Suspicion
from faststream_sqlbroker.dialects.base import Dialect
from faststream_sqlbroker.dialects.key_gate import UNLIMITED
from faststream_sqlbroker.dialects.ordered import Heads
from faststream_sqlbroker.policies.bursts import BurstHeads
from faststream_sqlbroker.policies.intake import Intake
from faststream_sqlbroker.policies.key_slots import KeySlots
from faststream_sqlbroker.policies.leased import end_at, refuse
from faststream_sqlbroker.policies.lowest_limit import lowest
from faststream_sqlbroker.policies.newest import NewestHeads
from faststream_sqlbroker.policies.read_time import ReadTime
from faststream_sqlbroker.policies.removed import note_holds
from faststream_sqlbroker.policies.request import (
    Claim,
    PolicyClaimRequest,
    ScanPosition,
)
from faststream_sqlbroker.policies.rows import Live, PolicyRows
from faststream_sqlbroker.policies.shared_leases import shared_leases
from faststream_sqlbroker.policies.slots import Slots

LOOKED_AT = 100
"""Least number of messages that a claim under a throttle reads: some may not start yet, and some
need another slot."""
LONGEST_PUT_OFF = 5 * MICROSECONDS
"""A message that waits for a slot of its key behind a burst is looked at again after this, if many
do (microseconds)."""


class PolicyClaims:
    """The claims of one dialect."""

    def __init__(self, dialect: Dialect, clock: Clock) -> None:
        """`clock` measures how long looks take."""
        self._dialect = dialect
        self._clock = clock
        self.rows = PolicyRows(dialect)
        self._by_header = PolicyRows(dialect, by_header=True)

    def claim(
        self, connection: Connection, wanted: PolicyClaimRequest, memory: ScanPosition
    ) -> Claim:
        """Lease what the policies let start; a row's `slot` says when. `memory` is changed."""
        # The order of reads before and after the lock is what makes this right, so it is all here.
        pairs = self._dialect.ready_pairs(connection, wanted.queues)
        self._dialect.mend_due_times(connection, pairs)
        due = sorted({pair.queue for pair in pairs if pair.due_in <= 0})
        waits = [pair.due_in for pair in pairs if pair.due_in > 0]
        locked = self._lock(connection, due, wanted.scopes)
        rows_of = self._by_header if wanted.header is not None else self.rows
        read = self.rows.now(connection, self._clock) if locked else None
        if any(isinstance(policy, Debounce | KeepLast) for policy in wanted.policies) and locked:
            # Pairs were read before the lock. A message of a new priority, committed since, may
            # belong to a burst, so read them again.
            pairs = self._dialect.ready_pairs(connection, sorted(locked))
        if len(locked) < len(due):
            waits.append(0.0)
        rows: list[ClaimedMessage] = []
        gated = bool(due)
        more = False
        suspects: dict[int, Suspect] = {}
        for queue in wanted.queues:
            ready = [pair for pair in pairs if pair.queue == queue and pair.due_in <= 0]
            if read is not None and queue in locked and ready and len(rows) < wanted.limit:
                one = _QueueClaim(
                    self._dialect,
                    rows_of,
                    self._clock,
                    connection,
                    wanted,
                    memory,
                    queue,
                    ready,
                    read,
                )
                rows += one.run(wanted.limit - len(rows), max(0, wanted.starts - len(rows)))
                waits += one.waits
                gated, more = gated and one.gated, more or one.more
                suspects |= one.suspects
        return Claim(
            rows,
            min(waits, default=None),
            gated and len(locked) == len(due),
            more,
            suspects,
            None if read is None else read.asked,
        )

    def _lock(self, connection: Connection, due: list[str], scopes: list[str]) -> set[str]:
        """Lock the claims of those of `due` that no other claim has locked, then `scopes`.

        Nothing waits for a lock: without all of `scopes` no queue counts as locked.
        """
        locked = self._dialect.lock_order(connection, due) if due else set()
        if locked and scopes:
            held = self._dialect.lock_scopes(connection, scopes)
            return locked if len(held) == len(scopes) else set()
        return locked


class _QueueClaim:
    """One queue's part of a claim."""

    def __init__(
        self,
        dialect: Dialect,
        rows: PolicyRows,
        clock: Clock,
        connection: Connection,
        wanted: PolicyClaimRequest,
        memory: ScanPosition,
        queue: str,
        pairs: list[ReadyPair],
        read: ReadTime,
    ) -> None:
        """`read` is when the queue was locked, before anything of it was read."""
        self._dialect = dialect
        self._rows = rows
        self._connection = connection
        self._wanted = wanted
        self._memory = memory
        self._queue = queue
        self._pairs = pairs
        self._read = read
        self._now = read.now
        self._starts = 0
        self._closes: int | None = None
        self._free: int | None = None
        self._intake = Intake(
            rows, connection, queue, pairs, self._now, memory.intake, wanted.keep, clock
        )
        self._slots = Slots(self._intake, read, wanted.policies, memory.took)
        self._bursts: BurstHeads | NewestHeads | None = None
        self._behind: Debounce | KeepLast | None = None
        """The policy that has not seen all messages yet."""
        self._per_key: int | None = None
        self.gated = False
        """Whether nothing more can start before the next look, whatever comes."""
        self.more = False
        """Whether there is more to look at, at once."""
        self.waits: list[float] = []
        """In how many seconds to look again."""
        self._suspicion = None if wanted.only is not None else wanted.suspicion
        self.suspects: dict[int, Suspect] = {}
        """Suspects that could start, and were left alone: looking at them must not spend slots."""

    def run(self, limit: int, starts: int) -> list[ClaimedMessage]:
        """Lease up to `limit`, of which the first `starts` find a free worker."""
        self._starts = min(limit, starts)
        opened = self._ask_policies(limit)
        self.waits += [self._seconds_to(at) for at in self._intake.later]
        if not opened or (free := self._leases(limit)) < 1:
            return []
        only = self._wanted.only
        # What may start goes first: a slot was found for it, and it would not be counted by the
        # next claim.
        chosen = self._starting(self._slots.room(free, self._starts))
        dead = [i for i in self._intake.dead if only in (None, i)][: free - len(chosen)]
        self.more |= len(dead) < len(self._intake.dead)
        leased = self._lease(chosen, self._suspicion)
        self.suspects |= leased.suspects
        found = [*self._lease(dead, None), *leased]
        if self._rows.by_header:
            known = self._rows.live(self._connection, self._queue, [row.id for row in found])
            for row in found:
                row.header_key = (known[row.id].key,)
        if len(found) + len(leased.suspects) < len(dead) + len(chosen):
            self.waits.append(0.0)  # another transaction has locked some of them
        refuse(found, self._wanted.policies, set(dead))
        if self._bursts is not None:
            self._bursts.delivered(found)
        starting = self._slots.give(found)
        if self._closes is not None:
            end_at(self._closes, found, self._read)
        if (at := self._slots.next_look(starting)) is not None:
            self.waits.append(self._seconds_to(at))
            self.gated = True
        elif starting < len(found):
            self.waits.append(0.0)  # rows that only end have left room for others
        return found

    def _starting(self, limit: int) -> list[int]:
        """Up to `limit` messages whose handlers may start."""
        if not self._slots.spent or limit < 1:
            return self._choose(limit)
        size = max(LOOKED_AT, 2 * limit)
        chosen = self._choose(size)
        live = self._rows.live(self._connection, self._queue, chosen)
        if self._suspicion is not None and self._suspicion.told:
            chosen, live = self._without_suspects(chosen, live, size, self._suspicion)
        starting = self._slots.on_time(chosen, live, limit)
        self.waits += [self._seconds_to(at) for at in self._slots.later]
        keys = self._slots.keys
        if keys is not None and (at := keys.next_look()) is not None:
            self.waits.append(self._seconds_to(at))
        # What was put off has made way.
        self.more |= len(starting) < limit and bool(self._slots.later)
        return starting

    def _without_suspects(
        self, chosen: list[int], live: dict[int, Live], size: int, suspicion: Suspicion
    ) -> tuple[list[int], dict[int, Live]]:
        """`chosen`, all of them `live`, without suspects, which are noted."""
        self.suspects = {
            message: suspect
            for message in chosen
            if message in live and (suspect := _suspect(live[message], suspicion)) is not None
        }
        if self.suspects and self._slots.keys is not None:
            # None of them has kept a slot from another message of its key.
            self._slots.keys.begin_anew()
            chosen = self._choose(size, pass_over=True)
            live = self._rows.live(self._connection, self._queue, chosen)
        return [message for message in chosen if message not in self.suspects], live

    def _leases(self, limit: int) -> int:
        """How many of `limit` leases may be given."""
        if self._free is None:
            self._free = limit
            for policy in self._wanted.policies:
                if isinstance(policy, Concurrency) and not policy.per_key:
                    running, most = self._running(policy)
                    free = policy.leases(running, limit, self._starts, most)
                    self._free = min(self._free, free)
        return self._free

    def _running(self, policy: Concurrency) -> tuple[int, int]:
        """How many leases count, and how many there may be."""
        if policy.scope is None:
            most = lowest(self._rows, self._connection, self._intake, policy)
            return self._rows.running(self._connection, self._queue, most), most
        return shared_leases(self._rows, self._connection, policy, self._queue, self._now)

    def _lease(self, chosen: list[int], suspicion: Suspicion | None) -> Claimed:
        """In the order of `chosen`."""
        if not chosen:
            return Claimed()
        w = self._wanted
        found = self._dialect.claim_ids(
            self._connection, chosen, [self._queue], w.lease, w.token, suspicion=suspicion
        )
        rank = {message: n for n, message in enumerate(chosen)}
        found.sort(key=lambda row: rank[row.id])
        return found

    def _ask_policies(self, limit: int) -> bool:
        """Let each look at what is due, in their order; whether anything may start now."""
        note_holds(self._intake, self._wanted.policies)
        if (header := self._wanted.header) is not None and not self._intake.read_keys(header):
            self.more = True
            if any(isinstance(policy, Debounce | KeepLast) for policy in self._wanted.policies):
                return False  # a newer message of a key may be among those that have none yet
        for policy in self._wanted.policies:
            if isinstance(policy, Window):
                opens, self._closes = policy.span(self._now)
                if opens > self._now:
                    self.waits.append(self._seconds_to(opens))
                    self.gated = True
                    return False
                self._intake.opened = max(self._intake.opened, opens)
            elif isinstance(policy, Delay):
                self.more |= not self._intake.delay(policy)
            elif isinstance(policy, Debounce | KeepLast):
                if not self._intake.burst(policy):
                    # What is to come may belong to the burst of a message that is delivered now.
                    self._behind = policy
                    self.more = True
                self._bursts = self._heads(policy)
            else:
                self._ask_limit(policy, limit)
        return True

    def _heads(self, policy: Debounce | KeepLast) -> BurstHeads | NewestHeads:
        at = self._rows, self._connection, self._queue, self._now
        if isinstance(policy, KeepLast):
            return NewestHeads(policy, *at, keep=self._wanted.keep)
        return BurstHeads(policy, *at)

    def _ask_limit(self, policy: Policy, limit: int) -> None:
        if isinstance(policy, Throttle) and policy.when_exceeded != "wait":
            room = self._slots.room(self._leases(limit), self._starts)
            self.more |= self._slots.own is not None and not self._slots.own.let_in(room)
        elif isinstance(policy, Concurrency) and policy.per_key:
            self._per_key = lowest(self._rows, self._connection, self._intake, policy)

    def _choose(self, limit: int, *, pass_over: bool = False) -> list[int]:
        """The messages to lease, in order; with `pass_over` no suspects."""
        wanted = self._wanted
        before = self._intake.before
        told = self._suspicion is not None and self._suspicion.told and not pass_over
        others = None if told else self._suspicion
        if limit < 1:
            return []
        by_key = self._per_key is not None or self._slots.keys is not None
        if wanted.ordered or (by_key and self._bursts is None):
            return self._choose_by_key(limit, others)
        size = limit if self._bursts is None else max(100, 2 * limit)
        due: list[tuple[int, str | None, int]] = []
        for pair in self._pairs:
            if len(due) < size:
                due += self._rows.due(
                    self._connection,
                    self._queue,
                    pair.priority,
                    before=before,
                    now=self._now,
                    size=size - len(due),
                    others=others,
                    only=wanted.only,
                )
        if self._bursts is None:
            return [message for message, _, _ in due]
        crowded = len(due) == size
        if self._behind is not None:
            due = self._intake.catch_up(self._behind, due)
        if self._slots.keys is not None:
            due = self._with_slot(self._slots.keys, due, crowded=crowded)
        chosen = self._bursts.choose(due, limit)
        self.waits += [self._seconds_to(at) for at in self._bursts.later]
        self.more |= crowded and len(chosen) < limit
        return chosen

    def _with_slot(
        self, keys: KeySlots, due: list[tuple[int, str | None, int]], *, crowded: bool
    ) -> list[tuple[int, str | None, int]]:
        """Those of `due` whose key has a slot now; the others make way if they are all there is."""
        keys.look(key for _, key, _ in due if key is not None)
        found = [each for each in due if keys.is_open(each[1])]
        if crowded:
            # Not until their slots: another rate, or none, must not find them put off for long.
            blocked = {
                message: min(keys.next(key), self._now + LONGEST_PUT_OFF)
                for message, key, _ in due
                if key is not None and not keys.is_open(key)
            }
            self._rows.shift(self._connection, self._queue, blocked, 0)
        return found

    def _choose_by_key(self, limit: int, others: Suspicion | None) -> list[int]:
        heads = Heads(
            self._connection,
            self._dialect.sql,
            limit,
            others=others,
            mask=self._intake.before,
            per_key=None if self._wanted.ordered else self._per_key or UNLIMITED,
            starting=self._starts,
            gate=self._slots.keys,
            by_header=self._rows.by_header,
        )
        if (only := self._wanted.only) is not None:
            one = [
                due
                for pair in self._pairs
                for due in self._rows.due(
                    self._connection,
                    self._queue,
                    pair.priority,
                    before=self._intake.before,
                    now=self._now,
                    size=1,
                    others=None,
                    only=only,
                )
            ]
            return [
                message
                for message, key, _ in one
                if key is None or heads.may_start(self._queue, message, key)
            ]
        if heads.scan(self._pairs, self._memory.cursors):
            # Not at once: all keys may be held, and there may be many.
            self.waits.append(0.0)
        elif not heads.full and (soon := heads.soonest()) is not None:
            self.waits.append(soon)
        return heads.ids[:limit]

    def _seconds_to(self, at: int) -> float:
        return max(0.001, (at - self._now) / MICROSECONDS)


def _suspect(live: Live, suspicion: Suspicion) -> Suspect | None:
    return suspicion.of(live.deliveries, live.deliveries - live.lost)
