"""Which messages are locked by the transaction of another session, as far as a database shows it.

A handler with `transactional=True` keeps its message locked for as long as it runs. Others see the
row as it was before: they see its lease end, as neither a renewal nor a release gets past the lock.
"""

from collections.abc import Sequence

from sqlalchemy import Connection, select

from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.schema.types import MYSQL


def locked_by_others(
    connection: Connection, dialect: Operations, ids: Sequence[int]
) -> set[int] | None:
    """Those of the live messages whose rows others have locked now; None: this database does not
    tell, as SQLite and a standby of PostgreSQL do not.

    On MySQL and MariaDB the rows that are free stay locked, for other writers, until the
    transaction of `connection` ends; nothing waits here.
    """
    if dialect.name == "postgresql":
        return _of_postgresql(connection, dialect, ids)
    if connection.dialect.name not in MYSQL:
        return None
    c = dialect.tables.message.c
    mariadb = getattr(connection.dialect, "is_mariadb", False)
    lock = "LOCK IN SHARE MODE SKIP LOCKED" if mariadb else "FOR SHARE SKIP LOCKED"
    free: set[int] = set()
    for part in chunks(sorted(ids)):
        rows = select(c.id).where(c.id.in_(part)).order_by(c.id).suffix_with(lock)
        free |= set(connection.execute(rows).scalars())
    # A row that has gone since is not among them either; nothing is said of it.
    return set(ids) - free


def _of_postgresql(
    connection: Connection, dialect: Operations, ids: Sequence[int]
) -> set[int] | None:
    if connection.exec_driver_sql("SELECT pg_catalog.pg_is_in_recovery()").scalar_one():
        return None
    found: set[int] = set()
    for part in chunks(sorted(ids)):
        found |= set(connection.execute(dialect.sql["locked_by_others"], {"ids": part}).scalars())
    return found
