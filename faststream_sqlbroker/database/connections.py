"""Checks connections out of the pool, in the event loop that has it; ends those that hang, drops
those that are stale, or have opened another file.
"""

import asyncio
import contextlib
import gc
import os
import socket
import sqlite3
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

from sqlalchemy import Engine, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import NullPool, Pool
from typing_extensions import override

from faststream_sqlbroker.database.errors import ErrorClasses
from faststream_sqlbroker.database.operations import UNRESTORED
from faststream_sqlbroker.exceptions import SetupError, TransientStoreError

GRACE = 1.0
"""Seconds after the limit until the socket is ended, and again until the close is not waited for.
A live server answers a cancelled statement and its ROLLBACK well within that."""

Identity = tuple[int, int]
"""Device and inode."""
_OPENED_FILE = "sqlbroker_file"
"""The key in a connection's `info` with the identity of the file that it has opened."""
_OPENED = "sqlbroker_opened"
"""The key in a connection's `info` with the time at which it was opened (monotonic seconds)."""


class Checkouts:
    """Checks connections out of an engine's pool, and decides which must not be used again.

    A server that has become read-only, as after a failover, still answers. Its sessions may stay
    read-only after it is writable again, or after another server has taken its place. So such an
    answer evicts every connection that was opened before it: each is closed when it is checked out
    or returned here. The application's own checkouts are not affected.
    """

    def __init__(self, engine: AsyncEngine, errors: ErrorClasses) -> None:
        """Watch `engine`, whose errors `errors` converts; nothing is checked out yet."""
        self.engine = engine
        self.errors = errors
        self.dialect = errors.dialect
        self.pools = LoopPools()
        self._evicted_before = float("-inf")
        self._file = DatabaseFile()
        self.watch(engine)
        event.listen(engine.sync_engine, "checkin", _checked_in)

    def watch(self, engine: AsyncEngine) -> None:
        """Record when connections of `engine` are opened; they may be checked out here, too."""
        event.listen(engine.sync_engine, "connect", _opened)
        self.pools.watch(engine.sync_engine)
        if self.dialect.name == "sqlite":
            event.listen(engine.sync_engine, "invalidate", _roll_back)
            self._file.watch(engine.sync_engine)

    def note(self, error: BaseException) -> None:
        """Evict all connections opened so far, if `error` came from a server that is read-only."""
        if self.errors.spoils(error):
            self._evicted_before = monotonic()

    def is_evicted(self, connection: AsyncConnection) -> bool:
        """Whether `connection` must not be used again."""
        return _opened_at(connection) < self._evicted_before

    @asynccontextmanager
    async def __call__(
        self, limit: float | None, engine: AsyncEngine | None = None
    ) -> AsyncIterator[AsyncConnection]:
        """A connection for at most `limit` seconds (None: no limit); `GRACE` later its socket ends.

        A cancellation alone does not end the wait. After it SQLAlchemy returns the connection to
        the pool, for which aiomysql and asyncmy send a ROLLBACK; a server that vanished never
        answers that.

        Raises:
            NotConnectedError: no connection could be made.
            SetupError: another event loop, which is still open, has the pool.
        """
        try:
            connection = await self._connect(engine or self.engine)
        except Exception as error:
            refused = self.errors.of_connecting(error)
            if refused is None:
                raise
            raise refused from error
        loop = asyncio.get_running_loop()
        watchdog = None
        driver_connection = None
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
        # Read once: while this loop awaits, other tasks may move the limit on, and a loop that read
        # it each time might never end. A connection that becomes stale later is found on its own.
        before = self._evicted_before
        self.pools.enter()
        file = self._file.identity()
        connection = await engine.connect()
        while _opened_at(connection) < before or self._file.is_other(connection, file):
            try:
                await connection.invalidate()
            finally:
                await connection.close()
            file = self._file.identity()
            connection = await engine.connect()
        return connection

    async def _close(self, connection: AsyncConnection) -> None:
        usable = not (connection.closed or connection.invalidated)
        if usable and (self.is_evicted(connection) or not await self._restored(connection)):
            await connection.invalidate()
        await connection.close()

    async def _restored(self, connection: AsyncConnection) -> bool:
        """Put the session's settings back as the application had them; false if that fails."""
        sync: Any = connection.sync_connection
        if UNRESTORED not in sync.info:
            return True
        try:
            await connection.rollback()
            await connection.run_sync(self.dialect.restore)
        except Exception:  # noqa: BLE001 - the caller closes the connection then
            return False
        return True


def _opened(_dbapi_connection: Any, record: Any) -> None:
    record.info[_OPENED] = monotonic()


def _roll_back(dbapi_connection: Any, _record: Any, _error: BaseException | None) -> None:
    """Roll back before a SQLite connection is closed, so that its locks are released.

    A cancelled statement may have rows left. While its cursor exists, and an error that it raised
    keeps it in existence, even a closed connection holds its locks, so no process could write. A
    rollback alone keeps the lock for reading, for which a COMMIT waits unless the file is in WAL
    mode. Source: SQLite, "Closing A Database Connection", on sqlite3_close_v2.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return  # The event loop has ended, so its connections cannot be used any more.
    # aiosqlite's thread runs calls in the order in which they are queued, so the rollback is queued
    # now, by the first `send`. A task would queue it too late: older versions of SQLAlchemy queue
    # the close right after this event.
    driver = dbapi_connection.driver_connection
    # Only `_execute` runs a function of ours in its thread.
    rollback = driver._execute(_end_statements, driver)  # noqa: SLF001
    try:
        asked = rollback.send(None)
    except (ValueError, StopIteration):
        return  # The connection is closed already.
    asked.add_done_callback(_retrieve)
    rollback.close()


def _end_statements(driver: Any) -> None:
    """Close the cursors of aiosqlite's `driver`, then roll back; in its thread."""
    connection: sqlite3.Connection = driver._conn  # noqa: SLF001
    # A cancelled task may not have got the cursor that it began, which then only the garbage
    # collector knows.
    for each in gc.get_referrers(connection):
        if isinstance(each, sqlite3.Cursor):
            with contextlib.suppress(sqlite3.Error):
                each.close()
    connection.rollback()


def _checked_in(_dbapi_connection: Any, record: Any) -> None:
    """Close a connection that comes back to the pool with settings that were not restored.

    `_restored` does not see it if a handler closed its connection itself.
    """
    if UNRESTORED in record.info:
        record.invalidate()


def _opened_at(connection: AsyncConnection) -> float:
    """When it was opened; -inf if that was before the broker watched the engine."""
    sync: Any = connection.sync_connection
    return float(sync.info.get(_OPENED, float("-inf")))


async def _to_the_end(close: "Coroutine[Any, Any, None]", deadline: float) -> None:
    """Wait for `close` until `deadline` (the event loop's time), even if the caller is cancelled.

    A cancellation is raised after the wait. Otherwise a connection could stay half closed, and its
    place in the pool would be lost.
    """
    closing = asyncio.ensure_future(close)
    clock = asyncio.get_running_loop().time
    cancelled = None
    while not closing.done() and (left := deadline - clock()) > 0:
        try:
            await asyncio.wait((closing,), timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    # It may still fail after the deadline; without this asyncio would log an unretrieved error.
    closing.add_done_callback(_retrieve)
    if cancelled is not None:
        raise cancelled
    if closing.done():
        await closing


def _retrieve(task: "asyncio.Future[Any]") -> None:
    if not task.cancelled():
        task.exception()


def abort(driver_connection: Any) -> None:
    """End the socket, so that a task that waits for an answer gets an error; SQLite has none."""
    if callable(terminate := getattr(driver_connection, "terminate", None)):
        terminate()  # asyncpg
        return
    # aiomysql, asyncmy: close() would first wait until all data is sent.
    writer = getattr(driver_connection, "_writer", None)
    transport = getattr(writer, "transport", None) or getattr(driver_connection, "_transport", None)
    if transport is not None:
        transport.abort()
    elif callable(fileno := getattr(driver_connection, "fileno", None)):
        # psycopg waits until its socket is readable; the end of the stream makes it readable.
        with contextlib.suppress(Exception), socket.socket(fileno=os.dup(fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)


class DatabaseFile:
    """The file of SQLite; notices that it was deleted or replaced.

    A connection goes on with the file that it has opened, even after that has lost its name. What
    it writes there is lost when the process ends. On the other databases nothing is watched.
    """

    def __init__(self) -> None:
        self._path = ""

    def watch(self, engine: Engine) -> None:
        """Record which file each new connection of `engine` opens, until its pool is disposed of:
        no connection is then left that has another one.
        """
        event.listen(engine, "connect", self._opened)
        event.listen(engine, "engine_disposed", self._forget)

    def identity(self) -> Identity | None:
        """Which file has the name now; None if that is not known.

        Raises:
            TransientStoreError: there is none. A new connection would create an empty one.
        """
        if not self._path:
            return None
        try:
            found = os.stat(self._path)  # noqa: PTH116 - a Path takes longer than the look
        except FileNotFoundError as error:
            raise TransientStoreError(
                f"the database file {self._path!r} was deleted or moved: put it back, or dispose "
                "of the engine in each process; until then nothing is read or written"
            ) from error
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @staticmethod
    def is_other(connection: AsyncConnection, identity: Identity | None) -> bool:
        """Whether `connection` has opened another file than that of `identity`."""
        sync: Any = connection.sync_connection
        return identity is not None and sync.info.get(_OPENED_FILE, identity) != identity

    def _opened(self, dbapi_connection: Any, record: Any) -> None:
        # In memory there is none, whatever name the connection tells.
        if not self._path and os.path.exists(path := _path_of(dbapi_connection)):  # noqa: PTH110
            self._path = path
        with contextlib.suppress(TransientStoreError):
            record.info[_OPENED_FILE] = self.identity()

    def _forget(self, _engine: Engine) -> None:
        self._path = ""


def _path_of(dbapi_connection: Any) -> str:
    """The absolute path; empty in memory."""
    cursor = dbapi_connection.cursor()
    cursor.execute("PRAGMA database_list")
    paths = {name: path for _, name, path in cursor.fetchall()}
    cursor.close()
    return str(paths["main"] or "")


class LoopSemaphore(asyncio.Semaphore):
    """A semaphore with a separate count for each event loop.

    asyncio's own semaphore can be used only in the first event loop in which a task waited for it.
    """

    def __init__(self, value: int = 1) -> None:
        """Let `value` tasks of each event loop in; 1 makes it a lock."""
        super().__init__(value)
        self._most = value
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    @property
    def _here(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        found = self._by_loop.get(loop)
        if found is None:
            found = self._by_loop[loop] = asyncio.Semaphore(self._most)
        return found

    @override
    def locked(self) -> bool:
        return self._here.locked()

    @override
    async def acquire(self) -> Literal[True]:
        return await self._here.acquire()

    @override
    def release(self) -> None:
        self._here.release()


class LoopPools:
    """The pools of one broker, and the event loop that each belongs to.

    A broker may be used in one `asyncio.run` after another, whether it was stopped or not, but not
    in two event loops at the same time.

    A connection can neither be read nor closed in another event loop than the one that opened it;
    drivers crash or mix answers up. So the first event loop that uses a pool has it until that loop
    is closed; then the engine gets an empty pool. A listener records where connections are opened,
    as the application opens some, too.
    """

    def __init__(self) -> None:
        self._engines: list[Engine] = []
        # Weak: a loop that is neither closed nor used any more ends, as it does without a broker.
        self._loops: WeakKeyDictionary[Pool, ReferenceType[asyncio.AbstractEventLoop]] = (
            WeakKeyDictionary()
        )
        self._taking = threading.Lock()
        self._last: ReferenceType[asyncio.AbstractEventLoop] | None = None
        """The event loop that has taken a pool last; of another one `refuse_other_loop` asks more.
        """

    def watch(self, engine: Engine) -> None:
        """Record in which event loop connections of `engine` are opened."""
        self._engines.append(engine)
        # A NullPool keeps no connection, and those of aiosqlite work in every event loop: so the
        # application may open some in any.
        if not isinstance(engine.pool, NullPool) and engine.dialect.name != "sqlite":
            event.listen(engine, "connect", lambda *_: self._note(engine))

    def enter(self) -> None:
        """Take the pools for the running event loop. An engine whose connections belong to one that
        has been closed gets an empty pool.

        Raises:
            SetupError: they belong to another event loop, which is still open.
        """
        loop = asyncio.get_running_loop()
        for engine in self._engines:
            if self._owner(engine) is not loop:
                self._take(engine, loop)

    def refuse_other_loop(self) -> None:
        """Only refuse what `enter` refuses."""
        loop = asyncio.get_running_loop()
        if self._last is not None and self._last() is loop:
            return
        for engine in self._engines:
            owner = self._owner(engine)
            if owner is not None and owner is not loop and not owner.is_closed():
                raise SetupError(_OTHER_LOOP)

    def _owner(self, engine: Engine) -> asyncio.AbstractEventLoop | None:
        found = self._loops.get(engine.pool)
        return None if found is None else found()

    def _take(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        # Two threads, each with an event loop, may come at the same time.
        with self._taking:
            self.refuse_other_loop()
            # Connections of aiosqlite work in every event loop.
            if engine.pool in self._loops and engine.dialect.name != "sqlite":
                engine.dispose(close=False)
            self._loops[engine.pool] = self._last = ref(loop)

    def _note(self, engine: Engine) -> None:
        owner = self._owner(engine)
        if owner is None or owner.is_closed():
            self._loops[engine.pool] = ref(asyncio.get_running_loop())


_OTHER_LOOP = (
    "the broker's event loop is another one, and open: use SqlProducer here, or "
    "asyncio.run_coroutine_threadsafe(broker.publish(...), loop).result(), as its connections work "
    "in that loop only. If the other loop is not needed any more, stop the broker there and close "
    "that loop first"
)
