"""Keep the records of exports true while messages leave the archive for their queues.

A restored message is no longer in the window in which it ended. So the transaction that moves
it also lowers the window's record, as a prune does. If the message ends again, or an undo puts
it back, that is a row of a later window. A prune locks the record before the rows. A caller of
this module must do the same, or the two can deadlock.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, and_, delete, func, insert, null, or_, select, update

from faststream_sqlbroker.core.loaded_windows import LOADED_SCOPE, LoadedWindow, parse_window
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.database.parts.window_rows import sum_rows

RECORD_PAGE = 100
"""Records that one statement reads."""
SCOPE_END = LOADED_SCOPE[:-1] + chr(ord(LOADED_SCOPE[-1]) + 1)
"""Scopes of records sort before this value."""


@dataclass(frozen=True, slots=True)
class LockedRecord:
    """A record whose row the transaction has locked."""

    scope: str
    window: LoadedWindow

    def has(self, timestamp: datetime) -> bool:
        """Return True if a message that ended at `timestamp` is in the window."""
        return self.window.start <= timestamp < self.window.end


def lock_records(
    connection: Connection, dialect: DialectOperations, ids: Sequence[int]
) -> list[LockedRecord]:
    """Lock the records of the windows in which the archived messages `ids` ended.

    A record says how many rows of a window (a day or an hour of `archived_at`) an export has copied
    to a lake. Call this before locking the messages. Most databases have no records: that is one
    statement.
    """
    archive = dialect.tables.archive
    scopes = _list_scopes(connection, dialect.tables.policy_state) if ids else []
    if archive is None or not scopes:
        return []
    timestamps: list[datetime] = []
    for batch in iter_chunks(list(ids)):
        ended_at = select(archive.c.archived_at).where(archive.c.id.in_(batch))
        timestamps += connection.execute(ended_at).scalars()
    table = dialect.tables.policy_state
    records: list[LockedRecord] = []
    # In the order of scope and name: two redrives lock the same records in the same order.
    for scope in scopes if timestamps else ():
        names = sorted(_iter_window_names(connection, table, scope, timestamps))
        for part in iter_chunks(names):
            rows = select(table.c.key, table.c.info, table.c.counter).where(
                table.c.scope == scope, table.c.key.in_(part), table.c.due_at.is_not(None)
            )
            locked_rows = connection.execute(rows.order_by(table.c.key).with_for_update())
            records += [LockedRecord(scope, parse_window(*row)) for row in locked_rows]
    return records


def _list_scopes(connection: Connection, table: Table) -> list[str]:
    """Return the scopes of all records: a scope for each lake.

    Steps from scope to scope in the primary key: DISTINCT would read every record.
    """
    scopes: list[str] = []
    while True:
        after = table.c.scope > scopes[-1] if scopes else table.c.scope >= LOADED_SCOPE
        first = select(func.min(table.c.scope)).where(after, table.c.scope < SCOPE_END)
        scope = connection.execute(first).scalar()
        if scope is None:
            return scopes
        scopes.append(scope)


def _iter_window_names(
    connection: Connection, table: Table, scope: str, timestamps: Sequence[datetime]
) -> Iterable[str]:
    """Yield the windows of a lake that contain any of the timestamps.

    A lake is an export of the archive, a window a day or an hour of it, recorded in the policy
    state. Read page by page, by the end of the windows (`due_at`). Windows that ended before the
    first timestamp are not read, nor are pages after the one that passes the last.
    """
    c = table.c
    first = min(timestamps)
    last = max(timestamps)
    after: tuple[datetime, str] | None = None
    while True:
        condition = c.due_at > first
        if after is not None:
            end, name = after
            condition = or_(c.due_at > end, and_(c.due_at == end, c.key > name))
        statement = select(c.key, c.info, c.counter, c.due_at).where(c.scope == scope, condition)
        rows = connection.execute(statement.order_by(c.due_at, c.key).limit(RECORD_PAGE)).all()
        for row in rows:
            window = parse_window(row.key, row.info, row.counter)
            if any(window.start <= timestamp < window.end for timestamp in timestamps):
                yield row.key
            after = row.due_at, row.key
        if len(rows) < RECORD_PAGE or parse_window(*rows[-1][:3]).start > last:
            return


def restore_messages(
    connection: Connection,
    dialect: DialectOperations,
    ids: Sequence[int],
    new_values: Mapping[str, Any],
    records: Sequence[LockedRecord],
) -> None:
    """Move archived messages, locked by the transaction, to the message table.

    `new_values` has expressions for changed columns, and None for columns that stay empty.
    `records` are the records of the windows in which the messages ended, from `lock_records`: the
    restored rows are subtracted from them.
    """
    message = dialect.tables.message
    archive = dialect.archive
    omitted = {name for name, value in new_values.items() if value is None}
    shared_names = [c.name for c in archive.c if c.name in message.c]
    names = [name for name in shared_names if name not in omitted]
    columns = [new_values.get(name, archive.c[name]) for name in names]
    condition = archive.c.id.in_(ids)
    if ids:
        # All statements see the same rows: they are locked.
        if records:
            ended = select(archive.c.id, archive.c.archived_at).where(condition)
            _lower_records(connection, dialect, records, connection.execute(ended).all())
        copy = select(*columns).where(condition)
        connection.execute(insert(message).from_select(names, copy))
        connection.execute(delete(archive).where(condition))


def _lower_records(
    connection: Connection,
    dialect: DialectOperations,
    records: Iterable[LockedRecord],
    rows: Sequence[Any],
) -> None:
    """Subtract messages that leave the archive from the records of their windows.

    A record says how many rows of a window are both in the lake and in the archive; it must stay
    true, as a prune compares it with the rows. `rows` have the id and `archived_at` of each. A
    record without remaining rows loses its `due_at`: there is nothing left to prune.
    """
    table: Table = dialect.tables.policy_state
    for record in records:
        row_sum = sum_rows([row for row in rows if record.has(row.archived_at)])
        if row_sum.rows:
            old_window = record.window
            window = replace(
                old_window,
                remaining=old_window.remaining - row_sum,
                returned=old_window.returned + row_sum,
            )
            values: dict[str, Any] = {"info": window.to_json(), "counter": old_window.version + 1}
            if not window.remaining.rows:
                values["due_at"] = null()
            statement = update(table).where(
                table.c.scope == record.scope, table.c.key == old_window.name
            )
            connection.execute(statement.values(**values))
