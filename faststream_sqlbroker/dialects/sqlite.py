"""SQLite ≥ 3.35: one writer at a time, BEGIN IMMEDIATE, WAL.

Differs from PostgreSQL: no row locks, so nothing is skipped; every transaction of the broker takes
the write lock at its start and waits for it (busy timeout). Times are integers, microseconds since
1970 (UTC).
"""

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, null, text, update

from faststream_sqlbroker.core.rows import Claimed, NewMessage, Prefetch, ReadyPair, ReadyPairs
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.core.text import load_text, short
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.dialects.base import NEEDED_TIMES
from faststream_sqlbroker.dialects.handler_locks import MarkedLocks
from faststream_sqlbroker.dialects.multi_statement import (
    MultiStatementDialect,
    lease_binds,
    note_prefetched,
)
from faststream_sqlbroker.dialects.policy_claims import PolicyClaims
from faststream_sqlbroker.dialects.policy_sql import sqlite_fragments
from faststream_sqlbroker.dialects.sizes import SQLITE
from faststream_sqlbroker.dialects.suspects import SUSPECT, apart, statement_end
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.tables import Tables
from faststream_sqlbroker.schema.types import clock

# SQLite's result codes by what they mean for the broker.

LOCKED = frozenset({5, 6})
"""SQLITE_BUSY, SQLITE_LOCKED."""
TRANSIENT_CODES = LOCKED | {8, 9, 10, 13, 15}
"""SQLITE_READONLY, INTERRUPT, IOERR, FULL, and PROTOCOL, which is a race for the lock of the WAL.
"""
REOPENED = frozenset({8, 10})
"""SQLITE_READONLY and IOERR: a connection goes on with the file as it was when it was opened."""


class SqliteErrors:
    """Judges errors for the dialect."""

    def is_transient(self, error: BaseException) -> bool:
        """Busy, locked, read-only, full disk or I/O error, by SQLite's code."""
        return _code(error) in TRANSIENT_CODES

    def ends_session(self, error: BaseException) -> bool:  # noqa: ARG002
        """There is no server that could."""
        return False

    def spoils(self, error: BaseException) -> bool:
        """A file that was opened read-only stays so."""
        return _code(error) in REOPENED


def is_locked(error: BaseException) -> bool:
    """Whether another connection has what this one needs."""
    return _code(error) in LOCKED


def _code(error: BaseException) -> int:
    """SQLite's primary result code (the lowest byte of the extended one); 0 if it is none of its
    errors.
    """
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


BUSY_TIMEOUT = 10.0
"""Most seconds that a transaction waits for the write lock; the store's time limit may be shorter.
"""
NOW = "(CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000)"
"""The clock of SQLite has milliseconds; it stands still within one statement."""

FIRST_MOMENT = to_microseconds(datetime.min.replace(tzinfo=timezone.utc))
LAST_MOMENT = to_microseconds(datetime.max.replace(tzinfo=timezone.utc))
"""The years 1 to 9999, which Python knows. Text and bytes, which any column takes, sort after all
numbers."""
MENDED = 100
"""Rows whose due time is none that one claim mends."""

_INSERT_ROW = (
    "(:queue_{n}, :payload_{n}, :headers_{n}, :priority_{n}, :key_{n}, :dedup_id_{n}, "
    f"{NOW}, COALESCE(:at_{{n}}, {NOW} + :delay_{{n}}), {NOW} + :expires_{{n}})"
)

_CLAIMABLE = "m.state IN ('PENDING', 'RETRYABLE')"
_LEASED = {
    "state": "'PROCESSING'",
    "acquired_at": "{now}",
    "lease_token": ":token",
    "lease_expires_at": "{now} + :lease",
    "deliveries_count": "deliveries_count + 1",
}
_CLAIM_SETTING = """
UPDATE {message}
SET $SET
WHERE id IN (
  SELECT m.id FROM {source}
  WHERE {of} AND m.state IN ('PENDING', 'RETRYABLE')
    AND m.next_attempt_at <= {now}{which}
  LIMIT :limit)
RETURNING {columns}
"""

_CLAIM = _CLAIM_SETTING.replace(
    "$SET", ",\n  ".join(f"{name} = {value}" for name, value in _LEASED.items())
)
# Suspects stay as they are, and are told by an acquired_at of NULL.
_CLAIM_APART = _CLAIM_SETTING.replace(
    "$SET",
    ",\n  ".join(
        f"{name} = CASE WHEN {SUSPECT.format(of='')}\n"
        f"    THEN {'NULL' if name == 'acquired_at' else name} ELSE {value} END"
        for name, value in _LEASED.items()
    ),
)

# CROSS JOIN keeps the order of the pairs, the index that of their rows: nothing behind the limit is
# read, which ORDER BY, not knowing either, would read and sort.
_DUE = {
    "source": "json_each(:pairs) p CROSS JOIN {message} m INDEXED BY {ready_index}",
    "of": "m.queue = json_extract(p.value, '$[0]') AND m.priority = json_extract(p.value, '$[1]')",
}
_THESE = {"source": "{message} m", "of": "m.id IN :ids AND m.queue IN :queues"}

_READY = "FROM {message} m INDEXED BY {ready_index}\n    WHERE " + _CLAIMABLE
_PAIRS = (
    """
WITH RECURSIVE p(place, queue, priority) AS (
  SELECT q.key, q.queue, (SELECT m.priority """
    + _READY
    + """ AND m.queue = q.queue
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM (SELECT key, value AS queue FROM json_each(:queues)) q{which_queues}
  UNION ALL
  SELECT p.place, p.queue, (SELECT m.priority """
    + _READY
    + """ AND m.queue = p.queue AND m.priority < p.priority
    ORDER BY m.queue, m.priority DESC LIMIT 1)
  FROM p WHERE p.priority IS NOT NULL
)
SELECT p.queue, p.priority, ((SELECT m.next_attempt_at """
    + _READY
    + """ AND m.queue = p.queue AND m.priority = p.priority
    ORDER BY m.next_attempt_at LIMIT 1) - {now}) / 1000000.0,
  EXISTS (SELECT 1 """
    + _READY
    + """ AND m.queue = p.queue AND m.priority = p.priority AND m.next_attempt_at > {last})
  OR EXISTS (SELECT 1 """
    + _READY
    + """ AND m.queue = p.queue AND m.priority = p.priority AND m.next_attempt_at < {first})
FROM p WHERE p.priority IS NOT NULL ORDER BY p.place, p.priority DESC
"""
)

_ROWS = """(SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS state,
  json_extract(value, '$[2]') AS attempts, json_extract(value, '$[3]') AS charge,
  json_extract(value, '$[4]') AS ended, json_extract(value, '$[5]') AS reason,
  json_extract(value, '$[6]') AS error, json_extract(value, '$[7]') AS delay,
  json_extract(value, '$[8]') AS queue, json_extract(value, '$[9]') AS related_id,
  json_extract(value, '$[10]') AS published, json_extract(value, '$[11]') AS hop \
FROM json_each(:rows)) u"""

_ARCHIVE = (
    """
INSERT INTO {archive} ({columns}, archived_at, reason, related_id)
SELECT m.id, m.queue, m.priority, m.{key}, m.dedup_id, m.headers, m.payload, u.state,
  m.attempts_count + u.attempts, m.deliveries_count + u.charge, m.publish_count, m.origin_id,
  m.created_at, m.next_attempt_at, m.expires_at,
  COALESCE(m.first_attempt_at, m.acquired_at + u.ended), \
COALESCE(m.acquired_at + u.ended, m.last_attempt_at),
  m.acquired_at, COALESCE(u.error, m.last_error), m.hops, m.policy_key, {now}, u.reason, \
u.related_id
FROM """
    + _ROWS
    + """
CROSS JOIN {message} m ON m.id = u.id
"""
)

_UPDATE = (
    """
UPDATE {message}
SET state = COALESCE(u.state,
    CASE WHEN {message}.attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END),
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  attempts_count = CASE WHEN u.queue IS NULL THEN attempts_count + u.attempts ELSE 0 END,
  deliveries_count = CASE WHEN u.queue IS NULL THEN deliveries_count + u.charge ELSE 0 END,
  next_attempt_at = CASE WHEN u.delay IS NULL THEN next_attempt_at ELSE {now} + u.delay END,
  first_attempt_at = CASE WHEN u.queue IS NULL \
THEN COALESCE(first_attempt_at, acquired_at + u.ended) END,
  last_attempt_at = CASE WHEN u.queue IS NULL \
THEN COALESCE(acquired_at + u.ended, last_attempt_at) END,
  last_error = COALESCE(u.error, last_error), publish_count = publish_count + u.published,
  hops = COALESCE((hops + 1) * u.hop, hops),
  policy_marks = CASE WHEN u.queue IS NULL THEN policy_marks & {kept_marks} ELSE 0 END,
  queue = COALESCE(u.queue, {message}.queue),
  dedup_id = CASE WHEN u.queue IS NULL THEN dedup_id END
FROM """
    + _ROWS
    + """
WHERE {message}.id = u.id
"""
)


_GIVEN_BACK = """
UPDATE {message}
SET state = CASE WHEN attempts_count > 0 THEN 'RETRYABLE' ELSE 'PENDING' END,
  acquired_at = NULL, lease_token = NULL, lease_expires_at = NULL,
  policy_marks = policy_marks & {kept_marks}"""

# As bytes: text that is no UTF-8 would make the whole answer unreadable.
_OF_PAIRS = f"""SELECT m.id, m.queue, CAST(m.next_attempt_at AS BLOB)
FROM json_each(:pairs) p CROSS JOIN {{message}} m INDEXED BY {{ready_index}}
WHERE {_DUE["of"]} AND {_CLAIMABLE} AND m.next_attempt_at"""

_PLAIN = {
    "update": _UPDATE,
    "payload": "UPDATE {message} SET payload = :payload WHERE id = :id",
    "headers": "UPDATE {message} SET headers = u.headers\n"
    "FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS headers\n"
    "  FROM json_each(:rows)) u\nWHERE {message}.id = u.id",
    "release_stuck": _GIVEN_BACK
    + """
WHERE id IN (SELECT m.id FROM json_each(:queues) q CROSS JOIN {message} m INDEXED BY {leased_index}
  WHERE m.queue = q.value AND m.state = 'PROCESSING' AND m.lease_expires_at < {now} LIMIT :limit)
RETURNING id
""",
    "lease_ends_in": """
SELECT (MIN((SELECT m.lease_expires_at FROM {message} m INDEXED BY {leased_index}
  WHERE m.queue = q.value AND m.state = 'PROCESSING' AND m.lease_expires_at IS NOT NULL
  ORDER BY m.queue, m.lease_expires_at LIMIT 1)) - {now}) / 1000000.0
FROM json_each(:queues) q
""",
    "release_claim": _GIVEN_BACK
    + """, deliveries_count = deliveries_count - 1
WHERE id IN (SELECT m.id FROM json_each(:queues) q CROSS JOIN {message} m INDEXED BY {leased_index}
  WHERE m.queue = q.value AND m.state = 'PROCESSING' AND m.lease_token = :token)
RETURNING id
""",
    "now": "SELECT {now}",
    "unusable": f"{_OF_PAIRS} > {{last}}\nUNION ALL\n{_OF_PAIRS} < {{first}}\nLIMIT :limit",
    "mend": "UPDATE {message} SET next_attempt_at = {now} WHERE id = :id",
}
_HELD = "SELECT id, lease_token FROM {message} WHERE id IN :ids"
_BY_IDS = {
    "lock": _HELD,
    "lock_free": _HELD,
    "look": _HELD,
    "renew": "UPDATE {message} SET lease_expires_at = max(lease_expires_at, {now} + :lease) "
    "WHERE id IN :ids",
    "delete": "DELETE FROM {message} WHERE id IN :ids",
}

_ORDERED = {
    "now": NOW,
    "claimable": "m.state IN ('PENDING', 'RETRYABLE')",
    "after": "(m.next_attempt_at, m.id) > (:due, :id)",
    "due_in": "(MIN(m.next_attempt_at) - " + NOW + ") / 1000000.0",
    "id_hint": "",
    "open": "CAST(",
    "close": " AS BLOB)",
}


class SqliteDialect(SqliteErrors, MultiStatementDialect):
    """All SQL for SQLite."""

    name = "sqlite"
    cancel_once = True  # aiosqlite
    row_locks = False
    known_limit = SQLITE
    insert_row = _INSERT_ROW

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        """Prepare the statements of `tables`."""
        super().__init__(tables, sqlalchemy_dialect)
        self.names |= {"now": NOW, "first": str(FIRST_MOMENT), "last": str(LAST_MOMENT)}
        self._unusable: list[tuple[int, Sequence[str]]] = []
        self.prepare(_PLAIN, _BY_IDS, _ARCHIVE)
        self.add_looks(_PAIRS, NOW)
        # A column holds whatever was put there; text that is no UTF-8 would make the whole answer
        # unreadable.
        as_bytes = {
            name: f"CAST({name} AS BLOB) AS {name}"
            for name in ("payload", "headers", self.names["key"])
        }
        columns = ", ".join(as_bytes.get(name, name) for name in self.claimed_columns.split(", "))
        due, these = (
            {k: v.format(**self.names) for k, v in words.items()} for words in (_DUE, _THESE)
        )
        self.prepare_claims(_CLAIM, columns, due, these, of="m.", apart=_CLAIM_APART)
        self.handler_locks = MarkedLocks(self, "")
        self.prepare_ordered(_ORDERED, "INDEXED BY {}")
        self.scheduled = PolicyClaims(self, sqlite_fragments(NOW))

    def setup(self, connection: Connection) -> None:
        """Turn on WAL (kept by the file), which lets readers go on while one writes."""
        version = connection.execute(text("SELECT sqlite_version()")).scalar_one()
        if tuple(int(p) for p in version.split(".")[:2]) < (3, 35):
            msg = (
                f"SQLite {version} is too old: the broker needs 3.35 or newer (UPDATE … RETURNING)"
            )
            raise SetupError(msg)
        _end_listeners_transaction(connection)
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")

    def lock_order(self, connection: Connection, queues: Sequence[str]) -> set[str]:  # noqa: ARG002
        """There is one writer anyway."""
        return set(queues)

    def begin(self, connection: Connection, idle_limit: float | None = None) -> None:  # noqa: ARG002
        """Take the write lock now: upgrading a read transaction fails at once with
        SQLITE_BUSY_SNAPSHOT.
        """
        _end_listeners_transaction(connection)
        connection.exec_driver_sql(
            f"PRAGMA busy_timeout={round(min(BUSY_TIMEOUT, self.time_limit) * 1000)}"
        )
        connection.exec_driver_sql("PRAGMA synchronous=FULL")
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    def bind_time(self, value: datetime) -> int:
        """Microseconds since 1970 (UTC)."""
        return to_microseconds(value)

    def time(self, value: Any) -> Any:
        """Microseconds since 1970 as an aware datetime."""
        return from_microseconds(value)

    def ready_pairs(
        self, connection: Connection, queues: Sequence[str], *, only_open: bool = False
    ) -> ReadyPairs:
        """As everywhere; a pair with an invalid due time counts as due: the claim repairs it."""
        statement = self.sql["open_pairs" if only_open else "ready_pairs"]
        rows = connection.execute(statement, {"queues": json.dumps(list(queues))})
        return ReadyPairs(
            ReadyPair(
                queue,
                priority,
                min(due_in, 0.0) if unusable else float(due_in),
                unusable=bool(unusable),
            )
            for queue, priority, due_in, unusable in rows
            if due_in is not None
        )

    def mend_due_times(self, connection: Connection, pairs: Sequence[ReadyPair]) -> None:
        """Text, as of datetime('now'), and times that are no microseconds come before or after all
        that are.
        """
        wrong = [pair for pair in pairs if pair.unusable]
        if not wrong:
            return
        binds = {"pairs": json.dumps([(p.queue, p.priority) for p in wrong]), "limit": MENDED}
        for message_id, queue, found in connection.execute(self.sql["unusable"], binds).all():
            connection.execute(self.sql["mend"], {"id": message_id})
            text = (
                f"message {message_id} of queue {queue!r} is due at once: its next_attempt_at is "
            )
            self.warn(
                f"{text}{short(load_text(found))}, which is no time; microseconds since 1970 (UTC) "
                "are"
            )

    def note_unusable(self, message_id: int, names: Sequence[str]) -> None:
        """Keep them until the claim ends, to be replaced: readers of the archive would fail."""
        self._unusable.append((message_id, names))

    def _mend_times(self, connection: Connection) -> None:
        noted, self._unusable = self._unusable, []
        c = self.tables.message.c
        for message_id, names in noted:
            values = {name: clock() if name in NEEDED_TIMES else null() for name in names}
            connection.execute(update(self.tables.message).where(c.id == message_id).values(values))

    def now(self, connection: Connection) -> datetime:
        """The host's clock as SQLite reads it (milliseconds)."""
        value: datetime = self.time(connection.execute(self.sql["now"]).scalar_one())
        return value

    def insert_plain(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int]:
        """One multi-row INSERT; AUTOINCREMENT ids rise in the order of its rows."""
        statement = self.insert_statement(len(rows), "RETURNING id")
        return sorted(connection.execute(statement, self.insert_binds(rows)).scalars())

    def insert_dedup(self, connection: Connection, row: NewMessage) -> int | None:
        """One INSERT that does nothing on a duplicate."""
        statement = self.insert_statement(
            1, "ON CONFLICT (queue, dedup_id) WHERE dedup_id IS NOT NULL DO NOTHING RETURNING id"
        )
        result: int | None = connection.execute(
            statement, self.insert_binds([row])
        ).scalar_one_or_none()
        return result

    def claim(
        self,
        connection: Connection,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        *,
        suspicion: Suspicion | None = None,
        prefetch: Prefetch | None = None,
    ) -> Claimed:
        """One statement, and one more for leases of two lengths; the pairs are walked until `limit`
        rows are found.
        """
        self.mend_due_times(connection, pairs)
        ranked = json.dumps([(p.queue, p.priority) for p in pairs])
        binds: dict[str, Any] = {"pairs": ranked, "limit": limit}
        binds |= lease_binds(lease if prefetch is None else prefetch.lease, token)
        found = self.find(connection, "claim", binds, token, suspicion)
        rank = {(p.queue, p.priority): n for n, p in enumerate(pairs)}
        found.sort(key=lambda m: rank[m.queue, m.priority])
        if prefetch is not None and (starting := note_prefetched(found, prefetch)):
            self.lengthen(connection, [row.id for row in starting], lease)
        return found

    def find(
        self,
        connection: Connection,
        statement: str,
        binds: dict[str, Any],
        token: UUID,
        suspicion: Suspicion | None,
    ) -> Claimed:
        """One UPDATE … RETURNING, which leases too."""
        if suspicion is not None:
            statement += "_apart" if statement == "claim_ids" else statement_end(suspicion)
            binds = binds | suspicion.binds
        leased, suspects = apart(connection.execute(self.sql[statement], binds).all(), suspicion)
        rows = self.claimed(leased, token)
        if self._unusable:
            self._mend_times(connection)
        return Claimed(sorted(rows, key=lambda m: (m.next_attempt_at, m.id)), suspects)

    def release_stuck(self, connection: Connection, queues: Sequence[str], limit: int) -> int:
        """One UPDATE."""
        binds = {"queues": json.dumps(list(queues)), "limit": limit}
        return len(connection.execute(self.sql["release_stuck"], binds).all())

    def lease_ends_in(self, connection: Connection, queues: Sequence[str]) -> float | None:
        """One descent of the index for each queue."""
        binds = {"queues": json.dumps(list(queues))}
        found: float | None = connection.execute(self.sql["lease_ends_in"], binds).scalar_one()
        return found

    def release_claim(self, connection: Connection, queues: Sequence[str], token: UUID) -> int:
        """One UPDATE over what is PROCESSING in these queues."""
        binds = {"queues": json.dumps(list(queues)), "token": token.hex}
        return len(connection.execute(self.sql["release_claim"], binds).all())


def _end_listeners_transaction(connection: Connection) -> None:
    """The application's "begin" listener has opened a transaction of its kind, which holds nothing
    yet.
    """
    raw = connection.connection.driver_connection
    if raw is not None and getattr(raw, "in_transaction", False):
        connection.exec_driver_sql("ROLLBACK")
