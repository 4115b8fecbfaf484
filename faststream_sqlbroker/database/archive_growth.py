"""Measure the archive: its size, its growth, and the free space.

Byte counts are estimates from the server's statistics. SQLite has none, so the size of a row is
measured on the newest rows.
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
from faststream_sqlbroker.database.engine import Database, StoreSubject
from faststream_sqlbroker.schema.types import MYSQL, clock, is_mariadb, later

if TYPE_CHECKING:
    from faststream_sqlbroker.core.retention import ArchiveSize

MAX_SAMPLE = 10_000
"""Maximum number of rows that are counted to measure the growth."""
PREVIOUS_DAY_ROWS = 1_000
"""Rows that are read of the previous day: a row's id may be far below those archived with it."""
MEASURED_ROWS = 1_000
"""Newest rows that are measured in SQLite."""
ROW_BYTES = 300
"""Bytes of a SQLite row besides body, headers and error, including its entries in three indexes."""
MAX_PRUNE_AGE = timedelta(days=8)
"""Maximum age of a prune that counts as regular: manual or timed prunes run at least once a week.
"""
MAX_ACTIONS = 500
"""Number of latest operator actions that are searched for a prune."""
COMPLETE_DAYS = 7
"""An archive has lost its oldest messages if its oldest id exceeds the number of ids of so many
days.
"""
SAMPLE_RANGES = 10
"""Number of id ranges of a day that are sampled for the share of archived ids."""
SAMPLE_RANGE_IDS = 1_000
"""Ids that are checked in each of these ranges."""
MAX_RETENTION_LAG = timedelta(days=2)
"""Longest normal delay between the age limit of a message and its removal. With a lake, retention
waits for the end of a window (a day at most) and for its export.
"""
MAX_EXPIRED_ROWS = 1_000
"""Messages past their age that are read: messages of states with a longer retention lie between."""


class _DiskUse(NamedTuple):
    size: int
    row_bytes: float
    free: int | None


class ArchiveGrowth(StoreSubject):
    """Statistics of an existing archive. No statement reads more than some thousand rows.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        assert database.tables.archive is not None  # noqa: S101 - the caller has checked
        self._archive = database.tables.archive

    async def estimate_rows_per_day(self) -> int:
        """Return about how many messages were archived in the last 24 hours.

        A refusal does not mean that this process lacks a right: not every user may read the
        archive.
        """
        return await self._database.run(self._count_last_day, write=False)

    async def read_size(self) -> "ArchiveSize | None":
        """Return the archive's size and growth; None for an empty archive, or without statistics.

        `grows_for` uses the retention of the process that prunes, or of the last prune in the
        audit.
        """
        return await self._database.run(self._read_size, Activity.OPERATE, write=False)

    def _count_last_day(self, connection: Connection) -> int:
        """Return the number of rows archived in the last 24 hours: exact if small, else estimated.

        Up to `MAX_SAMPLE` rows are counted; counting more takes too long, and the rate of the
        newest rows may be that of a short peak. The estimate takes the ids assigned in that time,
        from the highest id archived before it to the highest archived within it, and multiplies
        their number by the share of ids that is in the archive. The other ids belong to live
        messages, or to messages that are never archived.
        """
        c = self._archive.c
        day_ago = later(literal_column(str(-86_400_000_000)))
        ids = self._dialect.add_index_hint(select(c.id), self._archive, "archived_index")
        ids = ids.order_by(c.archived_at.desc(), c.id.desc())
        latest = ids.where(c.archived_at > day_ago).limit(MAX_SAMPLE).subquery()
        count, last = connection.execute(select(func.count(), func.max(latest.c.id))).one()
        if count < MAX_SAMPLE:
            return int(count)
        previous = ids.where(c.archived_at <= day_ago).limit(PREVIOUS_DAY_ROWS).subquery()
        first = connection.execute(select(func.max(previous.c.id))).scalar()
        if first is None:
            first = connection.execute(select(func.min(c.id))).scalar_one()
        return max(int(count), self._count_between(connection, int(first), int(last)))

    def _count_between(self, connection: Connection, first: int, last: int) -> int:
        """Estimate how many ids in (`first`, `last`] are in the archive.

        Not each id is in the archive: messages may be live, or were never archived. A range of a
        day may have millions of ids. So the archived ids are counted in `SAMPLE_RANGES` short
        ranges, spread evenly, and extrapolated.
        """
        id_count = last - first
        width = min(SAMPLE_RANGE_IDS, max(id_count // SAMPLE_RANGES, 1))
        c = self._archive.c
        # One range of the primary key per statement, so that every server reads only these ids.
        count = self._dialect.add_index_hint(select(func.count(c.id)), self._archive, None)
        total = 0
        for number in range(SAMPLE_RANGES):
            start = first + id_count * number // SAMPLE_RANGES
            ids = c.id.between(start + 1, start + width)
            total += connection.execute(count.where(ids)).scalar_one()
        return id_count * total // (SAMPLE_RANGES * width)

    def _read_size(self, connection: Connection) -> "ArchiveSize | None":
        """Read the archive's size and growth, or return None if either is unknown.

        That is so if the archive is empty, or if the server has no statistics of the table yet.
        """
        from faststream_sqlbroker.core.retention import ArchiveSize  # noqa: PLC0415

        c = self._archive.c
        ids = select(c.id, c.archived_at, clock())
        ids = self._dialect.add_index_hint(ids, self._archive, "archived_index")
        oldest = connection.execute(ids.order_by(c.archived_at, c.id).limit(1)).first()
        is_sqlite = self._dialect.name == "sqlite"
        disk_use = (self._measure_file if is_sqlite else self._read_statistics)(connection)
        if oldest is None or disk_use is None:
            return None
        first_id, ended_at, now = oldest
        rows_per_day = self._count_last_day(connection)
        grows_for, is_behind = self._check_retention(connection, rows_per_day, ended_at, now)
        return ArchiveSize(
            size=disk_use.size,
            bytes_per_day=rows_per_day * disk_use.row_bytes,
            free=disk_use.free,
            grows_for=grows_for,
            # An archive that has never lost a message begins with one of the first ids.
            is_whole=is_behind or first_id <= COMPLETE_DAYS * rows_per_day,
            is_behind=is_behind,
        )

    def _check_retention(
        self, connection: Connection, rows_per_day: int, ended_at: datetime, now: datetime
    ) -> tuple[timedelta | None, bool]:
        """Return how long the archive still grows, and True if retention is behind.

        The archive grows until its oldest message, which ended at `ended_at`, reaches the age
        limit, or until the row limit is reached. Then about as many rows are removed as are added.
        Retention is behind if a COMPLETED message is past its age by more than `MAX_RETENTION_LAG`.
        The time is None if retention is behind, or if nothing is known to remove rows.
        """
        limits_by_name, pruned_at = self._find_retention(connection, now)
        limits = []
        if max_rows := limits_by_name.get("max_rows"):
            limits.append(timedelta(days=max_rows / max(rows_per_day, 1)))
        if seconds := limits_by_name.get("completed"):
            limits.append(timedelta(seconds=seconds))
            overdue_before = pruned_at - limits[-1] - MAX_RETENTION_LAG
            c = self._archive.c
            latest = (c.archived_at.desc(), c.id.desc())
            if self._find_completed(connection, c.archived_at <= overdue_before, *latest):
                return None, True
            # Ignore messages of other states, which may be much older.
            oldest = self._find_completed(
                connection, c.archived_at > overdue_before, c.archived_at, c.id
            )
            ended_at = oldest or ended_at
        limit = min(limits, default=None)
        return None if limit is None else max(limit - (now - ended_at), timedelta(0)), False

    def _find_completed(self, connection: Connection, where: Any, *order: Any) -> datetime | None:
        """Return the earliest end of a COMPLETED message among the first rows that match `where`.

        Only the first `MAX_EXPIRED_ROWS` rows in the order of `order` are read, because many rows
        of other states, which have a longer retention, may lie between. None if none of them is
        COMPLETED.
        """
        c = self._archive.c
        rows = select(c.archived_at, c.state).where(where).order_by(*order).limit(MAX_EXPIRED_ROWS)
        first_rows = self._dialect.add_index_hint(rows, self._archive, "archived_index").subquery()
        completed = first_rows.c.state == MessageState.COMPLETED.name
        return connection.execute(
            select(func.min(first_rows.c.archived_at)).where(completed)
        ).scalar()

    def _read_statistics(self, connection: Connection) -> _DiskUse | None:
        """Return the archive's size, row size and free disk space from the server's statistics.

        Counting would read the whole table. None if the statistics know no row of the archive.
        """
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
        return _DiskUse(size, size / float(row.row_count), None if free is None else int(free))

    def _measure_file(self, connection: Connection) -> _DiskUse | None:
        """Return the size of the SQLite file, the mean size of the newest rows, and the free space.

        SQLite has no statistics of a table. Unused pages of the file count as free space. None if
        the archive is empty or in memory.
        """
        c = self._archive.c
        columns = (c.payload, c.headers, c.last_error)
        lengths = [func.coalesce(func.length(column), 0) for column in columns]
        latest = select((lengths[0] + lengths[1] + lengths[2]).label("bytes"))
        latest = latest.order_by(c.archived_at.desc(), c.id.desc()).limit(MEASURED_ROWS)
        mean = connection.execute(select(func.avg(latest.subquery().c.bytes))).scalar()
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
        return _DiskUse(pages * page, ROW_BYTES + float(mean), free)

    def _find_retention(
        self, connection: Connection, now: datetime
    ) -> tuple[dict[str, Any], datetime]:
        """Return the limits that remove messages, by option, and the time of the last prune.

        A broker with `retention=` holds the lock `PRUNE_LOCK` and stores its limits in the lock's
        info, so that any process can read them; the time is then `now`. Otherwise, the latest prune
        in the audit counts, unless it is older than `MAX_PRUNE_AGE`. The limits are empty if
        neither exists.
        """
        from faststream_sqlbroker.core.retention import PRUNE_LOCK  # noqa: PLC0415
        from faststream_sqlbroker.database.locks import LOCK  # noqa: PLC0415
        from faststream_sqlbroker.database.parts.audit import JOB  # noqa: PLC0415

        c = self._table.c
        lock_info = select(c.info).where(c.scope == LOCK, c.key == PRUNE_LOCK)
        info = connection.execute(lock_info.where(c.lease_expires_at > clock())).scalar() or {}
        if "retention" in info:
            return info["retention"], now
        actions = select(c.info, c.created_at).where(c.scope == JOB).order_by(c.key.desc())
        for job, started_at in connection.execute(actions.limit(MAX_ACTIONS)):
            if job["action"] == "prune" and started_at > now - MAX_PRUNE_AGE:
                return job["arguments"], started_at
        return {}, now
