"""Messages locked by the transaction of another session, as far as a database shows them.

A handler with `transactional=True` keeps its message locked for as long as it runs. Other
sessions see the row as it was before: they see its lease end, as neither a renewal nor a
release gets past the lock.
"""

from collections.abc import Sequence

from sqlalchemy import Connection, select

from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.schema.types import MYSQL


def find_locked(
    connection: Connection, dialect: DialectOperations, ids: Sequence[int]
) -> set[int] | None:
    """Return the live messages in `ids` whose rows other sessions have locked now.

    Such a row cannot be settled, renewed or released: a transactional handler runs. Returns None if
    the database does not show locks, as SQLite and a standby of PostgreSQL. On MySQL and MariaDB,
    free rows stay locked for other writers until the transaction of `connection` ends; nothing
    waits here.
    """
    if dialect.name == "postgresql":
        return _find_locked_postgresql(connection, dialect, ids)
    if connection.dialect.name not in MYSQL:
        return None
    c = dialect.tables.message.c
    mariadb = getattr(connection.dialect, "is_mariadb", False)
    lock = "LOCK IN SHARE MODE SKIP LOCKED" if mariadb else "FOR SHARE SKIP LOCKED"
    free: set[int] = set()
    for part in iter_chunks(sorted(ids)):
        rows = select(c.id).where(c.id.in_(part)).order_by(c.id).suffix_with(lock)
        free |= set(connection.execute(rows).scalars())
    # A row that was removed in the meantime counts as locked.
    return set(ids) - free


def _find_locked_postgresql(
    connection: Connection, dialect: DialectOperations, ids: Sequence[int]
) -> set[int] | None:
    """Return the locked messages of `ids`; None on a standby, which does not show locks."""
    if connection.exec_driver_sql("SELECT pg_catalog.pg_is_in_recovery()").scalar_one():
        return None
    locked: set[int] = set()
    for part in iter_chunks(sorted(ids)):
        locked |= set(connection.execute(dialect.sql["locked_by_others"], {"ids": part}).scalars())
    return locked
