"""End sessions whose machine has vanished in the middle of a statement
(`dialects.postgresql.dead_sessions`).
"""

import asyncio
from time import monotonic

from faststream_sqlbroker.dialects import Dialect
from faststream_sqlbroker.dialects.postgresql.dead_sessions import Wait
from faststream_sqlbroker.store.transaction import Transactions

LOOK_EVERY = 10.0
"""Least seconds between two looks of one process, however many subscribers ask."""


class DeadSessionWatch:
    """What one process has seen of the waits of others."""

    def __init__(
        self, transactions: Transactions, dialect: Dialect, places: asyncio.Semaphore
    ) -> None:
        """Share the store's `places`."""
        self._transactions, self._places = transactions, places
        self._sessions = dialect.silent_sessions
        self._seen: dict[Wait, float] = {}
        """The waits of the last look, and when they were seen first (monotonic seconds)."""
        self._next_look = 0.0

    async def end(self) -> list[int]:
        """End sessions that were seen in the same wait for as long as they may idle in their
        transaction, and as we may.

        They are in a transaction of the broker's, in this process or another, hold rows of its
        tables, and their clients are silent in the middle of a statement. An application's own
        transaction is never ended. Does nothing within `LOOK_EVERY` seconds of the last look, and
        where the database ends such sessions by itself.

        Returns:
            The server's process ids of those that were ended.

        Raises:
            StoreError: the database could not be asked.
        """
        sessions, now = self._sessions, monotonic()
        if sessions is None or now < self._next_look:
            return []
        self._next_look = now + LOOK_EVERY
        found = await self._transactions.run(sessions.find, self._places, write=False)
        self._seen = {wait: self._seen.get(wait, now) for wait in found}
        limit = self._transactions.idle_limit
        over = {wait: now - since for wait, since in self._seen.items() if since <= now - limit}
        if not over:
            return []
        return await self._transactions.run(
            lambda c: sessions.end(c, over), self._places, write=False
        )
