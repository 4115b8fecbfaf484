"""Replies to the requests of this process; each operation is one transaction."""

from collections.abc import Sequence
from functools import partial

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import replies


class ReplyStore:
    """Reads and removes replies in a queue that only this process reads.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    async def read(self, queue: str) -> list[ClaimedMessage]:
        """The replies in `queue`, at most `MOST_READ`; they stay there, without a lease."""
        query = replies.reading(self._dialect, queue)
        return await self._database.run(query, Activity.REQUEST, write=False)

    async def remove(self, ids: Sequence[int]) -> None:
        """Delete these replies; nothing of them is archived."""
        await self._database.run(self._dialect.removing(ids), Activity.REQUEST)

    async def note_queue(self, queue: str, seconds: float) -> None:
        """Note that `queue` is used for `seconds` from now; then any process may clear it."""
        note = partial(replies.note_queue, table=self._table, queue=queue, seconds=seconds)
        await self._database.run(note, Activity.REQUEST)

    async def leave_queue(self, queue: str, *, forget: bool) -> None:
        """Clear `queue`; with `forget` no reply is to come, and it is no longer noted."""

        def leave(connection: Connection) -> None:
            replies.clear_queue(self._dialect, connection, queue)
            if forget:
                replies.forget_queue(connection, self._table, queue)

        await self._database.run(leave, Activity.REQUEST)
