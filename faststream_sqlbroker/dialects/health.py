"""What the server tells of itself: its version, transactions that are open for long, dead rows.

Each statement reads the server's own views, locks nothing and returns a limited number of rows.
"""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.health import (
    DatabaseHealth,
    OpenTransaction,
    TableHealth,
    oldest_first,
)
from faststream_sqlbroker.dialects.operations import Operations
from faststream_sqlbroker.schema.types import MYSQL, is_mariadb

MOST = 20
"""Transactions that are told of."""
QUERY_CHARACTERS = 200
"""Of a session's query: enough to know it by, few enough for a line."""

_SESSIONS = f"""
SELECT CASE backend_type WHEN 'walsender' THEN 'standby' ELSE 'session' END AS kind,
  pid::text AS name, usename AS user, application_name AS application,
  coalesce(state, backend_type) AS state,
  extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age,
  left(query, {QUERY_CHARACTERS}) AS query
FROM pg_stat_activity
WHERE pid <> pg_backend_pid() AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL
    OR state LIKE 'idle in transaction%')
  AND (datname = current_database() OR datname IS NULL)
  AND coalesce(backend_type, '') <> 'autovacuum worker'
ORDER BY xact_start NULLS FIRST LIMIT {MOST}
"""
# The role may not see them, or track_activities is off.
_HIDDEN = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND usesysid IS NOT NULL
  AND ((state IS NULL AND backend_type IS NULL) OR state = 'disabled')
"""
_PREPARED = f"""
SELECT 'prepared transaction' AS kind, gid AS name, owner AS user, NULL AS application,
  NULL AS state, extract(epoch FROM clock_timestamp() - prepared)::float8 AS age, NULL AS query
FROM pg_prepared_xacts WHERE database = current_database() ORDER BY prepared LIMIT {MOST}
"""
# A slot of a standby that is away keeps all rows that the standby could still see.
_SLOTS = f"""
SELECT 'replication slot' AS kind, slot_name AS name, NULL AS user, NULL AS application,
  CASE WHEN active THEN 'active' ELSE 'inactive' END AS state, NULL::float8 AS age, NULL AS query
FROM pg_replication_slots WHERE xmin IS NOT NULL AND NOT active LIMIT {MOST}
"""
_TABLES = """
SELECT w.name AS name, coalesce(s.n_live_tup, 0) AS live, coalesce(s.n_dead_tup, 0) AS dead,
  extract(epoch FROM clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum))::float8 AS ago,
  c.reloptions AS options
FROM unnest(CAST(:names AS text[])) AS w(name)
JOIN pg_class c ON c.oid = to_regclass(w.name)
LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
"""
# The start of a transaction is shown in the server's own time zone, whatever the session's is.
_INNODB = f"""
SELECT 'session' AS kind, CAST(t.trx_mysql_thread_id AS CHAR) AS name, p.user AS user,
  p.host AS application, lower(p.command) AS state,
  TIMESTAMPDIFF(SECOND, t.trx_started, CONVERT_TZ(UTC_TIMESTAMP(), '+00:00', 'SYSTEM')) AS age,
  left(coalesce(t.trx_query, p.info), {QUERY_CHARACTERS}) AS query
FROM information_schema.innodb_trx t
LEFT JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
WHERE t.trx_mysql_thread_id <> CONNECTION_ID()
ORDER BY t.trx_started LIMIT {MOST}
"""
_PURGE = "SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'"


def database_health(connection: Connection, dialect: Operations) -> DatabaseHealth:
    """What the server tells to this user."""
    if dialect.name == "postgresql":
        return _postgresql(connection, dialect)
    if dialect.name in MYSQL:
        return _mysql(connection)
    # A transaction of another process cannot be seen in SQLite; nothing is removed by a vacuum
    # that would have to wait for it.
    return DatabaseHealth(version=f"SQLite {_version(connection)}")


def _postgresql(connection: Connection, dialect: Operations) -> DatabaseHealth:
    found = [*_rows(connection, _SESSIONS), *_rows(connection, _PREPARED)]
    found += _rows(connection, _SLOTS)
    hidden = connection.execute(text(_HIDDEN)).scalar_one()
    autovacuum = connection.execute(text("SELECT current_setting('autovacuum')")).scalar_one()
    quote = connection.dialect.identifier_preparer.format_table
    names = [quote(table) for table in dialect.tables.ours]
    tables = connection.execute(text(_TABLES), {"names": names})
    return DatabaseHealth(
        version=f"PostgreSQL {_version(connection)}",
        transactions=oldest_first(found)[:MOST],
        hidden=f"{hidden} sessions of other users: GRANT pg_read_all_stats" if hidden else None,
        tables=tuple(
            TableHealth(
                table=row.name,
                live_rows=row.live,
                dead_rows=row.dead,
                last_vacuum_ago=row.ago,
                options=tuple(row.options or ()),
            )
            for row in tables
        ),
        autovacuum=autovacuum == "on",
    )


def _mysql(connection: Connection) -> DatabaseHealth:
    name = "MariaDB" if is_mariadb(connection.dialect) else "MySQL"
    version = f"{name} {_version(connection)}"
    # Without PROCESS the server refuses to show InnoDB's transactions at all, own ones included.
    try:
        found = list(_rows(connection, _INNODB))
        backlog = connection.execute(text(_PURGE)).scalar_one_or_none()
    except DBAPIError as error:
        if error.orig is None or error.orig.args[:1] != (_NO_PROCESS,):
            raise
        return DatabaseHealth(version=version, hidden="all of them: GRANT PROCESS ON *.*")
    return DatabaseHealth(version=version, transactions=oldest_first(found), purge_backlog=backlog)


_NO_PROCESS = 1227
"""ER_SPECIFIC_ACCESS_DENIED_ERROR: the user lacks PROCESS."""


def _rows(connection: Connection, statement: str) -> Iterator[OpenTransaction]:
    for row in connection.execute(text(statement)):
        values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 - the public way to a mapping
        values["age"] = None if row.age is None else float(row.age)
        yield OpenTransaction(**values)


def _version(connection: Connection) -> str:
    info = connection.dialect.server_version_info or ()
    return ".".join(str(part) for part in info if isinstance(part, int))
