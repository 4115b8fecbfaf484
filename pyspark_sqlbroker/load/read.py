"""The tables as DataFrames by JDBC, and one snapshot for all connections (PostgreSQL)."""

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

from faststream_sqlbroker.core.checks import validate_integer
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration, parse_positive
from faststream_sqlbroker.exceptions import NotSupportedError, SetupError, StoreError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import ArchiveDatabase, get_database
from pyspark_sqlbroker.databases.base import TableSize
from pyspark_sqlbroker.drivers import get_java
from pyspark_sqlbroker.load.decode import decode_payload
from pyspark_sqlbroker.load.selection import (
    ARCHIVE,
    MESSAGES,
    Selection,
    find_oldest,
    select_rows,
)
from pyspark_sqlbroker.moments import TimeInput
from pyspark_sqlbroker.session import require_driver
from pyspark_sqlbroker.store_errors import convert_store_errors

SNAPSHOT_LOCK_TIMEOUT = 60
"""Seconds that a reader waits for a lock on the table.

A session that requests an exclusive lock waits for the end of the snapshot, and a reader that
comes later queues behind that session: without a limit they would wait for each other.
"""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that is held open.

    Attributes:
        number: PostgreSQL's name for it, valid until its context ends.
        taken_at: Time of the snapshot, by the database's clock.
        connection: Holds the snapshot in a transaction; queries on this connection see the same
            rows.
    """

    number: str
    taken_at: datetime
    connection: Connection

    @property
    def statement(self) -> str:
        """SQL that another connection runs first to see the same rows."""
        return (
            "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; "
            f"SET TRANSACTION SNAPSHOT '{self.number}'; "
            f"SET LOCAL lock_timeout = '{SNAPSHOT_LOCK_TIMEOUT}s'"
        )

    def lock_table(self, table: str) -> None:
        """Lock `table` (quoted) with all partitions against DROP, TRUNCATE and rewrites.

        A snapshot contains rows only as long as their table exists.
        """
        self.connection.exec_driver_sql(f"SELECT 1 FROM {table} LIMIT 0")


FIRST_EXACT_TIME = datetime(1900, 1, 1, tzinfo=timezone.utc)
"""First time that Spark reads exactly by JDBC (PostgreSQL). It shifts earlier timestamps by the
days that Java's older calendar lacks, and by the minutes between local mean time and Java's time
zone.
"""


@contextmanager
def open_snapshot(url: str | URL, *, max_duration: Duration = "1h") -> Iterator[Snapshot]:
    """Hold a snapshot of PostgreSQL for all connections of several readers.

    Every action on the DataFrames must happen inside the context: they are lazy, and after its end
    they fail with "invalid snapshot identifier". While the snapshot is open, vacuum cannot remove
    rows that others delete, so the server ends the snapshot when `Snapshot.connection` has been
    idle for `max_duration`. Each statement on that connection restarts the time; the readers'
    statements do not.

    From the moment a DataFrame of a table is made, statements that drop the table or one of its
    partitions (`prune_archive` too), truncate it, or rewrite it (VACUUM FULL, CLUSTER) wait for the
    end of the context. A reader that begins while such a statement waits fails with "lock timeout"
    after a minute.

    Args:
        url: SQLAlchemy URL of the database.
        max_duration: How long the snapshot stays open without a statement on its own connection, in
            seconds or as text such as "30m".

    Raises:
        StoreError: the database cannot be reached, or refuses; or reading failed, and the server
            had ended the snapshot.
        NotSupportedError: MySQL, MariaDB and SQLite have no snapshot that connections can share;
            readers close their window by the database's clock there.
    """
    seconds = parse_positive("max_duration", max_duration)
    database = get_database(parse_address(url))
    if not database.shares_snapshots:
        raise NotSupportedError(
            f"{database.kind} has no snapshot that connections share (only PostgreSQL has one). "
            "Read closed windows with since= and until="
        )
    with ExitStack() as stack:
        with convert_store_errors():  # errors in the block are the caller's
            connection = stack.enter_context(database.open())
            connection.exec_driver_sql(
                f"SET idle_in_transaction_session_timeout = '{int(seconds * 1000)}ms'"
            )
            connection.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            number = str(database.fetch_scalar(connection, "SELECT pg_export_snapshot()"))
            snapshot = Snapshot(number, database.get_time(connection), connection)
        try:
            yield snapshot
        except (SQLAlchemyError, PySparkException, Py4JError, StoreError) as error:
            if _end_transaction(connection):
                raise
            msg = (
                f"the server ended the snapshot, probably because it was idle for {seconds:g} s: "
                'read less at a time (an export with window="hour", new_rows with max_window=, '
                "read_archive with since= and until=), or raise max_duration= of open_snapshot"
            )
            raise StoreError(msg) from error
        finally:
            _end_transaction(connection)


def _end_transaction(connection: Connection) -> bool:
    """End the transaction; return False if the server had ended the transaction.

    The server closes the connection of a snapshot that was idle for too long, so a failed ROLLBACK
    tells this case from other errors.
    """
    try:
        connection.exec_driver_sql("ROLLBACK")
    except SQLAlchemyError:
        return False
    return True


FETCH_BYTES = 8 << 20
"""Bytes that a connection fetches at once, for rows of average size."""

MAX_FETCHED_ROWS = 10_000
"""Rows that a connection fetches at once: for tiny rows FETCH_BYTES would mean too many."""


def read_archive(
    spark: SparkSession,
    url: str | URL,
    *,
    table: str = "message_archive",
    schema: str | None = None,
    since: TimeInput | None = None,
    until: TimeInput | None = None,
    queues: Iterable[str] | None = None,
    states: Iterable[str | MessageState] | None = None,
    num_partitions: int | Literal["auto"] = "auto",
    snapshot: Snapshot | bool = True,
    decode: Any = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Read the archive: the settled messages, a row each.

    Columns that are not selected are not read, and filters on ids, counts and priorities are pushed
    down to the database. For queues, states and times give `queues`, `states`, `since` and `until`,
    which indexes serve: Spark evaluates filters on texts itself, and on times unless it reads
    PostgreSQL by a Java in UTC, because databases may compare differently. All times are points in
    time, correct in every time zone of Java and of the session.

    Each partition reads a range of ids, or of times if there is `since`: no message comes twice,
    whatever moves its row while Spark reads. A message that is redriven at that time may be
    missing; its next row is archived after the end of the window. PostgreSQL under a `Snapshot`, in
    which no row moves, is read by blocks of the table.

    Args:
        spark: A session with the JDBC driver (`build_session`).
        url: SQLAlchemy URL, with any driver; the password does not appear in plans, logs or errors.
        table: The archive table.
        schema: Its schema; MySQL and MariaDB: its database.
        since: Only rows archived at or after this time.
        until: Only rows archived before this time.
        queues: Only these queues.
        states: Only these states: "completed", "failed", "discarded".
        num_partitions: Number of connections that read at the same time; "auto" takes one for each
            256 MB, at least the session's parallelism and at most 64, and one for a small table.
        snapshot: The rows that partitions see. True closes the window at the database's current
            time: a later action reads no newer rows. A `Snapshot` of `open_snapshot` (PostgreSQL)
            shows exactly one point in time. False has no end: each partition reads the rows that
            exist when it starts.
        decode: How to decode payloads into a column `body`: see `decode_payload`. None adds no
            column.
        options: More of Spark's JDBC options; they win.

    Returns:
        A DataFrame of `ARCHIVE_SCHEMA`, and `body` if requested.

    Raises:
        SetupError: an option is invalid, the table does not exist, or the session lacks the driver.
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
    since: TimeInput | None = None,
    until: TimeInput | None = None,
    queues: Iterable[str] | None = None,
    states: Iterable[str | MessageState] | None = None,
    num_partitions: int | Literal["auto"] = "auto",
    snapshot: Snapshot | bool = True,
    decode: Any = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Read the live table: messages that wait or are being handled, a row each.

    As `read_archive`, but `since` and `until` apply to `created_at`, and the states are "pending",
    "processing" and "retryable". Rows come and go while they are read: only under a `Snapshot`
    (PostgreSQL), or with one partition, is the result a state that the table was in.

    Returns:
        A DataFrame of `MESSAGE_SCHEMA`, and `body` if requested.
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
    """Read a selection for `read_archive` and `read_messages`.

    With `snapshot` True the selection ends at the database's current time, so that no later action
    on the frame sees newer rows; rows that are pruned or redriven in between are missing.
    """
    if not isinstance(snapshot, bool | Snapshot):
        raise SetupError(
            "snapshot must be True, False or the snapshot of `with open_snapshot(url) as now:`, "
            f"got {format_value(snapshot)}"
        )
    database = get_database(parse_address(url))
    with database.connect() as connection:
        if snapshot is True:
            selection = selection.end_now(database, connection)
        shared_snapshot = snapshot if isinstance(snapshot, Snapshot) else None
        frame = scan_rows(
            spark, database, connection, selection, num_partitions, shared_snapshot, options
        )
    return frame if decode is None else decode_payload(frame, decode)


def scan_rows(
    spark: SparkSession,
    database: ArchiveDatabase,
    connection: Connection,
    selection: Selection,
    num_partitions: int | Literal["auto"] = "auto",
    snapshot: Snapshot | None = None,
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return a DataFrame of the selected rows; `connection` is queried for statistics only, now.

    All readers by JDBC share this function; `format("sqlbroker")` has its own (`source/scan.py`).
    Spark's tasks open connections of their own by JDBC when an action needs rows, each for one
    range of the rows, in `snapshot` if one is given.

    Raises:
        SetupError: the database has no such table, or the session lacks the driver.
    """
    require_driver(spark, database.jdbc_driver, database.kind)
    database.require_table(connection, selection.table, selection.schema)
    if snapshot is not None:
        snapshot.lock_table(selection.get_table_name(database))
        # A new connection could deadlock: see SNAPSHOT_LOCK_TIMEOUT.
        connection = snapshot.connection
    size = database.estimate_size(connection, selection.table, selection.schema)
    number = _count_partitions(spark, num_partitions, size)
    database = _choose_time_format(database, connection, selection)
    column = selection.choose_range_column(in_snapshot=snapshot is not None)
    rows = selection.build_table_range(database, column)
    properties = dict(database.address.properties) | {
        "driver": database.jdbc_driver,
        "fetchsize": str(_compute_fetch_rows(size)),
        "customSchema": _build_raw_schema(database, selection),
    }
    if snapshot is not None:
        properties["sessionInitStatement"] = snapshot.statement
    raw = spark.read.jdbc(
        database.address.jdbc_url,
        selection.build_subquery(database, [field.name for field in selection.fields], column),
        predicates=database.build_predicates(connection, rows, number),
        properties=properties | dict(options or {}),
    )
    return raw.select(*_convert_columns(spark, database, selection))


def _choose_time_format(
    database: ArchiveDatabase, connection: Connection, selection: Selection
) -> ArchiveDatabase:
    """Read times as microseconds if the oldest `archived_at` is before `FIRST_EXACT_TIME`.

    Spark would shift such old timestamps. Newer ones are read natively, so that filters on them can
    be pushed down.
    """
    if not database.native_timestamps or selection.time_column != "archived_at":
        return database  # no index serves other time columns
    oldest = find_oldest(database, connection, replace(selection, queues=None, states=None))
    is_old = oldest is not None and oldest < FIRST_EXACT_TIME
    return database.with_microseconds() if is_old else database


def _count_partitions(
    spark: SparkSession, requested: int | Literal["auto"], size: TableSize
) -> int:
    """Return the number of partitions to read: the requested number, or by the table's size.

    Each partition is a connection. Spark Connect does not show the number of cores, so 2 counts.
    """
    if requested != "auto":
        return validate_integer("num_partitions", requested, other=' or "auto"')
    context = getattr(spark, "_sc", None)
    cores = 2 if context is None else int(context.defaultParallelism)
    return size.choose_partitions(cores)


def _compute_fetch_rows(size: TableSize) -> int:
    """Return the rows to fetch at once, at least 1.

    With 0 the driver would hold the complete result in memory, and a snapshot would not be used.
    """
    row = size.row_bytes or FETCH_BYTES / 1000
    return int(min(max(FETCH_BYTES / row, 1), MAX_FETCHED_ROWS))


def _build_raw_schema(database: ArchiveDatabase, selection: Selection) -> str:
    """Return the types that JDBC reads, as some drivers would guess wrongly.

    Times are numbers of microseconds unless the database's driver reads timestamps exactly.
    """
    as_microseconds = not database.native_timestamps
    types = (
        "bigint" if as_microseconds and field.type == "timestamp" else field.type
        for field in selection.fields
    )
    return ", ".join(
        f"`{field.name}` {type_}" for field, type_ in zip(selection.fields, types, strict=True)
    )


def _convert_columns(
    spark: SparkSession, database: ArchiveDatabase, selection: Selection
) -> list[Any]:
    """Convert the columns that JDBC read to the public schema.

    The conversions also stop Spark from pushing down filters, that is, from letting the database
    evaluate them, where the database would do so differently.
    """
    pushable = database.native_timestamps and _is_java_in_utc(spark)
    columns = []
    for field in selection.fields:
        column = F.col(field.name)
        if field.type == "string":
            # Spark would push filters that mean something else in the database: a backslash in
            # LIKE, letter case in SQLite, a backslash in any literal in MySQL. Spark pushes no
            # filters through collate(), which costs nothing.
            column = F.collate(column, "UTF8_BINARY")
        elif field.type == "timestamp" and not database.native_timestamps:
            column = F.timestamp_micros(column)
        elif field.type == "timestamp" and not pushable:
            # Spark writes pushed times in Java's time zone, where an hour of autumn comes twice.
            column = F.timestamp_micros(F.unix_micros(column))
        # JDBC leaves metadata on each column, which would make schemas differ.
        columns.append(column.alias(field.name, metadata={}))
    return columns


def _is_java_in_utc(spark: SparkSession) -> bool:
    """Return True if times keep their meaning when Spark pushes a filter down to the database.

    Spark formats them in Java's time zone. False for Spark Connect, which gives no access to Java.
    """
    java = get_java(spark)
    if java is None:
        return False
    zone = str(getattr(java, "java.util.TimeZone").getDefault().getID())
    return (
        zone in ("UTC", "Etc/UTC", "GMT")
        and spark.conf.get("spark.sql.datetime.java8API.enabled") != "true"
    )
