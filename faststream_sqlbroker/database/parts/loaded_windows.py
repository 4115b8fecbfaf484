"""Compares the archive's rows with what an export has recorded of them, and removes only those.

A window is compared once, page by page. Each page is removed in a transaction of its own, which
locks the window's record first and looks at the page again. So neither a row that has come since
nor a record that an export has renewed goes unnoticed.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Table, and_, delete, null, or_, select, update

from faststream_sqlbroker.core.loaded_windows import (
    DIFFERS,
    LOADED,
    LoadedWindow,
    RowSum,
    window_of,
)
from faststream_sqlbroker.core.retention import Place
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.retention import archive_of, behind
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.schema.types import clock

PAGE = 1_000
"""Rows that are compared, and removed, at a time."""
LISTED = 100
"""Windows that are listed at a time."""


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of a window that follow each other by (archived_at, id)."""

    after: Place | None
    """It begins behind this row; None: at the window's begin."""
    last: Place | None
    """It ends with this row; None: with the window."""
    rows: RowSum
    states: Counter[MessageState]


def windows(
    connection: Connection,
    table: Table,
    lake: str,
    until: datetime,
    after: tuple[datetime, str] | None,
) -> list[LoadedWindow]:
    """The next windows that have ended by `until` and of which rows are left, the oldest first."""
    c = table.c
    statement = select(c.key, c.info, c.counter).where(
        c.scope == LOADED + lake, c.due_at.is_not(None), c.due_at <= until
    )
    if after is not None:
        end, name = after
        statement = statement.where(
            or_(c.due_at > end, and_(c.due_at == end, c.key > name)), c.due_at >= end
        )
    rows = connection.execute(statement.order_by(c.due_at, c.key).limit(LISTED))
    return [window_of(*row) for row in rows]


def has_any(
    connection: Connection,
    dialect: Operations,
    window: LoadedWindow,
    states: Collection[MessageState],
) -> bool:
    """Whether the archive has a row of the window in one of `states`."""
    c = archive_of(dialect).c
    names = [state.name for state in states]
    statement = select(c.id).where(
        c.archived_at >= window.start, c.archived_at < window.end, c.state.in_(names)
    )
    ordered = statement.order_by(c.archived_at, c.id).limit(1)
    return connection.execute(ordered).first() is not None


def read_page(
    connection: Connection, dialect: Operations, window: LoadedWindow, after: Place | None
) -> Page:
    """The next rows of the window; fewer than `PAGE` are the last ones, and end with the window."""
    rows = connection.execute(_rows(dialect, window, after, None).limit(PAGE)).all()
    last = Place(rows[-1].archived_at, rows[-1].id) if len(rows) == PAGE else None
    return Page(after, last, _sum(rows), Counter(MessageState[row.state] for row in rows))


def remove_page(
    connection: Connection,
    dialect: Operations,
    lake: str,
    window: LoadedWindow,
    page: Page,
    states: Collection[MessageState],
) -> LoadedWindow | None:
    """Remove the page's rows in one of `states`, and lower the window's record.

    Returns:
        The window's new record; None, and nothing was removed: the record, or the page, is no
        longer what was compared.
    """
    archive = archive_of(dialect)
    table = dialect.tables.policy_state
    if not _lock(connection, table, lake, window):
        return None
    found = connection.execute(_rows(dialect, window, page.after, page.last)).all()
    if _sum(found) != page.rows:
        return None
    gone = [row for row in found if MessageState[row.state] in states]
    # A row that was brought back since the look has left the window as if it were removed here.
    # If it has ended again, it has another moment.
    old = delete(archive).where(
        archive.c.archived_at >= window.start, archive.c.archived_at < window.end
    )
    for ids in chunks([row.id for row in gone]):
        connection.execute(old.where(archive.c.id.in_(ids)))
    lowered = replace(window, left=window.left - _sum(gone), version=window.version + 1)
    values: dict[str, Any] = {"info": lowered.info(), "counter": lowered.version}
    # An undo of a redrive finds the record by its end.
    if not lowered.left.rows and not lowered.back.rows:
        values["due_at"] = null()
    connection.execute(_record(table, lake, window).values(**values))
    return lowered


def set_apart(
    connection: Connection, table: Table, lake: str, window: LoadedWindow, found: RowSum
) -> bool:
    """Note that the window has other rows than were recorded; whether this was the first to see.

    False also if the record has changed since it was compared.
    """
    if not _lock(connection, table, lake, window):
        return False
    info = {**window.info(), "found_rows": found.rows, "found_ids": str(found.ids)}
    values = {"info": info, "counter": window.version + 1, "created_at": clock()}
    moved = _record(table, lake, window).values(scope=DIFFERS + lake, due_at=null(), **values)
    connection.execute(moved)
    return True


def differing(connection: Connection, table: Table, limit: int) -> list[tuple[str, str]]:
    """Lake and window of up to `limit` windows that have other rows than were recorded."""
    c = table.c
    # The next character, so that the primary key serves; names of lakes follow the colon.
    end = DIFFERS[:-1] + chr(ord(DIFFERS[-1]) + 1)
    statement = select(c.scope, c.key).where(c.scope >= DIFFERS, c.scope < end)
    rows = connection.execute(statement.order_by(c.scope, c.key).limit(limit))
    return [(row.scope.removeprefix(DIFFERS), row.key) for row in rows]


def _record(table: Table, lake: str, window: LoadedWindow) -> Any:
    return update(table).where(table.c.scope == LOADED + lake, table.c.key == window.name)


def _lock(connection: Connection, table: Table, lake: str, window: LoadedWindow) -> bool:
    """Lock the window's record; whether it is still that of `window`."""
    c = table.c
    one = select(c.counter).where(c.scope == LOADED + lake, c.key == window.name)
    return connection.execute(one.with_for_update()).scalar() == window.version


def _rows(
    dialect: Operations, window: LoadedWindow, after: Place | None, last: Place | None
) -> Any:
    archive = archive_of(dialect)
    c = archive.c
    statement = select(c.archived_at, c.id, c.state)
    # For a large window MySQL would read the whole index from its begin, for each page.
    statement = dialect.use_index(statement, archive, "archived_index")
    statement = statement.where(
        c.archived_at >= window.start if after is None else behind(dialect, after),
        c.archived_at < window.end if last is None else c.archived_at <= last.at,
    )
    if last is not None:
        statement = statement.where(or_(c.archived_at < last.at, c.id <= last.id))
    return statement.order_by(c.archived_at, c.id)


def _sum(rows: Sequence[Any]) -> RowSum:
    return RowSum(len(rows), sum(row.id for row in rows))
