"""Send single statements on asyncpg's own connection: about 100 µs of client CPU less each.

SQLAlchemy sends its BEGIN with its first statement, so outside of a transaction a statement that is
sent here commits by itself. This is done only where it changes nothing but the time: never
past an engine's listeners or echo, never where prepared statements are turned off (behind PgBouncer
the two messages of an unprepared statement may reach different sessions), never with another
default isolation level than READ COMMITTED.
"""

import asyncio
import logging
from time import monotonic
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, TextClause, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from faststream_sqlbroker.database.connections import ReadOnlyEvictions
from faststream_sqlbroker.database.errors import ErrorClasses
from faststream_sqlbroker.database.guarded_connection import refuse_outside
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.exceptions import UnknownOutcomeError

T = TypeVar("T")

_LOGGER = logging.getLogger("sqlalchemy.engine.Engine")
_READ_COMMITTED = "sqlbroker_read_committed"
_EVENTS = (
    "before_cursor_execute",
    "after_cursor_execute",
    "before_execute",
    "after_execute",
    "begin",
    "commit",
    "handle_error",
    "do_execute",
    "do_execute_no_params",
    "do_executemany",
)
_OWN_LISTENERS = (refuse_outside, ReadOnlyEvictions.handle_error)
LISTENER_CHECK_INTERVAL = 0.05
"""Seconds between two checks for listeners; a new listener may miss the statements in between."""


class BusyError(Exception):
    """The driver's connection cannot be used now."""


class DriverShortcut:
    """Sends `Query`s on asyncpg's connection where that is equivalent."""

    def __init__(self, engine: AsyncEngine, errors: ErrorClasses, *, allowed: bool = True) -> None:
        """Watch how `engine` connects from now on; no connection is made."""
        self._sync_engine = engine.sync_engine
        self._errors = errors
        self._compiled: dict[TextClause, tuple[str, list[str]]] = {}
        self.is_possible = False
        """True if the engine connects in a way that allows the shortcut."""
        self._has_listeners = False
        self._next_check_at = 0.0
        if allowed and engine.dialect.name == "postgresql" and engine.dialect.driver == "asyncpg":
            event.listen(self._sync_engine, "do_connect", self._on_connect)

    def _on_connect(self, _dialect: Any, _record: Any, _args: Any, options: dict[str, Any]) -> None:
        """Record from the connect options if the shortcut is possible (listener of `do_connect`).

        The shortcut sends statements on asyncpg's own connection, past SQLAlchemy. It is not
        possible with a custom connect function, which may return anything, or with options against
        prepared statements, which suggest a pooler such as PgBouncer.
        """
        plain = not {"async_creator_fn", "prepared_statement_name_func"} & options.keys()
        self.is_possible = plain and int(options.get("statement_cache_size", 1)) > 0

    def get_driver(self, connection: Connection) -> Any | None:
        """Return asyncpg's connection under `connection`, None if statements need SQLAlchemy.

        That is so if statements are observed (listeners, echo), if the engine connects in another
        way, or if the connection is closed. To save time, the engine's listeners are checked only
        every `LISTENER_CHECK_INTERVAL` seconds.
        """
        engine = connection.engine
        # The application may publish on a connection of another engine, which may connect in
        # another way.
        if not self.is_possible or engine.pool is not self._sync_engine.pool:
            return None
        if monotonic() > self._next_check_at:
            self._next_check_at = monotonic() + LISTENER_CHECK_INTERVAL
            self._has_listeners = _has_listeners(engine)
        listeners = connection.dispatch
        if (
            self._has_listeners
            or _has_other_listeners(listeners.before_cursor_execute)
            or listeners.before_execute
        ):
            return None
        driver = connection.connection.driver_connection
        return None if driver is None or driver.is_closed() else driver

    async def get_autocommit_driver(self, connection: AsyncConnection) -> Any | None:
        """Return asyncpg's connection for a statement that commits by itself, or None.

        None if statements need SQLAlchemy (`get_driver`), if the connection is in a transaction, or
        if its sessions start with an isolation level other than READ COMMITTED, which the broker's
        statements rely on. The level is read once for each connection.
        """
        sync = connection.sync_connection
        if sync is None or (driver := self.get_driver(sync)) is None or driver.is_in_transaction():
            return None
        if _READ_COMMITTED not in sync.info:
            level = await driver.fetchval("SELECT current_setting('default_transaction_isolation')")
            sync.info[_READ_COMMITTED] = level == "read committed"
        return driver if sync.info[_READ_COMMITTED] else None

    def can_try_inside(self, connection: Connection) -> bool:
        """Return True if `fetch_in_transaction` may work: `connection` is in a transaction."""
        return self.is_possible and connection.in_transaction()

    def _get_driver_in_transaction(self, connection: Connection) -> Any | None:
        """Return asyncpg's connection if the transaction is open on the server, too.

        SQLAlchemy sends its BEGIN only with its first statement. A statement sent before would
        commit by itself, so the result is None.
        """
        transaction = connection.get_nested_transaction() or connection.get_transaction()
        if transaction is None or not transaction.is_active:
            return None
        driver = self.get_driver(connection)
        return driver if driver is not None and driver.is_in_transaction() else None

    async def fetch_in_transaction(self, connection: AsyncConnection, query: Query[T]) -> T:
        """Run `query` in the caller's transaction, on asyncpg's own connection.

        If it is interrupted, the connection is invalidated, and with it the caller's transaction.
        After a `BusyError` the caller sends the statement through SQLAlchemy.

        Raises:
            BusyError: the driver cannot be used, because the transaction has not begun on the
                server, or
                another task uses the connection or has ended its transaction; nothing was sent.
        """
        sync: Any = connection.sync_connection
        # With SQLAlchemy, statements of several tasks wait for each other; asyncpg refuses them.
        # Use SQLAlchemy's lock, so that the application's statements and publishes take turns.
        lock = _get_statement_lock(sync)
        if lock is None:
            raise BusyError
        async with lock:
            if (driver := self._get_driver_in_transaction(sync)) is None:
                raise BusyError
            try:
                return await self.fetch(driver, query)
            except SQLAlchemyError:
                raise
            except BaseException as error:
                if type(error).__name__ == "InterfaceError" and not driver.is_closed():
                    raise BusyError from error
                # The connection may be in the middle of an answer, so nothing else may be sent.
                await connection.invalidate()
                if not isinstance(error, Exception):
                    raise
                raise DBAPIError(None, None, error, connection_invalidated=True) from error

    async def fetch(self, driver: Any, query: Query[T]) -> T:
        """Send `query` on asyncpg's connection `driver`, and return the result.

        The caller has checked that `driver` may be used. The compiled SQL is cached by clause.

        Raises:
            DBAPIError: the server refused the query; nothing was written.
            UnknownOutcomeError: the answer could not be read.
            Exception: any other error of the driver; the query may have been carried out.
        """
        compiled_query = self._compiled.get(query.clause)
        if compiled_query is None:
            compiled = query.clause.compile(dialect=self._sync_engine.dialect)
            compiled_query = self._compiled[query.clause] = (
                str(compiled),
                list(compiled.positiontup or ()),
            )
        sql, names = compiled_query
        binds = query.binds
        try:
            rows = await driver.fetch(sql, *[binds[name] for name in names])
        except Exception as error:
            # An error with a sqlstate is an answer: the server refused the statement. asyncpg
            # refuses values by a DataError. After any other error the statement may have been
            # carried out.
            is_refused = getattr(error, "sqlstate", None) and not self._errors.dialect.ends_session(
                error
            )
            if is_refused or type(error).__name__ == "DataError":
                raise DBAPIError(None, None, error) from error
            raise
        try:
            return query.read(rows)
        except Exception as error:
            msg = f"cannot read the server's answer: {error!r}"
            raise UnknownOutcomeError(msg) from error


def _get_statement_lock(connection: Connection) -> asyncio.Lock | None:
    """Return SQLAlchemy's lock, which serialises the statements on asyncpg's connection."""
    return getattr(connection.connection.dbapi_connection, "_execute_mutex", None)


def _has_listeners(engine: Engine) -> bool:
    """Return True if the statements of `engine` are logged or have listeners.

    Statements sent on asyncpg's own connection (the shortcut) would bypass both.
    """
    if engine.echo or _LOGGER.isEnabledFor(logging.INFO):
        return True
    targets: Any = engine.dispatch, engine.dialect.dispatch
    return any(
        _has_other_listeners(getattr(target, name, ())) for target in targets for name in _EVENTS
    )


def _has_other_listeners(listeners: Any) -> bool:
    """Return True if there are listeners besides the broker's own."""
    return bool(listeners) and any(
        getattr(listener, "__func__", listener) not in _OWN_LISTENERS for listener in listeners
    )
