"""The transaction of a handler with transactional=True: it commits with the ack, or not at all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from time import monotonic

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from faststream_sqlbroker.core.access import Activities
from faststream_sqlbroker.core.rows import Leases, Settlement, SettleResult
from faststream_sqlbroker.core.settle import needed_to_write
from faststream_sqlbroker.database.connections import LoopSemaphore
from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.guarded_connection import INSIDE, LastUse, refusing_outside
from faststream_sqlbroker.database.parts.handler_locks import ENDED, HandlerLock
from faststream_sqlbroker.exceptions import (
    AccessError,
    NotSupportedError,
    PublishError,
    SqlBrokerError,
    StoreError,
    TransactionEndedError,
    TransientStoreError,
    UnknownOutcomeError,
)

Ids = list[int | None]
current: ContextVar["HandlerTransaction | None"] = ContextVar("sqlbroker_transaction", default=None)
"""The transaction of the handler that runs; the tasks that it starts inherit it."""
_LEAVE_OUT = "leave transactional out, or publish a message to another subscriber that does it"
_PUBLISHED_LATE = (
    "the transaction of the handler that publishes has ended: await the publish, and tasks that "
    "publish, before the handler ends; or give with_ack=False, which commits the message at once"
)


def transaction_to_join(dialect: Dialect, engine: AsyncEngine) -> "HandlerTransaction | None":
    """Return the transaction, which may have ended, that a publish to `engine` belongs to: that of
    the handler that calls this, or has started the task that does.

    Another engine's is not joined, as equal URLs may lead to different databases. On SQLite it is,
    as the publish would wait for it.
    """
    handler = current.get()
    if handler is None:
        return None
    theirs = handler.connection.engine
    joins = theirs.pool is engine.pool or (dialect.one_writer and theirs.url == engine.url)
    return handler if joins else None


def only_writer(dialect: Dialect, engine: AsyncEngine) -> "HandlerTransaction | None":
    """Return the transaction of the handler that calls this, if it keeps all other writers out."""
    handler = transaction_to_join(dialect, engine) if dialect.one_writer else None
    return None if handler is None or not handler.active else handler


def refuse_in_handler(
    dialect: Dialect, engine: AsyncEngine, name: str, cure: str = _LEAVE_OUT
) -> None:
    """Refuse `name`, which writes in a transaction of its own, where that would wait for itself.

    Raises:
        NotSupportedError: the caller is a handler with transactional=True on SQLite.
    """
    if only_writer(dialect, engine) is not None:
        raise NotSupportedError(
            f"{name} cannot be used in a handler with transactional=True on SQLite: it writes in a "
            f"transaction of its own, and that of the handler keeps every other writer out; {cure}"
        )


class HandlerTransaction:
    """One open transaction. The handler gets `connection` and `session`; the broker uses the rest.

    Every statement of the broker is bounded by the store's `statement_timeout`.
    """

    def __init__(self, connection: AsyncConnection, database: Database) -> None:
        """Use `connection`; each statement of the broker may take the time limit of `database`."""
        self.connection = connection
        self._dialect = database.dialect
        self._checkouts = database.checkouts
        self._timeout = database.timeout
        self._errors = database.errors
        self._session: AsyncSession | None = None
        self._activity = LastUse()
        self._idle_limit = float("inf")
        """Seconds without a statement after which the server ends the session."""
        self._silent = 0.0
        """Seconds without a statement of the handler before `commit`."""
        self.locked = HandlerLock((), set())
        self.denied: AccessError | None = None
        """The error of `commit` if a right or a table was missing."""
        self._doing: Activities = frozenset()
        self._turn = asyncio.Lock()
        """Held for each statement of the broker while the handler and its tasks run: a driver takes
        one at a time."""
        self._is_shut = False
        self.proven = False
        """After the handler's end, this was still the transaction that had locked the rows."""

    @property
    def session(self) -> AsyncSession:
        """A session on the connection, made at the first read; its commit() only flushes."""
        if self._session is None:
            self._session = AsyncSession(
                self.connection, join_transaction_mode="rollback_only", expire_on_commit=False
            )
        return self._session

    @property
    def sync_connection(self) -> Connection | None:
        """The connection's, as AsyncConnection has it."""
        return self.connection.sync_connection

    async def begin(self) -> None:
        """Begin the transaction; nothing is sent to the server yet."""
        self._root = await self.connection.begin()

    @property
    def active(self) -> bool:
        """Whether the handler has left the transaction open."""
        return self._root.is_active and self.connection.get_transaction() is self._root

    def note(self, error: BaseException) -> None:
        """Evict connections if `error`, of the handler or of `commit`, came from a stale one."""
        self._checkouts.note(error)

    async def lock(self, leases: Leases, lease: float) -> set[int]:
        """Lock the rows whose lease is still held; their ids.

        The lock keeps their lease until the transaction ends. From now on `connection` refuses
        every statement outside of this transaction. If the handler sends nothing for `lease`
        seconds, the server ends the session and with it the transaction.

        Raises:
            TransientStoreError: the database does not answer.
        """

        def lock(connection: Connection) -> HandlerLock:
            held = self._dialect.handler_locks.lock(connection, leases, lease)
            connection.execution_options(**{INSIDE: self._activity})
            return held

        self._activity = LastUse()
        self._idle_limit = lease
        async with self._errors.classed(), asyncio.timeout(self._timeout):
            self.locked = await self.connection.run_sync(lock)
        return self.locked.held

    async def publish(self, insert: Callable[[AsyncConnection], Awaitable[Ids]]) -> Ids:
        """Insert messages in this transaction, in the turn of the task that calls this.

        Raises:
            PublishError: it has ended.
            TransientStoreError: the database does not answer; this cannot be committed any more.
        """
        async with self._errors.classed(), asyncio.timeout(self._timeout), self._turn:
            if self._is_shut or not self.active:
                raise PublishError(_PUBLISHED_LATE)
            ids = await insert(self.connection)
            self._activity.sent_at = monotonic()
            return ids

    async def shut(self) -> None:
        """Wait for the publishes of tasks that the handler has left, and refuse later ones."""
        async with self._turn:
            self._is_shut = True

    async def prove(self) -> None:
        """Set `proven` if this is still the transaction that has locked the rows; raise nothing."""
        if not self.active:
            return
        with contextlib.suppress(SqlBrokerError):
            async with self._errors.classed(), asyncio.timeout(self._timeout):
                await self.connection.run_sync(
                    lambda c: self._dialect.handler_locks.prove(c, self.locked)
                )
                self.proven = True

    async def hold(self, leases: Leases, seconds: float) -> set[int]:
        """Allow the handler to send nothing for `seconds`; the ids of `leases` still held.

        Raises:
            TransientStoreError: the database does not answer.
        """

        def hold(connection: Connection) -> set[int]:
            self._dialect.allow_idling(connection, seconds)
            return self._dialect.lock(connection, leases)

        async with self._errors.classed(), asyncio.timeout(self._timeout), self._turn:
            held = await self.connection.run_sync(hold)
        self._idle_limit = seconds
        return held

    async def commit(self, settlements: Sequence[Settlement]) -> SettleResult:
        """Flush the session, write `settlements` and the messages published with them, and commit.

        Nothing is committed if one of them has lost its lease.

        Raises:
            TransactionEndedError: this is not the transaction that has locked the rows.
            UnknownOutcomeError: the answer to the COMMIT was lost.
            TransientStoreError: nothing was committed; a repeat may succeed. See `was_silent`.
            StoreError: nothing was committed.
            Exception: the session's flush failed; nothing was committed.
        """
        committing = False

        def settle(connection: Connection) -> SettleResult:
            nonlocal committing
            result = self._dialect.handler_locks.settle(connection, self.locked, settlements)
            self.proven = True
            if not result.lost:
                committing = True
                self._root.sync_transaction.commit()  # type: ignore[union-attr] # it is open
                committing = False
            return result

        if not self.active:
            raise TransactionEndedError(ENDED)
        # Taken before our own statements: they would end the silence.
        self._silent = monotonic() - self._activity.sent_at
        if self._session is not None:
            await self._flush(self._session)
        try:
            async with (
                self._errors.classed(partial(needed_to_write, settlements)),
                asyncio.timeout(self._timeout),
            ):
                return await self.connection.run_sync(settle)
        except BaseException as error:
            # Cut off between the COMMIT and its answer, the transaction may have been committed.
            if committing and not self._errors.wrote_nothing(error):
                msg = f"the answer to the COMMIT was lost: {error}"
                raise UnknownOutcomeError(msg) from error
            if committing:
                await self.connection.invalidate()
            if isinstance(error, AccessError):
                self.denied = error
                self._doing = needed_to_write(settlements)
            raise

    async def _flush(self, session: AsyncSession) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await session.flush()
        except (SQLAlchemyError, TimeoutError) as error:
            ours = self._errors.of(error)
            if isinstance(ours, TransientStoreError):
                raise ours from error
            raise

    async def forget(self) -> None:
        """Make the connection ready for the pool, whatever state the handler has left it in."""
        if not self._is_shut and self._turn.locked() and not self.connection.closed:
            # The handler was cut off, and a task of it publishes: nothing else may be sent now.
            await self.connection.invalidate()
        await self.shut()
        if self.sync_connection is not None:
            self.sync_connection.execution_options(**{INSIDE: None})
        if self._session is not None:
            # Not close(): that would send statements, and the transaction may be broken.
            self._session.sync_session.expunge_all()

    async def explain(self, denied: AccessError) -> AccessError:
        """`denied` with the right, the user and the GRANT, if they can be found out.

        Call it after the connection was returned: it takes another one.
        """
        return await self._errors.explained(denied, self._doing)

    def was_silent(self, error: StoreError) -> bool:
        """Whether `commit` raised `error` because the handler sent nothing for too long.

        The server had ended the session then.
        """
        return self._silent >= self._idle_limit and not self._errors.was_rolled_back(error)


class HandlerTransactions:
    """Opens transactions for handlers; at most `places` are open at a time."""

    def __init__(self, database: Database, places: int) -> None:
        """Open `places` transactions at a time."""
        self._database = database
        self._engine = refusing_outside(database.engine)
        self._places = LoopSemaphore(places)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HandlerTransaction]:
        """A transaction that has begun; it is rolled back at the end unless it was committed.

        Raises:
            TransientStoreError: it could not be opened in time.
        """
        ours = self._database
        async with self._places, AsyncExitStack() as stack:
            async with ours.errors.classed(), asyncio.timeout(ours.timeout):
                connection = await stack.enter_async_context(ours.checkouts(None, self._engine))
                transaction = HandlerTransaction(connection, ours)
                await transaction.begin()
            try:
                yield transaction
            finally:
                await transaction.forget()

    async def was_committed(self, lock: HandlerLock) -> bool:
        """Whether the transaction that had taken `lock` was committed; it must have ended.

        Raises:
            StoreError: the database did not answer.
        """
        asked = self._database.dialect.handler_locks.was_committed
        return await self._database.run(lambda c: asked(c, lock))
