"""Publish rows of the archive, or of the lake, again."""

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, MapType, NullType, StringType, StructType, VariantType
from sqlalchemy import URL, Connection, false, select
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker import exceptions
from faststream_sqlbroker.core.checks import (
    check_bool,
    find_name_error,
    find_queue_error,
    is_number,
    validate_integer,
)
from faststream_sqlbroker.core.replays import ReplayPlan, check_headers
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration, parse_delay, parse_positive
from faststream_sqlbroker.exceptions import PublishError, SetupError, StoreError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import get_database
from pyspark_sqlbroker.replays.writer import (
    MAX_SAMPLES,
    QueueReplayCount,
    ReplayTask,
    ReplayWriter,
    format_refusal,
)

MIN_RATE = 1e-5
"""Minimum rate in messages a second: about one a day."""

_RESULT_SCHEMA = (
    "queue string, rows bigint, fresh bigint, bytes bigint, redriven bigint, sample string"
)
_ARROW_RESULT_SCHEMA = pa.schema(
    [
        ("queue", pa.string()),
        *((name, pa.int64()) for name in ("rows", "fresh", "bytes", "redriven")),
        ("sample", pa.string()),
    ]
)
_PACKAGE_ERROR = re.compile(r"^faststream_sqlbroker\.exceptions\.(\w+): (.*)$", re.MULTILINE)

REQUIRED_COLUMNS = ("id", "queue", "priority", "key", "headers", "payload", "publish_count")
"""Columns that the DataFrame must have; other columns are ignored."""


@dataclass(frozen=True)
class ReplayResult:
    """The result of `replay`, or of a dry run.

    Attributes:
        job: Name of the replay.
        dry_run: True if nothing was written.
        rows: Number of rows of the DataFrame; rows with the same id count once.
        queues: Number of messages published to each queue, or to be published.
        already: Number of rows that earlier runs of the job have published; they are left out.
        bytes: Total size of these messages' payloads.
        sample: Up to ten of these messages, with the lowest ids: id of the row, queue, priority,
            key, headers, bytes.
        redriven: With `current_only`, number of rows left out because their messages were redriven.
    """

    job: str
    dry_run: bool
    rows: int
    queues: Mapping[str, int]
    already: int
    bytes: int
    sample: tuple[Mapping[str, Any], ...]
    redriven: int = 0

    @property
    def messages(self) -> int:
        """Number of messages that were, or would be, published."""
        return sum(self.queues.values())


def replay(
    df: DataFrame,
    url: str | URL,
    *,
    job: str,
    queue: str | None = None,
    dry_run: bool = True,
    rate: float | None = None,
    delay: Duration | None = None,
    headers: Mapping[str, Any] | None = None,
    table: str = "message",
    schema: str | None = None,
    num_partitions: int = 4,
    batch_size: int = 1000,
    remember: Duration | None = "720h",
    current_only: bool = False,
    archive_table: str | None = "message_archive",
) -> ReplayResult:
    """Publish the rows of `df` as new messages, each once for `job`.

    Each message has a new id, the row's payload, key, priority and headers, and is PENDING, without
    attempts. Its `origin_id` is the row's id, its `publish_count` is one higher; the headers
    `replay-of` (the id) and `replay-job` name its origin. It has no dedup_id, no expiry and no
    header `dead-letter`. The row itself stays as it is.

    A message and the mark of its row are committed together, `batch_size` rows at a time. So the
    same job may run again after a crash, twice at the same time, or with Spark's repeated and
    speculative tasks: each id is published once. A job remembers ids only: rows of another database
    need another job, and so does the second of two messages with one id, which a lake may have of a
    database that has lost commits and given their ids again.

    Args:
        df: Columns id, queue, priority, key, headers, payload, publish_count, as `read_archive` and
            `read_messages` return them, also from Parquet. With created_at, two messages with one
            id are refused. A payload may be a string too, and is
            published in UTF-8. Headers may be a struct, a map or a VARIANT too, and are published
            as `to_json` writes them: a struct without its NULLs. Other columns are ignored.
        url: SQLAlchemy URL of the database that receives the messages; the password does not appear
            in plans or errors.
        job: Name of this replay, 1 to 255 characters: the same name means the same replay.
        queue: The queue for all messages; None keeps the queue of each row.
        dry_run: Count only, and write nothing.
        rate: Messages a second that become due, over all partitions, from now on; None means all at
            once. All messages are written at once: their `next_attempt_at` is spread.
        delay: Delay until the messages become due, in seconds or as text such as "10m".
        headers: JSON values by name, which replace each row's headers; None removes a header.
        table: The live table.
        schema: Its schema; MySQL and MariaDB: its database.
        num_partitions: Connections that write at the same time; with 1 messages get their ids in
            the order of their rows' ids. SQLite has one writer, and gets one.
        batch_size: Maximum rows of a transaction, which also ends at 4 MiB of payloads.
        remember: How long the job remembers a published row; None means for ever. Subscribers
            remove older marks.
        current_only: Leave out rows of messages that were redriven since they were archived: the
            id is in the live table again, or the archive has a newer row of it. Meant for rows
            of a lake, which keeps the failure of a message that was redriven later. Needs the
            column archived_at. A message that is no longer in the database counts as current; a
            redrive while the batch is written is not detected.
        archive_table: The table that `current_only` searches for newer rows; None if there is no
            archive.

    Returns:
        Counts, and a sample.

    Raises:
        SetupError: an invalid option, a missing column, a payload or headers of an unsupported
            type, a streaming DataFrame (call this in `foreachBatch`), or a database without the
            broker's tables.
        PublishError: a row cannot become a message, for example because it has no payload, or two
            messages have the same id; the error names the row. Other rows may have been published:
            run the same job again.
        StoreError: the database refused, or could not be reached, several times. Other rows may
            have been published: run the same job again.
    """
    plan = _build_plan(job, queue, headers)
    check_bool("dry_run", dry_run)
    check_bool("current_only", current_only)
    database = get_database(parse_address(url))
    config = SqlBrokerSchemaConfig(
        message_table_name=table,
        message_archive_table_name=archive_table if current_only else None,
        schema=schema,
    )
    count = (
        1
        if database.has_single_writer
        else validate_integer("num_partitions", num_partitions, maximum=64)
    )
    rows = partition_rows(df, count, dry_run=dry_run, current_only=current_only)
    per_second = _validate_rate(rate)
    writer = ReplayWriter(
        database,
        config,
        plan,
        run=uuid.uuid4().hex,
        start=None,
        spacing=timedelta(seconds=0 if per_second is None else count / per_second),
        shift=timedelta(seconds=0 if per_second is None else 1 / per_second),
        delay=timedelta(seconds=0 if delay is None else parse_delay(delay)),
        remember=None
        if remember is None
        else timedelta(seconds=parse_positive("remember", remember)),
        batch_size=validate_integer("batch_size", batch_size, maximum=10_000),
        dry_run=dry_run,
        current_only=current_only,
    )
    writer = _prepare_writer(writer, spread=per_second is not None)
    return _summarize(_run_tasks(rows, writer), plan.job, dry_run=dry_run)


def _build_plan(job: str, queue: str | None, headers: Mapping[str, Any] | None) -> ReplayPlan:
    """Check job, queue and headers, and return the rules by which rows are copied.

    Wrong options are found here, before Spark starts tasks that publish messages.
    """
    if issue := find_name_error(job):
        raise SetupError(f"job cannot be {format_value(job)}: {issue}")
    if queue is not None and (issue := find_queue_error(queue)):
        raise SetupError(f"queue cannot be {format_value(queue)}: {issue}")
    if headers is not None and not isinstance(headers, Mapping):
        raise SetupError(
            f"headers must be JSON values by name, such as {{'why': 'bug 7'}}, got "
            f"{format_value(headers)}"
        )
    try:
        check_headers("headers", headers or {})
    except PublishError as error:
        raise SetupError(str(error)) from error
    return ReplayPlan(job, queue, dict(headers or {}))


def _validate_rate(rate: float | None) -> float | None:
    """Check that the rate is a finite number of at least `MIN_RATE`; None has no limit."""
    if rate is None:
        return None
    if not is_number(rate) or not MIN_RATE <= rate < float("inf"):
        raise SetupError(
            f"rate must be a number of messages a second, {MIN_RATE} or more, got {rate!r}"
        )
    return rate


def _prepare_writer(writer: ReplayWriter, *, spread: bool) -> ReplayWriter:
    """Return the writer with the database's clock, if times are spread; check the tables.

    Due times are spread if there is a rate: all tasks then count from the same start. Otherwise
    each message is due `delay` after it is written.

    Raises:
        SetupError: a table is missing, or may not be read.
        StoreError: the database cannot be reached.
    """
    with writer.database.connect() as connection:
        now = writer.database.get_time(connection)
        _require_tables(writer, connection)
    return replace(writer, start=now if spread else None)


def _require_tables(writer: ReplayWriter, connection: Connection) -> None:
    """Find missing tables and rights before Spark starts tasks, by selecting no rows.

    An error of a task would be a long text of Java's, and other tasks could have published rows.
    """
    for table in writer.build_tables().broker_tables:
        try:
            connection.execute(select(*table.c).where(false()))
        except DBAPIError as error:
            raise SetupError(
                f"the table {table.fullname!r} cannot be read: create the broker's tables there, "
                f"or give table= and schema= ({format_refusal(error)})"
            ) from None


def _check_columns(df: DataFrame, *, current_only: bool) -> None:
    """Check that `df` has the columns that `partition_rows` reads, and is no stream.

    Raises:
        SetupError: a column is missing, or the DataFrame is streaming.
    """
    missing = [name for name in REQUIRED_COLUMNS if name not in df.columns]
    if missing:
        raise SetupError(
            f"the DataFrame has no column {missing[0]!r}: replay needs "
            f"{', '.join(REQUIRED_COLUMNS)}, as "
            "read_archive returns them"
        )
    if current_only and "archived_at" not in df.columns:
        raise SetupError(
            "current_only needs the column archived_at, as read_archive and read_export return it"
        )
    if df.isStreaming:
        raise SetupError(
            "replay does not accept a streaming DataFrame: call it in foreachBatch, always with "
            "the same job"
        )


def partition_rows(
    df: DataFrame, partition_count: int, *, dry_run: bool, current_only: bool = False
) -> DataFrame:
    """Partition the rows for the tasks: all rows of an id in the same partition, in ascending order
    of ids.

    Of the rows of one message the newest comes first, and only that one is published. Payloads are
    left out in a dry run, which only needs their sizes.

    Args:
        df: The user's DataFrame.
        partition_count: Number of partitions.
        dry_run: True if nothing is written.
        current_only: True adds archived_us, archived_at in microseconds since 1970.

    Raises:
        SetupError: a column is missing or of an unsupported type, or the DataFrame is streaming.
    """
    _check_columns(df, current_only=current_only)
    other_columns = [
        F.col(name) for name in REQUIRED_COLUMNS if name not in ("id", "headers", "payload")
    ]
    # A payload that was changed in Spark is text (to_json); the databases take bytes.
    payload = _convert_payload(df)
    length = F.octet_length(payload).cast("long").alias("bytes")
    # A message that was archived, retried and archived again has several rows in a lake: the last
    # row counts.
    order_column = "archived_at" if "archived_at" in df.columns else "publish_count"
    latest_first = F.col(order_column).alias("_newest")
    time_columns = [F.unix_micros("archived_at").alias("archived_us")] if current_only else []
    if "created_at" in df.columns:
        time_columns.append(F.col("created_at").cast("string").alias("created"))
    selected = df.select(
        F.col("id").cast("long"),
        *other_columns,
        _convert_headers(df),
        *([] if dry_run else [payload]),
        length,
        *time_columns,
        latest_first,
    )
    return (
        selected.repartition(partition_count, "id")
        .sortWithinPartitions("id", F.desc("_newest"))
        .drop("_newest")
    )


def _convert_headers(df: DataFrame) -> Column:
    """Return headers as JSON text, whether stored as text or as a typed column.

    Spark converts typed columns itself: in the tasks' Python a map would arrive as a list of pairs.
    """
    data_type = df.schema["headers"].dataType
    if isinstance(data_type, StructType | MapType | VariantType):
        return F.to_json("headers").alias("headers")
    if not isinstance(data_type, StringType | BinaryType | NullType):
        raise SetupError(
            "the column headers must be a JSON object as a string, or a struct, map or variant, "
            f"got {data_type.simpleString()}: convert it to JSON text, for example with to_json"
        )
    return F.col("headers")


def _convert_payload(df: DataFrame) -> Column:
    """Return the payload as bytes; a text, such as the result of to_json, is encoded in UTF-8."""
    type_name = df.schema["payload"].dataType.simpleString()
    if type_name not in ("binary", "string"):
        raise SetupError(
            f"the column payload must be binary or string, got {type_name}: convert it to text, "
            "for example with to_json"
        )
    return F.col("payload").cast("binary").alias("payload")


def _run_tasks(rows: DataFrame, writer: ReplayWriter) -> list[Any]:
    """Publish the rows in Spark's tasks, a task for each partition, and collect the counts.

    Each task opens its own connection and returns a row of counts for each queue.
    """

    def run_task(batches: Iterable[Any]) -> Iterable[Any]:
        """Publish the rows of a partition; runs in a worker, where `writer` arrives pickled."""
        context = TaskContext.get()
        task = ReplayTask(writer, 0 if context is None else context.partitionId())
        task_rows = (row for batch in batches for row in batch.to_pylist())
        yield _to_arrow(task.run(task_rows))

    try:
        return rows.mapInArrow(run_task, _RESULT_SCHEMA).collect()
    except PySparkException as error:
        raise _convert_error(error) from error


def _to_arrow(counts: Mapping[str, QueueReplayCount]) -> Any:
    """Convert the counts of a task to a batch, a row for each queue."""
    rows = [
        asdict(count) | {"queue": queue, "sample": json.dumps(count.sample)}
        for queue, count in counts.items()
    ]
    return pa.RecordBatch.from_pylist(rows, schema=_ARROW_RESULT_SCHEMA)


def _convert_error(error: PySparkException) -> BaseException:
    """Return this package's error that a task raised, without Java's surrounding text.

    Spark reports only the traceback as text, so class and message are found in it.
    """
    matches = _PACKAGE_ERROR.findall(str(error))
    if not matches:
        return error
    name, message = matches[-1]
    error_class = getattr(exceptions, name, StoreError)
    return error_class(
        f"{message}; committed messages stay: fix the cause and run the same job again"
    )


def _summarize(results: list[Any], job: str, *, dry_run: bool) -> ReplayResult:
    """Add up the counts of all tasks.

    Rows that are neither published nor redriven were published by an earlier run of the job.
    """
    queues: dict[str, int] = {}
    for row in sorted(results, key=lambda row: row.queue):
        queues[row.queue] = queues.get(row.queue, 0) + row.fresh
    rows = sum(row.rows for row in results)
    redriven = sum(row.redriven for row in results)
    sample = sorted(
        (message for row in results for message in json.loads(row.sample)),
        key=lambda message: message["id"],
    )
    return ReplayResult(
        job,
        dry_run,
        rows,
        {queue: count for queue, count in queues.items() if count},
        rows - sum(queues.values()) - redriven,
        sum(row.bytes for row in results),
        tuple(sample[:MAX_SAMPLES]),
        redriven,
    )
