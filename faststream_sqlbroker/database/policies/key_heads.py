"""Debounce and KeepLast at a claim: select the message of each key that is delivered now.

Standby messages end when the newer message of their key that they stand by for has started. If
that message cannot be delivered, one standby message takes its place.

Times are microseconds since 1970.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.policies import Debounce, KeepLast
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.policies.debounce import Bursts
from faststream_sqlbroker.core.policies.flags import BURST, HELD_BURST, PERSISTENT_MASK
from faststream_sqlbroker.core.policies.keep_last import Latest, NextDelivery, find_next_delivery
from faststream_sqlbroker.core.policies.standby import (
    compute_recheck_time,
    find_replacement,
    find_target,
    has_standby_flags,
)
from faststream_sqlbroker.core.reasons import EXPIRED, SUPERSEDED
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.policies.intake import (
    Due,
    get_burst_scope,
    get_expiry,
    load_burst_states,
)
from faststream_sqlbroker.database.policies.rows import (
    SCAN_SIZE,
    PolicyRows,
    QueuedMessage,
    StandbyMessage,
)

MAX_ID = 2**63 - 1
"""Greater than every id."""
MIN_BURST_RECHECK = MICROSECONDS // 20
"""Minimum time until a waiting message is checked again (microseconds)."""
MAX_BURST_RECHECK = 2 * MICROSECONDS
"""Maximum time until a waiting message is checked again (microseconds). It is checked again after
the time for which the message before it has been running. So it waits at most twice as long as
necessary, and many waiting messages do not fill every claim.
"""
MAX_BURST_WAIT = 60 * MICROSECONDS
"""The same limit (microseconds) if the message before waits too, for example for a retry: an
operator may cancel it.
"""


@dataclass(eq=False)
class KeyHeads:
    """The keys of a queue in a claim, with waiting and standby messages."""

    policy: Debounce | KeepLast
    rows: PolicyRows
    """Used under the queue's lock."""
    now: int
    keep: bool
    """True if discarded messages are archived."""
    states: dict[str, Any] = field(default_factory=dict)
    """A `Bursts` or a `Latest` by key."""
    queued: dict[str, dict[int, QueuedMessage]] = field(default_factory=dict)
    """By key, its messages that can be delivered or are being handled."""
    key_of: dict[int, str] = field(default_factory=dict)
    """The key with which each message was read."""
    recheck_ids: set[int] = field(default_factory=set)
    next_checks: list[int] = field(default_factory=list)
    """Times at which messages are checked again."""
    has_more: bool = False
    """True if more messages remain to be checked immediately."""

    def check_standby(self, priorities: Iterable[int]) -> None:
        """Check the standby messages that are due for a check.

        A message stands by while another message of its key is to be delivered in its place. If
        that message is gone, as it expired, was cancelled or moved, the check promotes a standby
        message to be delivered. Otherwise it sets the next check.
        """
        messages: list[StandbyMessage] = []
        for priority in priorities:
            messages += self.rows.list_due_standby(priority, now=self.now, size=SCAN_SIZE)
            self.has_more |= len(messages) >= SCAN_SIZE
        by_key: dict[str, list[StandbyMessage]] = defaultdict(list)
        for message in messages:
            if message.key is not None:
                by_key[message.key].append(message)
        handled = self._load_keys(by_key, by_key) | self.recheck_ids
        next_checks = {
            message.id: self._get_next_check(key, message)
            for key, key_messages in by_key.items()
            for message in key_messages
            if message.id not in handled
        }
        keys = {message.id: message.key for message in messages if message.key is not None}
        self.rows.set_standby(next_checks, keys)
        self.next_checks += next_checks.values()
        # A message without a key cannot stand by: the policy has changed to another key, or another
        # program has removed the key.
        released = {message.id: self.now for message in messages if message.key is None}
        self.rows.shift(released, 0, PERSISTENT_MASK & ~BURST)

    def _get_next_check(self, key: str, message: StandbyMessage) -> int:
        """Return when to check a standby message again (microseconds since 1970).

        Its owner is the message that is to be delivered in its place. The longer the owner is
        overdue, the rarer are the checks, so that many standby messages do not fill every claim.
        """
        owner = self._find_owner(key, message.id)
        waits_for = None if owner is None else self.queued[key].get(owner)
        if owner is None or waits_for is None:
            return compute_recheck_time(self.now, self.now)
        # A message that waits for the message before it, or for a slot, is deferred every few
        # seconds.
        since = max(self._get_due(self.states[key], owner), message.created)
        return compute_recheck_time(waits_for.due, self.now, max(0, self.now - since))

    def _load_due(self, due: Sequence[Due]) -> list[Due]:
        """Load the keys of the due messages; return the messages that can still be delivered.

        Messages that expired, or were promoted from standby just now with a due time of their own,
        are left out.
        """
        handled = self._load_keys(key for _, key, _ in due if key is not None)
        return [message for message in due if message[0] not in handled]

    def _load_keys(
        self, keys: Iterable[str], standby: Mapping[str, Sequence[StandbyMessage]] | None = None
    ) -> set[int]:
        """Load the states of `keys`; return the ids of messages that were promoted or have ended.

        Called before messages of the keys are selected or checked. A message that can no longer be
        delivered gives its place to a message that stands by for it, and expired messages end. The
        caller skips the returned messages: their due times have changed, or they are gone.
        """
        keys = set(keys)
        standby = standby or {}
        self._load_states(keys)
        self._load_queued()
        expired = self._find_expired()
        changed = {self.key_of[message] for message in expired}
        for message in expired:
            del self.queued[self.key_of[message]][message]
        vacant_keys = [key for key in keys if self._needs_replacement(key, standby.get(key, ()))]
        promoted = self._fill_vacancies(vacant_keys, expired)
        self._discard(expired)
        # Saving also extends the expiry of the checked keys.
        self._save_states(changed | set(vacant_keys) | standby.keys())
        return promoted | expired.keys()

    def _load_queued(self) -> None:
        """Load the messages that the loaded states refer to, and that are still in the queue.

        A state may list messages that have ended or moved since. Sets `key_of` for all that still
        exist, and `queued` without standby messages: those are not delivered.
        """
        ids = {i for state in self.states.values() for i in state.list_messages()}
        messages = self.rows.load_messages(ids)
        self.key_of = {i: message.key for i, message in messages.items() if message.key is not None}
        # A message whose key has changed no longer belongs to this key, though both keys may refer
        # to it.
        self.queued = {
            key: {
                i: messages[i]
                for i in state.list_messages()
                if i in messages and messages[i].key == key and not _is_standby(messages[i])
            }
            for key, state in self.states.items()
        }

    def _load_states(self, keys: Iterable[str]) -> None:
        stored = load_burst_states(self.rows, self.policy, keys, self.now)
        self.states = {key: self.policy.load(stored.get(key)) for key in keys}

    def _find_expired(self) -> dict[int, Discard]:
        """Return the waiting messages of the loaded keys that have expired, with their outcome.

        The caller ends them, and standby messages take their places. Leased messages are not among
        them: their handlers run.
        """
        return {
            message: Discard(EXPIRED)
            for key, queued in self.queued.items()
            for message in self.states[key].waiting
            if (row := queued.get(message)) is not None
            and row.expired
            and row.state != "PROCESSING"
        }

    def _needs_replacement(self, key: str, standby: Sequence[StandbyMessage]) -> bool:
        """Return True if a standby message of `key` may have to be promoted or discarded.

        A standby message waits in case the message that is delivered in its place, its owner, is
        not. True if a message to deliver is gone, or if a message in `standby` has expired, or its
        owner was delivered or is unknown. Then `_fill_vacancies` reads the standby messages of the
        key.
        """
        state = self.states[key]
        state.standby |= bool(standby)
        finished_owners = None, state.over
        if any(
            message.expired or self._find_owner(key, message.id) in finished_owners
            for message in standby
        ):
            return True
        return state.standby and any(i not in self.queued[key] for i in state.waiting)

    def _find_owner(self, key: str, message: int) -> int | None:
        return find_target(self.states[key].targets, message, leading=self.policy.leading)

    def _fill_vacancies(self, keys: Sequence[str], discarded: dict[int, Discard]) -> set[int]:
        """Promote standby messages in place of messages that are gone; return the promoted ids.

        A vacancy is a message that was to be delivered, and has expired or was cancelled or moved.
        Promoted messages get a real due time, and are delivered like any other. Adds messages that
        end to `discarded`, which the caller writes.
        """
        if not keys:
            return set()
        by_key, complete_keys = self._load_standby(keys, discarded)
        due: dict[int, int] = {}
        for key, ids in by_key.items():
            self.has_more |= key not in complete_keys
            if ids or key in complete_keys:
                self._promote_standby(key, ids, due, discarded, complete=key in complete_keys)
                remaining = set(ids) - due.keys() - discarded.keys()
                self.states[key].standby &= bool(remaining) or key not in complete_keys
        # Promoted messages get their real due times again.
        self.rows.shift(
            due,
            BURST | HELD_BURST,
            PERSISTENT_MASK | HELD_BURST,
            keys=self.key_of,
        )
        self.next_checks += due.values()
        for message, queued_message in self.rows.load_messages(due).items():
            if queued_message.key in self.queued and not _is_standby(queued_message):
                self.queued[queued_message.key][message] = queued_message
        return set(due)

    def _load_standby(
        self, keys: Sequence[str], discarded: dict[int, Discard]
    ) -> tuple[dict[str, list[int]], set[str]]:
        """Return up to `SCAN_SIZE` standby messages by key, and the keys that were read fully.

        Expired messages go to `discarded` instead. If the newest message of a key is delivered, the
        newest standby messages are read first, as one of them is the replacement.
        """
        ranges = dict.fromkeys(keys, (0, MAX_ID))
        last = not self.policy.leading
        messages, complete_keys = self.rows.list_standby_by_keys(ranges, last=last)
        by_key: dict[str, list[int]] = {key: [] for key in keys}
        for message, key in self._filter_keyed(messages):
            if message.expired:
                discarded[message.id] = Discard(EXPIRED)
            else:
                by_key[key].append(message.id)
        return by_key, complete_keys

    def _promote_standby(
        self,
        key: str,
        standby: list[int],
        due: dict[int, int],
        discarded: dict[int, Discard],
        *,
        complete: bool,
    ) -> None:
        """Promote or supersede standby messages of `key`, and update the state of the key.

        Messages that stood by for the delivered message are superseded. A message that is gone is
        replaced by the newest (leading edge: oldest) message that stood by for it. Adds promoted
        messages to `due` and others to `discarded`. `standby` has the standby messages that were
        read: all of the key if `complete`.
        """
        state = self.states[key]
        leading = self.policy.leading
        by_owner: dict[int | None, list[int]] = defaultdict(list)
        for message in standby:
            by_owner[self._find_owner(key, message)].append(message)
        superseded = by_owner.pop(state.over, []) if state.over is not None else []
        if len(superseded) > 1 and not complete:
            # The next claim finds the rest of the key by this message.
            self._schedule_recheck([superseded.pop()])
        discarded |= {message: Discard(SUPERSEDED, state.over) for message in superseded}
        for old in list(state.waiting):
            if old not in self.queued[key]:
                successor = find_replacement(by_owner.get(old, []), leading=leading)
                state.replace(old, successor)
                if successor is not None:
                    due[successor] = max(self.now, self._get_due(state, successor))
        # Messages whose owner is unknown: the state does not list it any more.
        successor = find_replacement(by_owner.get(None, []), leading=leading)
        if successor is not None:
            state.adopt(successor)
            due[successor] = max(self.now, self._get_due(state, successor))

    def _get_due(self, state: Bursts | Latest, message: int) -> int:
        """Return the due time of `message` as the next delivery of the key; 0 means now.

        Only the newest message of a key waits: until its burst (Debounce) or window (KeepLast)
        ends.
        """
        if message != state.newest:
            return 0
        if isinstance(state, Bursts):
            return state.end
        return state.get_opening_time(self.policy) if isinstance(self.policy, KeepLast) else 0

    def _defer(self, due: Sequence[Due], waiting: Mapping[int, int | None]) -> None:
        """Set the due times of the `waiting` messages of `due`.

        A deferred message stays the next of its key, but is not delivered yet: another message of
        its key goes first, or its window has not ended.
        """
        # A deferred message gives up its slot, which would be for another time.
        flags = HELD_BURST, PERSISTENT_MASK | HELD_BURST
        keys = {message: key for message, key, _ in due}
        self.rows.shift(waiting, *flags, keys=keys)
        self.next_checks += [at for at in waiting.values() if at is not None]

    def _set_standby(self, waiting: Mapping[int, tuple[str, int]]) -> None:
        """Put messages on standby, each for another message of the same key.

        `waiting` has the key of each message, and the message that is delivered in its place: its
        owner. The first check is when the owner is due.
        """
        due: dict[int, int] = {}
        for message, (key, owner) in waiting.items():
            state: Bursts | Latest = self.states[key]
            state.record_standby([message], leading=self.policy.leading)
            queued_owner = self.queued[key].get(owner)
            due[message] = compute_recheck_time(
                self.now if queued_owner is None else queued_owner.due, self.now
            )
        keys = {message: key for message, (key, _) in waiting.items()}
        self.rows.set_standby(due, keys)
        self.next_checks += due.values()
        self._save_states({key for key, _ in waiting.values()})

    def _supersede(self, delivered: Mapping[str, int]) -> None:
        """Discard the messages that stood by for `delivered`, the starting messages by key.

        If a key has more standby messages than one statement reads, the last that was read stays,
        due for a check now: the next claim finds the key by it, and discards the rest.
        """
        discarded: dict[int, Discard] = {}
        ranges = {
            key: self._get_standby_range(self.states[key], message)
            for key, message in delivered.items()
            if self.states[key].standby
        }
        last_ids: dict[str, int] = {}
        for superseded_id, key in self._load_ranges(ranges):
            discarded[superseded_id] = Discard(SUPERSEDED, delivered[key])
            last_ids[key] = superseded_id
        deferred = [message for key, message in last_ids.items() if key in ranges]
        self._schedule_recheck(deferred)
        for message in deferred:
            del discarded[message]
        self._discard(discarded)
        self._update_standby_flags(delivered, ranges)

    def _discard(self, discarded: Mapping[int, Discard]) -> None:
        self.rows.discard(discarded, keep=self.keep, keys=self.key_of)

    def handle_refused(self, messages: Mapping[str, int]) -> None:
        """Discard the messages that stood by for messages refused by a throttle, given by key.

        The throttle has ended those messages, so their burst is over: no message takes their place.
        """
        self._load_states(messages.keys())
        waiting = {k: i for k, i in messages.items() if i in self.states[k].waiting}
        self._supersede(waiting)
        self._save_states(waiting)

    def _update_standby_flags(
        self, delivered: Mapping[str, int], unfinished_keys: Iterable[str]
    ) -> None:
        """Record for the delivered keys whether standby messages remain, after `_supersede`.

        Of a key in `unfinished_keys` not all were read: its state keeps the delivered message as
        `over`, so that the next claim supersedes the others. The flag `standby` saves later claims
        the search for standby messages in keys that have none.
        """
        unfinished_keys = set(unfinished_keys)
        for key, message in delivered.items():
            state = self.states[key]
            state.over = message if key in unfinished_keys else None
            # Messages that stand by for an older message have gone with this one, unless the first
            # message of each burst is delivered.
            is_other_target = (
                i != message if self.policy.leading else i > message for i in state.waiting
            )
            state.standby = key in unfinished_keys or (state.standby and any(is_other_target))

    def _load_ranges(self, ranges: dict[str, tuple[int, int]]) -> list[tuple[int, str]]:
        """Return the standby messages in `ranges`, with their keys.

        Removes the keys that were read completely from `ranges`: what remains there has more
        messages.
        """
        if not ranges:
            return []
        messages, complete_keys = self.rows.list_standby_by_keys(ranges)
        for key in complete_keys:
            del ranges[key]
        return [(message.id, key) for message, key in self._filter_keyed(messages)]

    def _filter_keyed(self, messages: Iterable[StandbyMessage]) -> list[tuple[StandbyMessage, str]]:
        """Return the messages that have a key, with the key, and remember the keys in `key_of`."""
        pairs = [(message, message.key) for message in messages if message.key is not None]
        self.key_of |= {message.id: key for message, key in pairs}
        return pairs

    def _schedule_recheck(self, messages: Iterable[int]) -> None:
        """Let the next claim check `messages`, and so the rest of their keys.

        Called with one message of each key that has more standby messages than a statement reads.
        """
        due = dict.fromkeys(messages, self.now)
        self.recheck_ids |= due.keys()
        self.rows.set_standby(due, self.key_of)
        self.has_more |= bool(due)

    def _get_standby_range(self, state: Bursts | Latest, message: int) -> tuple[int, int]:
        """Return the range of ids that can stand by for `message`.

        Usually these are all older messages. With a leading edge the first message of a burst is
        delivered, so the newer messages up to the next delivered or waiting message stand by for
        it.
        """
        if not self.policy.leading:
            return 0, message
        other_owners = [other for other in state.targets if other != message]
        low = message if any(other < message for other in other_owners) else 0
        return low, min((other for other in other_owners if other > message), default=MAX_ID)

    def _save_states(self, keys: Iterable[str]) -> None:
        """Store the states of `keys`, with their expiries.

        A state is needed until its burst has ended and one more window has passed: until then a
        late message may still belong to it.
        """
        states: dict[str, tuple[Any, int]] = {}
        for key in keys:
            state = self.states[key]
            end = state.end if isinstance(state, Bursts) and state.start is not None else 0
            info = self.policy.dump(state)
            states[key] = info, get_expiry(info, max(end, self.now) + self.policy.window)
        self.rows.save_states(get_burst_scope(self.rows.queue), states)


class BurstHeads(KeyHeads):
    """Debounce: delivers a single message of each key at a time, in the order of bursts."""

    def select(self, due: Sequence[Due], limit: int) -> list[int]:
        """Return up to `limit` of the `due` messages to deliver now; defer all other messages.

        A key has one message at a time: its next message waits until that one has settled. Messages
        above `limit` stay due, for the next claim.
        """
        due = self._load_due(due)
        selected: list[int] = []
        used_keys: set[str] = set()
        waiting: dict[int, int | None] = {}
        for message, key, _ in due:
            queued = {} if key is None else self.queued[key]
            next_message = None if key is None else self.states[key].find_next(set(queued))
            if key in used_keys or (next_message is not None and next_message != message):
                delay = compute_recheck_delay(queued.get(next_message or 0), self.now)
                waiting[message] = self.now + delay
            elif len(selected) < limit:
                selected.append(message)
                if key is not None:
                    used_keys.add(key)
        self._defer(due, waiting)
        return selected

    def handle_delivered(self, rows: Sequence[ClaimedMessage]) -> None:
        """Remove the leased `rows` from their bursts, and discard the superseded messages.

        Called after the leases, with the rows whose handlers start. A retry of the message
        delivered last supersedes none: it has left its burst.
        """
        started: dict[str, int] = {}
        keys: set[str] = set()
        for row in rows:
            key = row.policy_key
            if key is not None and key in self.states:
                keys.add(key)
                if row.id != self.states[key].current:
                    started[key] = row.id
        self._supersede(started)
        for row in rows:
            if row.policy_key in keys:
                self.states[row.policy_key].record_delivery(row.id)
        self._save_states(keys)


class LatestHeads(KeyHeads):
    """KeepLast: delivers the latest message of each key when the window is over and none runs."""

    def select(self, due: Sequence[Due], limit: int) -> list[int]:
        """Return up to `limit` of the `due` messages to deliver now.

        Of each key, the message that KeepLast delivers next is selected; older messages go on
        standby, and messages that must wait for it, or for the end of the window, are deferred.
        """
        due = self._load_due(due)
        deliveries = self._compute_turns()
        selected: list[int] = []
        waiting: dict[int, int | None] = {}
        older = _find_superseded(deliveries)
        for message, key, _ in due:
            delivery = deliveries.get(key or "", NextDelivery(message))
            if (wait_end := self._get_wait_end(delivery, key, message)) is not None:
                waiting[message] = wait_end
            elif key is not None and delivery.message is not None and delivery.message != message:
                # The state may not contain this message: another policy, or an operator, has left
                # it.
                older[message] = key, delivery.message
            elif len(selected) < limit:
                selected.append(message)
        self._set_older_standby(older)
        self._defer(due, waiting)
        return selected

    def _set_older_standby(self, older: Mapping[int, tuple[str, int]]) -> None:
        """Put `older` messages on standby, each for the message that replaces the older message.

        They are not discarded yet: if the replacing message cannot be delivered, an older message
        takes its place.
        """
        for message, (key, _) in older.items():
            latest = self.states[key]
            if latest.first == message:
                latest.first = None
        self._set_standby(older)

    def handle_delivered(self, rows: Sequence[ClaimedMessage]) -> None:
        """Start the windows of the leased `rows`, and discard the replaced messages.

        Called after the leases, with the rows whose handlers start. Until its window ends, no newer
        message of the key is delivered.
        """
        started = {
            row.policy_key: row.id
            for row in rows
            if row.policy_key is not None and row.policy_key in self.states
        }
        self._supersede(started)
        for key, message in started.items():
            self.states[key].record_delivery(message, self.now)
        self._save_states(started)

    def _compute_turns(self) -> dict[str, NextDelivery]:
        """Decide for each loaded key which message KeepLast delivers next, and when.

        A message that is running, or a window that has not ended, delays the delivery.
        """
        assert isinstance(self.policy, KeepLast)  # noqa: S101 - only its heads are these
        deliveries: dict[str, NextDelivery] = {}
        for key, latest in self.states.items():
            states = {message: queued.state for message, queued in self.queued[key].items()}
            deliveries[key] = find_next_delivery(self.policy, latest, states, self.now)
        return deliveries

    def _get_wait_end(self, turn: NextDelivery, key: str | None, message: int) -> int | None:
        """Return when to check the due `message` of `key` again, or None without a wait.

        `turn` is the decision about its key. The message waits for a running message of the key,
        for the end of the window, or for an older message that goes first.
        """
        if turn.waits_for is not None and key is not None:
            return self.now + compute_recheck_delay(self.queued[key].get(turn.waits_for), self.now)
        if turn.message == message:
            return turn.not_before if turn.not_before > self.now else None
        if turn.message is not None and message > turn.message:
            return self.now + max(MIN_BURST_RECHECK, self.policy.window)
        return None


def compute_recheck_delay(previous: QueuedMessage | None, now: int) -> int:
    """Return for how long to defer a message that waits for `previous` (microseconds).

    `previous` is the message of its key that goes first; None if it is gone. The delay is as long
    as `previous` has been running, so that waiting messages do not fill every claim. A `previous`
    that waits itself, as for a retry, is checked when it is due, but at least once a minute.
    """
    if previous is None:
        return MIN_BURST_RECHECK
    pause = previous.due - now if previous.acquired is None else now - previous.acquired
    if previous.state != "PROCESSING":
        # The previous message cannot settle before it has been claimed.
        return min(max(MIN_BURST_RECHECK, pause), MAX_BURST_WAIT)
    return min(max(MIN_BURST_RECHECK, pause), MAX_BURST_RECHECK)


def _find_superseded(turns: Mapping[str, NextDelivery]) -> dict[int, tuple[str, int]]:
    """Return the key and the successor of each superseded message.

    The successor is the newer message of the key that is delivered in its place.
    """
    return {
        message: (key, successor)
        for key, turn in turns.items()
        for message, successor in turn.superseded.items()
    }


def _is_standby(message: QueuedMessage) -> bool:
    return has_standby_flags(message.due, message.flags)
