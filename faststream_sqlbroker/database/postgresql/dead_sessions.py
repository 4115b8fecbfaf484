"""End sessions whose client fell silent in the middle of a statement, on PostgreSQL.

asyncpg sends a new statement in two steps: it asks the server to parse, waits for the answer, then
sends the values. If the client vanishes in between, the session does not count as idle. No time
limit before transaction_timeout (PostgreSQL 17) ends it, and its locks stay until TCP gives the
client up, after two hours. The server does not tell how long such a session has waited. It tells
only that the wait is the same as before.

An application may wait like that on purpose: between asyncpg's `prepare` and the first use of the
statement, or in a pipeline. So only the broker's own transactions are ended. They carry a mark, an
advisory lock whose key says how long they may be silent.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import Connection
from sqlalchemy.sql.compiler import IdentifierPreparer

from faststream_sqlbroker.database.statements import Statements

if TYPE_CHECKING:
    from faststream_sqlbroker.schema.tables import Tables

Wait = tuple[int, datetime]
"""A session, and the start of what it does; both stay the same while it waits."""


class DeadSessions:
    """Finds and ends sessions of this database user that keep rows of the broker locked."""

    def __init__(self, sql: Statements, tables: "Tables", preparer: IdentifierPreparer) -> None:
        self._names = [
            preparer.format_table(table) for table in tables.for_dialect("postgresql").ours
        ]
        self._find = sql["silent_sessions"]
        self._end = sql["end_sessions"]

    def find(self, connection: Connection) -> set[Wait]:
        """Sessions that wait for their client in the middle of a statement; empty if this user may
        not end them.
        """
        return {(pid, since) for pid, since in connection.execute(self._find)}

    def end(self, connection: Connection, waits: Mapping[Wait, float]) -> list[int]:
        """End the sessions of `waits` that still wait, have locked rows of the broker's tables, and
        have waited longer than they may.

        Args:
            connection: A session that is none of `waits`.
            waits: Each wait, with the seconds that it is known to have lasted.

        Returns:
            The process ids of the ended sessions.
        """
        binds = {
            "pids": [pid for pid, _ in waits],
            "since": [since for _, since in waits],
            "waited": [int(seconds * 1000) for seconds in waits.values()],
            "tables": self._names,
        }
        return [pid for pid, ended in connection.execute(self._end, binds) if ended]
