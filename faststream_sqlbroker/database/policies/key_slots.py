"""The slots of each key at a claim: for a Throttle by key whose messages wait.

Messages of a key without a slot stay where they are, and nothing is written to them. So an
urgent message goes first, an expired message takes no slot, and a changed rate holds from the
next claim on. Messages that wait for a slot must not be read again and again: if the oldest due
messages have none, the claim reads keys instead, by the time at which each has its next slot
(`due_at` of its state).

Times are microseconds since 1970.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.core.policies.flags import SLOT
from faststream_sqlbroker.core.policies.live_rates import SlotLogKey
from faststream_sqlbroker.core.policies.slot_log import SlotLog
from faststream_sqlbroker.database.parts.ordered import Key
from faststream_sqlbroker.database.policies.intake import FULL_SCAN_INTERVAL, Intake
from faststream_sqlbroker.database.policies.rows import SCAN_SIZE, QueuedMessage, as_key
from faststream_sqlbroker.database.policies.slot_use import SlotLogs

OVERLAP = MICROSECONDS // 10
"""Microseconds by which a scan for arrivals overlaps the last one: most publishes are committed
sooner than that after their due time.
"""
PASS_SHARE = 5
"""A pass over all keys is followed by a pause of this many times its duration."""


@dataclass(eq=False)
class MessageSlots:
    """The slots that messages of a queue take in a claim, under the queue's lock.

    They are slots of the queue or of keys.
    """

    intake: Intake
    policy: Throttle
    shared: SlotLogs
    scope: str
    """The scope in which taken slots are stored."""
    first: int
    until: int
    """Slots from `first` to this time are granted now."""
    _logs: dict[str, SlotLog] = field(default_factory=dict, init=False)
    """The logs as stored."""
    _trial: dict[str, SlotLog] = field(default_factory=dict, init=False)
    """The logs with the slots taken by this claim."""
    _granted: dict[int, tuple[str, int]] = field(default_factory=dict, init=False)
    """Keys and slots of the messages that may start; not stored before they are leased."""
    _stored: dict[str, int | None] = field(default_factory=dict, init=False)

    def load_keys(self, keys: Iterable[Key]) -> None:
        """Load the slot logs of `keys`: the recent starts, from which the next slot follows.

        Keys that were loaded before are not read again. A key without a stored log has an empty
        log.
        """
        names = {name for key in keys if (name := as_key(key)) is not None}
        missing = names - self._logs.keys()
        states = self.intake.rows.load_states(self.scope, missing)
        for key in missing:
            info = states.get(key)
            self._logs[key] = self.shared.load(self.policy, (self.scope, key), info)
            self._stored[key] = info.get("next") if isinstance(info, dict) else None

    def select_on_time(
        self, selected: Sequence[int], queued: Mapping[int, QueuedMessage], limit: int
    ) -> list[int]:
        """Return up to `limit` of `selected` that may start now.

        Each takes a slot of its key, a time at which the Throttle lets one message start, unless
        the message has expired or has no key.
        """
        keys = {
            message: self._get_key(queued[message].key) for message in selected if message in queued
        }
        self.load_keys(key for key in keys.values() if key is not None)
        starting: list[int] = []
        for message, key in keys.items():
            if len(starting) == limit:
                break
            if key is not None and not queued[message].expired:
                log = self._trial.setdefault(key, self._logs[key].copy())
                if (slot := self._grant_slot(log)) > self.until:
                    self._record_wait(slot, message)
                    continue
                self._granted[message] = key, slot
            starting.append(message)
        return starting

    def get_slot(self, message: int) -> tuple[int, SlotLogKey] | None:
        """Return the slot, scope and key of a starting message, or None if no slot is needed.

        Scope and key name the log of starts in which the slot counts.
        """
        if (key_slot := self._granted.get(message)) is None:
            return None
        key, at = key_slot
        return at, (self.scope, key)

    def _get_key(self, key: str | None) -> str | None:
        return key if self.policy.key else ""

    def _grant_slot(self, log: SlotLog) -> int:
        """Return the next slot of a key, and update `log` if the slot is granted now.

        A slot after `until` is not granted: the message does not start in this claim. A granted
        slot is logged at the latest time at which its message may start, so that no period gets too
        many starts.
        """
        slot = self.policy.next_slot(log, self.first)
        if slot <= self.until:
            log.add(slot, slot + self.shared.max_delay)
        return slot

    def _record_wait(self, slot: int, message: int | None = None) -> None:
        """Record that the key of `message` has no slot before `slot`."""
        raise NotImplementedError

    def _record_starts(self, started: Mapping[int, int]) -> tuple[dict[str, list[int]], set[str]]:
        """Add the start times of `started`, the leased messages, to the logs of their keys.

        A slot counts only now: another transaction may have locked a selected message.

        Returns:
            The added times by key, and the keys with uses to report.
        """
        shared = self.shared
        self.load_keys(shared.use.take_reportable_keys(self.scope, self.policy, self._logs))
        self._trial.clear()
        spent = defaultdict(list)
        for message, at in started.items():
            # Expired messages and messages without a key have taken no slot.
            if message in self._granted:
                key = self._granted[message][0]
                self._logs[key].add(at, at + shared.max_delay)
                spent[key].append(at)
        return spent, {key for scope, key in shared.changed if scope == self.scope}


@dataclass(eq=False)
class KeySlots(MessageSlots):
    """The keys of a queue whose messages wait for slots."""

    _key_logs: dict[str, SlotLog] = field(default_factory=dict, init=False)
    _indexed: bool = field(default=False, init=False)
    _idle: set[str] = field(default_factory=set, init=False)
    has_selected: bool = field(default=False, init=False)
    """True once messages were selected."""
    next_slot: int | None = field(default=None, init=False)
    """The first slot of a key that has none now; None if no waiting key is known."""

    def get_next_slot(self, key: str) -> int:
        """Return the first slot of a key that was loaded."""
        return self.policy.next_slot(self._trial.get(key, self._logs[key]), self.first)

    def is_open(self, key: Key | None) -> bool:
        """Return True if a message of the key may start now; without a key always.

        Otherwise notes the key's next slot, as the next claim may be due then.
        """
        if (name := as_key(key)) is None:
            return True
        if (slot := self.get_next_slot(name)) <= self.until:
            return True
        self._record_wait(slot)
        return False

    def admit(self, key: Key) -> bool:
        """Admit another message of the key; return False if the key has no further slot now.

        `HeadSearch`, the search by keys, calls this to count the messages that it finds. It uses
        copies of the logs: the slots themselves are taken later, by `select_on_time`.
        """
        if (name := as_key(key)) is None:
            return True
        if not self.is_open(name):
            return False
        # The messages admitted before in this search take slots of the key, too.
        log = self._key_logs.setdefault(name, self._logs[name].copy())
        if (slot := self._grant_slot(log)) > self.until:
            self._record_wait(slot)
            return False
        return True

    def reset_admitted(self) -> None:
        """Forget the admitted messages."""
        self._key_logs.clear()

    def select_on_time(
        self, selected: Sequence[int], queued: Mapping[int, QueuedMessage], limit: int
    ) -> list[int]:
        """Select as `MessageSlots`; messages without a slot stay unchanged."""
        self.has_selected = True
        return super().select_on_time(selected, queued, limit)

    def _record_wait(self, slot: int, message: int | None = None) -> None:  # noqa: ARG002
        self.next_slot = slot if self.next_slot is None else min(self.next_slot, slot)

    def use_index(self) -> None:
        """From now on, store the time of the next check of each loaded key.

        A claim calls this when the oldest due messages have no slot. It then finds keys by that
        time, which is in an index, instead of reading the same messages again.
        """
        if self._indexed:
            return
        self._indexed = True
        intake = self.intake
        if intake.queue not in intake.position.indexed:
            # The stored times may be from another rate. A process has one rate, so it resets them
            # once.
            intake.rows.mark_keys_due(self.scope)
            intake.position.indexed.add(intake.queue)

    def mark_idle(self, keys: Iterable[Key]) -> None:
        """Skip `keys`, which have no due message now, in checks until a message is due.

        Their states lose the time of the check; `scan_arrivals` finds their next message. A key
        that kept the time would fill the page of every following claim.
        """
        idle_keys = list(keys)
        self.load_keys(idle_keys)  # `save` writes the states of loaded keys
        self._idle |= {name for key in idle_keys if (name := as_key(key)) is not None}

    def scan_arrivals(self) -> tuple[list[int], bool]:
        """Return messages that have become due since the last scan, and True if there are more.

        Used with the index of keys: a key that had no due message has no time of a check, so only
        this scan finds its new message.
        """
        intake = self.intake
        ids: list[int] = []
        has_more = False
        for pair in intake.pairs:
            position_key = intake.queue, pair.priority, SLOT
            since = intake.position.ended_at.get(position_key, intake.now) - OVERLAP
            rows = intake.rows.list_arrivals(
                pair.priority,
                required_flags=intake.passed_flags,
                missing_flag=0,
                since=since,
            )
            ids += [row.id for row in rows if not row.expired]
            is_complete = len(rows) < SCAN_SIZE
            # If more messages than a scan reads have the same due time, the pass over all keys
            # finds the rest.
            must_continue = not is_complete and rows[-1].due - OVERLAP > since
            intake.position.ended_at[position_key] = rows[-1].due if must_continue else intake.now
            has_more = has_more or must_continue
        return ids, has_more

    def start_full_pass(self) -> bool:
        """Start a pass over all keys if a pass is due; return True if so.

        Such a pass finds messages that were committed late or came back with their old due time.
        The pause after a pass grows with its duration: on a large queue, passes must not take most
        of the time.
        """
        position = self.intake.position
        now = self.intake.clock.monotonic()
        # Called again only when the pages of the last pass are read, so that pass has ended.
        if (started_at := position.pass_started_at.pop(self.intake.queue, None)) is not None:
            pause = max(FULL_SCAN_INTERVAL, PASS_SHARE * (now - started_at))
            position.next_pass_at[self.intake.queue] = now + pause
        if now < position.next_pass_at.get(self.intake.queue, 0.0):
            return False
        position.pass_started_at[self.intake.queue] = now
        return True

    def find_next_check(self) -> int | None:
        """Return when a key is to be checked again, or None if no key waits.

        With the index, keys that this claim has not read count too, by their stored times.
        """
        if self._indexed:
            at = self.intake.rows.find_next_due(self.scope)
            if at is not None:
                self._record_wait(at)
        return self.next_slot

    def save(self, started: Mapping[int, int]) -> None:
        """Store the starts of this claim, reports of earlier slots, and the next checks of keys.

        Called at the end of a claim; `started` has the start times of the leased messages. A key
        whose log and next check are unchanged is not written: there may be many.
        """
        if not self.has_selected:
            return
        spent, reported = self._record_starts(started)
        states = {}
        due: dict[str, int | None] = {}
        for key in {*spent, *reported, *(self._logs if self._indexed else ())}:
            log = self._logs[key]
            next_check = None
            if key not in self._idle or key in spent:
                next_check = self._compute_next_slot(key, spent.get(key, ()))
            if key not in spent.keys() | reported and self._is_check_stored(key, next_check):
                continue
            info, expiry = self.shared.dump(self.policy, (self.scope, key), log)
            info.pop("next", None)
            if next_check is not None:
                info["next"] = next_check
            states[key] = info, max(expiry, next_check or 0)
            due[key] = next_check
        self.intake.rows.save_states(self.scope, states, due)

    def _compute_next_slot(self, key: str, taken: Sequence[int]) -> int:
        """Return the next slot of the key after the starts in the `taken` slots.

        The log counts a start at its deadline, the latest possible time, until the worker has
        reported it. For the next check, the messages are expected to start at their slots.
        """
        log = self._logs[key]
        if taken:
            log = log.copy()
            for slot in taken:
                self.policy.report(log, slot + self.shared.max_delay, slot)
        return self.policy.next_slot(log, self.first)

    def _is_check_stored(self, key: str, at: int | None) -> bool:
        """Return True if the stored next check of the key is equivalent to `at`.

        Then `save` need not write the key.
        """
        stored = self._stored[key]
        if stored is None or at is None:
            return stored is at
        # A key that has a slot now is due for a check now, whenever its slot came.
        return stored == at or max(stored, at) <= self.until
