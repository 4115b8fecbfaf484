"""What was archived since the last load: every row once, however late its transaction commits.

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
from faststream_sqlbroker.core.times import Duration, positive_seconds
from faststream_sqlbroker.exceptions import ConcurrentLoadError, SetupError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import ArchiveDatabase, database_of
from pyspark_sqlbroker.horizon import Horizon, find_horizon
from pyspark_sqlbroker.horizon.base import Source, earlier
from pyspark_sqlbroker.lake.files import read_json, write_json
from pyspark_sqlbroker.load.decode import decode_payload
from pyspark_sqlbroker.load.read import open_snapshot, scan
from pyspark_sqlbroker.load.selection import (
    ARCHIVE,
    Selection,
    describe_source,
    find_oldest,
    refuse_other_rows,
    select_rows,
)
from pyspark_sqlbroker.moments import Moment, parse_moment, utc_text

logger = logging.getLogger("faststream_sqlbroker.spark")

_COMPACT = str.maketrans({"-": None, ":": None, " ": "T"})

FORMAT = 1
"""Version of the file's layout; a file of another version is refused."""


@dataclass(frozen=True)
class Load:
    """One window of the archive.

    Attributes:
        frame: Its rows, of `ARCHIVE_SCHEMA`, and `body` if asked for. It is closed: evaluated again
            it has the same rows, unless rows are deleted.
        since: Where the window begins; None is the oldest row.
        until: The first moment that does not belong to it: the next load's `since`.
        horizon: Why the window ends no later.
        name: Of the window's begin, fit for a folder: a load that is repeated has it again. Write
            to a folder of this name with mode "overwrite", and what a crash left is replaced. Spark
            reads the folder above as one table, with the name as a column `since`.
    """

    frame: DataFrame
    since: datetime | None
    until: datetime
    horizon: Horizon

    @property
    def name(self) -> str:
        """`since=20260301T120000.000000Z`, or `since=start`."""
        if self.since is None:
            return "since=start"
        return f"since={utc_text(self.since).translate(_COMPACT)}Z"


@contextmanager
def new_rows(
    spark: SparkSession,
    url: str | URL,
    *,
    state: str,
    table: str = "message_archive",
    schema: str | None = None,
    since: Moment | None = None,
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
    """Load what was archived since the last load that ended well.

        with new_rows(spark, url, state="/lake/_state/orders.json") as load:
            load.frame.write.mode("overwrite").parquet(f"/lake/orders/{load.name}")

    Over all loads every row of the archive comes exactly once, in the order of `archived_at`: also
    rows whose transaction commits late, and messages that were retried for days and have an old id.
    The end of each window is written to `state` before the data is read, and that the window is
    done when the block has ended without an exception. After an exception or a crash the next load
    repeats the same window; where it asks a server that has not come as far as the one before, it
    repeats the part that is complete there, and the rest comes with the load after it.

    Run one load of a state at a time. Of two, the one that began first fails at its end, and the
    other's rows count: drop what the one that failed wrote, but no folder that both wrote to, as
    those of one `name` are. If the one that failed wrote to it last, write the window that the
    other has logged to it again (`read_archive` with its `since` and `until`).

    Args:
        spark: A session with the JDBC driver (`build_session`).
        url: SQLAlchemy URL, with any driver; the password appears in no plan, log, error or file.
        state: Path of a JSON file, on any file system that Spark writes to; keep it next to the
            data.
        table: The archive table.
        schema: Its schema; MySQL and MariaDB: its database.
        since: Where the first load begins; None is the oldest row. Later loads begin where the last
            ended, or where the one began that they repeat, and do not look at it.
        queues: Only these queues; every load of a state must ask for the same.
        states: Only these states; every load of a state must ask for the same.
        safety_lag: See `find_horizon`: how long a transaction may last where transactions cannot be
            seen.
        margin: See `find_horizon`: how long a statement may be under way before it can be seen.
        max_window: The longest window, as a length of time: a long history then comes in several
            loads. None takes all there is.
        primary: URL of the primary of a PostgreSQL standby, see `find_horizon`.
        source: A name for the database in the state, where it has several addresses (a standby, a
            fail-over); None takes host, port and name.
        snapshot: Whether all partitions see one snapshot (PostgreSQL): rows that a retention job
            deletes during the load are then still read, and dropping a partition waits. Evaluate
            `frame` inside the block, within an hour: after that the server ends the snapshot.
        num_partitions: As for `read_archive`.
        decode: As for `read_archive`.
        options: As for `read_archive`.

    Yields:
        The window. It may be empty: its `since` is then its `until`, or no row lies between.

    Raises:
        SetupError: An option is invalid, or `state` is of other rows or not a state file.
        ConcurrentLoadError: Another load of this state began or ended during this one; the state
            stays as that one wrote it.
        NotSupportedError: `snapshot` or `primary` on another database than PostgreSQL; Spark
            Connect.
        TransientStoreError: The standby did not come as far as its primary in time.
        StoreError: Reading failed, and the server had ended the snapshot.
    """
    selection = select_rows(ARCHIVE, table, schema, since=since, queues=queues, states=states)
    longest = (
        None
        if max_window is None
        else timedelta(seconds=positive_seconds("max_window", max_window))
    )
    # The order of these steps makes each row come once, so they stay in one function: read the
    # watermark, find the horizon, take the snapshot, write the window's end, read, mark it done.
    address = parse_address(url)
    database = database_of(address)
    file = WatermarkFile(spark, state, describe_source(address, selection, source))
    with ExitStack() as stack:
        with database.connect() as connection:
            found = file.read()
            first = found.until if found.until is not None or found.begun else selection.since
            end = find_horizon(
                database, connection, safety_lag=safety_lag, primary=primary, margin=margin
            )
            if found.begun is not None:
                # This server may be another one, which is behind the server of the first try: only
                # the part of the window that is complete here is read.
                end = earlier(found.begun, end)
            end = _shorten(database, connection, selection, first, end, longest)
            until = end.moment if first is None else max(first, end.moment)
            nothing_new = until == first and found.begun is None
            mark = found if nothing_new else found.begin(first, replace(end, moment=until))
            window = selection.between(first, until)
            # The snapshot comes after the horizon: an older one could lack rows before the horizon,
            # which no later load would read.
            held = stack.enter_context(open_snapshot(url)) if snapshot else None
            frame = scan(spark, database, connection, window, num_partitions, held, options)
        if mark != found:
            file.write(found, mark)  # before any row is read
        _log(window, found, end)
        frame = frame if decode is None else decode_payload(frame, decode)
        yield Load(frame, first, until, end)
        if mark != found:
            file.write(mark, mark.finish())


def _shorten(
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    first: datetime | None,
    end: Horizon,
    longest: timedelta | None,
) -> Horizon:
    """No later than `longest` after `first`, or after the oldest selected row."""
    if longest is None:
        return end
    if first is None:
        first = find_oldest(database, connection, selection.between(None, end.moment))
    if first is None:
        return end
    return replace(end, moment=min(end.moment, first + longest))


@dataclass(frozen=True)
class Watermark:
    """What the file holds.

    Attributes:
        source: Which rows of which table; no password.
        until: Rows archived before it are loaded or not asked for; None before the first load.
        load: A unique number of the last load that began.
        begun: The end of that load's window; None once the load has ended well.
    """

    source: Mapping[str, Any]
    until: datetime | None = None
    load: str = ""
    begun: Horizon | None = None

    def begin(self, since: datetime | None, end: Horizon) -> "Watermark":
        """Begin a load of [since, end); an earlier load can then no longer change the file."""
        return replace(self, until=since, load=uuid.uuid4().hex, begun=end)

    def finish(self) -> "Watermark":
        """The watermark after a load that ended well."""
        return self if self.begun is None else replace(self, until=self.begun.moment, begun=None)


@dataclass(frozen=True)
class WatermarkFile:
    """The file of one series of loads."""

    spark: SparkSession
    path: str
    source: dict[str, Any]

    def read(self) -> Watermark:
        """What it holds; a new one where there is no file.

        Raises:
            SetupError: it is not such a file, of a newer version, of other rows, or cannot be read.
        """
        content = read_json(self.spark, self.path)
        if content is None:
            return Watermark(self.source)
        if content.get("format") != FORMAT or not isinstance(content.get("source"), dict):
            raise SetupError(
                f"{self.path} is no watermark that this version can read: give another path in "
                "state="
            )
        refuse_other_rows(
            f"{self.path} is the state",
            content["source"],
            self.source,
            "give each series of loads its own path",
        )
        try:
            return _parse(content, self.source)
        except (KeyError, TypeError) as error:
            msg = f"{self.path} is a damaged watermark ({error}): restore it from a copy"
            raise SetupError(msg) from error

    def write(self, old: Watermark, new: Watermark) -> None:
        """Replace `old` by `new`.

        Raises:
            ConcurrentLoadError: the file does not hold `old` any more; it stays as it is.
        """
        # Not atomic: two loads that begin at the same instant may both write. The one whose number
        # was overwritten fails at its end.
        found = self.read()
        if found != old:
            raise ConcurrentLoadError(
                f"another load changed {self.path} while this one ran, and that one's rows count: "
                "drop what this one wrote, but no folder that both wrote to, as those of one name "
                "are; if this one wrote to it last, write the window that the other has logged to "
                "it again (read_archive with its since= and until=); run one load of a state at a "
                "time"
            )
        write_json(self.spark, self.path, _render(new))


def _parse(content: Mapping[str, Any], source: Mapping[str, Any]) -> Watermark:
    begun = content["begun"]
    end = None
    if begun is not None:
        moment = cast("datetime", parse_moment("until", begun["until"]))
        end = Horizon(moment, cast("Source", begun["source"]), str(begun["detail"]))
    return Watermark(source, parse_moment("until", content["until"]), str(content["load"]), end)


def _render(mark: Watermark) -> dict[str, Any]:
    end = mark.begun
    begun = end and {"until": end.moment.isoformat(), "source": end.source, "detail": end.detail}
    until = None if mark.until is None else mark.until.isoformat()
    return {
        "format": FORMAT,
        "source": mark.source,
        "until": until,
        "load": mark.load,
        "begun": begun,
    }


def _log(window: Selection, found: Watermark, end: Horizon) -> None:
    """One line a load."""
    first, until = (
        "the oldest row" if moment is None else moment.astimezone(timezone.utc).isoformat()
        for moment in (window.since, window.until)
    )
    again = " again, as the last load of it did not end well" if found.begun else ""
    logger.info(
        "%s: rows archived from %s until %s%s; by %s: %s",
        window.table,
        first,
        until,
        again,
        end.source,
        end.detail,
    )
