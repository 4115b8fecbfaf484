"""Merge the small files of a lake, and remove those that no version needs any more."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql import SparkSession

from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.core.times import Duration, seconds_or_zero
from faststream_sqlbroker.exceptions import ExportMismatchError
from pyspark_sqlbroker.lake.delta import DataFile
from pyspark_sqlbroker.lake.entries import Note
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.row_checksums import compute_windows
from pyspark_sqlbroker.lake.windows import ExportWindow, floor
from pyspark_sqlbroker.moments import Moment, parse_moment

TARGET_BYTES = 256 << 20
"""Bytes of a merged file: what readers of Parquet like best."""


@dataclass(frozen=True)
class CompactedFiles:
    """Files that were merged to one.

    Attributes:
        name: The first and the last window of their rows, such as "2026-03-01 to 2026-03-07", UTC.
        rows: As many as before.
        files_before: How many files they were.
        bytes: Of the merged file.
    """

    name: str
    rows: int
    files_before: int
    bytes: int


def compact_export(
    spark: SparkSession,
    path: str,
    *,
    since: Moment | None = None,
    until: Moment | None = None,
    target_bytes: int = TARGET_BYTES,
    keep: Duration = "168h",
    on_file: Callable[[CompactedFiles], Any] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> list[CompactedFiles]:
    """Merge small files of a lake that follow each other in time.

    The files are compared with the SHA-256 in the log, the merged file with the figures of their
    windows, and only then one commit replaces them. A crash loses nothing, and running it twice
    changes nothing. Exports may run at the same time: of two plans one commits, and the other is
    made again. Files that were replaced more than `keep` ago are removed. Until then readers that
    have begun go on, and earlier versions can be read.

    Args:
        spark: A session; not Spark Connect. No driver is needed.
        path: Of the lake.
        since: Only files whose rows were archived at or after this moment.
        until: Only files whose rows were archived before this moment.
        target_bytes: How large files are to become; larger ones are left as they are.
        keep: How long replaced files stay, rounded up to whole hours.
        on_file: Called after each merged file.
        storage_options: See `export_archive`.

    Returns:
        What was merged.

    Raises:
        SetupError: nothing was exported to this path, or an option that cannot be.
        ExportMismatchError: files are not as they were committed. They are left as they are.
        ConcurrentLoadError: other processes have committed each time that this one wanted to.
        NotSupportedError: Spark Connect.
    """
    whole_number("target_bytes", target_bytes)
    hours = math.ceil(seconds_or_zero("keep", keep) / 3600)
    first = parse_moment("since", since)
    end = parse_moment("until", until)
    lake = Lake(spark, path, storage_options)
    lake.need_source()
    done = list[CompactedFiles]()

    def merge_all() -> None:
        while groups := _groups(lake, first, end, target_bytes):
            done.append(_merge(lake, groups[0]))
            if on_file is not None:
                on_file(done[-1])

    lake.plan_again(merge_all)
    lake.plan_again(lambda: _vacuum(lake, hours))
    return done


def _vacuum(lake: Lake, hours: int) -> None:
    lake.table.vacuum(hours)
    lake.load()


def _groups(
    lake: Lake, first: datetime | None, end: datetime | None, target_bytes: int
) -> list[list[DataFile]]:
    """Neighbours in time of which none is large, each group of the target's size at most."""
    groups = list[list[DataFile]]()
    group = list[DataFile]()
    size = 0
    for one in lake.files:
        # A merged file may be somewhat smaller than the target: half of it is large enough.
        if one.size * 2 > target_bytes or not _inside(one, first, end):
            continue
        if group and size + one.size > target_bytes:
            groups.append(group)
            group = []
            size = 0
        group.append(one)
        size += one.size
    groups.append(group)
    return [one for one in groups if len(one) > 1]


def _inside(file: DataFile, first: datetime | None, end: datetime | None) -> bool:
    if file.times is None:
        return False
    return (first is None or file.times[0] >= first) and (end is None or file.times[1] < end)


def _merge(lake: Lake, files: Sequence[DataFile]) -> CompactedFiles:
    # A merged file gets a SHA-256, so it must not have rows that were compared with nothing.
    problems = lake.altered(files) | lake.unrecorded_of(files)
    for name, problem in problems.items():
        raise ExportMismatchError(
            name, "the bytes that were committed", problem, "Run sqlbroker archive repair"
        )
    before = compute_windows(lake.read_files(files), lake.size, checksums=True)
    staged, found = lake.stage(lake.read_files(files).coalesce(1), checksums=True)
    for window in sorted({*before, *found}):
        if before.get(window) != found.get(window):
            lake.discard(staged)
            raise ExportMismatchError(
                window.name, str(before.get(window)), str(found.get(window)), "Try again"
            )
    lake.commit(Note("compact"), staged, files, same_rows=True)
    return CompactedFiles(
        _span(lake, files),
        sum(one.rows for one in before.values()),
        len(files),
        sum(one.size for one in staged),
    )


def _span(lake: Lake, files: Sequence[DataFile]) -> str:
    times = [one.times for one in files if one.times is not None]
    ends = min(one[0] for one in times), max(one[1] for one in times)
    first, last = (ExportWindow(floor(one, lake.size), lake.size).name for one in ends)
    return first if first == last else f"{first} to {last}"
