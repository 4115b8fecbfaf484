"""Connections of handlers, which refuse statements after their transaction has ended.

SQLAlchemy does not notice a COMMIT or ROLLBACK sent as text. With asyncpg and aiosqlite, and on
MySQL with a driver in autocommit mode, statements after it begin no new transaction: each would be
committed separately.
"""

from time import monotonic
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker.database.parts.handler_locks import TRANSACTION_ENDED
from faststream_sqlbroker.exceptions import TransactionEndedError

INSIDE = "sqlbroker_inside"
"""The execution option that marks a handler's connection, with the time of the last use."""
_IDLE = 0
"""libpq's PQTRANS_IDLE, which psycopg uses, too: the connection is in no transaction."""


class ConnectionActivity:
    """The time of a connection's last use."""

    __slots__ = ("sent_at",)

    def __init__(self) -> None:
        self.sent_at = monotonic()
        """The time of the last statement (monotonic seconds)."""


def with_transaction_guard(engine: AsyncEngine) -> AsyncEngine:
    """Return an engine whose connections refuse statements without a transaction.

    Only connections with the option INSIDE do so. The engine shares the pool of `engine`.
    """
    guarded = engine.execution_options()
    event.listen(guarded.sync_engine, "before_cursor_execute", refuse_outside, retval=True)
    return guarded


def refuse_outside(
    connection: Connection,
    _cursor: Any,
    statement: str,
    parameters: Any,
    _context: Any,
    _many: bool,
) -> tuple[str, Any]:
    """Refuse a statement outside of a transaction (listener of `before_cursor_execute`).

    A handler that sent COMMIT or ROLLBACK as text would otherwise commit each later statement
    separately. Only connections with the option INSIDE are checked; the time of each statement is
    recorded for them.

    Raises:
        TransactionEndedError: the connection has the option INSIDE and its transaction has ended.
    """
    activity: ConnectionActivity | None = connection.get_execution_options().get(INSIDE)
    if activity is not None:
        if not _is_in_transaction(connection):
            msg = (
                f"{TRANSACTION_ENDED}: the broker refuses this statement, because it would "
                "commit separately"
            )
            raise TransactionEndedError(msg)
        activity.sent_at = monotonic()
    return statement, parameters


def _is_in_transaction(connection: Connection) -> bool:
    """Return True if the driver has an open transaction, or cannot tell.

    Asks the driver, because SQLAlchemy does not notice a COMMIT or ROLLBACK sent as text.
    """
    driver: Any = connection.connection.driver_connection
    if callable(method := getattr(driver, "is_in_transaction", None)):  # asyncpg
        return bool(method())
    if callable(method := getattr(driver, "get_transaction_status", None)):  # aiomysql, asyncmy
        # Outside of autocommit mode asyncmy always returns True, which is right: there the server
        # begins a new transaction with the next statement.
        if driver.get_autocommit():
            # After a deadlock the driver's status is out of date: the error packet has no status.
            _refresh_driver_status(connection)
        return bool(method())
    if (info := getattr(driver, "info", None)) is not None:  # psycopg
        return bool(info.transaction_status != _IDLE)
    return bool(getattr(driver, "in_transaction", True))  # aiosqlite


def _refresh_driver_status(connection: Connection) -> None:
    """Send a statement without effect, whose answer updates the driver's status."""
    cursor: Any = connection.connection.cursor()
    cursor.execute("DO 0")
    cursor.close()
