"""Keeps what exports have recorded true while messages leave the archive for their queues.

A message that is brought back is no longer in the window in which it ended. So the transaction
that moves it also lowers the window's record, as a prune does. If it ends again, or an undo puts it
back, that is a row of a later window. A prune locks the record first and the rows after it, and so
must a caller here, or the two can deadlock.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, and_, delete, func, insert, null, or_, select, update

from faststream_sqlbroker.core.loaded_windows import LOADED, LoadedWindow, window_of
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.loaded_windows import sum_of
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
    for some in chunks(list(ids)):
        ended = select(archive.c.archived_at).where(archive.c.id.in_(some))
        moments += connection.execute(ended).scalars()
    table = dialect.tables.policy_state
    found: list[LockedRecord] = []
    # By scope, then by name: two redrives that lock the same records do it in the same order.
    for scope in scopes if moments else ():
        names = sorted(_names(connection, table, scope, moments))
        for part in chunks(names):
            rows = select(table.c.key, table.c.info, table.c.counter).where(
                table.c.scope == scope, table.c.key.in_(part), table.c.due_at.is_not(None)
            )
            locked = connection.execute(rows.order_by(table.c.key).with_for_update())
            found += [LockedRecord(scope, window_of(*row)) for row in locked]
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
) -> None:
    """Move archived messages, which the transaction has locked, to the message table; `new` are
    expressions for columns that change, None for those that are left empty. `records` are those of
    their windows, which were locked before the messages.
    """
    tables = dialect.tables
    assert tables.archive is not None  # noqa: S101 - the store has looked
    left_out = {name for name, value in new.items() if value is None}
    both = [c.name for c in tables.archive.c if c.name in tables.message.c]
    names = [name for name in both if name not in left_out]
    columns = [new.get(name, tables.archive.c[name]) for name in names]
    these = tables.archive.c.id.in_(ids)
    if ids:
        # All statements see the same rows: they are locked.
        if records:
            ended = select(tables.archive.c.id, tables.archive.c.archived_at).where(these)
            _lower(connection, dialect, records, connection.execute(ended).all())
        copy = select(*columns).where(these)
        connection.execute(insert(tables.message).from_select(names, copy))
        connection.execute(delete(tables.archive).where(these))


def _lower(
    connection: Connection,
    dialect: Operations,
    records: Iterable[LockedRecord],
    rows: Sequence[Any],
) -> None:
    """Take messages, by id and `archived_at`, out of the windows; they leave the archive now."""
    table: Table = dialect.tables.policy_state
    for record in records:
        inside = sum_of([row for row in rows if record.has(row.archived_at)])
        if inside.rows:
            w = record.window
            window = replace(w, left=w.left - inside, back=w.back + inside)
            values: dict[str, Any] = {"info": window.info(), "counter": w.version + 1}
            if not window.left.rows:
                values["due_at"] = null()
            this = update(table).where(table.c.scope == record.scope, table.c.key == w.name)
            connection.execute(this.values(**values))
