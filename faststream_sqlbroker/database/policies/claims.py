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
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.policies.choice import Choice, NextLook
from faststream_sqlbroker.database.policies.intake import Intake
from faststream_sqlbroker.database.policies.key_heads import BurstHeads, NewestHeads
from faststream_sqlbroker.database.policies.other_processes import lowest, read_rates, shared_leases
from faststream_sqlbroker.database.policies.request import (
    Claim,
    PolicyClaimRequest,
    ScanPosition,
    end_at,
    may_start,
    refuse,
)
from faststream_sqlbroker.database.policies.rows import Decided, Live, PolicyRows, read_now
from faststream_sqlbroker.database.policies.slot_use import ReadTime
from faststream_sqlbroker.database.policies.slots import Slots

LOOKED_AT = 100
"""Least number of messages that a claim under a throttle reads: some may not start yet, and some
need another slot."""


class PolicyClaims:
    """The claims of a dialect."""

    def __init__(self, dialect: Dialect, clock: Clock) -> None:
        """`clock` measures how long looks take."""
        self._dialect = dialect
        self._clock = clock
        self.decided: Decided | None = None
        """Told of what claims decide of messages without a lease, before it is written."""

    def claim(
        self, connection: Connection, wanted: PolicyClaimRequest, memory: ScanPosition
    ) -> Claim:
        """Lease what the policies let start; a row's `slot` says when. `memory` is changed."""
        # The order of reads before and after the lock is what makes this right, so it is all here.
        pairs = self._dialect.ready_pairs(connection, wanted.queues)
        self._dialect.mend_due_times(connection, pairs)
        waits = [pair.due_in for pair in pairs if pair.due_in > 0]
        burst = next((p for p in wanted.policies if isinstance(p, Debounce | KeepLast)), None)
        standing = set() if burst is None else self._standing(connection, wanted, pairs, waits)
        claimable = {pair.queue for pair in pairs if pair.due_in <= 0}
        due = sorted(claimable | standing)
        locked = self._lock(connection, due, wanted.scopes)
        read = read_now(self._dialect, connection, self._clock) if locked else None
        looked: list[float] = []
        if burst is not None and read is not None:
            looked = self._look(connection, burst, wanted, read.now, locked & standing, pairs)
            # Pairs were read before the lock. A message of a new priority, committed since, may
            # belong to a burst, so read them again.
            pairs = self._dialect.ready_pairs(connection, sorted(locked))
        if len(locked) < len(due):
            waits.append(0.0)
        found = Claim([], None, gated=bool(claimable) and len(locked) == len(due))
        found.more = 0.0 in looked
        waits += looked
        if read is not None:
            found.read = read
            ready = [(queue, _due(pairs, queue)) for queue in wanted.queues if queue in locked]
            at = connection, wanted, memory
            waits += self._claim_queues(at, [each for each in ready if each[1]], read, found)
        found.again = min(waits, default=None)
        return found

    def _standing(
        self,
        connection: Connection,
        wanted: PolicyClaimRequest,
        pairs: list[ReadyPair],
        waits: list[float],
    ) -> set[str]:
        """The queues where something that stands by is to be looked at; `waits` gets in how many
        seconds others are.
        """
        found = [
            (pair.queue, at)
            for pair in pairs
            for at in self._rows(connection, wanted, pair.queue).next_standby(pair.priority)
        ]
        if not found:
            return set()
        now = read_now(self._dialect, connection, self._clock).now
        waits += [(at - now) / MICROSECONDS for _, at in found if at > now]
        return {queue for queue, at in found if at <= now}

    def _look(
        self,
        connection: Connection,
        policy: Debounce | KeepLast,
        wanted: PolicyClaimRequest,
        now: int,
        queues: set[str],
        pairs: list[ReadyPair],
    ) -> list[float]:
        """Look at what stands by in `queues`, which are locked; in how many seconds to go on."""
        waits: list[float] = []
        for queue in sorted(queues):
            rows = self._rows(connection, wanted, queue)
            heads = _heads(policy, rows, now, keep=wanted.keep)
            heads.look(pair.priority for pair in pairs if pair.queue == queue)
            waits += [max(0.001, (at - now) / MICROSECONDS) for at in heads.later]
            if heads.more:
                waits.append(0.0)
        return waits

    def _claim_queues(
        self,
        at: tuple[Connection, PolicyClaimRequest, ScanPosition],
        ready: list[tuple[str, list[ReadyPair]]],
        read: ReadTime,
        found: Claim,
    ) -> list[float]:
        """Add to `found` what is leased of the queues that are `ready`; in how many seconds to look
        at them again.
        """
        connection, wanted, memory = at
        self._read_rates(connection, wanted, memory, read)
        suspects: dict[int, Suspect] = {}
        waits: list[float] = []
        for queue, pairs in ready:
            if len(found.rows) >= wanted.limit:
                break
            rows = self._rows(connection, wanted, queue)
            intake = Intake(rows, pairs, read.now, memory.intake, wanted.keep, self._clock)
            one = _QueueClaim(intake, wanted, memory, read)
            left = wanted.limit - len(found.rows)
            behind = wanted.seconds_behind(len(found.rows))
            found.rows += one.run(left, max(0, wanted.starts - len(found.rows)), behind)
            waits += one.next.waits
            found.gated = found.gated and one.gated
            found.more = found.more or one.next.more
            suspects |= one.suspects
        found.suspects = suspects
        return waits

    def _rows(self, connection: Connection, wanted: PolicyClaimRequest, queue: str) -> PolicyRows:
        by_header = wanted.header is not None
        of = self._dialect, connection, queue
        return PolicyRows(*of, by_header=by_header, decided=self.decided)

    def _read_rates(
        self,
        connection: Connection,
        wanted: PolicyClaimRequest,
        memory: ScanPosition,
        read: ReadTime,
    ) -> None:
        throttled = any(isinstance(policy, Throttle) for policy in wanted.policies)
        if throttled and memory.is_old(memory.intake.rates.read_at, read.asked):
            memory.intake.rates = read_rates(self._dialect, connection, read.now, read.asked)

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
        intake: Intake,
        wanted: PolicyClaimRequest,
        memory: ScanPosition,
        read: ReadTime,
    ) -> None:
        """`read` is when the queue was locked, before anything of it was read."""
        self._intake = intake
        self._rows = intake.rows
        self._now = intake.now
        self._wanted = wanted
        self._memory = memory
        self._read = read
        self._closes: int | None = None
        self._free: int | None = None
        self._slots = Slots(intake, read, wanted, memory)
        self.gated = False
        """Whether nothing more can start before the next look, whatever comes."""
        self.next = NextLook(read.now)
        self._suspicion = None if wanted.only is not None else wanted.suspicion
        self._choice = Choice(
            intake, self._slots, wanted, self._suspicion, memory.cursors, self.next
        )
        self.suspects: dict[int, Suspect] = {}
        """Suspects that could start, and were left alone: looking at them must not spend slots."""

    def run(self, limit: int, starts: int, seconds_behind: float) -> list[ClaimedMessage]:
        """Lease up to `limit`, of which the first `starts` find a free worker; the others wait so
        long behind what waits already.
        """
        self._slots.seconds_behind = seconds_behind
        self._choice.starts = min(limit, starts)
        opened = self._ask_policies(limit)
        self.next.waits += [self.next.seconds_to(at) for at in self._intake.later]
        if not opened or (free := self._leases(limit)) < 1:
            return []
        only = self._wanted.only
        # What may start goes first: a slot was found for it, and it would not be counted by the
        # next claim.
        chosen = self._starting(self._slots.room(free, self._choice.starts))
        dead = [i for i in self._intake.dead if only in (None, i)][: free - len(chosen)]
        self.next.more |= len(dead) < len(self._intake.dead)
        leased = self._lease(chosen, self._suspicion)
        self.suspects |= leased.suspects
        found = [*self._lease(dead, None), *leased]
        self._read_header_keys(found)
        if len(found) + len(leased.suspects) < len(dead) + len(chosen):
            self.next.waits.append(0.0)  # another transaction has locked some of them
        refuse(found, self._wanted.policies, set(dead))
        starting = self._slots.give(found)
        if self._choice.bursts is not None:
            self._tell_bursts(self._choice.bursts, leased, [row for row in found if row.id in dead])
        if self._closes is not None:
            end_at(self._closes, found, self._read)
        self._note_slots(found, starting)
        return found

    def _tell_bursts(
        self,
        bursts: BurstHeads | NewestHeads,
        leased: list[ClaimedMessage],
        refused: list[ClaimedMessage],
    ) -> None:
        # What is claimed for another end is not handled: another message takes its place.
        bursts.delivered([row for row in leased if may_start(row)])
        bursts.refused({row.policy_key: row.id for row in refused if row.policy_key is not None})
        self.next.more |= bursts.more

    def _read_header_keys(self, found: list[ClaimedMessage]) -> None:
        if self._rows.by_header:
            known = self._rows.live([row.id for row in found])
            for row in found:
                row.header_key = (known[row.id].key,)

    def _note_slots(self, found: list[ClaimedMessage], starting: int) -> None:
        """When to look again for slots, of which `found` has taken some."""
        keys = self._slots.keys
        if keys is not None and keys.looked and (at := keys.next_look()) is not None:
            self.next.waits.append(self.next.seconds_to(at))
        if (at := self._slots.next_look(starting)) is not None:
            self.next.waits.append(self.next.seconds_to(at))
            self.gated = True
        elif starting < len(found):
            self.next.waits.append(0.0)  # rows that only end have left room for others

    def _starting(self, limit: int) -> list[int]:
        """Up to `limit` messages whose handlers may start."""
        if not self._slots.spent or limit < 1:
            return self._choice.choose(limit)
        size = max(LOOKED_AT, 2 * limit)
        chosen = self._choice.choose(size)
        live = self._rows.live(chosen)
        if self._suspicion is not None and self._suspicion.told:
            chosen, live = self._without_suspects(chosen, live, size, self._suspicion)
        starting = self._slots.on_time(chosen, live, limit)
        self.next.waits += [self.next.seconds_to(at) for at in self._slots.later]
        # What was put off has made way.
        self.next.more |= len(starting) < limit and bool(self._slots.later)
        return starting

    def _without_suspects(
        self, chosen: list[int], live: dict[int, Live], size: int, suspicion: Suspicion
    ) -> tuple[list[int], dict[int, Live]]:
        """`chosen`, all of them `live`, without suspects, which are noted."""
        self.suspects = {
            message: suspect
            for message in chosen
            if message in live and (suspect := suspicion.of(live[message].lost)) is not None
        }
        if self.suspects and self._slots.keys is not None:
            # None of them has kept a slot from another message of its key.
            self._slots.keys.begin_anew()
            chosen = self._choice.choose(size, pass_over=True)
            live = self._rows.live(chosen)
        return [message for message in chosen if message not in self.suspects], live

    def _leases(self, limit: int) -> int:
        """How many of `limit` leases may be given."""
        if self._free is None:
            self._free = limit
            for policy in self._wanted.policies:
                if isinstance(policy, Concurrency) and not policy.per_key:
                    running, most = self._running(policy)
                    free = policy.leases(running, limit, self._choice.starts, most)
                    self._free = min(self._free, free)
        return self._free

    def _running(self, policy: Concurrency) -> tuple[int, int]:
        """Count the leases, and tell how many there may be."""
        if policy.scope is None:
            most = self._lowest(policy)
            return self._rows.running(self._rows.queue, most), most
        return shared_leases(self._intake, policy)

    def _lease(self, chosen: list[int], suspicion: Suspicion | None) -> Claimed:
        """In the order of `chosen`."""
        if not chosen:
            return Claimed()
        w = self._wanted
        rows = self._rows
        found = rows.dialect.claim_ids(
            rows.connection, chosen, [rows.queue], w.lease, w.token, suspicion=suspicion
        )
        rank = {message: n for n, message in enumerate(chosen)}
        found.sort(key=lambda row: rank[row.id])
        return found

    def _ask_policies(self, limit: int) -> bool:
        """Let each look at what is due, in their order; whether anything may start now."""
        self._intake.note_holds(self._wanted.policies)
        if (header := self._wanted.header) is not None and not self._intake.read_keys(header):
            self.next.more = True
            if any(isinstance(policy, Debounce | KeepLast) for policy in self._wanted.policies):
                return False  # a newer message of a key may be among those that have none yet
        for policy in self._wanted.policies:
            if isinstance(policy, Window):
                opens, self._closes = policy.span(self._now)
                if opens > self._now:
                    self.next.waits.append(self.next.seconds_to(opens))
                    self.gated = True
                    return False
                self._intake.opened = max(self._intake.opened, opens)
            elif isinstance(policy, Delay):
                self.next.more |= not self._intake.delay(policy)
            elif isinstance(policy, Debounce | KeepLast):
                if not self._intake.burst(policy):
                    # What is to come may belong to the burst of a message that is delivered now.
                    self._choice.behind = policy
                    self.next.more = True
                keep = self._wanted.keep
                self._choice.bursts = _heads(policy, self._rows, self._now, keep=keep)
            else:
                self._ask_limit(policy, limit)
        return True

    def _ask_limit(self, policy: Policy, limit: int) -> None:
        if isinstance(policy, Throttle) and policy.when_exceeded != "wait":
            room = self._slots.room(self._leases(limit), self._choice.starts)
            if (own := self._slots.own) is not None:
                self.next.more |= not own.let_in(room)
                if self._choice.bursts is not None:
                    self._choice.bursts.refused(own.dropped)
        elif isinstance(policy, Concurrency) and policy.per_key:
            self._choice.per_key = self._lowest(policy)

    def _lowest(self, policy: Concurrency) -> int:
        return lowest(self._intake, policy, self._memory.is_old)


def _heads(
    policy: Debounce | KeepLast, rows: PolicyRows, now: int, *, keep: bool
) -> BurstHeads | NewestHeads:
    kind = NewestHeads if isinstance(policy, KeepLast) else BurstHeads
    return kind(policy, rows, now, keep=keep)


def _due(pairs: list[ReadyPair], queue: str) -> list[ReadyPair]:
    return [pair for pair in pairs if pair.queue == queue and pair.due_in <= 0]
