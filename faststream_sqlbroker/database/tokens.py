"""The tokens of queues over HTTP; each operation is one transaction."""

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.channels import QueueRole, Registered
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import channels
from faststream_sqlbroker.database.parts.audit import note_action

SCOPE = "queue:"
"""The scope of tokens is this and what they allow; the key is the queue."""


class QueueTokenStore:
    """Finds and makes them; the database has their hashes only.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    async def find(self, queue: str, role: QueueRole) -> Registered | None:
        """The token of the queue that allows `role`."""
        query = channels.finding(self._dialect, (SCOPE + role, queue))
        [found] = await self._database.run(query, Activity.STATE, write=False)
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

        def put(connection: Connection) -> Registered:
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

        return await self._database.run(put, Activity.STATE)
