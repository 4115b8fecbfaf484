"""The slots of Throttle at a claim: how many messages may start, and when.

A throttle that refuses messages above its rate drops, dead-letters or backs them off. It checks
a message once: the message is admitted if there is a slot for it now, and refused otherwise. It
takes the slot when it is leased. An admitted message is never refused later: if it could not
start in time, or comes again for a retry, it waits for the next slot, and goes before new
messages.

Times are microseconds since 1970.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.policies.flags import (
    ADMITTED,
    HELD_MASK,
    MAX_BACKOFFS,
    POSTPONED,
    SLOT,
    decode_backoffs,
    encode_backoffs,
)
from faststream_sqlbroker.core.policies.live_rates import SlotLogKey
from faststream_sqlbroker.core.policies.throttle import (
    MAX_LOOKAHEAD,
    SLOT_LEAD,
    find_first_slot,
    grant_slots,
)
from faststream_sqlbroker.core.reasons import THROTTLED
from faststream_sqlbroker.core.rows import ClaimedMessage, Slot
from faststream_sqlbroker.database.policies.intake import Intake, get_slot_scope
from faststream_sqlbroker.database.policies.key_slots import KeySlots, MessageSlots
from faststream_sqlbroker.database.policies.request import (
    PolicyClaimRequest,
    ScanPosition,
    has_expired,
)
from faststream_sqlbroker.database.policies.rows import Arrival, QueuedMessage
from faststream_sqlbroker.database.policies.slot_use import (
    SHARED_SLOTS,
    ReadTime,
    SlotLogs,
    StateStore,
)

MAX_SLOT_WAIT = 5 * MICROSECONDS
"""An admitted message without a slot is checked again after this (microseconds): a changed or
removed rate must not find it put off for long. There are few, as each had a slot before.
"""
CLAIM_STATEMENTS = 10
"""Expected duration of a claim under the lock, as a multiple of reading the clock."""
FIRST_CLAIM_DELAY = MICROSECONDS
"""Assumed delay of the answer to the first claim of a process (microseconds). A high value costs
nothing: the next claim reports when the starts were.
"""


class QueueSlots:
    """The throttles of a queue in a claim whose slots belong to no message."""

    def __init__(
        self,
        states: StateStore,
        queue: str,
        read: ReadTime,
        request: PolicyClaimRequest,
        position: ScanPosition,
        reported: dict[SlotLogKey, int],
        durations: Sequence[float],
        statements: int = 2,
        total_durations: Sequence[float] = (),
    ) -> None:
        """Load the logs of the queue's throttles, from which the next slots follow.

        No other claim changes `states` before this one is written; then `reported` has the number
        of stored outcomes of `position.slot_use`. `durations` are the seconds of the last such
        claims from the reading of the clock, and `total_durations` their total seconds, if they
        differ: slots are granted as far ahead as claims take long. Without durations, a claim is
        assumed to last as long as `statements`, the first of which read the clock.
        """
        self._states = states
        self._request = request
        self._now = read.now
        # Throttles are numbered among themselves. Adding another policy must not change the scope
        # under which their slots are stored.
        throttles = [p for p in request.policies if isinstance(p, Throttle)]
        self.spent = bool(throttles)
        """True if a lease spends a slot."""
        expected_durations = durations or [statements * read.duration]
        self._reach, self.lead, excess = _compute_reach(
            expected_durations, total_durations or expected_durations
        )
        lateness = excess if durations else max(excess, FIRST_CLAIM_DELAY)
        lateness = max(lateness, round(request.batch_wait * MICROSECONDS))
        gates = {n: policy for n, policy in enumerate(throttles) if policy.gates}
        self._throttles = list(gates.values())
        self._slot_keys = [
            (get_slot_scope(queue, n), "") if policy.scope is None else (SHARED_SLOTS, policy.scope)
            for n, policy in gates.items()
        ]
        """Scopes and keys of their states."""
        if self.spent:
            position.slot_use.add_reading(read)
            self._slot_logs = SlotLogs(
                position.slot_use, position.intake.rates, self._now, reported, lateness
            )
        self._logs = [
            self._slot_logs.load(
                policy, slot_key, states.load_states(slot_key[0], [slot_key[1]]).get(slot_key[1])
            )
            for policy, slot_key in zip(self._throttles, self._slot_keys, strict=True)
        ]
        self._granted: list[int] | None = None
        self._scanned_from = self._now + self.lead
        """Start of the last search for slots: before, no worker is likely to be free."""
        self.wait_seconds = 0.0
        """Seconds for which messages wait for a worker behind those that wait already."""

    @property
    def _granted_until(self) -> int:
        """Slots up to this time are granted now, which includes slots during the next claim."""
        return self._now + self._reach + SLOT_LEAD

    def grant_slots(self, limit: int, starts: int) -> int:
        """Grant slots and return how many of `limit` messages may start soon.

        A slot is a time at which the throttles let one message start. `starts` messages find a free
        worker now. Later messages start in waves, so each gets a slot for the time at which it is
        likely to have a worker. The slots are stored only by `store_slots`, when the number of
        messages is known.
        """
        if not self._throttles:
            return limit
        logs = [log.copy() for log in self._logs]
        max_delay = self._slot_logs.max_delay
        at = self._now + self.lead
        size = min(limit, starts)
        wave = max(1, self._request.wave)
        granted = grant_slots(self._throttles, logs, at, self._granted_until, size, max_delay)
        at += round(self.wait_seconds * MICROSECONDS)
        while size <= len(granted) < limit:
            at += max(1, round(self._request.wave_time * MICROSECONDS))
            size = min(wave, limit - len(granted))
            slots = grant_slots(self._throttles, logs, at, self._granted_until, size, max_delay)
            granted += slots
            if len(slots) < size:
                break
            size = len(granted)
        self._granted = granted
        self._scanned_from = at
        return len(granted)

    def find_next_scan(self, taken: int) -> int | None:
        """Return when to scan again if all granted slots were taken and stored.

        None means that slots remain: then the throttles do not delay the next scan. Otherwise that
        claim must end before the next slot comes, so it begins some time earlier.
        """
        if self._granted is None or taken < len(self._granted):
            return None
        # The messages granted now will have started at their slots or shortly after; the next claim
        # reports that.
        logs = [log.copy() for log in self._logs]
        for policy, log in zip(self._throttles, logs, strict=True):
            for slot in self._granted:
                policy.report(log, slot + self._slot_logs.max_delay, slot)
        next_slot = find_first_slot(self._throttles, logs, self._scanned_from)
        # Early enough for the claim to end when the slot comes.
        return next_slot - self.lead - (self._reach + SLOT_LEAD) // 2

    def store_slots(self, starting: int) -> bool:
        """Store the first `starting` granted slots; return True if anything was stored.

        Also stores how the slots of earlier claims ended, which may free slots. A slot is stored
        with the latest time at which its message may start, so a process that dies cannot exceed
        the rate.
        """
        granted = (self._granted or [])[:starting]
        stored = False
        for policy, slot_key, log in zip(self._throttles, self._slot_keys, self._logs, strict=True):
            for slot in granted:
                log.add(slot, slot + self._slot_logs.max_delay)
            if granted or slot_key in self._slot_logs.changed:
                state = self._slot_logs.dump(policy, slot_key, log)
                self._states.save_states(slot_key[0], {slot_key[1]: state})
                stored = True
        return stored

    def assign_slots(self, starting: Sequence[ClaimedMessage]) -> dict[int, int]:
        """Set the slots of the starting rows; return the start times by id of rows with a slot.

        The worker starts a handler between its slot and the deadline that the log stores, or not at
        all. So a late process never starts more messages in a period than the rate.
        """
        started: dict[int, int] = {}
        slots: dict[tuple[int, tuple[SlotLogKey, ...]], Slot] = {}
        shared_keys = tuple(self._slot_keys)
        for number, row in enumerate(starting if self.spent else ()):
            at, slot_key = self._get_start(number, row)
            slot_keys = shared_keys if slot_key is None else (*shared_keys, slot_key)
            if not slot_keys:
                continue
            started[row.id] = at
            # A fast throttle gives many rows the same slot.
            if (slot := slots.get((at, slot_keys))) is None:
                deadline = at + self._slot_logs.max_delay
                slot = self._slot_logs.use.create_slot(at, deadline, slot_keys)
                slots[at, slot_keys] = slot
            row.slot = slot
        return started

    def _get_start(self, number: int, row: ClaimedMessage) -> tuple[int, SlotLogKey | None]:  # noqa: ARG002
        """Return when the `number`th starting message may start, and the key of that slot.

        A subclass, where a message may have a slot of its own, replaces this.
        """
        return self._now if self._granted is None else self._granted[number], None


class Slots(QueueSlots):
    """The throttles of a queue in a claim, under the queue's lock, including throttles by key
    and throttles that let no message wait.
    """

    def __init__(
        self, intake: Intake, read: ReadTime, request: PolicyClaimRequest, position: ScanPosition
    ) -> None:
        """Load the slots as `QueueSlots`; `intake` is that of the same claim.

        At most one throttle of a subscriber gives each message a slot of its own: a throttle by key
        (`keys`) or a throttle that refuses messages above its rate (`refusing`).
        """
        super().__init__(
            intake.rows,
            intake.queue,
            read,
            request,
            position,
            position.reported,
            position.durations,
            CLAIM_STATEMENTS,
            position.total_durations,
        )
        self.refusing: RefusingSlots | None = None
        """The slots of a throttle that refuses messages above its rate."""
        self.keys: KeySlots | None = None
        """The slots of each key, if messages wait for those."""
        throttles = enumerate(p for p in request.policies if isinstance(p, Throttle))
        number, throttle = next(((n, p) for n, p in throttles if not p.gates), (0, None))
        if throttle is not None:
            first = self._now + self.lead
            # A refusing throttle stores its slots under the same scope as a waiting throttle: a
            # deployment may change one to the other.
            scope = get_slot_scope(intake.queue, None if throttle.key else number)
            if throttle.when_exceeded == "wait":
                # A slot may move to the later slot of a gate, a throttle whose slots belong to no
                # message. If all slots before are equal, no period gets more starts by that.
                until = first if self._throttles else first + self._reach
                self.keys = KeySlots(intake, throttle, self._slot_logs, scope, first, until)
            else:
                self.refusing = RefusingSlots(
                    intake, throttle, self._slot_logs, scope, first, first
                )
        self.deferred_until: list[int] = []
        """The slots of messages that were deferred."""

    def select_on_time(
        self, selected: Sequence[int], queued: Mapping[int, QueuedMessage], limit: int
    ) -> list[int]:
        """Return up to `limit` of `selected` that may start; each takes the required slot.

        Only a throttle by key, or a throttle that refuses messages, gives a message a slot of its
        own. The slots of other throttles belong to no message: they are part of `limit`.
        """
        if self.keys is not None:
            return self.keys.select_on_time(selected, queued, limit)
        if self.refusing is not None:
            starting = self.refusing.select_on_time(selected, queued, limit)
            self.deferred_until += self.refusing.deferred_until
            return starting
        return list(selected[:limit])

    def assign(self, rows: Sequence[ClaimedMessage]) -> int:
        """Set the start time of each row, and store the taken slots; return how many rows start.

        Called after the leases: rows that were locked elsewhere have taken no slot. Rows that only
        end, as they have expired or a policy has rejected them, need none.
        """
        starting = [row for row in rows if row.outcome is None and not has_expired(row)]
        self.store_slots(len(starting))
        started = self.assign_slots(starting)
        if (message_slots := self.keys or self.refusing) is not None:
            message_slots.save(started)
        return len(starting)

    def _get_start(self, number: int, row: ClaimedMessage) -> tuple[int, SlotLogKey | None]:
        """Return the later of the slots of the queue and of the row, and the key of the latter.

        All throttles must allow the start, so the later slot counts. The key says in which log the
        worker's report of the start belongs.
        """
        at, _ = super()._get_start(number, row)
        if (message_slots := self.keys or self.refusing) is None or (
            slot := message_slots.get_slot(row.id)
        ) is None:
            return at, None
        slot_at, slot_key = slot
        return max(at, slot_at), slot_key


@dataclass(eq=False)
class RefusingSlots(MessageSlots):
    """The slots of a throttle that refuses, of the queue or of keys."""

    _late_until: dict[int, int | None] = field(default_factory=dict, init=False)
    deferred_until: list[int] = field(default_factory=list, init=False)
    """Times at which deferred messages are checked again."""
    dropped: dict[str, int] = field(default_factory=dict, init=False)
    """The latest dropped message by key."""

    def admit_arrivals(self, limit: int) -> bool:
        """Admit or refuse new messages; return True if all were checked.

        An admitted message waits for slots and is never refused later. A refused message is
        dropped, made a dead letter or postponed (backoff). At most `limit` are admitted now, as no
        more could start; messages above the limit wait for the next claim. Expired messages need no
        slot.
        """
        intake = self.intake
        arrivals, is_complete = intake.scan_arrivals(SLOT)
        intake.passed_flags |= SLOT
        self.load_keys(
            key for arrival in arrivals if (key := self._get_key(arrival.key)) is not None
        )
        trial_logs = {key: log.copy() for key, log in self._logs.items()}
        admitted_ids: list[int] = []
        remaining_due: list[int] = []
        deferred: dict[int, dict[int, int | None]] = defaultdict(dict)
        dropped: dict[int, Discard] = {}
        # Each message changes the log for the next message of its key, so all cases are in one
        # loop.
        for arrival in arrivals:
            key = None if arrival.expired else self._get_key(arrival.key)
            if (
                key is not None
                and (slot := self.policy.next_slot(trial_logs[key], self.first)) > self.first
            ):
                if arrival.is_delivered:
                    # Until its own slot as currently known: another message may take that slot
                    # first.
                    deferred[0][arrival.id] = min(slot, intake.now + MAX_SLOT_WAIT)
                elif self.policy.when_exceeded == "backoff":
                    backoff_count = decode_backoffs(arrival.flags)
                    wait = round(intake.clock.add_jitter(self.policy.backoff(backoff_count)))
                    deferred[min(backoff_count + 1, MAX_BACKOFFS)][arrival.id] = intake.now + wait
                elif self.policy.when_exceeded == "drop":
                    dropped[arrival.id] = Discard(THROTTLED)
                else:
                    intake.dead.append(arrival.id)
                    remaining_due.append(arrival.due)  # until it is claimed as a dead letter
            elif len(admitted_ids) >= limit:
                remaining_due.append(arrival.due)
            else:
                admitted_ids.append(arrival.id)
                if key is not None:
                    self._grant_slot(trial_logs[key])
        intake.rows.discard(dropped, keep=intake.keep)
        self.dropped = _find_latest_by_key(arrivals, dropped)
        for count, due in deferred.items():
            self._defer(due, count)
        # The selection, which may be by keys or bursts, uses this flag. The flag promises no slot:
        # a message skipped by the selection must not hold one.
        intake.set_flag(admitted_ids, SLOT | ADMITTED)
        intake.rewind_scan(SLOT, min(remaining_due, default=intake.now))
        return is_complete and (limit < 1 or len(remaining_due) == len(intake.dead))

    def select_on_time(
        self, selected: Sequence[int], queued: Mapping[int, QueuedMessage], limit: int
    ) -> list[int]:
        """Select among admitted messages as `MessageSlots`; defer messages without a slot.

        An admitted message may find its slot taken: an earlier admitted message could not be leased
        then, and takes it now.
        """
        starting = super().select_on_time(selected, queued, limit)
        self._defer(self._late_until)
        self.deferred_until = [at for at in self._late_until.values() if at is not None]
        return starting

    def _record_wait(self, slot: int, message: int | None = None) -> None:
        """Remember when to check an admitted message again that has no slot now.

        At its next slot, but soon: a changed or removed rate must not find it put off for long.
        """
        # A message admitted earlier, which could not be leased then, has taken the slot.
        if message is not None:
            self._late_until[message] = min(slot, self.intake.now + MAX_SLOT_WAIT)

    def save(self, started: Mapping[int, int]) -> None:
        """Store the start times of `started`, and reports of other slots.

        Called at the end of a claim, with the messages that were really leased.
        """
        spent, reported = self._record_starts(started)
        states = {
            key: self.shared.dump(self.policy, (self.scope, key), self._logs[key])
            for key in spent.keys() | reported
        }
        self.intake.rows.save_states(self.scope, states)

    def _defer(self, due: Mapping[int, int | None], count: int = 0) -> None:
        """Defer messages until `due`; then these are arrivals again, and request a slot anew.

        `count` is how often each was postponed, by which the next backoff is longer. It is stored
        in the flags of the message.
        """
        intake = self.intake
        retained_flags = (
            ~(SLOT | HELD_MASK | encode_backoffs(MAX_BACKOFFS)) | POSTPONED | encode_backoffs(count)
        )
        intake.rows.shift(due, POSTPONED | encode_backoffs(count), retained_flags)
        intake.later += [at for at in due.values() if at is not None]


def _compute_reach(
    durations: Sequence[float], total_durations: Sequence[float]
) -> tuple[int, int, int]:
    """Return reach, lead and possible excess of slot grants (microseconds).

    The lead is the time to the first slot: a slot before the answer to COMMIT would be missed. The
    excess is by how much the lead may be too little. The reach is how far ahead slots are granted:
    the first slot that the next claim can grant comes when this claim and all of the next have
    ended.
    """
    usual_duration = min(round(median(durations) * MICROSECONDS), MAX_LOOKAHEAD)
    # A single slow claim is no reason to wait.
    long_duration = round(sorted(durations)[-2:][0] * MICROSECONDS)
    reach = round(2 * median(total_durations) * MICROSECONDS)
    return min(reach, MAX_LOOKAHEAD), usual_duration, max(0, long_duration - usual_duration)


def _find_latest_by_key(arrivals: Iterable[Arrival], ids: Collection[int]) -> dict[str, int]:
    """Return the greatest of `ids` for each key; messages without a key are skipped.

    The greatest id is the newest message.
    """
    pairs = (
        (arrival.id, arrival.key)
        for arrival in arrivals
        if arrival.id in ids and arrival.key is not None
    )
    return {key: message for message, key in sorted(pairs)}
