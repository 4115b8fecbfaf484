"""Claims under scheduling policies: one claim of a queue at a time, in one transaction.

Two claims that read before either has committed could each find room for the last message. So a claim first locks the
queue's row of the policy state, and what it reads afterwards (READ COMMITTED) is what the one before has left. A claim
that finds it locked does not wait, and comes back. Running messages are counted as they are leased: no counter can leak.
"""

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from faststream_sqlbroker.core.outcome import Reject
from faststream_sqlbroker.core.policies import Concurrency, Debounce, Delay, Policy, Throttle, Window
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.throttle import (
    AHEAD,
    THROTTLED,
    dump_slots,
    first_slot,
    load_slots,
    next_slots,
)
from faststream_sqlbroker.core.rows import ClaimedMessage, ReadyPair
from faststream_sqlbroker.dialects.ordered import Heads
from faststream_sqlbroker.dialects.policy_bursts import BurstHeads
from faststream_sqlbroker.dialects.policy_intake import Intake, slot_scope
from faststream_sqlbroker.dialects.policy_rows import PolicyRows
from faststream_sqlbroker.dialects.policy_sql import Words
from faststream_sqlbroker.dialects.policy_wanted import Claim, Memory, Wanted

if TYPE_CHECKING:
    from faststream_sqlbroker.dialects.base import Dialect

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
NO_KEY = "no_key"
"""The reason of a message without the key that a policy needs, where the policy says so."""


class PolicyClaims:
    """The claims of one dialect."""

    def __init__(self, dialect: "Dialect", words: Words) -> None:
        """Prepare the statements."""
        self._dialect, self._rows = dialect, PolicyRows(dialect, words)

    def claim(self, connection: Connection, wanted: Wanted, memory: Memory) -> "Claim":
        """Lease what the policies let start; a row's `slot` says when. `memory` is changed."""
        pairs = self._dialect.ready_pairs(connection, wanted.queues)
        due = sorted({pair.queue for pair in pairs if pair.due_in <= 0})
        waits = [pair.due_in for pair in pairs if pair.due_in > 0]
        locked = self._dialect.lock_order(connection, due) if due else set()
        if any(isinstance(policy, Debounce) for policy in wanted.policies) and locked:
            # A priority that has come meanwhile belongs to the bursts, too.
            pairs = self._dialect.ready_pairs(connection, sorted(locked))
        if len(locked) < len(due):
            waits.append(0.0)
        rows: list[ClaimedMessage] = []
        gated = bool(due)
        for queue in wanted.queues:
            ready = [pair for pair in pairs if pair.queue == queue and pair.due_in <= 0]
            if queue in locked and ready and len(rows) < wanted.limit:
                one = _QueueClaim(self._dialect, self._rows, connection, wanted, memory, queue, ready)
                rows += one.run(wanted.limit - len(rows))
                waits += one.waits
                gated = gated and one.gated
        return Claim(rows, min(waits, default=None), gated and len(locked) == len(due))


class _QueueClaim:
    """One queue's part of a claim."""

    def __init__(
        self,
        dialect: "Dialect",
        rows: PolicyRows,
        connection: Connection,
        wanted: Wanted,
        memory: Memory,
        queue: str,
        pairs: list[ReadyPair],
    ) -> None:
        self._dialect, self._rows, self._connection = dialect, rows, connection
        self._wanted, self._memory, self._queue, self._pairs = wanted, memory, queue, pairs
        self._now = rows.now(connection)
        self._intake = Intake(rows, connection, queue, pairs, self._now, memory.looks, wanted.keep)
        self._gates: list[tuple[int, Throttle]] = []
        self._logs: list[list[int]] = []
        self._bursts: BurstHeads | None = None
        self._per_key: int | None = None
        self.gated = False
        """Whether nothing more can start before the next look, whatever comes."""
        self.waits: list[float] = []
        """In how many seconds to look again."""

    def run(self, limit: int) -> list[ClaimedMessage]:
        """Lease up to `limit`."""
        limit = self._ask_policies(limit)
        self.waits += [self._seconds_to(at) for at in self._intake.later]
        if limit < 1:
            return []
        slots = self._slots(limit)
        short = slots is not None and len(slots) < limit
        if slots is not None:
            limit = min(limit, len(slots))
        if limit < 1:
            self._wait_for_slot([])
            return []
        dead = self._intake.dead[:limit]
        chosen = [*dead, *self._choose(limit - len(dead))]
        found = self._dialect.claim_ids(
            self._connection, chosen, [self._queue], self._wanted.lease, self._wanted.token
        )
        rank = {message: n for n, message in enumerate(chosen)}
        found.sort(key=lambda row: rank[row.id])
        if len(found) < len(chosen) or len(self._intake.dead) > len(dead):
            self.waits.append(0.0)
        self._refuse(found, set(dead))
        if self._bursts is not None:
            self._bursts.delivered(found)
        used = self._give_slots(found, slots)
        if slots is not None and short and used == len(slots):
            self._wait_for_slot(slots)
        elif used < len(found):
            # What only goes has left its place to the next.
            self.waits.append(0.0)
        return found

    def _ask_policies(self, limit: int) -> int:
        """Let each look at what is due, in their order; how many messages may start now."""
        for number, policy in enumerate(self._wanted.policies):
            if isinstance(policy, Window):
                opens, _ = policy.span(self._now)
                if opens > self._now:
                    self.waits.append(self._seconds_to(opens))
                    self.gated = True
                    return 0
                self._intake.opened = max(self._intake.opened, opens)
            elif isinstance(policy, Delay):
                self._goes_on(self._intake.delay(policy))
            elif isinstance(policy, Debounce):
                if not self._intake.burst(policy):
                    # What is to come may belong to the burst of a message that would be delivered now.
                    self.waits.append(0.0)
                    return 0
                self._bursts = BurstHeads(self._rows, self._connection, self._queue, self._now)
            else:
                limit = self._ask_limit(number, policy, limit)
        return limit

    def _ask_limit(self, number: int, policy: Policy, limit: int) -> int:
        if isinstance(policy, Throttle) and not policy.gates:
            self._goes_on(self._intake.slots(policy, limit))
        elif isinstance(policy, Throttle):
            self._gates.append((number, policy))
        elif isinstance(policy, Concurrency) and policy.per_key:
            self._per_key = policy.limit
        elif isinstance(policy, Concurrency):
            running = self._rows.running(self._connection, self._queue, policy.limit)
            limit = min(limit, policy.limit - running)
        return limit

    def _goes_on(self, whole: bool) -> None:
        if not whole:
            self.waits.append(0.0)

    def _choose(self, limit: int) -> list[int]:
        """The messages to lease, in order."""
        wanted, before = self._wanted, self._intake.before
        which = "" if wanted.suspects else "_others"
        if limit < 1:
            return []
        if wanted.ordered or self._per_key is not None:
            return self._choose_by_key(limit, which)
        size = limit if self._bursts is None else max(100, 2 * limit)
        due: list[tuple[int, str | None, int]] = []
        for pair in self._pairs:
            if len(due) < size:
                due += self._rows.due(
                    self._connection, self._queue, pair.priority, before=before, size=size - len(due), which=which,
                    only=wanted.only,
                )  # fmt: skip
        if self._bursts is None:
            return [message for message, _, _ in due]
        chosen = self._bursts.choose(due, limit)
        self.waits += [self._seconds_to(at) for at in self._bursts.later]
        if len(due) == size and len(chosen) < limit:
            self.waits.append(0.0)
        return chosen

    def _choose_by_key(self, limit: int, which: str) -> list[int]:
        heads = Heads(
            self._connection,
            self._dialect.sql,
            limit,
            end=which,
            mask=self._intake.before,
            per_key=self._per_key,
        )
        if (only := self._wanted.only) is not None:
            one = [
                due for pair in self._pairs
                for due in self._rows.due(
                    self._connection, self._queue, pair.priority, before=self._intake.before, size=1, which="", only=only
                )
            ]  # fmt: skip
            return [
                message
                for message, key, _ in one
                if key is None or heads.may_start(self._queue, message, key)
            ]
        if heads.look(self._pairs, self._memory.cursors):
            self.waits.append(0.0)
        elif not heads.full and (soon := heads.soonest()) is not None:
            self.waits.append(soon)
        return heads.ids[:limit]

    def _refuse(self, rows: list[ClaimedMessage], dead: set[int]) -> None:
        """Record why some of `rows` are claimed only to be made dead letters."""
        keyed = any(
            getattr(policy, "without_key", "") == "dead_letter" and _is_keyed(policy)
            for policy in self._wanted.policies
        )
        for row in rows:
            if row.id in dead:
                row.settle_as(Reject(THROTTLED))
            elif keyed and row.key is None:
                row.settle_as(Reject(NO_KEY))

    def _slots(self, limit: int) -> list[int] | None:
        """The slots that are granted now; None without a limit."""
        if not self._gates:
            return None
        for number, _ in self._gates:
            scope = slot_scope(self._queue, number)
            self._logs.append(load_slots(self._rows.states(self._connection, scope, [""]).get("")))
        return next_slots(self._throttles, self._logs, self._now, self._now + AHEAD, limit)

    @property
    def _throttles(self) -> list[Throttle]:
        return [policy for _, policy in self._gates]

    def _wait_for_slot(self, slots: list[int]) -> None:
        self.gated = True
        logs = [[*log, *slots] for log in self._logs]
        # Half of the time ahead: the claim is done before the slot has come.
        self.waits.append(self._seconds_to(first_slot(self._throttles, logs, self._now) - AHEAD // 2))

    def _give_slots(self, rows: list[ClaimedMessage], slots: list[int] | None) -> int:
        """Tell each row when it may start, and note the slots that are taken; how many rows start."""
        starting = [row for row in rows if row.outcome is None and not _expired(row)]
        lags = [policy.max_lag for policy in self._wanted.policies if isinstance(policy, Throttle)]
        if not lags or not starting:
            return len(starting)
        for n, row in enumerate(starting):
            acquired = _microseconds(row.acquired_at)
            slot = _microseconds(row.next_attempt_at) if slots is None else slots[n]
            row.slot = (slot - acquired) / MICROSECONDS, (slot + min(lags) - acquired) / MICROSECONDS
        if slots is None:
            return len(starting)
        for (number, policy), before in zip(self._gates, self._logs, strict=True):
            log = [*before, *slots[: len(starting)]]
            until = log[-1] + policy.per + MICROSECONDS
            scope = slot_scope(self._queue, number)
            self._rows.keep(self._connection, scope, {"": (dump_slots(policy, log), until)})
        return len(starting)

    def _seconds_to(self, at: int) -> float:
        return max(0.001, (at - self._now) / MICROSECONDS)


def _is_keyed(policy: Policy) -> bool:
    """Whether the policy looks at keys."""
    return not (isinstance(policy, Throttle) and not policy.key) and not (
        isinstance(policy, Concurrency) and not policy.per_key
    )


def _expired(row: ClaimedMessage) -> bool:
    return row.expires_at is not None and row.expires_at <= row.acquired_at


def _microseconds(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)
