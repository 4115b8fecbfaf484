"""What policies do with messages that have become due, before any is claimed: put off, supersede,
drop.

Each policy sees each message once and marks it. So a scan begins a little before the end of the
last scan of this process. All of it runs under the queue's lock, in lists.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.policies import Debounce, Delay, Header, KeepLast, Policy
from faststream_sqlbroker.core.policies.debounce import Taken, mend_clock
from faststream_sqlbroker.core.policies.flags import (
    BURST,
    DELAYED,
    HEADER_KEY,
    HELD,
    HELD_BURST,
    HELD_DELAY,
)
from faststream_sqlbroker.core.policies.holds import holds_of
from faststream_sqlbroker.core.policies.live_rates import LiveRates
from faststream_sqlbroker.core.policies.options import CLOCK_STEP, MICROSECONDS
from faststream_sqlbroker.core.policies.standby import looked_at
from faststream_sqlbroker.core.reasons import EXPIRED, SUPERSEDED
from faststream_sqlbroker.core.rows import ReadyPair
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.policies.rows import SCAN, Arrival, PolicyRows

LATE_COMMITS = 2 * MICROSECONDS
"""A scan begins this long before the end of the last one (microseconds), to find rows that were
committed late. Rows that were committed even later are found by the next full scan."""
WHOLE_LOOK = 5.0
"""Seconds between two full scans of everything that is due; more if they are slow."""
SLOW_SHARE = 20
"""After a full scan, none follows for this many times its length: at most 5 % of the time."""
FORGET_BURSTS = 86_400 * MICROSECONDS
"""How long a key is kept after its last burst (microseconds): a day, so that its message is still
known when it is retried."""
HOLDS = "holds:"
"""Scope of the policy state, with the queue: which policies have put messages off."""
KEPT = 365 * 86_400 * MICROSECONDS
"""A note that a policy puts messages off is kept for a year after a process wrote it."""
RENEWED = 15.0
"""Seconds after which a claim notes it again."""

Due = tuple[int, str | None, int]
"""A due message: id, key, due time."""
QueueMark = tuple[str, int, int]
"""Queue, priority, mark."""


@dataclass
class IntakePosition:
    """Where the looks of one process have ended; empty, they begin at the beginning."""

    ended_at: dict[QueueMark, int] = field(default_factory=dict)
    whole_after: dict[QueueMark, float] = field(default_factory=dict)
    noted: dict[str, float] = field(default_factory=dict)
    """By queue, when it was noted what the policies of this process may put off."""
    limits: dict[tuple[str, bool], tuple[float, int]] = field(default_factory=dict)
    """By queue and whether it is of its keys, when the lowest limit was read, and what it is."""
    rates: LiveRates = field(default_factory=LiveRates)
    """Of the throttles of all that live."""
    indexed: set[str] = field(default_factory=set)
    """Queues whose keys have been looked at by their times under the policies of this process."""
    pass_began: dict[str, float] = field(default_factory=dict)
    """By queue, when the pass over all its keys began that is under way (monotonic seconds)."""
    pass_after: dict[str, float] = field(default_factory=dict)
    """By queue, when the next one may begin."""

    def copy(self) -> "IntakePosition":
        """One to change while it is not known whether the claim will be committed."""
        return IntakePosition(
            dict(self.ended_at),
            dict(self.whole_after),
            dict(self.noted),
            dict(self.limits),
            self.rates,
            set(self.indexed),
            dict(self.pass_began),
            dict(self.pass_after),
        )


@dataclass
class Intake:
    """The policies' work on one queue in one claim. Times are microseconds since 1970."""

    rows: PolicyRows
    pairs: list[ReadyPair]
    now: int
    position: IntakePosition
    keep: bool
    """Whether what is discarded is archived."""
    clock: Clock
    """The process's: how long ago everything was looked at."""
    opened: int = 0
    """Nothing takes part before: when the window before this policy has opened."""
    before: int = 0
    """The marks of the policies before."""
    later: list[int] = field(default_factory=list)
    """When shifted messages are due."""
    dead: list[int] = field(default_factory=list)
    """Messages to claim as dead letters."""
    _before_burst: int = 0

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self.rows.queue

    def note_holds(self, policies: Sequence[Policy]) -> None:
        """`policies` may put messages of the queue off; noted now and then."""
        noted = self.position.noted
        asked = self.clock.monotonic()
        holds = holds_of(policies)
        if not holds or asked < noted.get(self.queue, float("-inf")) + RENEWED:
            return
        noted[self.queue] = asked
        scope = HOLDS + self.queue
        known = self.rows.states(scope, holds)
        # A note that is later than now says that the clock was set back: it stays until that is
        # mended.
        states = {}
        for name, info in holds.items():
            before = known.get(name) or {}
            if before.get("seen", 0) <= self.now + CLOCK_STEP:
                length = max(info.get("length", 0), before.get("length", 0))
                states[name] = {"length": length, "seen": self.now}, self.now + KEPT
        self.rows.keep(scope, states)

    def read_keys(self, header: Header) -> bool:
        """Give each message its key from its headers; whether all that is due has one. Policies do
        not see it before.
        """
        arrivals, whole = self.arrivals(HEADER_KEY)
        if arrivals:
            ids = [arrival.id for arrival in arrivals]
            stored = self.rows.headers(ids)
            keys = {message: header.key(load_headers(of)) for message, of in stored.items()}
            self.rows.give_keys(keys)
        self.before |= HEADER_KEY
        return whole

    def delay(self, policy: Delay) -> bool:
        """Shift what is due for the first time; whether all of it was looked at."""
        arrivals, whole = self.arrivals(DELAYED)
        due = {
            a.id: None if a.delivered else max(a.due, self.opened) + policy.delay for a in arrivals
        }
        self._shift(due, DELAYED, HELD_DELAY)
        self.before |= DELAYED
        return whole

    def burst(self, policy: Debounce | KeepLast) -> bool:
        """Let new messages take part in the bursts of their keys, or be the newest; whether all of
        them have. If not, `catch_up` does so for the keys that are to be delivered.
        """
        arrivals, whole = self.arrivals(BURST)
        self._before_burst = self.before
        self._join(policy, arrivals)
        self.before |= BURST
        return whole

    def catch_up(self, policy: Debounce | KeepLast, chosen: Sequence[Due]) -> list[Due]:
        """Those of the due messages `chosen` that may be delivered though the scan has not come to
        its end: all messages of their keys that have come by now take part at once.

        So a large backlog keeps no key waiting that is complete.
        """
        keys = list(dict.fromkeys(key for _, key, _ in chosen if key is not None))
        if not keys:
            return list(chosen)
        arrivals, whole = self.rows.arrivals_of(keys, before=self._before_burst, own=BURST)
        due, gone = self._join(policy, arrivals)
        known = [each for each in chosen if each[0] not in gone]
        if self.before == self._before_burst | BURST:
            # No later policy has to see them first.
            known += [(a.id, a.key, at) for a in arrivals if (at := due.get(a.id)) is not None]
        complete = whole | {None}
        return [
            (message, key, at)
            for message, key, at in known
            if key in complete and (due.get(message) or at) <= self.now
        ]

    def _join(
        self, policy: Debounce | KeepLast, arrivals: Sequence[Arrival]
    ) -> tuple[dict[int, int | None], set[int]]:
        """Let `arrivals` take part; the due times given, and what is not to be delivered now."""
        due: dict[int, int | None] = {}
        gone: dict[int, Discard] = {}
        by_key: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for a in arrivals:
            if a.delivered or a.key is None:
                due[a.id] = None
            elif a.expired:
                gone[a.id] = Discard(EXPIRED)
            else:
                by_key[a.key].append((max(a.due, a.created, self.opened), a.id))
        scope = burst_scope(self.queue)
        known = burst_states(self.rows, policy, by_key, self.now)
        states: dict[str, tuple[Any, int]] = {}
        standby: dict[int, int] = {}
        keys: dict[int, str | None] = {a.id: a.key for a in arrivals}
        takes = {k: policy.take(known.get(k), sorted(of)) for k, of in by_key.items()}
        keys |= self._keys_of_two(takes.values(), keys)
        for key, (info, taken, until) in takes.items():
            due |= _of_key(taken.due, key, keys)
            standing = _of_key(taken.standby, key, keys)
            standby |= {i: looked_at(at, self.now) for i, at in standing.items()}
            superseded = _of_key(taken.superseded, key, keys)
            gone |= {message: Discard(SUPERSEDED, by) for message, by in superseded.items()}
            states[key] = info, forgotten_at(info, max(until, self.now))
        self.rows.keep(scope, states)
        self.rows.discard(gone, keep=self.keep, keys=keys)
        self._shift(due, BURST, HELD_BURST, keys)
        self.rows.stand_by(standby, keys)
        self.later += standby.values()
        return due, gone.keys() | standby.keys()

    def _keys_of_two(
        self, takes: Iterable[Taken], known: Mapping[int, str | None]
    ) -> dict[int, str | None]:
        """The keys of messages that two keys know, beyond those `known`: they got another one."""
        named = Counter(
            message
            for _, changes, _ in takes
            for message in {*changes.due, *changes.standby, *changes.superseded} - known.keys()
        )
        twice = [message for message, times in named.items() if times > 1]
        live = self.rows.live(twice)
        return {message: each.key for message, each in live.items()}

    def scan_back(self, own: int, at: int) -> None:
        """Let the next scan begin at `at` or earlier: what is due from then on lacks `own`."""
        for pair in self.pairs:
            place = self.queue, pair.priority, own
            self.position.ended_at[place] = min(self.position.ended_at[place], at)

    def mark(self, messages: Sequence[int], mark: int) -> None:
        """Give them `mark`; their due times stay."""
        self._shift(dict.fromkeys(messages), mark)

    def _shift(
        self,
        due: Mapping[int, int | None],
        mark: int,
        held: int = 0,
        keys: Mapping[int, str | None] = MappingProxyType({}),
    ) -> None:
        marks = mark | held, ~HELD | held
        self.rows.shift(due, *marks, keys=keys)
        self.later += [at for at in due.values() if at is not None and at > self.now]

    def arrivals(self, own: int) -> tuple[list[Arrival], bool]:
        """What has not got the mark `own`, and whether that is all; if not, all that was due before
        some time. Of one priority, what was delivered before comes first, but for what waited for
        another of its key.
        """
        found: list[Arrival] = []
        horizon: int | None = None
        for pair in self.pairs:
            place = self.queue, pair.priority, own
            asked = self.clock.monotonic()
            whole = place not in self.position.ended_at or asked >= self.position.whole_after.get(
                place, 0.0
            )
            since = 0 if whole else max(0, self.position.ended_at[place] - LATE_COMMITS)
            rows = self.rows.arrivals(pair.priority, before=self.before, own=own, since=since)
            if len(rows) == SCAN:
                horizon = rows[-1].due if horizon is None else min(horizon, rows[-1].due)
            self.position.ended_at[place] = rows[-1].due if len(rows) == SCAN else self.now
            if whole:
                took = self.clock.monotonic() - asked
                self.position.whole_after[place] = asked + max(WHOLE_LOOK, SLOW_SHARE * took)
            found += sorted(rows, key=_is_behind)
        if horizon is None:
            return found, True
        # What is due later may come after something of another priority that was not read yet.
        self.scan_back(own, horizon)
        return [a for a in found if a.due <= horizon], False


def _of_key(values: Mapping[int, int], key: str, keys: dict[int, str | None]) -> dict[int, int]:
    """Those of messages of `key`, which may know some that have got another key since."""
    return {
        message: value for message, value in values.items() if keys.setdefault(message, key) == key
    }


def _is_behind(arrival: Arrival) -> bool:
    # What waited for another of its key comes at its due time, which is not before that of the
    # other: neither would ever start if the other lost its slot to what waits for it.
    return not arrival.delivered or bool(arrival.marks & HELD_BURST)


def burst_scope(queue: str) -> str:
    """Where the bursts of a queue's keys are stored."""
    return f"debounce:{queue}"


def burst_states(
    rows: PolicyRows,
    policy: Debounce | KeepLast,
    keys: Iterable[str],
    now: int,
) -> dict[str, Any]:
    """What is stored of the bursts of `keys`; under the queue's lock."""
    scope = burst_scope(rows.queue)
    found = rows.states(scope, keys)
    mended = {key: mend_clock(info, now) for key, info in found.items()}
    # Kept at once: a look that changes nothing else would find the same step, at a later time.
    until = now + policy.window
    changed = {
        key: (info, forgotten_at(info, until))
        for key, info in mended.items()
        if info is not found[key]
    }
    rows.keep(scope, changed)
    return mended


def forgotten_at(info: dict[str, Any], needed_until: int) -> int:
    """When what is stored of a key may be forgotten: not while messages stand by."""
    return needed_until + (KEPT if info.get("standby") else FORGET_BURSTS)


def slot_scope(queue: str, number: int | None = None) -> str:
    """Where the slots of a queue's keys are stored, or of the queue itself, by the number of its
    policy.
    """
    return f"slots:{queue}" if number is None else f"throttle{number}:{queue}"
