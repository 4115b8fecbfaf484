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

from sqlalchemy import BigInteger, Connection, DateTime, Text, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.sql.compiler import IdentifierPreparer

from faststream_sqlbroker.dialects.postgresql.sql import MARK

if TYPE_CHECKING:
    from faststream_sqlbroker.schema.tables import Tables

Wait = tuple[int, datetime]
"""A session, and the start of what it does; both stay the same while it waits."""

_WAITS = """a.datname = current_database() AND a.usename = session_user \
AND a.pid <> pg_backend_pid()
  AND a.state = 'active' AND a.wait_event = 'ClientRead'"""

# Without COPY, which reads from its client all the time. A user without the right to call
# pg_terminate_backend gets no rows: END, which calls it, would be refused even for no rows.
FIND = rf"""
SELECT a.pid, a.state_change FROM pg_stat_activity a
WHERE {_WAITS} AND a.query !~* '\mcopy\M' AND pg_has_role(a.usesysid, 'USAGE') AND EXISTS (
  SELECT FROM pg_proc p WHERE p.proname = 'pg_terminate_backend'
    AND p.pronamespace = 'pg_catalog'::regnamespace AND has_function_privilege(p.oid, 'EXECUTE'))
"""

END = f"""
SELECT a.pid, pg_terminate_backend(a.pid)
FROM unnest(:pids, :since, :waited) AS s(pid, since, waited)
JOIN pg_stat_activity a ON a.pid = s.pid AND a.state_change = s.since
WHERE {_WAITS} AND s.waited >= (
  SELECT max(l.objid::bigint) FROM pg_locks l
  WHERE l.pid = a.pid AND l.locktype = 'advisory' AND l.classid = {MARK} AND l.objsubid = 2
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
) AND EXISTS (
  SELECT FROM pg_locks l JOIN unnest(:tables) AS t(name) ON l.relation = to_regclass(t.name)
  WHERE l.pid = a.pid AND l.locktype = 'relation' AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.mode IN ('RowShareLock', 'RowExclusiveLock'))
"""


class DeadSessions:
    """Finds and ends sessions of this database user that keep rows of the broker locked."""

    def __init__(self, tables: "Tables", preparer: IdentifierPreparer) -> None:
        self._names = [
            preparer.format_table(table) for table in tables.for_dialect("postgresql").ours
        ]
        self._find = text(FIND)
        self._end = text(END).bindparams(
            bindparam("pids", type_=ARRAY(BigInteger)),
            bindparam("since", type_=ARRAY(DateTime(timezone=True))),
            bindparam("waited", type_=ARRAY(BigInteger)),
            bindparam("tables", type_=ARRAY(Text)),
        )

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
