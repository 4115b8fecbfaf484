"""The database server: its clock, settings and tables, and the health that it reports.

A statement about health reads the server's own views, locks nothing and returns a limited number of
rows.
"""

import asyncio
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, TextClause, inspect, select, text
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.database.constants import MAX_SESSIONS
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.mysql.error_codes import CANNOT_CONVERT, NO_PROCESS
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.schema.triggers import has_notify_trigger
from faststream_sqlbroker.schema.types import MYSQL, is_mariadb
from faststream_sqlbroker.schema.validate import find_differences

if TYPE_CHECKING:
    from faststream_sqlbroker.core.health import DatabaseHealth, OpenTransaction


NO_RIGHT = "all transactions (GRANT PROCESS ON *.*)"
UNREADABLE = "all transactions, while a session runs a statement with bytes that are no text"
HIDDEN = {NO_PROCESS: NO_RIGHT, CANNOT_CONVERT: UNREADABLE}
"""What MySQL's errors hide, by their numbers."""
READ_ATTEMPTS = 10
"""Number of attempts to read the transactions of MySQL, if such a statement runs."""
READ_PAUSE = 0.12
"""Seconds between these attempts: InnoDB refreshes its list only if it was not read for 0.1 s."""


class DatabaseServer:
    """The server and the broker's tables; each operation is a single transaction.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._tables = database.tables

    async def read_now(self) -> datetime:
        """Return the database's time (aware, UTC)."""
        return await self._database.run(self._dialect.now, write=False)

    async def setup(self) -> None:
        """Check the server's settings that the broker relies on; turn on WAL in SQLite."""
        await self._database.run(self._dialect.setup, write=False)

    async def read_health(self) -> "DatabaseHealth":
        """Read what the server shows this user: version, long transactions, dead rows."""
        from faststream_sqlbroker.core.health import DatabaseHealth  # noqa: PLC0415

        def read_server(connection: Connection) -> DatabaseHealth:
            if self._dialect.name == "postgresql":
                return _read_postgresql(connection, self._dialect)
            if self._dialect.name in MYSQL:
                return _read_mysql(connection, self._dialect)
            # SQLite does not show transactions of other processes, and has no vacuum that such a
            # transaction could hold back.
            return DatabaseHealth(version=f"SQLite {_format_version(connection)}")

        for _ in range(READ_ATTEMPTS):
            health = await self._database.run(read_server, write=False)
            if health.hidden != UNREADABLE:
                break
            await asyncio.sleep(READ_PAUSE)
        return health

    async def create_tables(self) -> None:
        """Create the missing tables and indexes (for development).

        Raises:
            SchemaError: a table of that name is not the broker's.
        """
        from faststream_sqlbroker.schema.migrate import create_all  # noqa: PLC0415

        await self._database.run(lambda c: create_all(c, self._tables))

    async def find_differences(self) -> list[str]:
        """List the differences of the tables from this version's schema, each with a remedy."""
        return await self._database.run(lambda c: find_differences(c, self._tables), write=False)

    async def has_notify_trigger(self) -> bool:
        """Return True if the message table has the triggers of `notify_trigger` (PostgreSQL)."""
        return await self._database.run(lambda c: has_notify_trigger(c, self._tables), write=False)

    async def read_schema_version(self) -> str | None:
        """Return the latest recorded migration, None if another program migrates the tables."""
        table = self._tables.version

        def read_version(connection: Connection) -> str | None:
            if not inspect(connection).has_table(table.name, schema=table.schema):
                return None
            version: str | None = connection.execute(select(table.c.version_num)).scalar()
            return version

        return await self._database.run(read_version, write=False)


def _read_postgresql(connection: Connection, dialect: DialectOperations) -> "DatabaseHealth":
    """Read the health of PostgreSQL: long transactions of any kind, dead rows, autovacuum.

    Old snapshots keep vacuum from removing dead rows. They belong to sessions, to prepared
    transactions, or to replication slots. `hidden` says what the user's rights do not show.
    """
    from faststream_sqlbroker.core.health import (  # noqa: PLC0415 - a start needs none of it
        DatabaseHealth,
        TableHealth,
        sort_by_age,
    )

    sql = dialect.sql
    transactions = [
        *_iter_transactions(connection, sql["health_sessions"]),
        *_iter_transactions(connection, sql["health_prepared"]),
        *_iter_transactions(connection, sql["health_slots"]),
    ]
    hidden = connection.execute(sql["health_hidden"]).scalar_one()
    autovacuum = connection.execute(text("SELECT current_setting('autovacuum')")).scalar_one()
    quote = connection.dialect.identifier_preparer.format_table
    names = [quote(table) for table in dialect.tables.broker_tables]
    tables = connection.execute(sql["health_tables"], {"names": names})
    return DatabaseHealth(
        version=f"PostgreSQL {_format_version(connection)}",
        transactions=sort_by_age(transactions)[:MAX_SESSIONS],
        hidden=f"{hidden} sessions of other users (GRANT pg_read_all_stats)" if hidden else None,
        tables=tuple(
            TableHealth(
                table=row.name,
                live_rows=row.live,
                dead_rows=row.dead,
                inserted_rows=row.inserted,
                last_vacuum_ago=row.ago,
                options=tuple(row.options or ()),
            )
            for row in tables
        ),
        autovacuum=autovacuum == "on",
    )


def _read_mysql(connection: Connection, dialect: DialectOperations) -> "DatabaseHealth":
    """Read the health of MySQL or MariaDB: long transactions, and the purge backlog.

    The backlog is InnoDB's history of old row versions, which grows while such a transaction lasts.
    """
    from faststream_sqlbroker.core.health import DatabaseHealth, sort_by_age  # noqa: PLC0415

    name = "MariaDB" if is_mariadb(connection.dialect) else "MySQL"
    version = f"{name} {_format_version(connection)}"
    # Without PROCESS the server shows no InnoDB transactions at all, not even the user's own.
    try:
        transactions = list(_iter_transactions(connection, dialect.sql["health_sessions"]))
        backlog = connection.execute(dialect.sql["health_purge"]).scalar_one_or_none()
    except DBAPIError as error:
        number = error.orig.args[0] if error.orig and error.orig.args else None
        if number not in HIDDEN:
            raise
        return DatabaseHealth(version=version, hidden=HIDDEN[number])
    return DatabaseHealth(
        version=version, transactions=sort_by_age(transactions), purge_backlog=backlog
    )


def _iter_transactions(
    connection: Connection, statement: TextClause
) -> "Iterator[OpenTransaction]":
    """Yield the open transactions that `statement` finds.

    Its columns are the fields of `OpenTransaction`.
    """
    from faststream_sqlbroker.core.health import OpenTransaction  # noqa: PLC0415

    for row in connection.execute(statement):
        values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001 - the public way to a mapping
        values["age"] = None if row.age is None else float(row.age)
        yield OpenTransaction(**values)


def _format_version(connection: Connection) -> str:
    info = connection.dialect.server_version_info or ()
    return ".".join(str(part) for part in info if isinstance(part, int))
