"""Claims under scheduling policies: one claim of a queue at a time, in one transaction.

The race: two claims that read before either has committed could each find capacity for one more
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
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.rows import ClaimedMessage, ClaimedMessages, ReadyPair
from faststream_sqlbroker.core.suspects import Suspect, SuspectRule
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.policies.choice import MessageSelection, NextScan
from faststream_sqlbroker.database.policies.intake import Intake
from faststream_sqlbroker.database.policies.key_heads import BurstHeads, LatestHeads
from faststream_sqlbroker.database.policies.other_processes import (
    exchange_limit,
    read_rates,
    register_and_count_leases,
)
from faststream_sqlbroker.database.policies.request import (
    PolicyClaim,
    PolicyClaimRequest,
    ScanPosition,
    limit_starts,
    may_start,
    reject_unstartable,
    set_once_keys,
)
from faststream_sqlbroker.database.policies.rows import (
    DecisionListener,
    PolicyRows,
    QueuedMessage,
    read_now,
)
from faststream_sqlbroker.database.policies.slot_use import ReadTime
from faststream_sqlbroker.database.policies.slots import Slots

MIN_SCAN = 100
"""Minimum messages that a claim under a throttle reads: some may not start yet, and some need
another slot.
"""


class PolicyClaims:
    """Claims under policies that hold the queue's lock, for a dialect."""

    def __init__(self, dialect: Dialect, clock: Clock) -> None:
        """`clock` measures the duration of scans."""
        self._dialect = dialect
        self._clock = clock
        self.on_decision: DecisionListener | None = None
        """Called with decisions about messages without a lease, before they are written."""

    def claim(
        self, connection: Connection, request: PolicyClaimRequest, position: ScanPosition
    ) -> PolicyClaim:
        """Lease the messages that the policies let start; updates `position`.

        Reads the pairs of queue and priority with waiting messages, locks the queues that no other
        claim has locked, and decides by what it reads under the locks. A queue that is locked
        elsewhere is not waited for: the result asks for another claim soon. The `slot` of a row
        says when its handler may start. `position` is where this process's next scans begin.
        """
        # Correctness depends on the order of the reads before and after the lock, so all of it is
        # in this function.
        pairs = self._dialect.find_ready_pairs(connection, request.queues)
        self._dialect.repair_due_times(connection, pairs)
        delays = [pair.due_in for pair in pairs if pair.due_in > 0]
        burst_policy = next(
            (p for p in request.policies if isinstance(p, Debounce | KeepLast)), None
        )
        standby_queues = (
            set()
            if burst_policy is None
            else self._find_standby_queues(connection, request, pairs, delays)
        )
        claimable = {pair.queue for pair in pairs if pair.due_in <= 0}
        queues_to_lock = sorted(claimable | standby_queues)
        locked_queues = self._lock(connection, queues_to_lock, request.scopes)
        read = read_now(self._dialect, connection, self._clock) if locked_queues else None
        scan_delays: list[float] = []
        if burst_policy is not None and read is not None:
            scan_delays = self._check_standby(
                connection, burst_policy, request, read.now, locked_queues & standby_queues, pairs
            )
            # Pairs were read before the lock. A message of a new priority, committed since, may
            # belong to a burst, so read them again.
            pairs = self._dialect.find_ready_pairs(connection, sorted(locked_queues))
        if len(locked_queues) < len(queues_to_lock):
            delays.append(0.0)
        result = PolicyClaim(
            [], None, is_blocked=bool(claimable) and len(locked_queues) == len(queues_to_lock)
        )
        result.has_more = 0.0 in scan_delays
        delays += scan_delays
        if read is not None:
            result.read = read
            ready = [
                (queue, _filter_due_pairs(pairs, queue))
                for queue in request.queues
                if queue in locked_queues
            ]
            context = connection, request, position
            delays += self._claim_queues(
                context, [entry for entry in ready if entry[1]], read, result
            )
        result.next_claim_in = min(delays, default=None)
        return result

    def _find_standby_queues(
        self,
        connection: Connection,
        request: PolicyClaimRequest,
        pairs: list[ReadyPair],
        delays: list[float],
    ) -> set[str]:
        """Return the queues whose standby messages are due for a check.

        A standby message stays in the queue while another message of its key is to be delivered in
        its place; the check finds out whether that is gone. Appends to `delays` the seconds until
        the checks of the other queues.
        """
        checks = [
            (pair.queue, at)
            for pair in pairs
            for at in self._build_rows(connection, request, pair.queue).find_next_standby(
                pair.priority
            )
        ]
        if not checks:
            return set()
        now = read_now(self._dialect, connection, self._clock).now
        delays += [(at - now) / MICROSECONDS for _, at in checks if at > now]
        return {queue for queue, at in checks if at <= now}

    def _check_standby(
        self,
        connection: Connection,
        policy: Debounce | KeepLast,
        request: PolicyClaimRequest,
        now: int,
        queues: set[str],
        pairs: list[ReadyPair],
    ) -> list[float]:
        """Check the standby messages of `queues`; return the seconds until the next checks.

        The queues are locked. A standby message is promoted if the message that was to be delivered
        in its place is gone. 0 says that more remains to be checked at once.
        """
        delays: list[float] = []
        for queue in sorted(queues):
            rows = self._build_rows(connection, request, queue)
            heads = _create_heads(policy, rows, now, keep=request.keep)
            heads.check_standby(pair.priority for pair in pairs if pair.queue == queue)
            # 0 is reserved for more work at once.
            delays += [max(0.001, (at - now) / MICROSECONDS) for at in heads.next_checks]
            if heads.has_more:
                delays.append(0.0)
        return delays

    def _claim_queues(
        self,
        context: tuple[Connection, PolicyClaimRequest, ScanPosition],
        ready: list[tuple[str, list[ReadyPair]]],
        read: ReadTime,
        result: PolicyClaim,
    ) -> list[float]:
        """Lease messages of the queues in `ready`; return the seconds until the next scans.

        Adds the leases to `result`. Queues come in the order of the request, until its limit is
        reached.
        """
        connection, request, position = context
        self._refresh_rates(connection, request, position, read)
        suspects: dict[int, Suspect] = {}
        delays: list[float] = []
        for queue, pairs in ready:
            if len(result.rows) >= request.limit:
                break
            rows = self._build_rows(connection, request, queue)
            intake = Intake(rows, pairs, read.now, position.intake, request.keep, self._clock)
            queue_claim = _QueueClaim(intake, request, position, read)
            remaining = request.limit - len(result.rows)
            wait_seconds = request.get_wait_seconds(len(result.rows))
            result.rows += queue_claim.run(
                remaining, max(0, request.immediate_starts - len(result.rows)), wait_seconds
            )
            delays += queue_claim.next_scan.delays
            result.is_blocked = result.is_blocked and queue_claim.is_blocked
            result.has_more = result.has_more or queue_claim.next_scan.has_more
            suspects |= queue_claim.suspects
        result.suspects = suspects
        return delays

    def _build_rows(
        self, connection: Connection, request: PolicyClaimRequest, queue: str
    ) -> PolicyRows:
        """Return the policy statements for `queue`.

        If a policy of the request takes its key from a header, the statements use the keys that
        were read from there, else the keys of the publishes.
        """
        by_header = request.header is not None
        target = self._dialect, connection, queue
        return PolicyRows(*target, by_header=by_header, on_decision=self.on_decision)

    def _refresh_rates(
        self,
        connection: Connection,
        request: PolicyClaimRequest,
        position: ScanPosition,
        read: ReadTime,
    ) -> None:
        """Read the throttle rates of all live subscribers again if the known rates are old.

        The lowest rate applies. Reading takes time under the lock, so not every claim does it.
        Rates differ while a deployment changes them.
        """
        throttled = any(isinstance(policy, Throttle) for policy in request.policies)
        if throttled and position.is_old(position.intake.rates.read_at, read.requested_at):
            position.intake.rates = read_rates(
                self._dialect, connection, read.now, read.requested_at
            )

    def _lock(self, connection: Connection, due: list[str], scopes: list[str]) -> set[str]:
        """Lock the claims of the `due` queues that no other claim has locked, then `scopes`.

        A scope is the name of a budget that several queues share: its count of leases or slots is
        right only under its own lock. Waits for no lock, which also excludes deadlocks: without all
        of `scopes` no queue counts as locked, and the claim is repeated soon.
        """
        locked = self._dialect.lock_order(connection, due) if due else set()
        if locked and scopes:
            locked_scopes = self._dialect.lock_scopes(connection, scopes)
            return locked if len(locked_scopes) == len(scopes) else set()
        return locked


class _QueueClaim:
    """The part of a claim that concerns a single queue."""

    def __init__(
        self,
        intake: Intake,
        request: PolicyClaimRequest,
        position: ScanPosition,
        read: ReadTime,
    ) -> None:
        """Prepare the claim, which holds the lock of the queue.

        `read` is the time at which the queue was locked, before anything was read. A claim of one
        message (`request.only`) leases it even if it is a suspect, which may have killed its
        process.
        """
        self._intake = intake
        self._rows = intake.rows
        self._now = intake.now
        self._request = request
        self._position = position
        self._read = read
        self._closes_at: int | None = None
        self._free: int | None = None
        self._slots = Slots(intake, read, request, position)
        self.is_blocked = False
        """True if nothing more can start before the next scan, whatever arrives."""
        self.next_scan = NextScan(read.now)
        self._suspect_rule = None if request.only is not None else request.suspect_rule
        self._selection = MessageSelection(
            intake, self._slots, request, self._suspect_rule, position.cursors, self.next_scan
        )
        self.suspects: dict[int, Suspect] = {}
        """Suspects that could start and were skipped: checking them must not spend slots."""

    def run(self, limit: int, starts: int, seconds_behind: float) -> list[ClaimedMessage]:
        """Lease up to `limit` messages, of which the first `starts` find a free worker.

        The others wait `seconds_behind` behind those that wait already. The order matters: policies
        decide which messages may start, then free leases and slots limit their number. Slots
        (starts that a throttle allows) and bursts are stored last, for the rows that were really
        leased: another transaction may have locked some of the selected messages.
        """
        self._slots.wait_seconds = seconds_behind
        self._selection.immediate_starts = min(limit, starts)
        is_open = self._apply_policies(limit)
        self.next_scan.delays += [self.next_scan.get_delay(at) for at in self._intake.later]
        if not is_open or (free := self._count_free_leases(limit)) < 1:
            return []
        only = self._request.only
        # Messages that may start go first: slots were granted for them, and the next claim would
        # not count these.
        selected = self._select_starting(
            self._slots.grant_slots(free, self._selection.immediate_starts)
        )
        dead = [message for message in self._intake.dead if only in (None, message)][
            : free - len(selected)
        ]
        self.next_scan.has_more |= len(dead) < len(self._intake.dead)
        messages = self._lease(selected, self._suspect_rule)
        self.suspects |= messages.suspects
        rows = [*self._lease(dead, None), *messages]
        self._read_header_keys(rows)
        if len(rows) + len(messages.suspects) < len(dead) + len(selected):
            self.next_scan.delays.append(0.0)  # another transaction has locked some of them
        set_once_keys(rows, self._request.policies)
        reject_unstartable(rows, self._request.policies, set(dead))
        starting = self._slots.assign(rows)
        if self._selection.bursts is not None:
            self._update_bursts(
                self._selection.bursts, messages, [row for row in rows if row.id in dead]
            )
        if self._closes_at is not None:
            limit_starts(self._closes_at, rows, self._read)
        self._schedule_slot_scan(rows, starting)
        return rows

    def _update_bursts(
        self,
        bursts: BurstHeads | LatestHeads,
        messages: list[ClaimedMessage],
        refused: list[ClaimedMessage],
    ) -> None:
        """Record which messages of bursts were delivered, and which a throttle refused.

        A burst is a series of messages of one key, of which only one is delivered: the messages
        that stood by for it, in case it cannot be delivered, are discarded now.
        """
        # Messages claimed only to be discarded or rejected are not handled: another message takes
        # their place.
        bursts.handle_delivered([row for row in messages if may_start(row)])
        bursts.handle_refused(
            {row.policy_key: row.id for row in refused if row.policy_key is not None}
        )
        self.next_scan.has_more |= bursts.has_more

    def _read_header_keys(self, rows: list[ClaimedMessage]) -> None:
        """Set the keys of leased rows that were read from a header, if the policies use a header.

        A lease returns the key of the publish only. The tuple distinguishes a message whose header
        gives no key, (None,), from policies that use no header, None.
        """
        if self._rows.by_header:
            queued = self._rows.load_messages([row.id for row in rows])
            for row in rows:
                row.header_key = (queued[row.id].key,)

    def _schedule_slot_scan(self, rows: list[ClaimedMessage], starting: int) -> None:
        """Schedule the next scan for slots, after `rows` have taken some.

        A slot is a start that a throttle allows. `starting` of the rows start; the others only end,
        and leave their slots to further messages. If all slots are taken, the queue is blocked:
        nothing can start before that scan, whatever arrives, so arrivals need not wake the
        subscriber.
        """
        keys = self._slots.keys
        if keys is not None and keys.has_selected and (at := keys.find_next_check()) is not None:
            self.next_scan.delays.append(self.next_scan.get_delay(at))
        if (at := self._slots.find_next_scan(starting)) is not None:
            self.next_scan.delays.append(self.next_scan.get_delay(at))
            self.is_blocked = True
        elif starting < len(rows):
            self.next_scan.delays.append(0.0)  # rows that only end have left capacity for others

    def _select_starting(self, limit: int) -> list[int]:
        """Return up to `limit` messages whose handlers may start.

        Under a throttle more are read, as some may have no slot of their key now. Suspects, which
        may have killed their process, are removed first: the caller claims them alone, so they must
        not take slots here.
        """
        if not self._slots.spent or limit < 1:
            return self._selection.select(limit)
        size = max(MIN_SCAN, 2 * limit)
        selected = self._selection.select(size)
        queued = self._rows.load_messages(selected)
        if self._suspect_rule is not None and self._suspect_rule.report:
            selected, queued = self._remove_suspects(selected, queued, size, self._suspect_rule)
        starting = self._slots.select_on_time(selected, queued, limit)
        self.next_scan.delays += [self.next_scan.get_delay(at) for at in self._slots.deferred_until]
        # Deferred messages have made way for others.
        self.next_scan.has_more |= len(starting) < limit and bool(self._slots.deferred_until)
        return starting

    def _remove_suspects(
        self,
        selected: list[int],
        queued: dict[int, QueuedMessage],
        size: int,
        suspect_rule: SuspectRule,
    ) -> tuple[list[int], dict[int, QueuedMessage]]:
        """Record the suspects among `selected` and return the other messages.

        A suspect may have killed its process, so it is claimed alone. Under a throttle by key, the
        selection is repeated without suspects. The first selection may have admitted a suspect in
        place of another message of its key.
        """
        self.suspects = {
            message: suspect
            for message in selected
            if message in queued
            and (suspect := suspect_rule.classify(queued[message].lost_deliveries)) is not None
        }
        if self.suspects and self._slots.keys is not None:
            # No suspect may keep a slot from another message of its key.
            self._slots.keys.reset_admitted()
            selected = self._selection.select(size, skip_suspects=True)
            queued = self._rows.load_messages(selected)
        return [message for message in selected if message not in self.suspects], queued

    def _count_free_leases(self, limit: int) -> int:
        """Return how many of `limit` leases the policies allow; counted once in a claim.

        A Concurrency limits the leases of the queue, or of all queues of a scope. The leases of
        this claim itself come later, so the number stays valid.
        """
        if self._free is None:
            self._free = limit
            for policy in self._request.policies:
                if isinstance(policy, Concurrency) and not policy.per_key:
                    running, max_leases = self._count_leases(policy)
                    free = policy.leases(
                        running, limit, self._selection.immediate_starts, max_leases
                    )
                    self._free = min(self._free, free)
        return self._free

    def _count_leases(self, policy: Concurrency) -> tuple[int, int]:
        """Return the current leases, and their maximum, of the queue or of the policy's scope.

        A scope is a budget that several queues share. The maximum is the lowest limit of all
        processes, which may run with different options.
        """
        if policy.scope is None:
            max_leases = self._get_lowest_limit(policy)
            return self._rows.count_leases(self._rows.queue, max_leases), max_leases
        return register_and_count_leases(self._intake, policy)

    def _lease(self, selected: list[int], suspect_rule: SuspectRule | None) -> ClaimedMessages:
        """Lease the `selected` messages and return the rows in that order.

        Messages that another transaction has locked are missing. The database returns the rows in
        any order, but slots are assigned to them in the order of selection.
        """
        if not selected:
            return ClaimedMessages()
        request = self._request
        rows = self._rows
        messages = rows.dialect.claim_ids(
            rows.connection,
            selected,
            [rows.queue],
            request.lease,
            request.token,
            suspect_rule=suspect_rule,
        )
        rank = {message: n for n, message in enumerate(selected)}
        messages.sort(key=lambda row: rank[row.id])
        return messages

    def _apply_policies(self, limit: int) -> bool:
        """Apply each policy to the due messages in order; return True if any may start now.

        Each policy sees each new message once, and may postpone or end it. What the policies decide
        for the rest, such as the end of a Window or a limit of each key, is kept for the selection.
        """
        self._intake.note_holds(self._request.policies)
        if (header := self._request.header) is not None and not self._intake.read_keys(header):
            self.next_scan.has_more = True
            if any(isinstance(policy, Debounce | KeepLast) for policy in self._request.policies):
                return False  # a later message of a key may be among those without a stored key
        for policy in self._request.policies:
            if isinstance(policy, Window):
                opens, self._closes_at = policy.span(self._now)
                if opens > self._now:
                    self.next_scan.delays.append(self.next_scan.get_delay(opens))
                    self.is_blocked = True
                    return False
                self._intake.opened_at = max(self._intake.opened_at, opens)
            elif isinstance(policy, Delay):
                self.next_scan.has_more |= not self._intake.apply_delay(policy)
            elif isinstance(policy, Debounce | KeepLast):
                if not self._intake.join_bursts(policy):
                    # Arrivals not yet scanned may belong to the burst of a message that is
                    # delivered now.
                    self._selection.incomplete_policy = policy
                    self.next_scan.has_more = True
                keep = self._request.keep
                self._selection.bursts = _create_heads(policy, self._rows, self._now, keep=keep)
            else:
                self._apply_limit(policy, limit)
        return True

    def _apply_limit(self, policy: Policy, limit: int) -> None:
        """Apply a throttle that refuses messages, or a limit of leases of each key.

        Waiting throttles and limits of the queue take no part: slots and leases are counted later.
        A refusing throttle admits a message only once, so it must know how many could start now.
        """
        if isinstance(policy, Throttle) and policy.when_exceeded != "wait":
            capacity = self._slots.grant_slots(
                self._count_free_leases(limit), self._selection.immediate_starts
            )
            if (own_slots := self._slots.refusing) is not None:
                self.next_scan.has_more |= not own_slots.admit_arrivals(capacity)
                if self._selection.bursts is not None:
                    self._selection.bursts.handle_refused(own_slots.dropped)
        elif isinstance(policy, Concurrency) and policy.per_key:
            self._selection.max_per_key = self._get_lowest_limit(policy)

    def _get_lowest_limit(self, policy: Concurrency) -> int:
        return exchange_limit(self._intake, policy, self._position.is_old)


def _create_heads(
    policy: Debounce | KeepLast, rows: PolicyRows, now: int, *, keep: bool
) -> BurstHeads | LatestHeads:
    """Create the object that selects the message of each key to deliver next.

    KeepLast selects the newest message of each window, Debounce a message of each burst.
    """
    heads_class = LatestHeads if isinstance(policy, KeepLast) else BurstHeads
    return heads_class(policy, rows, now, keep=keep)


def _filter_due_pairs(pairs: list[ReadyPair], queue: str) -> list[ReadyPair]:
    return [pair for pair in pairs if pair.queue == queue and pair.due_in <= 0]
