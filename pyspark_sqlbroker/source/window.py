"""Where a stream's next window ends."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sqlalchemy import Connection

from faststream_sqlbroker.core.times import TICK, from_microseconds
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.load.selection import Selection


@dataclass(frozen=True)
class Limits:
    """How much a window may hold.

    Attributes:
        rows: At most so many, but all of one moment; None is any number.
        seconds: At most so long, from its first row on; None is any length.
    """

    rows: int | None = None
    seconds: float | None = None


def window_end(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    since: datetime,
    horizon: datetime,
    limits: Limits,
) -> datetime | None:
    """The first moment after the window of selected rows that begins at `since`; None if there is
    no row.

    It ends at `horizon` at the latest. Rows of one moment are never parted, so a moment with more
    rows than `limits.rows` makes a window of its own.
    """
    if since >= horizon:
        return None
    window = selection.between(since, horizon)
    first = _moment(database, connection, window, 0)
    if first is None:
        return None
    end = horizon
    if limits.seconds is not None:
        end = min(end, first + max(timedelta(seconds=limits.seconds), TICK))
    if limits.rows is not None:
        over = _moment(database, connection, window, limits.rows)
        if over is not None:
            end = min(end, max(over, first + TICK))
    return end


def _moment(
    database: ArchiveDatabase, connection: Connection, window: Selection, skipped: int
) -> datetime | None:
    """When the row after `skipped` others was archived; an index serves it."""
    time = database.quote(window.time_column)
    found = database.scalar(
        connection,
        f"SELECT {database.microseconds(time)} FROM {window.name(database)} WHERE "
        f"{window.where(database)} "
        f"ORDER BY {time} LIMIT 1 OFFSET {skipped}",
    )
    return None if found is None else from_microseconds(int(found))


def count_rows(
    database: ArchiveDatabase, connection: Connection, window: Selection, most: int
) -> int:
    """How many rows the window holds; counting ends at `most`, and begins at 1."""
    inner = f"SELECT 1 FROM {window.name(database)} WHERE {window.where(database)} LIMIT {most}"
    return max(int(database.scalar(connection, f"SELECT COUNT(*) FROM ({inner}) q")), 1)


def anything_before(
    database: ArchiveDatabase, connection: Connection, selection: Selection, moment: datetime
) -> bool:
    """Whether a row of the selected queues, in any state, was archived before `moment`."""
    # Queues may be pruned alone; a state cannot, but a dead letter that is retried goes.
    earlier = replace(selection, since=None, until=moment, states=None)
    inner = f"SELECT 1 FROM {earlier.name(database)} WHERE {earlier.where(database)} LIMIT 1"
    return bool(database.scalar(connection, f"SELECT COUNT(*) FROM ({inner}) q"))
