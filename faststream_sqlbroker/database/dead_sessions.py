"""Ends sessions whose client machine vanished in the middle of a statement (PostgreSQL)."""

from time import monotonic

from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.postgresql.dead_sessions import Wait

LOOK_EVERY = 10.0
"""Seconds between two queries of one process, for any number of subscribers, to keep their cost
low. A session is ended at most that much later."""


class DeadSessionWatch:
    """Remembers the waits that this process has seen in other sessions."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sessions = database.dialect.silent_sessions
        self._seen: dict[Wait, float] = {}
        """The waits of the last query, and when each was first seen (monotonic seconds)."""
        self._next_look = 0.0

    async def end(self) -> list[int]:
        """End sessions that have stayed in the same wait longer than they may idle.

        Only sessions in a transaction of the broker are ended, of this process or another, that
        lock rows of its tables and whose clients are silent in the middle of a statement. A
        transaction of the application is never ended. A session must have waited for longer than
        its own idle limit and than that of this process. Does nothing within `LOOK_EVERY` seconds
        of the last query, and on databases that end such sessions themselves.

        Returns:
            The server's process ids of those that were ended.

        Raises:
            StoreError: the database could not be asked.
        """
        sessions = self._sessions
        now = monotonic()
        if sessions is None or now < self._next_look:
            return []
        self._next_look = now + LOOK_EVERY
        found = await self._database.run(sessions.find, write=False)
        self._seen = {wait: self._seen.get(wait, now) for wait in found}
        limit = self._database.idle_limit
        over = {wait: now - since for wait, since in self._seen.items() if since <= now - limit}
        if not over:
            return []
        return await self._database.run(lambda c: sessions.end(c, over), write=False)
