"""Apply policies to newly due messages before any is claimed: delay, supersede or drop them.

Each policy sees each message once and flags it. So a scan begins a little before the end of the
last scan of this process. Everything runs under the queue's lock and processes lists.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.policies import Debounce, Delay, Header, KeepLast, Policy
from faststream_sqlbroker.core.policies.argument_checks import CLOCK_STEP, MICROSECONDS
from faststream_sqlbroker.core.policies.debounce import KeyUpdate, repair_clock
from faststream_sqlbroker.core.policies.flags import (
    BURST,
    DELAYED,
    HEADER_KEY,
    HELD_BURST,
    HELD_DELAY,
    HELD_MASK,
)
from faststream_sqlbroker.core.policies.holds import build_holds
from faststream_sqlbroker.core.policies.live_rates import LiveRates
from faststream_sqlbroker.core.policies.standby import compute_recheck_time
from faststream_sqlbroker.core.reasons import EXPIRED, SUPERSEDED
from faststream_sqlbroker.core.rows import ReadyPair
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.policies.rows import SCAN_SIZE, Arrival, PolicyRows

LATE_COMMITS = 2 * MICROSECONDS
"""Microseconds by which a scan overlaps the last one, to find rows that were committed late. Rows
that were committed even later are found by the next full scan.
"""
FULL_SCAN_INTERVAL = 5.0
"""Seconds between two full scans of everything that is due; more if they are slow."""
SLOW_SHARE = 20
"""A full scan is followed by a pause of this many times its duration: at most 5 % of the time is
spent on full scans.
"""
BURST_RETENTION = 86_400 * MICROSECONDS
"""Microseconds for which a key is stored after its last burst: a day, so that its message is still
recognised when it is retried.
"""
HOLDS = "holds:"
"""Scope of the policy state, followed by the queue: the policies that have put messages off."""
NOTE_RETENTION = 365 * 86_400 * MICROSECONDS
"""Microseconds for which the note that a policy puts messages off is stored: a year."""
NOTE_RENEWAL = 15.0
"""Seconds after which a claim renews the note."""

Due = tuple[int, str | None, int]
"""A due message: id, key, due time."""
QueueFlag = tuple[str, int, int]
"""Queue, priority and flag."""


@dataclass
class IntakePosition:
    """The positions at which the scans of a process ended; empty at first."""

    ended_at: dict[QueueFlag, int] = field(default_factory=dict)
    full_scan_after: dict[QueueFlag, float] = field(default_factory=dict)
    noted_at: dict[str, float] = field(default_factory=dict)
    """By queue, when the policies of this process that may put messages off were last noted."""
    limits: dict[tuple[str, bool], tuple[float, int]] = field(default_factory=dict)
    """By queue and True for limits of its keys: when the lowest limit was read, and its value."""
    rates: LiveRates = field(default_factory=LiveRates)
    """Rates of the throttles of all live subscribers."""
    indexed: set[str] = field(default_factory=set)
    """Queues whose keys have been checked by their times under the policies of this process."""
    pass_started_at: dict[str, float] = field(default_factory=dict)
    """By queue, when the running pass over all its keys started (monotonic seconds)."""
    next_pass_at: dict[str, float] = field(default_factory=dict)
    """By queue, the earliest start of the next pass (monotonic seconds)."""

    def copy(self) -> "IntakePosition":
        """Return a copy to change while the outcome of the claim's commit is unknown.

        A claim advances the copy. If its transaction is repeated or fails, the next claim starts at
        the unchanged original again.
        """
        return IntakePosition(**{name: copy.copy(value) for name, value in vars(self).items()})


@dataclass
class Intake:
    """The work of the policies on a queue in a claim. Times are microseconds since 1970."""

    rows: PolicyRows
    pairs: list[ReadyPair]
    now: int
    position: IntakePosition
    keep: bool
    """True if discarded messages are archived."""
    clock: Clock
    """The process's clock, which measures the time since the last full scan."""
    opened_at: int = 0
    """When the window before this policy opened: no message takes part before."""
    passed_flags: int = 0
    """Flags of the policies applied so far."""
    later: list[int] = field(default_factory=list)
    """Due times of shifted messages."""
    dead: list[int] = field(default_factory=list)
    """Messages to claim as dead letters."""
    _flags_before_burst: int = 0

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self.rows.queue

    def note_holds(self, policies: Sequence[Policy]) -> None:
        """Store that `policies` may give messages of the queue later due times.

        Every claim under the queue's lock calls this; it writes at most every `NOTE_RENEWAL`
        seconds. The stored note outlives the process: it allows `PolicyHolds` to free these
        messages after a deployment without the policy.
        """
        noted_at = self.position.noted_at
        now = self.clock.monotonic()
        holds = build_holds(policies)
        if not holds or now < noted_at.get(self.queue, float("-inf")) + NOTE_RENEWAL:
            return
        noted_at[self.queue] = now
        scope = HOLDS + self.queue
        stored = self.rows.load_states(scope, holds)
        # A note from the future proves that the clock was set back. It stays until that is
        # repaired: `PolicyHolds` computes the step from it.
        states = {}
        for name, info in holds.items():
            previous = stored.get(name) or {}
            if previous.get("seen", 0) <= self.now + CLOCK_STEP:
                length = max(info.get("length", 0), previous.get("length", 0))
                states[name] = {"length": length, "seen": self.now}, self.now + NOTE_RETENTION
        self.rows.save_states(scope, states)

    def read_keys(self, header: Header) -> bool:
        """Store each message's key from the headers; return True if all due messages have a key.

        Called first in a claim whose policies use a header. The flag `HEADER_KEY` marks a message
        whose key is stored; later policies skip messages without the flag.
        """
        arrivals, is_complete = self.scan_arrivals(HEADER_KEY)
        if arrivals:
            ids = [arrival.id for arrival in arrivals]
            stored = self.rows.read_headers(ids)
            keys = {
                message: header.key(load_headers(headers)) for message, headers in stored.items()
            }
            self.rows.set_keys(keys)
        self.passed_flags |= HEADER_KEY
        return is_complete

    def apply_delay(self, policy: Delay) -> bool:
        """Postpone new messages by the delay; return True if all were scanned.

        A message that was delivered before keeps its due time: its retries are not delayed again.
        False means that a page was full: the caller scans again soon. The delay of a message that
        arrived while a Window was closed begins when it opened.
        """
        arrivals, is_complete = self.scan_arrivals(DELAYED)
        due = {
            arrival.id: None
            if arrival.is_delivered
            else max(arrival.due, self.opened_at) + policy.delay
            for arrival in arrivals
        }
        self._shift(due, DELAYED, HELD_DELAY)
        self.passed_flags |= DELAYED
        return is_complete

    def join_bursts(self, policy: Debounce | KeepLast) -> bool:
        """Let new messages join the bursts of their keys; return True if all have joined.

        A burst is a series of messages of one key, of which Debounce delivers a single message. For
        KeepLast, a new message becomes the latest of its key. If the scan was not complete,
        `catch_up` lets the remaining messages join, but only for the keys that are about to be
        delivered.
        """
        arrivals, is_complete = self.scan_arrivals(BURST)
        self._flags_before_burst = self.passed_flags
        self._join(policy, arrivals)
        self.passed_flags |= BURST
        return is_complete

    def catch_up(self, policy: Debounce | KeepLast, selected: Sequence[Due]) -> list[Due]:
        """Return the `selected` messages that may be delivered although the scan is incomplete.

        A message not scanned yet may belong to the burst that is about to be delivered. So all
        messages of the selected keys that have arrived by now join at once; a large backlog of
        other keys does not delay them. A key with too many messages to read waits for a later
        claim.
        """
        keys = list(dict.fromkeys(key for _, key, _ in selected if key is not None))
        if not keys:
            return list(selected)
        arrivals, complete_keys = self.rows.list_arrivals_by_keys(
            keys, required_flags=self._flags_before_burst, missing_flag=BURST
        )
        due, excluded = self._join(policy, arrivals)
        candidates = [message for message in selected if message[0] not in excluded]
        if self.passed_flags == self._flags_before_burst | BURST:
            # No later policy has to process these arrivals first.
            candidates += [
                (arrival.id, arrival.key, at)
                for arrival in arrivals
                if (at := due.get(arrival.id)) is not None
            ]
        complete = complete_keys | {None}
        return [
            (message, key, at)
            for message, key, at in candidates
            if key in complete and (due.get(message) or at) <= self.now
        ]

    def _join(
        self, policy: Debounce | KeepLast, arrivals: Sequence[Arrival]
    ) -> tuple[dict[int, int | None], set[int]]:
        """Let `arrivals` join the bursts of their keys, and store the effects.

        An arrival is a due message that the policy has not seen yet, a burst a series of messages
        of one key, of which only one is delivered. Messages that were delivered before, or have no
        key, take no part. Returns the new due times (None: unchanged), and the messages not to
        deliver now: they have ended, or stand by to replace the message of their burst if it cannot
        be delivered.
        """
        due: dict[int, int | None] = {}
        discarded: dict[int, Discard] = {}
        by_key: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for arrival in arrivals:
            if arrival.is_delivered or arrival.key is None:
                due[arrival.id] = None
            elif arrival.expired:
                discarded[arrival.id] = Discard(EXPIRED)
            else:
                by_key[arrival.key].append(
                    (max(arrival.due, arrival.created, self.opened_at), arrival.id)
                )
        scope = get_burst_scope(self.queue)
        stored = load_burst_states(self.rows, policy, by_key, self.now)
        states: dict[str, tuple[Any, int]] = {}
        standby: dict[int, int] = {}
        keys: dict[int, str | None] = {arrival.id: arrival.key for arrival in arrivals}
        takes = {k: policy.take(stored.get(k), sorted(times)) for k, times in by_key.items()}
        keys |= self._resolve_shared_messages(takes.values(), keys)
        for key, (info, changes, needed_until) in takes.items():
            due |= _filter_by_key(changes.due, key, keys)
            standby_times = _filter_by_key(changes.standby, key, keys)
            standby |= {
                message: compute_recheck_time(timestamp, self.now)
                for message, timestamp in standby_times.items()
            }
            superseded = _filter_by_key(changes.superseded, key, keys)
            discarded |= {
                message: Discard(SUPERSEDED, successor) for message, successor in superseded.items()
            }
            states[key] = info, get_expiry(info, max(needed_until, self.now))
        self.rows.save_states(scope, states)
        self.rows.discard(discarded, keep=self.keep, keys=keys)
        self._shift(due, BURST, HELD_BURST, keys)
        self.rows.set_standby(standby, keys)
        self.later += standby.values()
        return due, discarded.keys() | standby.keys()

    def _resolve_shared_messages(
        self, takes: Iterable[KeyUpdate], known_keys: Mapping[int, str | None]
    ) -> dict[int, str | None]:
        """Return the current keys of messages that two keys refer to, without `known_keys`.

        The stored state of a key lists its waiting messages. If the key of a message was changed
        while it waited, the states of both keys list the message. Only its current key may change
        it.
        """
        counts = Counter(
            message
            for _, changes, _ in takes
            for message in {*changes.due, *changes.standby, *changes.superseded} - known_keys.keys()
        )
        shared = [message for message, count in counts.items() if count > 1]
        queued = self.rows.load_messages(shared)
        return {message: row.key for message, row in queued.items()}

    def rewind_scan(self, flag: int, at: int) -> None:
        """Start the next scan at `at` or earlier: messages due from then on miss `flag`.

        Called when a scan read messages that the policy did not process, as a page or a limit was
        full.
        """
        for pair in self.pairs:
            position_key = self.queue, pair.priority, flag
            self.position.ended_at[position_key] = min(self.position.ended_at[position_key], at)

    def set_flag(self, messages: Sequence[int], flag: int) -> None:
        """Set `flag` on the messages; their due times stay."""
        self._shift(dict.fromkeys(messages), flag)

    def _shift(
        self,
        due: Mapping[int, int | None],
        flag: int,
        hold_flag: int = 0,
        keys: Mapping[int, str | None] = MappingProxyType({}),
    ) -> None:
        """Set `flag`, and new due times; None leaves a due time unchanged.

        `flag` says that a policy has seen the message, `hold_flag` which policy set its due time;
        the hold flags of other policies are cleared. Times later than now go to `later`: the queue
        is scanned again then. Of the messages in `keys`, only those that still have that key are
        changed.
        """
        flags = flag | hold_flag, ~HELD_MASK | hold_flag
        self.rows.shift(due, *flags, keys=keys)
        self.later += [at for at in due.values() if at is not None and at > self.now]

    def scan_arrivals(self, flag: int) -> tuple[list[Arrival], bool]:
        """Return the due messages that miss `flag`, and True if the result is complete.

        A policy sets its flag on each message that it has seen. So a scan reads only from a little
        before the end of the last scan; every few seconds it reads everything, to find late
        commits. If a page was full, the result ends at the horizon, the due time up to which all
        priorities were read. Within a priority, messages that were delivered before come first,
        except those that waited for another message of their key.
        """
        arrivals: list[Arrival] = []
        horizon: int | None = None
        for pair in self.pairs:
            position_key = self.queue, pair.priority, flag
            started_at = self.clock.monotonic()
            is_full_scan = (
                position_key not in self.position.ended_at
                or started_at >= self.position.full_scan_after.get(position_key, 0.0)
            )
            since = (
                0 if is_full_scan else max(0, self.position.ended_at[position_key] - LATE_COMMITS)
            )
            rows = self.rows.list_arrivals(
                pair.priority, required_flags=self.passed_flags, missing_flag=flag, since=since
            )
            if len(rows) == SCAN_SIZE:
                horizon = rows[-1].due if horizon is None else min(horizon, rows[-1].due)
            self.position.ended_at[position_key] = (
                rows[-1].due if len(rows) == SCAN_SIZE else self.now
            )
            if is_full_scan:
                duration = self.clock.monotonic() - started_at
                # A slow scan earns a long pause, so that claims still get most of the time.
                self.position.full_scan_after[position_key] = started_at + max(
                    FULL_SCAN_INTERVAL, SLOW_SHARE * duration
                )
            arrivals += sorted(rows, key=_must_sort_last)
        if horizon is None:
            return arrivals, True
        # Messages due later may come after messages of another priority that were not read yet.
        self.rewind_scan(flag, horizon)
        return [arrival for arrival in arrivals if arrival.due <= horizon], False


def _filter_by_key(
    values: Mapping[int, int], key: str, keys: dict[int, str | None]
) -> dict[int, int]:
    """Return the entries whose messages still have `key`; some may have got another key since."""
    return {
        message: value for message, value in values.items() if keys.setdefault(message, key) == key
    }


def _must_sort_last(arrival: Arrival) -> bool:
    """Return True for new messages, and for messages that waited for another of the same key."""
    # A message that waited for another message of its key comes at its due time, which is not
    # before that of the other. If the other message lost its slot to it, neither would ever start.
    return not arrival.is_delivered or bool(arrival.flags & HELD_BURST)


def get_burst_scope(queue: str) -> str:
    """Return the scope that stores the bursts of a queue's keys."""
    return f"debounce:{queue}"


def load_burst_states(
    rows: PolicyRows,
    policy: Debounce | KeepLast,
    keys: Iterable[str],
    now: int,
) -> dict[str, Any]:
    """Return the stored burst states of `keys`; needs the queue's lock.

    A burst state lists the messages of a key that wait, and the times of its burst or window. Times
    from before the database's clock was set back would let them wait too long, so they are
    corrected.
    """
    scope = get_burst_scope(rows.queue)
    states = rows.load_states(scope, keys)
    corrected = {key: repair_clock(info, now) for key, info in states.items()}
    # Saved at once: a scan that changes nothing else would find the same clock step again, at a
    # later time.
    needed_until = now + policy.window
    changed = {
        key: (info, get_expiry(info, needed_until))
        for key, info in corrected.items()
        if info is not states[key]
    }
    rows.save_states(scope, changed)
    return corrected


def get_expiry(info: dict[str, Any], needed_until: int) -> int:
    """Return when the state of a key may be deleted.

    While messages stand by, it is kept for a year: without the state they would lose their place.
    """
    return needed_until + (NOTE_RETENTION if info.get("standby") else BURST_RETENTION)


def get_slot_scope(queue: str, number: int | None = None) -> str:
    """Return the scope that stores the slots of a queue's keys, or of the queue with a `number`.

    A scope is a group of rows in the policy state. `number` is the position of the throttle among
    the throttles of the queue: each has its own log of starts.
    """
    return f"slots:{queue}" if number is None else f"throttle{number}:{queue}"
