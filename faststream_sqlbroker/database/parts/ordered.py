"""Claims for ordered=True: one message of each key at a time, in the order of ids.

The race: a message with a lower id may be committed late, when a later message of its key is
already leased. Two claims that read before either has committed could then lease both. So one
claim of a queue runs at a time. It locks the queue's row of the policy state, and then reads
(READ COMMITTED) the commits of the previous claim. A claim that finds the row locked does not
wait; it is repeated soon. SQLite has one writer, so it needs no lock.

The search for heads is bounded, however many messages wait behind a busy key. It reads a window
of the oldest due messages. Only if the window was full and gave too few heads, it reads a page
of keys and a page of messages without a key, from where the last claim stopped.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import Connection

from faststream_sqlbroker.core.rows import ClaimedMessages, ReadyPair
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.statements import Statements

Key = str | bytes
"""A key as selected: SQLite gives bytes, which need not be text."""
UNLIMITED = 1 << 30
"""More leases than a key can have."""
MIN_WINDOW = 100
"""Minimum number of messages, and of keys, that a claim scans; twice its limit if that is more."""
KEYLESS_PAGE = 1_000
"""Due messages that a claim searches for messages without a key if the window was full."""


class KeyGate(Protocol):
    """An additional limit on starts by key: a policy by key."""

    scope: str
    """Scope of its states, whose `due_at` says when a key is to be checked."""

    def load_keys(self, keys: Iterable[Key]) -> None:
        """Load the states of `keys`."""

    def admit(self, key: Key) -> bool:
        """Admit another message of the key; return False if no other may start."""

    def use_index(self) -> None:
        """Read keys by their due time from now on: the oldest messages are not enough."""

    def mark_idle(self, keys: Iterable[Key]) -> None:
        """Record that no message of `keys` can be claimed."""

    def scan_arrivals(self) -> tuple[list[int], bool]:
        """Return messages that have become due since the last scan, and True if there are more."""

    def start_full_pass(self) -> bool:
        """Return True if every key is due for a check: some may have been missed."""


@dataclass
class Cursors:
    """The positions of the last claims, by queue (keys) and pair (due time and id)."""

    keys: dict[str, str] = field(default_factory=dict)
    rows: dict[tuple[str, int], tuple[Any, int]] = field(default_factory=dict)

    def copy(self) -> "Cursors":
        """Return a copy to change while the outcome of the claim's commit is unknown."""
        return Cursors(dict(self.keys), dict(self.rows))


class OrderedClaims:
    """Claims in the order of keys, for a dialect."""

    def __init__(self, dialect: DialectOperations) -> None:
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
        suspect_rule: SuspectRule | None = None,
    ) -> tuple[ClaimedMessages, float | None]:
        """Lease up to `limit` heads of `pairs`, and expired messages among all scanned messages.

        A pair is a queue and a priority. A head is the first message of its key, and no other
        message of the key is leased; a message without a key is its own head. `cursors`, where the
        next search goes on, is read and written. A queue that another claim has locked is skipped,
        not waited for.

        Returns:
            The rows, and the seconds until the next claim: 0 if another claim is running or more
            remains to be read, else the time until the first waiting head is due; None if not
            known.
        """
        # Lock, search, lease, repeat: the steps depend on each other, so they are in one function.
        self._dialect.repair_due_times(connection, pairs)
        queues = sorted({pair.queue for pair in pairs})
        locked_queues = self._dialect.lock_order(connection, queues)
        locked_pairs = [pair for pair in pairs if pair.queue in locked_queues]
        excluded = None if suspect_rule is None or suspect_rule.report else suspect_rule
        next_claim_in = None if len(locked_queues) == len(queues) else 0.0
        rows = ClaimedMessages()
        tried_ids: set[int] = set()
        while True:
            heads = HeadSearch(
                connection,
                self._dialect.sql,
                limit - len(rows),
                excluded=excluded,
                excluded_ids=tried_ids,
            )
            has_more = heads.scan(locked_pairs, cursors)
            if not heads.ids:
                break
            messages = self._dialect.claim_ids(
                connection, heads.ids, queues, lease, token, suspect_rule=suspect_rule
            )
            rank = {message_id: n for n, message_id in enumerate(heads.ids)}
            rows += sorted(messages, key=lambda row: rank[row.id])
            rows.suspects |= messages.suspects
            tried_ids |= set(heads.ids)
            # Some heads are locked by another transaction: search for others in their place.
            if len(messages) + len(messages.suspects) == len(heads.ids) or len(rows) >= limit:
                break
        if has_more:
            next_claim_in = 0.0
        if next_claim_in is None and len(rows) < limit:
            next_claim_in = heads.get_next_due_in()
        return rows, next_claim_in

    def claim_one(
        self,
        connection: Connection,
        message_id: int,
        queues: Sequence[str],
        lease: float,
        token: UUID,
    ) -> ClaimedMessages:
        """Lease the message if due in any of `queues`, not locked, and the first of the key.

        Returns no row otherwise, also if another claim of the queue is running: it could lease an
        earlier message of the key now. An expired message need not be the first: it will not be
        handled.
        """
        row = connection.execute(self._dialect.sql["ordered_one"], {"id": message_id}).one_or_none()
        if row is None or row[0] not in queues:
            return ClaimedMessages()
        queue, key, expired = row
        if queue not in self._dialect.lock_order(connection, [queue]):
            return ClaimedMessages()
        heads = HeadSearch(connection, self._dialect.sql, 1)
        if key is not None and not expired and not heads.is_head(queue, message_id, key):
            return ClaimedMessages()
        return self._dialect.claim_ids(connection, [message_id], [queue], lease, token)


class HeadSearch:
    """The search for the messages that a claim leases: `ids`."""

    def __init__(
        self,
        connection: Connection,
        statements: Statements,
        limit: int,
        *,
        excluded: SuspectRule | None = None,
        excluded_ids: Collection[int] = (),
        mask: int = 0,
        per_key: int | None = None,
        starting: int | None = None,
        gate: KeyGate | None = None,
        by_header: bool = False,
    ) -> None:
        """Search for up to `limit` messages, under the queues' locks.

        Args:
            connection: The claim's connection.
            statements: The dialect's statements.
            limit: Maximum number of messages.
            excluded: Skip these suspects.
            excluded_ids: Skip these messages.
            mask: Only messages with these policy flags.
            per_key: Maximum leases of a key at a time, in no order, or UNLIMITED; None for the
                first of each key, one at a time.
            starting: Number of messages that start at once. The others wait for a worker, and are
                of keys without a lease: waiting messages must not take keys from workers of other
                processes.
            gate: Skips keys of which nothing may start.
            by_header: True if keys were read from a header.
        """
        self._connection = connection
        self._sql = statements
        self._limit = limit
        self._suffix, self._binds = ("", {}) if excluded is None else ("_others", excluded.binds)
        self._mask = mask
        self._per_key = per_key
        self._starting = limit if starting is None or per_key == UNLIMITED else starting
        self._gate = gate
        self._by_header = by_header
        self._size = max(MIN_WINDOW, 2 * limit)
        self._busy: dict[str, Counter[Key]] = {}
        self._used_ids = set(excluded_ids)
        self._waiting = set[int]()
        self._heads = 0
        self.ids: list[int] = []

    @property
    def is_full(self) -> bool:
        """True if the limit is reached."""
        return self._heads >= self._limit

    def scan(self, pairs: Sequence[ReadyPair], cursors: Cursors) -> bool:
        """Search for heads of `pairs`; return True if there may be more.

        A head is a message that may run next of its key. Reads the oldest due messages of each pair
        (queue and priority). Many messages of a busy key may hide other heads: if those were too
        many and gave too few heads, also reads a page of keys and a page of messages without a key.
        So each claim reads a limited number of rows, and the next goes on from `cursors`.
        """
        full_pairs = [
            pair for pair in pairs if not self.is_full and self._scan_window(pair, cursors)
        ]
        has_more = False
        for queue in dict.fromkeys(pair.queue for pair in full_pairs):
            if not self.is_full:
                has_more = self._scan_other_keys(queue, cursors) or has_more
        for pair in full_pairs:
            if not self.is_full:
                has_more = self._scan_keyless(pair, cursors) or has_more
        return has_more

    def get_next_due_in(self) -> float | None:
        """Return the seconds until the first of the delayed heads is due.

        A delayed head waits for a retry, for example, and the later messages of its key wait for
        it. None if the search found none.
        """
        if not self._waiting:
            return None
        due_in = self._execute("ordered_soon", ids=sorted(self._waiting)).scalar_one()
        return None if due_in is None else float(due_in)

    def is_head(self, queue: str, message_id: int, key: Key) -> bool:
        """Return True if no message of the key comes before this message, or is being handled.

        True also for a key that is not valid text (SQLite): no order can be kept for it.
        """
        if (start := _decode_key(key)) is None:
            return True
        heads = self._execute("ordered_keys", queue=queue, start=start, size=1).all()
        is_first = all(
            head is None or head >= message_id for head_key, head in heads if head_key == key
        )
        return is_first and not self._load_lease_counts(queue)[key]

    def may_start(self, queue: str, message_id: int) -> bool:
        """Return True if this due message may be leased, by the order and the limits of its key.

        Used for a claim of this message alone, without a search.
        """
        heads = self._load_heads([message_id])
        if not heads:
            return False
        # Use the key as other statements select it: SQLite returns bytes, which equal no text.
        [(_, key)] = heads
        if key is None:
            return True
        if self._per_key is None and not self.is_head(queue, message_id, key):
            return False
        self._load_gate_keys([key])
        return self._reserve_lease(queue, key)

    def _scan_window(self, pair: ReadyPair, cursors: Cursors) -> bool:
        """Add heads among the oldest due messages of `pair`; return True if there may be more.

        These messages are the window. If an earlier message of the key comes first, the id of that
        head goes to `_waiting`. If the window is full, the search for messages without a key begins
        at its end.
        """
        binds = {"queue": pair.queue, "priority": pair.priority, "size": self._size}
        rows = self._execute(
            f"ordered_window{self._suffix}", **binds, **self._binds, mask=self._mask
        ).all()
        self._load_gate_keys(row[1] for row in rows)
        for message_id, key, expired, _due, head in rows:
            if expired:
                if message_id not in self._used_ids:
                    self.ids.append(message_id)  # it will be discarded whatever else runs
            elif self._per_key is not None or head is None or head >= message_id:
                self._add_head(pair.queue, message_id, key)
            else:
                self._waiting.add(head)
        full = len(rows) == self._size
        if full and (pair.queue, pair.priority) not in cursors.rows:
            cursors.rows[pair.queue, pair.priority] = (rows[-1][3], rows[-1][0])
        return full

    def _scan_other_keys(self, queue: str, cursors: Cursors) -> bool:
        """Add heads of keys that are not in the window; return True if there may be more.

        With a throttle by key, most keys may have no slot now: then those whose next slot has come
        are read, by its stored time. Otherwise keys are read page by page.
        """
        if self._gate is not None and self._per_key is not None:
            return self._scan_due_keys(queue, cursors, self._gate)
        return self._scan_keys(queue, cursors)

    def _scan_keys(self, queue: str, cursors: Cursors) -> bool:
        """Add the due heads of the next page of keys; return True if keys follow.

        Called if the window was full: many messages of few keys may hide the heads of other keys.
        """
        binds = {"queue": queue, "start": cursors.keys.get(queue, ""), "size": self._size}
        keys = self._load_next_keys(binds)
        names = [name for key, _ in keys if (name := _decode_key(key)) is not None]
        has_more = len(keys) == self._size and bool(names)
        cursors.keys[queue] = names[-1] if has_more else ""
        self._add_due_heads(queue, [head for _, head in keys if head is not None])
        return has_more

    def _scan_due_keys(self, queue: str, cursors: Cursors, gate: KeyGate) -> bool:
        """Add the heads of keys that are due for a check; return True if there are more.

        `gate`, a policy by key, stores when each key may start its next message. A key without due
        messages has no such time, so also adds messages that have become due since, and from time
        to time checks all keys.
        """
        gate.use_index()
        binds = {"queue": queue, "scope": gate.scope, "size": self._size, "mask": self._mask}
        keys = self._execute("ordered_keys_due", **binds).all()
        gate.mark_idle(key for key, head in keys if head is None)
        self._add_due_heads(queue, [head for _, head in keys if head is not None])
        arrived, has_more = gate.scan_arrivals()
        self._add_due_heads(queue, arrived)
        has_more = has_more or len(keys) == self._size
        if cursors.keys.get(queue) or gate.start_full_pass():
            has_more = self._scan_keys(queue, cursors) or has_more
        return has_more

    def _add_due_heads(self, queue: str, ids: Sequence[int]) -> None:
        """Add the messages in `ids`, heads of their keys, that are due.

        Heads that are not due yet are remembered: `get_next_due_in` says when the first is.
        """
        if not ids:
            return
        self._waiting |= set(ids)
        heads = self._load_heads(sorted(ids))
        self._load_gate_keys(key for _, key in heads)
        for message_id, key in heads:
            self._add_head(queue, message_id, key)

    def _scan_keyless(self, pair: ReadyPair, cursors: Cursors) -> bool:
        """Add messages without a key from the next page of `pair`; return True if pages follow.

        Such a message waits for no other. Called if the window was full: many messages of busy keys
        may hide it. No index has these messages alone, so all due messages of the page are read.
        """
        cursor_key = pair.queue, pair.priority
        last_due, last_id = cursors.rows[cursor_key]
        binds = {
            "queue": pair.queue,
            "priority": pair.priority,
            "due": last_due,
            "id": last_id,
            "size": KEYLESS_PAGE,
        }
        rows = self._execute(
            f"ordered_free{self._suffix}", **binds, **self._binds, mask=self._mask
        ).all()
        for message_id, _due, has_no_key in rows:
            if has_no_key:
                self._add_head(pair.queue, message_id, None)
        if len(rows) < KEYLESS_PAGE:
            del cursors.rows[cursor_key]
            return False
        cursors.rows[cursor_key] = (rows[-1][1], rows[-1][0])
        return True

    def _add_head(self, queue: str, message_id: int, key: Key | None) -> None:
        """Add the message, unless the limit is reached or the key may start no other message.

        Called for each message that comes first of its key, or needs no order. The lease of the key
        is reserved for the rest of the search.
        """
        if self.is_full or message_id in self._used_ids:
            return
        if key is not None and not self._reserve_lease(queue, key):
            return
        self._heads += 1
        self._used_ids.add(message_id)
        self.ids.append(message_id)

    def _load_gate_keys(self, keys: Iterable[Key | None]) -> None:
        if self._gate is not None:
            self._gate.load_keys(key for key in keys if key is not None)

    def _reserve_lease(self, queue: str, key: Key) -> bool:
        """Count another lease of the key; return False if none is allowed.

        Without a limit of each key, a key has one lease at a time. A message that would only wait
        for a worker of this process needs a key without a lease: a free worker elsewhere could
        handle the key's next message at once.
        """
        if self._per_key != UNLIMITED:
            max_leases = self._per_key if self._heads < self._starting else 1
            if self._load_lease_counts(queue)[key] >= (max_leases or 1):
                return False
        if self._gate is not None and not self._gate.admit(key):
            return False
        if self._per_key != UNLIMITED:
            self._load_lease_counts(queue)[key] += 1
        return True

    def _load_lease_counts(self, queue: str) -> Counter[Key]:
        """Return the number of leases by key, including leases that this search has reserved.

        Read once in a search: it holds the lock of the queue.
        """
        if queue not in self._busy:
            self._busy[queue] = Counter(self._execute("ordered_busy", queue=queue).scalars())
        return self._busy[queue]

    def _load_next_keys(self, binds: dict[str, Any]) -> Any:
        """Return a page of keys with the first message of each.

        Without an order, as for limits of each key, this is the first message that can be claimed.
        """
        if self._per_key is None:
            return self._execute("ordered_keys", **binds).all()
        return self._execute("ordered_keys_ready", **binds, mask=self._mask).all()

    def _load_heads(self, ids: Sequence[int]) -> Any:
        """Return the id and key of the messages in `ids` that can be claimed now."""
        return self._execute(
            f"ordered_heads{self._suffix}", ids=ids, **self._binds, mask=self._mask
        ).all()

    def _execute(self, name: str, **binds: Any) -> Any:
        statement = self._sql.get_by_header(name) if self._by_header else self._sql[name]
        return self._connection.execute(statement, binds)


def _decode_key(key: Key) -> str | None:
    """Return the key as text, or None for bytes (SQLite) that are no text."""
    if isinstance(key, str):
        return key
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None
