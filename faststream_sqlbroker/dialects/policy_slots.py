"""The slots of Throttle at a claim: how many may start, from when on, and what is noted of it.

Times are microseconds since 1970.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

from sqlalchemy import Connection

from faststream_sqlbroker.core.policies import Policy, Throttle
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.policies.throttle import AHEAD, dump_slots, first_slot, load_slots, next_slots
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.dialects.policy_intake import slot_scope
from faststream_sqlbroker.dialects.policy_rows import PolicyRows

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Slots:
    """The throttles of one queue in one claim, under the queue's lock."""

    def __init__(
        self, rows: PolicyRows, connection: Connection, queue: str, now: int, policies: Sequence[Policy]
    ) -> None:
        """Read what is known of the queue's own slots."""
        self._rows, self._connection, self._queue, self._now = rows, connection, queue, now
        throttles = [(n, policy) for n, policy in enumerate(policies) if isinstance(policy, Throttle)]
        self._lag = min((policy.max_lag for _, policy in throttles), default=None)
        self._gates = [(n, policy) for n, policy in throttles if policy.gates]
        self._each = next((policy for _, policy in throttles if not policy.gates), None)
        self._logs = [self._log(slot_scope(queue, n)) for n, _ in self._gates]
        self._granted: list[int] | None = None
        self._again: dict[int, int] = {}

    def _log(self, scope: str) -> list[int]:
        return load_slots(self._rows.states(self._connection, scope, [""]).get(""))

    def room(self, limit: int) -> int:
        """How many of `limit` messages may start within a short time."""
        if not self._gates:
            return limit
        throttles = [policy for _, policy in self._gates]
        self._granted = next_slots(throttles, self._logs, self._now, self._now + AHEAD, limit)
        return len(self._granted)

    def next_look(self, taken: int) -> int | None:
        """When to look again, if all slots that there are were taken."""
        if self._granted is None or taken < len(self._granted):
            return None
        throttles, logs = (
            [policy for _, policy in self._gates],
            [[*log, *self._granted] for log in self._logs],
        )
        # Half of the time ahead: the claim is done before the slot has come.
        return first_slot(throttles, logs, self._now) - AHEAD // 2

    def on_time(self, chosen: Sequence[int]) -> list[int]:
        """Those of `chosen` that may start; where its own slot has passed by, a message asks for another.

        Only what is about to start asks: what waits for a worker would ask again and again.
        """
        if self._each is None or not chosen:
            return list(chosen)
        live = self._rows.live(self._connection, self._queue, chosen)
        late = {i: live[i].key for i in chosen if i in live and live[i].due < self._now - self._each.max_lag}
        if not late:
            return list(chosen)
        scope = slot_scope(self._queue)
        keys = {message: (key or "") if self._each.key else "" for message, key in late.items()}
        free = {message for message, key in late.items() if self._each.key and key is None}
        known = self._rows.states(self._connection, scope, keys.values())
        logs = {key: load_slots(known.get(key)) for key in keys.values()}
        for message, key in keys.items():
            slot = self._now if message in free else self._each.next_slot(logs[key], self._now)
            self._again[message] = slot
            if message not in free:
                logs[key].append(slot)
        kept = {
            k: (dump_slots(self._each, log), log[-1] + self._each.per + MICROSECONDS)
            for k, log in logs.items()
            if log
        }
        self._rows.keep(self._connection, scope, kept)
        put_off: dict[int, int | None] = {i: slot for i, slot in self._again.items() if slot > self._now}
        self._rows.shift(self._connection, self._queue, put_off, 0)
        return [message for message in chosen if message not in put_off]

    def give(self, rows: Sequence[ClaimedMessage]) -> None:
        """Tell each row when it may start, and note the slots that are taken."""
        starting = [row for row in rows if row.outcome is None and not _expired(row)]
        if self._lag is None or not starting:
            return
        for n, row in enumerate(starting):
            acquired, own = _microseconds(row.acquired_at), _microseconds(row.next_attempt_at)
            slot = self._again.get(row.id, own) if self._granted is None else self._granted[n]
            row.slot = (slot - acquired) / MICROSECONDS, (slot + self._lag - acquired) / MICROSECONDS
        for (number, policy), log in zip(self._gates, self._logs, strict=True):
            taken = [*log, *(self._granted or ())[: len(starting)]]
            state = dump_slots(policy, taken), taken[-1] + policy.per + MICROSECONDS
            self._rows.keep(self._connection, slot_scope(self._queue, number), {"": state})


def _expired(row: ClaimedMessage) -> bool:
    return row.expires_at is not None and row.expires_at <= row.acquired_at


def _microseconds(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1)
