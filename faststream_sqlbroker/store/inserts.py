"""Publishing: concurrent publishers of a process share one statement, each waiting for its commit.

What is published while a statement is in flight goes out with the next one, whole calls at a time, in the order
of the calls. A shared statement that the database refuses is repeated call by call.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.dialects import Dialect
from faststream_sqlbroker.dialects.query import Query
from faststream_sqlbroker.exceptions import TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.store.caller import check_same_database
from faststream_sqlbroker.store.calls import Call, answer, fail, take_group
from faststream_sqlbroker.store.checkout import abort, checkout
from faststream_sqlbroker.store.driver import DriverShortcut
from faststream_sqlbroker.store.errors import ErrorClasses
from faststream_sqlbroker.store.transaction import Transactions

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

HOLD = 0.05
"""Seconds for which the connection is kept under load; then whoever else waits for the place has a turn."""
LINGER = 0.002
"""Seconds for which the connection is kept when nobody publishes."""

T = TypeVar("T")
Ids = list[int | None]


class Inserts:
    """Writes new messages, on the broker's own connection or in the caller's transaction."""

    def __init__(
        self,
        engine: AsyncEngine,
        dialect: Dialect,
        errors: ErrorClasses,
        transactions: Transactions,
        shortcut: DriverShortcut,
        place: asyncio.Semaphore,
        timeout: float,
    ) -> None:
        """`place` is the one connection for publishing; `timeout` in seconds bounds each call."""
        self._engine, self._dialect, self._errors = engine, dialect, errors
        self._transactions, self._shortcut, self._place = transactions, shortcut, place
        self._timeout = timeout
        self._calls: list[Call] = []
        self._pump: asyncio.Task[None] | None = None
        self._idle: Any = None
        """The driver's connection that is kept, while nobody uses it."""
        self._parked: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._until = self._used_at = 0.0

    async def insert(self, rows: Sequence[NewMessage]) -> Ids:
        """Insert `rows` in one transaction, which others may share."""
        if any(row.dedup_id is not None for row in rows):
            # Another's uncommitted dedup_id would make everybody wait.
            return await self._transactions.run(self._dialect.inserting(rows), self._place)
        if self._idle is not None and not self._calls:
            query: Any = self._dialect.inserting(rows)
            with contextlib.suppress(DBAPIError):  # refused: the ordinary way says so better, or repeats it
                return cast("Ids", await self._directly(query))
        return cast("Ids", await self._queued(rows))

    async def run(self, query: Query[T]) -> T:
        """Run `query` on the same connection, in its turn."""
        return cast("T", await self._queued((), query))

    def _queued(self, rows: Sequence[NewMessage], query: Query[Any] | None = None) -> "asyncio.Future[Any]":
        loop = asyncio.get_running_loop()
        call = Call(rows, loop.create_future(), loop.time() + self._timeout, query)
        self._calls.append(call)
        pump = self._pump
        if pump is None or pump.done() or pump.get_loop() is not loop:
            self._idle = None
            self._pump = loop.create_task(self._run(), name="sqlbroker-publish")
        elif self._idle is not None:
            self._unpark()
        return call.done

    async def _directly(self, query: Query[T]) -> T:
        """Run `query` on the kept connection: whoever publishes alone needs nobody else's task."""
        driver, self._idle = self._idle, None
        try:
            return await self._shortcut.fetch(driver, query, timeout=self._timeout)
        except DBAPIError:
            raise
        except BaseException as error:
            abort(driver)
            if not isinstance(error, Exception):
                raise
            raise self._unknown(error) from error
        finally:
            self._park(driver)

    def _park(self, driver: Any) -> None:
        """Keep `driver` for the next publish, if it comes soon."""
        loop = asyncio.get_running_loop()
        if self._calls or driver.is_closed() or loop.time() > self._until:
            self._unpark()
            return
        self._idle, self._used_at = driver, loop.time()
        if self._timer is None:
            self._timer = loop.call_later(LINGER, self._unpark_unused)

    def _unpark_unused(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        if self._idle is None:
            return
        if (left := self._used_at + LINGER - loop.time()) > 0:
            self._timer = loop.call_later(left, self._unpark_unused)
        else:
            self._unpark()

    def _unpark(self) -> None:
        self._idle = None
        if self._parked is not None and not self._parked.done():
            self._parked.set_result(None)

    async def insert_in(self, connection: AsyncConnection | AsyncSession, rows: Sequence[NewMessage]) -> Ids:
        """Insert `rows` in the caller's transaction; it is neither begun, committed nor flushed here.

        Raises:
            PublishError: the connection is closed or belongs to another database, or its transaction
                has ended.
        """
        try:
            if isinstance(connection, AsyncSession):
                connection = await connection.connection()
            sync_connection = connection.sync_connection
            check_same_database(sync_connection, self._engine.sync_engine)
            if sync_connection is not None and self._shortcut.inside(sync_connection):
                query: Any = self._dialect.inserting(rows)
                return cast("Ids", await self._shortcut.fetch_in(connection, query))
            return await connection.run_sync(lambda c: self._dialect.insert(c, rows))
        except SQLAlchemyError as error:
            raise self._errors.of_caller(error) from error

    def insert_sync(self, connection: "Connection | Session", rows: Sequence[NewMessage]) -> Ids:
        """`insert_in` for synchronous code.

        Raises:
            PublishError: as `insert_in`.
        """
        try:
            if not isinstance(connection, Connection):
                connection = connection.connection()
            check_same_database(connection, self._engine.sync_engine)
            return self._dialect.insert(connection, rows)
        except SQLAlchemyError as error:
            raise self._errors.of_caller(error) from error

    async def _run(self) -> None:
        """Write groups until nothing waits."""
        group: list[Call] = []
        try:
            while group := await self._next_group():
                if self._shortcut.possible:
                    group = await self._on_kept_connection(group)
                if group:
                    await self._in_transaction(group)
        finally:
            # Cancelled: with the event loop, or by a test of it.
            for call in (*group, *self._calls):
                call.done.cancel()
            self._calls.clear()

    async def _next_group(self) -> list[Call]:
        """The calls to write together; empty when nobody waits."""
        # Whoever was just answered gets the chance to publish again, in the same statement as the others.
        await asyncio.sleep(0)
        while self._calls:
            if group := take_group(self._calls):
                return group
        return []

    async def _on_kept_connection(self, group: list[Call]) -> list[Call]:
        """Write group after group on one connection for a while; what is left to be written otherwise."""
        loop, pool = asyncio.get_running_loop(), self._engine.pool
        try:
            async with (
                self._errors.classed(),
                asyncio.timeout_at(group[0].deadline) as waiting,
                self._place,
                checkout(self._engine, self._errors, None) as connection,
            ):
                driver = await self._shortcut.alone(connection)
                waiting.reschedule(None)
                self._until = loop.time() + HOLD
                while driver is not None and not driver.is_closed():
                    if group and not await self._send(connection, driver, group):
                        break
                    # Who publishes alone goes on alone (`_directly`).
                    several = len(group) > 1 or self._calls
                    if not several or not (group := await self._next_group()):
                        self._parked = loop.create_future()
                        self._park(driver)
                        await self._parked
                        group = await self._next_group()
                    if not group or loop.time() > self._until:
                        break
                if self._engine.pool is not pool:
                    await connection.invalidate()  # the engine was disposed of: nobody would ever close it
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to those who publish
            fail(group, error)
            return []
        finally:
            self._idle = self._parked = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        return group

    async def _send(self, connection: AsyncConnection, driver: Any, group: list[Call]) -> bool:
        """Whether `group` is dealt with; if not, nothing of it was written."""
        left = group[0].deadline - asyncio.get_running_loop().time()
        try:
            result = await self._shortcut.fetch(driver, self._query(group), timeout=max(0.001, left))
        except DBAPIError:
            return False
        except BaseException as error:
            abort(driver)
            await connection.invalidate()
            fail(group, self._unknown(error), error)
            if not isinstance(error, Exception):
                raise
            return True
        answer(group, result)
        return True

    def _unknown(self, error: BaseException) -> UnknownOutcomeError:
        return UnknownOutcomeError(f"the answer to the INSERT was lost: {self._errors.of(error) or error}")

    def _query(self, group: list[Call]) -> Any:
        first = group[0]
        if first.query is not None:
            return first.query
        if len(group) == 1:
            return self._dialect.inserting(first.rows)
        return self._dialect.inserting([row for call in group for row in call.rows])

    async def _in_transaction(self, group: list[Call]) -> None:
        try:
            result = await self._transactions.run(self._query(group), self._place)
        except TransientStoreError as error:
            fail(group, error)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to those who publish
            if len(group) == 1:
                fail(group, error)
                return
            for call in group:  # one of them is refused: not the others
                await self._in_transaction([call])
        else:
            answer(group, result)
