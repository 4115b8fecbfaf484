"""How the messages of one subscriber use the slots that its claims were granted, and what claims
store of that.

A claim stores of each slot when its message starts at the latest. The worker starts it between the
slot and that moment, or not at all. The next claim stores when the start really was, or takes the
slot back. So no period ever has more starts than its limit, however late this process is: it pays
with its rate. How much later than its slot a start may be follows from how late the last ones were.

The idea is that of a lease with a bounded clock: a moment of the database's clock is known by the
bounds in which it was read.

Times are microseconds since 1970 by the database's clock, unless they are said to be monotonic.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.live_rates import LiveRates, Place
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.slot_log import SlotLog
from faststream_sqlbroker.core.policies.throttle import (
    MOST_PATIENCE,
    dump_slots,
    forget_after,
    load_slots,
    mend_clock,
)
from faststream_sqlbroker.core.rows import ClaimedMessage, Slot

SHARED_SLOTS = "shared_slots"
"""Scope of the policy state; the key is the name of the budget."""
LEAST_PATIENCE = MICROSECONDS // 50
"""20 ms: a start may always be so much later than its slot."""
MARGIN = 1.5
"""A start may be so many times as late as the worst of the last ones."""
STARTS = 16
"""Starts of which it is remembered how late they were."""
READS = 8
"""Readings of the database's clock that are remembered: the best bound of each counts."""
DRIFT = 1 / 2000
"""Clocks may run so much faster or slower than each other: 500 parts in a million, the most by
which NTP slews a clock."""
ROUNDED = 500
"""The database's clock may be rounded by so many microseconds: SQLite tells milliseconds."""
WORTH = 20
"""A start whose report would gain less than this part of the period is not written for its own
sake."""


@dataclass(frozen=True, slots=True)
class ReadTime:
    """The database's time, and between which moments of the process's clock it was read.

    What follows the read, such as a slow COMMIT, says nothing about the database's clock.
    """

    now: int
    """Microseconds since 1970."""
    asked: float
    """Monotonic seconds, as `answered`."""
    answered: float

    @property
    def took(self) -> float:
        """Seconds."""
        return self.answered - self.asked

    def surely_after(self, at: int) -> float:
        """A moment (monotonic) at which the database's clock shows `at` or later."""
        return self.answered + (at - self.now) / MICROSECONDS

    def surely_before(self, at: int) -> float:
        """A moment (monotonic) at which the database's clock shows `at` or earlier."""
        return self.asked + (at - self.now) / MICROSECONDS


@dataclass(frozen=True, slots=True)
class Use:
    """The end of a slot."""

    deadline: int
    """What the log has: the latest moment of the start (microseconds of the database's clock)."""
    real: int | None
    """No earlier than the start; None: it did not start."""


class SlotUse:
    """One subscriber's, in one process."""

    def __init__(self, clock: Clock) -> None:
        """No slot has been used yet."""
        self.clock = clock
        self.start_is_final = True
        """Whether a handler that was begun has started: not so in a thread, and a batch may be
        handed out again."""
        self.counts: Counter[str] = Counter()
        """Slots that were "started", "missed" or "unused" since the counts were last taken."""
        self.missed: Counter[str] = Counter()
        """The same of the missed ones, by the queues of their messages."""
        self._lags: deque[int] = deque([0], maxlen=STARTS)
        self._reads: deque[ReadTime] = deque(maxlen=READS)
        self._pending: dict[Place, list[Use]] = defaultdict(list)
        self.steps: list[tuple[Place, int]] = []
        """Logs that showed that the database's clock was set back, and by how much."""

    # -- the database's clock -------------------------------------------------------------------

    def read(self, read: ReadTime) -> None:
        """The database's clock was read."""
        if self._reads and self._reads[-1] is read:
            return
        self._reads.append(read)
        low, high = self._bounds(read.answered)
        if low > high:  # it was set
            self._reads.clear()
            self._reads.append(read)

    def _bounds(self, at: float) -> tuple[float, float]:
        """The least and the most that the database's clock shows more than this process's does at
        `at` (microseconds).
        """
        bounds = [_bounds(read, at) for read in self._reads]
        return max(low for low, _ in bounds), min(high for _, high in bounds)

    def patience(self, late: int) -> int:
        """How much later than its slot a start may be, of a claim whose answer may be `late` for it
        (microseconds).
        """
        low, high = self._bounds(self._reads[-1].answered)
        worst = MARGIN * max(late, *self._lags, high - low)
        return round(min(max(LEAST_PATIENCE, worst), MOST_PATIENCE))

    def slot(self, at: int, deadline: int, places: tuple[Place, ...]) -> Slot:
        """When a message may start by this process's clock, whose slot is `at`."""
        now = self._reads[-1].answered
        low, high = self._bounds(now)
        earliest = (at - low) / MICROSECONDS
        earliest += max(0.0, earliest - now) * (DRIFT if self._reads[-1].took else 0.0)
        latest = (deadline - high) / MICROSECONDS
        latest -= max(0.0, latest - now) * DRIFT
        return Slot(earliest, latest, at, deadline, places)

    # -- what becomes of slots ------------------------------------------------------------------

    def start(self, row: ClaimedMessage, *, must: bool = False) -> bool:
        """The handler of `row` starts now, unless it is too late for that and it need not (`must`);
        whether it starts. Call it right before the handler, and again if that starts later after
        all; where it is not final, `tell` follows when the handler has ended.
        """
        if row.slot is None:
            return True
        now = self.clock.monotonic()
        if row.slot.at is not None:
            row.slot_started = round(now * MICROSECONDS + self._bounds(now)[1])
        if must or now <= row.slot.latest:
            if self.start_is_final:
                self.tell(row)
            return True
        self._tell("missed", row)
        return False

    def tell(self, row: ClaimedMessage) -> None:
        """The start of `row` was the last one; or it has not started, and does not."""
        if row.slot is not None:
            self._tell("unused" if row.slot_started is None else "started", row)

    def _tell(self, how: str, row: ClaimedMessage) -> None:
        slot = row.slot
        if slot is None or slot.at is None or slot.deadline is None or row.slot_told:
            return
        row.slot_told = True
        if row.slot_started is not None:
            self._lags.append(max(0, row.slot_started - slot.at))
        real = row.slot_started if how == "started" else None
        for place in slot.places:
            self._pending[place].append(Use(slot.deadline, real))
        self.counts[how] += 1
        if how == "missed":
            self.missed[row.queue] += 1

    @property
    def worst_lag(self) -> int:
        """By how much the worst of the last starts was later than its slot (microseconds)."""
        return max(self._lags)

    # -- what the next claim tells --------------------------------------------------------------

    def report(self, place: Place, policy: Throttle, log: SlotLog) -> int:
        """Write into `log` what is to be told of it; how much of `pending` that was."""
        uses = self._pending.get(place, ())
        for use in uses:
            policy.report(log, use.deadline, use.real)
        return len(uses)

    def told(self, counts: Mapping[Place, int]) -> None:
        """Forget the first uses of each place, `counts` of them.

        A claim has told them, or may have: its answer is not known. Telling them twice could remove
        other starts from the log, which are at the same time by chance.
        """
        for place, count in counts.items():
            if left := self._pending[place][count:]:
                self._pending[place] = left
            else:
                del self._pending[place]

    def worth_telling(self, scope: str, policy: Throttle, known: Collection[str]) -> list[str]:
        """The keys under `scope`, without those `known`, that are to be read only to tell of their
        slots. Of the others it is forgotten.
        """
        least = policy.per // WORTH
        found = []
        for place in [place for place in self._pending if place[0] == scope]:
            if place[1] in known:
                continue
            if any(
                use.real is None or use.deadline - use.real > least for use in self._pending[place]
            ):
                found.append(place[1])
            else:
                del self._pending[place]
        return found


def _bounds(read: ReadTime, at: float) -> tuple[float, float]:
    low = read.now - read.answered * MICROSECONDS
    high = read.now - read.asked * MICROSECONDS
    if not read.took:  # the time of a test, which is the database's
        return low, high
    drift = DRIFT * MICROSECONDS
    return (
        low - ROUNDED - (at - read.answered) * drift,
        high + ROUNDED + (at - read.asked) * drift,
    )


class States(Protocol):
    """What is stored by (scope, key), in the middle of a claim."""

    def states(self, scope: str, keys: Iterable[str]) -> dict[str, Any]:
        """What is stored under `scope` for each of `keys`."""

    def keep(self, scope: str, states: Mapping[str, tuple[Any, int]]) -> None:
        """Store what is known of each key, and when it may be forgotten."""


class SlotLogs:
    """What is known of slots in one claim, with what this process tells of those that it had."""

    def __init__(
        self, use: SlotUse, rates: LiveRates, now: int, told: dict[Place, int], late: int
    ) -> None:
        """Nothing is known yet; `now` is when the claim read the clock, and its answer may come
        `late` for the first slots (microseconds).

        By place, `told` gets how much of what `use` has to tell is stored by this claim.
        """
        self.use = use
        self.now = now
        self.patience = use.patience(late)
        """How much later than its slot a start may be (microseconds)."""
        self.changed: set[Place] = set()
        """Where something is to be told."""
        self._rates = rates
        self._reported: dict[Place, int] = {}
        self._told = told

    def load(self, policy: Throttle, place: Place, info: Any) -> SlotLog:
        """What is stored at `place`, and what has become of this process's slots since."""
        log = load_slots(policy, info)
        shared = (place[0], "") if policy.key else place
        log.others = self._rates.others(shared, log.others, self.now)
        if back := mend_clock(log, self.now):
            self.use.steps.append((place, back))
            self.changed.add(place)
        # Several queues of one claim may share the place: what was told is in the log.
        if place not in self._told and (count := self.use.report(place, policy, log)):
            self._reported[place] = count
            self.changed.add(place)
        return log

    def dump(self, policy: Throttle, place: Place, log: SlotLog) -> tuple[dict[str, Any], int]:
        """What this claim stores at `place`, and when it may be forgotten."""
        if place in self._reported:
            self._told[place] = self._reported[place]
        info = dump_slots(policy, log, self.now, self.use.worst_lag)
        return info, forget_after(policy, log, self.now)
