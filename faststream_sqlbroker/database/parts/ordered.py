"""Claims for ordered=True: one message of each key at a time, in the order of ids.

The race: a message with a lower id may be committed late, when a later message of its key is
leased already. Two claims that read before either has committed could then lease both. So one
claim of a queue runs at a time. It locks the queue's row of the policy state, and then reads (READ
COMMITTED) what the claim before it has committed. A claim that finds the row locked does not wait;
it is repeated soon. SQLite has one writer, so it needs no lock.

The search for heads is bounded, however many messages wait behind a key that is busy. It reads a
window of the oldest due messages. Only if the window was full and gave too few heads, it reads a
page of keys and a page of messages without a key, from where the last claim stopped.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import Connection

from faststream_sqlbroker.core.rows import Claimed, ReadyPair
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.statements import Statements

Key = str | bytes
"""As selected: SQLite gives bytes, which need not be text."""
UNLIMITED = 1 << 30
"""More leases than a key can have."""
WINDOW = 100
"""Least number of messages, and of keys, that a claim looks at; twice its limit if that is more."""
FREE_PAGE = 1_000
"""Due messages that a claim searches for such without a key, where the window was full."""


class KeyGate(Protocol):
    """What else decides whether a message of a key may start: a policy by key."""

    scope: str
    """Of its states, whose `due_at` says when there is something to do for a key."""

    def look(self, keys: Iterable[Key]) -> None:
        """Prepare for the questions about `keys`."""

    def admits(self, key: Key) -> bool:
        """Whether one more message of this key may start."""

    def use_index(self) -> None:
        """The oldest messages are not enough: keys are read by the time at which they are due."""

    def idle(self, keys: Iterable[Key]) -> None:
        """No message of `keys` can be claimed."""

    def arrivals(self) -> tuple[list[int], bool]:
        """Messages that have become due since the last look, and whether there are more."""

    def looks_at_all(self) -> bool:
        """Whether it is time to look at every key: some may have been missed."""


@dataclass
class Cursors:
    """Where the last claims stopped, by queue (keys) and pair (due time and id)."""

    keys: dict[str, str] = field(default_factory=dict)
    rows: dict[tuple[str, int], tuple[Any, int]] = field(default_factory=dict)

    def copy(self) -> "Cursors":
        """One to change while it is not known whether the claim will be committed."""
        return Cursors(dict(self.keys), dict(self.rows))


class OrderedClaims:
    """The claims of one dialect."""

    def __init__(self, dialect: Operations) -> None:
        """Claim by the statements of `dialect`."""
        self._dialect = dialect

    def claim(
        self,
        connection: Connection,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        cursors: Cursors,
        *,
        suspicion: Suspicion | None = None,
    ) -> tuple[Claimed, float | None]:
        """Lease up to `limit` heads of `pairs`, and what has expired among what was looked at.

        A message without a key is its own head. `cursors` is read and written.

        Returns:
            The rows, and in how many seconds to claim again: 0 if another claim runs right now or
            there is more to read, else when the first waiting head is due; None: not known.
        """
        # Lock, search, lease, repeat: the steps depend on each other, so they stay in one function.
        self._dialect.mend_due_times(connection, pairs)
        queues = sorted({p.queue for p in pairs})
        locked = self._dialect.lock_order(connection, queues)
        ours = [p for p in pairs if p.queue in locked]
        others = None if suspicion is None or suspicion.told else suspicion
        again = None if len(locked) == len(queues) else 0.0
        rows = Claimed()
        taken: set[int] = set()
        while True:
            heads = Heads(
                connection, self._dialect.sql, limit - len(rows), others=others, taken=taken
            )
            more = heads.scan(ours, cursors)
            if not heads.ids:
                break
            found = self._dialect.claim_ids(
                connection, heads.ids, queues, lease, token, suspicion=suspicion
            )
            rank = {message_id: n for n, message_id in enumerate(heads.ids)}
            rows += sorted(found, key=lambda m: rank[m.id])
            rows.suspects |= found.suspects
            taken |= set(heads.ids)
            # Some heads are locked by another transaction: look for others in their place.
            if len(found) + len(found.suspects) == len(heads.ids) or len(rows) >= limit:
                break
        if more:
            again = 0.0
        if again is None and len(rows) < limit:
            again = heads.soonest()
        return rows, again

    def claim_one(
        self,
        connection: Connection,
        message_id: int,
        queues: Sequence[str],
        lease: float,
        token: UUID,
    ) -> Claimed:
        """Lease this message if it is due in one of `queues`, not locked, and the head of its key.

        An expired message need not be the head: it will not be handled.
        """
        row = connection.execute(self._dialect.sql["ordered_one"], {"id": message_id}).one_or_none()
        if row is None or row[0] not in queues:
            return Claimed()
        queue, key, expired = row
        if queue not in self._dialect.lock_order(connection, [queue]):
            return Claimed()
        heads = Heads(connection, self._dialect.sql, 1)
        if key is not None and not expired and not heads.is_head(queue, message_id, key):
            return Claimed()
        return self._dialect.claim_ids(connection, [message_id], [queue], lease, token)


class Heads:
    """The messages that one claim is about to lease: `ids`."""

    def __init__(
        self,
        connection: Connection,
        statements: Statements,
        limit: int,
        *,
        others: Suspicion | None = None,
        taken: Collection[int] = (),
        mask: int = 0,
        per_key: int | None = None,
        starting: int | None = None,
        gate: KeyGate | None = None,
        by_header: bool = False,
    ) -> None:
        """Look for up to `limit` messages, under the queues' locks.

        Args:
            connection: The claim's.
            statements: The dialect's.
            limit: How many.
            others: Pass over these suspects.
            taken: Not these.
            mask: Only such as have these marks of policies.
            per_key: So many leases of a key at a time, in no order, or UNLIMITED; None: the first
                of each key, one at a time.
            starting: So many of them start at once. The others wait for a worker, and are of keys
                that have no lease: what waits must not take those of other processes' workers.
            gate: Passes over keys of which nothing may start.
            by_header: Keys are those that were read from a header.
        """
        self._connection = connection
        self._sql = statements
        self._limit = limit
        self._end, self._binds = ("", {}) if others is None else ("_others", others.binds)
        self._mask = mask
        self._per_key = per_key
        self._starting = limit if starting is None or per_key == UNLIMITED else starting
        self._gate = gate
        self._by_header = by_header
        self._size = max(WINDOW, 2 * limit)
        self._busy: dict[str, Counter[Key]] = {}
        self._taken = set(taken)
        self._waiting = set[int]()
        self._heads = 0
        self.ids: list[int] = []

    @property
    def full(self) -> bool:
        """Whether there are as many as were wanted."""
        return self._heads >= self._limit

    def scan(self, pairs: Sequence[ReadyPair], cursors: Cursors) -> bool:
        """Look for heads of `pairs`; whether more may be there."""
        crowded = [p for p in pairs if not self.full and self._scan_window(p, cursors)]
        more = False
        for queue in dict.fromkeys(p.queue for p in crowded):
            if not self.full:
                more = self._scan_other_keys(queue, cursors) or more
        for pair in crowded:
            if not self.full:
                more = self._scan_free(pair, cursors) or more
        return more

    def soonest(self) -> float | None:
        """Seconds until the first of the heads that wait for their time is due."""
        if not self._waiting:
            return None
        due_in = self._execute("ordered_soon", ids=sorted(self._waiting)).scalar_one()
        return None if due_in is None else float(due_in)

    def is_head(self, queue: str, message_id: int, key: Key) -> bool:
        """Whether nothing of its key comes before this message, or is being handled."""
        if (start := _text(key)) is None:
            return True
        found = self._execute("ordered_keys", queue=queue, start=start, size=1).all()
        first = all(head is None or head >= message_id for k, head in found if k == key)
        return first and not self._busy_keys(queue)[key]

    def may_start(self, queue: str, message_id: int) -> bool:
        """Whether this message of `queue`, which is due, could be one of `ids`."""
        found = self._heads_of([message_id])
        if not found:
            return False
        # Its key as the other statements select it: SQLite gives bytes, and a text equals none.
        [(_, key)] = found
        if key is None:
            return True
        if self._per_key is None and not self.is_head(queue, message_id, key):
            return False
        self._look_at([key])
        return self._has_room(queue, key)

    def _scan_window(self, pair: ReadyPair, cursors: Cursors) -> bool:
        """Take the heads among the oldest due messages of `pair`; whether there may be more."""
        binds = {"queue": pair.queue, "priority": pair.priority, "size": self._size}
        rows = self._execute(
            f"ordered_window{self._end}", **binds, **self._binds, mask=self._mask
        ).all()
        self._look_at(row[1] for row in rows)
        for message_id, key, expired, _due, head in rows:
            if expired:
                if message_id not in self._taken:
                    self.ids.append(message_id)  # it will be discarded, whatever runs
            elif self._per_key is not None or head is None or head >= message_id:
                self._take(pair.queue, message_id, key)
            else:
                self._waiting.add(head)
        full = len(rows) == self._size
        if full and (pair.queue, pair.priority) not in cursors.rows:
            cursors.rows[pair.queue, pair.priority] = (rows[-1][3], rows[-1][0])
        return full

    def _scan_other_keys(self, queue: str, cursors: Cursors) -> bool:
        """Take heads of keys that the window does not show; whether there may be more."""
        if self._gate is not None and self._per_key is not None:
            return self._scan_due_keys(queue, cursors, self._gate)
        return self._scan_keys(queue, cursors)

    def _scan_keys(self, queue: str, cursors: Cursors) -> bool:
        """The due heads of the next keys; whether there are keys behind them."""
        binds = {"queue": queue, "start": cursors.keys.get(queue, ""), "size": self._size}
        keys = self._next_keys(binds)
        texts = [text for key, _ in keys if (text := _text(key)) is not None]
        more = len(keys) == self._size and bool(texts)
        cursors.keys[queue] = texts[-1] if more else ""
        self._take_heads(queue, [head for _, head in keys if head is not None])
        return more

    def _scan_due_keys(self, queue: str, cursors: Cursors, gate: KeyGate) -> bool:
        """The heads of the keys that are due by the states of `gate`; whether there are more."""
        gate.use_index()
        binds = {"queue": queue, "scope": gate.scope, "size": self._size, "mask": self._mask}
        keys = self._execute("ordered_keys_due", **binds).all()
        gate.idle(key for key, head in keys if head is None)
        self._take_heads(queue, [head for _, head in keys if head is not None])
        arrived, more = gate.arrivals()
        self._take_heads(queue, arrived)
        more = more or len(keys) == self._size
        if cursors.keys.get(queue) or gate.looks_at_all():
            more = self._scan_keys(queue, cursors) or more
        return more

    def _take_heads(self, queue: str, ids: Sequence[int]) -> None:
        """Take those of `ids`, heads of their keys, that are due."""
        if not ids:
            return
        self._waiting |= set(ids)
        heads = self._heads_of(sorted(ids))
        self._look_at(key for _, key in heads)
        for message_id, key in heads:
            self._take(queue, message_id, key)

    def _scan_free(self, pair: ReadyPair, cursors: Cursors) -> bool:
        """Messages without a key on the next page of `pair`; whether there are pages behind it."""
        at = pair.queue, pair.priority
        due, last_id = cursors.rows[at]
        binds = {
            "queue": pair.queue,
            "priority": pair.priority,
            "due": due,
            "id": last_id,
            "size": FREE_PAGE,
        }
        rows = self._execute(
            f"ordered_free{self._end}", **binds, **self._binds, mask=self._mask
        ).all()
        for message_id, _due, free in rows:
            if free:
                self._take(pair.queue, message_id, None)
        if len(rows) < FREE_PAGE:
            del cursors.rows[at]
            return False
        cursors.rows[at] = (rows[-1][1], rows[-1][0])
        return True

    def _take(self, queue: str, message_id: int, key: Key | None) -> None:
        if self.full or message_id in self._taken:
            return
        if key is not None and not self._has_room(queue, key):
            return
        self._heads += 1
        self._taken.add(message_id)
        self.ids.append(message_id)

    def _look_at(self, keys: Iterable[Key | None]) -> None:
        if self._gate is not None:
            self._gate.look(key for key in keys if key is not None)

    def _has_room(self, queue: str, key: Key) -> bool:
        """Whether one more message of the key may be leased, which is then counted."""
        if self._per_key != UNLIMITED:
            most = self._per_key if self._heads < self._starting else 1
            if self._busy_keys(queue)[key] >= (most or 1):
                return False
        if self._gate is not None and not self._gate.admits(key):
            return False
        if self._per_key != UNLIMITED:
            self._busy_keys(queue)[key] += 1
        return True

    def _busy_keys(self, queue: str) -> Counter[Key]:
        """How many leases each key has."""
        if queue not in self._busy:
            self._busy[queue] = Counter(self._execute("ordered_busy", queue=queue).scalars())
        return self._busy[queue]

    def _next_keys(self, binds: dict[str, Any]) -> Any:
        if self._per_key is None:
            return self._execute("ordered_keys", **binds).all()
        return self._execute("ordered_keys_ready", **binds, mask=self._mask).all()

    def _heads_of(self, ids: Sequence[int]) -> Any:
        return self._execute(
            f"ordered_heads{self._end}", ids=ids, **self._binds, mask=self._mask
        ).all()

    def _execute(self, name: str, **binds: Any) -> Any:
        statement = self._sql.by_header(name) if self._by_header else self._sql[name]
        return self._connection.execute(statement, binds)


def _text(key: Key) -> str | None:
    """A key to search from; None for bytes (SQLite) that are no text."""
    if isinstance(key, str):
        return key
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None
