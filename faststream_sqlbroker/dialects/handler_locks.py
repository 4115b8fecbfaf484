"""The lock that a handler's transaction begins with, and the proof before its ack that it is still
held.

A transaction can end behind the back of who began it. ROLLBACK ends it, and a deadlock does on
MySQL and MariaDB; COMMIT ends it, and DDL does on MySQL and MariaDB. What is sent afterwards
belongs to another transaction, so that an ack would be committed without what the handler did
before. And who finds the transaction gone must know which of the two it was: after a rollback the
message may be tried again, after a commit half of its work is done.

PostgreSQL numbers its transactions and remembers what became of each, unless it crashes. Elsewhere
a savepoint is set after the lock, which is there as long as the transaction is; and the rows are
locked by marking them, so that the mark can be seen from outside only if it was committed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Connection, DateTime, bindparam
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.policies.flags import JOINED
from faststream_sqlbroker.core.rows import Leases, Settlement, SettleResult
from faststream_sqlbroker.dialects.postgresql.answers import settled_of
from faststream_sqlbroker.dialects.postgresql.binds import milliseconds, settle_queries
from faststream_sqlbroker.dialects.postgresql.sql import WAS_COMMITTED
from faststream_sqlbroker.dialects.sizes import chunks
from faststream_sqlbroker.dialects.units import settle_units
from faststream_sqlbroker.exceptions import TransactionEndedError

if TYPE_CHECKING:
    from faststream_sqlbroker.dialects.base import Dialect
    from faststream_sqlbroker.dialects.multi_statement import MultiStatementDialect

SAVEPOINT = "sqlbroker_joined"
ENDED = "the transaction that the handler was given has ended before its ack"


@dataclass(frozen=True, slots=True)
class HandlerLock:
    """What a handler's transaction has locked, and how it is recognised."""

    leases: Leases
    held: set[int]
    """Ids of the rows that are locked; the leases of the others are lost."""
    number: str = ""
    """PostgreSQL's number of the transaction."""
    since: datetime | None = None
    """PostgreSQL's time when it was locked."""


class HandlerLocks(ABC):
    """The locks of one dialect."""

    @abstractmethod
    def lock(self, connection: Connection, leases: Leases, idle_limit: float) -> HandlerLock:
        """Lock the rows of `leases` that are still held until the transaction ends; with its idle
        limit in seconds.
        """

    @abstractmethod
    def prove(self, connection: Connection, lock: HandlerLock) -> None:
        """Make sure that the transaction is still the one that has taken `lock`; once only.

        Raises:
            TransactionEndedError: it is not.
        """

    @abstractmethod
    def settle(
        self, connection: Connection, lock: HandlerLock, settlements: Sequence[Settlement]
    ) -> SettleResult:
        """Write `settlements` of rows that `lock` holds, and what is chained to them, if `prove`
        would not raise.

        Raises:
            TransactionEndedError: it would.
        """

    @abstractmethod
    def was_committed(self, connection: Connection, lock: HandlerLock) -> bool:
        """Whether the transaction that has taken `lock`, and has ended, was committed; asked in
        another one.
        """


class MarkedLocks(HandlerLocks):
    """MySQL, MariaDB and SQLite: a savepoint, and a mark in the rows."""

    def __init__(self, dialect: "MultiStatementDialect", by_id: str) -> None:
        """Prepare the statements of `dialect`; `by_id` is its hint to the primary key."""
        self._dialect = dialect
        binds: list[Any] = [bindparam(name, expanding=True) for name in ("ids", "pairs")]
        in_order, wait = (" ORDER BY id", " FOR UPDATE") if dialect.row_locks else ("", "")
        words = {"by_id": by_id, "in_order": in_order, "wait": wait, "joined": str(JOINED)}
        dialect.add_statement("join", _JOIN, *binds, **words)
        dialect.add_statement("joined", _JOINED, binds[0], **words)

    def lock(self, connection: Connection, leases: Leases, idle_limit: float) -> HandlerLock:
        """Mark them, which locks them; what else is locked only where a lease is lost."""
        self._dialect.begin(connection, idle_limit)
        marked = 0
        ordered = sorted(leases)
        for part in chunks(ordered):
            binds = {"ids": [i for i, _ in part], "pairs": [(i, token.hex) for i, token in part]}
            marked += connection.execute(self._dialect.sql["join"], binds).rowcount
        held = (
            {i for i, _ in leases}
            if marked == len(leases)
            else self._dialect.lock(connection, leases)
        )
        connection.exec_driver_sql(f"SAVEPOINT {SAVEPOINT}")
        return HandlerLock(leases, held)

    def prove(self, connection: Connection, lock: HandlerLock) -> None:  # noqa: ARG002
        """Release the savepoint; those of the handler's that it has left open go with it."""
        try:
            connection.exec_driver_sql(f"RELEASE SAVEPOINT {SAVEPOINT}")
        except DBAPIError as error:
            if error.connection_invalidated or (
                error.orig and self._dialect.is_transient(error.orig)
            ):
                raise
            raise TransactionEndedError(ENDED) from error

    def settle(
        self, connection: Connection, lock: HandlerLock, settlements: Sequence[Settlement]
    ) -> SettleResult:
        """As the flush, without its search for what is held."""
        self.prove(connection, lock)
        return settle_units(self._dialect, connection, settlements, settle=self._settle)

    def _settle(self, connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
        self._dialect.settle_locked(connection, settlements)
        return SettleResult({s.id for s in settlements})

    def was_committed(self, connection: Connection, lock: HandlerLock) -> bool:
        """Look for the marks."""
        return bool(self._dialect.held(connection, "joined", lock.leases))


class NumberedLocks(HandlerLocks):
    """PostgreSQL: the number of the transaction."""

    def __init__(self, dialect: "Dialect") -> None:
        """Prepare the statements."""
        self._dialect = dialect
        dialect.add_statement("transaction", "SELECT pg_current_xact_id_if_assigned()::text")
        binds = (
            bindparam("since", type_=DateTime(timezone=True)),
            bindparam("ids", type_=ARRAY(BigInteger)),
        )
        dialect.add_statement("was_committed", WAS_COMMITTED, *binds)

    def lock(self, connection: Connection, leases: Leases, idle_limit: float) -> HandlerLock:
        """One statement, which sets the limit if it locks anything."""
        binds = {
            "ids": [i for i, _ in leases],
            "tokens": [token for _, token in leases],
            "limit": milliseconds(idle_limit),
        }
        rows = connection.execute(self._dialect.sql["lock_numbered"], binds).all()
        number, since = rows[0][1:3] if rows else ("", None)
        return HandlerLock(leases, {row[0] for row in rows}, number, since)

    def prove(self, connection: Connection, lock: HandlerLock) -> None:
        """Compare the numbers."""
        if connection.execute(self._dialect.sql["transaction"]).scalar_one() != lock.number:
            raise TransactionEndedError(ENDED)

    def settle(
        self, connection: Connection, lock: HandlerLock, settlements: Sequence[Settlement]
    ) -> SettleResult:
        """By statements that compare the numbers themselves."""
        dialect = self._dialect

        def settle(connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
            settled: set[int] = set()
            archive = dialect.has_archive
            for query in settle_queries(
                dialect.sql, settlements, archive=archive, inside=lock.number
            ):
                settled |= query(connection)
            if not settled:
                self.prove(connection, lock)
            return settled_of(settlements, settled)

        return settle_units(dialect, connection, settlements, settle=settle)

    def was_committed(self, connection: Connection, lock: HandlerLock) -> bool:
        """As the server remembers it, if it can."""
        binds = {"number": lock.number, "since": lock.since, "ids": sorted(lock.held)}
        return bool(connection.execute(self._dialect.sql["was_committed"], binds).scalar_one())


_JOIN = """
UPDATE {message} {by_id}
SET policy_marks = policy_marks | {joined}
WHERE id IN :ids AND (id, lease_token) IN :pairs{in_order}
"""
_JOINED = """
SELECT id, lease_token FROM {message} {by_id}
WHERE id IN :ids AND (policy_marks & {joined}) <> 0{in_order}{wait}
"""
