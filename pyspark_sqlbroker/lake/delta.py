"""The Delta table: stage, commit, list and vacuum files.

Spark's executors write Parquet to a folder of the attempt, `data/<uuid>/`. The driver writes the
new state of the lake to `_state/`, and commits the files to the log of the Delta table by
deltalake. The commit names the state by the version of its application transaction, which
checkpoints keep. So both take effect at once, and a process that dies before the commit leaves a
state that no version of the table names. No other module of the lake imports deltalake, so another
table format needs only another class with these methods.
"""

import json
import secrets
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from logging import getLogger
from typing import Any

import pyarrow as pa
import pyarrow.fs as pa_fs
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from faststream_sqlbroker.exceptions import ConcurrentLoadError, SetupError, StoreError
from pyspark_sqlbroker.lake.files import Folders, undo_on_error

DATA = "data"
LOG = "_delta_log"
STATES = "_state"
"""The folder of states; vacuums of the table skip folders whose names begin with `_`."""

APPLICATION = "sqlbroker"
"""The application id of the table. Every commit of ours takes a higher version of it, so that of
two plans made from the same state only one is committed.
"""

_ATTEMPT_BITS = 32
"""Random low bits of a version, so that two attempts at the same commit write different states."""

_NOTE = "sqlbroker"
"""Name of a note in a commit's metadata; older lakes have notes in place of states."""

_SOURCE = "sqlbroker.source"
_PROPERTIES = {
    # The minimum and maximum of other columns would put contents of messages into the log.
    "delta.dataSkippingStatsColumns": "id,archived_at",
}


logger = getLogger("faststream_sqlbroker.spark")


@dataclass(frozen=True)
class DataFile:
    """A Parquet file, staged or part of the table.

    Attributes:
        path: Relative to the table's root.
        size: In bytes.
        modified: Time of the write, in milliseconds since 1970.
        rows: Number of rows.
        ids: Minimum and maximum id; None if the log does not contain them.
        times: Minimum and maximum `archived_at`; None if the log does not contain them.
    """

    path: str
    size: int
    modified: int
    rows: int = 0
    ids: tuple[int, int] | None = None
    times: tuple[datetime, datetime] | None = None

    def may_hold(self, start: datetime, end: datetime) -> bool:
        """Return True if the file can have rows archived in [start, end).

        Only the file's minimum and maximum are known; without them any row is possible.
        """
        return self.times is None or (self.times[0] < end and self.times[1] >= start)


class DeltaWriter:
    """One Delta table, as of the last load.

    Attributes:
        folders: The files of the table.
    """

    def __init__(self, folders: Folders, storage: Mapping[str, str] | None) -> None:
        """Open the table, if existing; `storage` has deltalake's settings for an object store."""
        self.folders = folders
        self._storage = dict(storage or {}) or None
        self._table: DeltaTable | None = None
        self.load()

    def load(self) -> None:
        """Read the log. Later plans are committed only if no other commit came in between.


        Raises:
            SetupError: the table has deletion vectors, which a reader of the listed files would
                ignore.
            StoreError: the log cannot be read.
        """
        address = self.folders.address
        with self._convert_errors():
            if not DeltaTable.is_deltatable(address, self._storage):
                self._table = None
                return
            table = DeltaTable(address, storage_options=self._storage)
            if pa.table(table.deletion_vectors()).num_rows:
                raise SetupError(
                    f"{self.folders.root} has deletion vectors, so reading its listed files would "
                    "return deleted rows: rewrite the files (REORG TABLE … APPLY (PURGE)) and set "
                    "delta.enableDeletionVectors to false"
                )
        self._table = table

    @property
    def exists(self) -> bool:
        """True if there is a table."""
        return self._table is not None

    @property
    def version(self) -> int:
        """Version of the loaded table."""
        return int(self._require_table().version())

    def read_source(self) -> dict[str, Any] | None:
        """Return the source recorded in the table; None if no export has made the table."""
        text = self._require_table().metadata().configuration.get(_SOURCE)
        return None if text is None else dict(json.loads(text))

    def get_schema(self) -> StructType:
        """Return the table's schema as Spark's."""
        return StructType.fromJson(json.loads(self._require_table().schema().to_json()))

    def create(self, schema: StructType, source: Mapping[str, Any]) -> None:
        """Create the table, or load the table that another process has just created.

        `source` describes the exported archive. It is stored as a property of the table, so that an
        export of another archive is refused.
        """
        with self._convert_errors():
            try:
                DeltaTable.create(
                    self.folders.address,
                    Schema.from_json(schema.json()),
                    mode="error",
                    configuration={**_PROPERTIES, _SOURCE: json.dumps(source)},
                    storage_options=self._storage,
                    raise_if_key_not_exists=False,
                )
            except DeltaError:
                if not DeltaTable.is_deltatable(self.folders.address, self._storage):
                    raise
        self.load()

    def add_columns(self, schema: StructType) -> None:
        """Add the missing columns, before a commit of files with more columns.

        Columns are missing if an older version of this package has created the table.
        """
        existing = set(self.get_schema().names)
        new = [
            field for field in Schema.from_json(schema.json()).fields if field.name not in existing
        ]
        if new:
            with self._convert_errors():
                # It changes the schema, so plans of other processes fail.
                self._require_table().alter.add_columns(
                    new, commit_properties=CommitProperties(None, 0)
                )
            self.load()

    def stage(self, frame: DataFrame) -> list[DataFile]:
        """Write rows to a new folder of this attempt; return the Parquet files.

        They are not part of the table before a commit names them. An attempt is one try of a
        commit; its folder has a random name, so that tries never share a file. If writing fails,
        the folder is removed.
        """
        folder = f"{DATA}/{uuid.uuid4().hex}"
        files = list[DataFile]()
        with undo_on_error(self.folders.delete, folder):
            new_files = self.folders.write(frame, folder)
            for name, status in sorted(self.folders.list_files(folder).items()):
                if name in new_files:
                    files.append(DataFile(name, status.size, status.modified))
                else:  # Spark's mark of success, Hadoop's checksums, files of a failed task
                    self.folders.delete(name)
        return files

    def write_state(self, state: bytes) -> int:
        """Write the state of the lake after the next commit; return the number of the state.

        The state takes effect only with the commit that names this number. Its high bits count
        commits; its low bits are random, so that two attempts never write the same file.
        """
        number = (self._get_state_version() >> _ATTEMPT_BITS) + 1
        version = (number << _ATTEMPT_BITS) + secrets.randbits(_ATTEMPT_BITS)
        path = get_state_path(version)
        with self._convert_errors(), undo_on_error(self.folders.delete, path):
            with self._open_file_system().open_output_stream(path) as stream:
                stream.write(state)
            self.folders.sync([path])
        return version

    def commit(
        self,
        version: int,
        add: Sequence[DataFile],
        remove: Sequence[DataFile] = (),
        *,
        same_rows: bool = False,
    ) -> None:
        """Add and remove files atomically, if no other plan was committed since the last load.

        Args:
            version: Version of the new state, from `write_state`.
            add: Staged files.
            remove: Files of the table.
            same_rows: True if the table's rows do not change, so that streams from it skip the
                commit.

        Raises:
            ConcurrentLoadError: another process has committed; nothing was changed: load and plan
                again.
        """
        now = self.folders.get_time() if remove else 0
        is_data_change = not same_rows
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size, {}, file.modified, is_data_change, _format_stats(file))
            for file in add
        ]
        actions += [RemoveAction(file.path, is_data_change, now, file.size, {}) for file in remove]
        table = self._require_table()
        with self._convert_errors():
            # No retries by the library: they would commit a plan made from an older state.
            properties = CommitProperties(None, 0, [Transaction(APPLICATION, version)])
            table.create_write_transaction(
                actions, mode="append", schema=table.schema(), commit_properties=properties
            )
        self.folders.sync([LOG])
        self.load()

    def read_states(self) -> list[bytes]:
        """Read the loaded table's state; of an older lake, the changes that make up a state, in
        order.

        The list is empty before the first commit, and if the state was lost.
        """
        version = self._get_state_version()
        if version < 1 << _ATTEMPT_BITS:
            return self._read_notes(version)
        try:
            with self._open_file_system().open_input_stream(get_state_path(version)) as stream:
                return [bytes(stream.read())]
        except FileNotFoundError:
            logger.warning(
                "%s is missing, and with it the records of all windows, so prune removes nothing: "
                "run sqlbroker archive export, then sqlbroker archive repair",
                self.state_path,
            )
            return []
        except OSError as error:
            msg = (
                f"{self.state_path} cannot be read ({' '.join(str(error).split())}): restore it "
                "from a copy, or remove it and run sqlbroker archive repair"
            )
            raise StoreError(msg) from error

    def _read_notes(self, last: int) -> list[bytes]:
        """Read the notes of a lake that was written before states existed.

        Each commit then had a change of the state as a note in its metadata, with a consecutive
        number. The library may list commits newer than the loaded files, so notes after `last` are
        skipped.
        """
        if not last:
            return []
        with self._convert_errors():
            notes = [commit[_NOTE] for commit in self._require_table().history() if _NOTE in commit]
        numbered = sorted((json.loads(note)["number"], note) for note in notes)
        return [note.encode() for number, note in numbered if number <= last]

    @property
    def state_path(self) -> str:
        """Full path of the state, for messages."""
        return self.folders.get_full_path(get_state_path(self._get_state_version()))

    def _get_state_version(self) -> int:
        """Return the version of our last commit to the loaded table; 0 before the first.

        It names the state file. The high bits count commits; the low bits are random, so that two
        attempts at one commit write different files.
        """
        return self._require_table().transaction_version(APPLICATION) or 0

    def _open_file_system(self) -> Any:
        """Open the lake by the library that writes the log, with the same settings.

        PyArrow compresses files whose names end with ".gz", as those of states do.
        """
        return pa_fs.PyFileSystem(DeltaStorageHandler(self.folders.address, self._storage))

    def list_files(self) -> list[DataFile]:
        """Return the table's files, ordered by the times of their rows.

        Minimum and maximum are None if another program has written the file without statistics.
        """
        files = []
        for action in pa.table(self._require_table().get_add_actions(flatten=True)).to_pylist():
            ids = action.get("min.id"), action.get("max.id")
            times = action.get("min.archived_at"), action.get("max.archived_at")
            files.append(
                DataFile(
                    action["path"],
                    action["size_bytes"],
                    action["modification_time"],
                    action["num_records"] or 0,
                    None if None in ids else (int(ids[0]), int(ids[1])),
                    None if None in times else times,
                )
            )
        # Files without times come first: the order is that of the times, not of their text.
        return sorted(files, key=lambda file: (file.times is not None, file.times or (), file.path))

    def vacuum(self, hours: int, *, dry_run: bool = False) -> list[str]:
        """Remove files that were taken out of the table more than `hours` ago; return their paths.

        Files that others have staged are not touched, nor files that a checkpoint has forgotten.
        Earlier versions can no longer be read.
        """
        with self._convert_errors():
            removed = self._require_table().vacuum(
                hours, dry_run=dry_run, enforce_retention_duration=False
            )
        self.load()
        return removed

    def sync(self) -> None:
        """Flush all files of the loaded table to the disk, if local.

        Called before an export, a prune or an erasure relies on the files: a process that died, or
        another program, may have written some without flushing.
        """
        states = [get_state_path(version)] if (version := self._get_state_version()) else []
        self.folders.sync([*(file.path for file in self.list_files()), *states, LOG])

    def is_older_state(self, path: str) -> bool:
        """Return True if `path` is the state of a version before the loaded version.

        Only the loaded version's state is read, so older ones may be removed.
        """
        number = path.rpartition("/")[2].partition(".")[0]
        return number.isdecimal() and int(number) < self._get_state_version()

    def check_staged(self, files: Sequence[DataFile]) -> None:
        """Check that each staged file exists with the written size.

        The log would accept the name of a missing file, and readers would then fail.

        Raises:
            ConcurrentLoadError: a file is missing, and another process has committed since the last
                load: an erasure removes files that were staged before it.
            StoreError: a file is missing, or has another size.
        """
        sizes = {
            name: status.size
            for folder in {file.path.rpartition("/")[0] for file in files}
            for name, status in self.folders.list_files(folder).items()
        }
        for file in files:
            if sizes.get(file.path) != file.size:
                self._check_version()
                raise StoreError(
                    f"{self.folders.get_full_path(file.path)} was written with {file.size} bytes "
                    f"and now has {sizes.get(file.path, 'no file')}: nothing was committed; find "
                    "out what changes files there, and export again"
                )

    def _check_version(self) -> None:
        """Raise ConcurrentLoadError if the table has a newer version than the loaded version.

        Called for a missing file: an erasure may have removed the file, or the file was lost.
        """
        loaded = self.version
        with self._convert_errors():
            latest = DeltaTable(self.folders.address, storage_options=self._storage).version()
        if latest != loaded:
            raise ConcurrentLoadError(
                f"another process committed to {self.folders.root} and removed the files staged "
                "here: nothing was changed; run it again"
            )

    def _require_table(self) -> DeltaTable:
        """Return the loaded table, or raise SetupError if the path has none."""
        if self._table is None:
            raise SetupError(
                f"{self.folders.root} is not a Delta table: give the path of an export"
            )
        return self._table

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Convert deltalake's errors; a commit that lost a race is ConcurrentLoadError.

        The caller then loads the table again and plans anew.
        """
        try:
            yield
        except CommitFailedError as error:
            msg = (
                f"another process committed to {self.folders.root} first ({error}): nothing was "
                "changed; run it again"
            )
            raise ConcurrentLoadError(msg) from error
        except (DeltaError, OSError) as error:
            msg = (
                f"the Delta table at {self.folders.root} cannot be read or written: "
                f"{' '.join(str(error).split())}"
            )
            raise StoreError(msg) from error


def get_state_path(version: int) -> str:
    """Return the path of a version's state, relative to the root."""
    return f"{STATES}/{version}.json.gz"


def _format_stats(file: DataFile) -> str:
    """Format a file's statistics for the log of the Delta table.

    Readers skip files by these columns. Others are left out: their bounds would put contents of
    messages into the log.
    """
    stats: dict[str, Any] = {"numRecords": file.rows}
    if file.ids is not None and file.times is not None:
        low, high = (
            moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
            for moment in file.times
        )
        stats["minValues"] = {"id": file.ids[0], "archived_at": low}
        stats["maxValues"] = {"id": file.ids[1], "archived_at": high}
        stats["nullCount"] = {"id": 0, "archived_at": 0}
    return json.dumps(stats)
