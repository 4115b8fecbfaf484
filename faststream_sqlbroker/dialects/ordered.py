"""Claims for ordered=True: of each key one message at a time, in the order of ids.

Two claims that read before either has committed could lease two messages of a key: a message with a lower id,
committed late, is the head of its key while a later one is being handled, and only the first claim's commit
shows that. So claims of a queue wait for each other: each locks the queue's row of the policy state, and what
it reads afterwards (READ COMMITTED) is what the one before it has left. SQLite has one writer anyway.

Looking for heads is bounded, however many messages wait behind a key that cannot go on: first the oldest due
messages, a window of them; only where a window was full and gave too few, the keys themselves, some at a time
from where the last claim stopped.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import BigInteger, Connection, Integer, String, bindparam

from faststream_sqlbroker.core.rows import SUSPECT_AFTER, ClaimedMessage, ReadyPair
from faststream_sqlbroker.dialects.policy_state import lock_order
from faststream_sqlbroker.schema.types import MYSQL

if TYPE_CHECKING:
    from faststream_sqlbroker.dialects.base import Dialect

WINDOW = 100
"""Least number of messages, and of keys, that a claim looks at; twice its limit if that is more."""

Cursors = dict[str, str]
"""The key at which the last claim of each queue stopped."""

_NOT_EXPIRED = "(e.expires_at IS NULL OR e.expires_at > {now})"
"""An expired message holds nobody: it will not be handled."""

# `head`, not whether there is an earlier one: for a first message MariaDB would read its whole key to say no.
_WINDOW = (
    """
SELECT w.id, {open}w.{key}{close}, (SELECT e.id FROM {message} e {key_hint}
  WHERE e.queue = :queue AND e.{key} = w.{key} AND """
    + _NOT_EXPIRED
    + """ ORDER BY e.id LIMIT 1) AS head
FROM (
  SELECT m.id, m.{key}, m.next_attempt_at FROM {message} m {ready_hint}
  WHERE m.queue = :queue AND m.priority = :priority AND {claimable} AND m.next_attempt_at <= {now}{which}
  ORDER BY m.next_attempt_at, m.id LIMIT :size) w
ORDER BY w.next_attempt_at, w.id
"""
)

_BUSY = """
SELECT {open}m.{key}{close} FROM {message} m {leased_hint}
WHERE m.queue = :queue AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL AND m.{key} IS NOT NULL
"""

_WITH_HEADS = (
    """
SELECT {open}k.k{close}, (SELECT e.id FROM {message} e {key_hint}
  WHERE e.queue = :queue AND e.{key} = k.k AND """
    + _NOT_EXPIRED
    + """ ORDER BY e.id LIMIT 1) AS head
"""
)

_KEYS = (
    """
WITH RECURSIVE k(k, n) AS (
  SELECT (SELECT m.{key} FROM {message} m {key_hint}
    WHERE m.queue = :queue AND m.{key} >= :start ORDER BY m.queue, m.{key} LIMIT 1), 1
  UNION ALL
  SELECT (SELECT m.{key} FROM {message} m {key_hint}
    WHERE m.queue = :queue AND m.{key} > k.k ORDER BY m.queue, m.{key} LIMIT 1), k.n + 1
  FROM k WHERE k.k IS NOT NULL AND k.n < :size
)"""
    + _WITH_HEADS
    + "FROM k WHERE k.k IS NOT NULL ORDER BY k.n"
)

# MySQL and MariaDB search no range from an outer column: the recursion would start at the queue's first key
# each time (3.9 s behind 100 000 messages of one key). This walks the index from `start` and stops: 16 ms.
_KEYS_WALKED = (
    _WITH_HEADS
    + """FROM (SELECT DISTINCT m.{key} AS k FROM {message} m {key_hint}
  WHERE m.queue = :queue AND m.{key} >= :start ORDER BY m.{key} LIMIT :size) k
ORDER BY k.k"""
)

_HEADS = """
SELECT m.id, {open}m.{key}{close} FROM {message} m {id_hint}
WHERE m.id IN :ids AND {claimable} AND m.next_attempt_at <= {now}{which}
ORDER BY m.priority DESC, m.next_attempt_at, m.id
"""

_ONE = "SELECT m.queue, {open}m.{key}{close} FROM {message} m WHERE m.id = :id"


class OrderedClaims:
    """The claims of one dialect."""

    def __init__(self, dialect: "Dialect", words: dict[str, str]) -> None:
        """`words` are the database's own: now, claimable (of `m`), hints to indexes, `open` and `close` round keys."""
        self._dialect = dialect
        queue, size = bindparam("queue", type_=String), bindparam("size", type_=Integer)
        others = f"\n    AND m.deliveries_count - m.attempts_count < {SUSPECT_AFTER}"
        ids = bindparam("ids", type_=BigInteger, expanding=True)
        for end, which in (("", ""), ("_others", others)):
            self._add(f"ordered_window{end}", _WINDOW, words, queue, size, which=which)
            self._add(f"ordered_heads{end}", _HEADS, words, ids, which=which)
        self._add("ordered_busy", _BUSY, words, queue)
        self._add("ordered_one", _ONE, words, bindparam("id", type_=BigInteger))
        keys = _KEYS_WALKED if dialect.name in MYSQL else _KEYS
        self._add("ordered_keys", keys, words, queue, size, bindparam("start", type_=String))

    def _add(self, name: str, sql: str, words: dict[str, str], *binds: Any, **extra: str) -> None:
        self._dialect.add_statement(name, sql, *binds, **words, **extra)

    def claim(
        self,
        connection: Connection,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        cursors: Cursors,
        *,
        suspects: bool = True,
    ) -> tuple[list[ClaimedMessage], bool]:
        """Lease up to `limit` heads of `pairs`; whether there may be more that this claim has not looked at.

        A message without a key is its own head. `cursors` is read and written.
        """
        queues = sorted({p.queue for p in pairs})
        self._lock(connection, queues)
        heads = _Heads(connection, self._dialect.sql, limit, "" if suspects else "_others")
        crowded = [p.queue for p in pairs if not heads.full and heads.take_window(p)]
        more = False
        for queue in dict.fromkeys(crowded):
            if not heads.full:
                more = heads.take_keys(queue, cursors) or more
        rows = self._dialect.claim_ids(connection, heads.ids, queues, lease, token) if heads.ids else []
        rank = {message_id: n for n, message_id in enumerate(heads.ids)}
        return sorted(rows, key=lambda m: rank[m.id]), more

    def claim_one(
        self, connection: Connection, message_id: int, queues: Sequence[str], lease: float, token: UUID
    ) -> list[ClaimedMessage]:
        """Lease this message if it is due in one of `queues`, the head of its key, and not locked."""
        row = connection.execute(self._dialect.sql["ordered_one"], {"id": message_id}).one_or_none()
        if row is None or row[0] not in queues:
            return []
        queue, key = row
        self._lock(connection, [queue])
        heads = _Heads(connection, self._dialect.sql, 1, "")
        if key is not None and not heads.is_head(queue, message_id, key):
            return []
        return self._dialect.claim_ids(connection, [message_id], [queue], lease, token)

    def _lock(self, connection: Connection, queues: Sequence[str]) -> None:
        if self._dialect.name != "sqlite":
            lock_order(connection, self._dialect.tables.policy_state, queues, self._dialect.time_limit)


class _Heads:
    """The messages that one claim is about to lease."""

    def __init__(self, connection: Connection, sql: Any, limit: int, end: str) -> None:
        self._connection, self._sql, self._limit, self._end = connection, sql, limit, end
        self._size = max(WINDOW, 2 * limit)
        self._busy: dict[str, set[str | bytes]] = {}
        self.ids: list[int] = []

    @property
    def full(self) -> bool:
        return len(self.ids) >= self._limit

    def take_window(self, pair: ReadyPair) -> bool:
        """The heads among the oldest due messages of `pair`; whether there may be more behind them."""
        binds = {"queue": pair.queue, "priority": pair.priority, "size": self._size}
        rows = self._connection.execute(self._sql[f"ordered_window{self._end}"], binds).all()
        for message_id, key, head in rows:
            if head is None or head >= message_id:
                self._take(pair.queue, message_id, key)
        return len(rows) == self._size

    def take_keys(self, queue: str, cursors: Cursors) -> bool:
        """The due heads of the next keys; whether there are keys behind them."""
        binds = {"queue": queue, "start": cursors.get(queue, ""), "size": self._size}
        keys = self._connection.execute(self._sql["ordered_keys"], binds).all()
        texts = [text for key, _ in keys if (text := _text(key)) is not None]
        more = len(keys) == self._size and bool(texts)
        cursors[queue] = texts[-1] if more else ""
        if ids := [head for _, head in keys if head is not None]:
            heads = self._connection.execute(self._sql[f"ordered_heads{self._end}"], {"ids": ids})
            for message_id, key in heads.all():
                self._take(queue, message_id, key)
        return more

    def is_head(self, queue: str, message_id: int, key: str | bytes) -> bool:
        """Whether nothing of its key comes before this message, or is being handled."""
        start = _text(key)
        if start is None:
            return True
        binds = {"queue": queue, "start": start, "size": 1}
        heads = self._connection.execute(self._sql["ordered_keys"], binds).all()
        return [head for _, head in heads] == [message_id] and key not in self._busy_keys(queue)

    def _take(self, queue: str, message_id: int, key: str | bytes | None) -> None:
        if self.full or message_id in self.ids:
            return
        if key is not None:
            busy = self._busy_keys(queue)
            if key in busy:
                return
            busy.add(key)
        self.ids.append(message_id)

    def _busy_keys(self, queue: str) -> set[str | bytes]:
        if queue not in self._busy:
            self._busy[queue] = set(
                self._connection.execute(self._sql["ordered_busy"], {"queue": queue}).scalars()
            )
        return self._busy[queue]


def _text(key: str | bytes) -> str | None:
    """A key to search from; None for bytes (SQLite) that are no text."""
    if isinstance(key, str):
        return key
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None
