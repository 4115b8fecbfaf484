"""Slots of a Throttle that refuses what is above its rate: it drops, dead-letters or backs off.

A message is looked at once: it is let in if there is a slot for it now, else it is refused. It
takes the slot when it is leased. A message that was let in is never refused any more: if it could
not start in time, or comes again for a retry, it waits for the next slot, and then goes before what
is new.

Times are microseconds since 1970.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.flags import (
    HELD,
    LET_IN,
    MOST_BACKOFFS,
    PUT_OFF,
    SLOT,
    backoffs,
    of_backoffs,
)
from faststream_sqlbroker.core.policies.live_rates import Place
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.slot_log import SlotLog
from faststream_sqlbroker.core.reasons import THROTTLED
from faststream_sqlbroker.database.policies.gates import SlotLogs
from faststream_sqlbroker.database.policies.intake import Intake, slot_scope
from faststream_sqlbroker.database.policies.rows import Arrival, Live

LONGEST_WAIT = 5 * MICROSECONDS
"""A message that was let in and has no slot is looked at again after this (microseconds): another
rate, or none, must not find it put off for long. There are few, as each had a slot before."""


class OwnSlots:
    """The slots of the queue, or of its keys, in one claim, under the queue's lock."""

    def __init__(
        self, intake: Intake, policy: Throttle, logs: SlotLogs, number: int, first: int
    ) -> None:
        """Slots at `first` are granted now; the throttle is the `number`th of its subscriber."""
        self._intake = intake
        self._policy = policy
        self._shared = logs
        self._first = first
        # As those of a throttle that lets messages wait: a deployment may change the one to the
        # other.
        self._scope = slot_scope(intake.queue, None if policy.key else number)
        self._logs: dict[str, SlotLog] = {}
        """As they are stored."""
        self._taken: dict[int, tuple[str, int]] = {}
        """Keys and slots of the messages that may start; not stored before they are leased."""
        self.later: list[int] = []
        """When messages that were put off are looked at again."""
        self.dropped: dict[str, int] = {}
        """By its key, the newest message that was dropped."""

    def let_in(self, limit: int) -> bool:
        """Look at what has come: let it in, or refuse it; whether all was looked at.

        At most `limit` are let in now, as no more could start; those above them wait for the next
        claim. The expired need no slot.
        """
        intake = self._intake
        arrivals, whole = intake.arrivals(SLOT)
        intake.before |= SLOT
        self._look(key for a in arrivals if (key := self._key(a.key)) is not None)
        trial = {key: log.copy() for key, log in self._logs.items()}
        found: list[int] = []
        left: list[int] = []
        put_off: dict[int, dict[int, int | None]] = defaultdict(dict)
        dropped: dict[int, Discard] = {}
        # Each message changes the log that the next one of its key sees, so all cases are one loop.
        for a in arrivals:
            key = None if a.expired else self._key(a.key)
            if key is not None and (slot := self._next(trial[key])) > self._first:
                if a.delivered:
                    # Until its own slot, as far as is known: who takes that is open until then.
                    put_off[0][a.id] = min(slot, intake.now + LONGEST_WAIT)
                elif self._policy.when_exceeded == "backoff":
                    before = backoffs(a.marks)
                    wait = round(intake.clock.jitter(self._policy.backoff(before)))
                    put_off[min(before + 1, MOST_BACKOFFS)][a.id] = intake.now + wait
                elif self._policy.when_exceeded == "drop":
                    dropped[a.id] = Discard(THROTTLED)
                else:
                    intake.dead.append(a.id)
                    left.append(a.due)  # until it is claimed as one
            elif len(found) >= limit:
                left.append(a.due)
            else:
                found.append(a.id)
                if key is not None:
                    self._grant(trial[key])
        intake.rows.discard(intake.connection, intake.queue, dropped, keep=intake.keep)
        self.dropped = _newest_by_key(arrivals, dropped)
        for count, due in put_off.items():
            self._put_off(due, count)
        # The mark is what the choice goes by, which may be of keys or bursts. It promises no slot:
        # what a choice leaves out must not hold one.
        intake.mark(found, SLOT | LET_IN)
        intake.scan_back(SLOT, min(left, default=intake.now))
        return whole and (limit < 1 or len(left) == len(intake.dead))

    def on_time(self, chosen: Sequence[int], live: Mapping[int, Live], limit: int) -> list[int]:
        """Up to `limit` of `chosen`, all of them let in, that find a slot now; those without are
        put off.
        """
        keys = {
            message: self._key(live[message].key)
            for message in chosen
            if message in live and not live[message].expired
        }
        self._look(key for key in keys.values() if key is not None)
        trial = {key: log.copy() for key, log in self._logs.items()}
        starting: list[int] = []
        put_off: dict[int, int | None] = {}
        for message in chosen:
            if len(starting) == limit:
                break
            key = keys.get(message)
            if key is None:
                starting.append(message)
                continue
            slot = self._next(trial[key])
            if slot > self._first:
                # One that was let in before it, and could not be leased then, has taken it.
                put_off[message] = min(slot, self._intake.now + LONGEST_WAIT)
                continue
            self._grant(trial[key])
            self._taken[message] = key, slot
            starting.append(message)
        self._put_off(put_off)
        self.later = [at for at in put_off.values() if at is not None]
        return starting

    def slot(self, message: int) -> tuple[int, Place] | None:
        """The slot of a message that starts, and where it is stored; None: it needs none."""
        if (taken := self._taken.get(message)) is None:
            return None
        key, at = taken
        return at, (self._scope, key)

    def keep(self, started: Mapping[int, int]) -> None:
        """Store the slots of the messages `started`, each at its time, its own slot or later, and
        what is to be told of others.
        """
        shared = self._shared
        self._look(shared.use.worth_telling(self._scope, self._policy, self._logs))
        changed = {key for scope, key in shared.changed if scope == self._scope}
        for message, at in started.items():
            # The expired, and those without a key, have taken none.
            if message in self._taken:
                key = self._taken[message][0]
                self._logs[key].add(at, at + shared.patience)
                changed.add(key)
        states = {
            key: shared.dump(self._policy, (self._scope, key), self._logs[key]) for key in changed
        }
        self._intake.rows.keep(self._intake.connection, self._scope, states)

    def _look(self, keys: Iterable[str]) -> None:
        missing = set(keys) - self._logs.keys()
        known = self._intake.rows.states(self._intake.connection, self._scope, missing)
        for key in missing:
            place = self._scope, key
            self._logs[key] = self._shared.load(self._policy, place, known.get(key))

    def _next(self, log: SlotLog) -> int:
        return self._policy.next_slot(log, self._first)

    def _grant(self, log: SlotLog) -> None:
        log.add(self._first, self._first + self._shared.patience)

    def _key(self, key: str | None) -> str | None:
        return key if self._policy.key else ""

    def _put_off(self, due: Mapping[int, int | None], count: int = 0) -> None:
        """They are arrivals again when they come back; `count`: how often each has backed off."""
        intake = self._intake
        kept = ~(SLOT | HELD | of_backoffs(MOST_BACKOFFS)) | PUT_OFF | of_backoffs(count)
        intake.rows.shift(intake.connection, intake.queue, due, PUT_OFF | of_backoffs(count), kept)
        intake.later += [at for at in due.values() if at is not None]


def _newest_by_key(arrivals: Iterable[Arrival], ids: Collection[int]) -> dict[str, int]:
    keyed = ((a.id, a.key) for a in arrivals if a.id in ids and a.key is not None)
    return {key: message for message, key in sorted(keyed)}
