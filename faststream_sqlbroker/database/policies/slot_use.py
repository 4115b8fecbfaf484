"""How the messages of one subscriber use the slots granted to its claims, and how claims store it.

For each slot, a claim stores the latest time at which its message starts. The worker starts it
between the slot and that time, or not at all. The next claim stores the actual start, or takes
the slot back. So no period ever has more starts than its limit, however late this process is:
lateness only lowers its rate. The allowed delay of a start follows from the delays of the last
starts.

The idea is a lease with a bounded clock: a time of the database's clock is known by the bounds
in which it was read.

Times are microseconds since 1970 by the database's clock, unless they are said to be monotonic.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.policies.live_rates import LiveRates, SlotLogKey
from faststream_sqlbroker.core.policies.slot_log import SlotLog
from faststream_sqlbroker.core.policies.throttle import (
    MAX_START_DELAY,
    compute_expiry,
    dump_slots,
    load_slots,
    repair_clock,
)
from faststream_sqlbroker.core.rows import ClaimedMessage, Slot

SHARED_SLOTS = "shared_slots"
"""Scope of the policy state; the key is the name of the budget."""
MIN_START_DELAY = MICROSECONDS // 50
"""20 ms: the delay after its slot that a start may always have (microseconds)."""
DELAY_FACTOR = 1.5
"""A start may be delayed by this factor of the worst delay of the last starts."""
MAX_LAGS = 16
"""Number of starts whose delays are remembered."""
MAX_READINGS = 8
"""Number of remembered readings of the database's clock: the best bound of each counts."""
DRIFT = 1 / 2000
"""Maximum difference in speed between clocks: 500 parts in a million, the most by which NTP slews
a clock.
"""
CLOCK_PRECISION = 500
"""Microseconds by which the database's clock may be rounded: SQLite has milliseconds."""
MIN_GAIN_DIVISOR = 20
"""A start whose report would gain less than this part of the period is not written separately."""


@dataclass(frozen=True, slots=True)
class ReadTime:
    """A time of the database's clock, with the bounds of the read by the process's clock.

    A delay after the read, such as a slow COMMIT, says nothing about the database's clock.
    """

    now: int
    """Microseconds since 1970."""
    requested_at: float
    """Monotonic seconds, as `answered_at`."""
    answered_at: float

    @property
    def duration(self) -> float:
        """Seconds between request and answer."""
        return self.answered_at - self.requested_at

    def to_time_before(self, at: int) -> float:
        """Return a time (monotonic) at which the database's clock shows `at` or earlier."""
        return self.requested_at + (at - self.now) / MICROSECONDS


@dataclass(frozen=True, slots=True)
class SlotOutcome:
    """The end of a slot."""

    deadline: int
    """The latest start in the log (microseconds of the database's clock)."""
    started_at: int | None
    """Not earlier than the actual start; None if the message did not start."""


class SlotUse:
    """The slots of a subscriber in a process."""

    def __init__(self, clock: Clock) -> None:
        """Create an instance without used slots."""
        self.clock = clock
        self.start_is_final = True
        """True if a handler that was begun has started. False for a thread, and for a batch that
        may be handed out again.
        """
        self.counts: Counter[str] = Counter()
        """Slots "started", "missed" or "unused" since the counts were last taken."""
        self.missed: Counter[str] = Counter()
        """Missed slots by the queues of their messages, since the counts were last taken."""
        self._lags: deque[int] = deque([0], maxlen=MAX_LAGS)
        self._reads: deque[ReadTime] = deque(maxlen=MAX_READINGS)
        self._pending: dict[SlotLogKey, list[SlotOutcome]] = defaultdict(list)
        self.steps: list[tuple[SlotLogKey, int]] = []
        """Logs that showed that the database's clock was set back, and by how many microseconds."""

    # -- the database's clock -------------------------------------------------------------------

    def add_reading(self, read: ReadTime) -> None:
        """Add a reading of the database's clock.

        Each reading bounds the difference between the database's clock and this process's. If the
        bounds of all readings contradict each other, the database's clock was set: only the new
        reading counts.
        """
        if self._reads and self._reads[-1] is read:
            return
        self._reads.append(read)
        low, high = self._compute_bounds(read.answered_at)
        if low > high:  # the database's clock was set
            self._reads.clear()
            self._reads.append(read)

    def _compute_bounds(self, at: float) -> tuple[float, float]:
        """Return the minimum and maximum difference between the database's and this process's
        clock.

        In microseconds, at the monotonic time `at`.
        """
        bounds = [_compute_bounds(read, at) for read in self._reads]
        return max(low for low, _ in bounds), min(high for _, high in bounds)

    def compute_max_delay(self, lateness: int) -> int:
        """Return the allowed delay of a start after the slot (microseconds).

        The log counts the start at the end of this delay, so a long delay lowers the rate, and a
        short delay makes late starts miss their slots. It follows the worst recent delay.
        `lateness` is the delay with which the claim's answer may arrive (microseconds).
        """
        low, high = self._compute_bounds(self._reads[-1].answered_at)
        worst = DELAY_FACTOR * max(lateness, *self._lags, high - low)
        return round(min(max(MIN_START_DELAY, worst), MAX_START_DELAY))

    def create_slot(self, at: int, deadline: int, slot_keys: tuple[SlotLogKey, ...]) -> Slot:
        """Create the slot `at` with bounds by this process's clock.

        The worker, which only reads that clock, starts the handler between the bounds. They are
        chosen so that the database's clock surely shows a time from `at` to `deadline` then.
        """
        now = self._reads[-1].answered_at
        low, high = self._compute_bounds(now)
        earliest = (at - low) / MICROSECONDS
        # Until then the clocks may drift further apart. (A test's clock is the database's.)
        earliest += max(0.0, earliest - now) * (DRIFT if self._reads[-1].duration else 0.0)
        latest = (deadline - high) / MICROSECONDS
        latest -= max(0.0, latest - now) * DRIFT
        return Slot(earliest, latest, at, deadline, slot_keys)

    # -- outcomes of slots ----------------------------------------------------------------------

    def start(self, row: ClaimedMessage, *, must: bool = False) -> bool:
        """Record that the handler of `row` starts now; return False if the slot is missed.

        A missed row must not start: it is released, and the next claim takes its slot back. With
        `must` it counts as started in any case. Call it right before the handler, and again if the
        handler starts later after all. Where the start is not final, as in a thread, call
        `record_end` when the handler has ended.
        """
        if row.slot is None:
            return True
        now = self.clock.monotonic()
        if row.slot.granted_at is not None:
            # The upper bound of the database's time: never earlier than the real start.
            row.slot_started = round(now * MICROSECONDS + self._compute_bounds(now)[1])
        if must or now <= row.slot.latest:
            if self.start_is_final:
                self.record_end(row)
            return True
        self._record_outcome("missed", row)
        return False

    def record_end(self, row: ClaimedMessage) -> None:
        """Record that the last start of `row` was final, or that the row will not start."""
        if row.slot is not None:
            self._record_outcome("unused" if row.slot_started is None else "started", row)

    def _record_outcome(self, outcome: str, row: ClaimedMessage) -> None:
        """Record once how the slot of `row` ended, for the next claim to store.

        "started" and "missed" say whether the handler started in time; "unused" is a row that did
        not start. The delay of the start after the slot widens later deadlines.
        """
        slot = row.slot
        if slot is None or slot.granted_at is None or slot.deadline is None or row.report_slot:
            return
        row.report_slot = True
        if row.slot_started is not None:
            self._lags.append(max(0, row.slot_started - slot.granted_at))
        started_at = row.slot_started if outcome == "started" else None
        for slot_key in slot.log_keys:
            self._pending[slot_key].append(SlotOutcome(slot.deadline, started_at))
        self.counts[outcome] += 1
        if outcome == "missed":
            self.missed[row.queue] += 1

    @property
    def max_lag(self) -> int:
        """The maximum delay of the last starts after their slots (microseconds)."""
        return max(self._lags)

    # -- reports by the next claim --------------------------------------------------------------

    def report(self, slot_key: SlotLogKey, policy: Throttle, log: SlotLog) -> int:
        """Write pending outcomes into `log`; return their number.

        Until then the log counts each start at its deadline. With the real start, or without a
        start, the next slot is free earlier. The outcomes stay pending until the claim has stored
        the log.
        """
        uses = self._pending.get(slot_key, ())
        for use in uses:
            policy.report(log, use.deadline, use.started_at)
        return len(uses)

    def discard_reported(self, counts: Mapping[SlotLogKey, int]) -> None:
        """Remove the first `counts` pending outcomes of each slot key.

        A claim has reported them, or may have: its answer is not known. Reporting them twice could
        remove other starts from the log that happen to have the same time.
        """
        for slot_key, count in counts.items():
            if remaining := self._pending[slot_key][count:]:
                self._pending[slot_key] = remaining
            else:
                del self._pending[slot_key]

    def take_reportable_keys(
        self, scope: str, policy: Throttle, known_keys: Collection[str]
    ) -> list[str]:
        """Return the keys in `scope` that are worth reading only to report slots.

        Without `known_keys`, which the claim has read anyway. A report lets the next slot of its
        key come earlier; where that gains little, the outcome is discarded, and the log keeps the
        deadline.
        """
        min_gain = policy.per // MIN_GAIN_DIVISOR
        keys = []
        for slot_key in [slot_key for slot_key in self._pending if slot_key[0] == scope]:
            if slot_key[1] in known_keys:
                continue
            if any(
                use.started_at is None or use.deadline - use.started_at > min_gain
                for use in self._pending[slot_key]
            ):
                keys.append(slot_key[1])
            else:
                del self._pending[slot_key]
        return keys


def _compute_bounds(read: ReadTime, at: float) -> tuple[float, float]:
    """Return the bounds of the difference between both clocks at `at`, by a single reading.

    The database read its clock at some time between request and answer. Since then the clocks may
    have drifted apart, so the bounds widen. In microseconds.
    """
    low = read.now - read.answered_at * MICROSECONDS
    high = read.now - read.requested_at * MICROSECONDS
    if not read.duration:  # the clock of a test is the database's clock
        return low, high
    drift = DRIFT * MICROSECONDS
    return (
        low - CLOCK_PRECISION - (at - read.answered_at) * drift,
        high + CLOCK_PRECISION + (at - read.requested_at) * drift,
    )


class StateStore(Protocol):
    """Stored states by scope and key, during a claim."""

    def load_states(self, scope: str, keys: Iterable[str]) -> dict[str, Any]:
        """Return the stored state of each of `keys` in `scope`."""

    def save_states(self, scope: str, states: Mapping[str, tuple[Any, int]]) -> None:
        """Store the state of each key and the time after which the state may be deleted."""


class SlotLogs:
    """The slot logs of a claim, with the outcomes that this process reports."""

    def __init__(
        self,
        use: SlotUse,
        rates: LiveRates,
        now: int,
        reported: dict[SlotLogKey, int],
        lateness: int,
    ) -> None:
        """Create an instance without logs.

        `now` is the claim's reading of the clock, and `lateness` the delay with which its answer
        may arrive for the first slots (microseconds). `reported` receives the number of outcomes of
        `use` that this claim stores, by slot key.
        """
        self.use = use
        self.now = now
        self.max_delay = use.compute_max_delay(lateness)
        """The allowed delay of a start after its slot (microseconds)."""
        self.changed: set[SlotLogKey] = set()
        """Slot keys with outcomes to report."""
        self._rates = rates
        self._reported: dict[SlotLogKey, int] = {}
        self._stored_counts = reported

    def load(self, policy: Throttle, slot_key: SlotLogKey, info: Any) -> SlotLog:
        """Load the log of `slot_key`, and report the outcomes of this process's slots.

        A slot log holds the recent starts under a throttle. A log from before the database's clock
        was set back would delay the next slot for long, so its times are corrected. A changed log
        must be stored, even if the claim takes no slot.
        """
        log = load_slots(policy, info)
        shared = (slot_key[0], "") if policy.key else slot_key
        log.other_limits = self._rates.get_limits(shared, log.other_limits, self.now)
        if back := repair_clock(log, self.now):
            self.use.steps.append((slot_key, back))
            self.changed.add(slot_key)
        # Several queues of one claim may share the slot key: then the log already has the reports.
        if slot_key not in self._stored_counts and (
            count := self.use.report(slot_key, policy, log)
        ):
            self._reported[slot_key] = count
            self.changed.add(slot_key)
        return log

    def dump(
        self, policy: Throttle, slot_key: SlotLogKey, log: SlotLog
    ) -> tuple[dict[str, Any], int]:
        """Return the state that this claim stores for `slot_key`, and the expiry of the state.

        Also notes how many outcomes the state contains: after the commit, these are no longer
        pending.
        """
        if slot_key in self._reported:
            self._stored_counts[slot_key] = self._reported[slot_key]
        info = dump_slots(policy, log, self.now, self.use.max_lag)
        return info, compute_expiry(policy, log, self.now)
