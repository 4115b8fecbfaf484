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
from faststream_sqlbroker.core.settle import get_required_activities
from faststream_sqlbroker.database.connections import LoopSemaphore
from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.guarded_connection import (
    INSIDE,
    ConnectionActivity,
    with_transaction_guard,
)
from faststream_sqlbroker.database.parts.handler_locks import TRANSACTION_ENDED, HandlerLock
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
current_transaction: ContextVar["HandlerTransaction | None"] = ContextVar(
    "sqlbroker_transaction", default=None
)
"""The transaction of the running handler; tasks that it starts inherit it."""
_REMEDY = "remove transactional=True, or publish a message to another subscriber that does it"
_PUBLISHED_LATE = (
    "the handler's transaction has ended: await the publish, and tasks that publish, before the "
    "handler ends, or pass with_ack=False to commit the message immediately"
)


def get_joinable_transaction(dialect: Dialect, engine: AsyncEngine) -> "HandlerTransaction | None":
    """Return the transaction of the calling handler that a publish to `engine` belongs to, or None.

    A context variable has it, so tasks started by the handler get it, too; the transaction may have
    ended. The transaction of another engine is not joined, because equal URLs may lead to different
    databases. On SQLite it is joined, because the publish would wait for the handler's write lock.
    """
    handler = current_transaction.get()
    if handler is None:
        return None
    handler_engine = handler.connection.engine
    is_same_database = handler_engine.pool is engine.pool or (
        dialect.one_writer and handler_engine.url == engine.url
    )
    return handler if is_same_database else None


def get_only_writer(dialect: Dialect, engine: AsyncEngine) -> "HandlerTransaction | None":
    """Return the calling handler's open transaction if no other writer can enter, or None.

    That is so only on SQLite, where another write of the same handler would wait for itself.
    """
    handler = get_joinable_transaction(dialect, engine) if dialect.one_writer else None
    return None if handler is None or not handler.is_active else handler


def refuse_in_handler(
    dialect: Dialect, engine: AsyncEngine, name: str, remedy: str = _REMEDY
) -> None:
    """Refuse the operation `name` in a handler whose transaction would block it for ever.

    On SQLite the handler's transaction keeps all other writers out, also this operation, which
    writes in a separate transaction.

    Raises:
        NotSupportedError: the caller is a handler with transactional=True on SQLite.
    """
    if get_only_writer(dialect, engine) is not None:
        raise NotSupportedError(
            f"{name} cannot be used in a handler with transactional=True on SQLite: it writes in a "
            "separate transaction, and the handler's transaction blocks all other writers; "
            f"{remedy}"
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
        self._activity = ConnectionActivity()
        self._idle_limit = float("inf")
        """Seconds without a statement after which the server ends the session."""
        self._silence = 0.0
        """Seconds without a statement of the handler before `commit`."""
        self.locked = HandlerLock((), set())
        self.denied: AccessError | None = None
        """The error of `commit` if a right or a table was missing."""
        self._doing: Activities = frozenset()
        self._turn = asyncio.Lock()
        """Held for each statement of the broker while the handler and its tasks run: a driver takes
        one at a time.
        """
        self._is_shut = False
        self.proven = False
        """True if this was still the transaction with the row locks after the handler's end."""

    @property
    def session(self) -> AsyncSession:
        """A session on the connection, made at the first read, whose commit() only flushes."""
        if self._session is None:
            self._session = AsyncSession(
                self.connection, join_transaction_mode="rollback_only", expire_on_commit=False
            )
        return self._session

    @property
    def sync_connection(self) -> Connection | None:
        """The synchronous connection, as in AsyncConnection."""
        return self.connection.sync_connection

    async def start(self) -> None:
        """Start the transaction; nothing is sent to the server yet."""
        self._root = await self.connection.begin()

    @property
    def is_active(self) -> bool:
        """True if the handler has left the transaction open."""
        return self._root.is_active and self.connection.get_transaction() is self._root

    def handle_error(self, error: BaseException) -> None:
        """Evict connections if `error`, of handler or `commit`, came from a stale connection.

        A stale connection leads to a server that has become read-only; the others of the pool may,
        too.
        """
        self._checkouts.evict_if_spoiled(error)

    async def lock(self, leases: Leases, lease: float) -> set[int]:
        """Lock the rows whose lease is still held; return their ids.

        The lock keeps their lease until the transaction ends. From now on `connection` refuses
        every statement outside of this transaction. If the handler sends nothing for `lease`
        seconds, the server ends the session and with it the transaction.

        Raises:
            TransientStoreError: the database does not answer.
        """

        def lock(connection: Connection) -> HandlerLock:
            handler_lock = self._dialect.handler_locks.lock(connection, leases, lease)
            connection.execution_options(**{INSIDE: self._activity})
            return handler_lock

        self._activity = ConnectionActivity()
        self._idle_limit = lease
        async with self._errors.convert_errors(), asyncio.timeout(self._timeout):
            self.locked = await self.connection.run_sync(lock)
        return self.locked.locked_ids

    async def publish(self, insert: Callable[[AsyncConnection], Awaitable[Ids]]) -> Ids:
        """Insert messages in this transaction, after statements that other tasks are sending.

        `insert` gets the connection. A driver takes one statement at a time, so the handler's tasks
        wait for each other here.

        Raises:
            PublishError: the transaction has ended.
            TransientStoreError: the database does not answer; this cannot be committed any more.
        """
        async with self._errors.convert_errors(), asyncio.timeout(self._timeout), self._turn:
            if self._is_shut or not self.is_active:
                raise PublishError(_PUBLISHED_LATE)
            ids = await insert(self.connection)
            self._activity.sent_at = monotonic()
            return ids

    async def stop_publishing(self) -> None:
        """Wait for publishes of the handler's remaining tasks, and refuse later publishes.

        Called when the handler has ended, before the broker sends its own statements.
        """
        async with self._turn:
            self._is_shut = True

    async def prove(self) -> None:
        """Set `proven` if this is still the transaction that has locked the rows; raise nothing.

        Called for messages that the handler did not ack. If `proven`, the handler has not ended the
        transaction itself, so the rollback undoes all of its writes. An error leaves it False.
        """
        if not self.is_active:
            return
        with contextlib.suppress(SqlBrokerError):
            async with self._errors.convert_errors(), asyncio.timeout(self._timeout):
                await self.connection.run_sync(
                    lambda c: self._dialect.handler_locks.prove(c, self.locked)
                )
                self.proven = True

    async def hold(self, leases: Leases, seconds: float) -> set[int]:
        """Allow the handler to send nothing for `seconds`; return the ids of `leases` still held.

        Called while the handler runs, in place of a renewal of its leases: the row locks keep the
        leases, but the server would end the session when its idle limit is over.

        Raises:
            TransientStoreError: the database does not answer.
        """

        def hold(connection: Connection) -> set[int]:
            self._dialect.set_idle_limit(connection, seconds)
            return self._dialect.lock(connection, leases)

        async with self._errors.convert_errors(), asyncio.timeout(self._timeout), self._turn:
            leased_ids = await self.connection.run_sync(hold)
        self._idle_limit = seconds
        return leased_ids

    async def commit(self, settlements: Sequence[Settlement]) -> SettleResult:
        """Flush the session, write `settlements` with their published messages, and commit.

        Nothing is committed if a settlement has lost its lease.

        Raises:
            TransactionEndedError: this is not the transaction that has locked the rows.
            UnknownOutcomeError: the answer to the COMMIT was lost.
            TransientStoreError: nothing was committed; a repeat may succeed. See `was_silent`.
            StoreError: nothing was committed.
            Exception: the session's flush failed; nothing was committed.
        """
        has_sent_commit = False

        def settle(connection: Connection) -> SettleResult:
            nonlocal has_sent_commit
            result = self._dialect.handler_locks.settle(connection, self.locked, settlements)
            self.proven = True
            if not result.lost_ids:
                has_sent_commit = True
                self._root.sync_transaction.commit()  # type: ignore[union-attr] # it is open
                has_sent_commit = False
            return result

        if not self.is_active:
            raise TransactionEndedError(TRANSACTION_ENDED)
        # Measured before the broker's own statements, which would end the silence.
        self._silence = monotonic() - self._activity.sent_at
        if self._session is not None:
            await self._flush(self._session)
        try:
            async with (
                self._errors.convert_errors(partial(get_required_activities, settlements)),
                asyncio.timeout(self._timeout),
            ):
                return await self.connection.run_sync(settle)
        except BaseException as error:
            # If cancelled between the COMMIT and its answer, the transaction may have been
            # committed.
            if has_sent_commit and not self._errors.wrote_nothing(error):
                msg = f"the answer to the COMMIT was lost: {error}"
                raise UnknownOutcomeError(msg) from error
            if has_sent_commit:
                # SQLAlchemy takes the transaction for ended, but SQLite leaves it open: the next
                # user of the connection would commit it.
                await self.connection.invalidate()
            if isinstance(error, AccessError):
                self.denied = error
                self._doing = get_required_activities(settlements)
            raise

    async def _flush(self, session: AsyncSession) -> None:
        """Flush the handler's session; convert only errors after which a repeat may succeed.

        Other errors of the flush, such as a violated constraint, are the handler's own.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await session.flush()
        except (SQLAlchemyError, TimeoutError) as error:
            store_error = self._errors.to_store_error(error)
            if isinstance(store_error, TransientStoreError):
                raise store_error from error
            raise

    async def reset(self) -> None:
        """Prepare the connection for the pool, whatever state the handler has left.

        A connection on which a task of the handler is still sending is closed instead.
        """
        if not self._is_shut and self._turn.locked() and not self.connection.closed:
            # The handler was cancelled while one of its tasks publishes: nothing else may be sent
            # now.
            await self.connection.invalidate()
        await self.stop_publishing()
        if self.sync_connection is not None:
            self.sync_connection.execution_options(**{INSIDE: None})
        if self._session is not None:
            # Not close(): that would send statements, and the transaction may be broken.
            self._session.sync_session.expunge_all()

    async def explain(self, denied: AccessError) -> AccessError:
        """Return `denied` with the missing right, the user and the GRANT, as far as known.

        `denied` is an error of `commit`. Call this after the connection was returned, because it
        uses another connection.
        """
        return await self._errors.explain_denied(denied, self._doing)

    def was_silent(self, error: StoreError) -> bool:
        """Return True if `commit` raised `error` because the handler sent nothing for too long.

        The server had then ended the idle session, and with it the transaction.
        """
        return self._silence >= self._idle_limit and not self._errors.was_rolled_back(error)


class HandlerTransactions:
    """Opens transactions for handlers, up to `max_open` at a time."""

    def __init__(self, database: Database, max_open: int) -> None:
        self._database = database
        self._engine = with_transaction_guard(database.engine)
        self._slots = LoopSemaphore(max_open)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HandlerTransaction]:
        """Open a transaction, which is rolled back at the end unless committed.

        Raises:
            TransientStoreError: it could not be opened in time.
        """
        database = self._database
        async with self._slots, AsyncExitStack() as stack:
            async with database.errors.convert_errors(), asyncio.timeout(database.timeout):
                connection = await stack.enter_async_context(database.checkouts(None, self._engine))
                transaction = HandlerTransaction(connection, database)
                await transaction.start()
            try:
                yield transaction
            finally:
                await transaction.reset()

    async def was_committed(self, lock: HandlerLock) -> bool:
        """Return True if the ended transaction that held `lock` was committed.

        Asked about a transaction that ended before its ack: the handler may have committed it, or
        the server may have ended it.

        Raises:
            StoreError: the database did not answer.
        """
        was_committed = self._database.dialect.handler_locks.was_committed
        return await self._database.run(lambda c: was_committed(c, lock))
