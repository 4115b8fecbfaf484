"""Concurrent publishers of one event loop share statements on one connection.

What is published while a statement is in flight goes out with the next one, whole calls at a time,
in the order of the calls. A shared statement that the database refuses is repeated call by call.
A publisher that is alone sends on the connection by itself, as long as its publishes follow each
other closely.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.connections import abort
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError

# Calls that wait to be written together.

MOST_ROWS = 1_000
"""Rows of one shared statement; a call that has more goes alone."""
MOST_BYTES = 4 * 1024 * 1024
"""Bodies of one shared statement."""


@dataclass(slots=True)
class Call:
    """One publish that waits for its commit, or another `query`; `deadline` is in the event loop's
    time.
    """

    rows: Sequence[NewMessage]
    done: asyncio.Future[Any]
    deadline: float
    query: Query[Any] | None = None


def take_group(calls: list[Call]) -> list[Call]:
    """Take the first of `calls` that fit into one statement; drop those whose callers were
    cancelled.
    """
    rows = size = taken = 0
    for call in calls:
        rows += len(call.rows)
        size += sum([len(row.payload) for row in call.rows])
        if taken and (rows > MOST_ROWS or size > MOST_BYTES or call.query is not None):
            break
        taken += 1
        if call.query is not None:
            break
    group = [call for call in calls[:taken] if not call.done.done()]
    del calls[:taken]
    return group


def answer(group: list[Call], result: Any) -> None:
    """Give each call its part of `result`."""
    start = 0
    for call in group:
        end = start + len(call.rows)
        if not call.done.done():
            call.done.set_result(result if call.query is not None else result[start:end])
        start = end


def fail(group: list[Call], error: Exception, cause: BaseException | None = None) -> None:
    """Raise `error` in each call that still waits."""
    for n, call in enumerate(group):
        if call.done.done():
            continue
        # One object raised in several tasks would collect all their tracebacks.
        own = error if n == 0 or not isinstance(error, StoreError) else type(error)(str(error))
        own.__cause__ = cause or error.__cause__
        call.done.set_exception(own)


MOST_CONNECTION_TIME = 0.05
"""Seconds for which the connection is kept under load; then another waiter gets the place."""
LINGER = 0.002
"""Seconds for which the connection is kept without a publish."""

T = TypeVar("T")


class PublishCoalescer:
    """One event loop's: `place` is its one connection for publishing."""

    def __init__(self, database: Database) -> None:
        """Write to `database`, each call within its time."""
        self._database = database
        self._engine = database.engine
        self._dialect = database.dialect
        self._errors = database.errors
        self._checkouts = database.checkouts
        self._shortcut = database.shortcut
        self._timeout = database.timeout
        self.loop = asyncio.get_running_loop()
        self.place = asyncio.Semaphore(1)
        self._calls: list[Call] = []
        self._group: list[Call] = []
        """What is being written."""
        self._pump: asyncio.Task[None] | None = None
        self._idle: Any = None
        """The driver's connection that is kept, while no statement uses it."""
        self._parked: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._until = self._used_at = 0.0
        self._deadline = Deadline(self.loop)
        """Of the statement that is in flight on the connection."""

    async def insert(self, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows`; ids in order, when they are committed."""
        driver = self._idle
        if driver is not None and not self._calls and not driver.is_closed():
            # In the caller's own task: a lone publisher waits for no other.
            query: Any = self._dialect.inserting(rows)
            self._idle = None
            try:
                return cast("list[int | None]", await self._fetch(driver, query, self._timeout))
            except DBAPIError:
                pass  # Refused: the ordinary way has the better error, or repeats it.
            finally:
                self._park(driver)
        return cast("list[int | None]", await self._queued(rows))

    async def run(self, query: Query[T]) -> T:
        """Run `query` on the same connection, in its turn."""
        return cast("T", await self._queued((), query))

    async def close(self) -> None:
        """Give the connection back now; what waits is written first."""
        # While a publisher sends on the connection, the pool would lend it to another one: it is
        # given back when that publisher parks it.
        self._until = 0.0
        if self._idle is not None:
            self._unpark()
        if self._pump is not None:
            await asyncio.wait((self._pump,), timeout=self._timeout)

    def _queued(
        self, rows: Sequence[NewMessage], query: Query[Any] | None = None
    ) -> "asyncio.Future[Any]":
        call = Call(rows, self.loop.create_future(), self.loop.time() + self._timeout, query)
        self._calls.append(call)
        if self._pump is None or self._pump.done():
            self._pump = self.loop.create_task(self._run(), name="sqlbroker-publish")
            self._pump.add_done_callback(self._ended)
        elif self._idle is not None:
            self._unpark()
        return call.done

    async def _fetch(self, driver: Any, query: Query[T], timeout: float) -> T:
        """Send `query`: the one way to send on the kept connection, and to judge what fails there.

        Raises:
            DBAPIError: the server has refused it, or the driver has not sent it; nothing was
                written.
            UnknownOutcomeError: it may have been written; the connection is ended, as it is after a
                cancellation.
        """
        deadline = self._deadline
        deadline.begin(timeout)
        try:
            result = await self._shortcut.fetch(driver, query)
        except DBAPIError:
            deadline.end()
            raise
        except BaseException as error:
            # The server may still be at it: a later statement must not get this one's answer.
            abort(driver)
            if deadline.end():
                raise self._unknown(TimeoutError()) from error
            if not isinstance(error, Exception):
                raise
            if self._errors.was_never_sent(error):
                raise DBAPIError(None, None, error, connection_invalidated=True) from error
            raise self._unknown(error) from error
        deadline.end()
        return result

    def _park(self, driver: Any) -> None:
        """Keep `driver` for the next publish, if it comes soon, and while the pump keeps its
        connection.
        """
        if self._parked is None or self._parked.done():
            return
        now = self.loop.time()
        if self._calls or driver.is_closed() or now > self._until:
            self._unpark()
            return
        self._idle = driver
        self._used_at = now
        if self._timer is None:
            self._timer = self.loop.call_later(LINGER, self._unpark_unused)

    def _unpark_unused(self) -> None:
        self._timer = None
        if self._idle is None:
            return
        if (left := self._used_at + LINGER - self.loop.time()) > 0:
            self._timer = self.loop.call_later(left, self._unpark_unused)
        else:
            self._unpark()

    def _unpark(self) -> None:
        self._idle = None
        if self._parked is not None and not self._parked.done():
            self._parked.set_result(None)

    async def _run(self) -> None:
        """Write groups until nothing waits."""
        try:
            while await self._next_group():
                if self._shortcut.possible:
                    await self._on_kept_connection()
                if self._group:
                    await self._in_transaction(self._group)
        finally:
            for call in self._group:
                call.done.cancel()
            self._group = []

    def _ended(self, pump: "asyncio.Task[None]") -> None:
        # Cancelled, maybe before its first step: with the event loop, or by a test of it.
        if pump is self._pump:
            for call in self._calls:
                call.done.cancel()
            self._calls = []

    async def _next_group(self) -> bool:
        """Take the calls to write together; false when none waits."""
        self._group = []
        # Callers that were just answered may publish again, and join the next statement.
        await asyncio.sleep(0)
        while self._calls and not self._group:
            self._group = self._in_time(take_group(self._calls))
        return bool(self._group)

    def _in_time(self, group: list[Call]) -> list[Call]:
        """`group` without those that have waited for too long, of which nothing was sent."""
        now = self.loop.time()
        late = [call for call in group if call.deadline <= now]
        fail(late, TransientStoreError(f"no answer within {self._timeout} seconds"))
        return [call for call in group if call.deadline > now] if late else group

    async def _on_kept_connection(self) -> None:
        """Write group after group on one connection for a while; what is left in `_group` was not
        written.
        """
        try:
            async with (
                self._errors.classed(),
                asyncio.timeout_at(self._group[0].deadline) as waiting,
                self.place,
                self._checkouts(None) as connection,
            ):
                driver = await self._shortcut.alone(connection)
                pool = self._engine.pool
                waiting.reschedule(None)
                try:
                    if driver is not None:
                        await self._write_groups(connection, driver)
                finally:
                    self._idle = self._parked = None
                    self._deadline.close()
                    if self._engine.pool is not pool:
                        # The engine was disposed of: its new pool would never close this one.
                        await connection.invalidate()
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to those who publish
            fail(self._group, error)
            self._group = []
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def _write_groups(self, connection: AsyncConnection, driver: Any) -> None:
        self._until = self.loop.time() + MOST_CONNECTION_TIME
        while not driver.is_closed():
            several = len(self._group) > 1
            if self._group and not await self._send(connection, driver):
                return
            # A publisher that is alone goes on by itself (`insert`).
            if not (several or self._calls) or not await self._next_group():
                self._group = []
                self._parked = self.loop.create_future()
                self._park(driver)
                await self._parked
                await self._next_group()
            if not self._group or self.loop.time() > self._until:
                return

    async def _send(self, connection: AsyncConnection, driver: Any) -> bool:
        """Whether the group is dealt with; if not, nothing of it was written."""
        group = self._group
        left = group[0].deadline - self.loop.time()
        try:
            result = await self._fetch(driver, self._query(group), max(0.001, left))
        except DBAPIError as error:
            self._checkouts.note(error)
            if error.connection_invalidated:
                await connection.invalidate()
            return False
        except UnknownOutcomeError as error:
            fail(group, error)
            await connection.invalidate()
            return True
        except BaseException as error:  # cut off: those who wait hear of it, too
            fail(group, self._unknown(error), error)
            await connection.invalidate()
            raise
        answer(group, result)
        return True

    def _unknown(self, error: BaseException) -> UnknownOutcomeError:
        return UnknownOutcomeError(
            f"the answer to the INSERT was lost: {self._errors.of(error) or error}"
        )

    def _query(self, group: list[Call]) -> Any:
        first = group[0]
        if first.query is not None:
            return first.query
        if len(group) == 1:
            return self._dialect.inserting(first.rows)
        return self._dialect.inserting([row for call in group for row in call.rows])

    async def _in_transaction(self, group: list[Call]) -> None:
        deadline = group[0].deadline
        try:
            query = self._query(group)
            result = await self._database.run(
                query, Activity.PUBLISH, places=self.place, locks=False, deadline=deadline
            )
        except TransientStoreError as error:
            fail(group, error)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to those who publish
            if len(group) == 1:
                fail(group, error)
                return
            # One of them is refused, the others are not.
            for call in group:
                if not call.done.done() and self._in_time([call]):
                    await self._in_transaction([call])
        else:
            answer(group, result)


class Deadline:
    """Cancels the task that waits for longer than it may; one task at a time.

    A timer for each statement costs as much as what is sent with it: 4 µs. Here one timer serves
    many: it looks at what is in flight when it ends, and begins again for the rest.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing is in flight yet."""
        self._loop = loop
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def begin(self, seconds: float) -> None:
        """The current task waits from now on."""
        self._task = task = asyncio.current_task(self._loop)
        self._cancelling = 0 if task is None else task.cancelling()
        self._is_over = False
        self._at = at = self._loop.time() + seconds
        timer = self._timer
        if timer is None or timer.when() > at:
            self.close()
            self._timer = self._loop.call_at(at, self._look)

    def end(self) -> bool:
        """The task waits no longer. Whether only the time has cancelled it: that is taken back."""
        task, self._task = self._task, None
        if not self._is_over or task is None:
            return False
        return task.uncancel() <= self._cancelling

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._at > self._loop.time():
            self._timer = self._loop.call_at(self._at, self._look)
        else:
            self._is_over = True
            self._task.cancel()
