"""SQLite ≥ 3.35: one writer at a time, BEGIN IMMEDIATE, WAL.

Differs from PostgreSQL: no row locks, so nothing is skipped; every transaction of the broker takes
the write lock at its start and waits for it (busy timeout). Times are integers, microseconds since
1970 (UTC).
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

from sqlalchemy import Connection, null, text, update
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.rows import Claimed, NewMessage, Prefetch, ReadyPair
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.core.text import load_text, short
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.constants import SQLITE_NOW
from faststream_sqlbroker.database.multi_statement import (
    MultiStatementDialect,
    lease_binds,
    note_prefetched,
)
from faststream_sqlbroker.database.parts.claimed_rows import (
    NEEDED_TIMES,
    split_suspects,
    statement_end,
)
from faststream_sqlbroker.database.parts.sizes import SQLITE
from faststream_sqlbroker.database.query import Work
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.tables import Tables
from faststream_sqlbroker.schema.types import clock

BUSY_TIMEOUT = 10.0
"""Most seconds that a transaction waits for the write lock; the store's time limit may be shorter.
"""
MENDED = 100
"""Rows whose due time is none that one claim mends."""

# Result codes, by what they mean for the broker.

READ_ONLY = 8
"""SQLITE_READONLY."""
LOCKED = frozenset({5, 6})
"""SQLITE_BUSY, SQLITE_LOCKED."""
TRANSIENT_CODES = LOCKED | {READ_ONLY, 9, 10, 13, 15}
"""SQLITE_READONLY, INTERRUPT, IOERR, FULL, and PROTOCOL, which is a race for the lock of the WAL.
"""
REOPENED = frozenset({READ_ONLY, 10})
"""SQLITE_READONLY and IOERR: a connection goes on with the file as it was when it was opened."""

_ERROR = 1
"""SQLITE_ERROR: the text tells what it is."""
_CLOSED = (ValueError, sqlite3.OperationalError, sqlite3.ProgrammingError)
_UNSENT = frozenset(
    {"no active connection", "connection closed", "cannot operate on a closed database"}
)


class SqliteErrors:
    """Judges errors for the dialect."""

    def is_transient(self, error: BaseException) -> bool:
        """Busy, locked, read-only, full disk or I/O error, by SQLite's code."""
        return result_code(error) in TRANSIENT_CODES

    def ends_session(self, error: BaseException) -> bool:  # noqa: ARG002
        """There is no server that could."""
        return False

    def was_never_sent(self, error: BaseException) -> bool:
        """By the text: aiosqlite, SQLAlchemy for it, and sqlite3 refuse a closed connection."""
        return type(error) in _CLOSED and str(error).rstrip(".").lower() in _UNSENT

    def is_denied(self, error: BaseException) -> bool:
        """By SQLite's code: read-only, or no such table."""
        code = result_code(error)
        return code == READ_ONLY or (code == _ERROR and str(error).startswith("no such table"))

    def spoils(self, error: BaseException) -> bool:
        """A file that was opened read-only stays so."""
        return result_code(error) in REOPENED


class SqliteDialect(SqliteErrors, MultiStatementDialect):
    """All SQL for SQLite."""

    name = "sqlite"
    cancel_once = True  # aiosqlite
    row_locks = False
    one_writer = True
    known_limit = SQLITE
    # A column holds whatever was put there; text that is no UTF-8 would make the whole answer
    # unreadable.
    claimed_as: ClassVar[Mapping[str, str]] = {
        "payload": "CAST(payload AS BLOB) AS payload",
        "headers": "CAST(headers AS BLOB) AS headers",
        "key": 'CAST("key" AS BLOB) AS "key"',
    }
    insert_row = (
        "(:queue, :payload, :headers, :priority, :key, :dedup_id, "
        f"{SQLITE_NOW}, COALESCE(:at, {SQLITE_NOW} + :delay), {SQLITE_NOW} + :expires)"
    )

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        super().__init__(tables, sqlalchemy_dialect)
        self._unusable: list[tuple[int, Sequence[str]]] = []

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

    def lock_scopes(self, connection: Connection, names: Sequence[str]) -> set[str]:  # noqa: ARG002
        """There is one writer anyway."""
        return set(names)

    def begin(self, connection: Connection, idle_limit: float | None = None) -> None:  # noqa: ARG002
        """Take the write lock now: upgrading a read transaction fails at once with
        SQLITE_BUSY_SNAPSHOT.
        """
        _end_listeners_transaction(connection)
        patience = round(min(BUSY_TIMEOUT, self.time_limit) * 1000)
        # The application may have changed them on the connection that it shares.
        _run_together(
            connection,
            f"PRAGMA busy_timeout={patience}",
            "PRAGMA synchronous=FULL",
            "BEGIN IMMEDIATE",
        )

    def listed(self, values: Sequence[Any]) -> str:
        """As JSON."""
        return json.dumps(list(values))

    def bind_time(self, value: datetime) -> int:
        """Microseconds since 1970 (UTC)."""
        return to_microseconds(value)

    def time(self, value: Any) -> Any:
        """Microseconds since 1970 as an aware datetime."""
        return from_microseconds(value)

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

    def claiming(
        self,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        *,
        suspicion: Suspicion | None = None,
        prefetch: Prefetch | None = None,
    ) -> Work[Claimed]:
        """One statement, and one more for leases of two lengths; the pairs are walked until `limit`
        rows are found.
        """

        def claim(connection: Connection) -> Claimed:
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

        return claim

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
        leased, suspects = split_suspects(
            connection.execute(self.sql[statement], binds).all(), suspicion
        )
        rows = self.claimed(leased, token)
        if self._unusable:
            self._mend_times(connection)
        return Claimed(sorted(rows, key=lambda m: (m.next_attempt_at, m.id)), suspects)

    def release_claim(self, connection: Connection, queues: Sequence[str], token: UUID) -> int:
        """One UPDATE over what is PROCESSING in these queues."""
        binds = {"queues": json.dumps(list(queues)), "token": token.hex}
        return len(connection.execute(self.sql["release_claim"], binds).all())


def _run_together(connection: Connection, *statements: str) -> None:
    """Run `statements`, which give no rows and begin outside of a transaction.

    aiosqlite takes them as one call of its thread. SQLAlchemy makes three calls of each, and each
    waits until the event loop, which runs handlers, has its next turn.

    Raises:
        DBAPIError: one was refused.
    """
    adapted: Any = connection.connection.dbapi_connection
    if connection.dialect.driver != "aiosqlite":
        for statement in statements:
            connection.exec_driver_sql(statement)
        return
    script = "; ".join(statements)
    try:
        adapted.run_async(lambda driver: driver.executescript(script))
    except sqlite3.Error as error:
        raise DBAPIError.instance(
            script, None, error, sqlite3.Error, dialect=connection.dialect
        ) from error
    except BaseException as error:
        # The thread may be at it still, or has ended.
        connection.invalidate()
        if not isinstance(error, Exception):
            raise
        raise DBAPIError(script, None, error, connection_invalidated=True) from error


def _end_listeners_transaction(connection: Connection) -> None:
    """The application's "begin" listener has opened a transaction of its kind, which holds nothing
    yet.
    """
    raw = connection.connection.driver_connection
    if raw is not None and getattr(raw, "in_transaction", False):
        connection.exec_driver_sql("ROLLBACK")


def is_locked(error: BaseException) -> bool:
    """Whether another connection has what this one needs."""
    return result_code(error) in LOCKED


def result_code(error: BaseException | None) -> int:
    """SQLite's primary result code (the lowest byte of the extended one); 0 if it is none of its
    errors.
    """
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
