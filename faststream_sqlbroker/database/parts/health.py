"""What the server tells of itself: its version, transactions that are open for long, dead rows.

Each statement reads the server's own views, locks nothing and returns a limited number of rows.
"""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.health import (
    DatabaseHealth,
    OpenTransaction,
    TableHealth,
    oldest_first,
)
from faststream_sqlbroker.database.constants import MAX_SESSIONS
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.schema.types import MYSQL, is_mariadb


def database_health(connection: Connection, dialect: Operations) -> DatabaseHealth:
    """What the server tells to this user."""
    if dialect.name == "postgresql":
        return _postgresql(connection, dialect)
    if dialect.name in MYSQL:
        return _mysql(connection, dialect)
    # A transaction of another process cannot be seen in SQLite; nothing is removed by a vacuum
    # that would have to wait for it.
    return DatabaseHealth(version=f"SQLite {_version(connection)}")


def _postgresql(connection: Connection, dialect: Operations) -> DatabaseHealth:
    sql = dialect.sql
    transactions = [
        *_rows(connection, sql["health_sessions"]),
        *_rows(connection, sql["health_prepared"]),
        *_rows(connection, sql["health_slots"]),
    ]
    hidden = connection.execute(sql["health_hidden"]).scalar_one()
    autovacuum = connection.execute(text("SELECT current_setting('autovacuum')")).scalar_one()
    quote = connection.dialect.identifier_preparer.format_table
    names = [quote(table) for table in dialect.tables.ours]
    tables = connection.execute(sql["health_tables"], {"names": names})
    return DatabaseHealth(
        version=f"PostgreSQL {_version(connection)}",
        transactions=oldest_first(transactions)[:MAX_SESSIONS],
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


def _mysql(connection: Connection, dialect: Operations) -> DatabaseHealth:
    name = "MariaDB" if is_mariadb(connection.dialect) else "MySQL"
    version = f"{name} {_version(connection)}"
    # Without PROCESS the server refuses to show InnoDB's transactions at all, own ones included.
    try:
        transactions = list(_rows(connection, dialect.sql["health_sessions"]))
        backlog = connection.execute(dialect.sql["health_purge"]).scalar_one_or_none()
    except DBAPIError as error:
        if error.orig is None or error.orig.args[:1] != (_NO_PROCESS,):
            raise
        return DatabaseHealth(version=version, hidden="all of them: GRANT PROCESS ON *.*")
    return DatabaseHealth(
        version=version, transactions=oldest_first(transactions), purge_backlog=backlog
    )


_NO_PROCESS = 1227
"""ER_SPECIFIC_ACCESS_DENIED_ERROR: the user lacks PROCESS."""


def _rows(connection: Connection, statement: TextClause) -> Iterator[OpenTransaction]:
    for row in connection.execute(statement):
        values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 - the public way to a mapping
        values["age"] = None if row.age is None else float(row.age)
        yield OpenTransaction(**values)


def _version(connection: Connection) -> str:
    info = connection.dialect.server_version_info or ()
    return ".".join(str(part) for part in info if isinstance(part, int))
