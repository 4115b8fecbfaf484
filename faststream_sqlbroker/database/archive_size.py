"""How large the archive is, how fast it grows, and how much is free for it.

Rows and bytes are estimates of the server's statistics. SQLite has none: there the newest rows tell
what one takes.
"""

import shutil
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, literal_column, select, text
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.retention import PRUNE_LOCK, ArchiveSize
from faststream_sqlbroker.database.locks import LOCK
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.audit import JOB
from faststream_sqlbroker.database.server import archived_lately
from faststream_sqlbroker.schema.types import MYSQL, clock, is_mariadb, later

PRUNED_WITHIN = timedelta(days=8)
"""Who prunes by hand or by a timer does so once a week or more often."""
MOST_ACTIONS = 500
"""Newest actions of operators among which a prune is looked for."""
LOST_DAYS = 7
"""An archive that has lost its first messages has lost more than come in so many days."""
SAMPLE = 1_000
"""Newest rows that SQLite measures."""
ROW_BYTES = 300
"""What a row of SQLite takes besides body, headers and error, with its entries in three indexes."""


class _Space(NamedTuple):
    size: int
    row_bytes: float
    free: int | None


def read_archive_size(connection: Connection, dialect: Operations) -> ArchiveSize | None:
    """Read it; None: the database has no estimate yet, or no message was archived."""
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - the caller has looked
    c = archive.c
    ids = dialect.use_index(select(c.id, c.archived_at, clock()), archive, "archived_index")
    oldest = connection.execute(ids.order_by(c.archived_at, c.id).limit(1)).first()
    space = _read_space(connection, dialect)
    if oldest is None or space is None:
        return None
    a_day = archived_lately(connection, dialect)
    return ArchiveSize(
        size=space.size,
        bytes_per_day=a_day * space.row_bytes,
        free=space.free,
        grows_for=_grows_for(connection, dialect, oldest[2] - oldest[1], a_day),
        is_whole=oldest[0] <= LOST_DAYS * a_day,
    )


def _read_space(connection: Connection, dialect: Operations) -> _Space | None:
    if dialect.name == "sqlite":
        return _read_sqlite(connection, dialect)
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - the caller has looked
    name = connection.dialect.identifier_preparer.format_table(archive)
    binds = {"archive": archive.name if dialect.name in MYSQL else name}
    if dialect.name in MYSQL:
        binds["schema"] = archive.schema
    row = connection.execute(dialect.sql["archive_size"], binds).first()
    if row is None or not row.row_count:
        return None
    free = None
    if is_mariadb(connection.dialect):
        # The plugin that tells it is not loaded everywhere.
        with suppress(DBAPIError):
            free = connection.execute(dialect.sql["disk_free"]).scalar()
    size = int(row.size)
    return _Space(size, size / float(row.row_count), None if free is None else int(free))


def _read_sqlite(connection: Connection, dialect: Operations) -> _Space | None:
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - the caller has looked
    c = archive.c
    parts = [func.coalesce(func.length(each), 0) for each in (c.payload, c.headers, c.last_error)]
    newest = select((parts[0] + parts[1] + parts[2]).label("bytes"))
    newest = newest.order_by(c.archived_at.desc(), c.id.desc()).limit(SAMPLE)
    variable = connection.execute(select(func.avg(newest.subquery().c.bytes))).scalar()
    path = connection.execute(text("PRAGMA database_list")).first()
    if variable is None or path is None or not path[2]:
        return None  # Nothing is archived, or it is in memory.
    names = ("page_size", "page_count", "freelist_count")
    page, pages, unused = (
        int(connection.execute(text(f"PRAGMA {name}")).scalar_one()) for name in names
    )
    free = None
    with suppress(OSError):
        free = shutil.disk_usage(Path(path[2]).parent).free + unused * page
    return _Space(pages * page, ROW_BYTES + float(variable), free)


def _grows_for(
    connection: Connection, dialect: Operations, age: timedelta, a_day: int
) -> timedelta | None:
    """For how long it grows, by the retention that is known, if its first message is `age` old."""
    kept = _read_retention(connection, dialect)
    if kept is None:
        return None
    limits = [timedelta(seconds=kept["completed"])] if kept.get("completed") else []
    if kept.get("max_rows"):
        limits.append(timedelta(days=kept["max_rows"] / max(a_day, 1)))
    return max(min(limits) - age, timedelta(0)) if limits else None


def _read_retention(connection: Connection, dialect: Operations) -> dict[str, Any] | None:
    """What a live process, or an operator in the last days, removes; None: nothing is known."""
    c = dialect.tables.policy_state.c
    held = select(c.info).where(c.scope == LOCK, c.key == PRUNE_LOCK)
    info = connection.execute(held.where(c.lease_expires_at > clock())).scalar()
    if info is not None and "retention" in info:
        retention: dict[str, Any] = info["retention"]
        return retention
    since = later(literal_column(str(-round(PRUNED_WITHIN.total_seconds() * 1_000_000))))
    actions = select(c.info, c.created_at > since).where(c.scope == JOB)
    for job, is_recent in connection.execute(actions.order_by(c.key.desc()).limit(MOST_ACTIONS)):
        if is_recent and job["action"] == "prune":
            arguments: dict[str, Any] = job["arguments"]
            return arguments
    return None
