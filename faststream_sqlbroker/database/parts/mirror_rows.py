"""The mirror: a row of the policy state for each message published with a lookup value.

The row counts only while its message lives. So nothing that settles, moves or cancels messages
changes it, except the move to a message's destination. Rows without a message are removed
later.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Table, bindparam, delete, insert, select, update
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from faststream_sqlbroker.core.rows import NewMessage, Settlement
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.policy_state import match_key
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.schema.types import later

MIRROR = "mirror:"
"""Prefix of the scope, followed by the lookup value. The key and the counter are the message's id.
"""
CHECK_DELAY = 300.0
"""Seconds until the first check that the message of a new row still lives."""


def insert_mirrored(
    dialect: DialectOperations, connection: Connection, rows: Sequence[NewMessage]
) -> list[int | None]:
    """Insert messages as `dialect.insert`, and mirror rows of messages with a lookup value.

    A mirror row, in the policy state, lets an application find its live messages by that value.
    """
    ids = dialect.insert(connection, rows)
    _insert_records(dialect, connection, rows, ids)
    return ids


def insert_for_caller(
    dialect: DialectOperations, connection: Connection, rows: Sequence[NewMessage]
) -> list[int | None]:
    """Insert as `insert_mirrored` in the caller's transaction, which may go on after an error.

    If the mirror's rows are refused, the messages must not be committed without them, so they are
    removed before the error is raised. On PostgreSQL the error itself keeps the transaction from
    its COMMIT.
    """
    if all(row.lookup is None for row in rows):
        return dialect.insert(connection, rows)
    if dialect.name == "postgresql":
        return insert_mirrored(dialect, connection, rows)
    if dialect.name == "sqlite":
        return _insert_or_delete(dialect, connection, rows)
    return _insert_or_roll_back(dialect, connection, rows)


def _insert_or_delete(
    dialect: DialectOperations, connection: Connection, rows: Sequence[NewMessage]
) -> list[int | None]:
    """Insert in the caller's SQLite transaction; delete the messages if a mirror row is refused.

    The caller may commit after the error, and must not publish messages without their mirror rows.
    """
    # No savepoint: before the transaction's first write, the savepoint would be the transaction,
    # and its release the COMMIT. SQLite has no rights, so deleting is always allowed.
    ids = dialect.insert(connection, rows)
    try:
        _insert_records(dialect, connection, rows, ids)
    except SQLAlchemyError:
        message: Table = dialect.tables.message
        with suppress(SQLAlchemyError):
            for part in iter_chunks([message_id for message_id in ids if message_id is not None]):
                connection.execute(delete(message).where(message.c.id.in_(part)))
        raise
    return ids


def _insert_or_roll_back(
    dialect: DialectOperations, connection: Connection, rows: Sequence[NewMessage]
) -> list[int | None]:
    """Insert in the caller's MySQL or MariaDB transaction, within a savepoint.

    If a mirror row is refused, the messages are rolled back, and the caller may go on.
    """
    # A producer may have no right to delete. Without a transaction, in autocommit mode, there is no
    # savepoint to roll back or release, and the server reports that.
    connection.exec_driver_sql("SAVEPOINT sqlbroker_mirror")
    try:
        ids = insert_mirrored(dialect, connection, rows)
    except SQLAlchemyError:
        with suppress(SQLAlchemyError):
            connection.exec_driver_sql("ROLLBACK TO SAVEPOINT sqlbroker_mirror")
        raise
    with suppress(DBAPIError):
        connection.exec_driver_sql("RELEASE SAVEPOINT sqlbroker_mirror")
    return ids


def _insert_records(
    dialect: DialectOperations,
    connection: Connection,
    rows: Sequence[NewMessage],
    ids: Sequence[int | None],
) -> None:
    """Insert the mirror row of each inserted message with a lookup value.

    `expires_at` is the first check that the message still lives, after its delay. A message that
    was not inserted, as its `dedup_id` exists already, gets none.
    """
    binds = [
        {
            "scope": MIRROR + row.lookup,
            "key": str(message_id),
            "counter": message_id,
            "info": {"text": row.info},
            "kept": round((CHECK_DELAY + max(row.delay or 0.0, 0.0)) * 1_000_000),
        }
        for row, message_id in zip(rows, ids, strict=True)
        if row.lookup is not None and message_id is not None
    ]
    if binds:
        table = dialect.tables.policy_state
        connection.execute(insert(table).values(expires_at=later(bindparam("kept"))), binds)


def remove_records(
    dialect: DialectOperations,
    connection: Connection,
    settlements: Sequence[Settlement],
    settled: Collection[int],
) -> None:
    """Remove the mirror's rows of `settled` messages that have moved to their destinations.

    Such a message is still live, but elsewhere. All other mirror rows end with their messages.
    """
    binds = [
        {"of_scope": MIRROR + settlement.lookup, "of_key": str(settlement.id)}
        for settlement in settlements
        if settlement.lookup is not None and settlement.id in settled
    ]
    if binds:
        state = dialect.tables.policy_state
        connection.execute(delete(state).where(match_key(state)), binds)


def renew_living(
    connection: Connection, dialect: DialectOperations, rows: Sequence[Any]
) -> list[Any]:
    """Renew the expired mirror rows whose messages live; return the other `rows`.

    Called before expired rows of the policy state are removed: of the mirror, only rows without a
    message may go. A mirror row is renewed for as long as it has existed, so long-lived messages
    are checked rarely.
    """
    mirror_rows = [row for row in rows if row.scope.startswith(MIRROR)]
    if not mirror_rows:
        return list(rows)
    state: Table = dialect.tables.policy_state
    message: Table = dialect.tables.message
    living_ids = set[int]()
    for part in iter_chunks([row.counter for row in mirror_rows]):
        living_ids.update(
            connection.execute(select(message.c.id).where(message.c.id.in_(part))).scalars()
        )
    now = dialect.now(connection)
    renewals = [
        {
            "of_scope": row.scope,
            "of_key": row.key,
            "kept": round(max((now - row.created_at).total_seconds(), CHECK_DELAY) * 1_000_000),
        }
        for row in mirror_rows
        if row.counter in living_ids
    ]
    if renewals:
        statement = update(state).where(match_key(state))
        statement = statement.values(expires_at=later(bindparam("kept")))
        connection.execute(statement, renewals)
    return [row for row in rows if not (row.scope.startswith(MIRROR) and row.counter in living_ids)]
