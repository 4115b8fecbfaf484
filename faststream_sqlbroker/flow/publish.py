"""Insert messages: on the broker's own connection, or in the caller's transaction."""

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.database.messages.handler import (
    HandlerTransaction,
    current_transaction,
    get_joinable_transaction,
    refuse_in_handler,
)
from faststream_sqlbroker.flow.publish_on_ack import get_due_queues, join_ack
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

    from faststream_sqlbroker.database.store import Store
    from faststream_sqlbroker.flow.debug_log import DebugLog
    from faststream_sqlbroker.flow.publish_limits import PublishLimits


class Publisher:
    """Writes messages and sends hints for subscribers."""

    def __init__(
        self,
        store: "Store",
        wakeups: Wakeups,
        limits: "PublishLimits | None" = None,
        debug: "DebugLog | None" = None,
    ) -> None:
        """Write to `store`, within `limits`; `debug` logs single messages."""
        self._debug = debug
        self._store = store
        self._wakeups = wakeups
        self._limits = limits
        self._has_one_writer = store.dialect.one_writer

    def publish(
        self,
        rows: Sequence[NewMessage],
        *,
        connection: "AsyncConnection | AsyncSession | None" = None,
        droppable: bool = True,
        at_once: bool = False,
    ) -> Coroutine[Any, Any, list[int | None]]:
        """Insert `rows`; return their ids in the order given.

        The id is None where a dedup_id exists already, or where the row was dropped because its
        queue is full.

        With `connection` the messages belong to the caller's transaction, which is neither begun,
        committed nor flushed here. In a handler with a transaction they belong to that one, unless
        they are to be written `at_once`. Otherwise they are committed when this returns. If
        `droppable` is False, a full queue that drops raises instead.

        Raises:
            PublishError: the connection cannot be used, the handler's transaction has ended, or a
                body is larger than `max_payload`.
            QueueFullError: a queue is full.
            NotSupportedError: `at_once` in a handler whose transaction is the only writer (SQLite).
            StoreError: the database refused or could not be reached.
        """
        transaction: Any = connection
        if connection is None and current_transaction.get() is not None:
            transaction = self._find_transaction(at_once=at_once)
        if self._limits is None:
            return self._write(rows, connection=transaction)
        return self._write_limited(self._limits, rows, connection=transaction, droppable=droppable)

    def _find_transaction(self, *, at_once: bool) -> HandlerTransaction | None:
        """Return the handler's transaction to publish in; None for a separate transaction.

        Called in a handler with transactional=True. `at_once` needs a separate transaction, which
        SQLite refuses: it allows one writer, and that is the handler's transaction.
        """
        store = self._store
        if at_once:
            refuse_in_handler(store.dialect, store.engine, "with_ack=False", _OR_JOIN)
            return None
        return get_joinable_transaction(store.dialect, store.engine)

    async def _write_limited(
        self,
        limits: "PublishLimits",
        rows: Sequence[NewMessage],
        *,
        connection: Any,
        droppable: bool,
    ) -> list[int | None]:
        """Insert the rows that the publish limits admit; return None as the id of the others.

        The limits are `max_payload` and `max_depth`. A publish in an open transaction of the caller
        does not wait for capacity. One in a handler's transaction waits where other transactions
        can write at that time, and so free capacity, which is not so on SQLite.
        """
        if not rows:
            return []
        limits.check_payload(rows)
        count_connection: Any = connection
        if isinstance(connection, HandlerTransaction):
            # None: count on the broker's own connection, and wait if the queue is full. With one
            # writer that would be a deadlock: no worker could write an outcome while this waits.
            count_connection = connection.connection if self._has_one_writer else None
        admitted = await limits.admit(
            rows,
            connection=self._get_count_connection(count_connection),
            can_wait=count_connection is None,
            droppable=droppable,
        )
        if admitted is None:
            return await self._write(rows, connection=connection)
        return align_ids(
            admitted, await self._write(filter_admitted(rows, admitted), connection=connection)
        )

    def _get_count_connection(self, connection: Any) -> Any:
        """Return the caller's connection on which to count; None for the broker's own.

        A test's publisher overrides this: its messages may be in another database than the caller's
        transaction.
        """
        return connection

    async def _write(self, rows: Sequence[NewMessage], *, connection: Any) -> list[int | None]:
        """Insert `rows`, and log rows that request the debug log by a header.

        The broker has a debug log (`_debug`) only if it was given the name of such a header.
        """
        if self._debug is None:
            return await self._insert_rows(rows, connection=connection)
        started_at = self._wakeups.clock.monotonic()
        ids = await self._insert_rows(rows, connection=connection)
        where = "" if connection is None else " in the caller's transaction, not committed yet,"
        self._debug.log_published(rows, ids, self._wakeups.clock.monotonic() - started_at, where)
        return ids

    async def _insert_rows(
        self, rows: Sequence[NewMessage], *, connection: Any
    ) -> list[int | None]:
        """Insert `rows` and send hints to subscribers of queues in which a message is due now.

        A hint makes them poll at once. For a caller's transaction it is sent after the end of that:
        before, nothing could be found.
        """
        if not rows:
            return []
        due = get_due_queues(rows)
        if connection is None:
            ids = await self._store.insert(rows)
            if due:
                self._wakeups.notify_published(due)
            return ids
        ids = await self._store.insert_in(connection, rows)
        transaction = _find_sync_transaction(connection)
        if due and transaction is not None:
            self._wakeups.notify_after(transaction, due)
        return ids

    async def wait_for_capacity(self, queue: str) -> None:
        """Wait until `queue` has fewer due messages than `max_depth`.

        For callers that publish in their own transaction, which a wait would keep open.

        Raises:
            QueueFullError: that took longer than the limit's timeout.
            StoreError: the queue could not be counted.
        """
        if self._limits is not None:
            await self._limits.wait_for_capacity(queue)

    def join(
        self, rows: Sequence[NewMessage], delivery: Sequence[ClaimedMessage], *, required: bool
    ) -> bool:
        """Add `rows` to the transaction that settles `delivery`; return True if that was possible.

        The rows are then published if and only if the handler's ack, or its move of the message, is
        written; after a nack or a reject they are dropped. The delivery must be the current one of
        a worker of this broker.

        Raises:
            PublishError: it was not possible although `required`; or one of `rows` is larger than
                the database or `max_payload` allows.
        """
        self._check_sizes(rows)
        return join_ack(self._store, delivery, rows, required=required)

    def check_size(self, row: NewMessage) -> None:
        """Refuse a row that is too large for the database, before the write with an ack.

        Refused only at the write, it would keep the ack from being written.

        Raises:
            MessageTooLargeError: it is too large, or larger than `max_payload`.
        """
        self._check_sizes([row])

    def _check_sizes(self, rows: Sequence[NewMessage]) -> None:
        """Raise MessageTooLargeError if a row exceeds `max_payload` or the database's limits.

        Checked now for rows that are written with an ack: a refusal then would keep the ack from
        being written.
        """
        if self._limits is not None:
            self._limits.check_payload(rows)
        self._store.refuse_too_large(rows)

    def publish_sync(
        self, rows: Sequence[NewMessage], *, connection: "Connection | Session"
    ) -> list[int | None]:
        """Insert `rows` in a synchronous caller's transaction; return their ids as `publish`.

        Without an event loop no hint is sent: subscribers find the rows at their next poll.

        Raises:
            PublishError: as `publish`.
            QueueFullError: a queue is full; nothing is waited for.
            StoreError: as `publish`.
        """
        if self._limits is None:
            return self._write_sync(rows, connection=connection)
        self._limits.check_payload(rows)
        admitted = self._limits.admit_sync(rows, connection=self._get_count_connection(connection))
        if admitted is None:
            return self._write_sync(rows, connection=connection)
        return align_ids(
            admitted, self._write_sync(filter_admitted(rows, admitted), connection=connection)
        )

    def _write_sync(self, rows: Sequence[NewMessage], *, connection: Any) -> list[int | None]:
        """Insert `rows` in a synchronous transaction, and log rows with the debug header.

        No hint is sent to subscribers: that needs an event loop.
        """
        if not rows:
            return []
        if self._debug is None:
            return self._store.insert_sync(connection, rows)
        started_at = self._wakeups.clock.monotonic()
        ids = self._store.insert_sync(connection, rows)
        where = " in the caller's transaction, not committed yet,"
        self._debug.log_published(rows, ids, self._wakeups.clock.monotonic() - started_at, where)
        return ids


_OR_JOIN = (
    "omit with_ack, so that the handler's transaction publishes the message. TestSqlBroker uses "
    "SQLite for every database, so this also applies in tests."
)


def filter_admitted(rows: Sequence[NewMessage], admitted: Sequence[bool]) -> list[NewMessage]:
    """Return the rows that were admitted."""
    return [row for row, is_admitted in zip(rows, admitted, strict=True) if is_admitted]


def align_ids(admitted: Sequence[bool], ids: Sequence[int | None]) -> list[int | None]:
    """Return an id per row, with None for the rows that were not admitted.

    `ids` has an entry for each admitted row only, in the order of the rows.
    """
    remaining_ids = iter(ids)
    return [next(remaining_ids) if is_admitted else None for is_admitted in admitted]


def _find_sync_transaction(connection: Any) -> Any:
    """Return the synchronous transaction under the caller's async connection or session, if any.

    This object turns inactive when the transaction ends. SQLAlchemy has no event after a COMMIT, so
    that is the sign to send hints to subscribers.
    """
    sync_session = getattr(connection, "sync_session", None)
    if sync_session is not None:
        return sync_session.get_transaction()
    sync_connection = getattr(connection, "sync_connection", None)
    return None if sync_connection is None else sync_connection.get_transaction()
