"""Handlers' locks where transactions have no numbers: MySQL, MariaDB and SQLite."""

from collections.abc import Sequence

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.rows import Leases, Settlement, SettleResult
from faststream_sqlbroker.database.multi_statement import MultiStatementDialect
from faststream_sqlbroker.database.parts.handler_locks import ENDED, HandlerLock, HandlerLocks
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.database.parts.units import settle_units
from faststream_sqlbroker.exceptions import TransactionEndedError


class MarkedLocks(HandlerLocks):
    """A savepoint, and a mark in the rows."""

    def __init__(self, dialect: MultiStatementDialect) -> None:
        self._dialect = dialect

    def lock(self, connection: Connection, leases: Leases, idle_limit: float) -> HandlerLock:
        """Mark the rows, which locks them; if a lease was lost, find out which are still held."""
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
        connection.exec_driver_sql("SAVEPOINT sqlbroker_joined")
        return HandlerLock(leases, held)

    def prove(self, connection: Connection, lock: HandlerLock) -> None:  # noqa: ARG002
        """Release the savepoint, and with it any that the handler has left open."""
        try:
            connection.exec_driver_sql("RELEASE SAVEPOINT sqlbroker_joined")
        except DBAPIError as error:
            if error.connection_invalidated or (
                error.orig and self._dialect.is_transient(error.orig)
            ):
                raise
            raise TransactionEndedError(ENDED) from error

    def settle(
        self, connection: Connection, lock: HandlerLock, settlements: Sequence[Settlement]
    ) -> SettleResult:
        """Settle as the flush does, without a search for the rows that are held: the lock knows."""
        self.prove(connection, lock)
        return settle_units(self._dialect, connection, settlements, settle=self._settle)

    def _settle(self, connection: Connection, settlements: Sequence[Settlement]) -> SettleResult:
        self._dialect.settle_locked(connection, settlements)
        return SettleResult({s.id for s in settlements})

    def was_committed(self, connection: Connection, lock: HandlerLock) -> bool:
        """Look for the marks in the rows."""
        return bool(self._dialect.held(connection, "joined", lock.leases))
