"""One transaction of the broker's own: bounded in time, repeated when the database asks for it."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from faststream_sqlbroker.core.access import Activities, Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.dialects import Dialect
from faststream_sqlbroker.dialects.query import Query
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.store.checkout import Checkouts, cancelled_once
from faststream_sqlbroker.store.driver import DriverShortcut
from faststream_sqlbroker.store.errors import Doing

T = TypeVar("T")

IDLE_LIMIT = 30.0
"""Most seconds for which a session may idle in a transaction of the broker's, before the server
ends it."""
QUICK_REPEATS = 5
"""Repeats of what the database rolled back; deadlocks rarely take two. Then the caller decides."""
QUICK_PAUSE = 0.01
"""Seconds before the first repeat of a rolled-back transaction; doubled each time, with jitter."""


class Transactions:
    """Runs synchronous work on connections of one engine, each piece in a transaction of its own."""

    def __init__(
        self,
        checkouts: Checkouts,
        dialect: Dialect,
        timeout: float,
        shortcut: DriverShortcut,
        activities: Activities = frozenset(),
        *,
        planning_anew: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """`timeout` in seconds bounds each `run`: waiting for a connection, and all repeats.

        `activities` are what they are for, unless `run` is told otherwise. With `planning_anew`
        those of several statements use no plan that a session has kept of an earlier time.
        """
        self._activities, self._planning_anew = activities, planning_anew
        self.clock = clock or Clock()
        self.checkouts, self.dialect, self.timeout = checkouts, dialect, timeout
        self.idle_limit = min(timeout, IDLE_LIMIT)
        self.engine, self.errors, self.shortcut = checkouts.engine, checkouts.errors, shortcut

    def doing(self, *activities: Activity) -> "Transactions":
        """The same, for `activities`."""
        return Transactions(
            self.checkouts,
            self.dialect,
            self.timeout,
            self.shortcut,
            frozenset(activities),
            clock=self.clock,
        )

    def planning_anew(self) -> "Transactions":
        """The same, for statements that must not use a plan of an earlier time."""
        return Transactions(
            self.checkouts,
            self.dialect,
            self.timeout,
            self.shortcut,
            self._activities,
            planning_anew=True,
            clock=self.clock,
        )

    async def run(
        self,
        work: Callable[[Connection], T],
        places: asyncio.Semaphore,
        *,
        write: bool = True,
        locks: bool = True,
        deadline: float | None = None,
        doing: Doing | None = None,
        patient: bool = True,
    ) -> T:
        """Run `work` and commit; what the database rolled back for a passing reason is repeated.

        `deadline`, in the event loop's time, is `timeout` seconds from now if it is not given.

        Without `locks` it holds nothing that others could wait for. Otherwise a server ends the
        session if its client says nothing for 30 seconds, or `timeout` if that is less, in the
        middle of the transaction.

        `doing` is what it is for, which the error of a missing right or table names.

        Unless it is `patient`, what timed out waiting for a lock is not repeated.

        A `Query` commits by itself where the driver's own connection can be used.

        Raises:
            TransientStoreError: the database could not be reached or was busy; nothing was written.
            UnknownOutcomeError: the answer to the COMMIT was lost.
            StoreError: the database refused the statement.
        """
        pause, stale = QUICK_PAUSE, False
        doing = self._activities if doing is None else doing
        if deadline is None:
            deadline = asyncio.get_running_loop().time() + self.timeout
        for _ in range(QUICK_REPEATS):
            try:
                return await self._attempt(work, places, deadline, doing, write=write, locks=locks)
            except UnknownOutcomeError:
                raise
            except TransientStoreError as error:
                if self.errors.needs_another(error):
                    # Broken or gone stale while it lay in the pool: the next one is new. Once, not
                    # for ever.
                    if stale:
                        raise
                    stale = True
                elif not self.errors.was_rolled_back(error) or (
                    not patient and self.errors.waited_for_lock(error)
                ):
                    raise
                await self.clock.sleep(self.clock.jitter(pause))
                pause *= 2
        return await self._attempt(work, places, deadline, doing, write=write, locks=locks)

    async def _attempt(
        self,
        work: Callable[[Connection], T],
        places: asyncio.Semaphore,
        deadline: float,
        doing: Doing,
        *,
        write: bool,
        locks: bool,
    ) -> T:
        once = self._once(work, places, deadline, doing, write=write, locks=locks)
        return await (cancelled_once(once) if self.dialect.cancel_once else once)

    async def _once(
        self,
        work: Callable[[Connection], T],
        places: asyncio.Semaphore,
        deadline: float,
        doing: Doing,
        *,
        write: bool,
        locks: bool,
    ) -> T:
        committing, results, clock = False, [], asyncio.get_running_loop().time

        def run(connection: Connection) -> None:
            nonlocal committing
            with connection.begin() as transaction:
                if write:
                    self._begin(connection, locks=locks)
                result = work(connection)
                committing = write
                try:
                    transaction.commit()
                except BaseException:
                    # SQLAlchemy takes it for ended; SQLite leaves it open, for the next checkout to
                    # commit.
                    connection.invalidate()
                    raise
                committing = False
            results.append(result)

        try:
            async with (
                self.errors.classed(doing, explained=True),
                asyncio.timeout_at(deadline),
                places,
                self.checkouts(deadline - clock()) as connection,
            ):
                driver = await self.shortcut.alone(connection) if isinstance(work, Query) else None
                if driver is None:
                    await connection.run_sync(run)
                else:
                    committing = write
                    results.append(await self._sent(connection, driver, work, write=write))
        except TransientStoreError as error:
            if results:
                # The COMMIT was answered; the connection died on its way back to the pool.
                return results[0]
            if not committing or self.errors.was_rolled_back(error):
                raise
            msg = f"the answer to the COMMIT was lost: {error}"
            raise UnknownOutcomeError(msg) from error
        return results[0]

    def _begin(self, connection: Connection, *, locks: bool) -> None:
        if self._planning_anew and locks:
            self.dialect.begin_anew(connection, self.idle_limit)
        else:
            self.dialect.begin(connection, self.idle_limit if locks else None)

    async def _sent(
        self, connection: AsyncConnection, driver: Any, query: Any, *, write: bool
    ) -> Any:
        try:
            return await self.shortcut.fetch(driver, query)
        except SQLAlchemyError:
            raise
        except BaseException as error:
            # The server may still be at it, or gone.
            await connection.invalidate()
            if write or isinstance(error, TimeoutError) or not isinstance(error, Exception):
                raise
            raise DBAPIError(None, None, error, connection_invalidated=True) from error

    async def ping(self, timeout: float | None, check: Callable[[Connection], bool]) -> bool:
        """Whether the database answers within `timeout` seconds (None: the transactions' own), and
        what `check` says.
        """
        limit = self.timeout if timeout is None else timeout
        try:
            async with (
                self.errors.classed(),
                asyncio.timeout(limit),
                self.checkouts(limit) as connection,
            ):
                await connection.execute(select(1))
                return await connection.run_sync(check)
        except StoreError:
            return False
