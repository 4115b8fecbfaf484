"""Connections that refuse statements outside of the one transaction that they were given for.

SQLAlchemy does not notice a COMMIT or ROLLBACK sent as text. What is sent afterwards begins no new
transaction with asyncpg and aiosqlite, nor on MySQL with a driver in autocommit mode: each
statement would be committed by itself.
"""

from time import monotonic
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker.dialects.handler_locks import ENDED
from faststream_sqlbroker.exceptions import TransactionEndedError

INSIDE = "sqlbroker_inside"
"""Execution option that marks such a connection, with its `LastUse`."""
_IDLE = 0
"""psycopg's and libpq's status of a connection without a transaction."""


class LastUse:
    """When a connection was used last."""

    __slots__ = ("sent_at",)

    def __init__(self) -> None:
        """Now."""
        self.sent_at = monotonic()
        """When its last statement was sent (monotonic seconds)."""


def refusing_outside(engine: AsyncEngine) -> AsyncEngine:
    """`engine`, whose connections with the option INSIDE refuse statements outside of a
    transaction.
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
    """SQLAlchemy's listener.

    Raises:
        TransactionEndedError: the transaction has ended.
    """
    activity: LastUse | None = connection.get_execution_options().get(INSIDE)
    if activity is not None:
        if not _in_transaction(connection):
            msg = f"{ENDED}: this statement would be committed by itself, and is refused"
            raise TransactionEndedError(msg)
        activity.sent_at = monotonic()
    return statement, parameters


def _in_transaction(connection: Connection) -> bool:
    """As the driver knows it; true where it does not say."""
    driver: Any = connection.connection.driver_connection
    if callable(asked := getattr(driver, "is_in_transaction", None)):  # asyncpg
        return bool(asked())
    if callable(asked := getattr(driver, "get_transaction_status", None)):  # aiomysql, asyncmy
        # Outside of autocommit mode asyncmy never says no; the server begins a new transaction
        # there.
        if driver.get_autocommit():
            # A deadlock's error does not tell them.
            _ask_server(connection)
        return bool(asked())
    if (info := getattr(driver, "info", None)) is not None:  # psycopg
        return bool(info.transaction_status != _IDLE)
    return bool(getattr(driver, "in_transaction", True))  # aiosqlite


def _ask_server(connection: Connection) -> None:
    cursor: Any = connection.connection.cursor()
    cursor.execute("DO 0")
    cursor.close()
