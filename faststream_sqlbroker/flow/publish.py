"""Insert messages: on the broker's own connection, or in the caller's transaction."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.flow.publish_on_ack import due_queues, join
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

    from faststream_sqlbroker.store import Store


class Publisher:
    """Writes messages and sends the hints that follow them."""

    def __init__(self, store: "Store", wakeups: Wakeups) -> None:
        self._store = store
        self._wakeups = wakeups

    async def publish(
        self,
        rows: Sequence[NewMessage],
        *,
        connection: "AsyncConnection | AsyncSession | None" = None,
    ) -> list[int | None]:
        """Insert `rows`; their ids in the order given, None where a dedup_id exists already.

        Without `connection` the messages are committed when this returns. With it they belong to
        the caller's transaction, which is neither begun, committed nor flushed here.

        Raises:
            PublishError: the connection cannot be used.
            StoreError: the database refused or could not be reached.
        """
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

    def join(
        self, rows: Sequence[NewMessage], delivery: Sequence[ClaimedMessage], *, required: bool
    ) -> bool:
        """Leave `rows` to the transaction that settles `delivery`, which is being handled; whether
        it was possible.

        Raises:
            PublishError: it was not, and `required`; or one of `rows` is larger than the database
                takes.
        """
        self._store.refuse_too_large(rows)
        return join(self._store, delivery, rows, required=required)

    def check_size(self, row: NewMessage) -> None:
        """Refuse a row that is written later, with an ack, if it is known to be larger than the
        database takes.

        Raises:
            MessageTooLargeError: it is.
        """
        self._store.refuse_too_large([row])

    def publish_sync(
        self, rows: Sequence[NewMessage], *, connection: "Connection | Session"
    ) -> list[int | None]:
        """Insert `rows` in a synchronous caller's transaction; subscribers find them by polling."""
        return self._store.insert_sync(connection, rows) if rows else []


def _transaction_of(connection: Any) -> Any:
    """The synchronous transaction object that turns inactive when the caller's transaction ends."""
    sync_session = getattr(connection, "sync_session", None)
    if sync_session is not None:
        return sync_session.get_transaction()
    sync_connection = getattr(connection, "sync_connection", None)
    return None if sync_connection is None else sync_connection.get_transaction()
