"""Connections of handlers, which refuse statements after their transaction has ended.

SQLAlchemy does not notice a COMMIT or ROLLBACK sent as text. With asyncpg and aiosqlite, and on
MySQL with a driver in autocommit mode, statements after it begin no new transaction: each would be
committed separately.
"""

from time import monotonic
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker.database.parts.handler_locks import ENDED
from faststream_sqlbroker.exceptions import TransactionEndedError

INSIDE = "sqlbroker_inside"
"""The execution option that marks such a connection; its value is the `LastUse`."""
_IDLE = 0
"""libpq's PQTRANS_IDLE, which psycopg uses, too: the connection is in no transaction."""


class LastUse:
    """When a connection was last used."""

    __slots__ = ("sent_at",)

    def __init__(self) -> None:
        self.sent_at = monotonic()
        """When the last statement was sent (monotonic seconds)."""


def refusing_outside(engine: AsyncEngine) -> AsyncEngine:
    """`engine`, whose connections with the option INSIDE refuse statements without a transaction.

    It shares the pool of `engine`.
    """
    ours = engine.execution_options()
    event.listen(ours.sync_engine, "before_cursor_execute", refuse_outside, retval=True)
    return ours


def refuse_outside(
    connection: Connection,
    _cursor: Any,
    statement: str,
    parameters: Any,
    _context: Any,
    _many: bool,
) -> tuple[str, Any]:
    """Listener of SQLAlchemy's event before_cursor_execute.

    Raises:
        TransactionEndedError: the connection has the option INSIDE and its transaction has ended.
    """
    activity: LastUse | None = connection.get_execution_options().get(INSIDE)
    if activity is not None:
        if not _in_transaction(connection):
            msg = f"{ENDED}: this statement is refused, as it would be committed separately"
            raise TransactionEndedError(msg)
        activity.sent_at = monotonic()
    return statement, parameters


def _in_transaction(connection: Connection) -> bool:
    """Whether the driver knows of an open transaction; true if the driver cannot tell."""
    driver: Any = connection.connection.driver_connection
    if callable(asked := getattr(driver, "is_in_transaction", None)):  # asyncpg
        return bool(asked())
    if callable(asked := getattr(driver, "get_transaction_status", None)):  # aiomysql, asyncmy
        # Outside of autocommit mode asyncmy always says yes, which is right: there the server
        # begins a new transaction with the next statement.
        if driver.get_autocommit():
            # After a deadlock the driver's status is out of date: the error packet has none.
            _ask_server(connection)
        return bool(asked())
    if (info := getattr(driver, "info", None)) is not None:  # psycopg
        return bool(info.transaction_status != _IDLE)
    return bool(getattr(driver, "in_transaction", True))  # aiosqlite


def _ask_server(connection: Connection) -> None:
    """Send a statement without effect; its answer brings the driver's status up to date."""
    cursor: Any = connection.connection.cursor()
    cursor.execute("DO 0")
    cursor.close()
