"""Replies to the requests of this process; each operation is one transaction.

They are messages in a queue that only this process reads, so a reply needs no lease: it is read,
handed over, and deleted by its id. Heartbeats remove what a process leaves behind
(`database.parts.replies`).
"""

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, bindparam, delete

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.parts.policy_state import upsert
from faststream_sqlbroker.database.parts.replies import SCOPE, remove_replies
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.schema.types import clock, later

_NO_TOKEN = UUID(int=0)


class ReplyStore(StoreSubject):
    """Replies in a queue that only this process reads.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    async def read_replies(self, queue: str) -> list[ClaimedMessage]:
        """Read up to `MAX_REPLIES` replies in `queue`, without a lease.

        Only this process reads the queue, so no lease is needed. The replies stay there until they
        are removed.
        """

        def read_rows(rows: Iterable[Sequence[Any]]) -> list[ClaimedMessage]:
            # The rows are not leased: the token only fills the field of the message.
            return self._dialect.to_messages(rows, _NO_TOKEN)

        query = Query(self._dialect.sql["replies"], {"queue": queue}, read_rows)
        return await self._database.run(query, Activity.REQUEST, write=False)

    async def remove(self, ids: Sequence[int]) -> None:
        """Delete the replies `ids`; nothing is archived."""
        await self._database.run(self._dialect.build_remove(ids), Activity.REQUEST)

    async def register_queue(self, queue: str, seconds: float) -> None:
        """Record that this process uses the reply queue `queue` for `seconds` from now.

        If the process dies and stops renewing the record, any process may then clear the queue.
        """
        binds = {"scope": SCOPE, "key": queue, "used": round(seconds * 1_000_000)}
        values = {"created_at": clock(), "expires_at": later(bindparam("used"))}

        def register(connection: Connection) -> None:
            upsert(connection, self._table, [binds], replaced=["expires_at"], **values)

        await self._database.run(register, Activity.REQUEST)

    async def clear_queue(self, queue: str, *, unregister: bool) -> None:
        """Delete all replies in `queue`; with `unregister`, also the record of the queue.

        Called when this process reads no more replies. Without `unregister` the queue stays
        registered for a while, so that a heartbeat removes late replies.
        """
        c = self._table.c

        def clear(connection: Connection) -> None:
            remove_replies(self._dialect, connection, queue, everything=True)
            if unregister:
                connection.execute(delete(self._table).where(c.scope == SCOPE, c.key == queue))

        await self._database.run(clear, Activity.REQUEST)
