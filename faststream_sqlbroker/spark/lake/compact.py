"""Merge the small files of a lake."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.exceptions import ExportMismatchError
from faststream_sqlbroker.spark.lake.lake import Lake
from faststream_sqlbroker.spark.lake.row_checksums import compute_figures
from faststream_sqlbroker.spark.moments import Moment, parse_moment

TARGET_BYTES = 256 << 20
"""Bytes of a merged file: within the 128 to 512 MB that an export writes."""

_ADVICE = "Files of the lake are missing or changed: put the window's folder back from a copy"


@dataclass(frozen=True)
class CompactedWindow:
    """A window whose files were merged.

    Attributes:
        name: Such as 2026-03-01 or 2026-03-01T05, UTC.
        rows: As many as before.
        files_before: Parquet files that it had.
        files: That it has.
    """

    name: str
    rows: int
    files_before: int
    files: int


def compact_export(
    spark: SparkSession,
    path: str,
    *,
    since: Moment | None = None,
    until: Moment | None = None,
    target_bytes: int = TARGET_BYTES,
    on_window: Callable[[CompactedWindow], Any] | None = None,
) -> list[CompactedWindow]:
    """Merge the files of those windows of a lake that have more files than they need.

    Each is written aside, compared with the figures that the export has recorded, all of them, and
    only then moved to its place, as the export does it: a crash loses nothing, and running it twice
    changes nothing. Who reads a window while its folder is replaced may fail because a file is
    gone, and reads it again.

    Args:
        spark: A session; not Spark Connect. No driver is needed.
        path: Of the lake.
        since: Only windows that begin at or after this moment.
        until: Only windows that have ended by this moment.
        target_bytes: How large files are to become; a window of fewer bytes gets one.
        on_window: Called after each window.

    Returns:
        The windows that were written again.

    Raises:
        SetupError: nothing was exported to this path, or an option that cannot be.
        ExportMismatchError: a window's files are not what was exported: some are missing or
            changed. It is left as it is.
        ConcurrentLoadError: another process has begun to write to the path since.
        NotSupportedError: Spark Connect.
    """
    whole_number("target_bytes", target_bytes)
    first = parse_moment("since", since)
    end = parse_moment("until", until)
    lake = Lake(spark, path)
    lake.begin(lake.need_state()["source"])
    done = []
    for window in lake.windows():
        entry = lake.entry(window)
        if entry is None or (first and window.start < first) or (end and window.end > end):
            continue
        wanted = max(math.ceil(entry.bytes / target_bytes), 1)
        if entry.files <= wanted:
            continue
        frame = lake.read(window).coalesce(wanted).sortWithinPartitions("queue", "id")
        folder = lake.write(window, frame)
        found = compute_figures(lake.read_folder(folder), checksums=entry.lake.columns is not None)
        if found != entry.lake:
            raise ExportMismatchError(window.name, str(entry.lake), str(found), _ADVICE)
        files = lake.publish(window, folder, entry).files
        done.append(CompactedWindow(window.name, entry.lake.rows, entry.files, files))
        if on_window is not None:
            on_window(done[-1])
    lake.finish()
    return done
