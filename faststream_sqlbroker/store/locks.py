"""Locks by key, each operation one transaction."""

import asyncio
import os
import socket
from collections.abc import Sequence
from uuid import UUID

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.status import HeldLock
from faststream_sqlbroker.dialects import locks
from faststream_sqlbroker.schema.tables import Tables
from faststream_sqlbroker.store.transaction import Transactions


class LockStore:
    """Takes, keeps and gives back locks; who has one is known by its token.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(
        self, transactions: Transactions, tables: Tables, places: asyncio.Semaphore
    ) -> None:
        """Share the store's `places`."""
        self._transactions, self._operating = (
            transactions.doing(Activity.LOCK),
            transactions.doing(Activity.OPERATE),
        )
        self._table, self._places = tables.policy_state, places

    async def acquire(self, key: str, token: UUID, lease: float) -> int | None:
        """Take `key` for `lease` seconds if it is free; its fence, or None.

        After an unknown outcome a repeat with the same token finds out: it gives the same fence.
        """
        worker = f"{socket.gethostname()}:{os.getpid()}"
        return await self._transactions.run(
            lambda c: locks.acquire(c, self._table, key, token, lease, worker), self._places
        )

    async def extend(self, key: str, token: UUID, lease: float) -> bool:
        """Lengthen the lease to `lease` seconds from now; false if `token` has the lock no more."""
        return await self._transactions.run(
            lambda c: locks.extend(c, self._table, key, token, lease), self._places
        )

    async def release(self, key: str, token: UUID) -> bool:
        """Give `key` back; false if `token` has it no more, which changes nothing."""
        return await self._transactions.run(
            lambda c: locks.release(c, self._table, key, token), self._places
        )

    async def force(self, key: str) -> bool:
        """Take `key` from whoever has it, whose fence is then behind the counter; whether somebody
        had it.
        """
        return await self._operating.run(lambda c: locks.force(c, self._table, key), self._places)

    async def held(self, limit: int) -> Sequence[HeldLock]:
        """Up to `limit` locks that somebody has now, by key."""
        return await self._operating.run(
            lambda c: locks.held(c, self._table, limit), self._places, write=False
        )
