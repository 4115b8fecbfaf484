"""End sessions whose client fell silent in the middle of a statement (PostgreSQL).

asyncpg sends a new statement in two steps: it asks the server to parse, waits for the answer, then
sends the values. If the client vanishes in between, the session does not count as idle. No time
limit before transaction_timeout (PostgreSQL 17) ends it, and its locks stay until TCP gives up on
the client after two hours. The server does not report how long such a session has waited, only that
the wait is the same as before.

An application may wait like that on purpose: between asyncpg's `prepare` and the first use of the
statement, or in a pipeline. So only the broker's own transactions are ended. They are marked by an
advisory lock whose key says how long they may be silent.
"""

from collections.abc import Mapping
from datetime import datetime
from time import monotonic

from sqlalchemy import Connection

from faststream_sqlbroker.database.engine import Database

Wait = tuple[int, datetime]
"""A session and the start of its current activity; both are constant while the session waits."""

CHECK_INTERVAL = 10.0
"""Seconds between two checks of one process, for any number of subscribers, to keep their cost
low. A session is ended at most that much later.
"""


class DeadSessionWatch:
    """The waits of other sessions that this process has observed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = database.dialect.sql
        self._first_seen: dict[Wait, float] = {}
        """The waits of the last query, and when each was first observed (monotonic seconds)."""
        self._next_check = 0.0

    async def end_dead_sessions(self) -> list[int]:
        """End sessions whose client has vanished in the middle of a statement of the broker.

        Their locks would block messages for hours. A session is ended if it has stayed in the same
        wait for longer than its own idle limit and than that of this process, in a transaction of
        the broker (of this process or another) that locks rows of the broker's tables. A
        transaction of the application is never ended. Does nothing within `CHECK_INTERVAL` seconds
        of the last query, and on databases that end such sessions themselves.

        Returns:
            The server's process ids of the ended sessions.

        Raises:
            StoreError: the query failed.
        """
        now = monotonic()
        if now < self._next_check or not self._sql.has("silent_sessions"):
            return []
        self._next_check = now + CHECK_INTERVAL
        waits = await self._database.run(self._find_waits, write=False)
        self._first_seen = {wait: self._first_seen.get(wait, now) for wait in waits}
        limit = self._database.idle_limit
        expired_waits = {
            wait: now - since for wait, since in self._first_seen.items() if since <= now - limit
        }
        if not expired_waits:
            return []
        return await self._database.run(lambda c: self._end_sessions(c, expired_waits), write=False)

    def _find_waits(self, connection: Connection) -> set[Wait]:
        """Return this user's sessions that wait for their client in the middle of a statement.

        A wait is the session's process id and the start of its current activity. Empty if this user
        may not end sessions.
        """
        return {(pid, since) for pid, since in connection.execute(self._sql["silent_sessions"])}

    def _end_sessions(self, connection: Connection, waits: Mapping[Wait, float]) -> list[int]:
        """End the sessions of `waits` that wait too long for their client; return their ids.

        The statement checks each session again: it must still be in the same wait, hold locks on
        the broker's tables, and have waited longer than the limit in its transaction's advisory
        lock.

        Args:
            connection: A session that is not among `waits`.
            waits: Each wait with its known length (seconds).
        """
        format_name = connection.dialect.identifier_preparer.format_table
        binds = {
            "pids": [pid for pid, _ in waits],
            "since": [since for _, since in waits],
            "waited": [int(seconds * 1000) for seconds in waits.values()],
            "tables": [format_name(table) for table in self._database.tables.broker_tables],
        }
        rows = connection.execute(self._sql["end_sessions"], binds)
        return [pid for pid, ended in rows if ended]
