"""The one place that knows the table's format: stage, commit, files, vacuum.

Spark's executors write Parquet to a folder of the attempt, `data/<uuid>/`. The driver writes the
state that the lake has then to `_state/`, and commits the files to the log of the Delta table by
deltalake. The commit names the state by the version of its application transaction, which
checkpoints keep: so both count from the same moment, and a process that dies before the commit
leaves a state that no version of the table names. No other module of the lake imports deltalake,
so another format needs another class with these methods.
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
"""The folder of states; vacuums of the table pass over folders whose names begin with `_`."""

APPLICATION = "sqlbroker"
"""The one application id of a table: every commit of ours takes a higher version of it, so that of
two plans made from the same state only one is committed."""

_ATTEMPT_BITS = 32
"""Of a version; random, so that two attempts at the same commit write states of their own."""

_NOTE = "sqlbroker"
"""Name of a commit's note, in its metadata: lakes had them before they had states."""

_SOURCE = "sqlbroker.source"
_PROPERTIES = {
    # Other columns' least and greatest values would put contents of messages into the log.
    "delta.dataSkippingStatsColumns": "id,archived_at",
}


logger = getLogger("faststream_sqlbroker.spark")


@dataclass(frozen=True)
class DataFile:
    """A Parquet file of the table, or one that was staged.

    Attributes:
        path: Below the table's root.
        size: In bytes.
        modified: When it was written, in milliseconds since 1970.
        rows: How many.
        ids: Least and greatest id; None if the log does not say.
        times: First and last `archived_at`; None if the log does not say.
    """

    path: str
    size: int
    modified: int
    rows: int = 0
    ids: tuple[int, int] | None = None
    times: tuple[datetime, datetime] | None = None

    def may_hold(self, start: datetime, end: datetime) -> bool:
        """Whether rows archived in [start, end) can be in it."""
        return self.times is None or (self.times[0] < end and self.times[1] >= start)


class DeltaWriter:
    """One Delta table, as it was when it was loaded last.

    Attributes:
        folders: Where its files are.
    """

    def __init__(self, folders: Folders, storage: Mapping[str, str] | None) -> None:
        self.folders = folders
        self._storage = dict(storage or {}) or None
        self._table: DeltaTable | None = None
        self.load()

    def load(self) -> None:
        """Read the log; what is planned after it is committed only if nothing came in between.

        Raises:
            SetupError: the table has deletion vectors, which a reader by the list of files would
                not see.
            StoreError: the log cannot be read.
        """
        address = self.folders.address
        with self._errors():
            if not DeltaTable.is_deltatable(address, self._storage):
                self._table = None
                return
            table = DeltaTable(address, storage_options=self._storage)
            if pa.table(table.deletion_vectors()).num_rows:
                raise SetupError(
                    f"{self.folders.root} has deletion vectors, and a reader by its list of files "
                    "would bring deleted rows back: have its files written again (REORG TABLE … "
                    "APPLY (PURGE)) and set delta.enableDeletionVectors to false"
                )
        self._table = table

    @property
    def exists(self) -> bool:
        """Whether there is a table."""
        return self._table is not None

    @property
    def version(self) -> int:
        """Of the table that was loaded."""
        return int(self._need().version())

    def source(self) -> dict[str, Any] | None:
        """What the table was made for; None if no export has made it."""
        text = self._need().metadata().configuration.get(_SOURCE)
        return None if text is None else dict(json.loads(text))

    def schema(self) -> StructType:
        """The table's schema as Spark's."""
        return StructType.fromJson(json.loads(self._need().schema().to_json()))

    def create(self, schema: StructType, source: Mapping[str, Any]) -> None:
        """Make the table; loads that of another process if it was faster."""
        with self._errors():
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
        """Add the columns that the table lacks, before a commit of files that have them."""
        known = set(self.schema().names)
        new = [one for one in Schema.from_json(schema.json()).fields if one.name not in known]
        if new:
            with self._errors():
                # Plans of others fail by it: it changes the schema.
                self._need().alter.add_columns(new, commit_properties=CommitProperties(None, 0))
            self.load()

    def stage(self, frame: DataFrame) -> list[DataFile]:
        """Write rows to a folder of this attempt; the files are no part of the table yet."""
        folder = f"{DATA}/{uuid.uuid4().hex}"
        files = list[DataFile]()
        with undo_on_error(self.folders.delete, folder):
            written = self.folders.write(frame, folder)
            for name, one in sorted(self.folders.files(folder).items()):
                if name in written:
                    files.append(DataFile(name, one.size, one.modified))
                else:  # Spark's mark of success, Hadoop's checksums, files of a failed task
                    self.folders.delete(name)
        return files

    def write_state(self, state: bytes) -> int:
        """Write what the lake has after the next commit; returns the version that it is for."""
        number = (self._version_of_state() >> _ATTEMPT_BITS) + 1
        version = (number << _ATTEMPT_BITS) + secrets.randbits(_ATTEMPT_BITS)
        place = state_place(version)
        with self._errors(), undo_on_error(self.folders.delete, place):
            with self._states().open_output_stream(place) as stream:
                stream.write(state)
            self.folders.sync([place])
        return version

    def commit(
        self,
        version: int,
        add: Sequence[DataFile],
        remove: Sequence[DataFile] = (),
        *,
        same_rows: bool = False,
    ) -> None:
        """Add and remove files in one step, if no other plan was committed since the last load.

        Args:
            version: Of the state that the lake has then, by `write_state`.
            add: Staged files.
            remove: Files of the table.
            same_rows: The table has the rows that it had, so that streams from it pass over it.

        Raises:
            ConcurrentLoadError: another process has; nothing was changed: load and plan again.
        """
        now = self.folders.now() if remove else 0
        changes = not same_rows
        actions: list[AddAction | RemoveAction] = [
            AddAction(one.path, one.size, {}, one.modified, changes, _stats(one)) for one in add
        ]
        actions += [RemoveAction(one.path, changes, now, one.size, {}) for one in remove]
        table = self._need()
        with self._errors():
            # No retries by the library: it would commit a plan made from an older state.
            properties = CommitProperties(None, 0, [Transaction(APPLICATION, version)])
            table.create_write_transaction(
                actions, mode="append", schema=table.schema(), commit_properties=properties
            )
        self.folders.sync([LOG])
        self.load()

    def states(self) -> list[bytes]:
        """Read the loaded table's state; of an older lake, the changes that make it, in order.

        There are none before the first commit, and where the state was lost.
        """
        version = self._version_of_state()
        if version < 1 << _ATTEMPT_BITS:
            return self._notes(version)
        try:
            with self._states().open_input_stream(state_place(version)) as stream:
                return [bytes(stream.read())]
        except FileNotFoundError:
            logger.warning(
                "%s is lost, and with it the records of all windows: nothing is pruned until an "
                "export and a repair have recorded them anew",
                self.state_path,
            )
            return []
        except OSError as error:
            msg = (
                f"{self.state_path} cannot be read ({' '.join(str(error).split())}): restore it, "
                "or remove it and repair the lake"
            )
            raise StoreError(msg) from error

    def _notes(self, last: int) -> list[bytes]:
        """Read what older commits have said in the log, in place of a state: they counted by one.

        The library may read commits that are newer than the files that were loaded.
        """
        if not last:
            return []
        with self._errors():
            notes = [one[_NOTE] for one in self._need().history() if _NOTE in one]
        numbered = sorted((json.loads(note)["number"], note) for note in notes)
        return [note.encode() for number, note in numbered if number <= last]

    @property
    def state_path(self) -> str:
        """The full path of the state, for messages."""
        return self.folders.path(state_place(self._version_of_state()))

    def _version_of_state(self) -> int:
        """Return the version of our last commit to the loaded table; 0 if there is none."""
        return self._need().transaction_version(APPLICATION) or 0

    def _states(self) -> Any:
        """Open the lake by the library that writes the log, with the same settings.

        PyArrow compresses what is named so.
        """
        return pa_fs.PyFileSystem(DeltaStorageHandler(self.folders.address, self._storage))

    def files(self) -> list[DataFile]:
        """The files that the table has, in the order of their times."""
        found = []
        for one in pa.table(self._need().get_add_actions(flatten=True)).to_pylist():
            ids = one.get("min.id"), one.get("max.id")
            times = one.get("min.archived_at"), one.get("max.archived_at")
            found.append(
                DataFile(
                    one["path"],
                    one["size_bytes"],
                    one["modification_time"],
                    one["num_records"] or 0,
                    None if None in ids else (int(ids[0]), int(ids[1])),
                    None if None in times else times,
                )
            )
        # Files without times come first: the order is that of the times, not of their text.
        return sorted(found, key=lambda one: (one.times is not None, one.times or (), one.path))

    def vacuum(self, hours: int, *, dry_run: bool = False) -> list[str]:
        """Remove files that were taken out of the table more than `hours` ago; their paths.

        Staged files of others are not touched, nor files that a checkpoint has forgotten. Earlier
        versions can no longer be read.
        """
        with self._errors():
            gone = self._need().vacuum(hours, dry_run=dry_run, enforce_retention_duration=False)
        self.load()
        return gone

    def sync(self) -> None:
        """Have all that the loaded table consists of written to the disk, if it is local."""
        states = [state_place(version)] if (version := self._version_of_state()) else []
        self.folders.sync([*(one.path for one in self.files()), *states, LOG])

    def is_older_state(self, place: str) -> bool:
        """Whether `place` is the state of a version before the loaded one."""
        number = place.rpartition("/")[2].partition(".")[0]
        return number.isdecimal() and int(number) < self._version_of_state()

    def check_staged(self, files: Sequence[DataFile]) -> None:
        """Look whether each staged file is there: the log takes names of files that are not.

        Raises:
            ConcurrentLoadError: one is, and another process has committed since the last load: an
                erasure removes what was staged before it.
            StoreError: one is missing, or has another size.
        """
        there = {
            name: found.size
            for folder in {one.path.rpartition("/")[0] for one in files}
            for name, found in self.folders.files(folder).items()
        }
        for one in files:
            if there.get(one.path) != one.size:
                self._refuse_if_moved_on()
                raise StoreError(
                    f"{self.folders.path(one.path)} was written with {one.size} bytes and now has "
                    f"{there.get(one.path, 'no file')}: nothing was committed; see who removes "
                    "files there, and export again"
                )

    def _refuse_if_moved_on(self) -> None:
        known = self.version
        with self._errors():
            newest = DeltaTable(self.folders.address, storage_options=self._storage).version()
        if newest != known:
            raise ConcurrentLoadError(
                f"another process has committed to {self.folders.root} since, and has removed what "
                "was staged here: nothing was changed; run it again"
            )

    def _need(self) -> DeltaTable:
        if self._table is None:
            raise SetupError(
                f"{self.folders.root} holds no Delta table: give the path of an export"
            )
        return self._table

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except CommitFailedError as error:
            msg = (
                f"another process has committed to {self.folders.root} since ({error}): nothing "
                "was changed; run it again"
            )
            raise ConcurrentLoadError(msg) from error
        except (DeltaError, OSError) as error:
            msg = f"the Delta table at {self.folders.root}: {' '.join(str(error).split())}"
            raise StoreError(msg) from error


def state_place(version: int) -> str:
    """Return the place of a version's state below the root."""
    return f"{STATES}/{version}.json.gz"


def _stats(file: DataFile) -> str:
    """Of the two columns by which readers may skip a file, and no others."""
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
