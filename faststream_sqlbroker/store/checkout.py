"""Connections of the pool: none is held for ever, and none is used again that only a read-only
server would get.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, TypeVar

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from faststream_sqlbroker.dialects import Dialect
from faststream_sqlbroker.dialects.base import UNRESTORED
from faststream_sqlbroker.store.errors import ErrorClasses
from faststream_sqlbroker.store.event_loops import LoopPools

T = TypeVar("T")

GRACE = 1.0
"""Seconds beyond the limit after which the socket is ended, and again after which nobody waits any
more."""

_OPENED = "sqlbroker_opened"
"""Where a connection's `info` has the moment at which it was opened (monotonic)."""


class Checkouts:
    """Checks connections out of an engine's pool, and decides which must not be used again.

    A server that has turned read-only, as after a failover, goes on answering, and its sessions may
    stay read-only when it has turned back or another has taken its place. So an answer of that kind
    evicts every connection that was opened before it: each is closed when it is checked out or
    given back here. The application's own checkouts are left alone.
    """

    def __init__(self, engine: AsyncEngine, dialect: Dialect, errors: ErrorClasses) -> None:
        """Nothing is checked out yet."""
        self.engine, self.errors, self._dialect = engine, errors, dialect
        self._evicted_before, self.pools = float("-inf"), LoopPools()
        self.watch(engine)
        event.listen(engine.sync_engine, "checkin", _checked_in)

    def watch(self, engine: AsyncEngine) -> None:
        """Note when the connections of another `engine` are opened, which may be checked out here,
        too.
        """
        event.listen(engine.sync_engine, "connect", _opened)
        self.pools.watch(engine.sync_engine)
        if self._dialect.name == "sqlite":
            event.listen(engine.sync_engine, "invalidate", _roll_back)

    def note(self, error: BaseException) -> None:
        """Evict the connections opened so far if `error` says that the one it came from must not be
        used again.
        """
        if self.errors.spoils(error):
            self._evicted_before = monotonic()

    def is_evicted(self, connection: AsyncConnection) -> bool:
        """Whether `connection` must not be used again."""
        return _opened_at(connection) < self._evicted_before

    @asynccontextmanager
    async def __call__(
        self, limit: float | None, engine: AsyncEngine | None = None
    ) -> AsyncIterator[AsyncConnection]:
        """A connection for at most `limit` seconds (None: as long as it takes); `GRACE` later its
        socket is ended.

        Cancelling is not enough: SQLAlchemy returns a connection to the pool whatever happens,
        aiomysql and asyncmy send a ROLLBACK then, and a server that is gone without a word never
        answers it.

        Raises:
            NotConnectedError: there is none.
        """
        async with self.errors.connecting():
            connection = await self._connect(engine or self.engine)
        loop, watchdog, driver_connection = asyncio.get_running_loop(), None, None
        try:
            fairy: Any = connection.sync_connection and connection.sync_connection.connection
            driver_connection = fairy.driver_connection
            if limit is not None:
                watchdog = loop.call_later(limit + GRACE, abort, driver_connection)
            yield connection
        except Exception as error:
            self.note(error)
            raise
        finally:
            watchdog = watchdog or loop.call_later(GRACE, abort, driver_connection)
            try:
                await _to_the_end(self._close(connection), watchdog.when() + GRACE)
            finally:
                watchdog.cancel()

    async def _connect(self, engine: AsyncEngine) -> AsyncConnection:
        before = (
            self._evicted_before
        )  # as it is now: other tasks may move it on for as long as we look
        self.pools.refresh()
        connection = await engine.connect()
        while _opened_at(connection) < before:
            try:
                await connection.invalidate()
            finally:
                await connection.close()
            connection = await engine.connect()
        return connection

    async def _close(self, connection: AsyncConnection) -> None:
        usable = not (connection.closed or connection.invalidated)
        if usable and (self.is_evicted(connection) or not await self._restored(connection)):
            await connection.invalidate()
        await connection.close()

    async def _restored(self, connection: AsyncConnection) -> bool:
        """Whether its session is as the application had it."""
        sync: Any = connection.sync_connection
        if not self._dialect.needs_restore(sync):
            return True
        try:
            await connection.rollback()  # what was not committed
            await connection.run_sync(self._dialect.restore)
        except Exception:  # noqa: BLE001 - it is closed then, and opened anew
            return False
        return True


def _opened(_dbapi_connection: Any, record: Any) -> None:
    record.info[_OPENED] = monotonic()


def _roll_back(dbapi_connection: Any, _record: Any, _error: BaseException | None) -> None:
    """Let go of SQLite's lock before the connection is closed.

    A statement that is cut off may have rows left. As long as its cursor lives, and every error
    that came out of it keeps it alive, a connection that was closed still holds its locks: no
    process could write. Source: SQLite, "Closing A Database Connection", on sqlite3_close_v2.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return  # what is left over when its event loop has ended
    # aiosqlite's thread works in the order in which it is asked, so the rollback is asked for now.
    # A task would start later: older versions of SQLAlchemy ask for the close right after this
    # event.
    rollback = dbapi_connection.driver_connection.rollback()
    try:
        asked = rollback.send(None)
    except (ValueError, StopIteration):
        return  # the connection was closed before
    asked.add_done_callback(_retrieve)
    rollback.close()


def _checked_in(_dbapi_connection: Any, record: Any) -> None:
    """Close what comes back as it must not be used again, past `_restored`: a handler has closed
    its own connection.
    """
    if UNRESTORED in record.info:
        record.invalidate()


def _opened_at(connection: AsyncConnection) -> float:
    """Before all others if nobody noted it: it was there before the broker."""
    sync: Any = connection.sync_connection
    return float(sync.info.get(_OPENED, float("-inf")))


async def _to_the_end(close: "Coroutine[Any, Any, None]", deadline: float) -> None:
    """`close` a connection even if we are cancelled meanwhile; `deadline` is in the event loop's
    time.
    """
    closing = asyncio.ensure_future(close)
    clock, cancelled = asyncio.get_running_loop().time, None
    while not closing.done() and (left := deadline - clock()) > 0:
        try:
            await asyncio.wait((closing,), timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    closing.add_done_callback(_retrieve)  # it may end, and fail, when nobody waits any more
    if cancelled is not None:
        raise cancelled
    if closing.done():
        await closing


async def cancelled_once(work: "Coroutine[Any, Any, T]") -> T:
    """`work`, which sees the first cancellation only, and whose end is waited for.

    Cancelled again while it closes a connection, SQLAlchemy stops aiosqlite's thread, and the task
    that closes it waits for ever for that thread, as does `asyncio.run` for the task. anyio cancels
    until a task has ended.
    """
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            if cancelled is None and not task.cancelling():
                task.cancel()
            cancelled = error
    if cancelled is not None:
        _retrieve(task)
        raise cancelled
    return task.result()


def _retrieve(task: "asyncio.Future[Any]") -> None:
    if not task.cancelled():
        task.exception()


def abort(driver_connection: Any) -> None:
    """End the socket, so that whoever waits for an answer on it gets an error; SQLite has none."""
    if callable(terminate := getattr(driver_connection, "terminate", None)):
        terminate()  # asyncpg
        return
    # aiomysql, asyncmy: their close() would wait until everything is sent.
    writer = getattr(driver_connection, "_writer", None)
    transport = getattr(writer, "transport", None) or getattr(driver_connection, "_transport", None)
    if transport is not None:
        transport.abort()
    elif callable(fileno := getattr(driver_connection, "fileno", None)):
        # psycopg waits for its socket to become readable, which an end of it is.
        with contextlib.suppress(Exception), socket.socket(fileno=os.dup(fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)
