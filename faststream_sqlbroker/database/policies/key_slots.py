"""The slots of each key at a claim: for a Throttle by key whose messages wait.

A key without a slot keeps its messages where they are: nothing is written to them, so an urgent
one goes first, an expired one takes no slot, and another rate holds from the next claim on. What
waits for a slot must not be read again and again: if the oldest due messages have none, the claim
reads keys instead, by the time at which each has its next slot (`due_at` of its state).

Times are microseconds since 1970.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.flags import SLOT
from faststream_sqlbroker.core.policies.live_rates import Place
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.slot_log import SlotLog
from faststream_sqlbroker.database.parts.ordered import Key
from faststream_sqlbroker.database.policies.intake import WHOLE_LOOK, Intake
from faststream_sqlbroker.database.policies.rows import SCAN, Live, as_key
from faststream_sqlbroker.database.policies.slot_use import SlotLogs

OVERLAP = MICROSECONDS // 10
"""A look for arrivals begins this long before the end of the last one (microseconds): most
publishes are committed sooner than that after their due time."""
PASS_SHARE = 5
"""After a pass over all keys none follows for this many times its length."""


@dataclass(eq=False)
class TakenSlots:
    """The slots that messages of a queue take in a claim, under the queue's lock: slots of the
    queue or of keys.
    """

    intake: Intake
    policy: Throttle
    shared: SlotLogs
    scope: str
    """Where what is taken is stored."""
    first: int
    until: int
    """Slots from `first` to this time are granted now."""
    _logs: dict[str, SlotLog] = field(default_factory=dict, init=False)
    """As they are stored."""
    _trial: dict[str, SlotLog] = field(default_factory=dict, init=False)
    """With the slots that were taken."""
    _taken: dict[int, tuple[str, int]] = field(default_factory=dict, init=False)
    """Keys and slots of the messages that may start; not stored before they are leased."""
    _stored: dict[str, int | None] = field(default_factory=dict, init=False)

    def look(self, keys: Iterable[Key]) -> None:
        """Read what is known of `keys`."""
        texts = {text for key in keys if (text := as_key(key)) is not None}
        missing = texts - self._logs.keys()
        known = self.intake.rows.states(self.scope, missing)
        for key in missing:
            info = known.get(key)
            self._logs[key] = self.shared.load(self.policy, (self.scope, key), info)
            self._stored[key] = info.get("next") if isinstance(info, dict) else None

    def on_time(self, chosen: Sequence[int], live: Mapping[int, Live], limit: int) -> list[int]:
        """Up to `limit` of `chosen` that expire, have no key, or take a slot of their key now."""
        keys = {message: self._key(live[message].key) for message in chosen if message in live}
        self.look(key for key in keys.values() if key is not None)
        starting: list[int] = []
        for message, key in keys.items():
            if len(starting) == limit:
                break
            if key is not None and not live[message].expired:
                log = self._trial.setdefault(key, self._logs[key].copy())
                if (slot := self._grant(log)) > self.until:
                    self._wait(slot, message)
                    continue
                self._taken[message] = key, slot
            starting.append(message)
        return starting

    def slot(self, message: int) -> tuple[int, Place] | None:
        """The slot of a message that starts, and where it is stored; None: it needs none."""
        if (taken := self._taken.get(message)) is None:
            return None
        key, at = taken
        return at, (self.scope, key)

    def _key(self, key: str | None) -> str | None:
        return key if self.policy.key else ""

    def _grant(self, log: SlotLog) -> int:
        """The next slot of a key; added to `log` if granted now."""
        slot = self.policy.next_slot(log, self.first)
        if slot <= self.until:
            log.add(slot, slot + self.shared.patience)
        return slot

    def _wait(self, slot: int, message: int | None = None) -> None:
        """Note that the key of `message` has the next slot only at `slot`."""
        raise NotImplementedError

    def _spend(self, started: Mapping[int, int]) -> tuple[dict[str, list[int]], set[str]]:
        """Add the slots of the messages `started`, each at its time, its own slot or later, to
        their logs; the slots by key, and the keys of which something is to be told.
        """
        shared = self.shared
        self.look(shared.use.worth_telling(self.scope, self.policy, self._logs))
        self._trial.clear()
        taken = defaultdict(list)
        for message, at in started.items():
            # The expired, and those without a key, have taken none.
            if message in self._taken:
                key = self._taken[message][0]
                self._logs[key].add(at, at + shared.patience)
                taken[key].append(at)
        return taken, {key for scope, key in shared.changed if scope == self.scope}


@dataclass(eq=False)
class KeySlots(TakenSlots):
    """The keys of a queue whose messages wait for slots."""

    _admitted: dict[str, SlotLog] = field(default_factory=dict, init=False)
    _indexed: bool = field(default=False, init=False)
    _idle: set[str] = field(default_factory=set, init=False)
    looked: bool = field(default=False, init=False)
    """Whether messages were looked at."""
    later: int | None = field(default=None, init=False)
    """The first slot of a key that has none now; None: no key is known to wait."""

    def next(self, key: str) -> int:
        """The first slot of a key, which has been looked at."""
        return self.policy.next_slot(self._trial.get(key, self._logs[key]), self.first)

    def is_open(self, key: Key | None) -> bool:
        """Whether a message of the key may start now; one without a key always may."""
        if (text := as_key(key)) is None:
            return True
        if (slot := self.next(text)) <= self.until:
            return True
        self._wait(slot)
        return False

    def admits(self, key: Key) -> bool:
        """Whether one more message of the key may start now, after those that were admitted."""
        if (text := as_key(key)) is None:
            return True
        if not self.is_open(text):
            return False
        log = self._admitted.setdefault(text, self._logs[text].copy())
        if (slot := self._grant(log)) > self.until:
            self._wait(slot)
            return False
        return True

    def begin_anew(self) -> None:
        """Nothing has been admitted."""
        self._admitted.clear()

    def on_time(self, chosen: Sequence[int], live: Mapping[int, Live], limit: int) -> list[int]:
        """As `TakenSlots`; what has no slot stays as it is."""
        self.looked = True
        return super().on_time(chosen, live, limit)

    def _wait(self, slot: int, message: int | None = None) -> None:  # noqa: ARG002
        self.later = slot if self.later is None else min(self.later, slot)

    def use_index(self) -> None:
        """From now on, write of each key that is looked at when it is to be looked at again."""
        if self._indexed:
            return
        self._indexed = True
        intake = self.intake
        if intake.queue not in intake.position.indexed:
            # Another rate may have written it. A process has one rate, so it asks once.
            intake.rows.look_anew(self.scope)
            intake.position.indexed.add(intake.queue)

    def idle(self, keys: Iterable[Key]) -> None:
        """Nothing of `keys` is due: they are not to be looked at again before something is."""
        self._idle |= {text for key in keys if (text := as_key(key)) is not None}

    def arrivals(self) -> tuple[list[int], bool]:
        """Messages that have become due since the last look, and whether there are more."""
        intake = self.intake
        found: list[int] = []
        more = False
        for pair in intake.pairs:
            place = intake.queue, pair.priority, SLOT
            since = intake.position.ended_at.get(place, intake.now) - OVERLAP
            rows = intake.rows.arrivals(
                pair.priority,
                before=intake.before,
                own=0,
                since=since,
            )
            found += [row.id for row in rows if not row.expired]
            whole = len(rows) < SCAN
            # What has one due time and is more than a look finds is left to the pass over all keys.
            behind = not whole and rows[-1].due - OVERLAP > since
            intake.position.ended_at[place] = rows[-1].due if behind else intake.now
            more = more or behind
        return found, more

    def looks_at_all(self) -> bool:
        """Whether a pass over all keys is to begin, as none is under way: it finds what was
        committed late, or came back with its old due time.
        """
        position = self.intake.position
        now = self.intake.clock.monotonic()
        if (began := position.pass_began.pop(self.intake.queue, None)) is not None:
            rest = max(WHOLE_LOOK, PASS_SHARE * (now - began))
            position.pass_after[self.intake.queue] = now + rest
        if now < position.pass_after.get(self.intake.queue, 0.0):
            return False
        position.pass_began[self.intake.queue] = now
        return True

    def next_look(self) -> int | None:
        """When a key is to be looked at again; None: no key waits."""
        if self._indexed:
            at = self.intake.rows.next_due(self.scope)
            if at is not None:
                self._wait(at)
        return self.later

    def keep(self, started: Mapping[int, int]) -> None:
        """Store the slots of the messages `started`, each at its time, its own slot or later; what
        is to be told of others, and when to look at keys again.
        """
        if not self.looked:
            return
        taken, told = self._spend(started)
        states = {}
        due: dict[str, int | None] = {}
        for key in {*taken, *told, *(self._logs if self._indexed else ())}:
            log = self._logs[key]
            at_next = None
            if key not in self._idle or key in taken:
                at_next = self._next_look(key, taken.get(key, ()))
            if key not in taken.keys() | told and self._is_stored(key, at_next):
                continue
            info, forget = self.shared.dump(self.policy, (self.scope, key), log)
            info.pop("next", None)
            if at_next is not None:
                info["next"] = at_next
            states[key] = info, max(forget, at_next or 0)
            due[key] = at_next
        self.intake.rows.keep(self.scope, states, due)

    def _next_look(self, key: str, taken: Sequence[int]) -> int:
        """When the key has its next slot, if those `taken` now start at their slots."""
        log = self._logs[key]
        if taken:
            log = log.copy()
            for slot in taken:
                self.policy.report(log, slot + self.shared.patience, slot)
        return self.policy.next_slot(log, self.first)

    def _is_stored(self, key: str, at: int | None) -> bool:
        """Whether it is known of a key that it is to be looked at `at`; None: not."""
        stored = self._stored[key]
        if stored is None or at is None:
            return stored is at
        # A key that has a slot now is looked at now, since whenever that is so.
        return stored == at or max(stored, at) <= self.until
