"""A lake that many tests begin with: exported once for each way of exporting it, then copied with
its database. What it is like is tested where exports are."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from pyspark_sqlbroker import export_archive
from tests.spark.conftest import Archive

_KEPT: dict[str, Path] = {}


def export_days(
    spark: SparkSession, archive: Archive, path: Path, *more: Mapping[str, Any], **options: Any
) -> None:
    """Fill an empty archive with three days of rows, and `more`, and export them to `path`.

    Each day is a commit with a file of its own, 1 March first.
    """
    # The lake names its database: SQLite's file has one path in all tests.
    file = Path(str(archive.engine.url.database))
    name = repr((file, more, sorted(options.items())))
    if name in _KEPT:
        archive.engine.dispose()
        shutil.copy(_KEPT[name] / "file", file)
        _copy(_KEPT[name] / "lake", path)
        return
    archive.add_days(3)
    for row in more:
        archive.add(row)
    span = {"since": "2026-03-01", "until": "2026-03-04"}
    export_archive(spark, archive.url, str(path), rows_per_commit=5, **span, **options)
    if archive.kind == "sqlite":
        archive.engine.dispose()
        kept = file.parent.parent / "lakes" / str(len(_KEPT))
        _copy(path, kept / "lake")
        shutil.copy(file, kept / "file")
        _KEPT[name] = kept


def _copy(folder: Path, into: Path) -> None:
    """With new times: what looks old may be cleaned up."""
    shutil.copytree(folder, into, copy_function=shutil.copy)
