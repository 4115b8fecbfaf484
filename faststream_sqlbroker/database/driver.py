"""Send single statements on asyncpg's own connection: about 100 µs of client CPU less each.

SQLAlchemy sends its BEGIN with its first statement, so outside of a transaction a statement that is
sent here commits by itself. This is done only where it changes nothing but the time it takes: never
past an engine's listeners or echo, never where prepared statements are turned off (behind PgBouncer
the two messages of one unprepared statement may reach different sessions), never under another
default isolation than READ COMMITTED.
"""

import asyncio
import logging
from time import monotonic
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, TextClause, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from faststream_sqlbroker.database.errors import ErrorClasses
from faststream_sqlbroker.database.guarded_connection import refuse_outside
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.exceptions import UnknownOutcomeError

T = TypeVar("T")

_LOGGER = logging.getLogger("sqlalchemy.engine.Engine")
_CHECKED = "sqlbroker_read_committed"
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
LOOK_INTERVAL = 0.05
"""Seconds between two looks for listeners; one that was just added may miss so much."""


class BusyError(Exception):
    """The driver's connection cannot be used now."""


class DriverShortcut:
    """Sends `Query`s on asyncpg's connection where that is as good."""

    def __init__(self, engine: AsyncEngine, errors: ErrorClasses, *, allowed: bool = True) -> None:
        """Notice how `engine` connects from now on; no connection is made."""
        self._sync_engine = engine.sync_engine
        self._errors = errors
        self._texts: dict[TextClause, tuple[str, list[str]]] = {}
        self.possible = False
        """Whether connections are made in a way that allows it."""
        self._watched = False
        self._look_again_at = 0.0
        if allowed and engine.dialect.name == "postgresql" and engine.dialect.driver == "asyncpg":
            event.listen(self._sync_engine, "do_connect", self._connecting)

    def _connecting(self, _dialect: Any, _record: Any, _args: Any, options: dict[str, Any]) -> None:
        plain = not {"async_creator_fn", "prepared_statement_name_func"} & options.keys()
        self.possible = plain and int(options.get("statement_cache_size", 1)) > 0

    def usable(self, connection: Connection) -> Any | None:
        """The driver's connection under `connection`, if nothing else listens to its statements."""
        engine = connection.engine
        # The application may publish on a connection of another engine. How that one connects is
        # not known.
        if not self.possible or engine.pool is not self._sync_engine.pool:
            return None
        if monotonic() > self._look_again_at:
            self._look_again_at = monotonic() + LOOK_INTERVAL
            self._watched = _watched(engine)
        listeners = connection.dispatch
        if self._watched or _others(listeners.before_cursor_execute) or listeners.before_execute:
            return None
        driver = connection.connection.driver_connection
        return None if driver is None or driver.is_closed() else driver

    async def alone(self, connection: AsyncConnection) -> Any | None:
        """As `usable`, for statements that commit by themselves."""
        sync = connection.sync_connection
        if sync is None or (driver := self.usable(sync)) is None or driver.is_in_transaction():
            return None
        if _CHECKED not in sync.info:
            level = await driver.fetchval("SELECT current_setting('default_transaction_isolation')")
            sync.info[_CHECKED] = level == "read committed"
        return driver if sync.info[_CHECKED] else None

    def may_be_inside(self, connection: Connection) -> bool:
        """Whether to try `fetch_in`: a transaction of `connection` goes on."""
        return self.possible and connection.in_transaction()

    def _inside(self, connection: Connection) -> Any | None:
        """The driver's connection, if the transaction that `connection` is in has begun on the
        server, too.
        """
        transaction = connection.get_nested_transaction() or connection.get_transaction()
        if transaction is None or not transaction.is_active:
            return None
        driver = self.usable(connection)
        return driver if driver is not None and driver.is_in_transaction() else None

    async def fetch_in(self, connection: AsyncConnection, query: Query[T]) -> T:
        """`fetch` in the caller's transaction; as SQLAlchemy does, one that is cut off ends the
        connection.

        Raises:
            BusyError: the driver cannot be used, as the transaction has not begun on the server, or
                another task uses the connection or has ended its transaction; nothing was sent.
        """
        sync: Any = connection.sync_connection
        # SQLAlchemy lets statements of several tasks wait for each other, asyncpg refuses them. Its
        # lock is ours, so that the application's statements and publishes take turns.
        turn = _turn(sync)
        if turn is None:
            raise BusyError
        async with turn:
            if (driver := self._inside(sync)) is None:
                raise BusyError
            try:
                return await self.fetch(driver, query)
            except SQLAlchemyError:
                raise
            except BaseException as error:
                if type(error).__name__ == "InterfaceError" and not driver.is_closed():
                    raise BusyError from error
                # The protocol may be in the middle of an answer, so nothing else may be sent.
                await connection.invalidate()
                if not isinstance(error, Exception):
                    raise
                raise DBAPIError(None, None, error, connection_invalidated=True) from error

    async def fetch(self, driver: Any, query: Query[T]) -> T:
        """Run `query`.

        Raises:
            DBAPIError: the server has refused it; whatever else is raised, it may have been carried
                out.
        """
        made = self._texts.get(query.clause)
        if made is None:
            compiled = query.clause.compile(dialect=self._sync_engine.dialect)
            made = self._texts[query.clause] = str(compiled), list(compiled.positiontup or ())
        text, names = made
        binds = query.binds
        try:
            rows = await driver.fetch(text, *[binds[name] for name in names])
        except Exception as error:
            # With a sqlstate the server has answered: it refused the statement. asyncpg refuses
            # values by a DataError. Any other error leaves open whether it was carried out.
            answered = getattr(error, "sqlstate", None) and not self._errors.dialect.ends_session(
                error
            )
            if answered or type(error).__name__ == "DataError":
                raise DBAPIError(None, None, error) from error
            raise
        try:
            return query.read(rows)
        except Exception as error:
            msg = f"the answer cannot be read: {error!r}"
            raise UnknownOutcomeError(msg) from error


def _turn(connection: Connection) -> asyncio.Lock | None:
    """SQLAlchemy's lock around each statement on asyncpg's connection."""
    return getattr(connection.connection.dbapi_connection, "_execute_mutex", None)


def _watched(engine: Engine) -> bool:
    """Whether the statements of `engine` are logged, or have listeners."""
    if engine.echo or _LOGGER.isEnabledFor(logging.INFO):
        return True
    targets: Any = engine.dispatch, engine.dialect.dispatch
    return any(_others(getattr(target, name, ())) for target in targets for name in _EVENTS)


def _others(listeners: Any) -> bool:
    """Whether there are any but our own, which `inside` stands for here."""
    return bool(listeners) and any(each is not refuse_outside for each in listeners)
