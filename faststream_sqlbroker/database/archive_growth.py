"""How large the archive is, how fast it grows, and how much is free for it.

Bytes are estimates of the server's statistics. SQLite has none: there the newest rows tell what one
takes.
"""

import shutil
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Connection, func, literal_column, select, text
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.schema.types import MYSQL, clock, is_mariadb, later

if TYPE_CHECKING:
    from faststream_sqlbroker.core.retention import ArchiveSize

MAX_SAMPLE = 10_000
"""Rows that are counted at most to tell how fast the archive grows."""
BEFORE = 1_000
"""Rows that are read of the day before: one may be much older than those that ended with it."""
MEASURED = 1_000
"""Newest rows that SQLite measures."""
ROW_BYTES = 300
"""What a row of SQLite takes besides body, headers and error, with its entries in three indexes."""
PRUNED_WITHIN = timedelta(days=8)
"""Who prunes by hand or by a timer does so once a week or more often."""
MOST_ACTIONS = 500
"""Newest actions of operators among which a prune is looked for."""
LOST_DAYS = 7
"""An archive that has lost its first messages has lost more than come in so many days."""


class _Space(NamedTuple):
    size: int
    row_bytes: float
    free: int | None


class ArchiveGrowth:
    """Reads it; there is an archive. No statement reads more than some thousand rows.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        assert database.tables.archive is not None  # noqa: S101 - the caller has looked
        self._archive = database.tables.archive
        self._state = database.tables.policy_state

    async def a_day(self) -> int:
        """About how many messages were archived in the last 24 hours.

        A refusal is no sign that this process lacks something: not all may read the archive.
        """
        return await self._database.run(self._count_lately, write=False)

    async def size(self) -> "ArchiveSize | None":
        """How large the archive is; None: the server has no estimate yet, or nothing was archived.

        What `grows_for` has is the retention of the process that prunes, or of the last prune.
        """
        return await self._database.run(self._read_size, Activity.OPERATE, write=False)

    def _count_lately(self, connection: Connection) -> int:
        """Of many, by the ids that were drawn in this time: an index of so many rows takes long to
        count, and the pace of the newest may be that of a burst.
        """
        c = self._archive.c
        day_ago = later(literal_column(str(-86_400_000_000)))
        ids = self._dialect.use_index(select(c.id), self._archive, "archived_index")
        ids = ids.order_by(c.archived_at.desc(), c.id.desc())
        newest = ids.where(c.archived_at > day_ago).limit(MAX_SAMPLE).subquery()
        count, last = connection.execute(select(func.count(), func.max(newest.c.id))).one()
        if count < MAX_SAMPLE:
            return int(count)
        before = ids.where(c.archived_at <= day_ago).limit(BEFORE).subquery()
        first = connection.execute(select(func.max(before.c.id))).scalar()
        if first is None:
            first = connection.execute(select(func.min(c.id))).scalar_one()
        return max(int(count), int(last) - int(first))

    def _read_size(self, connection: Connection) -> "ArchiveSize | None":
        from faststream_sqlbroker.core.retention import ArchiveSize  # noqa: PLC0415

        c = self._archive.c
        ids = select(c.id, c.archived_at, clock())
        ids = self._dialect.use_index(ids, self._archive, "archived_index")
        oldest = connection.execute(ids.order_by(c.archived_at, c.id).limit(1)).first()
        is_sqlite = self._dialect.name == "sqlite"
        space = (self._measure if is_sqlite else self._read_statistics)(connection)
        if oldest is None or space is None:
            return None
        first_id, ended_at, now = oldest
        a_day = self._count_lately(connection)
        kept = self._kept(connection, a_day, now)
        return ArchiveSize(
            size=space.size,
            bytes_per_day=a_day * space.row_bytes,
            free=space.free,
            grows_for=None if kept is None else max(kept - (now - ended_at), timedelta(0)),
            is_whole=first_id <= LOST_DAYS * a_day,
        )

    def _read_statistics(self, connection: Connection) -> _Space | None:
        archive = self._archive
        binds = {"archive": archive.name, "schema": archive.schema}
        if self._dialect.name not in MYSQL:
            binds = {"archive": connection.dialect.identifier_preparer.format_table(archive)}
        row = connection.execute(self._dialect.sql["archive_size"], binds).one()
        if not row.row_count:
            return None
        free = None
        if is_mariadb(connection.dialect):
            with suppress(DBAPIError):  # The plugin that has it is not loaded everywhere.
                free = connection.execute(self._dialect.sql["disk_free"]).scalar()
        size = int(row.size)
        return _Space(size, size / float(row.row_count), None if free is None else int(free))

    def _measure(self, connection: Connection) -> _Space | None:
        c = self._archive.c
        columns = (c.payload, c.headers, c.last_error)
        lengths = [func.coalesce(func.length(each), 0) for each in columns]
        newest = select((lengths[0] + lengths[1] + lengths[2]).label("bytes"))
        newest = newest.order_by(c.archived_at.desc(), c.id.desc()).limit(MEASURED)
        mean = connection.execute(select(func.avg(newest.subquery().c.bytes))).scalar()
        file = connection.execute(text("PRAGMA database_list")).one()[2]
        if mean is None or not file:
            return None  # Nothing is archived, or it is in memory.
        page, pages, unused = (
            int(connection.execute(text(f"PRAGMA {name}")).scalar_one())
            for name in ("page_size", "page_count", "freelist_count")
        )
        free = shutil.disk_usage(Path(file).parent).free + unused * page
        return _Space(pages * page, ROW_BYTES + float(mean), free)

    def _kept(self, connection: Connection, a_day: int, now: datetime) -> timedelta | None:
        """The age at which COMPLETED messages are removed; None: nothing is known to do so."""
        given = self._retention(connection, now)
        limits = [timedelta(seconds=given["completed"])] if given.get("completed") else []
        if given.get("max_rows"):
            limits.append(timedelta(days=given["max_rows"] / max(a_day, 1)))
        return min(limits, default=None)

    def _retention(self, connection: Connection, now: datetime) -> dict[str, Any]:
        from faststream_sqlbroker.core.retention import PRUNE_LOCK  # noqa: PLC0415
        from faststream_sqlbroker.database.locks import LOCK  # noqa: PLC0415
        from faststream_sqlbroker.database.parts.audit import JOB  # noqa: PLC0415

        c = self._state.c
        held = select(c.info).where(c.scope == LOCK, c.key == PRUNE_LOCK)
        info = connection.execute(held.where(c.lease_expires_at > clock())).scalar() or {}
        if "retention" in info:
            return dict(info["retention"])
        actions = select(c.info, c.created_at).where(c.scope == JOB).order_by(c.key.desc())
        for job, begun_at in connection.execute(actions.limit(MOST_ACTIONS)):
            if job["action"] == "prune" and begun_at > now - PRUNED_WITHIN:
                return dict(job["arguments"])
        return {}
