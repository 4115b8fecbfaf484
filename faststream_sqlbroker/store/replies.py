"""Replies to the requests of this process; each operation is one transaction."""

import asyncio
from collections.abc import Sequence
from functools import partial

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.dialects import Dialect, replies
from faststream_sqlbroker.store.transaction import Transactions


class ReplyStore:
    """Reads and removes replies in a queue that only this process reads.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self, transactions: Transactions, dialect: Dialect, places: asyncio.Semaphore
    ) -> None:
        """Each operation takes one of the store's `places`."""
        self._transactions = transactions.doing(Activity.REQUEST)
        self._dialect = dialect
        self._places = places
        self._table = dialect.tables.policy_state

    async def read(self, queue: str) -> list[ClaimedMessage]:
        """The replies in `queue`, at most `MOST_READ`; they stay there, without a lease."""
        query = replies.reading(self._dialect, queue)
        return await self._transactions.run(query, self._places, write=False)

    async def remove(self, ids: Sequence[int]) -> None:
        """Delete these replies; nothing of them is archived."""
        await self._transactions.run(self._dialect.removing(ids), self._places)

    async def note_queue(self, queue: str, seconds: float) -> None:
        """Note that `queue` is used for `seconds` from now; then any process may clear it."""
        note = partial(replies.note_queue, table=self._table, queue=queue, seconds=seconds)
        await self._transactions.run(note, self._places)

    async def leave_queue(self, queue: str, *, forget: bool) -> None:
        """Clear `queue`; with `forget` no reply is to come, and it is no longer noted."""

        def leave(connection: Connection) -> None:
            replies.clear_queue(self._dialect, connection, queue)
            if forget:
                replies.forget_queue(connection, self._table, queue)

        await self._transactions.run(leave, self._places)
