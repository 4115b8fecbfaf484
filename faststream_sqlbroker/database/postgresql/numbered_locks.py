"""Handlers' locks on PostgreSQL, which numbers its transactions."""

from collections.abc import Sequence

from sqlalchemy import Connection

from faststream_sqlbroker.core.rows import Leases, Settlement, SettleResult
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.handler_locks import ENDED, HandlerLock, HandlerLocks
from faststream_sqlbroker.database.parts.units import settle_units
from faststream_sqlbroker.database.postgresql.answers import settled_of
from faststream_sqlbroker.database.postgresql.binds import milliseconds, settle_queries
from faststream_sqlbroker.exceptions import TransactionEndedError


class NumberedLocks(HandlerLocks):
    """Locks that are identified by the number of the transaction."""

    def __init__(self, dialect: Operations) -> None:
        self._dialect = dialect

    def lock(self, connection: Connection, leases: Leases, idle_limit: float) -> HandlerLock:
        """Lock, read the number and set the idle limit, in one statement."""
        binds = {
            "ids": [i for i, _ in leases],
            "tokens": [token for _, token in leases],
            "limit": milliseconds(idle_limit),
        }
        rows = connection.execute(self._dialect.sql["lock_numbered"], binds).all()
        number, since = rows[0][1:3] if rows else ("", None)
        return HandlerLock(leases, {row[0] for row in rows}, number, since)

    def prove(self, connection: Connection, lock: HandlerLock) -> None:
        """Compare the transaction's number with the lock's."""
        if connection.execute(self._dialect.sql["transaction"]).scalar_one() != lock.number:
            raise TransactionEndedError(ENDED)

    def settle(
        self, connection: Connection, lock: HandlerLock, settlements: Sequence[Settlement]
    ) -> SettleResult:
        """Settle by statements that compare the numbers themselves: no round trip more."""
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
        """Ask the server, which remembers how transactions ended; false if it does not know."""
        binds = {"number": lock.number, "since": lock.since, "ids": sorted(lock.held)}
        return bool(connection.execute(self._dialect.sql["was_committed"], binds).scalar_one())
