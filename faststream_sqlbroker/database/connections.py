"""Check connections out of the pool in the event loop that owns them.

Also ends connections that hang, and drops connections that are stale or have opened another file.
"""

import asyncio
import contextlib
import gc
import os
import socket
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from sqlalchemy import Engine, ExceptionContext, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, Pool
from typing_extensions import override

from faststream_sqlbroker.database.errors import ErrorClasses, iter_causes
from faststream_sqlbroker.database.operations import UNRESTORED
from faststream_sqlbroker.exceptions import SetupError, TransientStoreError

GRACE = 1.0
"""Seconds between the limit and the abort of the socket, and again until the close is abandoned.
A live server answers a cancelled statement and its ROLLBACK well within that time.
"""

Identity = tuple[int, int]
"""Device and inode."""
_OPENED_FILE = "sqlbroker_file"
"""The key in a connection's `info` with the identity of the file that was opened."""
_OPENED_AT = "sqlbroker_opened"
"""The key in a connection's `info` with the time when it was opened (monotonic seconds)."""


class ReadOnlyEvictions:
    """Evicts the connections of an engine after an answer from a read-only server.

    The pool replaces each at its next checkout, for the application, too. Open transactions go on.
    """

    def __init__(self, engine: Engine, is_read_only: Callable[[BaseException], bool]) -> None:
        """Watch `engine`; `is_read_only` recognises the driver's error of such an answer."""
        self._is_read_only = is_read_only
        self._lock = threading.Lock()  # threads share a synchronous engine
        self._entries: WeakSet[ConnectionPoolEntry] = WeakSet()
        event.listen(engine, "connect", self._add_entry)
        event.listen(engine, "handle_error", self.handle_error)

    @classmethod
    def get_for(
        cls, engine: Engine, is_read_only: Callable[[BaseException], bool]
    ) -> "ReadOnlyEvictions":
        """Return the evictions of `engine`. Its brokers share them, and none is kept alive."""
        if engine not in _EVICTIONS:
            _EVICTIONS[engine] = cls(engine, is_read_only)
        return _EVICTIONS[engine]

    def _add_entry(self, _dbapi_connection: Any, entry: ConnectionPoolEntry) -> None:
        with self._lock:
            self._entries.add(entry)

    def handle_error(self, context: ExceptionContext) -> None:
        """Evict after an error of a statement that SQLAlchemy has sent."""
        self.evict_if_read_only(context.original_exception)

    def evict_if_read_only(self, error: BaseException) -> None:
        """Evict all connections opened so far if `error` came from a read-only server."""
        if any(map(self._is_read_only, iter_causes(error))):
            with self._lock:
                entries = list(self._entries)
            for entry in entries:
                entry.invalidate(soft=True)


_EVICTIONS: WeakKeyDictionary[Engine, ReadOnlyEvictions] = WeakKeyDictionary()


class Checkouts:
    """Checkouts of an engine's pool that skip unusable connections.

    A server that has become read-only, as after a failover, still answers. Its sessions may stay
    read-only after it is writable again, or after another server has taken its place. So such an
    answer evicts every connection that was opened before: each is closed when it is checked out
    or returned here. The application's own checkouts skip those, too (`ReadOnlyEvictions`).
    """

    def __init__(self, engine: AsyncEngine, errors: ErrorClasses) -> None:
        """Watch `engine`, whose errors `errors` converts; nothing is checked out yet."""
        self.engine = engine
        self.errors = errors
        self.dialect = errors.dialect
        self.pools = LoopPools()
        self.answer_count = 0
        """Checkouts that ended without an error: the database has answered."""
        self._evicted_before = float("-inf")
        self._evictions: list[ReadOnlyEvictions] = []
        self._file = DatabaseFile()
        self.watch(engine)
        event.listen(engine.sync_engine, "checkin", _close_unrestored)

    def watch(self, engine: AsyncEngine) -> None:
        """Record when connections of `engine` are opened, to recognise stale connections.

        Called for each engine that is checked out here: the broker's own, and that of LISTEN.
        """
        event.listen(engine.sync_engine, "connect", _record_opened_at)
        evictions = ReadOnlyEvictions.get_for(engine.sync_engine, self.dialect.is_read_only)
        self._evictions.append(evictions)
        self.pools.watch(engine.sync_engine)
        if self.dialect.name == "sqlite":
            event.listen(engine.sync_engine, "invalidate", _roll_back)
            self._file.watch(engine.sync_engine)

    def evict_if_spoiled(self, error: BaseException) -> None:
        """Evict all connections opened so far if `error` came from a read-only server.

        Evicted connections are closed at their next checkout or return. The others of the pool may
        lead to the same server, and would stay read-only even after it is writable again.
        """
        if self.errors.spoils_connection(error):
            self._evicted_before = monotonic()
        self.evict_if_read_only(error)

    def evict_if_read_only(self, error: BaseException) -> None:
        """Evict from the pools if `error` came from a read-only server."""
        for evictions in self._evictions:
            evictions.evict_if_read_only(error)

    def is_evicted(self, connection: AsyncConnection) -> bool:
        """Return True if `connection` must not be used again.

        Opened before an answer from a read-only server, it may lead to that server.
        """
        return _get_opened_at(connection) < self._evicted_before

    @asynccontextmanager
    async def __call__(
        self, limit: float | None, engine: AsyncEngine | None = None
    ) -> AsyncIterator[AsyncConnection]:
        """Check out a connection for at most `limit` seconds (None: unlimited).

        The socket is aborted `GRACE` seconds after the limit, because a cancellation alone does not
        end the wait. After a cancellation SQLAlchemy returns the connection to the pool, for which
        aiomysql and asyncmy send a ROLLBACK; a server that vanished never answers that.

        Raises:
            NotConnectedError: no connection could be made.
            SetupError: another event loop, which is still open, owns the pool.
        """
        try:
            connection = await self._connect(engine or self.engine)
        except Exception as error:
            store_error = self.errors.convert_connect_error(error)
            if store_error is None:
                raise
            raise store_error from error
        loop = asyncio.get_running_loop()
        watchdog = None
        driver_connection = None
        try:
            pooled: Any = connection.sync_connection and connection.sync_connection.connection
            driver_connection = pooled.driver_connection
            if limit is not None:
                watchdog = loop.call_later(limit + GRACE, abort, driver_connection)
            yield connection
            self.answer_count += 1
        except Exception as error:
            self.evict_if_spoiled(error)
            raise
        finally:
            # The return to the pool may send a ROLLBACK, and must not wait for ever either.
            watchdog = watchdog or loop.call_later(GRACE, abort, driver_connection)
            try:
                await _wait_until_closed(self._close(connection), watchdog.when() + GRACE)
            finally:
                watchdog.cancel()

    async def _connect(self, engine: AsyncEngine) -> AsyncConnection:
        """Check out a usable connection, and close stale connections found on the way.

        A pooled connection is stale if it was evicted, or if its SQLite file has been replaced
        since.
        """
        # Read once: while this loop awaits, other tasks may raise the limit, and a loop that read
        # it each time might never end. A connection that becomes stale later is noticed when it is
        # used.
        evicted_before = self._evicted_before
        self.pools.acquire()
        file = self._file.get_identity()
        connection = await engine.connect()
        while _get_opened_at(connection) < evicted_before or self._file.is_other(connection, file):
            try:
                await connection.invalidate()
            finally:
                await connection.close()
            file = self._file.get_identity()
            connection = await engine.connect()
        return connection

    async def _close(self, connection: AsyncConnection) -> None:
        """Return `connection` to the pool, or close a connection that must not be reused.

        It must not be reused if it was evicted, or if the broker cannot undo its changes to the
        session settings.
        """
        usable = not (connection.closed or connection.invalidated)
        if usable and (self.is_evicted(connection) or not await self._restore_session(connection)):
            await connection.invalidate()
        await connection.close()

    async def _restore_session(self, connection: AsyncConnection) -> bool:
        """Undo the broker's changes to the session settings; return False if that fails.

        The application shares the pool, and must not get a session with the broker's limits.
        """
        sync: Any = connection.sync_connection
        if UNRESTORED not in sync.info:
            return True
        try:
            await connection.rollback()
            await connection.run_sync(self.dialect.restore)
        except Exception:  # noqa: BLE001 - the caller closes the connection then
            return False
        return True


def _record_opened_at(_dbapi_connection: Any, record: Any) -> None:
    record.info[_OPENED_AT] = monotonic()


def _roll_back(dbapi_connection: Any, _record: Any, _error: BaseException | None) -> None:
    """Roll back before a SQLite connection is closed, to release all locks.

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
    # Only `_execute` runs a function of the caller in the driver's thread.
    rollback = driver._execute(_end_statements, driver)  # noqa: SLF001
    try:
        future = rollback.send(None)
    except (ValueError, StopIteration):
        return  # The connection is closed already.
    future.add_done_callback(_retrieve)
    rollback.close()


def _end_statements(driver: Any) -> None:
    """Close the cursors of aiosqlite's `driver`, then roll back. Runs in the driver's thread.

    A cursor with unread rows would keep the connection's locks, even after the connection is
    closed.
    """
    connection: sqlite3.Connection = driver._conn  # noqa: SLF001
    # A cancelled task may not have received the cursor that it created; then only the garbage
    # collector knows the cursor.
    for referrer in gc.get_referrers(connection):
        if isinstance(referrer, sqlite3.Cursor):
            with contextlib.suppress(sqlite3.Error):
                referrer.close()
    connection.rollback()


def _close_unrestored(_dbapi_connection: Any, record: Any) -> None:
    """Close a connection that returns to the pool with settings that were not restored.

    The application shares the pool, and must not get a session with the broker's limits.
    `_restore_session` does not see such a connection if a handler closed it itself.
    """
    if UNRESTORED in record.info:
        record.invalidate()


def _get_opened_at(connection: AsyncConnection) -> float:
    """Return when `connection` was opened; -inf if the broker did not watch the engine yet."""
    sync: Any = connection.sync_connection
    return float(sync.info.get(_OPENED_AT, float("-inf")))


async def _wait_until_closed(close: "Coroutine[Any, Any, None]", deadline: float) -> None:
    """Wait for `close` until `deadline` (the event loop's time), even if the caller is cancelled.

    A cancellation is raised after the wait. Otherwise a connection could stay half closed, and the
    pool would count it as checked out for ever.
    """
    closing = asyncio.ensure_future(close)
    clock = asyncio.get_running_loop().time
    cancelled = None
    while not closing.done() and (remaining := deadline - clock()) > 0:
        try:
            await asyncio.wait((closing,), timeout=remaining)
        except asyncio.CancelledError as error:
            cancelled = error
    # The close may still fail after the deadline; without this asyncio would log an unretrieved
    # error.
    closing.add_done_callback(_retrieve)
    if cancelled is not None:
        raise cancelled
    if closing.done():
        await closing


def _retrieve(task: "asyncio.Future[Any]") -> None:
    """Read the exception of an ended task, or asyncio would log an unretrieved error."""
    if not task.cancelled():
        task.exception()


def abort(driver_connection: Any) -> None:
    """Abort the connection's socket, so that a task waiting for an answer gets an error.

    Used when the server does not answer in time: a cancellation alone does not end the wait. SQLite
    has no socket.
    """
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
    """The SQLite database file, watched for deletion and replacement.

    A connection keeps using the file that it has opened, even after the file has lost its name.
    What is written there is lost when the process ends. On the other databases nothing is watched.
    """

    def __init__(self) -> None:
        self._path = ""

    def watch(self, engine: Engine) -> None:
        """Record which file each new connection of `engine` opens, until the pool is disposed of.

        After that no connection to another file is left.
        """
        event.listen(engine, "connect", self._record_file)
        event.listen(engine, "engine_disposed", self._clear_path)

    def get_identity(self) -> Identity | None:
        """Return the identity (device, inode) of the file that has the name now, None if unknown.

        Raises:
            TransientStoreError: there is no such file. A new connection would create an empty one.
        """
        if not self._path:
            return None
        try:
            status = os.stat(self._path)  # noqa: PTH116 - a Path takes longer than the check
        except FileNotFoundError as error:
            raise TransientStoreError(
                f"the database file {self._path!r} was deleted or moved: put it back, or dispose "
                "of the engine in each process. Until then, reads and writes fail."
            ) from error
        except OSError:
            return None
        return status.st_dev, status.st_ino

    @staticmethod
    def is_other(connection: AsyncConnection, identity: Identity | None) -> bool:
        """Return True if `connection` has opened another file than that of `identity`.

        The file that SQLite has opened may have been replaced since; writes to it would be lost.
        """
        sync: Any = connection.sync_connection
        return identity is not None and sync.info.get(_OPENED_FILE, identity) != identity

    def _record_file(self, dbapi_connection: Any, record: Any) -> None:
        """Remember the file's path at the first connect, and mark each connection with the file.

        A listener of the engine's "connect". Later, `is_other` compares the mark with the file that
        then has the name.
        """
        # A database in memory has no file, whatever name the connection reports.
        if not self._path and os.path.exists(path := _read_path(dbapi_connection)):  # noqa: PTH110
            self._path = path
        with contextlib.suppress(TransientStoreError):
            record.info[_OPENED_FILE] = self.get_identity()

    def _clear_path(self, _engine: Engine) -> None:
        self._path = ""


def _read_path(dbapi_connection: Any) -> str:
    """Return the absolute path of the database, empty for a database in memory."""
    cursor = dbapi_connection.cursor()
    cursor.execute("PRAGMA database_list")
    paths = {name: path for _, name, path in cursor.fetchall()}
    cursor.close()
    return str(paths["main"] or "")


class LoopSemaphore(asyncio.Semaphore):
    """A semaphore with a separate count for each event loop.

    asyncio's own semaphore works only in the first event loop in which a task waited for it.
    """

    def __init__(self, value: int = 1) -> None:
        """Admit `value` tasks of each event loop at a time; with 1 the semaphore is a lock."""
        super().__init__(value)
        self._max_tasks = value
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    @property
    def _current(self) -> asyncio.Semaphore:
        """The semaphore of the running event loop, created on first use."""
        loop = asyncio.get_running_loop()
        semaphore = self._by_loop.get(loop)
        if semaphore is None:
            semaphore = self._by_loop[loop] = asyncio.Semaphore(self._max_tasks)
        return semaphore

    @override
    def locked(self) -> bool:
        return self._current.locked()

    @override
    async def acquire(self) -> Literal[True]:
        return await self._current.acquire()

    @override
    def release(self) -> None:
        self._current.release()


class LoopPools:
    """The pools of a broker, and the event loop that owns each.

    A broker may be used in one `asyncio.run` after another, whether it was stopped or not, but not
    in two event loops at the same time.

    A connection can be read and closed only in the event loop that opened it; otherwise drivers
    crash or mix up answers. So the first event loop that uses a pool owns it until that loop is
    closed; then the engine gets an empty pool. A listener records where connections are opened, as
    the application opens some, too.
    """

    def __init__(self) -> None:
        self._engines: list[Engine] = []
        # Weak references: a loop that is neither closed nor used any more can be collected, as it
        # can without a broker.
        self._loops: WeakKeyDictionary[Pool, ReferenceType[asyncio.AbstractEventLoop]] = (
            WeakKeyDictionary()
        )
        self._lock = threading.Lock()
        self._last_loop: ReferenceType[asyncio.AbstractEventLoop] | None = None
        """The event loop that acquired a pool last; `refuse_other_loop` needs no further checks for
        this loop.
        """

    def watch(self, engine: Engine) -> None:
        """Record in which event loop connections of `engine` are opened.

        Drivers can read and close a connection only in that loop.
        """
        self._engines.append(engine)
        # A NullPool keeps no connection, and connections of aiosqlite work in every event loop, so
        # the application may open them in any loop.
        if not isinstance(engine.pool, NullPool) and engine.dialect.name != "sqlite":
            event.listen(engine, "connect", lambda *_: self._record_loop(engine))

    def acquire(self) -> None:
        """Make the running event loop the owner of all pools; called before each checkout.

        An engine whose connections belong to a closed event loop gets an empty pool.

        Raises:
            SetupError: they belong to another event loop, which is still open.
        """
        loop = asyncio.get_running_loop()
        for engine in self._engines:
            if self._get_owner(engine) is not loop:
                self._acquire_pool(engine, loop)

    def refuse_other_loop(self) -> None:
        """Raise the error that `acquire` would raise in this event loop; acquire nothing.

        Raises:
            SetupError: the pools belong to another event loop, which is still open.
        """
        loop = asyncio.get_running_loop()
        if self._last_loop is not None and self._last_loop() is loop:
            return
        for engine in self._engines:
            owner = self._get_owner(engine)
            if owner is not None and owner is not loop and not owner.is_closed():
                raise SetupError(_OTHER_LOOP)

    def _get_owner(self, engine: Engine) -> asyncio.AbstractEventLoop | None:
        """Return the event loop that owns the engine's pool, None without an owner.

        A loop that was garbage-collected owns nothing.
        """
        reference = self._loops.get(engine.pool)
        return None if reference is None else reference()

    def _acquire_pool(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        """Make `loop` the owner of the engine's pool.

        If an event loop that is closed owned it, the engine gets an empty pool: nothing can read or
        close the old connections outside of their loop.

        Raises:
            SetupError: another event loop, which is still open, owns the pool.
        """
        # Two threads, each with an event loop, may acquire the pools at the same time.
        with self._lock:
            self.refuse_other_loop()
            # Connections of aiosqlite work in every event loop.
            if engine.pool in self._loops and engine.dialect.name != "sqlite":
                engine.dispose(close=False)
            self._loops[engine.pool] = self._last_loop = ref(loop)

    def _record_loop(self, engine: Engine) -> None:
        """Make the running event loop the owner of the pool that opens a connection here.

        The application may open a connection before the broker calls `acquire`. A pool that has an
        open owner keeps it.
        """
        owner = self._get_owner(engine)
        if owner is None or owner.is_closed():
            self._loops[engine.pool] = ref(asyncio.get_running_loop())


_OTHER_LOOP = (
    "another open event loop owns the broker's connections: use SqlProducer here, or "
    "asyncio.run_coroutine_threadsafe(broker.publish(...), loop).result(). If you no longer need "
    "the other loop, stop the broker in it and close it first."
)
