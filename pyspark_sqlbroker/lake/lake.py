"""An export on disk: a Delta table of the archive's rows, and the state of its windows and files.

A plan is made from one loaded state, and is committed only if no other export has committed since.
Files that a process has staged before it died are not part of the table; `sweep` removes them
after a day.
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
from pyspark_sqlbroker.lake.entries import Entry, LakeState, parse_state
from pyspark_sqlbroker.lake.files import FileStatus, undo_on_error
from pyspark_sqlbroker.lake.row_checksums import (
    NO_ROWS,
    RowChecksums,
    build_checksum_columns,
    build_window_start,
)
from pyspark_sqlbroker.lake.s3 import open_folders
from pyspark_sqlbroker.lake.windows import (
    WINDOW_LENGTHS,
    ExportWindow,
    Span,
    floor_to_window,
    parse_window,
)
from pyspark_sqlbroker.load.frames import ARCHIVE_SCHEMA
from pyspark_sqlbroker.load.selection import (
    ARCHIVE,
    Selection,
    check_same_source,
    describe_source,
    select_rows,
)

STAGED_AGE_MS = 24 * 3_600_000
"""Age in milliseconds after which staged files count as left by a dead process. An attempt takes an
hour at most, because PostgreSQL ends its snapshot then.
"""

CHECKPOINT_RETENTION_HOURS = 168
"""Hours after which a checkpoint may forget that a file was part of the table (Delta's default)."""

FILE_NAME = "file_name"
"""Column in which `Lake.read_with_file_names` returns the name of a row's file."""

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
_WINDOW_FIELDS = {
    "day": [StructField("date", DateType())],
    "hour": [StructField("date", DateType()), StructField("hour", IntegerType())],
}

MAX_PLANS = 20
"""Number of plans to make while other processes keep committing."""

logger = getLogger("faststream_sqlbroker.spark")


def build_lake_schema(size: str) -> StructType:
    """Return the columns of a lake: the archive's, then `date` and, for hours, `hour`."""
    return StructType([*ARCHIVE_SCHEMA.fields, *_WINDOW_FIELDS[size]])


class Lake:
    """The export below a path, as of the last load.

    Attributes:
        session: A session like the given one, with the lake's own settings.
        folders: The files on disk.
        table: The Delta table.
        source: The database, table and queues that were exported; None before the first export.
        state: The recorded windows and files; empty if the state was lost.
        files: The table's files, ordered by the times of their rows.
    """

    def __init__(
        self, spark: SparkSession, path: str, storage: Mapping[str, str] | None = None
    ) -> None:
        """Load the lake, which is empty if nothing was exported to the path yet.

        The lake works in a session of its own, with settings that keep times exact; the settings of
        the user's session stay.

        Raises:
            SetupError: the table was not made by an export, or its state is damaged.
        """
        self.folders = open_folders(spark, path, storage)
        self.session: SparkSession = spark.newSession()
        for name, value in _SETTINGS.items():
            self.session.conf.set(name, value)
        self.table = DeltaWriter(self.folders, storage)
        self._load_state()

    def load(self) -> None:
        """Reload the log and the state."""
        self.table.load()
        self._load_state()

    def retry_on_conflict(self, function: Callable[[], None]) -> None:
        """Call `function`, and again on the reloaded lake after each commit of another process.

        A commit that was planned from an older version of the lake is refused, so `function` must
        plan from what is loaded now. After `MAX_PLANS` conflicts the last error is raised.

        Raises:
            ConcurrentLoadError: other processes committed during each try.
        """
        for remaining in reversed(range(MAX_PLANS)):
            try:
                function()
            except ConcurrentLoadError as error:
                if not remaining:
                    raise
                logger.info("%s", error)
                self.load()
            else:
                return

    def _load_state(self) -> None:
        """Read source, state and files of the loaded table; all are empty without a table.

        The source says which archive is exported here. The state has the checksums of each window
        and the SHA-256 of each file; older lakes store the state as several changes, merged here.
        """
        self.source: dict[str, Any] | None = None
        self.state = LakeState()
        self.files: list[DataFile] = []
        if not self.table.exists:
            return
        self.source = self.table.read_source()
        if self.source is None:
            raise SetupError(
                f"{self.folders.root} is a Delta table that no export created: give another path"
            )
        for packed in self.table.read_states():
            change = parse_state(packed, self.size, self.table.state_path)
            self.state = self.state.merge(change)
        self.files = self.table.list_files()

    @property
    def size(self) -> str:
        """Length of the lake's windows: "day" or "hour"."""
        return str(self.require_source()["window"])

    @property
    def id(self) -> str:
        """Random id, drawn once, that tells this lake from other lakes."""
        return str(self.require_source()["id"])

    def require_source(self) -> dict[str, Any]:
        """Return the source of the export.

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
        hint: str = "nothing was removed: give the path of the export of this archive",
    ) -> Selection:
        """Select the archive rows that this lake is the export of.

        Table, schema and queues come from the source that the lake has recorded, so that a prune or
        a repair never works on the rows of another archive.

        Args:
            database: The database to select from.
            name: The lake's name for the database, if it was given one.
            table: Another name than the recorded one is refused; None takes the recorded one.
            schema: As `table`.
            hint: What the user should do if the lake is of other rows.

        Raises:
            SetupError: the lake is the export of another database or table.
        """
        source = self.require_source()
        selection = select_rows(
            ARCHIVE, table or source["table"], schema or source["schema"], queues=source["queues"]
        )
        selected_source = describe_source(database.address, selection, name)
        check_same_source(f"{self.folders.root} is the export", source, selected_source, hint)
        return selection

    def prepare(self, source: Mapping[str, Any], lake_id: str) -> None:
        """Create the table if there is none, and add missing columns; called before each export.

        Files that no export has written are refused, as the lake would mix with another program's
        data. Columns are missing if an older version of this package has created the table.

        Raises:
            SetupError: the path holds something else, or the export of other rows.
        """
        if not self.table.exists:
            # An export that was killed while it made the table has left a log without a commit.
            unknown = [
                name for name in self.folders.list_names() if name not in (DATA, STATES, LOG)
            ]
            unknown += [
                name
                for name in self.folders.list_files(LOG)
                if name.endswith((".json", ".parquet"))
            ]
            if unknown:
                self.load()  # another process may have made the table since it was checked
            if unknown and not self.table.exists:
                raise SetupError(
                    f"{self.folders.root} contains {unknown[0]} and is not a Delta table: give an "
                    "empty path, because an export never writes next to unknown files"
                )
        if not self.table.exists:
            self.table.create(build_lake_schema(source["window"]), {**source, "id": lake_id})
            self._load_state()
        check_same_source(
            f"{self.folders.root} is the export",
            self.require_source(),
            source,
            "give each export its own path",
        )
        self.table.add_columns(build_lake_schema(self.size))
        self._load_state()

    def get_entry(self, window: ExportWindow) -> Entry | None:
        """Return the record of a window; None if the window was not exported, or had no rows."""
        return self.state.entries.get(window.name)

    def get_checksums(self, window: ExportWindow) -> RowChecksums:
        """Return the checksums recorded for a window; zeros without a record."""
        entry = self.get_entry(window)
        return NO_ROWS if entry is None else entry.lake

    def list_windows(self) -> list[ExportWindow]:
        """Return the recorded windows, in order."""
        return sorted(parse_window(name, self.size) for name in self.state.entries)

    def is_covered(self, window: ExportWindow) -> bool:
        """Return True if a window was exported, even without rows.

        An export marks the complete span of time that was read as covered. Rows that appear in a
        covered window afterwards were committed late.
        """
        return any(start <= window.start < end for start, end in self.state.covered)

    def read(
        self, start: datetime, end: datetime, excluded: Collection[DataFile] = ()
    ) -> DataFrame:
        """Read the rows archived in [start, end).

        Files whose recorded times show that they have no such row are not opened; a file may have
        rows of other times too, so the rows are filtered as well.

        Args:
            start: The first time.
            end: The first time that does not belong.
            excluded: Files to leave out, such as damaged files.
        """
        low, high = (F.timestamp_micros(F.lit(to_microseconds(time))) for time in (start, end))
        files = [file for file in self.files if file.may_hold(start, end) and file not in excluded]
        frame = self.read_files(files)
        return frame.where((F.col("archived_at") >= low) & (F.col("archived_at") < high))

    def iter_identities(
        self, window: ExportWindow, excluded: Collection[DataFile] = ()
    ) -> Iterator[tuple[int, int]]:
        """Yield the id and the time (microseconds since 1970) of each row of a window.

        Only both together identify a row, as a retried dead letter is archived again under its id.
        """
        rows = self.read(window.start, window.end, excluded)
        for row in rows.select("id", F.unix_micros("archived_at")).toLocalIterator():
            yield row[0], row[1]

    def read_files(self, files: Iterable[DataFile]) -> DataFrame:
        """Read the rows of `files`, without `date` and `hour`.

        Spark refuses to read no files, so without files an empty frame is built.
        """
        paths = [file.path for file in files]
        if not paths:
            # createDataFrame would make this session the active one of the caller.
            columns = [
                F.lit(None).cast(field.dataType).alias(field.name) for field in ARCHIVE_SCHEMA
            ]
            return self.session.range(0).select(*columns)
        return self.folders.read(self.session, ARCHIVE_SCHEMA, paths)

    def read_with_file_names(self, files: Sequence[DataFile]) -> DataFrame:
        """Read the rows of `files` (not empty), with `FILE_NAME`; names of files are unique."""
        paths = [file.path for file in files]
        return self.folders.read(self.session, ARCHIVE_SCHEMA, paths, FILE_NAME)

    def stage(self, frame: DataFrame) -> tuple[list[DataFile], dict[ExportWindow, RowChecksums]]:
        """Write rows to new files, then read these files back.

        Staged files are on disk, but not part of the table until `commit` names them. Reading back
        proves what was written; files without rows, of Spark's empty partitions, are removed.

        Returns:
            The files that have rows, and the checksums of each window as read back.
        """
        values = {"date": F.to_date("archived_at"), "hour": F.hour("archived_at")}
        names = [field.name for field in _WINDOW_FIELDS[self.size]]
        for name in names:
            frame = frame.withColumn(name, values[name])
        frame = frame.select(*build_lake_schema(self.size).names)
        files = self.table.stage(frame.sortWithinPartitions(*names, "queue", "id"))
        with undo_on_error(self.discard, files):
            measured, checksums = self._compute_file_stats(files)
            for file in files:
                if file.path not in measured:
                    self.folders.delete(file.path)
        return [measured[file.path] for file in files if file.path in measured], checksums

    def _compute_file_stats(
        self, files: Sequence[DataFile]
    ) -> tuple[dict[str, DataFile], dict[ExportWindow, RowChecksums]]:
        """Compute the statistics of staged files and the checksums of their windows.

        A single pass reads the files. A file may have rows of several windows, so its rows arrive
        in several groups and are added up. Files without rows are omitted.
        """
        measured = dict[str, DataFile]()
        checksums = dict[ExportWindow, RowChecksums]()
        by_name = {file.path.rpartition("/")[2]: file for file in files}
        time = F.unix_micros("archived_at")
        bounds = F.min("id"), F.max("id"), F.min(time), F.max(time)
        if not files:
            return measured, checksums
        grouped = self.read_with_file_names(files).groupBy(FILE_NAME, build_window_start(self.size))
        for row in grouped.agg(*bounds, *build_checksum_columns(checksums=True)).collect():
            file_name, window_start, min_id, max_id, first_time, last_time, *values = row
            row_checksums = RowChecksums(*map(int, values))
            window = ExportWindow(from_microseconds(window_start), self.size)
            checksums[window] = (
                checksums[window] + row_checksums if window in checksums else row_checksums
            )
            file = by_name[file_name]
            ids = (min_id, max_id)
            times = (from_microseconds(first_time), from_microseconds(last_time))
            previous = measured.get(file.path)
            if previous is not None and previous.ids and previous.times:
                ids = (min(min_id, previous.ids[0]), max(max_id, previous.ids[1]))
                times = (min(times[0], previous.times[0]), max(times[1], previous.times[1]))
                row_checksums = replace(row_checksums, rows=row_checksums.rows + previous.rows)
            measured[file.path] = replace(file, rows=row_checksums.rows, ids=ids, times=times)
        return measured, checksums

    def commit(
        self,
        change: LakeState,
        add: Sequence[DataFile] = (),
        remove: Sequence[DataFile] = (),
        *,
        compared: Sequence[DataFile] = (),
        same_rows: bool = False,
    ) -> None:
        """Commit staged files and a change of the state, as one new version of the table.

        The SHA-256 of the files in `add` and `compared` are recorded, too: later runs find altered
        files by them. `compared` has files of other programs whose rows were found to be equal.
        `remove` and `same_rows` are those of `DeltaWriter.commit`.

        Raises:
            ConcurrentLoadError: another process has committed since `load`. The staged files are
                removed, and the lake is loaded again.
            StoreError: a staged file is missing or has another size, or the state cannot be
                written: the staged files are removed. Or the log cannot be written: they stay.
        """
        try:
            with undo_on_error(self.discard, add):  # later errors may come after the commit
                self.table.check_staged(add)
                self.folders.sync(file.path for file in add)
                digests = {file.path: self.folders.sha256(file.path) for file in (*add, *compared)}
                state = self.state.merge(replace(change, digests=digests))
                version = self.table.write_state(state.pack())
            self.table.commit(version, add, remove, same_rows=same_rows)
        except ConcurrentLoadError:
            # Trap: our commit may have succeeded although the store reported a conflict. Reload
            # before files are deleted.
            self.load()
            self.discard(add)
            raise
        self._load_state()

    def discard(self, files: Iterable[DataFile]) -> None:
        """Remove staged files, except folders that a commit names.

        Called when an attempt has failed. Each attempt writes to a folder of its own; a folder that
        a commit names is in use, because a commit can succeed although an error was reported.
        """
        used = self._get_used_folders()
        for folder in {file.path.split("/")[1] for file in files} - used:
            self.folders.delete(f"{DATA}/{folder}")

    def _get_used_folders(self) -> set[str]:
        """Return the names of the folders below data/ that a commit has named.

        Digests also name replaced files, which earlier versions of the table may still need. The
        folder of a dead attempt is in no commit.
        """
        paths = [*self.state.digests, *(file.path for file in self.files)]
        return {path.split("/")[1] for path in paths if path.startswith(f"{DATA}/")}

    def sweep(self) -> list[str]:
        """Remove old states and the folders of dead attempts; return the removed folders.

        A folder is removed if no commit has named a file of it, and its latest file, or the folder
        itself if it is empty, is older than a day by the file system's clock. The next commit
        forgets the SHA-256 of files that are gone.
        """
        names = set(self.folders.list_names(DATA))
        known_paths = {file.path for file in self.files}
        # Other programs have merged files, and removed some.
        if self.state.digests.keys() - known_paths:
            known_paths |= self.folders.list_files(DATA).keys()
        digests = {
            path: digest for path, digest in self.state.digests.items() if path in known_paths
        }
        self.state = replace(self.state, digests=digests)
        limit = self.folders.get_time() - STAGED_AGE_MS
        for name, status in self.folders.list_files(STATES).items():
            if status.modified < limit and self.table.is_older_state(name):
                self.folders.delete(name)
        removed = list[str]()
        for name in sorted(names - self._get_used_folders()):
            if 0 < self.folders.get_latest_time(f"{DATA}/{name}") < limit:
                self.folders.delete(f"{DATA}/{name}")
                removed.append(name)
        return removed

    def purge(self, timestamp: int, hours: int) -> list[str]:
        """Remove files that are not part of the table; earlier versions can no longer be read.

        Called at the end of an erasure: the files that the erasure has replaced still have the
        rows, and so may files that an export has staged and not committed.

        Args:
            timestamp: Milliseconds of the file system's clock, before a commit of ours. Files that
                others have staged before it are removed: they cannot be committed any more.
            hours: How long replaced files stay.

        Returns:
            The removed files.
        """
        self.table.sync()  # other programs may have written the replacements
        removed = self.table.vacuum(hours)
        self._load_state()
        retained = {file.path for file in self.files}
        if hours:  # files that the log still remembers; others were replaced long ago
            retained.update(self.table.vacuum(0, dry_run=True))
        # Other programs stage files in the root and may commit them yet. No vacuum finds the files
        # that they have taken out once a checkpoint has forgotten them. The keys say whether an
        # export has staged a file; files written before the time are removed.
        limits = {
            True: timestamp - hours * 3_600_000,
            False: timestamp - max(hours, CHECKPOINT_RETENTION_HOURS) * 3_600_000,
        }
        for name, status in self.folders.list_files("").items():
            staged_by_export = name.startswith(f"{DATA}/")
            # Anything else below the root is not the table's, such as a lake of its own.
            of_table = staged_by_export or ("/" not in name and name.endswith(".parquet"))
            if of_table and name not in retained and status.modified < limits[staged_by_export]:
                self.folders.delete(name)
                removed.append(name)
        return removed

    def find_altered_files(
        self, files: Sequence[DataFile], checked_bytes: float = math.inf
    ) -> dict[str, str]:
        """Return the table's files that differ from the commit, each with the difference.

        A file differs if it is missing, or has another size or SHA-256 than was committed.

        Args:
            files: Ordered by the times of their rows.
            checked_bytes: The latest files, up to so many bytes in all, are compared by SHA-256; of
                the others only the size is compared.
        """
        actual = self._list_actual_files(files)
        issues = dict[str, str]()
        for file in reversed(files):
            # The latest files first, until `checked_bytes` is used up.
            checked = file.size <= checked_bytes
            issue = self._find_file_issue(file, actual, checked=checked)
            if issue is not None:
                issues[file.path] = issue
            checked_bytes -= file.size if checked else 0
        return {file.path: issues[file.path] for file in files if file.path in issues}

    def _list_actual_files(self, files: Iterable[DataFile]) -> dict[str, FileStatus]:
        """List the files on disk in the folders of `files`.

        Other programs write to the table's root, so these files are in several folders.
        """
        folders = {
            DATA if file.path.startswith(f"{DATA}/") else file.path.rpartition("/")[0]
            for file in files
        }
        return {
            name: status
            for folder in folders
            for name, status in self.folders.list_files(folder).items()
        }

    def _find_file_issue(
        self, file: DataFile, actual: Mapping[str, FileStatus], *, checked: bool
    ) -> str | None:
        """Describe how a file on disk differs from the commit; None if equal.

        The SHA-256 is compared only if `checked`, because that reads the file. Files of other
        programs have no recorded SHA-256 until their rows were compared.
        """
        if file.path not in actual:
            return "it is missing"
        size = actual[file.path].size
        if size != file.size:
            return f"it has {size} bytes instead of {file.size}"
        digest = self.state.digests.get(file.path)
        if checked and digest is not None and self.folders.sha256(file.path) != digest:
            return "its bytes have changed (SHA-256)"
        return None

    def find_foreign_files(self, files: Iterable[DataFile]) -> list[DataFile]:
        """Return files of other programs that were not compared yet: their SHA-256 is unknown.

        Another program, such as Delta's OPTIMIZE, may merge the export's files and rewrite them.
        """
        return [file for file in files if file.path not in self.state.digests]

    def find_files_without_ids(self, files: Sequence[DataFile]) -> dict[str, str]:
        """Find files with rows that lack `id` or `archived_at`, which no export writes.

        Such a row belongs to no window, so the windows' checksums would not show it.

        Returns:
            By path, a description of the issue.
        """
        if not files:
            return {}
        by_name = {file.path.rpartition("/")[2]: file.path for file in files}
        rows = self.read_with_file_names(files)
        rows = rows.where(F.col("id").isNull() | F.col("archived_at").isNull())
        issue = "it has {} rows without id or archived_at, which no export writes"
        return {
            by_name[name]: issue.format(number)
            for name, number in rows.groupBy(FILE_NAME).count().collect()
        }

    def get_file_span(self, file: DataFile) -> Span | None:
        """Return the time from the file's first window to its last; None if the log has no times.

        Other programs may write files without these statistics, which may have rows of any time.
        """
        if file.times is None:
            return None
        first, last = (floor_to_window(moment, self.size) for moment in file.times)
        return first, last + WINDOW_LENGTHS[self.size]

    def find_windows(self, paths: Iterable[str]) -> list[ExportWindow]:
        """Return the recorded windows that may have rows in the given files.

        The bounds of a file's times decide, so a window may be returned without having rows there.
        """
        requested_paths = set(paths)
        files = [file for file in self.files if file.path in requested_paths]
        return [
            window
            for window in self.list_windows()
            if any(file.may_hold(window.start, window.end) for file in files)
        ]
