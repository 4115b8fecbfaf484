"""The small table of state that outlives a message's row, by (scope, key), on every database."""

import os
import socket
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Table,
    and_,
    bindparam,
    delete,
    literal,
    select,
    update,
)

from faststream_sqlbroker.core.correlation import create_database_id, is_database_id
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.schema.types import MYSQL, clock, later

ORDERED = "ordered"
SCOPE = "scope"
"""Scope of budgets; the key is the name of a budget that several queues share. The row is locked
while a part of the budget is granted.
"""
ACK_FIRST = "ack_first:"
"""Prefix of the scope, followed by the queue; the key is the message's id."""
ONCE = "once:"
"""Prefix of the scope, followed by the queue; the key is the message's, its id is in `info`."""
DATABASE = "database"
"""Scope of one row with the random bits that distinguish this database's messages from others."""
DATABASE_KEY = "id"
"""Key of that row; the bits are in `info`, also as "id"."""


def get_process_name() -> str:
    """Return the host name and process id of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def lock_order(
    connection: Connection, table: Table, queues: Sequence[str], scope: str = ORDERED
) -> set[str]:
    """Lock the rows of `queues` that no other transaction has locked; return the locked queues.

    A claim under policies or in order holds this lock, so that it alone decides about its queues;
    it skips the queues that another claim has locked. The locks last until the transaction ends.
    The first claim of a queue inserts its row; claims that run at the same time wait for that
    insert.
    """
    in_scope = table.c.scope == scope

    def select_keys(names: Sequence[str], *, lock: bool) -> set[str]:
        """Return the existing keys of `names`; with `lock`, only keys that could be locked."""
        keys = set[str]()
        for part in iter_chunks(names):
            statement = select(table.c.key).where(in_scope, table.c.key.in_(part))
            keys.update(
                connection.execute(
                    statement.with_for_update(skip_locked=True) if lock else statement
                ).scalars()
            )
        return keys

    locked = select_keys(queues, lock=True)
    if len(locked) == len(queues):
        return locked
    existing = select_keys(queues, lock=False)
    missing = [queue for queue in queues if queue not in existing]
    if not missing:
        return locked
    # A race: another claim may have inserted the row in the meantime. Then the upsert writes the
    # existing value.
    row = {"scope": scope}
    upsert(connection, table, [{**row, "key": queue} for queue in missing], replaced=("scope",))
    return locked | select_keys(missing, lock=True)


def raise_versions(connection: Connection, table: Table, scope: str, keys: Sequence[str]) -> None:
    """Write the locked rows `keys` of `scope` by raising their `counter`.

    Only a changed value is a write for a cluster that compares the writes of transactions.
    """
    statement = update(table).where(match_key(table)).values(counter=table.c.counter + 1)
    connection.execute(statement, [{"of_scope": scope, "of_key": key} for key in keys])


def record_starts(
    connection: Connection,
    table: Table,
    rows: Sequence[ClaimedMessage],
    holder: UUID,
    lease: float,
    worker: str,
) -> None:
    """Record that `holder` is about to start the handlers of `rows`.

    With AckPolicy.ACK_FIRST, the rows are removed in the same transaction. The record, with a lease
    that the process renews, shows later which handlers started and were not reported to have ended.
    """
    binds = [
        {
            "scope": ACK_FIRST + row.queue,
            "key": str(row.id),
            "lease_token": holder,
            "lease": round(lease * 1_000_000),
            "info": {"key": row.key, "worker": worker},
        }
        for row in rows
    ]
    # A row may exist from before an operator restored the message.
    values = {"created_at": clock(), "lease_expires_at": later(bindparam("lease"))}
    upsert(connection, table, binds, replaced=(*values, "lease_token", "info"), **values)


def upsert(
    connection: Connection,
    table: Table,
    binds: Sequence[Any],
    *,
    replaced: Sequence[str],
    **values: Any,
) -> None:
    """Insert rows of `binds` and `values`; in existing rows, update the `replaced` columns.

    To leave an existing row as it is, but lock it, replace "scope": it keeps its value.
    """
    statement = create_insert(table, connection.dialect.name).values(values)
    if connection.dialect.name in MYSQL:
        statement = statement.on_duplicate_key_update({c: statement.inserted[c] for c in replaced})
    else:
        updates = {c: statement.excluded[c] for c in replaced}
        statement = statement.on_conflict_do_update(index_elements=["scope", "key"], set_=updates)
    connection.execute(statement, binds)


def insert_new(connection: Connection, table: Table, binds: Sequence[Any]) -> None:
    """Insert rows and leave existing rows unchanged.

    Waits for another transaction that inserts the same row.
    """
    statement = create_insert(table, connection.dialect.name)
    if connection.dialect.name in MYSQL:
        # An upsert that changes nothing: IGNORE would hide other errors, too.
        statement = statement.on_duplicate_key_update(scope=table.c.scope)
    else:
        statement = statement.on_conflict_do_nothing()
    connection.execute(statement, binds)


def create_insert(table: Table, dialect_name: str) -> Any:
    """Create the database's own INSERT, which can skip or update existing rows."""
    # Each dialect module takes 50 ms to import, so only that of the database in use is imported.
    name = "mysql" if dialect_name in MYSQL else dialect_name
    return import_module(f"sqlalchemy.dialects.{name}").insert(table)


def has_expired(connection: Connection, table: Table) -> bool:
    """Return True if `remove_expired` would find a row; only reads."""
    statement = select(table.c.key).where(table.c.expires_at <= clock()).limit(1)
    return connection.execute(statement).first() is not None


def remove_expired(
    connection: Connection,
    table: Table,
    limit: int,
    select_removable: Callable[[Sequence[Any]], Sequence[Any]] = lambda rows: rows,
) -> int:
    """Check up to `limit` expired rows, and remove the rows that `select_removable` returns.

    That function may renew rows that are still needed. Returns the number of checked rows: fewer
    than `limit` means that none remain.
    """
    is_expired = table.c.expires_at <= clock()
    columns = table.c.scope, table.c.key, table.c.counter, table.c.created_at
    rows = connection.execute(select(*columns).where(is_expired).limit(limit)).all()
    if removed := select_removable(rows):
        binds = [{"of_scope": row.scope, "of_key": row.key} for row in removed]
        connection.execute(delete(table).where(match_key(table), is_expired), binds)
    return len(rows)


def match_key(table: Table) -> ColumnElement[bool]:
    """Return the condition of the row with the binds `of_scope` and `of_key`."""
    # One key at a time: for a list of keys MariaDB would scan a small table, and wait for rows
    # locked by another transaction.
    return and_(table.c.scope == bindparam("of_scope"), table.c.key == bindparam("of_key"))


def get_future_time(seconds: float) -> Any:
    """Return the time in `seconds` by the database's clock, such as the end of a lease."""
    return later(literal(round(seconds * 1_000_000), BigInteger))


def read_database_id(connection: Connection, table: Table) -> str | None:
    """Return the random bits that make the correlation ids of this database unique.

    None if none were drawn yet, or another program has changed the row.
    """
    return _read_id(connection, table, lock=False)


def get_or_create_database_id(connection: Connection, table: Table) -> str | None:
    """Return the random bits that make the correlation ids of this database unique.

    Drawn now if there are none. None if another program has changed the row.
    """
    if (database_id := _read_id(connection, table, lock=False)) is not None:
        return database_id
    # A race: another process may have drawn the bits in the meantime. Then its row stays.
    row = {"scope": DATABASE, "key": DATABASE_KEY, "info": {"id": create_database_id()}}
    upsert(connection, table, [row], replaced=("scope",))
    return _read_id(connection, table, lock=True)


def _read_id(connection: Connection, table: Table, *, lock: bool) -> str | None:
    """Return the stored bits of this database; None if missing or invalid.

    With `lock`, reads what another transaction has just committed, not an older snapshot.
    """
    row = select(table.c.info).where(table.c.scope == DATABASE, table.c.key == DATABASE_KEY)
    info = connection.execute(row.with_for_update() if lock else row).scalar()
    value = info.get("id") if isinstance(info, dict) else None
    return value if is_database_id(value) else None
