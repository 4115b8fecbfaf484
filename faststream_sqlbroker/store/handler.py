"""The transaction that a handler works in: it commits with the ack of the handler's message, or not
at all.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from time import monotonic

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from faststream_sqlbroker.core.access import Activities
from faststream_sqlbroker.core.rows import Leases, Settlement, SettleResult
from faststream_sqlbroker.core.settle import needed_to_write
from faststream_sqlbroker.dialects import Dialect
from faststream_sqlbroker.dialects.handler_locks import ENDED, HandlerLock
from faststream_sqlbroker.exceptions import (
    AccessError,
    SqlBrokerError,
    StoreError,
    TransactionEndedError,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.store.checkout import Checkouts
from faststream_sqlbroker.store.event_loops import LoopSemaphore
from faststream_sqlbroker.store.guarded_connection import INSIDE, LastUse, refusing_outside
from faststream_sqlbroker.store.transaction import Transactions


class HandlerTransaction:
    """One open transaction; `connection` and `session` are for the handler, the rest is the
    broker's.

    Every statement of the broker's own is bounded by the store's `statement_timeout`.
    """

    def __init__(
        self, connection: AsyncConnection, dialect: Dialect, checkouts: Checkouts, timeout: float
    ) -> None:
        """`timeout` in seconds."""
        self.connection = connection
        self._dialect, self._checkouts, self._timeout = dialect, checkouts, timeout
        self._errors = checkouts.errors
        self._session: AsyncSession | None = None
        self._activity, self._idle_limit, self._silent = LastUse(), float("inf"), 0.0
        self.locked = HandlerLock((), set())
        self.denied: AccessError | None = None
        """What `commit` has raised for want of a right or a table."""
        self._doing: Activities = frozenset()
        self.proven = False
        """Whether it was still the transaction that had locked them when its handler had ended."""

    @property
    def session(self) -> AsyncSession:
        """A session on the connection, made when first asked for; its commit() only flushes."""
        if self._session is None:
            self._session = AsyncSession(
                self.connection, join_transaction_mode="rollback_only", expire_on_commit=False
            )
        return self._session

    async def begin(self) -> None:
        """Begin; nothing is sent yet."""
        self._root = await self.connection.begin()

    @property
    def active(self) -> bool:
        """Whether the handler has left the transaction open."""
        return self._root.is_active and self.connection.get_transaction() is self._root

    def note(self, error: BaseException) -> None:
        """The handler, or its commit, has failed with `error`, which may say that the connection
        must not be used again.
        """
        self._checkouts.note(error)

    async def lock(self, leases: Leases, lease: float) -> set[int]:
        """Lock the rows whose lease is still held, which keeps it while the transaction lives;
        their ids.

        Outside of the transaction that has locked them `connection` refuses every statement from
        now on. The server ends the session, and so the transaction, if the handler sends nothing
        for `lease` seconds.

        Raises:
            TransientStoreError: the database does not answer.
        """

        def lock(connection: Connection) -> HandlerLock:
            held = self._dialect.handler_locks.lock(connection, leases, lease)
            connection.execution_options(**{INSIDE: self._activity})
            return held

        self._activity, self._idle_limit = LastUse(), lease
        async with self._errors.classed(), asyncio.timeout(self._timeout):
            self.locked = await self.connection.run_sync(lock)
        return self.locked.held

    async def prove(self) -> None:
        """Find out whether it is still the transaction that has locked the rows; `proven` tells,
        whatever fails.
        """
        if not self.active:
            return
        with contextlib.suppress(SqlBrokerError):
            async with self._errors.classed(), asyncio.timeout(self._timeout):
                await self.connection.run_sync(
                    lambda c: self._dialect.handler_locks.prove(c, self.locked)
                )
                self.proven = True

    async def hold(self, leases: Leases, seconds: float) -> set[int]:
        """Let the handler send nothing for `seconds` from now on; the ids of `leases` that are
        still held.

        Raises:
            TransientStoreError: the database does not answer.
        """

        def hold(connection: Connection) -> set[int]:
            self._dialect.allow_idling(connection, seconds)
            return self._dialect.lock(connection, leases)

        async with self._errors.classed(), asyncio.timeout(self._timeout):
            held = await self.connection.run_sync(hold)
        self._idle_limit = seconds
        return held

    async def commit(self, settlements: Sequence[Settlement]) -> SettleResult:
        """Write what the session still holds, `settlements` and what is chained to them, and
        commit.

        Nothing is committed if one of them has lost its lease.

        Raises:
            TransactionEndedError: it is another transaction than the one that has locked the rows.
            UnknownOutcomeError: the answer to the COMMIT was lost.
            TransientStoreError: nothing was committed, for a reason that passes; see `was_silent`.
            StoreError: nothing was committed.
            Exception: the flush of the session raised it; nothing was committed.
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
            if committing and not self._errors.was_rolled_back(error):
                msg = f"the answer to the COMMIT was lost: {error}"
                raise UnknownOutcomeError(msg) from error
            if committing:
                await self.connection.invalidate()
            if isinstance(error, AccessError):
                self.denied, self._doing = error, needed_to_write(settlements)
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

    async def explain(self, denied: AccessError) -> AccessError:
        """`denied` with right, user and GRANT, as far as they can be found out; once the connection
        is given back.
        """
        return await self._errors.explained(denied, self._doing)

    def was_silent(self, error: StoreError) -> bool:
        """Whether `commit` raised `error` as the server had ended the session: its handler sent
        nothing for too long.
        """
        return self._silent >= self._idle_limit and not self._errors.was_rolled_back(error)


class HandlerTransactions:
    """Opens the transactions of one store, `places` of them at a time."""

    def __init__(self, transactions: Transactions, shared: asyncio.Semaphore, places: int) -> None:
        """Share the limits of `transactions`, and `shared`, the store's places, for questions of
        its own.
        """
        self._transactions, self._shared = transactions, shared
        self._engine = refusing_outside(transactions.engine)
        self._places = LoopSemaphore(places)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HandlerTransaction]:
        """A transaction that has begun; rolled back at the end unless it was committed.

        Raises:
            TransientStoreError: none could be opened in time.
        """
        ours = self._transactions
        async with self._places, AsyncExitStack() as stack:
            async with ours.errors.classed(), asyncio.timeout(ours.timeout):
                connection = await stack.enter_async_context(ours.checkouts(None, self._engine))
                transaction = HandlerTransaction(
                    connection, ours.dialect, ours.checkouts, ours.timeout
                )
                await transaction.begin()
            try:
                yield transaction
            finally:
                if connection.sync_connection is not None:
                    connection.sync_connection.execution_options(**{INSIDE: None})
                if transaction._session is not None:  # noqa: SLF001 - not to make one now
                    transaction._session.sync_session.expunge_all()  # noqa: SLF001 - close() would send statements

    async def was_committed(self, lock: HandlerLock) -> bool:
        """Whether the transaction that has taken `lock`, and has ended, was committed.

        Raises:
            StoreError: the database does not say.
        """
        asked = self._transactions.dialect.handler_locks.was_committed
        return await self._transactions.run(lambda c: asked(c, lock), self._shared)
