"""Debounce and KeepLast at a claim: which message of each key is delivered now.

What stands by for a newer message of its key goes when that one has started; one of it takes the
place of a message that cannot be delivered.

Times are microseconds since 1970.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.policies import Debounce, KeepLast
from faststream_sqlbroker.core.policies.debounce import Bursts
from faststream_sqlbroker.core.policies.flags import BURST, HELD_BURST, KEPT
from faststream_sqlbroker.core.policies.keep_last import Latest, Turn, next_turn
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.standby import chosen_for, looked_at, stand_in, stands_by
from faststream_sqlbroker.core.reasons import EXPIRED, SUPERSEDED
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.policies.intake import (
    Due,
    burst_scope,
    burst_states,
    forgotten_at,
)
from faststream_sqlbroker.database.policies.rows import SCAN, Live, PolicyRows, Standing

NEWEST = 2**63 - 1
"""Above every id."""
SHORTEST_BURST_RECHECK = MICROSECONDS // 20
"""Least time until a waiting message is checked again (microseconds)."""
LONGEST_BURST_RECHECK = 2 * MICROSECONDS
"""A message that waits for the one before it is checked again after as long as that one has been
running, at most after this. So it waits at most twice as long as it must, and many waiting messages
do not fill every claim."""
BURST_WAIT_LIMIT = 60 * MICROSECONDS
"""The same limit if the message before waits itself, for example for a retry: an operator may
cancel it."""


@dataclass(eq=False)
class KeyHeads:
    """The keys of one queue in one claim: what waits of each, and what stands by."""

    policy: Debounce | KeepLast
    rows: PolicyRows
    """Under the queue's lock."""
    now: int
    keep: bool
    """Whether what is discarded is archived."""
    known: dict[str, Any] = field(default_factory=dict)
    """By key, a `Bursts` or a `Latest`."""
    live: dict[str, dict[int, Live]] = field(default_factory=dict)
    """By key, those of its messages that can be delivered, or are being handled."""
    key_of: dict[int, str] = field(default_factory=dict)
    """By message, the key that it was read with."""
    looked_on: set[int] = field(default_factory=set)
    later: list[int] = field(default_factory=list)
    """When messages are looked at again."""
    more: bool = False
    """Whether there is more to look at, at once."""

    def look(self, priorities: Iterable[int]) -> None:
        """Look at what stands by, and is to be looked at by now."""
        found: list[Standing] = []
        for priority in priorities:
            found += self.rows.standby_due(priority, now=self.now, size=SCAN)
            self.more |= len(found) >= SCAN
        looked: dict[str, list[Standing]] = defaultdict(list)
        for each in found:
            if each.key is not None:
                looked[each.key].append(each)
        done = self._read(looked, looked) | self.looked_on
        later = {
            each.id: self._look_again(key, each)
            for key, standing in looked.items()
            for each in standing
            if each.id not in done
        }
        keys = {each.id: each.key for each in found if each.key is not None}
        self.rows.stand_by(later, keys)
        self.later += later.values()
        # Without a key nothing can stand by: the policy goes by another one now, or another program
        # has taken it away.
        free = {each.id: self.now for each in found if each.key is None}
        self.rows.shift(free, 0, KEPT & ~BURST)

    def _look_again(self, key: str, standing: Standing) -> int:
        owner = self._chosen_for(key, standing.id)
        waits_for = None if owner is None else self.live[key].get(owner)
        if owner is None or waits_for is None:
            return looked_at(self.now, self.now)
        # One that waits for the message before, or for a slot, is put off every few seconds.
        since = max(self._due_of(self.known[key], owner), standing.created)
        return looked_at(waits_for.due, self.now, max(0, self.now - since))

    def _read_due(self, due: Sequence[Due]) -> list[Due]:
        """Read what is known of the keys of the due messages; which are to be delivered still."""
        ended = self._read(key for _, key, _ in due if key is not None)
        return [each for each in due if each[0] not in ended]

    def _read(
        self, keys: Iterable[str], looked: Mapping[str, Sequence[Standing]] | None = None
    ) -> set[int]:
        """Read what is known of `keys`. What can no longer be delivered gives its place to what
        stands by for it; which messages got a place or ended.
        """
        keys = set(keys)
        looked = looked or {}
        self._load(keys)
        self._read_live()
        expired = self._expired()
        changed = {self.key_of[message] for message in expired}
        for message in expired:
            del self.live[self.key_of[message]][message]
        replaced = [key for key in keys if self._needs_look(key, looked.get(key, ()))]
        placed = self._replace(replaced, expired)
        self._discard(expired)
        # What is looked at is known for longer.
        self._save(changed | set(replaced) | looked.keys())
        return placed | expired.keys()

    def _read_live(self) -> None:
        known = {i for state in self.known.values() for i in state.known()}
        found = self.rows.live(known)
        self.key_of = {i: each.key for i, each in found.items() if each.key is not None}
        # A message that has got another key is not this key's any more, though both may know it.
        self.live = {
            key: {
                i: found[i]
                for i in state.known()
                if i in found and found[i].key == key and not _stands_by(found[i])
            }
            for key, state in self.known.items()
        }

    def _load(self, keys: Iterable[str]) -> None:
        stored = burst_states(self.rows, self.policy, keys, self.now)
        self.known = {key: self.policy.load(stored.get(key)) for key in keys}

    def _expired(self) -> dict[int, Discard]:
        return {
            message: Discard(EXPIRED)
            for key, live in self.live.items()
            for message in self.known[key].waiting
            if (each := live.get(message)) is not None
            and each.expired
            and each.state != "PROCESSING"
        }

    def _needs_look(self, key: str, looked: Sequence[Standing]) -> bool:
        state = self.known[key]
        state.standby |= bool(looked)
        free = None, state.over
        if any(each.expired or self._chosen_for(key, each.id) in free for each in looked):
            return True
        return state.standby and any(i not in self.live[key] for i in state.waiting)

    def _chosen_for(self, key: str, message: int) -> int | None:
        return chosen_for(self.known[key].chosen, message, leading=self.policy.leading)

    def _replace(self, keys: Sequence[str], gone: dict[int, Discard]) -> set[int]:
        """Fill the places of messages that are no more; which messages have got one. What ends is
        added to `gone`.
        """
        if not keys:
            return set()
        by_key, whole = self._read_standing(keys, gone)
        due: dict[int, int] = {}
        for key, standing in by_key.items():
            self.more |= key not in whole
            if standing or key in whole:
                self._fill(key, standing, due, gone, whole=key in whole)
                left = set(standing) - due.keys() - gone.keys()
                self.known[key].standby &= bool(left) or key not in whole
        # Their due times are theirs again.
        self.rows.shift(
            due,
            BURST | HELD_BURST,
            KEPT | HELD_BURST,
            keys=self.key_of,
        )
        self.later += due.values()
        for message, live in self.rows.live(due).items():
            if live.key in self.live and not _stands_by(live):
                self.live[live.key][message] = live
        return set(due)

    def _read_standing(
        self, keys: Sequence[str], gone: dict[int, Discard]
    ) -> tuple[dict[str, list[int]], set[str]]:
        """What stands by of `keys`, as far as `SCAN` goes, and the keys of which all was read."""
        ranges = dict.fromkeys(keys, (0, NEWEST))
        last = not self.policy.leading
        found, whole = self.rows.standby_of(ranges, last=last)
        by_key: dict[str, list[int]] = {key: [] for key in keys}
        for each, key in self._keyed(found):
            if each.expired:
                gone[each.id] = Discard(EXPIRED)
            else:
                by_key[key].append(each.id)
        return by_key, whole

    def _fill(
        self,
        key: str,
        standing: list[int],
        due: dict[int, int],
        gone: dict[int, Discard],
        *,
        whole: bool,
    ) -> None:
        """`standing` are those of the key that stand by, `whole`: all of them."""
        state = self.known[key]
        leading = self.policy.leading
        of: dict[int | None, list[int]] = defaultdict(list)
        for message in standing:
            of[self._chosen_for(key, message)].append(message)
        over = of.pop(state.over, []) if state.over is not None else []
        if len(over) > 1 and not whole:
            self._look_on([over.pop()])
        gone |= {message: Discard(SUPERSEDED, state.over) for message in over}
        for old in list(state.waiting):
            if old not in self.live[key]:
                by = stand_in(of.get(old, []), leading=leading)
                state.replace(old, by)
                if by is not None:
                    due[by] = max(self.now, self._due_of(state, by))
        by = stand_in(of.get(None, []), leading=leading)
        if by is not None:
            state.adopt(by)
            due[by] = max(self.now, self._due_of(state, by))

    def _due_of(self, state: Bursts | Latest, message: int) -> int:
        if message != state.newest:
            return 0
        if isinstance(state, Bursts):
            return state.end
        return state.opens(self.policy) if isinstance(self.policy, KeepLast) else 0

    def _put_off(self, due: Sequence[Due], waiting: Mapping[int, int | None]) -> None:
        """Give those of `due` that are `waiting` these due times."""
        # A message that is put off gives up its slot, which would be for another time.
        marks = HELD_BURST, KEPT | HELD_BURST
        keys = {message: key for message, key, _ in due}
        self.rows.shift(waiting, *marks, keys=keys)
        self.later += [at for at in waiting.values() if at is not None]

    def _stand_by(self, waiting: Mapping[int, tuple[str, int]]) -> None:
        """Let messages of keys stand by, each for another one."""
        due: dict[int, int] = {}
        for message, (key, by) in waiting.items():
            state: Bursts | Latest = self.known[key]
            state.note([message], leading=self.policy.leading)
            known = self.live[key].get(by)
            due[message] = looked_at(self.now if known is None else known.due, self.now)
        keys = {message: key for message, (key, _) in waiting.items()}
        self.rows.stand_by(due, keys)
        self.later += due.values()
        self._save({key for key, _ in waiting.values()})

    def _supersede(self, delivered: Mapping[str, int]) -> None:
        """By key, these messages start: what has stood by for them goes."""
        gone: dict[int, Discard] = {}
        left = {
            key: self._range(self.known[key], message)
            for key, message in delivered.items()
            if self.known[key].standby
        }
        kept: dict[str, int] = {}
        for each, key in self._read_on(left):
            gone[each] = Discard(SUPERSEDED, delivered[key])
            kept[key] = each
        rest = [message for key, message in kept.items() if key in left]
        self._look_on(rest)
        for message in rest:
            del gone[message]
        self._discard(gone)
        self._note_left(delivered, left)

    def _discard(self, gone: Mapping[int, Discard]) -> None:
        self.rows.discard(gone, keep=self.keep, keys=self.key_of)

    def refused(self, messages: Mapping[str, int]) -> None:
        """By key, a throttle has refused these messages: what has stood by for them goes, too."""
        self._load(messages.keys())
        ended = {k: i for k, i in messages.items() if i in self.known[k].waiting}
        self._supersede(ended)
        self._save(ended)

    def _note_left(self, delivered: Mapping[str, int], left: Iterable[str]) -> None:
        left = set(left)
        for key, message in delivered.items():
            state = self.known[key]
            state.over = message if key in left else None
            # What stands by for an older one has gone with this one, unless the first of each burst
            # is delivered.
            others = (i != message if self.policy.leading else i > message for i in state.waiting)
            state.standby = key in left or (state.standby and any(others))

    def _read_on(self, left: dict[str, tuple[int, int]]) -> list[tuple[int, str]]:
        """What stands by in the ranges `left`, and its keys; those that were read to their end are
        removed from `left`.
        """
        if not left:
            return []
        found, whole = self.rows.standby_of(left)
        for key in whole:
            del left[key]
        return [(each.id, key) for each, key in self._keyed(found)]

    def _keyed(self, found: Iterable[Standing]) -> list[tuple[Standing, str]]:
        keyed = [(each, each.key) for each in found if each.key is not None]
        self.key_of |= {each.id: key for each, key in keyed}
        return keyed

    def _look_on(self, messages: Iterable[int]) -> None:
        """Let the next claim look at these, and so at the rest of their keys."""
        due = dict.fromkeys(messages, self.now)
        self.looked_on |= due.keys()
        self.rows.stand_by(due, self.key_of)
        self.more |= bool(due)

    def _range(self, state: Bursts | Latest, message: int) -> tuple[int, int]:
        """Between which ids the messages are that stand by for `message`."""
        if not self.policy.leading:
            return 0, message
        others = [each for each in state.chosen if each != message]
        low = message if any(each < message for each in others) else 0
        return low, min((each for each in others if each > message), default=NEWEST)

    def _save(self, keys: Iterable[str]) -> None:
        states: dict[str, tuple[Any, int]] = {}
        for key in keys:
            state = self.known[key]
            end = state.end if isinstance(state, Bursts) and state.start is not None else 0
            info = self.policy.dump(state)
            states[key] = info, forgotten_at(info, max(end, self.now) + self.policy.window)
        self.rows.keep(burst_scope(self.rows.queue), states)


class BurstHeads(KeyHeads):
    """Debounce: deliver one message of each key at a time, in the order of its bursts."""

    def choose(self, due: Sequence[Due], limit: int) -> list[int]:
        """Up to `limit` of the messages (id, key, due time) to deliver now; the others get a later
        due time.
        """
        due = self._read_due(due)
        chosen: list[int] = []
        taken: set[str] = set()
        waiting: dict[int, int | None] = {}
        for message, key, _ in due:
            live = {} if key is None else self.live[key]
            turn = None if key is None else self.known[key].next(set(live))
            if key in taken or (turn is not None and turn != message):
                waiting[message] = self.now + pause_behind(live.get(turn or 0), self.now)
            elif len(chosen) < limit:
                chosen.append(message)
                if key is not None:
                    taken.add(key)
        self._put_off(due, waiting)
        return chosen

    def delivered(self, rows: Sequence[ClaimedMessage]) -> None:
        """`rows` have been leased: they have left their bursts."""
        started: dict[str, int] = {}
        keys: set[str] = set()
        for row in rows:
            key = row.policy_key
            if key is not None and key in self.known:
                keys.add(key)
                if row.id != self.known[key].current:
                    started[key] = row.id
        self._supersede(started)
        for row in rows:
            if row.policy_key in keys:
                self.known[row.policy_key].delivered(row.id)
        self._save(keys)


class NewestHeads(KeyHeads):
    """KeepLast: of each key the newest message, when its window is over and none runs."""

    def choose(self, due: Sequence[Due], limit: int) -> list[int]:
        """Up to `limit` of the messages (id, key, due time) to deliver now; the others stand by, or
        get a later due time.
        """
        due = self._read_due(due)
        turns = self._turns()
        chosen: list[int] = []
        waiting: dict[int, int | None] = {}
        older = _superseded(turns)
        for message, key, _ in due:
            turn = turns.get(key or "", Turn(message))
            if (at := self._waits_until(turn, key, message)) is not None:
                waiting[message] = at
            elif key is not None and turn.goes is not None and turn.goes != message:
                # Perhaps it is not known here: another policy, or an operator, has left it.
                older[message] = key, turn.goes
            elif len(chosen) < limit:
                chosen.append(message)
        self._wait_for_others(older)
        self._put_off(due, waiting)
        return chosen

    def _wait_for_others(self, older: Mapping[int, tuple[str, int]]) -> None:
        """Let those stand by in whose place another one is delivered."""
        for message, (key, _) in older.items():
            latest = self.known[key]
            if latest.first == message:
                latest.first = None
        self._stand_by(older)

    def delivered(self, rows: Sequence[ClaimedMessage]) -> None:
        """`rows` have been leased: their windows begin, and what they replace goes."""
        started = {
            row.policy_key: row.id
            for row in rows
            if row.policy_key is not None and row.policy_key in self.known
        }
        self._supersede(started)
        for key, message in started.items():
            self.known[key].delivered(message, self.now)
        self._save(started)

    def _turns(self) -> dict[str, Turn]:
        assert isinstance(self.policy, KeepLast)  # noqa: S101 - only its heads are these
        turns: dict[str, Turn] = {}
        for key, latest in self.known.items():
            states = {message: live.state for message, live in self.live[key].items()}
            turns[key] = next_turn(self.policy, latest, states, self.now)
        return turns

    def _waits_until(self, turn: Turn, key: str | None, message: int) -> int | None:
        """When to look at `message` again, which is due; None: it need not wait."""
        if turn.waits_for is not None and key is not None:
            return self.now + pause_behind(self.live[key].get(turn.waits_for), self.now)
        if turn.goes == message:
            return turn.not_before if turn.not_before > self.now else None
        if turn.goes is not None and message > turn.goes:
            return self.now + max(SHORTEST_BURST_RECHECK, self.policy.window)
        return None


def pause_behind(before: Live | None, now: int) -> int:
    """How long to put off what waits for the message `before`."""
    if before is None:
        return SHORTEST_BURST_RECHECK
    pause = before.due - now if before.acquired is None else now - before.acquired
    if before.state != "PROCESSING":
        # It cannot settle before it has been claimed.
        return min(max(SHORTEST_BURST_RECHECK, pause), BURST_WAIT_LIMIT)
    return min(max(SHORTEST_BURST_RECHECK, pause), LONGEST_BURST_RECHECK)


def _superseded(turns: Mapping[str, Turn]) -> dict[int, tuple[str, int]]:
    """Of messages in whose place another one is delivered, their keys and that one."""
    return {
        message: (key, by) for key, turn in turns.items() for message, by in turn.superseded.items()
    }


def _stands_by(live: Live) -> bool:
    return stands_by(live.due, live.marks)
