"""The tokens of queues over HTTP; each operation is one transaction."""

import asyncio

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.channels import Registered
from faststream_sqlbroker.core.queue_api import QueueRole
from faststream_sqlbroker.dialects import Dialect, channels
from faststream_sqlbroker.store.audit import note_action
from faststream_sqlbroker.store.transaction import Transactions

SCOPE = "queue:"
"""The scope of tokens is this and what they allow; the key is the queue."""


class QueueTokenStore:
    """Finds and makes them; the database has their hashes only.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self, transactions: Transactions, dialect: Dialect, places: asyncio.Semaphore
    ) -> None:
        """Each operation takes one of the store's `places`."""
        self._transactions = transactions.doing(Activity.STATE)
        self._dialect = dialect
        self._table = dialect.tables.policy_state
        self._places = places

    async def find(self, queue: str, role: QueueRole) -> Registered | None:
        """The token of the queue that allows `role`."""
        query = channels.finding(self._dialect, (SCOPE + role, queue))
        [found] = await self._transactions.run(query, self._places, write=False)
        return found

    async def put(
        self,
        queue: str,
        role: QueueRole,
        *,
        by: str,
        token: str | None = None,
        rotate: bool = False,
    ) -> Registered:
        """Make the token, or with `rotate` another one, and note in the audit who did."""

        def work(connection: Connection) -> Registered:
            found = channels.put(
                connection,
                self._table,
                SCOPE + role,
                queue,
                token=token,
                changes={},
                rotate=rotate,
            )
            if found.changed:
                arguments = {"queue": queue, "role": role}
                note_action(connection, self._dialect, "put_queue_token", by, arguments)
            return found

        return await self._transactions.run(work, self._places)
