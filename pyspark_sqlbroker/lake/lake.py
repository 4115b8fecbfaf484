"""An export on disk: a Delta table of the archive's rows, and the state of its windows and files.

A plan is made from one loaded state, and committed only if no other commit of ours came since.
What a process that dies has staged is no part of the table. `sweep` removes it when it is old.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from logging import getLogger
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, IntegerType, StructField, StructType

from faststream_sqlbroker.core.times import from_microseconds, to_microseconds
from faststream_sqlbroker.exceptions import ConcurrentLoadError, SetupError
from pyspark_sqlbroker.databases import ArchiveDatabase
from pyspark_sqlbroker.lake.delta import DATA, LOG, STATES, DataFile, DeltaWriter
from pyspark_sqlbroker.lake.entries import Entry, State, unpack
from pyspark_sqlbroker.lake.files import Found, undo_on_error
from pyspark_sqlbroker.lake.row_checksums import NOTHING, RowChecksums, figure_columns, window_start
from pyspark_sqlbroker.lake.s3 import open_folders
from pyspark_sqlbroker.lake.windows import (
    LENGTHS,
    ExportWindow,
    Span,
    floor,
    parse_window,
)
from pyspark_sqlbroker.load.frames import ARCHIVE_SCHEMA
from pyspark_sqlbroker.load.selection import (
    ARCHIVE,
    Selection,
    describe_source,
    refuse_other_rows,
    select_rows,
)

LEFT_AFTER = 24 * 3_600_000
"""Milliseconds after which what an attempt has staged counts as left by a dead process: an attempt
takes an hour at most, as PostgreSQL's snapshot does."""

FORGOTTEN_AFTER = 168
"""Hours after which a checkpoint may forget that a file was part of the table: Delta's default."""

FILE_NAME = "file_name"
"""The column in which `Lake.read_named` gives the name of a row's file."""

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Few programs but Spark read the older INT96, and it has no statistics for filters.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    # A file that is gone must show as an error, never as fewer rows.
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
}
_PARTS = {
    "day": [StructField("date", DateType())],
    "hour": [StructField("date", DateType()), StructField("hour", IntegerType())],
}

PLANS = 20
"""How often a plan is made anew because another process has committed."""

logger = getLogger("faststream_sqlbroker.spark")


def lake_schema(size: str) -> StructType:
    """The columns of a lake of such windows: the archive's, then `date` and `hour`."""
    return StructType([*ARCHIVE_SCHEMA.fields, *_PARTS[size]])


class Lake:
    """The export below one path, as it was when it was loaded last.

    Attributes:
        session: Like the given session, with settings of its own.
        folders: What is on disk.
        table: The Delta table.
        source: What it is the export of; None before the first export.
        state: Of its windows and files; empty if it was lost.
        files: Those of the table, in the order of their times.
    """

    def __init__(
        self, spark: SparkSession, path: str, storage: Mapping[str, str] | None = None
    ) -> None:
        """Load it.

        Raises:
            SetupError: it is a table that no export has made, or its state is damaged.
        """
        self.folders = open_folders(spark, path, storage)
        self.session: SparkSession = spark.newSession()
        for name, value in _SETTINGS.items():
            self.session.conf.set(name, value)
        self.table = DeltaWriter(self.folders, storage)
        self._read()

    def load(self) -> None:
        """Read the log again."""
        self.table.load()
        self._read()

    def plan_again(self, work: Callable[[], None]) -> None:
        """Do `work`, and do it again on the lake as it is then while others commit in between.

        Raises:
            ConcurrentLoadError: others have, each time.
        """
        for remaining in reversed(range(PLANS)):
            try:
                work()
            except ConcurrentLoadError as error:
                if not remaining:
                    raise
                logger.info("%s", error)
                self.load()
            else:
                return

    def _read(self) -> None:
        self.source: dict[str, Any] | None = None
        self.state = State()
        self.files: list[DataFile] = []
        if not self.table.exists:
            return
        self.source = self.table.source()
        if self.source is None:
            raise SetupError(
                f"{self.folders.root} is a Delta table that no export has made: give another path"
            )
        for packed in self.table.states():
            change = unpack(packed, self.size, self.table.state_path)
            self.state = self.state.merge(change)
        self.files = self.table.files()

    @property
    def size(self) -> str:
        """The length of its windows: "day" or "hour"."""
        return str(self.need_source()["window"])

    @property
    def id(self) -> str:
        """Random, drawn once: tells this lake from others."""
        return str(self.need_source()["id"])

    def need_source(self) -> dict[str, Any]:
        """What it is the export of.

        Raises:
            SetupError: nothing was exported to this path.
        """
        if self.source is None:
            raise SetupError(f"{self.folders.root} has no table: give the path of an export")
        return self.source

    def select(
        self,
        database: ArchiveDatabase,
        name: str | None,
        table: str | None = None,
        schema: str | None = None,
        *,
        advice: str = "nothing was removed: give the export of this archive",
    ) -> Selection:
        """The rows that the lake is the export of; `name` is the one it has for the database.

        Raises:
            SetupError: it is not of this database or table.
        """
        source = self.need_source()
        selection = select_rows(
            ARCHIVE, table or source["table"], schema or source["schema"], queues=source["queues"]
        )
        ours = describe_source(database.address, selection, name)
        refuse_other_rows(f"{self.folders.root} is the export", source, ours, advice)
        return selection

    def begin(self, source: Mapping[str, Any], lake_id: str) -> None:
        """Make the table if there is none, and add the columns that it lacks.

        Raises:
            SetupError: the path holds something else, or the export of other rows.
        """
        if not self.table.exists:
            # An export that was killed while it made the table has left a log without a commit.
            strange = [name for name in self.folders.names() if name not in (DATA, STATES, LOG)]
            strange += [
                name for name in self.folders.files(LOG) if name.endswith((".json", ".parquet"))
            ]
            if strange:
                self.load()  # another process may have made the table since it was looked for
            if strange and not self.table.exists:
                raise SetupError(
                    f"{self.folders.root} has {strange[0]} and is no Delta table: give an empty "
                    "path; an export never writes between files that it does not know"
                )
        if not self.table.exists:
            self.table.create(lake_schema(source["window"]), {**source, "id": lake_id})
            self._read()
        refuse_other_rows(
            f"{self.folders.root} is the export",
            self.need_source(),
            source,
            "give each export its own path",
        )
        self.table.add_columns(lake_schema(self.size))
        self._read()

    def entry(self, window: ExportWindow) -> Entry | None:
        """The record of a window; None if it was not exported, or had no rows."""
        return self.state.entries.get(window.name)

    def figures_of(self, window: ExportWindow) -> RowChecksums:
        """The figures that are recorded for a window; those of no rows if none are."""
        entry = self.entry(window)
        return NOTHING if entry is None else entry.lake

    def windows(self) -> list[ExportWindow]:
        """The recorded windows, in order."""
        return sorted(parse_window(name, self.size) for name in self.state.entries)

    def covers(self, window: ExportWindow) -> bool:
        """Whether a window was exported, even if it had no rows."""
        return any(start <= window.start < end for start, end in self.state.covered)

    def read(self, start: datetime, end: datetime, without: Collection[DataFile] = ()) -> DataFrame:
        """The rows that the lake has of a span of time; of some files none."""
        low, high = (F.timestamp_micros(F.lit(to_microseconds(one))) for one in (start, end))
        files = [one for one in self.files if one.may_hold(start, end) and one not in without]
        frame = self.read_files(files)
        return frame.where((F.col("archived_at") >= low) & (F.col("archived_at") < high))

    def identities(
        self, window: ExportWindow, without: Collection[DataFile] = ()
    ) -> Iterator[tuple[int, int]]:
        """The id and the time, in microseconds since 1970, of each row of a window."""
        rows = self.read(window.start, window.end, without)
        for row in rows.select("id", F.unix_micros("archived_at")).toLocalIterator():
            yield row[0], row[1]

    def read_files(self, files: Iterable[DataFile]) -> DataFrame:
        """The rows of files, without `date` and `hour`."""
        places = [one.path for one in files]
        if not places:
            # createDataFrame would make this session the active one of the caller.
            nothing = [F.lit(None).cast(one.dataType).alias(one.name) for one in ARCHIVE_SCHEMA]
            return self.session.range(0).select(*nothing)
        return self.folders.read(self.session, ARCHIVE_SCHEMA, places)

    def read_named(self, files: Sequence[DataFile]) -> DataFrame:
        """The rows of one file at least, with `FILE_NAME`; names of files are unique."""
        places = [one.path for one in files]
        return self.folders.read(self.session, ARCHIVE_SCHEMA, places, FILE_NAME)

    def stage(self, frame: DataFrame) -> tuple[list[DataFile], dict[ExportWindow, RowChecksums]]:
        """Write rows, and read them back.

        Returns:
            The files that have rows, and the figures of each window as they are in them.
        """
        parts = {"date": F.to_date("archived_at"), "hour": F.hour("archived_at")}
        names = [one.name for one in _PARTS[self.size]]
        for name in names:
            frame = frame.withColumn(name, parts[name])
        frame = frame.select(*lake_schema(self.size).names)
        files = self.table.stage(frame.sortWithinPartitions(*names, "queue", "id"))
        with undo_on_error(self.discard, files):
            known, figures = self._measure(files)
            for one in files:
                if one.path not in known:
                    self.folders.delete(one.path)
        return [known[one.path] for one in files if one.path in known], figures

    def _measure(
        self, files: Sequence[DataFile]
    ) -> tuple[dict[str, DataFile], dict[ExportWindow, RowChecksums]]:
        """What is in staged files, by one pass over them; files without rows are left out."""
        known = dict[str, DataFile]()
        figures = dict[ExportWindow, RowChecksums]()
        by_name = {one.path.rpartition("/")[2]: one for one in files}
        time = F.unix_micros("archived_at")
        ends = F.min("id"), F.max("id"), F.min(time), F.max(time)
        if not files:
            return known, figures
        grouped = self.read_named(files).groupBy(FILE_NAME, window_start(self.size))
        for row in grouped.agg(*ends, *figure_columns(checksums=True)).collect():
            name, start, low, high, first, last, *values = row
            found = RowChecksums(*map(int, values))
            window = ExportWindow(from_microseconds(start), self.size)
            figures[window] = figures[window] + found if window in figures else found
            file = by_name[name]
            ids = (low, high)
            times = (from_microseconds(first), from_microseconds(last))
            if (known_ := known.get(file.path)) is not None and known_.ids and known_.times:
                ids = (min(low, known_.ids[0]), max(high, known_.ids[1]))
                times = (min(times[0], known_.times[0]), max(times[1], known_.times[1]))
                found = replace(found, rows=found.rows + known_.rows)
            known[file.path] = replace(file, rows=found.rows, ids=ids, times=times)
        return known, figures

    def commit(
        self,
        change: State,
        add: Sequence[DataFile] = (),
        remove: Sequence[DataFile] = (),
        *,
        compared: Sequence[DataFile] = (),
        same_rows: bool = False,
    ) -> None:
        """Commit staged files and what changes in the state.

        The SHA-256 of these files, and of `compared`, are recorded too. See `DeltaWriter.commit`.

        Raises:
            ConcurrentLoadError: another process has committed since `load`. The staged files are
                gone, and the lake is loaded again.
            StoreError: a staged file is missing, or has another size, or the state cannot be
                written: the staged files are gone. Or the log cannot be written: they stay.
        """
        try:
            with undo_on_error(self.discard, add):  # later errors may come after the commit
                self.table.check_staged(add)
                self.folders.sync(one.path for one in add)
                digests = {one.path: self.folders.sha256(one.path) for one in (*add, *compared)}
                state = self.state.merge(replace(change, digests=digests))
                version = self.table.write_state(state.pack())
            self.table.commit(version, add, remove, same_rows=same_rows)
        except ConcurrentLoadError:
            # The store may have taken our commit and told so too late: look before files go.
            self.load()
            self.discard(add)
            raise
        self._read()

    def discard(self, files: Iterable[DataFile]) -> None:
        """Remove staged files, except what the loaded table names."""
        used = self._used()
        for folder in {one.path.split("/")[1] for one in files} - used:
            self.folders.delete(f"{DATA}/{folder}")

    def _used(self) -> set[str]:
        """Folders that a commit has named."""
        paths = [*self.state.digests, *(one.path for one in self.files)]
        return {one.split("/")[1] for one in paths if one.startswith(f"{DATA}/")}

    def sweep(self) -> list[str]:
        """Remove what dead attempts have left, and old states; returns the folders.

        A folder counts as left if no commit has named a file of it, and what is newest in it, or
        the folder itself if it is empty, is older than a day by the clock of the file system. The
        next commit forgets the SHA-256 of files that are gone.
        """
        names = set(self.folders.names(DATA))
        known = {one.path for one in self.files}
        if self.state.digests.keys() - known:  # others have merged files, and removed some
            known |= self.folders.files(DATA).keys()
        digests = {path: one for path, one in self.state.digests.items() if path in known}
        self.state = replace(self.state, digests=digests)
        limit = self.folders.now() - LEFT_AFTER
        for name, found in self.folders.files(STATES).items():
            if found.modified < limit and self.table.is_older_state(name):
                self.folders.delete(name)
        left = list[str]()
        for name in sorted(names - self._used()):
            if 0 < self.folders.newest(f"{DATA}/{name}") < limit:
                self.folders.delete(f"{DATA}/{name}")
                left.append(name)
        return left

    def purge(self, moment: int, hours: int) -> list[str]:
        """Remove files that are no part of the table; earlier versions can no longer be read.

        Args:
            moment: Milliseconds of the file system's clock, before a commit of ours: what others
                have staged before it cannot be committed any more, and goes.
            hours: Files that were part of the table stay so long after they were replaced.
        """
        self.table.sync()  # other programs may have written what replaces the files
        gone = self.table.vacuum(hours)
        self._read()
        kept = {one.path for one in self.files}
        if hours:  # what the log still remembers; the rest was replaced long ago
            kept.update(self.table.vacuum(0, dry_run=True))
        # Other programs write to the root: what they have staged they may commit yet. What they
        # have taken out no vacuum finds any more when a checkpoint has forgotten it.
        limits = {
            True: moment - hours * 3_600_000,
            False: moment - max(hours, FORGOTTEN_AFTER) * 3_600_000,
        }
        for name, found in self.folders.files("").items():
            ours = name.startswith(f"{DATA}/")
            # Anything else below the root is not the table's, such as a lake of its own.
            of_table = ours or ("/" not in name and name.endswith(".parquet"))
            if of_table and name not in kept and found.modified < limits[ours]:
                self.folders.delete(name)
                gone.append(name)
        return gone

    def altered(self, files: Sequence[DataFile], checked_bytes: float = math.inf) -> dict[str, str]:
        """Files of the table that are not as they were committed, with what differs.

        Args:
            files: In the order of their times.
            checked_bytes: Files of so many bytes in all, the latest first, are read and compared
                with their SHA-256; of the others only the size is compared.
        """
        there = self._there(files)
        found = dict[str, str]()
        for one in reversed(files):
            checked = one.size <= checked_bytes
            problem = self._problem(one, there, checked=checked)
            if problem is not None:
                found[one.path] = problem
            checked_bytes -= one.size if checked else 0
        return {one.path: found[one.path] for one in files if one.path in found}

    def _there(self, files: Iterable[DataFile]) -> dict[str, Found]:
        """What is on disk where these files should be; other programs write to the table's root."""
        places = {
            DATA if one.path.startswith(f"{DATA}/") else one.path.rpartition("/")[0]
            for one in files
        }
        return {name: found for one in places for name, found in self.folders.files(one).items()}

    def _problem(self, file: DataFile, there: Mapping[str, Found], *, checked: bool) -> str | None:
        if file.path not in there:
            return "it is missing"
        size = there[file.path].size
        if size != file.size:
            return f"it has {size} bytes, and not {file.size}"
        digest = self.state.digests.get(file.path)
        if checked and digest is not None and self.folders.sha256(file.path) != digest:
            return "its bytes have changed (SHA-256)"
        return None

    def foreign_of(self, files: Iterable[DataFile]) -> list[DataFile]:
        """List files of other programs that were not compared yet: their SHA-256 is unknown."""
        return [one for one in files if one.path not in self.state.digests]

    def nameless_of(self, files: Sequence[DataFile]) -> dict[str, str]:
        """Files with rows that lack `id` or `archived_at`; no export writes such rows."""
        if not files:
            return {}
        by_name = {one.path.rpartition("/")[2]: one.path for one in files}
        rows = self.read_named(files)
        rows = rows.where(F.col("id").isNull() | F.col("archived_at").isNull())
        problem = "it has {} rows without id or archived_at, which no export writes"
        return {
            by_name[name]: problem.format(number)
            for name, number in rows.groupBy(FILE_NAME).count().collect()
        }

    def span_of(self, file: DataFile) -> Span | None:
        """Return the span of a file's windows; None if the log does not say."""
        if file.times is None:
            return None
        first, last = (floor(moment, self.size) for moment in file.times)
        return first, last + LENGTHS[self.size]

    def windows_of(self, paths: Iterable[str]) -> list[ExportWindow]:
        """The recorded windows that may have rows in these files."""
        wanted = set(paths)
        files = [one for one in self.files if one.path in wanted]
        return [
            window
            for window in self.windows()
            if any(one.may_hold(window.start, window.end) for one in files)
        ]
