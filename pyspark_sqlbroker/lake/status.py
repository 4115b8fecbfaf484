"""Describe what an export holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql import SparkSession

from pyspark_sqlbroker.lake.lake import Lake


@dataclass(frozen=True)
class LakeWindow:
    """One window of an export.

    Attributes:
        name: Such as 2026-03-01 or 2026-03-01T05, UTC.
        rows: In the lake.
    """

    name: str
    rows: int


@dataclass(frozen=True)
class ExportStatus:
    """What an export holds, and up to when.

    Attributes:
        path: Where it is.
        source: What it is the export of; no user and no password.
        windows: Those that have rows, in order.
        watermark: End of the windows that follow each other without a gap; None if there are none.
        files: Of Parquet, in the table.
        bytes: Of these files.
        version: Of the Delta table.
    """

    path: str
    source: Mapping[str, Any]
    windows: tuple[LakeWindow, ...]
    watermark: datetime | None
    files: int
    bytes: int
    version: int

    @property
    def rows(self) -> int:
        """The rows of all windows."""
        return sum(one.rows for one in self.windows)


def describe_export(
    spark: SparkSession, path: str, *, storage_options: Mapping[str, str] | None = None
) -> ExportStatus:
    """Describe an export by its log; no data is read.

    Raises:
        SetupError: nothing was exported to this path.
        NotSupportedError: Spark Connect.
    """
    lake = Lake(spark, path, storage_options)
    source = lake.need_source()
    entries = [(window.name, lake.entry(window)) for window in lake.windows()]
    windows = tuple(LakeWindow(name, one.lake.rows) for name, one in entries if one)
    size = sum(one.size for one in lake.files)
    return ExportStatus(
        lake.folders.root,
        source,
        windows,
        lake.watermark,
        len(lake.files),
        size,
        lake.table.version,
    )
