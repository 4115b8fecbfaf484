"""An export on disk: its windows, its state, and the safe replacement of a window's folder.

A window is written to `_sqlbroker/staging` and compared there. It is noted in the state as pending,
then moved to its place. The folder that it replaces stays in `_sqlbroker/replaced` until that is
done. If a process dies at any point, `Lake.recover` finds the note and ends what was begun: the
row checksums tell which folder is right.

Each run has folders of its own, and looks before each move whether another run has begun. Of two
runs that start at the same moment one stops. If it stops in the middle of a replacement, `put_back`
returns what it has set aside.
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from faststream_sqlbroker.core.distribution import DISTRIBUTION
from faststream_sqlbroker.exceptions import ConcurrentLoadError, SetupError
from faststream_sqlbroker.spark.lake.aside import ASIDE, put_back
from faststream_sqlbroker.spark.lake.entries import Entry, entries_of, entry_from_json
from faststream_sqlbroker.spark.lake.files import read_json, write_json
from faststream_sqlbroker.spark.lake.folders import Folders
from faststream_sqlbroker.spark.lake.row_checksums import NOTHING, compute_figures
from faststream_sqlbroker.spark.lake.windows import ExportWindow, first_gap, parse_window
from faststream_sqlbroker.spark.load.origin import refuse_other_rows
from faststream_sqlbroker.spark.load.schemas import ARCHIVE_SCHEMA

STATE = "_sqlbroker/state.json"
STAGING = "_sqlbroker/staging"
FORMAT = 1
"""Version of the state's layout; a state of another version is refused."""

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Few programs but Spark read the older INT96, and it has no statistics for filters.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    # A file that is gone must show as missing rows with an error, never as fewer rows.
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
}


class Lake:
    """The export below one path; raises SetupError if its state is damaged or of another version.

    Attributes:
        session: Like the given session, with settings of its own.
        folders: What is on disk.
        state: As it was last read or written; None before the first export.
    """

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.folders = Folders(spark, path)
        self.session: SparkSession = spark.newSession()
        for name, value in _SETTINGS.items():
            self.session.conf.set(name, value)
        self._run = secrets.token_hex(8)
        self.state: dict[str, Any] | None = None
        self._entries: dict[str, Entry] = {}
        self._read_state()

    @property
    def size(self) -> str:
        """The length of its windows: "day" or "hour"."""
        assert self.state is not None  # noqa: S101 - callers begin first
        return str(self.state["source"]["window"])

    @property
    def id(self) -> str:
        """Random, drawn once: tells this lake from others; it is begun."""
        return str(self.need_state()["id"])

    def need_state(self) -> dict[str, Any]:
        """The state.

        Raises:
            SetupError: nothing was exported to this path.
        """
        if self.state is None:
            raise SetupError(f"{self.folders.path(STATE)} is not there: give the path of an export")
        return self.state

    def begin(self, source: Mapping[str, Any]) -> None:
        """Take over as the only writer here, and end what a dead process has begun.

        Raises:
            SetupError: the path holds data without a state, or the export of something else.
            ConcurrentLoadError: another process writes here in this moment.
        """
        self._read_state()  # another export may have ended since
        if self.state is None:
            data = [name for name in self.folders.names() if name.startswith("date=")]
            if data:
                raise SetupError(
                    f"{self.folders.root} has {data[0]} and no {STATE}: give an empty path, or put "
                    "the state back; an export never overwrites what it does not know"
                )
            self.state = {"format": FORMAT, "source": dict(source), "pending": None, "windows": {}}
        else:
            refuse_other_rows(
                f"{self.folders.root} is the export",
                self.state["source"],
                source,
                "give each export its own path",
            )
        self.state |= {"package": _version(), "run": self._run}
        self.state.setdefault("id", self._run)
        write_json(self.session, self.folders.path(STATE), self.state)
        self._read_state()  # one that was overtaken may have written in the same moment
        self.confirm()
        self.recover()
        self._put_back()
        self.folders.delete(STAGING)

    def entry(self, window: ExportWindow) -> Entry | None:
        """The record of a window; None if it was not exported."""
        return self._entries.get(window.name)

    def windows(self) -> list[ExportWindow]:
        """The recorded windows, in order."""
        return sorted(parse_window(name, self.size) for name in self._entries)

    def windows_with_rows(self) -> list[ExportWindow]:
        """Those of the recorded windows that are not empty."""
        return [one for one in self.windows() if self._entries[one.name].lake.rows]

    def incomplete(self, paths: Iterable[str]) -> str | None:
        """Where there are other files than were recorded, given those that a reader has found."""
        # Schemes are spelt in several ways (file:/, file:///), the folders are not.
        folders = [path.rpartition("/")[0] for path in paths]
        found = Counter(folder[folder.rfind("/date=") + 1 :] for folder in folders)
        for window in self.windows():
            recorded = self._entries[window.name].files
            there = found.pop(window.folder, 0)
            if recorded != there:
                return (
                    f"window {window.name} of {self.folders.root} has {there} files, and not "
                    f"{recorded}"
                )
        return (
            f"{min(found)} of {self.folders.root} has files that are not recorded"
            if found
            else None
        )

    def read(self, window: ExportWindow) -> DataFrame:
        """The rows that the lake has of a window."""
        return self.read_folder(window.folder)

    def read_folder(self, folder: str) -> DataFrame:
        """Rows of a folder of Parquet files; none if there is no such folder."""
        if not self.folders.exists(folder):
            return self.session.createDataFrame([], ARCHIVE_SCHEMA)
        return self.session.read.schema(ARCHIVE_SCHEMA).parquet(self.folders.path(folder))

    def write(self, window: ExportWindow, frame: DataFrame) -> str:
        """Write rows to a staging folder; returns that folder."""
        folder = f"{STAGING}/{self._run}/{window.name}"
        frame.write.mode("overwrite").option("compression", "zstd").parquet(
            self.folders.path(folder)
        )
        return folder

    def publish(self, window: ExportWindow, folder: str, entry: Entry) -> Entry:
        """Put a folder that was compared in the window's place and record it.

        Returns:
            The entry with the files' number and size.

        Raises:
            ConcurrentLoadError: another process has begun to write here.
        """
        sizes = self.folders.sizes(folder)
        entry = replace(entry, files=len(sizes), bytes=sum(sizes))
        aside = f"{ASIDE}/{self._run}/{window.name}"
        pending = {
            "window": window.name,
            "folder": folder,
            "aside": aside,
            "entry": entry.to_json(),
        }
        self._save({"pending": pending})
        self._swap(window, folder, aside)
        self._record(window, entry, aside)
        return entry

    def note_empty(self, window: ExportWindow) -> Entry:
        """Record a window without rows and without a folder; written with the next that has rows,
        or at the end.

        Returns:
            Its entry.
        """
        self._entries[window.name] = Entry(NOTHING, NOTHING.counts)
        return self._entries[window.name]

    def finish(self) -> None:
        """Write the notes to the state, and remove what was set aside.

        Raises:
            ConcurrentLoadError: another process has begun to write here.
        """
        self.flush()
        self.folders.delete(f"{STAGING}/{self._run}")
        self.folders.delete_empty(STAGING)
        self._put_back()  # one that was overtaken may have set a window aside since

    def flush(self) -> None:
        """Write the state, with all notes.

        Raises:
            ConcurrentLoadError: another process has begun to write here.
        """
        listed = {name: one.to_json() for name, one in sorted(self._entries.items())}
        mark = self.watermark()
        watermark = None if mark is None else mark.isoformat()
        self._save({"pending": None, "windows": listed, "watermark": watermark})

    def recover(self) -> None:
        """End a replacement that was begun: go on if the new rows are complete, else go back."""
        pending = self.need_state()["pending"]
        if pending is None:
            return
        window = parse_window(pending["window"], self.size)
        entry = entry_from_json(pending["entry"])
        aside = pending["aside"]
        if not self._holds(window.folder, entry):
            if not self._holds(pending["folder"], entry):
                self._restore(window, aside)
                return
            self._swap(window, pending["folder"], aside)
        sizes = self.folders.sizes(window.folder)
        self._record(window, replace(entry, files=len(sizes), bytes=sum(sizes)), aside)

    def _put_back(self) -> None:
        put_back(self.folders, self._entries, self.size, self._holds, self.confirm)

    def _holds(self, folder: str, entry: Entry) -> bool:
        if not self.folders.exists(folder):
            return False
        checksums = entry.lake.columns is not None
        return compute_figures(self.read_folder(folder), checksums=checksums) == entry.lake

    def _swap(self, window: ExportWindow, folder: str, aside: str) -> None:
        if self.folders.exists(window.folder):
            self.confirm()
            if self.folders.exists(aside):
                # Only what a broken rename left half done is in its place twice.
                self.folders.delete(window.folder)
            else:
                self.folders.move(window.folder, aside)
        self.confirm()
        self.folders.move(folder, window.folder)

    def _restore(self, window: ExportWindow, aside: str) -> None:
        before = self.entry(window)
        if before is None:
            self.folders.delete(window.folder)
        elif self.folders.exists(aside) and not self._holds(window.folder, before):
            self.confirm()
            self.folders.delete(window.folder)
            self.folders.move(aside, window.folder)
        self._save({"pending": None})

    def _record(self, window: ExportWindow, entry: Entry, aside: str) -> None:
        self._entries[window.name] = entry
        self.flush()
        self.folders.delete(aside)

    def watermark(self) -> datetime | None:
        """The end of the first run of windows without a gap."""
        return first_gap(self.windows())

    def confirm(self) -> None:
        """Check that no other process has begun to write here.

        Raises:
            ConcurrentLoadError: another process has.
        """
        there = self._load()
        if there is None or there.get("run") != self._run:
            raise ConcurrentLoadError(
                f"another process has begun to write to {self.folders.root} since; stopping: "
                "run one export of a path at a time"
            )

    def _read_state(self) -> None:
        self.state = self._load()
        path = self.folders.path(STATE)
        self._entries = {} if self.state is None else entries_of(self.state, path)

    def _load(self) -> dict[str, Any] | None:
        state = read_json(self.session, self.folders.path(STATE))
        if state is not None and state.get("format") != FORMAT:
            raise SetupError(
                f"{self.folders.path(STATE)} has format {state.get('format')!r}, this version "
                f"knows {FORMAT}: use the version that wrote it"
            )
        return state

    def _save(self, change: Mapping[str, Any]) -> None:
        self.confirm()
        self.state = {**self.need_state(), **change}
        write_json(self.session, self.folders.path(STATE), self.state)


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"  # a folder that was put on the path
