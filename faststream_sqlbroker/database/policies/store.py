"""Claims under scheduling policies, and the keys of `Once`.

A claim by compare and swap is two statements, each of which commits by itself. The first reads;
functions without input or output decide; the second writes, if no other claim of the queue has
written since. All claims of a queue raise its version, also those that hold its lock
(`policies.claims`), so what was counted is still true when it is written. A claim that comes too
late has written nothing, and is repeated soon.

This serves policies that need no more than the first due messages, the number of leases and the
slots of the queue. The others, and all on databases without such statements, hold the lock.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.policies import (
    BlockingWait,
    Concurrency,
    Delay,
    Once,
    Policy,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.policies.flags import DELAYED
from faststream_sqlbroker.core.policies.holds import holds_of
from faststream_sqlbroker.core.policies.live_rates import Place
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.seen import Candidate, Seen, SeenQueue, Swap
from faststream_sqlbroker.core.rows import Claimed, ClaimedMessage
from faststream_sqlbroker.core.suspects import Suspect
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import once
from faststream_sqlbroker.database.parts.policy_state import process_name
from faststream_sqlbroker.database.policies.claims import PolicyClaims
from faststream_sqlbroker.database.policies.intake import RENEWED, slot_scope
from faststream_sqlbroker.database.policies.request import (
    Claim,
    PolicyClaimRequest,
    ScanPosition,
    end_at,
    has_expired,
    refuse,
    refuses_keyless,
)
from faststream_sqlbroker.database.policies.rows import Decided
from faststream_sqlbroker.database.policies.slot_use import ReadTime
from faststream_sqlbroker.database.policies.slots import QueueSlots
from faststream_sqlbroker.database.query import Work
from faststream_sqlbroker.exceptions import StoreError, UnknownOutcomeError


class PolicyStore:
    """Reads and writes the state of policies; each operation is one transaction.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._claims = PolicyClaims(database.dialect, database.clock)

    def tell_decisions(self, decided: Decided) -> None:
        """Let `decided` be told of what claims decide."""
        self._claims.decided = decided

    async def claim(
        self, wanted: PolicyClaimRequest, memory: ScanPosition
    ) -> tuple[Claim, ScanPosition]:
        """Lease the messages that the policies let start; and the position for the next claim."""
        began = self._database.clock.monotonic()
        if (swapped := await self._swapped(wanted, memory)) is not None:
            return swapped

        moved = memory

        def claim(connection: Connection) -> Claim:
            nonlocal moved
            # A copy: the transaction may be repeated, and must start at the same position.
            moved = memory.copy()
            return self._claims.claim(connection, wanted, moved)

        try:
            found = await self._database.run(claim, Activity.CONSUME, Activity.STATE)
        except (UnknownOutcomeError, asyncio.CancelledError):
            moved.use.told(moved.told)
            raise
        moved.use.told(moved.told)
        if found.read is not None:
            now = self._database.clock.monotonic()
            moved.note(now - found.read.asked, now - began)
        return found, moved

    async def _swapped(
        self, wanted: PolicyClaimRequest, memory: ScanPosition
    ) -> tuple[Claim, ScanPosition] | None:
        """`claim` without a lock; None: it needs one, and nothing was written."""
        look = looking(self._dialect, wanted) if swaps(wanted) else None
        if look is None:
            return None
        clock = self._database.clock
        asked = clock.monotonic()
        # The wait for a connection counts as time in which the clock may have been read.
        seen = await self._database.run(look, Activity.CONSUME, Activity.STATE, write=False)
        claim = SwapClaim(wanted, seen, ReadTime(seen.now, asked, clock.monotonic()), memory)
        if claim.needs_lock:
            return None
        moved = memory.copy()
        while (swap := claim.next_swap()) is not None:
            swapping = self._dialect.swapping(swap)
            try:
                found = await self._database.run(swapping, Activity.CONSUME, Activity.STATE)
            except asyncio.CancelledError:
                claim.unanswered()
                raise
            except StoreError as error:
                if isinstance(error, UnknownOutcomeError):
                    claim.unanswered()
                    raise
                if not claim.leased:
                    raise
                # Another queue's messages are leased already: no other claim would return them.
                claim.swapped(swap, None)
                break
            claim.swapped(swap, found)
            # One that came too late was quick: it says nothing of how long a slot needs.
            if found is not None:
                moved.note_swap(clock.monotonic() - asked)
        return claim.result(), moved

    async def claim_keys(
        self, rows: Sequence[ClaimedMessage], ttl: float
    ) -> dict[int, tuple[once.Verdict, int | None]]:
        """Claim the keys of `rows` for `ttl` seconds, before their handlers start.

        A repeat with the same leases changes nothing.

        Returns:
            By id, the verdict on each row and the id of the message that has its key.
        """
        table = self._dialect.tables.policy_state
        lock = self._dialect.lock
        return await self._database.run(
            lambda c: once.claim_keys(c, table, lock, rows, ttl, process_name()),
            Activity.CONSUME,
            Activity.STATE,
        )

    async def claim_free_keys(self, rows: Sequence[ClaimedMessage], ttl: float) -> set[int]:
        """Those of `rows` whose keys were free, and are claimed now; `claim_keys` says why not the
        others.

        None of them, and nothing is sent, where the database has no shorter way than `claim_keys`.
        """
        claiming = self._dialect.claiming_free_keys(rows, ttl, process_name())
        return (
            set()
            if claiming is None
            else await self._database.run(claiming, Activity.CONSUME, Activity.STATE)
        )

    async def give_back_keys(self, rows: Sequence[ClaimedMessage]) -> None:
        """Free the keys of `rows` that are still claimed by them."""
        table = self._dialect.tables.policy_state
        lock = self._dialect.lock
        await self._database.run(
            lambda c: once.give_back_keys(c, table, lock, rows), Activity.CONSUME, Activity.STATE
        )


class SwapClaim:
    """One claim by compare and swap, after its first statement."""

    def __init__(
        self, wanted: PolicyClaimRequest, seen: Seen, read: ReadTime, memory: ScanPosition
    ) -> None:
        """`read` is when it was `seen`."""
        self._wanted = wanted
        self._seen = seen
        self._read = read
        self._memory = memory
        self._left = [seen.queues[name] for name in wanted.queues if name in seen.queues]
        self._rows: list[ClaimedMessage] = []
        self._suspects: dict[int, Suspect] = {}
        self._waits = list(seen.waits)
        self._gated = bool(self._left)
        self._shut: set[str] = set()
        """Queues of which nothing more can start before the next look."""
        self._closes: int | None = None
        self._slots: QueueSlots | None = None
        self._told: dict[Place, int] = {}

    @property
    def needs_lock(self) -> bool:
        """Whether something has to be done before that takes more than the two statements."""
        delayed = any(isinstance(policy, Delay) for policy in self._wanted.policies)
        return any(
            queue.version is None
            or self._has_to_note(queue.queue)
            or (delayed and any(not each.marks & DELAYED for each in queue.candidates))
            for queue in self._left
        )

    def _has_to_note(self, queue: str) -> bool:
        """Whether it is time to tell other processes of the policies, and to hear of theirs."""
        position = self._memory.intake
        noted = position.noted.get(queue, float("-inf"))
        if holds_of(self._wanted.policies) and self._read.asked >= noted + RENEWED:
            return True
        throttled = any(isinstance(policy, Throttle) for policy in self._wanted.policies)
        is_old = self._memory.is_old
        if throttled and is_old(position.rates.read_at, self._read.asked):
            return True
        limited = any(isinstance(policy, Concurrency) for policy in self._wanted.policies)
        read_at, _ = position.limits.get((queue, False), (float("-inf"), 0))
        return limited and is_old(read_at, self._read.asked)

    @property
    def leased(self) -> bool:
        """Whether any message is leased by now."""
        return bool(self._rows)

    def next_swap(self) -> Swap | None:
        """What to write next; None: nothing more."""
        while self._left and len(self._rows) < self._wanted.limit:
            queue = self._left.pop(0)
            if (swap := self._decide(queue)) is not None:
                return swap
            self._gated = self._gated and queue.queue in self._shut
        return None

    def swapped(self, swap: Swap, found: Claimed | None) -> None:
        """Take what came of `swap`; None: another claim was quicker."""
        slots = self._slots
        if found is None or slots is None:
            # What was granted is forgotten with this claim: nothing of it was stored.
            self._waits.append(0.0)
            self._gated = False
            return
        self._memory.use.told(self._told)
        refuse(found, self._wanted.policies)
        starting = [row for row in found if row.outcome is None and not has_expired(row)]
        slots.tell(starting)
        if self._closes is not None:
            end_at(self._closes, found, self._read)
        if len(found) < len(swap.ids):
            self._waits.append(0.0)  # another transaction has locked some of them
        shut = self._waits_for_slot(slots, len(starting), swap.queue)
        if not shut and len(starting) < len(found):
            self._waits.append(0.0)  # rows that only end have left room for others
        self._gated = self._gated and shut
        self._rows += found

    def unanswered(self) -> None:
        """Nothing is known of what came of the last swap."""
        self._memory.use.told(self._told)

    def result(self) -> Claim:
        """The whole result."""
        again = min(self._waits, default=None)
        return Claim(self._rows, again, self._gated, suspects=self._suspects, read=self._read)

    def _decide(self, queue: SeenQueue) -> Swap | None:
        """What to lease of a queue; None: nothing may start."""
        wanted = self._wanted
        limit = wanted.limit - len(self._rows)
        starts = min(limit, max(0, wanted.starts - len(self._rows)))
        if not self._is_open(queue.queue) or (free := self._leases(queue, limit, starts)) < 1:
            return None
        states = _States(queue.states)
        self._told = {}
        slots = self._slots = QueueSlots(
            states,
            queue.queue,
            self._read,
            wanted,
            self._memory,
            self._told,
            self._memory.swaps_took,
        )
        slots.seconds_behind = wanted.seconds_behind(len(self._rows))
        # Slots are counted before it is known which messages are leased, as they are stored by the
        # same statement. One that is locked elsewhere by then has spent its slot in vain.
        chosen = self._chosen(queue, slots.room(free, starts))
        keyed = refuses_keyless(wanted.policies)
        spending = sum(not each.expired and not (keyed and each.keyless) for each in chosen)
        stored = slots.spend(spending)
        if not chosen and not stored:
            # The version stays: others decide by what they have read as well as before.
            self._waits_for_slot(slots, 0, queue.queue)
            return None
        return Swap(
            queue.queue,
            queue.version or 0,
            [each.id for each in chosen],
            wanted.lease,
            wanted.token,
            states.kept,
        )

    def _is_open(self, queue: str) -> bool:
        self._closes = None
        for policy in self._wanted.policies:
            if isinstance(policy, Window):
                opens, self._closes = policy.span(self._seen.now)
                if opens > self._seen.now:
                    self._wait_until(opens, queue)
                    return False
        return True

    def _leases(self, queue: SeenQueue, limit: int, starts: int) -> int:
        limits = [p for p in self._wanted.policies if isinstance(p, Concurrency)]
        # The lowest of all processes, as the last claim under the lock has read it.
        _, known = self._memory.intake.limits.get((queue.queue, False), (0.0, None))
        return min((p.leases(queue.running, limit, starts, known) for p in limits), default=limit)

    def _chosen(self, queue: SeenQueue, room: int) -> list[Candidate]:
        """The first `room` that are no suspects; those are noted."""
        suspicion = self._wanted.suspicion
        chosen: list[Candidate] = []
        for each in queue.candidates:
            if len(chosen) == room:
                break
            suspect = None if suspicion is None else suspicion.of(each.lost)
            if suspect is None:
                chosen.append(each)
            else:
                self._suspects[each.id] = suspect
        return chosen

    def _waits_for_slot(self, slots: QueueSlots, starting: int, queue: str) -> bool:
        """Whether all slots that there are were taken."""
        if (at := slots.next_look(starting)) is None:
            return False
        self._wait_until(at, queue)
        return True

    def _wait_until(self, at: int, queue: str) -> None:
        self._waits.append(max(0.001, (at - self._seen.now) / MICROSECONDS))
        self._shut.add(queue)


class _States:
    """What was read of a queue's states, and what is to be written."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known
        self.kept: dict[str, tuple[Any, int]] = {}

    def states(self, scope: str, keys: Iterable[str]) -> dict[str, Any]:
        """As `States`; a queue's own state has no key."""
        return {key: self._known[scope] for key in keys if not key and scope in self._known}

    def keep(self, scope: str, states: Mapping[str, tuple[Any, int]]) -> None:
        """As `States`."""
        for state in states.values():
            self.kept[scope] = state


def swaps(wanted: PolicyClaimRequest) -> bool:
    """Whether two statements are enough for what is wanted."""
    # Keys of a header are read from it before, under the lock.
    simple = wanted.only is None and not wanted.ordered and wanted.header is None
    return simple and all(map(_swaps, wanted.policies))


def _swaps(policy: Policy) -> bool:
    if isinstance(policy, Throttle):
        return policy.gates and policy.scope is None
    if isinstance(policy, Concurrency):
        return not policy.per_key and policy.scope is None
    return isinstance(policy, Window | Delay | Once | BlockingWait)


def looking(dialect: Dialect, wanted: PolicyClaimRequest) -> Work[Seen] | None:
    """The first statement; None: the database has none such."""
    limits = [policy.limit for policy in wanted.policies if isinstance(policy, Concurrency)]
    throttles = sum(isinstance(policy, Throttle) for policy in wanted.policies)
    suspicion = wanted.suspicion
    return dialect.looking_at_queues(
        wanted.queues,
        size=wanted.limit,
        most_running=max(limits, default=0),
        scopes=[slot_scope("", n) for n in range(throttles)],
        others=suspicion if suspicion is not None and not suspicion.told else None,
    )
