"""Publishing: concurrent publishers of a process share one statement, each waiting for its commit.

What is published while a statement is in flight goes out with the next one, whole calls at a time, in the order
of the calls. A shared statement that the database refuses is repeated call by call.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.dialects import Dialect
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from faststream_sqlbroker.store.caller import check_same_database
from faststream_sqlbroker.store.checkout import abort, checkout
from faststream_sqlbroker.store.driver import DriverShortcut
from faststream_sqlbroker.store.errors import ErrorClasses
from faststream_sqlbroker.store.transaction import Transactions

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

MOST_ROWS = 1_000
"""Rows of one shared statement; a call that has more goes alone."""
MOST_BYTES = 4 * 1024 * 1024
"""Bodies of one shared statement."""
HOLD = 0.05
"""Seconds for which the connection is kept under load; then whoever else waits for the place has a turn."""
TURNS = 3
"""Turns of the event loop in which whoever has just got an answer may publish again on the same connection."""

Ids = list[int | None]


@dataclass(slots=True)
class Call:
    """One publish that waits for its commit; `deadline` is in the event loop's time."""

    rows: Sequence[NewMessage]
    done: asyncio.Future[Ids]
    deadline: float


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

    async def insert(self, rows: Sequence[NewMessage]) -> Ids:
        """Insert `rows` in one transaction, which others may share."""
        if any(row.dedup_id is not None for row in rows):
            # Another's uncommitted dedup_id would make everybody wait.
            return await self._transactions.run(self._dialect.inserting(rows), self._place)
        loop = asyncio.get_running_loop()
        call = Call(rows, loop.create_future(), loop.time() + self._timeout)
        self._calls.append(call)
        pump = self._pump
        if pump is None or pump.done() or pump.get_loop() is not loop:
            self._pump = loop.create_task(self._run(), name="sqlbroker-publish")
        return await call.done

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
        """The calls to write together; empty when nobody has published for some turns of the event loop."""
        for _ in range(TURNS):
            # Whoever was just answered gets the chance to publish again, in the same statement as the others.
            await asyncio.sleep(0)
            if self._calls:
                break
        rows = size = taken = 0
        for call in self._calls:
            rows += len(call.rows)
            size += sum(len(row.payload) for row in call.rows)
            if taken and (rows > MOST_ROWS or size > MOST_BYTES):
                break
            taken += 1
        group = [call for call in self._calls[:taken] if not call.done.done()]
        del self._calls[:taken]
        return group if group or not self._calls else await self._next_group()

    async def _on_kept_connection(self, group: list[Call]) -> list[Call]:
        """Write group after group on one connection for a while; what is left to be written otherwise."""
        clock = asyncio.get_running_loop().time
        until = clock() + HOLD
        try:
            async with (
                self._errors.classed(),
                asyncio.timeout_at(group[0].deadline) as waiting,
                self._place,
                checkout(self._engine, self._errors, None) as connection,
            ):
                driver = await self._shortcut.alone(connection)
                waiting.reschedule(None)
                while driver is not None and not driver.is_closed():
                    if not await self._send(connection, driver, group):
                        break
                    group = []
                    if clock() > until or not (group := await self._next_group()):
                        break
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to those who publish
            _fail(group, error)
            return []
        return group

    async def _send(self, connection: AsyncConnection, driver: Any, group: list[Call]) -> bool:
        """Whether `group` is dealt with; if not, nothing of it was written."""
        rows = group[0].rows if len(group) == 1 else [row for call in group for row in call.rows]
        query: Any = self._dialect.inserting(rows)
        left = group[0].deadline - asyncio.get_running_loop().time()
        try:
            ids: Ids = await self._shortcut.fetch(driver, query, timeout=max(0.001, left))
        except DBAPIError:
            return False
        except BaseException as error:
            abort(driver)
            await connection.invalidate()
            cause = self._errors.of(error) or error
            _fail(group, UnknownOutcomeError(f"the answer to the INSERT was lost: {cause}"), error)
            if not isinstance(error, Exception):
                raise
            return True
        _answer(group, ids)
        return True

    async def _in_transaction(self, group: list[Call]) -> None:
        rows = [row for call in group for row in call.rows]
        try:
            ids = await self._transactions.run(self._dialect.inserting(rows), self._place)
        except TransientStoreError as error:
            _fail(group, error)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to those who publish
            if len(group) == 1:
                _fail(group, error)
                return
            for call in group:  # one of them is refused: not the others
                await self._in_transaction([call])
        else:
            _answer(group, ids)


def _answer(group: list[Call], ids: Ids) -> None:
    start = 0
    for call in group:
        end = start + len(call.rows)
        if not call.done.done():
            call.done.set_result(ids[start:end])
        start = end


def _fail(group: list[Call], error: Exception, cause: BaseException | None = None) -> None:
    for n, call in enumerate(group):
        if call.done.done():
            continue
        # One object raised in several tasks would collect all their tracebacks.
        own = error if n == 0 or not isinstance(error, StoreError) else type(error)(str(error))
        own.__cause__ = cause or error.__cause__
        call.done.set_exception(own)
