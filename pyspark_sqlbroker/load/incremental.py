"""Rows archived since the last load: every row once, however late its transaction commits.

The progress of a series of loads is a small JSON file next to the data.
"""

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any, Literal, cast

from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.times import Duration, parse_positive
from faststream_sqlbroker.exceptions import ConcurrentLoadError, SetupError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import ArchiveDatabase, get_database
from pyspark_sqlbroker.horizon import Horizon, find_horizon
from pyspark_sqlbroker.horizon.base import Source, get_earlier
from pyspark_sqlbroker.lake.files import read_json, write_json
from pyspark_sqlbroker.load.decode import decode_payload
from pyspark_sqlbroker.load.read import open_snapshot, scan_rows
from pyspark_sqlbroker.load.selection import (
    ARCHIVE,
    Selection,
    check_same_source,
    describe_source,
    find_oldest,
    select_rows,
)
from pyspark_sqlbroker.moments import TimeInput, format_utc, parse_time

logger = logging.getLogger("faststream_sqlbroker.spark")

_NAME_TRANSLATION = str.maketrans({"-": None, ":": None, " ": "T"})

FORMAT = 1
"""Version of the file's layout; other versions are refused."""


@dataclass(frozen=True)
class Load:
    """One window of the archive.

    Attributes:
        frame: Its rows, of `ARCHIVE_SCHEMA`, and `body` if requested. The window is closed:
            evaluated again it has the same rows, unless rows are deleted.
        since: Start of the window; None is the oldest row.
        until: The first time after the window: the next load's `since`.
        horizon: Reason why the window ends no later.
        name: Name made from the window's start, fit for a folder; a repeated load has the same
            name. Write to a folder of this name with mode "overwrite", so that data left by a crash
            is replaced. Spark reads the folder above as one table, with the name as a column
            `since`.
    """

    frame: DataFrame
    since: datetime | None
    until: datetime
    horizon: Horizon

    @property
    def name(self) -> str:
        """Name such as `since=20260301T120000.000000Z`, or `since=start`."""
        if self.since is None:
            return "since=start"
        return f"since={format_utc(self.since).translate(_NAME_TRANSLATION)}Z"


@contextmanager
def new_rows(
    spark: SparkSession,
    url: str | URL,
    *,
    state: str,
    table: str = "message_archive",
    schema: str | None = None,
    since: TimeInput | None = None,
    queues: Iterable[str] | None = None,
    states: Iterable[str | MessageState] | None = None,
    safety_lag: Duration = "5m",
    margin: Duration = "2s",
    max_window: Duration | None = None,
    primary: str | URL | None = None,
    source: str | None = None,
    snapshot: bool = False,
    num_partitions: int | Literal["auto"] = "auto",
    decode: Any = None,
    options: Mapping[str, str] | None = None,
) -> Iterator[Load]:
    """Load the rows archived since the last load that ended well.

        with new_rows(spark, url, state="/lake/_state/orders.json") as load:
            load.frame.write.mode("overwrite").parquet(f"/lake/orders/{load.name}")

    Over all loads every row of the archive comes exactly once, in the order of `archived_at`,
    including rows whose transaction commits late, and messages that were retried for days and have
    an old id. The end of each window is written to `state` before the data is read, and its
    completion when the block has ended without an exception. After an exception or a crash the next
    load repeats the same window. If its server is behind the one of the failed load, it repeats the
    part that is complete there, and the rest comes with the following load.

    Run one load of a state at a time. If two run, the first to begin fails at its end, and the
    other's rows count. Drop the failed load's output, except folders that both wrote to, such as
    folders of the same `name`. If the failed load wrote to such a folder last, write the window
    that the other has logged to it again (`read_archive` with its `since` and `until`).

    Args:
        spark: A session with the JDBC driver (`build_session`).
        url: SQLAlchemy URL, with any driver; the password does not appear in plans, logs, errors or
            files.
        state: Path of a JSON file, on any file system that Spark writes to; keep it next to the
            data.
        table: The archive table.
        schema: Its schema; MySQL and MariaDB: its database.
        since: Start of the first load; None is the oldest row. Later loads ignore it: they start
            where the last load ended, or repeat the last window.
        queues: Only these queues; every load of a state must request the same queues.
        states: Only these states; every load of a state must request the same states.
        safety_lag: See `find_horizon`: longest duration of a transaction where open transactions
            cannot be seen.
        margin: See `find_horizon`: how long a statement may run before it becomes visible.
        max_window: Maximum duration of a window: a long history then comes in several loads. None
            has no limit.
        primary: URL of the primary of a PostgreSQL standby, see `find_horizon`.
        source: A name for the database in the state, where it has several addresses (a standby, a
            fail-over); None takes host, port and name.
        snapshot: True to read all partitions in one snapshot (PostgreSQL): rows that a retention
            job deletes during the load are then still read, and dropping a partition waits.
            Evaluate `frame` inside the block, within an hour: after that the server ends the
            snapshot.
        num_partitions: As for `read_archive`.
        decode: As for `read_archive`.
        options: As for `read_archive`.

    Yields:
        The window. It may be empty: its `since` then equals its `until`, or no row lies between.

    Raises:
        SetupError: An option is invalid, or `state` is of other rows or not a state file.
        ConcurrentLoadError: Another load of this state began or ended during this one; the state
            stays as that one wrote it.
        NotSupportedError: `snapshot` or `primary` on another database than PostgreSQL; Spark
            Connect.
        TransientStoreError: The standby did not reach the position of its primary in time.
        StoreError: Reading failed, and the server had ended the snapshot.
    """
    selection = select_rows(ARCHIVE, table, schema, since=since, queues=queues, states=states)
    max_duration = (
        None if max_window is None else timedelta(seconds=parse_positive("max_window", max_window))
    )
    # Race: the order of these steps makes each row come once, so they stay in one function: read
    # the watermark, find the horizon, take the snapshot, write the window's end, read, mark it
    # done.
    address = parse_address(url)
    database = get_database(address)
    file = WatermarkFile(spark, state, describe_source(address, selection, source))
    with ExitStack() as stack:
        with database.connect() as connection:
            watermark = file.read()
            is_new = watermark.until is None and watermark.pending_end is None
            first = selection.since if is_new else watermark.until
            end = find_horizon(
                database, connection, safety_lag=safety_lag, primary=primary, margin=margin
            )
            if watermark.pending_end is not None:
                # This may be another server, which is behind the server of the first try: read only
                # the part of the window that is complete here.
                end = get_earlier(watermark.pending_end, end)
            end = _limit_window(database, connection, selection, first, end, max_duration)
            until = end.time if first is None else max(first, end.time)
            nothing_new = until == first and watermark.pending_end is None
            new_watermark = (
                watermark if nothing_new else watermark.start_load(first, replace(end, time=until))
            )
            window = selection.between(first, until)
            # The snapshot comes after the horizon: an older one could lack rows before the horizon,
            # which no later load would read.
            shared_snapshot = stack.enter_context(open_snapshot(url)) if snapshot else None
            frame = scan_rows(
                spark, database, connection, window, num_partitions, shared_snapshot, options
            )
        if new_watermark != watermark:
            file.write(watermark, new_watermark)  # before any row is read
        _log_load(window, watermark, end)
        frame = frame if decode is None else decode_payload(frame, decode)
        yield Load(frame, first, until, end)
        if new_watermark != watermark:
            file.write(new_watermark, new_watermark.finish_load())


def _limit_window(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    first: datetime | None,
    end: Horizon,
    max_duration: timedelta | None,
) -> Horizon:
    """Limit the window to `max_duration` after `first`, or after the oldest selected row.

    A long history then comes in several loads. Without `first`, which is the end of the last load,
    the window begins at the oldest row; without any row there is nothing to limit.
    """
    if max_duration is not None and first is None:
        first = find_oldest(database, connection, selection.between(None, end.time))
    if max_duration is None or first is None:
        return end
    return replace(end, time=min(end.time, first + max_duration))


@dataclass(frozen=True)
class Watermark:
    """The content of the file.

    Attributes:
        source: Which rows of which table; no password.
        until: Rows archived before it are loaded or were not requested; None before the first load.
        load: A unique number of the last load that began.
        pending_end: The end of that load's window; None once the load has ended well.
    """

    source: Mapping[str, Any]
    until: datetime | None = None
    load: str = ""
    pending_end: Horizon | None = None

    def start_load(self, since: datetime | None, end: Horizon) -> "Watermark":
        """Return the watermark that announces a load of [since, end).

        Its new random number makes the end of any earlier load fail, as that load finds another
        number.
        """
        return replace(self, until=since, load=uuid.uuid4().hex, pending_end=end)

    def finish_load(self) -> "Watermark":
        """Return the watermark after a load that ended well, from which the next load starts.

        Without a pending end no load was announced, as there was nothing new.
        """
        if self.pending_end is None:
            return self
        return replace(self, until=self.pending_end.time, pending_end=None)


@dataclass(frozen=True)
class WatermarkFile:
    """The watermark file of a series of loads."""

    spark: SparkSession
    path: str
    source: dict[str, Any]

    def read(self) -> Watermark:
        """Read the watermark; a new watermark if there is no file.

        Raises:
            SetupError: it is not such a file, of a newer version, of other rows, or cannot be read.
        """
        content = read_json(self.spark, self.path)
        if content is None:
            return Watermark(self.source)
        if content.get("format") != FORMAT or not isinstance(content.get("source"), dict):
            raise SetupError(
                f"{self.path} is not a watermark file of this version: give another path in state="
            )
        check_same_source(
            f"{self.path} is the state",
            content["source"],
            self.source,
            "give each series of loads its own path",
        )
        try:
            return _parse_watermark(content, self.source)
        except (KeyError, TypeError) as error:
            msg = f"the watermark file {self.path} is damaged ({error}): restore it from a copy"
            raise SetupError(msg) from error

    def write(self, old: Watermark, new: Watermark) -> None:
        """Replace `old` by `new`, if the file still holds `old`.

        A load writes the end of its window before any row is read, and that it is done at the end:
        in between, another load of the same state would have written its own number.

        Raises:
            ConcurrentLoadError: the file no longer holds `old`; it is left unchanged.
        """
        # Race: this is not atomic, so two loads that begin at the same instant may both write. The
        # load whose number was overwritten fails at its end.
        current = self.read()
        if current != old:
            raise ConcurrentLoadError(
                f"another load changed {self.path} while this load ran, and the rows of the other "
                "load count: delete the output of this load, except folders that both loads wrote "
                "to (folders of the same name). If this load wrote to such a folder last, write "
                "the window that the other load logged to it again (read_archive with its since= "
                "and until=). Run one load of a state at a time"
            )
        write_json(self.spark, self.path, _render_watermark(new))


def _parse_watermark(content: Mapping[str, Any], source: Mapping[str, Any]) -> Watermark:
    """Parse the file's content; `begun` is the window of a load that has not finished.

    The next load repeats that window, or only its beginning if this server is behind or
    `max_window` is shorter now.
    """
    pending = content["begun"]
    end = None
    if pending is not None:
        time = cast("datetime", parse_time("until", pending["until"]))
        end = Horizon(time, cast("Source", pending["source"]), str(pending["detail"]))
    return Watermark(source, parse_time("until", content["until"]), str(content["load"]), end)


def _render_watermark(watermark: Watermark) -> dict[str, Any]:
    """Render the watermark as the file's content."""
    end = watermark.pending_end
    pending = end and {"until": end.time.isoformat(), "source": end.source, "detail": end.detail}
    until = None if watermark.until is None else watermark.until.isoformat()
    return {
        "format": FORMAT,
        "source": watermark.source,
        "until": until,
        "load": watermark.load,
        "begun": pending,
    }


def _log_load(window: Selection, watermark: Watermark, end: Horizon) -> None:
    """Log the window of a load, and the reason for the end."""
    first, until = (
        "the oldest row" if time is None else time.astimezone(timezone.utc).isoformat()
        for time in (window.since, window.until)
    )
    suffix = " again, because its last load did not finish" if watermark.pending_end else ""
    logger.info(
        "%s: loading rows archived from %s until %s%s; horizon by %s: %s",
        window.table,
        first,
        until,
        suffix,
        end.source,
        end.detail,
    )
