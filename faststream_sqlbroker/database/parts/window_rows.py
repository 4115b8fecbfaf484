"""The archive's rows of a window of an export, in pages."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, and_, or_, select, true, tuple_

from faststream_sqlbroker.core.loaded_windows import LoadedWindow, RowSum
from faststream_sqlbroker.core.retention import PrunePosition
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.schema.types import MYSQL

PAGE_SIZE = 1_000
"""Rows that are compared, and removed, at a time."""


@dataclass(frozen=True, slots=True)
class WindowPage:
    """Consecutive rows of a window by (archived_at, id)."""

    after: PrunePosition | None
    """The page begins after this row; None for the start of the window."""
    last: PrunePosition | None
    """The page ends with this row; None for the end of the window."""
    rows: RowSum
    states: Counter[MessageState]


def read_page(
    connection: Connection,
    dialect: DialectOperations,
    window: LoadedWindow,
    after: PrunePosition | None,
) -> WindowPage:
    """Return the next rows of the window; the last page has fewer than `PAGE_SIZE` rows.

    A window is a day or an hour of `archived_at`, of which the database is compared with an export.
    The page has the number of rows and the sum of their ids, not the rows.
    """
    rows = connection.execute(select_rows(dialect, window, after, None).limit(PAGE_SIZE)).all()
    last = PrunePosition(rows[-1].archived_at, rows[-1].id) if len(rows) == PAGE_SIZE else None
    return WindowPage(after, last, sum_rows(rows), Counter(MessageState[row.state] for row in rows))


def select_rows(
    dialect: DialectOperations,
    window: LoadedWindow,
    after: PrunePosition | None,
    last: PrunePosition | None,
) -> Any:
    """Select rows of the window after the position `after`, up to `last`.

    None stands for the start or the end of the window. In the order of `archived_at` and id, which
    the index has.
    """
    archive = get_archive(dialect)
    c = archive.c
    statement = select(c.archived_at, c.id, c.state)
    # For a large window MySQL would read the whole index from its start, for each page.
    statement = dialect.add_index_hint(statement, archive, "archived_index")
    statement = statement.where(
        c.archived_at >= window.start if after is None else build_after(dialect, after),
        c.archived_at < window.end if last is None else c.archived_at <= last.at,
    )
    if last is not None:
        statement = statement.where(or_(c.archived_at < last.at, c.id <= last.id))
    return statement.order_by(c.archived_at, c.id)


def sum_rows(rows: Sequence[Any]) -> RowSum:
    """Return the number of the rows and the sum of their ids."""
    return RowSum(len(rows), sum(row.id for row in rows))


def get_archive(dialect: DialectOperations) -> Table:
    """Return the archive, which the caller knows to exist."""
    return dialect.archive


def build_after(dialect: DialectOperations, position: PrunePosition | None) -> Any:
    """Return the condition that an archived row comes after `position`, by (archived_at, id).

    Each page begins after the last row of the page before. The condition must let the database seek
    there in the index, not read all rows before.
    """
    if position is None:
        return true()
    c = get_archive(dialect).c
    if dialect.name not in MYSQL:
        return tuple_(c.archived_at, c.id) > (position.at, position.id)
    # MySQL and MariaDB use no index for row values. The first condition alone selects the right
    # rows; the second lets an index range start there.
    return and_(
        or_(c.archived_at > position.at, and_(c.archived_at == position.at, c.id > position.id)),
        c.archived_at >= position.at,
    )
