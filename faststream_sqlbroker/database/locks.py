"""Locks by key, each operation one transaction."""

import os
import socket
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.status import HeldLock
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import locks
from faststream_sqlbroker.database.parts.audit import note_action


class LockStore:
    """Takes, renews and releases locks; a holder is known by its token.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    async def acquire(self, key: str, token: UUID, lease: float) -> int | None:
        """Take `key` for `lease` seconds if it is free; its fence, or None.

        After an unknown outcome, repeat it with the same token: if the first one was committed, it
        returns the same fence.
        """
        worker = f"{socket.gethostname()}:{os.getpid()}"
        return await self._database.run(
            lambda c: locks.acquire(c, self._table, key, token, lease, worker), Activity.LOCK
        )

    async def extend(self, key: str, token: UUID, lease: float) -> bool:
        """Extend the lease to `lease` seconds from now; false if `token` no longer has the lock."""
        return await self._database.run(
            lambda c: locks.extend(c, self._table, key, token, lease), Activity.LOCK
        )

    async def release(self, key: str, token: UUID) -> bool:
        """Release `key`; false, and no change, if `token` no longer has it."""
        return await self._database.run(
            lambda c: locks.release(c, self._table, key, token), Activity.LOCK
        )

    async def force(self, key: str, by: str) -> bool:
        """Take `key` from its holder, and note who did; whether it had one.

        The next fence is above the holder's.
        """

        def work(connection: Connection) -> bool:
            had = locks.force(connection, self._table, key)
            if had:
                note_action(connection, self._dialect, "release_lock", by, {"key": key})
            return had

        return await self._database.run(work, Activity.OPERATE)

    async def held(self, limit: int) -> Sequence[HeldLock]:
        """Up to `limit` locks that have a holder now, sorted by key."""
        return await self._database.run(
            lambda c: locks.held(c, self._table, limit), Activity.OPERATE, write=False
        )
