"""Concurrent publishers of one event loop share statements on one connection.

Messages published while a statement is in flight are written by the next one, complete calls at
a time, in the order of the calls. If the database refuses a shared statement, it is repeated
call by call. A single publisher sends on the connection by itself, as long as its publishes
follow each other closely.
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

MAX_ROWS = 1_000
"""Maximum rows of one shared statement; a call with more rows is sent alone."""
MAX_BODY_BYTES = 4 * 1024 * 1024
"""Maximum bytes of bodies in one shared statement."""


@dataclass(slots=True)
class PendingPublish:
    """A call of `insert` that waits for the commit, or a call of `run` with a `query`.

    `deadline` is in the event loop's time.
    """

    rows: Sequence[NewMessage]
    done: asyncio.Future[Any]
    deadline: float
    query: Query[Any] | None = None


def split_group(calls: list[PendingPublish]) -> list[PendingPublish]:
    """Remove and return the first of `calls` that fit into a single statement.

    A call is one publish that waits, with its rows. It is never split, and a `query` is sent alone.
    Calls whose callers were cancelled are dropped.
    """
    rows = size = count = 0
    for call in calls:
        rows += len(call.rows)
        size += sum([len(row.payload) for row in call.rows])
        if count and (rows > MAX_ROWS or size > MAX_BODY_BYTES or call.query is not None):
            break
        count += 1
        if call.query is not None:
            break
    group = [call for call in calls[:count] if not call.done.done()]
    del calls[:count]
    return group


def set_results(group: list[PendingPublish], result: Any) -> None:
    """Give each call of `group` its part of `result`, the ids of all rows in order.

    A group is the calls that one statement has written. A call with a `query` is alone in its group
    and gets the whole result; a call whose caller was cancelled gets nothing.
    """
    start = 0
    for call in group:
        end = start + len(call.rows)
        if not call.done.done():
            call.done.set_result(result if call.query is not None else result[start:end])
        start = end


def set_error(
    group: list[PendingPublish], error: Exception, cause: BaseException | None = None
) -> None:
    """Raise `error`, caused by `cause`, in each call of `group` that still waits.

    A call is one publish; the calls of a group share a statement.
    """
    for n, call in enumerate(group):
        if call.done.done():
            continue
        # One exception raised in several tasks would collect all their tracebacks.
        call_error = (
            error if n == 0 or not isinstance(error, StoreError) else type(error)(str(error))
        )
        call_error.__cause__ = cause or error.__cause__
        call.done.set_exception(call_error)


MAX_CONNECTION_TIME = 0.05
"""Maximum seconds for which the connection is kept under load; then another waiter gets the slot.
"""
LINGER = 0.002
"""Seconds for which the connection is kept without a publish."""

T = TypeVar("T")


class PublishCoalescer:
    """The publishing connection of an event loop, guarded by `connection_slot`.

    Calls are queued in `_calls`. A background task, the pump, checks a connection out and writes
    group after group (`_group`), so concurrent publishes share statements. When no call waits, the
    pump parks the connection for a moment: it sets `_idle`, and a single publisher sends on it
    directly, without a switch of tasks. The pump continues when the connection is unparked.
    """

    def __init__(self, database: Database) -> None:
        """Write to `database`, each call within the time limit."""
        self._database = database
        self._engine = database.engine
        self._dialect = database.dialect
        self._errors = database.errors
        self._checkouts = database.checkouts
        self._shortcut = database.shortcut
        self._timeout = database.timeout
        self.loop = asyncio.get_running_loop()
        self.connection_slot = asyncio.Semaphore(1)
        self._calls: list[PendingPublish] = []
        self._group: list[PendingPublish] = []
        """The calls that are being written."""
        self._pump: asyncio.Task[None] | None = None
        self._idle: Any = None
        """The driver's connection that is kept, while no statement uses it."""
        self._parked: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._release_at = self._used_at = 0.0
        self._deadline = Deadline(self.loop)
        """Deadline of the statement that is in flight on the connection."""

    async def insert(self, rows: Sequence[NewMessage]) -> list[int | None]:
        """Insert `rows`; return their ids in order, after the commit.

        The pump is the task that writes waiting publishes. While it has none, it parks its
        connection: this task then sends the statement itself. Otherwise the pump sends it.
        """
        driver = self._idle
        if driver is not None and not self._calls and not driver.is_closed():
            # In the caller's own task: a single publisher waits for no other task.
            query: Any = self._dialect.build_insert(rows)
            self._idle = None
            try:
                return cast("list[int | None]", await self._fetch(driver, query, self._timeout))
            except DBAPIError:
                pass  # Refused: the ordinary path has the better error, or repeats it.
            finally:
                self._park(driver)
        return cast("list[int | None]", await self._add_call(rows))

    async def run(self, query: Query[T]) -> T:
        """Run `query` on the same connection, after earlier calls."""
        return cast("T", await self._add_call((), query))

    async def close(self) -> None:
        """Release the connection to the pool now; waiting calls are written first.

        Returns when the background task that writes them (the pump) has ended, or after the time
        limit.
        """
        # While a publisher sends on the connection, the pool would lend it to another task: it is
        # released when that publisher parks it.
        self._release_at = 0.0
        if self._idle is not None:
            self._unpark()
        if self._pump is not None:
            await asyncio.wait((self._pump,), timeout=self._timeout)

    def _add_call(
        self, rows: Sequence[NewMessage], query: Query[Any] | None = None
    ) -> "asyncio.Future[Any]":
        """Queue a call and start or resume the pump; return the future of the call's result.

        The pump is the background task that writes queued calls. It pauses while its connection is
        parked, that is, offered to publishers.
        """
        call = PendingPublish(
            rows, self.loop.create_future(), self.loop.time() + self._timeout, query
        )
        self._calls.append(call)
        if self._pump is None or self._pump.done():
            self._pump = self.loop.create_task(self._run_pump(), name="sqlbroker-publish")
            self._pump.add_done_callback(self._handle_pump_end)
        elif self._idle is not None:
            self._unpark()
        return call.done

    async def _fetch(self, driver: Any, query: Query[T], timeout: float) -> T:
        """Send `query` on the kept connection within `timeout` seconds, and classify failures.

        `driver` is asyncpg's connection, in autocommit, so a failure after the send leaves it
        unknown if the statement was carried out. Every statement on that connection is sent here.

        Raises:
            DBAPIError: the server has refused it, or the driver has not sent it; nothing was
                written.
            UnknownOutcomeError: it may have been written; the connection is ended, as it is after a
                cancellation.
        """
        deadline = self._deadline
        deadline.start(timeout)
        try:
            result = await self._shortcut.fetch(driver, query)
        except DBAPIError:
            deadline.end()
            raise
        except BaseException as error:
            # The server may still be running it: a later statement must not get this one's answer.
            abort(driver)
            if deadline.end():
                raise self._create_unknown(TimeoutError()) from error
            if not isinstance(error, Exception):
                raise
            if self._errors.was_never_sent(error):
                raise DBAPIError(None, None, error, connection_invalidated=True) from error
            raise self._create_unknown(error) from error
        deadline.end()
        return result

    def _park(self, driver: Any) -> None:
        """Offer the connection to the next publisher for a moment, while the pump waits.

        The pump is the task that writes queued calls and owns the connection. If the connection
        must be released or calls wait, resume the pump instead.
        """
        if self._parked is None or self._parked.done():
            return
        now = self.loop.time()
        if self._calls or driver.is_closed() or now > self._release_at:
            self._unpark()
            return
        self._idle = driver
        self._used_at = now
        if self._timer is None:
            self._timer = self.loop.call_later(LINGER, self._unpark_unused)

    def _unpark_unused(self) -> None:
        """Resume the pump if the parked connection was unused for `LINGER` seconds.

        A parked connection waits for the next publisher; the pump, which owns it, returns it to the
        pool. The timer is not restarted for each publish, but for the remaining time when it ends.
        """
        self._timer = None
        if self._idle is None:
            return
        if (remaining := self._used_at + LINGER - self.loop.time()) > 0:
            self._timer = self.loop.call_later(remaining, self._unpark_unused)
        else:
            self._unpark()

    def _unpark(self) -> None:
        """Take the connection back from publishers, and resume the pump, which waits for `_parked`.

        The pump then writes the waiting calls, or returns the connection to the pool.
        """
        self._idle = None
        if self._parked is not None and not self._parked.done():
            self._parked.set_result(None)

    async def _run_pump(self) -> None:
        """Write group after group until no call waits; the body of the background task.

        A group is the calls that share one statement. It is sent on asyncpg's own connection (the
        shortcut). Where that is impossible or has written nothing, a transaction writes the group.
        """
        try:
            while await self._load_next_group():
                if self._shortcut.is_possible:
                    await self._run_on_connection()
                if self._group:
                    await self._run_in_transaction(self._group)
        finally:
            for call in self._group:
                call.done.cancel()
            self._group = []

    def _handle_pump_end(self, pump: "asyncio.Task[None]") -> None:
        """Cancel the waiting calls if the pump was cancelled, because no task would write them.

        A pump that ends in the ordinary way has left no call; a newer pump keeps its calls.
        """
        # The pump was cancelled, maybe before its first step: with the event loop, or by a test.
        if pump is self._pump:
            for call in self._calls:
                call.done.cancel()
            self._calls = []

    async def _load_next_group(self) -> bool:
        """Set `_group` to the calls to write together; return False if no call waits.

        A call is a publish that waits. Calls that have waited too long fail here.
        """
        self._group = []
        # Callers that just got their result may publish again, and join the next statement.
        await asyncio.sleep(0)
        while self._calls and not self._group:
            self._group = self._fail_overdue(split_group(self._calls))
        return bool(self._group)

    def _fail_overdue(self, group: list[PendingPublish]) -> list[PendingPublish]:
        """Fail the calls of `group` that waited past the deadline; return the remaining calls.

        Called before a group is written: nothing of the failed calls was sent.
        """
        now = self.loop.time()
        overdue = [call for call in group if call.deadline <= now]
        set_error(overdue, TransientStoreError(f"no answer within {self._timeout} seconds"))
        return [call for call in group if call.deadline > now] if overdue else group

    async def _run_on_connection(self) -> None:
        """Check a connection out, and write group after group for a while.

        A group is the calls of one statement. Calls that are still in `_group` afterwards were not
        written, because the driver could not be used or the server refused the statement: the
        caller then uses a transaction.
        """
        try:
            async with (
                self._errors.convert_errors(),
                asyncio.timeout_at(self._group[0].deadline) as timeout,
                self.connection_slot,
                self._checkouts(None) as connection,
            ):
                driver = await self._shortcut.get_autocommit_driver(connection)
                initial_pool = self._engine.pool
                # From here, each statement has a deadline of its own (`_fetch`).
                timeout.reschedule(None)
                try:
                    if driver is not None:
                        await self._write_groups(connection, driver)
                finally:
                    self._idle = self._parked = None
                    self._deadline.close()
                    if self._engine.pool is not initial_pool:
                        # The engine was disposed of: its new pool would never close this
                        # connection.
                        await connection.invalidate()
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to those who publish
            set_error(self._group, error)
            self._group = []
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def _write_groups(self, connection: AsyncConnection, driver: Any) -> None:
        """Write groups on the connection until the time is up, or no call comes.

        When no call waits, the connection is parked: that publisher can use it directly, and this
        method waits until it is taken back (`_unpark`). Returns after `MAX_CONNECTION_TIME`, so
        that others get the connection slot, or if a statement was refused.
        """
        self._release_at = self.loop.time() + MAX_CONNECTION_TIME
        while not driver.is_closed():
            is_shared = len(self._group) > 1
            if self._group and not await self._send(connection, driver):
                return
            # A single publisher continues by itself (`insert`).
            if not (is_shared or self._calls) or not await self._load_next_group():
                self._group = []
                self._parked = self.loop.create_future()
                self._park(driver)
                await self._parked
                await self._load_next_group()
            if not self._group or self.loop.time() > self._release_at:
                return

    async def _send(self, connection: AsyncConnection, driver: Any) -> bool:
        """Write the group on the kept connection; return False if nothing was written.

        Then the group can be written in another way. True means that each call has its result or
        error, also if the outcome is unknown.
        """
        group = self._group
        remaining = group[0].deadline - self.loop.time()
        try:
            result = await self._fetch(driver, self._build_query(group), max(0.001, remaining))
        except DBAPIError as error:
            self._checkouts.evict_if_spoiled(error)
            if error.connection_invalidated:
                await connection.invalidate()
            return False
        except UnknownOutcomeError as error:
            set_error(group, error)
            await connection.invalidate()
            return True
        except BaseException as error:  # cancelled: waiting callers get an error, too
            set_error(group, self._create_unknown(error), error)
            await connection.invalidate()
            raise
        set_results(group, result)
        return True

    def _create_unknown(self, error: BaseException) -> UnknownOutcomeError:
        """Create the error of calls that may have been written, although their answer was lost."""
        return UnknownOutcomeError(
            f"the answer to the INSERT was lost: {self._errors.to_store_error(error) or error}"
        )

    def _build_query(self, group: list[PendingPublish]) -> Any:
        """Build the statement of `group`: an INSERT of all rows, or the only call's `query`.

        Each call of the group is a publish, unless a wake-up (`query`) is alone in it.
        """
        first = group[0]
        if first.query is not None:
            return first.query
        if len(group) == 1:
            return self._dialect.build_insert(first.rows)
        return self._dialect.build_insert([row for call in group for row in call.rows])

    async def _run_in_transaction(self, group: list[PendingPublish]) -> None:
        """Write `group` in an ordinary transaction, with repeats and exact errors.

        If the database refuses a shared statement, one of the calls is the cause: each is written
        alone.
        """
        deadline = group[0].deadline
        try:
            query = self._build_query(group)
            result = await self._database.run(
                query,
                Activity.PUBLISH,
                connection_slots=self.connection_slot,
                locks=False,
                deadline=deadline,
            )
        except TransientStoreError as error:
            set_error(group, error)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to those who publish
            if len(group) == 1:
                set_error(group, error)
                return
            # One of the calls is refused; repeat each alone.
            for call in group:
                if not call.done.done() and self._fail_overdue([call]):
                    await self._run_in_transaction([call])
        else:
            set_results(group, result)


class Deadline:
    """Cancels a task that waits too long; a single task at a time.

    A timer for each statement costs as much as sending the statement: 4 µs. Here one timer serves
    many: when it ends, it checks the statement in flight and starts again for the remaining time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create a deadline without a waiting task."""
        self._loop = loop
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def start(self, seconds: float) -> None:
        """Start the deadline of the current task, `seconds` from now.

        A running timer that ends earlier is kept: it starts again for the remaining time.
        """
        self._task = task = asyncio.current_task(self._loop)
        # Earlier requests to cancel are not the deadline's: `end` withdraws only its own.
        self._cancelling = 0 if task is None else task.cancelling()
        self._is_over = False
        self._at = at = self._loop.time() + seconds
        timer = self._timer
        if timer is None or timer.when() > at:
            self.close()
            self._timer = self._loop.call_at(at, self._check)

    def end(self) -> bool:
        """End the wait of the task; return True if only the deadline has cancelled the task.

        That cancellation is then withdrawn, so that the task can raise a `TimeoutError` instead.
        """
        task, self._task = self._task, None
        if not self._is_over or task is None:
            return False
        return task.uncancel() <= self._cancelling

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """Cancel the waiting task if the deadline has passed, otherwise restart the timer.

        Called by the timer, which may have been started for an earlier statement.
        """
        self._timer = None
        if self._task is None:
            return
        if self._at > self._loop.time():
            self._timer = self._loop.call_at(self._at, self._check)
        else:
            self._is_over = True
            self._task.cancel()
