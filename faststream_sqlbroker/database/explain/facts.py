"""What the policies of one queue know: read when it is asked for, once, in one snapshot.

`explain` asks about one message, `queue_policies` about many: `expect` makes the facts of many keys
one read.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Select, case, select, text

from faststream_sqlbroker.core.policies import Policy, Throttle, Window
from faststream_sqlbroker.core.policies.debounce import Bursts, waiting_in
from faststream_sqlbroker.core.policies.flags import HEADER_KEY
from faststream_sqlbroker.core.policies.keep_last import Latest
from faststream_sqlbroker.core.policies.throttle import KnownSlots, known_slots
from faststream_sqlbroker.core.status import LiveSubscriber
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts.policy_state import ONCE
from faststream_sqlbroker.database.policies.gates import SHARED_SLOTS
from faststream_sqlbroker.database.policies.intake import burst_scope, slot_scope
from faststream_sqlbroker.database.policies.rows import Live, PolicyRows
from faststream_sqlbroker.database.policies.shared_leases import SHARED_LEASES

MOST_LEASES = 10_000
"""Leases of the keys asked about that are read at most."""
P = TypeVar("P", bound=Policy)
_LEASED = text("state = 'PROCESSING' AND lease_expires_at IS NOT NULL")
"""Literals: SQLite finds a partial index by them."""


class Lease(NamedTuple):
    """A message that a subscriber has leased."""

    id: int
    key: str | None
    token: UUID


class Claimed(NamedTuple):
    """A key that `Once` has claimed."""

    info: dict[str, Any]
    created_at: datetime


class PolicyFacts:
    """The state of the policies of `queue` at the database's time `now`."""

    def __init__(
        self,
        connection: Connection,
        dialect: Dialect,
        queue: str,
        now: datetime,
        subscribers: Sequence[LiveSubscriber],
    ) -> None:
        """`connection` is used to read only; `subscribers` are the live ones of the queue."""
        self._connection = connection
        self._dialect = dialect
        self._rows = PolicyRows(dialect)
        self._running: dict[int, int] = {}
        self._shared: dict[str, int] = {}
        self._expected: set[str] = set()
        self._bursts: dict[str, Bursts] = {}
        self._slots: dict[str, KnownSlots | None] = {}
        self._live: dict[int, Live] = {}
        self._leases: dict[str, list[Lease]] = {}
        self._claimed: dict[str, Claimed | None] = {}
        self.queue = queue
        self.now = now
        self.subscribers = subscribers

    @property
    def ordered(self) -> bool:
        """Whether a live subscriber of the queue keeps the order of keys."""
        return any(subscriber.ordered for subscriber in self.subscribers)

    def policies(self, kind: type[P]) -> list[P]:
        """Those of this kind that live subscribers have, one of each text, by text."""
        return [policy for _, policy in self._numbered(kind, by_number=False)]

    def _numbered(self, kind: type[P], *, by_number: bool = True) -> list[tuple[int, P]]:
        """The same with their numbers among their like, by which their states are stored."""
        found: dict[tuple[int, str], P] = {}
        for subscriber in self.subscribers:
            like = [policy for policy in subscriber.rules if isinstance(policy, kind)]
            for number, policy in enumerate(like):
                found.setdefault((number if by_number else 0, str(policy)), policy)
        return [(number, found[number, text]) for number, text in sorted(found)]

    def expect(self, keys: Iterable[str | None]) -> None:
        """From now on, what is known of `keys` is read together."""
        self._expected |= {key for key in keys if key is not None}

    def worker(self, token: UUID | None) -> str | None:
        """The live subscriber that gave a lease this token."""
        return next((s.worker for s in self.subscribers if s.holds(token)), None)

    # -- of the queue --------------------------------------------------------------------------

    @cached_property
    def next_slots(self) -> list[tuple[Throttle, KnownSlots]]:
        """The throttles whose slots are all taken, and when each has the next."""
        found = []
        now = to_microseconds(self.now)
        for number, policy in self._numbered(Throttle):
            shared = policy.scope
            scope = slot_scope(self.queue, number) if shared is None else SHARED_SLOTS
            key = shared or ""
            slots = known_slots(self._rows.states(self._connection, scope, [key]).get(key))
            if slots is not None and slots.next > now:
                found.append((policy, slots))
        return sorted(found, key=lambda each: -each[1].next)

    def key_slots(self, key: str | None) -> list[tuple[Throttle, KnownSlots]]:
        """The throttles by key of which this key has no slot, and when it has the next."""
        by_key = [each for each in self.policies(Throttle) if each.key]
        if key is None or not by_key:
            return []
        if key not in self._slots:
            scope = slot_scope(self.queue)
            keys = {*self._expected, key}
            known = self._rows.states(self._connection, scope, keys)
            self._slots |= {each: known_slots(known.get(each)) for each in keys}
        slots = self._slots[key]
        if slots is None or slots.next <= to_microseconds(self.now):
            return []
        return [(policy, slots) for policy in by_key]

    @cached_property
    def closed(self) -> tuple[Window, int] | None:
        """The window that opens first, and when (microseconds); None: a subscriber may take now."""
        now = to_microseconds(self.now)
        first: list[tuple[Window, int]] = []
        for subscriber in self.subscribers:
            windows = [each for each in subscriber.rules if isinstance(each, Window)]
            ahead = [(w, opens) for w in windows if (opens := w.span(now)[0]) > now]
            if not ahead:
                return None
            first.append(max(ahead, key=lambda each: each[1]))
        return min(first, key=lambda each: each[1], default=None)

    def running(self, most: int) -> int:
        """Leases of the queue, counted up to `most`."""
        if most not in self._running:
            self._running[most] = self._rows.running(self._connection, self.queue, most)
        return self._running[most]

    def running_of(self, scope: str, most: int) -> int:
        """Leases of all queues of a budget, each counted up to `most`."""
        if scope not in self._shared:
            info = self._rows.states(self._connection, SHARED_LEASES, [scope]).get(scope) or {}
            self._shared[scope] = sum(
                self._rows.running(self._connection, queue, most)
                for queue in sorted({*info.get("queues", ()), self.queue})
            )
        return self._shared[scope]

    @cached_property
    def first_lease(self) -> Lease | None:
        """The leased message with the lowest id."""
        return next(iter(self._read_leases(self._leased.limit(1))), None)

    # -- of keys -------------------------------------------------------------------------------

    def bursts(self, key: str) -> tuple[Bursts, dict[int, Live]]:
        """The bursts of `key`, and those of its messages that are in the queue."""
        if key not in self._bursts:
            wanted = (self._expected | {key}) - self._bursts.keys()
            states = self._rows.states(self._connection, burst_scope(self.queue), wanted)
            found = {each: Bursts.load(states.get(each)) for each in wanted}
            ids = {message for bursts in found.values() for message in bursts.known()}
            self._live |= self._rows.live(self._connection, self.queue, ids)
            self._bursts |= found
        bursts = self._bursts[key]
        return bursts, {i: self._live[i] for i in bursts.known() if i in self._live}

    def standby(self, key: str) -> tuple[list[int], dict[int, Live]]:
        """The messages of `key` that are to be delivered in the place of others, and those of them
        that are in the queue.
        """
        state = self._rows.states(self._connection, burst_scope(self.queue), [key]).get(key)
        waiting = waiting_in(state or {})
        return waiting, self._rows.live(self._connection, self.queue, waiting)

    def newest(self, key: str) -> tuple[Latest, dict[int, Live]]:
        """The same for KeepLast, which keeps what it knows in the same place."""
        state = self._rows.states(self._connection, burst_scope(self.queue), [key]).get(key)
        latest = Latest.load(state)
        return latest, self._rows.live(self._connection, self.queue, latest.known())

    def leases(self, key: str) -> list[Lease]:
        """The leased messages of `key`, by id."""
        if key not in self._leases:
            wanted = (self._expected | {key}) - self._leases.keys()
            self._leases |= {each: [] for each in wanted}
            of_keys = self._leased.where(self._key.in_(sorted(wanted))).limit(MOST_LEASES)
            for lease in self._read_leases(of_keys):
                if lease.key in self._leases:
                    self._leases[lease.key].append(lease)
        return self._leases[key]

    def claimed(self, key: str) -> Claimed | None:
        """The message that has claimed `key` for `Once`."""
        if key not in self._claimed:
            wanted = (self._expected | {key}) - self._claimed.keys()
            self._claimed |= dict.fromkeys(wanted)
            c = self._dialect.tables.policy_state.c
            found = select(c.key, c.info, c.created_at).where(
                c.scope == ONCE + self.queue, c.key.in_(sorted(wanted))
            )
            for row in self._connection.execute(found):
                self._claimed[row.key] = Claimed(row.info, row.created_at)
        return self._claimed[key]

    @property
    def _key(self) -> ColumnElement[str]:
        """What policies go by."""
        c = self._dialect.tables.message.c
        return case((c.policy_marks.op("&")(HEADER_KEY) != 0, c.policy_key), else_=c.key)

    @property
    def _leased(self) -> Select[Any]:
        table = self._dialect.tables.message
        found = select(table.c.id, self._key, table.c.lease_token)
        # A key may have many messages, but few are leased.
        found = self._dialect.use_index(found, table, "leased_index", on_sqlite=True)
        return found.where(table.c.queue == self.queue, _LEASED).order_by(table.c.id)

    def _read_leases(self, statement: Select[Any]) -> list[Lease]:
        return [Lease(*row) for row in self._connection.execute(statement)]
