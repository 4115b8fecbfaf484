"""The broker's own transactions: bounded in time, repeated if the database rolled them back."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.database.connections import Checkouts
from faststream_sqlbroker.database.driver import DriverShortcut
from faststream_sqlbroker.database.errors import ActivitySource
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.exceptions import TransientStoreError, UnknownOutcomeError

T = TypeVar("T")

IDLE_LIMIT = 30.0
"""Seconds that a session may idle in a transaction of the broker before the server ends it. The
broker sends its statements without a pause, so a longer silence means that its process is gone.
"""
QUICK_REPEATS = 5
"""Repeats of a transaction that the database rolled back; with the pauses they take about 0.3 s.
After that the caller's own, longer retry is better than more load.
"""
QUICK_PAUSE = 0.01
"""Seconds before the first repeat; doubled each time, with jitter."""


class Database:
    """A database that runs synchronous functions, each in a separate transaction."""

    def __init__(
        self,
        checkouts: Checkouts,
        timeout: float,
        shortcut: DriverShortcut,
        connection_slots: asyncio.Semaphore,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Limit each `run` to `timeout` seconds, including connection waits and repeats.

        Args:
            checkouts: Provides the connections; its dialect begins the transactions.
            timeout: Seconds.
            shortcut: Sends a `Query` on the driver's own connection.
            connection_slots: Limits the number of transactions that run at a time.
            clock: For the pauses between repeats.
        """
        self.checkouts = checkouts
        self.dialect = checkouts.dialect
        self.tables = self.dialect.tables
        self.timeout = timeout
        self.clock = clock or Clock()
        self.idle_limit = min(timeout, IDLE_LIMIT)
        self.engine = checkouts.engine
        self.errors = checkouts.errors
        self.shortcut = shortcut
        self.connection_slots = connection_slots

    async def run(
        self,
        work: Callable[[Connection], T],
        *activities: Activity,
        write: bool = True,
        locks: bool = True,
        deadline: float | None = None,
        activity_source: ActivitySource | None = None,
        retry_lock_timeout: bool = True,
        replan: bool = False,
        connection_slots: asyncio.Semaphore | None = None,
    ) -> T:
        """Run `work` in a transaction and commit; repeat after a rollback by the database.

        Where the driver's own connection can be used, a `Query` is sent in autocommit.

        Args:
            work: Called with the connection; it may run several times.
            activities: The purpose of the transaction, for the error of a missing right or table.
            write: The transaction writes, so a lost answer to its COMMIT is an unknown outcome.
            locks: It may lock rows. The server then ends the session if its client sends nothing
                in the transaction for 30 seconds, or for `timeout` if that is less.
            deadline: In the event loop's time; default `timeout` seconds from now.
            activity_source: Replaces `activities`; a function is called only after a refusal, when
                `work` has run, so that it can depend on what `work` was doing.
            retry_lock_timeout: Repeat the transaction also if it waited too long for a lock.
            replan: The transaction uses no cached plan of the session (PostgreSQL): such a plan may
                be for the table as it was earlier, for example almost empty.
            connection_slots: Acquire one of these for each attempt instead of the database's.

        Raises:
            TransientStoreError: the database could not be reached or was busy; nothing was written.
            UnknownOutcomeError: the answer to the COMMIT was lost.
            StoreError: the database refused the statement.
        """
        pause = QUICK_PAUSE
        replaced = False
        if deadline is None:
            deadline = asyncio.get_running_loop().time() + self.timeout
        begin = partial(self._begin, locks=locks, replan=replan) if write else None
        run_once = partial(
            self._run_once,
            work,
            connection_slots or self.connection_slots,
            deadline,
            frozenset(activities) if activity_source is None else activity_source,
            begin,
        )

        def attempt() -> Coroutine[Any, Any, T]:
            return _run_cancelled_once(run_once()) if self.dialect.cancel_once else run_once()

        for _ in range(QUICK_REPEATS):
            try:
                return await attempt()
            except UnknownOutcomeError:
                raise
            except TransientStoreError as error:
                if self._should_give_up(
                    error, replaced=replaced, retry_lock_timeout=retry_lock_timeout
                ):
                    raise
                replaced = replaced or self.errors.needs_new_connection(error)
                await self.clock.sleep(self.clock.add_jitter(pause))
                pause *= 2
        return await attempt()

    def _should_give_up(
        self, error: TransientStoreError, *, replaced: bool, retry_lock_timeout: bool
    ) -> bool:
        """Return True if repeating the transaction at once would not help after `error`.

        `replaced` says that an attempt has already used a new connection because of its
        predecessor's error. Then the fault is not one old connection of the pool.
        """
        if self.errors.needs_new_connection(error):
            # A connection may have broken or become stale in the pool, so the next attempt uses a
            # new connection. If that fails in the same way, the pool is not the cause.
            return replaced
        if not self.errors.was_rolled_back(error):
            return True
        return not retry_lock_timeout and self.errors.waited_for_lock(error)

    async def _run_once(
        self,
        work: Callable[[Connection], T],
        connection_slots: asyncio.Semaphore,
        deadline: float,
        activity_source: ActivitySource,
        begin: Callable[[Connection], None] | None,
    ) -> T:
        """Run `work` in a single transaction, without repeats; read-only without `begin`.

        Raises:
            UnknownOutcomeError: the connection broke between the COMMIT and its answer.
            TransientStoreError, StoreError: nothing was written.
        """
        has_sent_commit = False
        write = begin is not None
        # A result here means that the COMMIT was answered, whatever fails after it.
        results = []
        clock = asyncio.get_running_loop().time

        def run(connection: Connection) -> None:
            nonlocal has_sent_commit
            with connection.begin() as transaction:
                if begin is not None:
                    begin(connection)
                result = work(connection)
                has_sent_commit = write
                try:
                    transaction.commit()
                except BaseException:
                    # SQLAlchemy considers the transaction ended, but SQLite leaves it open. The
                    # next user of the connection would commit it.
                    connection.invalidate()
                    raise
                has_sent_commit = False
            results.append(result)

        try:
            try:
                async with (
                    asyncio.timeout_at(deadline),
                    connection_slots,
                    self.checkouts(deadline - clock()) as connection,
                ):
                    driver = None
                    if isinstance(work, Query):
                        driver = await self.shortcut.get_autocommit_driver(connection)
                    if driver is None:
                        await connection.run_sync(run)
                    else:
                        has_sent_commit = write
                        results.append(
                            await self._fetch_by_driver(connection, driver, work, write=write)
                        )
            except Exception as error:
                await self.errors.convert(error, activity_source, explain=True)
                raise
        except TransientStoreError as error:
            if results:
                # The COMMIT was answered; the connection broke on its way back to the pool.
                return results[0]
            if not has_sent_commit or self.errors.wrote_nothing(error):
                raise
            msg = f"the answer to the COMMIT was lost: {error}"
            raise UnknownOutcomeError(msg) from error
        return results[0]

    def _begin(self, connection: Connection, *, locks: bool, replan: bool) -> None:
        """Prepare the open transaction for writes of the broker, before the work runs.

        With `locks`, the server ends the session if it idles in the transaction. With `replan`, the
        transaction uses no cached query plans.
        """
        if replan and locks:
            self.dialect.begin_replanning(connection, self.idle_limit)
        else:
            self.dialect.begin(connection, self.idle_limit if locks else None)

    async def _fetch_by_driver(
        self, connection: AsyncConnection, driver: Any, query: Any, *, write: bool
    ) -> Any:
        """Send `query` in autocommit, and classify an error of the driver.

        A broken connection is closed. An error becomes a `DBAPIError`, which may be repeated, only
        if nothing can have been written. Others pass unchanged, and the caller treats the outcome
        as unknown.
        """
        try:
            return await self.shortcut.fetch(driver, query)
        except SQLAlchemyError:
            raise
        except BaseException as error:
            # The server may still run the statement, or be unreachable: the connection cannot be
            # reused.
            await connection.invalidate()
            is_transient = isinstance(error, Exception) and not isinstance(error, TimeoutError)
            if not is_transient or (write and not self.errors.was_never_sent(error)):
                raise
            raise DBAPIError(None, None, error, connection_invalidated=True) from error


class StoreSubject:
    """The operations of a subject of the store, such as locks or schedules."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state


async def _run_cancelled_once(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, pass on only the first cancellation, and wait until the work has ended.

    anyio cancels a task again and again until it has ended. Cancelled a second time while it closes
    a connection, SQLAlchemy stops aiosqlite's thread; the task that closes the connection then
    waits for that thread for ever, and `asyncio.run` waits for the task.
    """
    task = asyncio.ensure_future(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            if cancelled is None and not task.cancelling():
                task.cancel()
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # else asyncio would log an unretrieved error
        raise cancelled
    return task.result()
