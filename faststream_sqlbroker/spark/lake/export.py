"""Export the archive as Parquet: whole windows, each compared with the database before it
counts.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from logging import getLogger
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DateType, IntegerType, StructField, StructType
from sqlalchemy import URL

from faststream_sqlbroker.core.checks import one_of
from faststream_sqlbroker.core.loaded_windows import checked_lake
from faststream_sqlbroker.core.times import Duration, seconds_or_zero
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.spark.address import parse_address
from faststream_sqlbroker.spark.databases import database_of
from faststream_sqlbroker.spark.horizon import find_horizon
from faststream_sqlbroker.spark.lake.lake import Lake
from faststream_sqlbroker.spark.lake.records import Records, open_records
from faststream_sqlbroker.spark.lake.transfer import Job, bring
from faststream_sqlbroker.spark.lake.windows import LENGTHS, floor, plan_windows
from faststream_sqlbroker.spark.load.origin import describe_source
from faststream_sqlbroker.spark.load.schemas import ARCHIVE_SCHEMA
from faststream_sqlbroker.spark.load.selection import ARCHIVE, find_oldest, select_rows
from faststream_sqlbroker.spark.moments import Moment
from faststream_sqlbroker.spark.session import need_driver

logger = getLogger("faststream_sqlbroker.spark")

PAUSES = (0.1, 0.5, 2.0)
"""Seconds before files are listed again: a window may just be replaced."""

_PARTS = {"day": ["date"], "hour": ["date", "hour"]}
_FOLDERS = {"date": StructField("date", DateType()), "hour": StructField("hour", IntegerType())}


@dataclass(frozen=True)
class ExportedWindow:
    """The result of one window.

    Attributes:
        name: Such as 2026-03-01 or 2026-03-01T05, UTC.
        action: "exported"; "again" (rows had come since, and are in it now); "unchanged"; "left"
            (the database has fewer rows than the lake, which keeps them).
        rows: In the lake.
        files: Parquet files in the lake.
        bytes: Of the files.
        number: 1 for the first window of this run.
        total: How many windows this run looks at.
    """

    name: str
    action: str
    rows: int
    files: int
    bytes: int
    number: int
    total: int


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        path: Where to.
        windows: Those that this run looked at, in order.
        horizon: Windows that end later are not closed yet; by the database's clock.
        watermark: End of the windows that are in the lake without a gap; None if there are none.
    """

    path: str
    windows: tuple[ExportedWindow, ...]
    horizon: datetime
    watermark: datetime | None

    @property
    def rows(self) -> int:
        """How many rows were written."""
        return sum(one.rows for one in self.windows if one.action in ("exported", "again"))


def export_archive(
    spark: SparkSession,
    url: str | URL,
    path: str,
    *,
    window: Literal["day", "hour"] = "day",
    since: Moment | None = None,
    until: Moment | None = None,
    table: str = "message_archive",
    schema: str | None = None,
    queues: Iterable[str] | None = None,
    safety_lag: Duration = "5m",
    primary: str | URL | None = None,
    source: str | None = None,
    recheck: Duration = "24h",
    verify: Literal["checksums", "counts"] = "checksums",
    record_as: str | None = None,
    message_table: str = "message",
    on_window: Callable[[ExportedWindow], Any] | None = None,
    options: Mapping[str, str] | None = None,
) -> ExportResult:
    """Write the closed windows of the archive that the lake lacks; compare each with the database.

    Every window becomes a folder `date=2026-03-01` or `date=2026-03-01/hour=05` (UTC) of Parquet
    files (zstd, sorted by queue and id; the times as microseconds in UTC), about 128 to 512 MB
    each. It is written aside, read back, compared with what the database itself counts and sums,
    and only then moved to its place and recorded in `_sqlbroker/state.json`. A process may die at
    any moment: `read_export` never reads half a window, and the next run ends what was begun. A
    second run gives the same data. Readers other than `read_export` need a file system that renames
    a folder at once, as local disks and HDFS do: where folders are copied file by file (S3) they
    may find half a window. They may also miss a window that is written again, for the moment
    between two renames.

    Windows of the last `recheck`, and recorded ones between `since` and `until`, are compared with
    the database again: if it has rows that the lake lacks (a transaction that was open for longer
    than `safety_lag`) they are written again, with a warning. Rows that the database has lost
    since, because they were pruned or retried, stay in the lake.

    Args:
        spark: A session with the JDBC driver (`build_session`); not Spark Connect.
        url: SQLAlchemy URL of the database; its password is written nowhere.
        path: Of the lake, on any file system that Spark writes to. One path holds one archive, with
            the same window, table and queues each time.
        window: The length of a window, "day" or "hour".
        since: From the window that this moment lies in; None goes on where the last export ended,
            or begins with the oldest row.
        until: Only windows that have ended by this moment; None takes all that are closed.
        table: The archive table.
        schema: Its schema; MySQL and MariaDB: its database.
        queues: Only these queues; None takes all.
        safety_lag: How long a transaction may last where open ones cannot be seen; see
            `find_horizon`.
        primary: URL of the primary, if `url` is a standby.
        source: A name for the database in the state, where it has several addresses (a standby, a
            fail-over); None takes host, port and name, or the path of SQLite's file.
            `prune_archive` needs the same.
        recheck: Windows that ended within this time before the horizon are compared again.
        verify: "checksums" compares counts, sums of ids and times, bytes and checksums of payloads
            and of all other columns; "counts" leaves the last three out, and spares the database
            reading every row.
        record_as: A name for the lake. Each window that is in it is recorded in the database, for
            `Retention(unless_loaded_by=...)` of this name. Windows whose rows have changed since,
            or that have no record yet, are looked at again, whatever `recheck` and `since` say. It
            writes to `primary`, if that is given, and needs SELECT, INSERT and UPDATE on the
            policy state. Not with `queues`.
        message_table: The live table, with `record_as`: the policy state is named after it.
        on_window: Called after each window.
        options: More of Spark's JDBC options.

    Returns:
        What was done; windows appear in order.

    Raises:
        SetupError: an option is invalid, the session lacks the driver, or the path holds something
            else, such as the export of another database; `record_as` is the name of another
            lake.
        ExportMismatchError: twice in a row a window was not written as the database has it. The
            windows before it are in the lake, and the watermark stays before it.
        ConcurrentLoadError: another process has begun to write to the path since.
        StoreError: PostgreSQL: a window took longer than an hour, after which the server ends its
            snapshot. Or a window could not be recorded; it is in the lake.
        NotSupportedError: Spark Connect.
    """
    one_of("window", window, tuple(LENGTHS))
    one_of("verify", verify, ("checksums", "counts"))
    back = seconds_or_zero("recheck", recheck)
    if checked_lake("record_as", record_as) is not None and queues is not None:
        raise SetupError(
            "record_as= needs an export of all queues, as retention compares whole windows: leave "
            "queues= out"
        )
    selection = select_rows(ARCHIVE, table, schema, since=since, until=until, queues=queues)
    if selection.since is not None:
        selection = selection.between(floor(selection.since, window), selection.until)
    database = database_of(parse_address(url))
    need_driver(spark, database.jdbc_driver, database.kind)
    lake = Lake(spark, path)
    job = Job(lake, database, url, selection, verify == "checksums", options)
    done: list[ExportedWindow] = []
    with database.connect() as connection:
        horizon = find_horizon(database, connection, safety_lag=safety_lag, primary=primary)
        lake.begin({**describe_source(database.address, selection, source), "window": window})
        logger.info(
            "windows up to %s are closed: %s (%s)", horizon.moment, horizon.source, horizon.detail
        )
        oldest = find_oldest(database, connection, selection)
        planned = plan_windows(lake.windows(), window, selection, oldest, horizon.moment, back)
        with _records(lake, record_as, primary or url, message_table, schema) as records:
            if records is not None:
                planned = sorted({*planned, *records.lacking(lake.windows_with_rows())})
            for number, one in enumerate(planned, 1):
                action, entry, source_rows = bring(job, connection, one)
                if records is not None and entry.lake.rows:
                    records.write(one, source_rows)
                sizes = entry.lake.rows, entry.files, entry.bytes
                done.append(ExportedWindow(one.name, action, *sizes, number, len(planned)))
                if on_window is not None:
                    on_window(done[-1])
        lake.finish()
    return ExportResult(lake.folders.root, tuple(done), horizon.moment, lake.watermark())


def _records(
    lake: Lake, name: str | None, url: str | URL, message_table: str, schema: str | None
) -> AbstractContextManager[Records | None]:
    if name is None:
        return nullcontext()
    return open_records(name, lake.id, url, message_table, schema)


def read_export(spark: SparkSession, path: str) -> DataFrame:
    """The rows of a lake that `export_archive` wrote.

    Returns:
        A DataFrame of `ARCHIVE_SCHEMA`, then `date` (date) and, of a lake of hours, `hour` (int),
        both UTC; a filter on them reads only their folders. A dead letter that was exported and
        retried later is in it once for each time it was archived.

    Raises:
        SetupError: nothing was exported to this path, or for some seconds its files were not those
            that the state has recorded: some are missing, some are not of this export, or a window
            is being replaced.
        NotSupportedError: Spark Connect.
    """
    for pause in (0.0, *PAUSES):
        time.sleep(pause)
        lake = Lake(spark, path)
        lake.need_state()
        folders = [_FOLDERS[name] for name in _PARTS[lake.size]]
        schema = StructType([*ARCHIVE_SCHEMA.fields, *folders])
        frame = spark.read.schema(schema).parquet(lake.folders.root)
        problem = lake.incomplete(frame.inputFiles())
        if problem is None:
            return frame
        logger.info("read_export: %s", problem)
    raise SetupError(
        f"{problem}: read again if an export or a compaction runs there; run an export if one has "
        "died; else put the window's folder back from a copy, or move away what is no export's"
    )
