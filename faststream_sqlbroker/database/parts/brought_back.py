"""Keeps what exports have recorded true while messages leave the archive for their queues.

A message that is brought back is no longer in the window in which it ended. So the transaction
that moves it also lowers the window's record, as a prune does; an undo raises it again. A prune
locks the record first and the rows after it, and so must a caller here, or the two can deadlock.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, and_, delete, func, insert, or_, select, update

from faststream_sqlbroker.core.loaded_windows import LOADED, LoadedWindow, RowSum, window_of
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.sizes import chunks

LISTED = 100
"""Records that one statement reads."""
END = LOADED[:-1] + chr(ord(LOADED[-1]) + 1)
"""Scopes of records sort before it."""


@dataclass(frozen=True, slots=True)
class LockedRecord:
    """A record whose row the transaction has locked."""

    scope: str
    window: LoadedWindow
    written_at: datetime
    """When an export has written it; another time means that the lake was read anew since."""

    @property
    def note(self) -> list[Any]:
        """Names the record, as JSON has it, and tells it from one that an export has renewed."""
        return [self.scope, self.window.name, to_microseconds(self.written_at)]

    def has(self, moment: datetime) -> bool:
        """Whether what ended at `moment` is in the window."""
        return self.window.start <= moment < self.window.end


def lock_records(
    connection: Connection, dialect: Operations, ids: Sequence[int]
) -> list[LockedRecord]:
    """Lock the records of the windows in which the archived messages `ids` ended.

    Call it before the messages are locked. Most databases have no records: that is one statement.
    """
    archive = dialect.tables.archive
    scopes = _scopes(connection, dialect.tables.policy_state) if ids else []
    if archive is None or not scopes:
        return []
    moments: list[datetime] = []
    for part in chunks(list(ids)):
        ended = select(archive.c.archived_at).where(archive.c.id.in_(part))
        moments += connection.execute(ended).scalars()
    return lock_records_at(connection, dialect, moments, scopes)


def lock_records_at(
    connection: Connection,
    dialect: Operations,
    moments: Sequence[datetime],
    scopes: Sequence[str] | None = None,
) -> list[LockedRecord]:
    """Lock the records of the windows that have one of `moments`."""
    table = dialect.tables.policy_state
    if not moments:
        return []
    if scopes is None:
        scopes = _scopes(connection, table)
    found: list[LockedRecord] = []
    # By scope, then by name: two redrives that lock the same records do it in the same order.
    for scope in scopes:
        names = sorted(_names(connection, table, scope, moments))
        for part in chunks(names):
            columns = table.c.key, table.c.info, table.c.counter, table.c.created_at
            rows = select(*columns).where(
                table.c.scope == scope, table.c.key.in_(part), table.c.due_at.is_not(None)
            )
            locked = connection.execute(rows.order_by(table.c.key).with_for_update())
            found += [LockedRecord(scope, window_of(*row[:3]), row.created_at) for row in locked]
    return found


def _scopes(connection: Connection, table: Table) -> list[str]:
    found: list[str] = []
    while True:
        behind = table.c.scope > found[-1] if found else table.c.scope >= LOADED
        first = select(func.min(table.c.scope)).where(behind, table.c.scope < END)
        scope = connection.execute(first).scalar()
        if scope is None:
            return found
        found.append(scope)


def _names(
    connection: Connection, table: Table, scope: str, moments: Sequence[datetime]
) -> Iterable[str]:
    """Windows of one lake that have one of the moments; those that have ended by the first one are
    not read.
    """
    c = table.c
    first = min(moments)
    last = max(moments)
    after: tuple[datetime, str] | None = None
    while True:
        further = c.due_at > first
        if after is not None:
            end, name = after
            further = or_(c.due_at > end, and_(c.due_at == end, c.key > name))
        statement = select(c.key, c.info, c.counter, c.due_at).where(c.scope == scope, further)
        rows = connection.execute(statement.order_by(c.due_at, c.key).limit(LISTED)).all()
        for row in rows:
            window = window_of(row.key, row.info, row.counter)
            if any(window.start <= moment < window.end for moment in moments):
                yield row.key
            after = row.due_at, row.key
        if len(rows) < LISTED or window_of(*rows[-1][:3]).start > last:
            return


def bring_back(
    connection: Connection,
    dialect: Operations,
    ids: Sequence[int],
    new: Mapping[str, Any],
    records: Sequence[LockedRecord],
) -> Mapping[int, list[list[Any]]]:
    """Move archived messages, which the transaction has locked, to the message table; `new` are
    expressions for columns that change, None for those that are left empty. `records` are those of
    their windows, which were locked before the messages.

    Returns:
        By message, the notes of the records that were lowered.
    """
    tables = dialect.tables
    assert tables.archive is not None  # noqa: S101 - the store has looked
    left_out = {name for name, value in new.items() if value is None}
    both = [c.name for c in tables.archive.c if c.name in tables.message.c]
    names = [name for name in both if name not in left_out]
    columns = [new.get(name, tables.archive.c[name]) for name in names]
    these = tables.archive.c.id.in_(ids)
    lowered: Mapping[int, list[list[Any]]] = {}
    if ids:
        # Both statements see the same rows: they are locked.
        if records:
            ended = select(tables.archive.c.id, tables.archive.c.archived_at).where(these)
            moments = [(row.id, row.archived_at) for row in connection.execute(ended)]
            lowered = lower(connection, dialect, records, moments)
        copy = select(*columns).where(these)
        connection.execute(insert(tables.message).from_select(names, copy))
        connection.execute(delete(tables.archive).where(these))
    return lowered


def lower(
    connection: Connection,
    dialect: Operations,
    records: Iterable[LockedRecord],
    left: Sequence[tuple[int, datetime]],
) -> dict[int, list[list[Any]]]:
    """Take messages, by id and when they ended, out of the windows; they leave the archive now.

    Returns:
        By message, the notes of the records that were lowered, for `put_back`.
    """
    lowered: dict[int, list[list[Any]]] = {}
    for record in records:
        ids = [message_id for message_id, moment in left if record.has(moment)]
        rows = RowSum(len(ids), sum(ids))
        w = record.window
        if ids:
            _save(connection, dialect, record, replace(w, left=w.left - rows, back=w.back + rows))
        for message_id in ids:
            lowered.setdefault(message_id, []).append(record.note)
    return lowered


def put_back(
    connection: Connection,
    dialect: Operations,
    records: Iterable[LockedRecord],
    returned: Mapping[int, Sequence[Sequence[Any]]],
) -> None:
    """Messages return to the archive as they were: an undo of what `lower` has noted of each.

    A record that was not lowered for a message, as an export has written it since, does not have
    that message: the row is a late one then, and no prune removes it before another export.
    """
    for record in records:
        ids = [i for i, notes in returned.items() if record.note in [list(n) for n in notes]]
        rows = RowSum(len(ids), sum(ids))
        w = record.window
        if ids:
            _save(connection, dialect, record, replace(w, left=w.left + rows, back=w.back - rows))


def _save(
    connection: Connection, dialect: Operations, record: LockedRecord, window: LoadedWindow
) -> None:
    # `due_at` stays, also without a row: by it an undo finds the record.
    table: Table = dialect.tables.policy_state
    values: dict[str, Any] = {"info": window.info(), "counter": window.version + 1}
    this = update(table).where(table.c.scope == record.scope, table.c.key == window.name)
    connection.execute(this.values(**values))
