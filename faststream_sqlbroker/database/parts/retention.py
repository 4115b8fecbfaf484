"""Removes finished messages from the archive, the oldest first, a few in each transaction."""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    Connection,
    Select,
    Table,
    and_,
    case,
    delete,
    func,
    literal_column,
    or_,
    select,
    true,
    tuple_,
)

from faststream_sqlbroker.core.retention import Growth, Place, Step
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.schema.types import MYSQL, clock, later

BATCH = 1_000
"""Rows that one transaction removes: it locks them until it commits, some 20 ms."""
WALK = 20_000
"""Rows that one statement walks over to find the newest `max_rows`."""
SAMPLE = 10_000
"""Rows that are read at most to tell how fast the archive grows."""
DAY = 86_400.0
"""Seconds."""


def archive_of(dialect: Operations) -> Table:
    """The archive; the caller knows that there is one."""
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - the caller has looked
    return archive


def cutoff(connection: Connection, age: float) -> datetime:
    """The moment `age` seconds ago, by the database's clock."""
    ago: Any = literal_column(str(-round(age * 1_000_000)))
    found: datetime = connection.execute(select(later(ago))).scalar_one()
    return found


def remove(
    connection: Connection,
    dialect: Operations,
    state: MessageState,
    before: datetime,
    after: Place | None,
) -> Step:
    """Remove the first messages of `state` behind `after` that were archived before `before`."""
    archive = archive_of(dialect)
    rows = connection.execute(_oldest(dialect, state, before, after).limit(BATCH)).all()
    if not rows:
        return Step(0, None)
    # A message that was brought back and has ended again since has another moment.
    old = delete(archive).where(archive.c.state == state.name, archive.c.archived_at < before)
    removed = 0
    for ids in chunks([row.id for row in rows]):
        removed += connection.execute(old.where(archive.c.id.in_(ids))).rowcount
    return Step(removed, Place(rows[-1].archived_at, rows[-1].id))


def count(
    connection: Connection,
    dialect: Operations,
    state: MessageState,
    before: datetime,
    after: Place | None,
) -> Step:
    """As `remove`, but only count, `WALK` at a time."""
    rows = connection.execute(_oldest(dialect, state, before, after).limit(WALK)).all()
    return Step(len(rows), Place(rows[-1].archived_at, rows[-1].id) if rows else None)


def _oldest(
    dialect: Operations, state: MessageState, before: datetime, after: Place | None
) -> Select[tuple[datetime, int]]:
    archive = archive_of(dialect)
    c = archive.c
    # By age first: COMPLETED rows have no index of their own, and what is kept for longer lies
    # between them. A pass begins behind what it has seen, so it reads those once.
    statement = select(c.archived_at, c.id).where(c.archived_at < before)
    if state is MessageState.COMPLETED or dialect.name in MYSQL:
        statement = statement.where(c.state == state.name)
    else:
        # Written out, not bound: a partial index serves only conditions that imply its own.
        statement = statement.where(c.state == literal_column(f"'{state.name}'"))
    return statement.where(behind(dialect, after)).order_by(c.archived_at, c.id)


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


def before_newest(
    connection: Connection, dialect: Operations, rows: int, place: Place | None
) -> Place | None:
    """The row that `rows` newer ones lie before, from `place` on; None: there are not so many."""
    archive = archive_of(dialect)
    c = archive.c
    statement = select(c.archived_at, c.id)
    if place is not None:
        statement = statement.where(
            or_(c.archived_at < place.at, and_(c.archived_at == place.at, c.id < place.id)),
            c.archived_at <= place.at,
        )
    statement = statement.order_by(c.archived_at.desc(), c.id.desc()).offset(rows - 1).limit(1)
    found = connection.execute(statement).first()
    return None if found is None else Place(found.archived_at, found.id)


def growth(connection: Connection, dialect: Operations) -> Growth:
    """How many messages were archived in the last day, or would be at the pace of the newest."""
    archive = archive_of(dialect)
    day_ago: Any = literal_column(str(-round(DAY * 1_000_000)))
    newest = (
        select(archive.c.archived_at)
        .where(archive.c.archived_at > later(day_ago))
        .order_by(archive.c.archived_at.desc(), archive.c.id.desc())
        .limit(SAMPLE)
        .subquery()
    )
    since = newest.c.archived_at
    # The clock is read by the same statement: a second one would make a fast archive look slow.
    total, first, now = connection.execute(
        select(func.count(), func.min(since), case((true(), clock())))
    ).one()
    if total < SAMPLE:
        return Growth(total)
    seconds = max(1.0, (now - first).total_seconds())
    return Growth(round(total * DAY / seconds))
