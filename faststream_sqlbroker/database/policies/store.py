"""Claims under scheduling policies, and the keys of `Once`.

A claim by compare and swap has two statements, each of which commits by itself. The first
reads, functions without input or output decide, and the second writes if no other claim of the
queue has written since. All claims of a queue raise its version, including those that hold its
lock (`policies.claims`), so counts are still true when they are written. A claim that comes too
late has written nothing, and is repeated soon.

This serves policies that need only the first due messages, the number of leases and the slots
of the queue. Other policies, and databases without such statements, use the lock.
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
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.policies.flags import DELAYED
from faststream_sqlbroker.core.policies.holds import build_holds
from faststream_sqlbroker.core.policies.live_rates import SlotLogKey
from faststream_sqlbroker.core.policies.seen import (
    Candidate,
    CompareAndSwap,
    QueueSnapshot,
    QueueSnapshots,
)
from faststream_sqlbroker.core.rows import ClaimedMessage, ClaimedMessages
from faststream_sqlbroker.core.suspects import Suspect
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.engine import Database, StoreSubject
from faststream_sqlbroker.database.parts import once
from faststream_sqlbroker.database.parts.policy_state import get_process_name
from faststream_sqlbroker.database.policies.claims import PolicyClaims
from faststream_sqlbroker.database.policies.intake import NOTE_RENEWAL, get_slot_scope
from faststream_sqlbroker.database.policies.request import (
    PolicyClaim,
    PolicyClaimRequest,
    ScanPosition,
    has_expired,
    limit_starts,
    must_reject_keyless,
    reject_unstartable,
    set_once_keys,
)
from faststream_sqlbroker.database.policies.rows import DecisionListener
from faststream_sqlbroker.database.policies.slot_use import ReadTime
from faststream_sqlbroker.database.policies.slots import QueueSlots
from faststream_sqlbroker.database.query import Work
from faststream_sqlbroker.exceptions import StoreError, UnknownOutcomeError


class PolicyStore(StoreSubject):
    """Reads and writes the state of policies; each operation is a transaction.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._claims = PolicyClaims(database.dialect, database.clock)

    def set_decision_listener(self, listener: DecisionListener) -> None:
        """Register the function that is called with the decisions of claims."""
        self._claims.on_decision = listener

    async def claim(
        self, request: PolicyClaimRequest, position: ScanPosition
    ) -> tuple[PolicyClaim, ScanPosition]:
        """Lease messages that the policies let start; return the result and the next position.

        Tries a compare and swap first, which needs no lock, and otherwise claims under the queue's
        lock. The position says where the scans of this process begin; the caller passes it to its
        next claim. If the claim fails, the old position stays valid.
        """
        started_at = self._database.clock.monotonic()
        if (swap_result := await self._claim_by_swap(request, position)) is not None:
            return swap_result

        new_position = position

        def claim(connection: Connection) -> PolicyClaim:
            """Claim under the locks; also called for a repeat of the transaction."""
            nonlocal new_position
            # A copy: the transaction may be repeated, and must start at the same position.
            new_position = position.copy()
            return self._claims.claim(connection, request, new_position)

        try:
            result = await self._database.run(claim, Activity.CONSUME, Activity.STATE)
        except (UnknownOutcomeError, asyncio.CancelledError):
            # The claim may have been committed, and its reports of slots with it.
            new_position.slot_use.discard_reported(new_position.reported)
            raise
        # The claim has stored these outcomes of slots: they must not be reported again.
        new_position.slot_use.discard_reported(new_position.reported)
        if result.read is not None:
            now = self._database.clock.monotonic()
            new_position.record_claim(now - result.read.requested_at, now - started_at)
        return result, new_position

    async def _claim_by_swap(
        self, request: PolicyClaimRequest, position: ScanPosition
    ) -> tuple[PolicyClaim, ScanPosition] | None:
        """Claim by compare and swap; return None, with nothing written, if a lock is needed.

        Reads without a lock, decides, and writes only if no other claim of the queue has written
        since. Each queue is one write, in a transaction of its own. So if the write of a later
        queue is refused, the leases of the earlier queues are returned all the same. If its outcome
        is unknown, the error is raised, and the caller releases all leases of the token.
        """
        scan = build_scan(self._dialect, request) if can_swap(request) else None
        if scan is None:
            return None
        clock = self._database.clock
        started_at = clock.monotonic()
        # The wait for a connection counts as time in which the clock may have been read.
        seen = await self._database.run(scan, Activity.CONSUME, Activity.STATE, write=False)
        claim = SwapClaim(
            request, seen, ReadTime(seen.now, started_at, clock.monotonic()), position
        )
        if claim.needs_lock:
            return None
        new_position = position.copy()
        while (swap := claim.build_next_swap()) is not None:
            write = self._dialect.build_compare_and_swap(swap)
            try:
                messages = await self._database.run(write, Activity.CONSUME, Activity.STATE)
            except asyncio.CancelledError:
                claim.handle_lost_answer()
                raise
            except StoreError as error:
                if isinstance(error, UnknownOutcomeError):
                    claim.handle_lost_answer()
                    raise
                if not claim.has_leases:
                    raise
                # Messages of another queue are already leased, and no other claim would return
                # them.
                claim.apply_swap(swap, None)
                break
            claim.apply_swap(swap, messages)
            # A swap that came too late was quick: its duration says nothing about how long a slot
            # needs.
            if messages is not None:
                new_position.record_swap(clock.monotonic() - started_at)
        return claim.build_result(), new_position

    async def claim_keys(
        self, rows: Sequence[ClaimedMessage], ttl: float
    ) -> dict[int, tuple[once.OnceStatus, int | None]]:
        """Claim the keys of `rows` for `ttl` seconds, before their handlers start.

        The policy `Once` needs this: only a message that has its key may be handled. A repeat with
        the same leases changes nothing.

        Returns:
            By id, the status of each row and the id of the message that has its key.
        """
        lock = self._dialect.lock
        return await self._database.run(
            lambda c: once.claim_keys(c, self._table, lock, rows, ttl, get_process_name()),
            Activity.CONSUME,
            Activity.STATE,
        )

    async def claim_free_keys(self, rows: Sequence[ClaimedMessage], ttl: float) -> set[int]:
        """Claim the free keys of `rows`; return the ids of their rows.

        A single statement for the usual case, that no other message has the keys. For the rows that
        are missing in the result, the caller uses `claim_keys`, which also says why. A database
        without such a statement returns an empty set, and nothing is sent.
        """
        query = self._dialect.build_claim_free_keys(rows, ttl, get_process_name())
        return (
            set()
            if query is None
            else await self._database.run(query, Activity.CONSUME, Activity.STATE)
        )

    async def release_keys(self, rows: Sequence[ClaimedMessage]) -> None:
        """Release the keys that `rows` still claim for the policy Once.

        Called when the messages will be tried again: their next deliveries must find the keys free.
        """
        table = self._table
        lock = self._dialect.lock
        await self._database.run(
            lambda c: once.release_keys(c, table, lock, rows), Activity.CONSUME, Activity.STATE
        )


class SwapClaim:
    """A claim by compare and swap after the first statement."""

    def __init__(
        self,
        request: PolicyClaimRequest,
        seen: QueueSnapshots,
        read: ReadTime,
        position: ScanPosition,
    ) -> None:
        """Prepare the claim, of which `seen` are the snapshots of the queues.

        `read` is the time at which they were read. Only queues with due messages are in `seen`.
        """
        self._request = request
        self._seen = seen
        self._read = read
        self._position = position
        self._remaining = [seen.queues[name] for name in request.queues if name in seen.queues]
        self._rows: list[ClaimedMessage] = []
        self._suspects: dict[int, Suspect] = {}
        self._delays = list(seen.delays)
        self._is_blocked = bool(self._remaining)
        self._closed_queues: set[str] = set()
        """Queues of which nothing more can start before the next scan."""
        self._closes_at: int | None = None
        self._slots: QueueSlots | None = None
        self._reported: dict[SlotLogKey, int] = {}

    @property
    def needs_lock(self) -> bool:
        """True if the claim has work to do under the lock first.

        That is to create the version of a queue that has none, to exchange rates and limits with
        other processes, or to delay new messages.
        """
        delayed = any(isinstance(policy, Delay) for policy in self._request.policies)
        return any(
            queue.version is None
            or self._must_exchange(queue.queue)
            or (delayed and any(not candidate.flags & DELAYED for candidate in queue.candidates))
            for queue in self._remaining
        )

    def _must_exchange(self, queue: str) -> bool:
        """Return True if an exchange of policies, limits and rates with other processes is due.

        Only a claim under the lock notes its policies, and reads the limits and rates of others.
        Until the next exchange is due, claims use what was read last.
        """
        position = self._position.intake
        noted_at = position.noted_at.get(queue, float("-inf"))
        if (
            build_holds(self._request.policies)
            and self._read.requested_at >= noted_at + NOTE_RENEWAL
        ):
            return True
        throttled = any(isinstance(policy, Throttle) for policy in self._request.policies)
        is_old = self._position.is_old
        if throttled and is_old(position.rates.read_at, self._read.requested_at):
            return True
        limited = any(isinstance(policy, Concurrency) for policy in self._request.policies)
        read_at, _ = position.limits.get((queue, False), (float("-inf"), 0))
        return limited and is_old(read_at, self._read.requested_at)

    @property
    def has_leases(self) -> bool:
        """True if any message is leased already."""
        return bool(self._rows)

    def build_next_swap(self) -> CompareAndSwap | None:
        """Return the write for the next queue with messages that may start; None after the last.

        The caller executes it and passes the result to `apply_swap`, before the next call.
        """
        while self._remaining and len(self._rows) < self._request.limit:
            queue = self._remaining.pop(0)
            if (swap := self._build_swap(queue)) is not None:
                return swap
            self._is_blocked = self._is_blocked and queue.queue in self._closed_queues
        return None

    def apply_swap(self, swap: CompareAndSwap, messages: ClaimedMessages | None) -> None:
        """Apply the result of `swap`; None means that another claim was quicker, or that the write
        failed.

        Then nothing was written, and the claim is repeated soon. Otherwise the leased rows get
        their slots, the times at which throttles let them start.
        """
        slots = self._slots
        if messages is None or slots is None:
            # The granted slots are lost with this claim: nothing of them was stored.
            self._delays.append(0.0)
            self._is_blocked = False
            return
        # The write has stored these outcomes of slots: they must not be reported again.
        self._position.slot_use.discard_reported(self._reported)
        set_once_keys(messages, self._request.policies)
        reject_unstartable(messages, self._request.policies)
        starting = [row for row in messages if row.outcome is None and not has_expired(row)]
        slots.assign_slots(starting)
        if self._closes_at is not None:
            limit_starts(self._closes_at, messages, self._read)
        if len(messages) < len(swap.ids):
            self._delays.append(0.0)  # another transaction has locked some of them
        is_closed = self._schedule_slot_scan(slots, len(starting), swap.queue)
        if not is_closed and len(starting) < len(messages):
            self._delays.append(0.0)  # rows that only end have left capacity for others
        self._is_blocked = self._is_blocked and is_closed
        self._rows += messages

    def handle_lost_answer(self) -> None:
        """Forget the reports of a last swap whose result is unknown.

        They may have been stored. Reporting the outcome of a slot twice could remove another start
        from the log of starts, and so exceed the rate.
        """
        self._position.slot_use.discard_reported(self._reported)

    def build_result(self) -> PolicyClaim:
        """Return the leases of all queues, and when to claim again."""
        next_claim_in = min(self._delays, default=None)
        return PolicyClaim(
            self._rows, next_claim_in, self._is_blocked, suspects=self._suspects, read=self._read
        )

    def _build_swap(self, queue: QueueSnapshot) -> CompareAndSwap | None:
        """Return the leases of a queue to write, or None if nothing may start.

        Decides by the snapshot of the queue alone: open Window, free leases, slots of the
        throttles. Outcomes of earlier slots are written even if no message may start.
        """
        request = self._request
        limit = request.limit - len(self._rows)
        starts = min(limit, max(0, request.immediate_starts - len(self._rows)))
        if (
            not self._check_window(queue.queue)
            or (free_leases := self._count_free_leases(queue, limit, starts)) < 1
        ):
            return None
        states = _SwapStates(queue.states)
        self._reported = {}
        slots = self._slots = QueueSlots(
            states,
            queue.queue,
            self._read,
            request,
            self._position,
            self._reported,
            self._position.swap_durations,
        )
        slots.wait_seconds = request.get_wait_seconds(len(self._rows))
        # Slots (starts that the throttles allow) are counted before the leased messages are known,
        # as the same statement stores both. The slot of a message that is locked elsewhere by then
        # is wasted.
        selected = self._select_candidates(queue, slots.grant_slots(free_leases, starts))
        needs_key = must_reject_keyless(request.policies)
        spent_slots = sum(
            not candidate.expired and not (needs_key and candidate.keyless)
            for candidate in selected
        )
        stored = slots.store_slots(spent_slots)
        if not selected and not stored:
            # The version stays: decisions of other claims by their reads are still valid.
            self._schedule_slot_scan(slots, 0, queue.queue)
            return None
        return CompareAndSwap(
            queue.queue,
            queue.version or 0,
            [candidate.id for candidate in selected],
            request.lease,
            request.token,
            states.changes,
        )

    def _check_window(self, queue: str) -> bool:
        """Return True if all Windows are open.

        Otherwise no message of the queue starts before the next opening, and the next scan is then.
        Remembers when the Windows close, for rows that wait for a worker.
        """
        self._closes_at = None
        for policy in self._request.policies:
            if isinstance(policy, Window):
                opens, self._closes_at = policy.span(self._seen.now)
                if opens > self._seen.now:
                    self._close_until(opens, queue)
                    return False
        return True

    def _count_free_leases(self, queue: QueueSnapshot, limit: int, starts: int) -> int:
        """Return how many of `limit` leases the Concurrency policies allow.

        By the leases that the snapshot counted, which are still right if the write succeeds.
        """
        limits = [p for p in self._request.policies if isinstance(p, Concurrency)]
        # The lowest limit of all processes, as read by the last claim under the lock.
        _, lowest_limit = self._position.intake.limits.get((queue.queue, False), (0.0, None))
        return min(
            (p.leases(queue.running, limit, starts, lowest_limit) for p in limits), default=limit
        )

    def _select_candidates(self, queue: QueueSnapshot, capacity: int) -> list[Candidate]:
        """Return the first candidates without suspects, up to `capacity`; record the suspects.

        A candidate is a due message of the snapshot. A suspect may have killed its process: the
        caller claims it alone, later.
        """
        suspect_rule = self._request.suspect_rule
        selected: list[Candidate] = []
        for candidate in queue.candidates:
            if len(selected) == capacity:
                break
            suspect = None if suspect_rule is None else suspect_rule.classify(candidate.lost_leases)
            if suspect is None:
                selected.append(candidate)
            else:
                self._suspects[candidate.id] = suspect
        return selected

    def _schedule_slot_scan(self, slots: QueueSlots, starting: int, queue: str) -> bool:
        """Schedule the next scan if all available slots were taken; return True if so.

        Then no message of the queue can start before that scan, whatever arrives.
        """
        if (at := slots.find_next_scan(starting)) is None:
            return False
        self._close_until(at, queue)
        return True

    def _close_until(self, at: int, queue: str) -> None:
        self._delays.append(max(0.001, (at - self._seen.now) / MICROSECONDS))
        self._closed_queues.add(queue)


class _SwapStates:
    """The states of a queue as read, and the changes to write."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self._stored = stored
        self.changes: dict[str, tuple[Any, int]] = {}

    def load_states(self, scope: str, keys: Iterable[str]) -> dict[str, Any]:
        """Load as `StateStore`; a queue's own state has no key."""
        return {key: self._stored[scope] for key in keys if not key and scope in self._stored}

    def save_states(self, scope: str, states: Mapping[str, tuple[Any, int]]) -> None:
        for state in states.values():
            self.changes[scope] = state


def can_swap(request: PolicyClaimRequest) -> bool:
    """Return True if a compare and swap, which takes two statements, is enough for the request.

    It reads the first due messages of each queue, the number of leases and the queue's own slots. A
    request that must search by key or for one message needs the lock.
    """
    # Header keys must be read first, under the lock.
    simple = request.only is None and not request.ordered and request.header is None
    return simple and all(map(_can_swap_policy, request.policies))


def _can_swap_policy(policy: Policy) -> bool:
    """Return True if the policy decides by due messages, leases and slots of the queue alone.

    The other policies read or write states of keys, or of other queues.
    """
    if isinstance(policy, Throttle):
        return policy.gates and policy.scope is None
    if isinstance(policy, Concurrency):
        return not policy.per_key and policy.scope is None
    return isinstance(policy, Window | Delay | Once | BlockingWait)


def build_scan(dialect: Dialect, request: PolicyClaimRequest) -> Work[QueueSnapshots] | None:
    """Build the statement that reads the queues for a compare and swap.

    None if the database has no such statement: then the claim uses the lock. Leases are counted no
    further than the greatest limit, as more would not change the decision.
    """
    limits = [policy.limit for policy in request.policies if isinstance(policy, Concurrency)]
    throttles = sum(isinstance(policy, Throttle) for policy in request.policies)
    suspect_rule = request.suspect_rule
    return dialect.build_read_queues(
        request.queues,
        size=request.limit,
        max_running=max(limits, default=0),
        scopes=[get_slot_scope("", n) for n in range(throttles)],
        suspect_rule=suspect_rule if suspect_rule is not None and not suspect_rule.report else None,
    )
