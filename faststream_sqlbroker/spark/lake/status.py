"""Describe what an export holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql import SparkSession

from faststream_sqlbroker.spark.lake.lake import Lake


@dataclass(frozen=True)
class LakeWindow:
    """One window of an export.

    Attributes:
        name: Such as 2026-03-01 or 2026-03-01T05, UTC.
        rows: In its files.
        files: Of Parquet.
        bytes: Of the files.
    """

    name: str
    rows: int
    files: int
    bytes: int


@dataclass(frozen=True)
class ExportStatus:
    """What an export holds, and up to when.

    Attributes:
        path: Where it is.
        source: What it is the export of; no user and no password.
        windows: In order, those without rows too.
        watermark: End of the windows that follow each other without a gap; None if there are none.
        pending: Name of the window that is being replaced; None if there is none.
    """

    path: str
    source: Mapping[str, Any]
    windows: tuple[LakeWindow, ...]
    watermark: datetime | None
    pending: str | None

    @property
    def rows(self) -> int:
        """The rows of all windows."""
        return sum(one.rows for one in self.windows)


def describe_export(spark: SparkSession, path: str) -> ExportStatus:
    """Describe an export by its state; no data is read.

    Raises:
        SetupError: nothing was exported to this path.
        NotSupportedError: Spark Connect.
    """
    lake = Lake(spark, path)
    state = lake.need_state()
    entries = [(window.name, lake.entry(window)) for window in lake.windows()]
    windows = [
        LakeWindow(name, one.lake.rows, one.files, one.bytes) for name, one in entries if one
    ]
    pending = state["pending"] and str(state["pending"]["window"])
    return ExportStatus(
        lake.folders.root, state["source"], tuple(windows), lake.watermark(), pending
    )
