"""The contents of an export, and its lag behind the archive."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql import SparkSession
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.checks import validate_integer
from faststream_sqlbroker.core.times import Duration
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import ArchiveDatabase, get_database
from pyspark_sqlbroker.horizon import find_horizon
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.windows import Span, plan_spans
from pyspark_sqlbroker.load.selection import Selection, find_oldest
from pyspark_sqlbroker.store_errors import convert_store_errors

MAX_COUNTED = 1_000_000
"""Default number of rows up to which `measure_freshness` counts."""


@dataclass(frozen=True)
class LakeWindow:
    """One window of an export.

    Attributes:
        name: Such as 2026-03-01 or 2026-03-01T05, UTC.
        rows: Number of its rows in the lake.
    """

    name: str
    rows: int


@dataclass(frozen=True)
class ExportStatus:
    """The contents of an export.

    Attributes:
        path: Root of the lake.
        source: The exported database, table and queues; no user and no password.
        windows: The windows that have rows, in order.
        watermark: End of the windows that follow each other without a gap; None if there are none.
        files: Number of Parquet files in the table.
        bytes: Total size of these files.
        version: Version of the Delta table.
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
        """Total number of rows."""
        return sum(window.rows for window in self.windows)


@dataclass(frozen=True)
class Freshness:
    """The lag of a lake behind the archive, at the time of the measurement.

    Attributes:
        horizon: Windows that end at or before it are closed; by the database's clock.
        watermark: End of the windows that are in the lake without a gap; None if there are none.
        watermark_age: Seconds from the watermark until now, by the database's clock; None without a
            watermark. It grows until the next export: with windows of a day and a daily export, it
            reaches 24 hours plus the time from midnight until the export.
        rows_behind: Rows of closed windows that the lake does not cover and an export would add
            now.
        capped: True if there are more such rows than were counted; `rows_behind` is the cap then.
    """

    horizon: datetime
    watermark: datetime | None
    watermark_age: float | None
    rows_behind: int
    capped: bool


@convert_store_errors(OSError)
def describe_export(
    spark: SparkSession, path: str, *, storage_options: Mapping[str, str] | None = None
) -> ExportStatus:
    """Describe an export by the log and the state; no data is read.

    Raises:
        SetupError: nothing was exported to this path.
        NotSupportedError: Spark Connect.
    """
    lake = Lake(spark, path, storage_options)
    source = lake.require_source()
    entries = [(window.name, lake.get_entry(window)) for window in lake.list_windows()]
    windows = tuple(LakeWindow(name, entry.lake.rows) for name, entry in entries if entry)
    size = sum(file.size for file in lake.files)
    return ExportStatus(
        lake.folders.root,
        source,
        windows,
        lake.state.watermark,
        len(lake.files),
        size,
        lake.table.version,
    )


@convert_store_errors(OSError)
def measure_freshness(
    spark: SparkSession,
    url: str | URL,
    path: str,
    *,
    cap: int = MAX_COUNTED,
    safety_lag: Duration = "5m",
    primary: str | URL | None = None,
    source: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Freshness:
    """Measure the lag of a lake; neither the lake nor the database is changed.

    Only the exported table and queues are counted. Rows of a window that is not closed yet are not
    behind. Rows that came late into an exported window are not counted; `export_archive` finds them
    (`recheck=`).

    Args:
        spark: A session; it needs no JDBC driver. Not Spark Connect.
        url: SQLAlchemy URL of the database, with any driver.
        path: Root of the lake.
        cap: Maximum number of rows to count, so that the database need not count the whole archive
            for a lake far behind.
        safety_lag: As for `export_archive`.
        primary: As for `export_archive`.
        source: As for `export_archive`: the lake's name for the database.
        storage_options: As for `export_archive`.

    Raises:
        SetupError: an option is invalid, nothing was exported to this path, the lake is of another
            database, or the archive table is gone.
        TransientStoreError: the standby did not replay far enough in time.
        NotSupportedError: Spark Connect; `primary` on another database than PostgreSQL.
    """
    validate_integer("cap", cap)
    lake = Lake(spark, path, storage_options)
    lake.require_source()
    database = get_database(parse_address(url))
    selection = lake.select(database, source, hint="give the URL of its database")
    with database.connect() as connection:
        database.require_table(connection, selection.table, selection.schema)
        horizon = find_horizon(database, connection, safety_lag=safety_lag, primary=primary).time
        oldest = find_oldest(database, connection, selection)
        # With recheck=0 exported windows are left out: only windows that the lake lacks count.
        missing_spans = plan_spans(lake.state.covered, lake.size, selection, oldest, horizon, 0)
        rows = _count_rows(database, connection, selection, missing_spans, cap)
        now = database.get_time(connection)
    watermark = lake.state.watermark
    age = None if watermark is None else (now - watermark).total_seconds()
    return Freshness(horizon, watermark, age, min(rows, cap), rows > cap)


def _count_rows(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    spans: Iterable[Span],
    cap: int,
) -> int:
    """Count the rows of some spans, up to one more than the cap.

    The row above the cap shows that there are more rows than may be counted.
    """
    rows = 0
    for start, end in spans:
        if rows > cap:
            break
        part = selection.between(start, end)
        count: Any = database.fetch_scalar(
            connection,
            f"SELECT count(*) FROM (SELECT 1 AS one {part.build_from_clause(database)} "
            f"LIMIT {cap + 1 - rows}) counted",
        )
        rows += int(count)
    return rows
