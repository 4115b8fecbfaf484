"""Insert messages: on the broker's own connection, or in the caller's transaction."""

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.database.messages.handler import (
    HandlerTransaction,
    current,
    refuse_in_handler,
    transaction_to_join,
)
from faststream_sqlbroker.flow.publish_on_ack import due_queues, join
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

    from faststream_sqlbroker.database.store import Store
    from faststream_sqlbroker.flow.debug_log import DebugLog
    from faststream_sqlbroker.flow.publish_limits import PublishLimits


class Publisher:
    """Writes messages and sends the hints that follow them."""

    def __init__(
        self,
        store: "Store",
        wakeups: Wakeups,
        limits: "PublishLimits | None" = None,
        debug: "DebugLog | None" = None,
    ) -> None:
        """Write to `store`, within `limits`; `debug` tells of single messages."""
        self._debug = debug
        self._store = store
        self._wakeups = wakeups
        self._limits = limits
        self._one_writer = store.dialect.one_writer

    def publish(
        self,
        rows: Sequence[NewMessage],
        *,
        connection: "AsyncConnection | AsyncSession | None" = None,
        droppable: bool = True,
        at_once: bool = False,
    ) -> Coroutine[Any, Any, list[int | None]]:
        """Insert `rows`; their ids in the order given, None where a dedup_id exists already, or
        where the row was dropped, as its queue is full.

        With `connection` the messages belong to the caller's transaction, which is neither begun,
        committed nor flushed here. In a handler with a transaction they belong to that one, unless
        they are to be written `at_once`. Else they are committed when this returns. With
        `droppable` false a full queue that drops raises.

        Raises:
            PublishError: the connection cannot be used, the handler's transaction has ended, or a
                body is larger than `max_payload`.
            QueueFullError: a queue is full.
            NotSupportedError: `at_once` in a handler whose transaction is the only writer (SQLite).
            StoreError: the database refused or could not be reached.
        """
        transaction: Any = connection
        if connection is None and current.get() is not None:
            transaction = self._transaction_to_join(at_once=at_once)
        if self._limits is None:
            return self._write(rows, connection=transaction)
        return self._admitted(self._limits, rows, connection=transaction, droppable=droppable)

    def _transaction_to_join(self, *, at_once: bool) -> HandlerTransaction | None:
        store = self._store
        if at_once:
            refuse_in_handler(store.dialect, store.engine, "with_ack=False", _OR_JOIN)
            return None
        return transaction_to_join(store.dialect, store.engine)

    async def _admitted(
        self,
        limits: "PublishLimits",
        rows: Sequence[NewMessage],
        *,
        connection: Any,
        droppable: bool,
    ) -> list[int | None]:
        if not rows:
            return []
        limits.check_payload(rows)
        counted: Any = connection
        if isinstance(connection, HandlerTransaction):
            # Where others can write, they make room while it waits.
            counted = connection.connection if self._one_writer else None
        kept = await limits.admit(
            rows,
            connection=self._counting_on(counted),
            waits=counted is None,
            droppable=droppable,
        )
        if kept is None:
            return await self._write(rows, connection=connection)
        return spread(kept, await self._write(only(rows, kept), connection=connection))

    def _counting_on(self, connection: Any) -> Any:
        """The caller's connection on which to count; None: the broker's own."""
        return connection

    async def _write(self, rows: Sequence[NewMessage], *, connection: Any) -> list[int | None]:
        if self._debug is None:
            return await self._written(rows, connection=connection)
        began = self._wakeups.clock.monotonic()
        ids = await self._written(rows, connection=connection)
        where = "" if connection is None else " in the caller's transaction, not committed yet,"
        self._debug.published(rows, ids, self._wakeups.clock.monotonic() - began, where)
        return ids

    async def _written(self, rows: Sequence[NewMessage], *, connection: Any) -> list[int | None]:
        if not rows:
            return []
        due = due_queues(rows)
        if connection is None:
            ids = await self._store.insert(rows)
            if due:
                self._wakeups.published(due)
            return ids
        ids = await self._store.insert_in(connection, rows)
        transaction = _transaction_of(connection)
        if due and transaction is not None:
            self._wakeups.published_in(transaction, due)
        return ids

    async def wait_for_room(self, queue: str) -> None:
        """Wait until `queue` has fewer due messages than its `max_depth`.

        Raises:
            QueueFullError: that took longer than the limit's timeout.
            StoreError: the queue could not be counted.
        """
        if self._limits is not None:
            await self._limits.wait_for_room(queue)

    def join(
        self, rows: Sequence[NewMessage], delivery: Sequence[ClaimedMessage], *, required: bool
    ) -> bool:
        """Leave `rows` to the transaction that settles `delivery`, which is being handled; whether
        it was possible.

        Raises:
            PublishError: it was not, and `required`; or one of `rows` is larger than the database
                or `max_payload` takes.
        """
        self._refuse_too_large(rows)
        return join(self._store, delivery, rows, required=required)

    def check_size(self, row: NewMessage) -> None:
        """Refuse a row that is written later, with an ack, if it is known to be larger than the
        database takes.

        Raises:
            MessageTooLargeError: it is, or it is larger than `max_payload`.
        """
        self._refuse_too_large([row])

    def _refuse_too_large(self, rows: Sequence[NewMessage]) -> None:
        if self._limits is not None:
            self._limits.check_payload(rows)
        self._store.refuse_too_large(rows)

    def publish_sync(
        self, rows: Sequence[NewMessage], *, connection: "Connection | Session"
    ) -> list[int | None]:
        """Insert `rows` in a synchronous caller's transaction; subscribers find them by polling.

        Raises:
            PublishError: as `publish`.
            QueueFullError: a queue is full; nothing is waited for.
            StoreError: as `publish`.
        """
        if self._limits is None:
            return self._write_sync(rows, connection=connection)
        self._limits.check_payload(rows)
        kept = self._limits.admit_sync(rows, connection=self._counting_on(connection))
        if kept is None:
            return self._write_sync(rows, connection=connection)
        return spread(kept, self._write_sync(only(rows, kept), connection=connection))

    def _write_sync(self, rows: Sequence[NewMessage], *, connection: Any) -> list[int | None]:
        if not rows:
            return []
        if self._debug is None:
            return self._store.insert_sync(connection, rows)
        began = self._wakeups.clock.monotonic()
        ids = self._store.insert_sync(connection, rows)
        where = " in the caller's transaction, not committed yet,"
        self._debug.published(rows, ids, self._wakeups.clock.monotonic() - began, where)
        return ids


_OR_JOIN = (
    "leave with_ack out, so that the message is part of the handler's transaction; under "
    "TestSqlBroker, which uses SQLite for every database, too"
)


def only(rows: Sequence[NewMessage], kept: Sequence[bool]) -> list[NewMessage]:
    """Those of `rows` that are kept."""
    return [row for row, is_kept in zip(rows, kept, strict=True) if is_kept]


def spread(kept: Sequence[bool], ids: Sequence[int | None]) -> list[int | None]:
    """`ids` of the rows that were kept, and None for the others."""
    of_kept = iter(ids)
    return [next(of_kept) if is_kept else None for is_kept in kept]


def _transaction_of(connection: Any) -> Any:
    """The synchronous transaction object that turns inactive when the caller's transaction ends."""
    sync_session = getattr(connection, "sync_session", None)
    if sync_session is not None:
        return sync_session.get_transaction()
    sync_connection = getattr(connection, "sync_connection", None)
    return None if sync_connection is None else sync_connection.get_transaction()
