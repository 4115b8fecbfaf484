"""Remove rows of the archive: by id in small transactions, or a partition of PostgreSQL as a whole.

A partition of an archive that is partitioned by range of `archived_at` is detached first, then
compared, then dropped or attached again: once it is detached, no row can be added to it. A comment
on it names its archive, so that the next prune can attach it again if this one dies. A prune drops
only what it has compared itself.
"""

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, ProgrammingError, SQLAlchemyError

from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.lake.row_checksums import RowChecksums, asked_figures
from pyspark_sqlbroker.load.selection import Selection

CHUNK = 5_000
"""Rows in one transaction: few enough to take milliseconds, as others wait for its locks."""

PAGE = 100_000
"""Rows in one listing: drivers hold the whole result in memory, up to 175 bytes a row."""

_BOUNDS = re.compile(r"FOR VALUES FROM \('([^']+)'\) TO \('([^']+)'\)")

_MARK = "faststream_sqlbroker prune: "

_PARTITIONS = """
SELECT c.oid::regclass::text, pg_get_expr(c.relpartbound, c.oid), i.inhdetachpending,
  obj_description(c.oid, 'pg_class'), p.partdefid <> 0
FROM pg_partitioned_table p
JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
  AND a.attname = 'archived_at'
JOIN pg_inherits i ON i.inhparent = p.partrelid
JOIN pg_class c ON c.oid = i.inhrelid AND c.relkind = 'r'
WHERE p.partrelid = {table} AND p.partstrat = 'r' AND p.partnatts = 1
ORDER BY 1
"""

_DETACHED = """
SELECT c.oid::regclass::text, d.description FROM pg_description d
JOIN pg_class c ON c.oid = d.objoid AND d.classoid = 'pg_class'::regclass AND d.objsubid = 0
WHERE NOT c.relispartition AND starts_with(d.description, {mark}) ORDER BY 1
"""


@dataclass(frozen=True)
class Rows:
    """Rows that were found, in the order of `archived_at` and id; 16 bytes each.

    Attributes:
        ids: Their ids.
        times: Their `archived_at` as microseconds since 1970.
    """

    ids: "array[int]" = field(default_factory=lambda: array("q"))
    times: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def figures(self) -> RowChecksums:
        """Their number and sums."""
        return RowChecksums(len(self.ids), sum(self.ids), sum(self.times))

    def between(self, start: datetime, end: datetime) -> "Rows":
        """The rows archived in a span of time."""
        first = bisect_left(self.times, to_microseconds(start))
        last = bisect_left(self.times, to_microseconds(end))
        return Rows(self.ids[first:last], self.times[first:last])

    def count_lacking(self, pairs: Iterable[tuple[int, int]]) -> int:
        """How many of them are not among `pairs` of id and time; needs a byte a row."""
        found = bytearray(len(self.ids))
        for number, moment in pairs:
            first = bisect_left(self.times, moment)
            last = bisect_right(self.times, moment)
            place = bisect_left(self.ids, number, first, last)
            if place < last and self.ids[place] == number:
                found[place] = 1
        return found.count(0)


def list_rows(database: ArchiveDatabase, connection: Connection, selection: Selection) -> Rows:
    """The selected rows.

    They are asked for in pages of 100 000, of some 20 MB at most while one is read; what is kept
    takes 16 bytes a row. A row that is added during this may be left out; it is then not deleted.
    """
    rows = Rows()
    while _add(database, connection, selection, rows, PAGE) == PAGE:
        pass
    return rows


def list_oldest(
    database: ArchiveDatabase, connection: Connection, selection: Selection, number: int
) -> Rows:
    """The first `number` of the selected rows, or all there are."""
    rows = Rows()
    _add(database, connection, selection, rows, number)
    return rows


def _add(
    database: ArchiveDatabase, connection: Connection, selection: Selection, rows: Rows, number: int
) -> int:
    """Append the next rows after `rows`, `number` at most; returns how many there were."""
    id_ = database.quote("id")
    time = database.quote("archived_at")
    conditions = [where] if (where := selection.where(database)) else []
    if rows.ids:
        last = database.moment(from_microseconds(rows.times[-1]))
        conditions.append(f"{time} >= {last} AND ({time} > {last} OR {id_} > {rows.ids[-1]})")
    condition = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    before = len(rows.ids)
    for row in connection.exec_driver_sql(
        f"SELECT {id_}, {database.microseconds(time)} FROM {selection.name(database)}{condition} "
        f"ORDER BY {time}, {id_} LIMIT {number}"
    ):
        rows.ids.append(row[0])
        rows.times.append(row[1])
    return len(rows.ids) - before


def delete_rows(
    database: ArchiveDatabase, connection: Connection, selection: Selection, rows: Rows
) -> int:
    """Remove exactly `rows`, none that came later; returns how many were still there."""
    gone = 0
    time = database.quote("archived_at")
    for first in range(0, len(rows.ids), CHUNK):
        ids = rows.ids[first : first + CHUNK]
        times = rows.times[first : first + CHUNK]
        low, high = (database.moment(from_microseconds(moment)) for moment in (times[0], times[-1]))
        deleted = connection.exec_driver_sql(
            f"DELETE FROM {selection.name(database)} WHERE {time} >= {low} AND {time} <= {high} "
            f"AND {database.quote('id')} IN ({', '.join(map(str, ids))})"
        )
        gone += deleted.rowcount
    return gone


@dataclass(frozen=True)
class Partition:
    """A leaf of the archive.

    Attributes:
        name: As SQL takes it.
        bounds: PostgreSQL's own words.
        start: Its first moment.
        end: The first moment that does not belong to it.
        with_default: Whether the archive has a default partition, which makes CONCURRENTLY
            impossible.
    """

    name: str
    bounds: str
    start: datetime
    end: datetime
    with_default: bool


class Partitions:
    """The partitions of one archive; none if it is a plain table or on another database."""

    def __init__(
        self, database: ArchiveDatabase, connection: Connection, selection: Selection
    ) -> None:
        self._database = database
        self._connection = connection
        self._selection = selection
        self._parent = selection.name(database)
        self._possible = database.kind == "postgresql" and selection.queues is None

    def find(self) -> list[Partition]:
        """The partitions whose begin and end are both moments."""
        if not self._possible:
            return []
        found = []
        for name, bounds, pending, _, default in self._rows():
            match = _BOUNDS.fullmatch(bounds or "")
            if match is None or pending:
                continue
            with suppress(ValueError):  # infinity, or a date that Python does not have
                start, end = (datetime.fromisoformat(text) for text in match.groups())
                found.append(Partition(name, bounds, start, end, default))
        return found

    def drop(self, partition: Partition, expected: RowChecksums) -> bool:
        """Detach and drop a partition; if it has other rows than expected, attach it again: False.

        Raises:
            SetupError: it cannot be attached again.
            DBAPIError: it cannot be detached, for example because a reader holds the archive for
                too long. It stays as it was, or the next `resume` attaches it again.
        """
        self._detach(partition)
        with self._transaction():
            self._run(f"LOCK TABLE {partition.name} IN ACCESS EXCLUSIVE MODE")
            if self._pending(partition.name) is not None:
                return False  # another prune has attached it again
            if self._figures(partition.name) == expected:
                self._run(f"DROP TABLE {partition.name}")
                return True
        self._attach(partition.name, partition.bounds)
        return False

    def resume(self) -> None:
        """Attach partitions again that a dead prune has detached, and remove its notes.

        Raises:
            SetupError: a partition cannot be attached again.
        """
        if not self._possible:
            return
        for name, _, pending, comment, _ in self._rows():
            if (comment or "").startswith(_MARK):
                if pending:
                    self._run(f"ALTER TABLE {self._parent} DETACH PARTITION {name} FINALIZE")
                else:
                    self._run(f"COMMENT ON TABLE {name} IS NULL")
        mark = self._database.text(_MARK)
        for name, comment in self._connection.exec_driver_sql(_DETACHED.format(mark=mark)).all():
            note = json.loads(comment.removeprefix(_MARK))
            if note["archive"] == self._archive():
                self._attach(name, note["bounds"])

    def _detach(self, partition: Partition) -> None:
        note = json.dumps({"archive": self._archive(), "bounds": partition.bounds})
        comment = f"COMMENT ON TABLE {partition.name} IS {self._database.text(_MARK + note)}"
        detach = f"ALTER TABLE {self._parent} DETACH PARTITION {partition.name}"
        if partition.with_default:
            with self._transaction():
                # This locks the whole archive, so it gives up soon and is tried again later.
                self._run("SET LOCAL lock_timeout = '10s'")
                self._run(detach)
                self._run(comment)
            return
        self._run(comment)
        try:
            self._run(f"{detach} CONCURRENTLY")
        except BaseException:
            self._take_back(partition.name)
            raise

    def _take_back(self, name: str) -> None:
        """Remove the note from a partition that stays: who detaches it by hand later wants to keep
        it.
        """
        # After a time-out or Ctrl-C the connection is of no use, or has too little time.
        with suppress(SQLAlchemyError), self._database.connect() as connection:
            Partitions(self._database, connection, self._selection)._forget(name)  # noqa: SLF001 - our own

    def _forget(self, name: str) -> None:
        if self._pending(name) is False:
            self._run(f"COMMENT ON TABLE {name} IS NULL")

    def _attach(self, name: str, bounds: str) -> None:
        """Attach the partition again, and remove its note."""
        try:
            with self._transaction():
                self._run(f"ALTER TABLE {self._parent} ATTACH PARTITION {name} {bounds}")
                self._run(f"COMMENT ON TABLE {name} IS NULL")
        except (IntegrityError, ProgrammingError) as error:
            raise SetupError(
                f"{name} was a partition of {self._parent}, a prune has detached it, and it cannot "
                f"be attached again ({str(error.orig).strip()}): make room for it there; or, to "
                f"leave it detached, COMMENT ON TABLE {name} IS NULL"
            ) from error

    def _pending(self, name: str) -> bool | None:
        """Whether the partition is being detached; None if it is none of the archive."""
        pending = self._connection.exec_driver_sql(
            "SELECT inhdetachpending FROM pg_inherits "
            f"WHERE inhparent = {self._archive()} "
            f"AND inhrelid = to_regclass({self._database.text(name)})"
        ).scalar()
        return None if pending is None else bool(pending)

    def _archive(self) -> Any:
        """What tells the archive from others of its name."""
        name = self._database.text(self._parent)
        return self._connection.exec_driver_sql(f"SELECT to_regclass({name})::oid").scalar()

    def _figures(self, name: str) -> RowChecksums:
        asked = ", ".join(asked_figures(self._database, checksums=False))
        row = self._connection.exec_driver_sql(f"SELECT {asked} FROM {name}").one()
        return RowChecksums(*(int(value) for value in row))

    def _rows(self) -> Sequence[Any]:
        table = f"to_regclass({self._database.text(self._parent)})"
        return self._connection.exec_driver_sql(_PARTITIONS.format(table=table)).all()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.begin(self._connection)
        try:
            yield
        except BaseException:
            with suppress(
                SQLAlchemyError
            ):  # the connection may be gone, and the first error tells why
                self._run("ROLLBACK")
            raise
        self._run("COMMIT")

    def _run(self, statement: str) -> None:
        self._connection.exec_driver_sql(statement)
