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
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.schema.types import MYSQL, clock, is_mariadb, later

if TYPE_CHECKING:
    from faststream_sqlbroker.core.retention import ArchiveSize

MAX_SAMPLE = 10_000
"""Rows that are counted at most to tell how fast the archive grows."""
ROWS_BEFORE = 1_000
"""Rows that are read of the day before: one may be much older than those that ended with it."""
MEASURED_ROWS = 1_000
"""Newest rows that SQLite measures."""
ROW_BYTES = 300
"""What a row of SQLite takes besides body, headers and error, with its entries in three indexes."""
PRUNED_WITHIN = timedelta(days=8)
"""Who prunes by hand or by a timer does so once a week or more often."""
MOST_ACTIONS = 500
"""Newest actions of operators among which a prune is looked for."""
LOST_DAYS = 7
"""An archive whose oldest message has an id above the number of those that come in so many days has
lost older ones."""
STRETCHES = 10
"""Parts of the ids of a day in which it is counted how many of them are in the archive."""
STRETCH = 1_000
"""Ids of each of these parts that are looked at."""
BEHIND = timedelta(days=2)
"""Retention removes a message at most so long after it has reached its age: with a lake it waits
for the end of a window, of a day at most, and for the export of it."""
PAST_AGE = 1_000
"""Messages past their age that are read: those of states that are kept for longer lie between."""


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
        """Of many, by the ids that were drawn in this time, and the share of them that is archived:
        an index of so many rows takes long to count, and the pace of the newest may be that of a
        burst. Ids are also drawn for what is live, or never archived.
        """
        c = self._archive.c
        day_ago = later(literal_column(str(-86_400_000_000)))
        ids = self._dialect.use_index(select(c.id), self._archive, "archived_index")
        ids = ids.order_by(c.archived_at.desc(), c.id.desc())
        newest = ids.where(c.archived_at > day_ago).limit(MAX_SAMPLE).subquery()
        count, last = connection.execute(select(func.count(), func.max(newest.c.id))).one()
        if count < MAX_SAMPLE:
            return int(count)
        before = ids.where(c.archived_at <= day_ago).limit(ROWS_BEFORE).subquery()
        first = connection.execute(select(func.max(before.c.id))).scalar()
        if first is None:
            first = connection.execute(select(func.min(c.id))).scalar_one()
        return max(int(count), self._count_between(connection, int(first), int(last)))

    def _count_between(self, connection: Connection, first: int, last: int) -> int:
        """About how many ids behind `first`, up to `last`, are in the archive."""
        drawn = last - first
        width = min(STRETCH, max(drawn // STRETCHES, 1))
        c = self._archive.c
        # By the primary key, a range in each statement: no server does more than look these up.
        count = self._dialect.use_index(select(func.count(c.id)), self._archive, None)
        archived = 0
        for number in range(STRETCHES):
            start = first + drawn * number // STRETCHES
            ids = c.id.between(start + 1, start + width)
            archived += connection.execute(count.where(ids)).scalar_one()
        return drawn * archived // (STRETCHES * width)

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
        grows_for, is_behind = self._judge_retention(connection, a_day, ended_at, now)
        return ArchiveSize(
            size=space.size,
            bytes_per_day=a_day * space.row_bytes,
            free=space.free,
            grows_for=grows_for,
            is_whole=is_behind or first_id <= LOST_DAYS * a_day,
            is_behind=is_behind,
        )

    def _judge_retention(
        self, connection: Connection, a_day: int, ended_at: datetime, now: datetime
    ) -> tuple[timedelta | None, bool]:
        """`grows_for` and `is_behind` of an archive whose oldest message ended at `ended_at`."""
        given, pruned_at = self._retention(connection, now)
        limits = []
        if most := given.get("max_rows"):
            limits.append(timedelta(days=most / max(a_day, 1)))
        if seconds := given.get("completed"):
            limits.append(timedelta(seconds=seconds))
            due = pruned_at - limits[-1] - BEHIND
            c = self._archive.c
            newest = (c.archived_at.desc(), c.id.desc())
            if self._find_completed(connection, c.archived_at <= due, *newest):
                return None, True
            # Messages of other states may be much older.
            oldest = self._find_completed(connection, c.archived_at > due, c.archived_at, c.id)
            ended_at = oldest or ended_at
        kept = min(limits, default=None)
        return None if kept is None else max(kept - (now - ended_at), timedelta(0)), False

    def _find_completed(self, connection: Connection, where: Any, *order: Any) -> datetime | None:
        """When the oldest COMPLETED one of the first `PAST_AGE` messages in this order ended."""
        c = self._archive.c
        rows = select(c.archived_at, c.state).where(where).order_by(*order).limit(PAST_AGE)
        first = self._dialect.use_index(rows, self._archive, "archived_index").subquery()
        completed = first.c.state == MessageState.COMPLETED.name
        return connection.execute(select(func.min(first.c.archived_at)).where(completed)).scalar()

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
        newest = newest.order_by(c.archived_at.desc(), c.id.desc()).limit(MEASURED_ROWS)
        mean = connection.execute(select(func.avg(newest.subquery().c.bytes))).scalar()
        schema = self._archive.schema or "main"
        files = text("SELECT file FROM pragma_database_list WHERE name = :name")
        file = connection.execute(files, {"name": schema}).scalar_one()
        if mean is None or not file:
            return None  # Nothing is archived, or it is in memory.
        quoted = connection.dialect.identifier_preparer.quote(schema)
        page, pages, unused = (
            int(connection.execute(text(f"PRAGMA {quoted}.{name}")).scalar_one())
            for name in ("page_size", "page_count", "freelist_count")
        )
        free = shutil.disk_usage(Path(file).parent).free + unused * page
        return _Space(pages * page, ROW_BYTES + float(mean), free)

    def _retention(self, connection: Connection, now: datetime) -> tuple[dict[str, Any], datetime]:
        """What is known to remove messages, and when it last did; empty: nothing is."""
        from faststream_sqlbroker.core.retention import PRUNE_LOCK  # noqa: PLC0415
        from faststream_sqlbroker.database.locks import LOCK  # noqa: PLC0415
        from faststream_sqlbroker.database.parts.audit import JOB  # noqa: PLC0415

        c = self._state.c
        held = select(c.info).where(c.scope == LOCK, c.key == PRUNE_LOCK)
        info = connection.execute(held.where(c.lease_expires_at > clock())).scalar() or {}
        if "retention" in info:
            return info["retention"], now
        actions = select(c.info, c.created_at).where(c.scope == JOB).order_by(c.key.desc())
        for job, begun_at in connection.execute(actions.limit(MOST_ACTIONS)):
            if job["action"] == "prune" and begun_at > now - PRUNED_WITHIN:
                return job["arguments"], begun_at
        return {}, now
