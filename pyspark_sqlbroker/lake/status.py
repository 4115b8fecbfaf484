"""What an export holds, and how far it is behind its archive."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql import SparkSession
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.core.times import Duration
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import ArchiveDatabase, database_of
from pyspark_sqlbroker.horizon import find_horizon
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.windows import Span, plan_spans
from pyspark_sqlbroker.load.selection import Selection, find_oldest
from pyspark_sqlbroker.store_errors import store_errors

MOST_COUNTED = 1_000_000
"""Rows up to which `measure_freshness` counts, unless it is asked for more."""


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


@dataclass(frozen=True)
class Freshness:
    """How far a lake is behind its archive, at one moment.

    Attributes:
        horizon: Windows that end by it are closed; by the database's clock.
        watermark: End of the windows that are in the lake without a gap; None if there are none.
        watermark_age: Seconds from the watermark until now, by the database's clock; None without
            a watermark. It grows until the next export, so with windows of a day and an export a
            day it reaches 24 hours, and the time from midnight until the export.
        rows_behind: Rows of closed windows that the lake does not cover: what an export now
            brings.
        capped: Whether there are more such rows than were counted; `rows_behind` is the cap then.
    """

    horizon: datetime
    watermark: datetime | None
    watermark_age: float | None
    rows_behind: int
    capped: bool


@store_errors(OSError)
def describe_export(
    spark: SparkSession, path: str, *, storage_options: Mapping[str, str] | None = None
) -> ExportStatus:
    """Describe an export by its log and its state; no data is read.

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
        lake.state.watermark,
        len(lake.files),
        size,
        lake.table.version,
    )


@store_errors(OSError)
def measure_freshness(
    spark: SparkSession,
    url: str | URL,
    path: str,
    *,
    cap: int = MOST_COUNTED,
    safety_lag: Duration = "5m",
    primary: str | URL | None = None,
    source: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Freshness:
    """Measure how far a lake is behind; neither the lake nor the database is changed.

    It counts the table and the queues that the lake is the export of. Rows of a window that is not
    closed yet are not behind. Rows that came late into a window that the lake has are not counted;
    `export_archive` finds them (`recheck=`).

    Args:
        spark: A session; it needs no JDBC driver. Not Spark Connect.
        url: SQLAlchemy URL of the database, with any driver.
        path: Of the lake.
        cap: Rows up to which are counted, so that a lake far behind costs the database no count of
            the whole archive.
        safety_lag: As for `export_archive`.
        primary: As for `export_archive`.
        source: As for `export_archive`: the name that the lake has for the database.
        storage_options: As for `export_archive`.

    Raises:
        SetupError: an option is invalid, nothing was exported to this path, the lake is of another
            database, or the archive table is gone.
        TransientStoreError: the standby did not replay far enough in time.
        NotSupportedError: Spark Connect; `primary` on another database than PostgreSQL.
    """
    whole_number("cap", cap)
    lake = Lake(spark, path, storage_options)
    lake.need_source()
    database = database_of(parse_address(url))
    selection = lake.select(database, source, advice="give the URL of its database")
    with database.connect() as connection:
        database.need_table(connection, selection.table, selection.schema)
        horizon = find_horizon(database, connection, safety_lag=safety_lag, primary=primary).moment
        oldest = find_oldest(database, connection, selection)
        lacking = plan_spans(lake.state.covered, lake.size, selection, oldest, horizon, 0)
        rows = _count(database, connection, selection, lacking, cap)
        now = database.now(connection)
    mark = lake.state.watermark
    age = None if mark is None else (now - mark).total_seconds()
    return Freshness(horizon, mark, age, min(rows, cap), rows > cap)


def _count(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    spans: Iterable[Span],
    cap: int,
) -> int:
    """Rows of some spans; counts one more than the cap at most."""
    rows = 0
    for start, end in spans:
        if rows > cap:
            break
        part = selection.between(start, end)
        found: Any = database.scalar(
            connection,
            f"SELECT count(*) FROM (SELECT 1 AS one {part.from_clause(database)} "
            f"LIMIT {cap + 1 - rows}) counted",
        )
        rows += int(found)
    return rows
