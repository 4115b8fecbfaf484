"""The archive's rows of a window of an export, page by page, and the places between them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, and_, or_, select, true, tuple_

from faststream_sqlbroker.core.loaded_windows import LoadedWindow, RowSum
from faststream_sqlbroker.core.retention import Place
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.schema.types import MYSQL

PAGE = 1_000
"""Rows that are compared, and removed, at a time."""


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of a window that follow each other by (archived_at, id)."""

    after: Place | None
    """It begins behind this row; None: at the window's begin."""
    last: Place | None
    """It ends with this row; None: with the window."""
    rows: RowSum
    states: Counter[MessageState]


def read_page(
    connection: Connection, dialect: Operations, window: LoadedWindow, after: Place | None
) -> Page:
    """The next rows of the window; fewer than `PAGE` are the last ones, and end with the window."""
    rows = connection.execute(rows_between(dialect, window, after, None).limit(PAGE)).all()
    last = Place(rows[-1].archived_at, rows[-1].id) if len(rows) == PAGE else None
    return Page(after, last, sum_of(rows), Counter(MessageState[row.state] for row in rows))


def rows_between(
    dialect: Operations, window: LoadedWindow, after: Place | None, last: Place | None
) -> Any:
    """Select rows of the window behind `after`, `last` the last one; None: its begin, its end."""
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


def sum_of(rows: Sequence[Any]) -> RowSum:
    """The number of the rows, and the sum of their ids."""
    return RowSum(len(rows), sum(row.id for row in rows))


def archive_of(dialect: Operations) -> Table:
    """The archive; the caller knows that there is one."""
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - the caller has looked
    return archive


def behind(dialect: Operations, place: Place | None) -> Any:
    """The condition that a row of the archive comes after `place`, by (archived_at, id)."""
    if place is None:
        return true()
    c = archive_of(dialect).c
    if dialect.name not in MYSQL:
        return tuple_(c.archived_at, c.id) > (place.at, place.id)
    # MySQL and MariaDB find no index for rows as values. The first condition alone would do for the
    # rows; the second lets an index begin there.
    return and_(
        or_(c.archived_at > place.at, and_(c.archived_at == place.at, c.id > place.id)),
        c.archived_at >= place.at,
    )
