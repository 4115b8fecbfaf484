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

from faststream_sqlbroker.core.rows import ClaimedMessages, ClaimRequest, NewMessage, ReadyPair
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.core.text import format_value, load_text
from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.database.constants import SQLITE_NOW
from faststream_sqlbroker.database.multi_statement import (
    MultiStatementDialect,
    build_lease_binds,
    mark_prefetched,
)
from faststream_sqlbroker.database.parts.claimed_rows import (
    REQUIRED_TIMES,
    get_statement_suffix,
    split_suspects,
)
from faststream_sqlbroker.database.parts.sizes import SQLITE
from faststream_sqlbroker.database.query import Work
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.tables import Tables

BUSY_TIMEOUT = 10.0
"""Maximum seconds that a transaction waits for the write lock, unless the store's limit is shorter.
"""
MAX_REPAIRED_ROWS = 100
"""Maximum number of rows with an invalid due time that one claim repairs."""

# Result codes, by their meaning for the broker.

READ_ONLY = 8
"""SQLITE_READONLY."""
LOCKED = frozenset({5, 6})
"""SQLITE_BUSY, SQLITE_LOCKED."""
TRANSIENT_CODES = LOCKED | {READ_ONLY, 9, 10, 13, 15}
"""SQLITE_READONLY, INTERRUPT, IOERR, FULL, and PROTOCOL, a race for the lock of the WAL."""
STALE_FILE_CODES = frozenset({READ_ONLY, 10})
"""SQLITE_READONLY and IOERR: a connection keeps the state of the file from when it was opened."""

_ERROR = 1
"""SQLITE_ERROR: only the message says what it is."""
_CLOSED = (ValueError, sqlite3.OperationalError, sqlite3.ProgrammingError)
_UNSENT = frozenset(
    {"no active connection", "connection closed", "cannot operate on a closed database"}
)


class SqliteErrors:
    """The classification of SQLite's errors, for the dialect."""

    def is_transient(self, error: BaseException) -> bool:
        """Return True for busy, locked, read-only, full disk or I/O error, by SQLite's code."""
        return get_result_code(error) in TRANSIENT_CODES

    def ends_session(self, error: BaseException) -> bool:  # noqa: ARG002
        """Return False: there is no server that could end a session."""
        return False

    def was_never_sent(self, error: BaseException) -> bool:
        """Return True if the connection was closed, by the message.

        aiosqlite, SQLAlchemy for aiosqlite, and sqlite3 have such messages.
        """
        return type(error) in _CLOSED and str(error).rstrip(".").lower() in _UNSENT

    def is_denied(self, error: BaseException) -> bool:
        """Return True for a read-only database or a missing table, by SQLite's code."""
        code = get_result_code(error)
        return code == READ_ONLY or (code == _ERROR and str(error).startswith("no such table"))

    def spoils_connection(self, error: BaseException) -> bool:
        """Return True if the connection's file is stale; opened read-only, a file stays so."""
        return get_result_code(error) in STALE_FILE_CODES


class SqliteDialect(SqliteErrors, MultiStatementDialect):
    """All SQL for SQLite."""

    name = "sqlite"
    cancel_once = True  # aiosqlite
    one_writer = True
    known_size_limit = SQLITE
    # A column accepts any value; text that is not valid UTF-8 would make the whole answer
    # unreadable.
    claimed_expressions: ClassVar[Mapping[str, str]] = {
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
        self._invalid_times: list[tuple[int, Sequence[str]]] = []

    def setup(self, connection: Connection) -> None:
        """Turn on WAL (kept by the file), which lets readers go on while a transaction writes.

        Raises:
            SetupError: SQLite is too old for the broker's statements.
        """
        version = connection.execute(text("SELECT sqlite_version()")).scalar_one()
        if tuple(int(p) for p in version.split(".")[:2]) < (3, 35):
            msg = (
                f"SQLite {version} is too old: the broker needs 3.35 or newer (UPDATE … RETURNING)"
            )
            raise SetupError(msg)
        _end_listeners_transaction(connection)
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")

    def lock_order(self, connection: Connection, queues: Sequence[str]) -> set[str]:  # noqa: ARG002
        """Return `queues`: SQLite has a single writer anyway."""
        return set(queues)

    def lock_scopes(self, connection: Connection, names: Sequence[str]) -> set[str]:  # noqa: ARG002
        """Return `names`: SQLite has a single writer anyway."""
        return set(names)

    def begin(self, connection: Connection, idle_limit: float | None = None) -> None:  # noqa: ARG002
        """Take the write lock now.

        Upgrading a read transaction later fails at once with SQLITE_BUSY_SNAPSHOT.
        """
        _end_listeners_transaction(connection)
        timeout_ms = round(min(BUSY_TIMEOUT, self.time_limit) * 1000)
        # The application may have changed these settings on the shared connection.
        _run_together(
            connection,
            f"PRAGMA busy_timeout={timeout_ms}",
            "PRAGMA synchronous=FULL",
            "BEGIN IMMEDIATE",
        )

    def bind_list(self, values: Sequence[Any]) -> str:
        """Return a JSON array."""
        return json.dumps(list(values))

    def bind_time(self, value: datetime) -> int:
        """Return microseconds since 1970 (UTC)."""
        return to_microseconds(value)

    def time(self, value: Any) -> Any:
        """Convert microseconds since 1970 to an aware datetime."""
        return from_microseconds(value)

    def repair_due_times(self, connection: Connection, pairs: Sequence[ReadyPair]) -> None:
        """Make rows with an invalid due time due now, and log a warning.

        Text, as of datetime('now'), and times in another unit sort before or after all valid times.
        """
        invalid_pairs = [pair for pair in pairs if pair.has_invalid_due]
        if not invalid_pairs:
            return
        binds = {
            "pairs": json.dumps([(p.queue, p.priority) for p in invalid_pairs]),
            "limit": MAX_REPAIRED_ROWS,
        }
        for message_id, queue, value in connection.execute(self.sql["unusable"], binds).all():
            connection.execute(self.sql["mend"], {"id": message_id})
            self.warn(
                f"message {message_id} of queue {queue!r} is due now: its next_attempt_at must be "
                f"microseconds since 1970 (UTC), got {format_value(load_text(value))}"
            )

    def note_unusable(self, message_id: int, names: Sequence[str]) -> None:
        """Record invalid times of a claimed row until the claim ends, to replace them in the table.

        Called while the rows are converted: SQLite's columns accept any value. Readers of the
        archive would fail on such times.
        """
        self._invalid_times.append((message_id, names))

    def _repair_times(self, connection: Connection) -> None:
        """Replace invalid times of the rows just claimed: by the claim's if required, else by NULL.

        Another program may have stored them. They would make the row's copy in the archive
        unreadable, and its `message_id` change with each claim.
        """
        invalid_times, self._invalid_times = self._invalid_times, []
        c = self.tables.message.c
        for message_id, names in invalid_times:
            values = {name: c.acquired_at if name in REQUIRED_TIMES else null() for name in names}
            connection.execute(update(self.tables.message).where(c.id == message_id).values(values))

    def insert_plain(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int]:
        """Insert all rows in a single statement; AUTOINCREMENT ids rise in row order."""
        statement = self.get_insert_statement(len(rows), "RETURNING id")
        return sorted(connection.execute(statement, self.build_insert_binds(rows)).scalars())

    def insert_dedup(self, connection: Connection, row: NewMessage) -> int | None:
        """Insert the row by a statement that does nothing on a duplicate; None for a duplicate."""
        statement = self.get_insert_statement(
            1, "ON CONFLICT (queue, dedup_id) WHERE dedup_id IS NOT NULL DO NOTHING RETURNING id"
        )
        result: int | None = connection.execute(
            statement, self.build_insert_binds([row])
        ).scalar_one_or_none()
        return result

    def build_claim(self, request: ClaimRequest) -> Work[ClaimedMessages]:
        """Build a claim of a single statement, or of two for leases of two lengths.

        The pairs (queue and priority) are searched in order until `limit` rows are found. With
        `prefetch`, rows that start now and rows that wait for a worker get leases of two lengths.
        """

        def claim(connection: Connection) -> ClaimedMessages:
            """Lease in a single UPDATE; then extend the leases of rows that start immediately."""
            self.repair_due_times(connection, request.pairs)
            prefetch = request.prefetch
            lease = request.lease if prefetch is None else prefetch.lease
            rank = {(p.queue, p.priority): n for n, p in enumerate(request.pairs)}
            binds: dict[str, Any] = {"pairs": json.dumps(list(rank)), "limit": request.limit}
            binds |= build_lease_binds(lease, request.token)
            messages = self.lock_claimable(
                connection, "claim", binds, request.token, request.suspect_rule
            )
            messages.sort(key=lambda m: rank[m.queue, m.priority])
            if prefetch is not None and (starting := mark_prefetched(messages, prefetch)):
                self.extend_leases(connection, [row.id for row in starting], request.lease)
            return messages

        return claim

    def lock_claimable(
        self,
        connection: Connection,
        statement: str,
        binds: dict[str, Any],
        token: UUID,
        suspect_rule: SuspectRule | None,
    ) -> ClaimedMessages:
        """Find and lease the rows in a single UPDATE … RETURNING.

        With `suspect_rule`, a variant of the statement leaves suspects (messages that may have
        killed their process) unleased, and returns them apart.
        """
        if suspect_rule is not None:
            statement += (
                "_apart" if statement == "claim_ids" else get_statement_suffix(suspect_rule)
            )
            binds = binds | suspect_rule.binds
        other_rows, suspects = split_suspects(
            connection.execute(self.sql[statement], binds).all(), suspect_rule
        )
        rows = self.to_messages(other_rows, token)
        if self._invalid_times:
            self._repair_times(connection)
        return ClaimedMessages(sorted(rows, key=lambda m: (m.next_attempt_at, m.id)), suspects)

    def release_claim(self, connection: Connection, queues: Sequence[str], token: UUID) -> int:
        """Release the rows by a single UPDATE of the PROCESSING rows in `queues`."""
        binds = {"queues": json.dumps(list(queues)), "token": token.hex}
        return len(connection.execute(self.sql["release_claim"], binds).all())


def _run_together(connection: Connection, *statements: str) -> None:
    """Run `statements`, which return no rows and begin outside of a transaction.

    aiosqlite takes them as one call of its thread. SQLAlchemy makes three calls of each, and each
    waits until the event loop, which runs handlers, has its next turn.

    Raises:
        DBAPIError: a statement was refused.
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
        # The thread may still run the script, or has ended.
        connection.invalidate()
        if not isinstance(error, Exception):
            raise
        raise DBAPIError(script, None, error, connection_invalidated=True) from error


def _end_listeners_transaction(connection: Connection) -> None:
    """Roll back the empty transaction opened by the application's "begin" listener.

    Such a listener sends BEGIN for each transaction of SQLAlchemy. Inside a transaction, the
    broker's own BEGIN IMMEDIATE and some settings would fail.
    """
    raw = connection.connection.driver_connection
    if raw is not None and getattr(raw, "in_transaction", False):
        connection.exec_driver_sql("ROLLBACK")


def is_locked(error: BaseException) -> bool:
    """Return True if another connection holds a lock that this connection needs."""
    return get_result_code(error) in LOCKED


def get_result_code(error: BaseException | None) -> int:
    """Return SQLite's primary result code, 0 without a code.

    It is the lowest byte of the extended code.
    """
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
