"""Slots of a Throttle that refuses what is above its rate: it drops, dead-letters or backs off.

A message is looked at once: it is let in if there is a slot for it now, else it is refused. It
takes the slot when it is leased. A message that was let in is never refused any more: if it could
not start in time, or comes again for a retry, it waits for the next slot, and then goes before what
is new.

Times are microseconds since 1970.
"""

from collections.abc import Iterable, Mapping, Sequence

from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.flags import HELD, LET_IN, PUT_OFF, SLOT
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.slot_log import SlotLog
from faststream_sqlbroker.core.policies.throttle import kept_slots, load_slots
from faststream_sqlbroker.core.reasons import THROTTLED
from faststream_sqlbroker.policies.intake import Intake, slot_scope
from faststream_sqlbroker.policies.rows import Arrival, Live

LONGEST_WAIT = 5 * MICROSECONDS
"""A message that was let in and has no slot is looked at again after this (microseconds): another
rate, or none, must not find it put off for long. There are few, as each had a slot before."""


class OwnSlots:
    """The slots of the queue, or of its keys, in one claim, under the queue's lock."""

    def __init__(
        self, intake: Intake, policy: Throttle, number: int, first: int, until: int
    ) -> None:
        """Slots from `first` to `until` are granted now; the throttle is the `number`th of its
        subscriber.
        """
        self._intake = intake
        self._policy = policy
        self._first = first
        self._until = until
        # As those of a throttle that lets messages wait: a deployment may change the one to the
        # other.
        self._scope = slot_scope(intake.queue, None if policy.key else number)
        self._logs: dict[str, SlotLog] = {}
        """As they are stored."""
        self._taken: dict[int, tuple[str, int]] = {}
        """Keys and slots of the messages that may start; not stored before they are leased."""
        self.later: list[int] = []
        """When messages that were put off are looked at again."""

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
        coming: dict[str, SlotLog] = {}
        found: list[int] = []
        left: list[int] = []
        put_off: dict[int, int | None] = {}
        dropped: dict[int, Discard] = {}
        # Each message changes the log that the next one of its key sees, so all cases are one loop.
        for a in arrivals:
            key = None if a.expired else self._key(a.key)
            if key is not None and self._policy.next_slot(trial[key], self._first) > self._until:
                if a.delivered or self._policy.when_exceeded == "backoff":
                    # Each after a slot of its own, so that few find nothing when they come back;
                    # but who takes the slot is open until then.
                    back = coming.setdefault(key, trial[key].copy())
                    back.append(self._policy.next_slot(back, self._first))
                    put_off[a.id] = self._comes_back(a, back.last)
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
                    trial[key].append(self._policy.next_slot(trial[key], self._first))
        intake.rows.discard(intake.connection, intake.queue, dropped, keep=intake.keep)
        self._put_off(put_off)
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
            slot = self._policy.next_slot(trial[key], self._first)
            if slot > self._until:
                # One that was let in before it, and could not be leased then, has taken it.
                put_off[message] = min(slot, self._intake.now + LONGEST_WAIT)
                continue
            trial[key].append(slot)
            self._taken[message] = key, slot
            starting.append(message)
        self._put_off(put_off)
        self.later = [at for at in put_off.values() if at is not None]
        return starting

    def slot(self, message: int) -> int:
        """The slot of a message that starts; now, if it needs none."""
        return self._taken[message][1] if message in self._taken else self._intake.now

    def keep(self, started: Mapping[int, int]) -> None:
        """Store the slots of the messages `started`, each at its time, its own slot or later."""
        logs: dict[str, SlotLog] = {}
        for message, at in sorted(started.items(), key=lambda each: each[1]):
            # The expired, and those without a key, have taken none.
            if message in self._taken:
                key = self._taken[message][0]
                logs.setdefault(key, self._logs[key]).append(at)
        intake = self._intake
        intake.rows.keep(intake.connection, self._scope, kept_slots(self._policy, logs))

    def _look(self, keys: Iterable[str]) -> None:
        missing = set(keys) - self._logs.keys()
        known = self._intake.rows.states(self._intake.connection, self._scope, missing)
        rates = self._intake.position.rates
        for key in missing:
            log = self._logs[key] = load_slots(known.get(key))
            log.others = rates.others((self._scope, ""), log.others, self._intake.now)

    def _key(self, key: str | None) -> str | None:
        return key if self._policy.key else ""

    def _comes_back(self, arrival: Arrival, slot: int) -> int:
        if arrival.delivered:
            return min(slot, self._intake.now + LONGEST_WAIT)
        width = self._policy.backoff
        return slot + round(self._intake.clock.jitter(width) - width / 2)

    def _put_off(self, due: Mapping[int, int | None]) -> None:
        """They are arrivals again when they come back."""
        intake = self._intake
        kept = ~(SLOT | HELD) | PUT_OFF
        intake.rows.shift(intake.connection, intake.queue, due, PUT_OFF, kept)
        intake.later += [at for at in due.values() if at is not None]
