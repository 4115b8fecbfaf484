"""The tables as DataFrames by JDBC, and one moment for every connection that reads (PostgreSQL)."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy import URL, Connection
from sqlalchemy.exc import SQLAlchemyError

from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, positive_seconds
from faststream_sqlbroker.exceptions import NotSupportedError, SetupError, StoreError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import ArchiveDatabase, database_of
from pyspark_sqlbroker.databases.base import Size
from pyspark_sqlbroker.drivers import java_of
from pyspark_sqlbroker.load.decode import decode_payload
from pyspark_sqlbroker.load.selection import (
    ARCHIVE,
    MESSAGES,
    Selection,
    find_oldest,
    select_rows,
)
from pyspark_sqlbroker.moments import Moment
from pyspark_sqlbroker.session import need_driver
from pyspark_sqlbroker.store_errors import store_errors

LOCK_PATIENCE = 60
"""Seconds that a reader waits for a lock on the table.

A session that asked for an exclusive lock waits for the end of the snapshot, and a reader that
comes later queues behind that session: without a limit they would wait for each other."""


@dataclass(frozen=True)
class Snapshot:
    """A moment that is held open.

    Attributes:
        number: PostgreSQL's name for it, valid until its context ends.
        taken_at: When it was taken, by the database's clock.
        connection: Holds it in a transaction; queries on this connection see the same rows.
    """

    number: str
    taken_at: datetime
    connection: Connection

    @property
    def statement(self) -> str:
        """What another connection runs first to see the same rows."""
        return (
            "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; "
            f"SET TRANSACTION SNAPSHOT '{self.number}'; "
            f"SET LOCAL lock_timeout = '{LOCK_PATIENCE}s'"
        )

    def keep(self, table: str) -> None:
        """Lock `table` (quoted) and its partitions against DROP, TRUNCATE and rewrites.

        Rows are in a snapshot only as long as their table is there.
        """
        self.connection.exec_driver_sql(f"SELECT 1 FROM {table} LIMIT 0")


EXACT_SINCE = datetime(1900, 1, 1, tzinfo=timezone.utc)
"""Of JDBC's timestamps Spark shifts earlier ones (PostgreSQL): by days that Java's older calendar
has not, and by the minutes between local mean time and that of Java's zone."""


@contextmanager
def open_snapshot(url: str | URL, *, max_duration: Duration = "1h") -> Iterator[Snapshot]:
    """Hold one snapshot of PostgreSQL for all the connections of all the readers it is given to.

    Every action on the DataFrames must happen inside the context: they are lazy, and when it has
    ended they fail with "invalid snapshot identifier". While it is open vacuum cannot remove what
    others delete, so the server ends it when `Snapshot.connection` has been idle for
    `max_duration`; each statement on it begins that time anew, whatever the readers do.

    From the moment a DataFrame of a table is made, statements that drop the table or one of its
    partitions (`prune_archive` too), truncate it, or rewrite it (VACUUM FULL, CLUSTER) wait for the
    end of the context. A reader that begins while such a statement waits fails with "lock timeout"
    after a minute.

    Args:
        url: SQLAlchemy URL of the database that is read.
        max_duration: How long it stays open without a statement on its own connection, in seconds
            or as text such as "30m".

    Raises:
        StoreError: the database cannot be reached, or refuses; or reading failed, and the server
            had ended the snapshot.
        NotSupportedError: MySQL, MariaDB and SQLite have no snapshot that connections can share;
            readers close their window by the database's clock there.
    """
    seconds = positive_seconds("max_duration", max_duration)
    database = database_of(parse_address(url))
    if not database.shares_snapshots:
        raise NotSupportedError(
            f"{database.kind} has no snapshot that connections share, PostgreSQL has: read closed "
            "windows (since=, until=) there"
        )
    with ExitStack() as stack:
        with store_errors():  # those in the block are the caller's own
            connection = stack.enter_context(database.open())
            connection.exec_driver_sql(
                f"SET idle_in_transaction_session_timeout = '{int(seconds * 1000)}ms'"
            )
            connection.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            number = str(database.scalar(connection, "SELECT pg_export_snapshot()"))
            snapshot = Snapshot(number, database.now(connection), connection)
        try:
            yield snapshot
        except (SQLAlchemyError, PySparkException, Py4JError, StoreError) as error:
            if _end(connection):
                raise
            msg = (
                f"the server has ended the snapshot, as a rule because it was idle for {seconds:g} "
                's: read less at a time (an export with window="hour", new_rows with max_window=, '
                "read_archive with since= and until=), or give open_snapshot a longer max_duration"
            )
            raise StoreError(msg) from error
        finally:
            _end(connection)


def _end(connection: Connection) -> bool:
    """End the transaction; whether the server still had it."""
    try:
        connection.exec_driver_sql("ROLLBACK")
    except SQLAlchemyError:
        return False
    return True


FETCH_BYTES = 8 << 20
"""Bytes that a connection fetches at once, for rows of average size."""

MOST_FETCHED_ROWS = 10_000
"""Rows that a connection fetches at once: tiny rows would make FETCH_BYTES too many of them."""


def read_archive(
    spark: SparkSession,
    url: str | URL,
    *,
    table: str = "message_archive",
    schema: str | None = None,
    since: Moment | None = None,
    until: Moment | None = None,
    queues: Iterable[str] | None = None,
    states: Iterable[str | MessageState] | None = None,
    num_partitions: int | Literal["auto"] = "auto",
    snapshot: Snapshot | bool = True,
    decode: Any = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Read the archive: what was settled, one row a message.

    Columns that are not selected are not read, and filters on ids, counts and priorities are pushed
    down to the database. For queues, states and times give `queues`, `states`, `since` and `until`,
    which indexes serve: Spark evaluates filters on texts itself, and on times unless it reads
    PostgreSQL by a Java in UTC, as the databases would not always agree with it. All times are
    moments, right in every time zone of Java and of the session.

    Each partition reads a range of ids, or of times if there is `since`: no message comes twice,
    whatever moves its row while Spark reads. One that is redriven at that time may be missing; its
    next row is archived after the end of the window. PostgreSQL under a `Snapshot`, in which
    nothing moves, is read by blocks of the table.

    Args:
        spark: A session with the JDBC driver (`build_session`).
        url: SQLAlchemy URL, with any driver; the password appears in no plan, log or error.
        table: The archive table.
        schema: Its schema; MySQL and MariaDB: its database.
        since: Only what was archived at or after this moment.
        until: Only what was archived before this moment.
        queues: Only these queues.
        states: Only these states: "completed", "failed", "discarded".
        num_partitions: Connections that read at the same time; "auto" takes one for each 256 MB, at
            least the session's parallelism and at most 64, and one for a small table.
        snapshot: What every partition sees. True closes the window at the database's clock as it is
            now: a later action reads no newer rows. A `Snapshot` of `open_snapshot` (PostgreSQL)
            shows exactly one moment. False has no end: each partition reads what is there when it
            starts.
        decode: How to decode payloads into a column `body`: see `decode_payload`. None adds no
            column.
        options: More of Spark's JDBC options; they win.

    Returns:
        A DataFrame of `ARCHIVE_SCHEMA`, and `body` if asked for.

    Raises:
        SetupError: an option that cannot be, a table that is not there, or a session without the
            driver.
    """
    selection = select_rows(
        ARCHIVE, table, schema, since=since, until=until, queues=queues, states=states
    )
    return _read(spark, url, selection, num_partitions, snapshot, decode, options)


def read_messages(
    spark: SparkSession,
    url: str | URL,
    *,
    table: str = "message",
    schema: str | None = None,
    since: Moment | None = None,
    until: Moment | None = None,
    queues: Iterable[str] | None = None,
    states: Iterable[str | MessageState] | None = None,
    num_partitions: int | Literal["auto"] = "auto",
    snapshot: Snapshot | bool = True,
    decode: Any = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Read the live table: what waits or is being handled, one row a message.

    As `read_archive`, but `since` and `until` are about `created_at`, and the states are "pending",
    "processing" and "retryable". Rows come and go while they are read: only under a `Snapshot`
    (PostgreSQL), or with one partition, is what is read a state that the table was in.

    Returns:
        A DataFrame of `MESSAGE_SCHEMA`, and `body` if asked for.
    """
    selection = select_rows(
        MESSAGES, table, schema, since=since, until=until, queues=queues, states=states
    )
    return _read(spark, url, selection, num_partitions, snapshot, decode, options)


def _read(
    spark: SparkSession,
    url: str | URL,
    selection: Selection,
    num_partitions: int | Literal["auto"],
    snapshot: Snapshot | bool,
    decode: Any,
    options: Mapping[str, str] | None,
) -> DataFrame:
    if not isinstance(snapshot, bool | Snapshot):
        raise SetupError(
            "snapshot must be True, False or the snapshot of `with open_snapshot(url) as now:`, "
            f"got {short(snapshot)}"
        )
    database = database_of(parse_address(url))
    with database.connect() as connection:
        if snapshot is True:
            selection = selection.closed(database, connection)
        held = snapshot if isinstance(snapshot, Snapshot) else None
        frame = scan(spark, database, connection, selection, num_partitions, held, options)
    return frame if decode is None else decode_payload(frame, decode)


def scan(
    spark: SparkSession,
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    num_partitions: int | Literal["auto"] = "auto",
    snapshot: Snapshot | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """A DataFrame of the selected rows; `connection` is asked for statistics only, now.

    Raises:
        SetupError: the database has no such table, or the session not the driver.
    """
    need_driver(spark, database.jdbc_driver, database.kind)
    database.need_table(connection, selection.table, selection.schema)
    if snapshot is not None:
        snapshot.keep(selection.name(database))
        connection = snapshot.connection  # a new one could deadlock: see LOCK_PATIENCE
    size = database.size(connection, selection.table, selection.schema)
    number = _number(spark, num_partitions, size)
    database = _choose_time_format(database, connection, selection)
    column = selection.range_column(in_snapshot=snapshot is not None)
    rows = selection.cut_by(database, column)
    properties = dict(database.address.properties) | {
        "driver": database.jdbc_driver,
        "fetchsize": str(_fetch_rows(size)),
        "customSchema": _raw_schema(database, selection),
    }
    if snapshot is not None:
        properties["sessionInitStatement"] = snapshot.statement
    raw = spark.read.jdbc(
        database.address.jdbc_url,
        selection.subquery(database, [field.name for field in selection.fields], column),
        predicates=database.predicates(connection, rows, number),
        properties=properties | dict(options or {}),
    )
    return raw.select(*_columns(spark, database, selection))


def _choose_time_format(
    database: ArchiveDatabase, connection: Connection, selection: Selection
) -> ArchiveDatabase:
    """Have times read as microseconds if the oldest `archived_at` is before `EXACT_SINCE`."""
    if not database.native_timestamps or selection.time_column != "archived_at":
        return database  # no index serves the others
    oldest = find_oldest(database, connection, replace(selection, queues=None, states=None))
    is_old = oldest is not None and oldest < EXACT_SINCE
    return database.without_native_timestamps() if is_old else database


def _number(spark: SparkSession, wanted: int | Literal["auto"], size: Size) -> int:
    if wanted != "auto":
        return whole_number("num_partitions", wanted, other=' or "auto"')
    context = getattr(spark, "_sc", None)
    cores = 2 if context is None else int(context.defaultParallelism)
    return size.partitions(cores)


def _fetch_rows(size: Size) -> int:
    """Never 0: the driver would then hold the whole result in memory, and a snapshot would not be
    taken.
    """
    row = size.row_bytes or FETCH_BYTES / 1000
    return int(min(max(FETCH_BYTES / row, 1), MOST_FETCHED_ROWS))


def _raw_schema(database: ArchiveDatabase, selection: Selection) -> str:
    """The types that JDBC is to read, which some drivers would guess wrongly."""
    micros = not database.native_timestamps
    types = ("bigint" if micros and f.type == "timestamp" else f.type for f in selection.fields)
    return ", ".join(
        f"`{f.name}` {type_}" for f, type_ in zip(selection.fields, types, strict=True)
    )


def _columns(spark: SparkSession, database: ArchiveDatabase, selection: Selection) -> list[Any]:
    pushable = database.native_timestamps and _thinks_in_utc(spark)
    columns = []
    for field in selection.fields:
        column = F.col(field.name)
        if field.type == "string":
            # Spark would push filters that mean something else there: a backslash in LIKE, letter
            # case in SQLite, a backslash in any literal in MySQL. It does not look through this,
            # which costs nothing.
            column = F.collate(column, "UTF8_BINARY")
        elif field.type == "timestamp" and not database.native_timestamps:
            column = F.timestamp_micros(column)
        elif field.type == "timestamp" and not pushable:
            # Spark writes pushed times in Java's zone, where an hour of autumn comes twice.
            column = F.timestamp_micros(F.unix_micros(column))
        # JDBC leaves notes of its own on each column, which would make schemas differ.
        columns.append(column.alias(field.name, metadata={}))
    return columns


def _thinks_in_utc(spark: SparkSession) -> bool:
    """Whether times that Spark pushes down are those that were meant."""
    java = java_of(spark)
    if java is None:
        return False
    zone = str(getattr(java, "java.util.TimeZone").getDefault().getID())
    return (
        zone in ("UTC", "Etc/UTC", "GMT")
        and spark.conf.get("spark.sql.datetime.java8API.enabled") != "true"
    )
