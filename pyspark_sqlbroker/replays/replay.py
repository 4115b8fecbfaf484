"""Rows of the archive, or of the lake, published again."""

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
from faststream_sqlbroker.core.checks import flag, name_problem, queue_problem, whole_number
from faststream_sqlbroker.core.replays import Plan, check_headers
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, delay_seconds, positive_seconds
from faststream_sqlbroker.exceptions import PublishError, SetupError, StoreError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import database_of
from pyspark_sqlbroker.replays.writer import SAMPLES, Count, Task, Writer, refusal

SLOWEST = 1e-5
"""Messages a second: about one a day."""

_RESULT = "queue string, rows bigint, fresh bigint, bytes bigint, redriven bigint, sample string"
_ARROW_RESULT = pa.schema(
    [
        ("queue", pa.string()),
        *((name, pa.int64()) for name in ("rows", "fresh", "bytes", "redriven")),
        ("sample", pa.string()),
    ]
)
_OWN_ERROR = re.compile(r"^faststream_sqlbroker\.exceptions\.(\w+): (.*)$", re.MULTILINE)

NEEDED = ("id", "queue", "priority", "key", "headers", "payload", "publish_count")
"""Columns that the DataFrame must have; others are not looked at."""


@dataclass(frozen=True)
class ReplayResult:
    """What `replay` did, or in a dry run would do.

    Attributes:
        job: Its name.
        dry_run: Whether nothing was written.
        rows: Rows of the DataFrame; of several with the same id one counts.
        queues: How many messages went into which queue, or would go.
        already: Rows that earlier runs of the job have published, which are left out.
        bytes: Of the payloads that were, or would be, published.
        sample: Up to ten of these messages, those with the lowest ids: id of the row, queue,
            priority, key, headers, bytes.
        redriven: With `current_only`, rows that are left out, as their messages went on since.
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
        """How many messages were, or would be, published."""
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
    attempts. Its `origin_id` is the row's id, its `publish_count` one higher; the headers
    `replay-of` (the id) and `replay-job` say where it comes from. It has no dedup_id, no expiry and
    no header `dead-letter`. The row itself stays as it is.

    A message and the mark that its row is done are committed together, `batch_size` rows at a time.
    So the same job may run again after a crash, twice at the same time, or with Spark's repeated
    and speculative tasks: each id is published once. A job remembers ids only: rows of another
    database need another job.

    Args:
        df: Columns id, queue, priority, key, headers, payload, publish_count, as `read_archive` and
            `read_messages` return them; Parquet of them serves as well. A payload may be a string
            too, and is published in UTF-8. Headers may be a struct, a map or a VARIANT too, and are
            published as `to_json` writes them: a struct without its NULLs. Others may be there.
        url: SQLAlchemy URL of the database that gets the messages; the password appears in no plan
            or error.
        job: Name of this replay, 1 to 255 characters: the same name means the same replay.
        queue: Where all messages go; None leaves each in the queue of its row.
        dry_run: Count only, and write nothing.
        rate: Messages a second that become due, over all partitions, from now on; None is all at
            once. They are all written at once: their `next_attempt_at` is spread.
        delay: How much later the messages become due, in seconds or as text such as "10m".
        headers: JSON values by name, put over each row's; None takes a header away.
        table: The live table.
        schema: Its schema; MySQL and MariaDB: its database.
        num_partitions: Connections that write at the same time; with 1 messages get their ids in
            the order of their rows' ids. SQLite has one writer, and gets one.
        batch_size: Most rows of a transaction; it also ends at 4 MiB of payloads.
        remember: How long a published row is known to its job, from its publishing on; None is for
            ever. Subscribers remove what is older.
        current_only: Leave out rows of messages that went on since they were archived: the message
            is in the live table again, or the archive has a newer row of it. For rows of a lake,
            which keeps the failure of a message that was redriven later. Needs the column
            archived_at. What the database does not have any more counts as current; a redrive while
            the batch is written is not seen.
        archive_table: Where `current_only` looks for newer rows; None if there is no archive.

    Returns:
        Counts, and a sample.

    Raises:
        SetupError: an invalid option, a missing column, a payload or headers of an unsupported
            type, a streaming DataFrame (call this in `foreachBatch`), or a database without the
            broker's tables.
        PublishError: a row that cannot become a message, such as one without a payload; says which.
            Other rows may have been published: run the same job again.
        StoreError: the database refused, or could not be reached, several times. Other rows may
            have been published: run the same job again.
    """
    plan = _plan(job, queue, headers)
    flag("dry_run", dry_run)
    flag("current_only", current_only)
    database = database_of(parse_address(url))
    config = SqlBrokerSchemaConfig(
        message_table_name=table,
        message_archive_table_name=archive_table if current_only else None,
        schema=schema,
    )
    count = 1 if database.one_writer else whole_number("num_partitions", num_partitions, most=64)
    rows = replayed(df, count, dry_run=dry_run, current_only=current_only)
    per_second = _rate(rate)
    writer = Writer(
        database,
        config,
        plan,
        run=uuid.uuid4().hex,
        start=None,
        spacing=timedelta(seconds=0 if per_second is None else count / per_second),
        shift=timedelta(seconds=0 if per_second is None else 1 / per_second),
        delay=timedelta(seconds=0 if delay is None else delay_seconds(delay)),
        remember=None
        if remember is None
        else timedelta(seconds=positive_seconds("remember", remember)),
        batch_size=whole_number("batch_size", batch_size, most=10_000),
        dry_run=dry_run,
        current_only=current_only,
    )
    writer = _started(writer, spread=per_second is not None)
    return _summary(_run(rows, writer), plan.job, dry_run=dry_run)


def _plan(job: str, queue: str | None, headers: Mapping[str, Any] | None) -> Plan:
    if problem := name_problem(job):
        raise SetupError(f"job cannot be {short(job)}: {problem}")
    if queue is not None and (problem := queue_problem(queue)):
        raise SetupError(f"queue cannot be {short(queue)}: {problem}")
    if headers is not None and not isinstance(headers, Mapping):
        raise SetupError(
            f"headers must be JSON values by name, such as {{'why': 'bug 7'}}, got {short(headers)}"
        )
    try:
        check_headers("headers", headers or {})
    except PublishError as error:
        raise SetupError(str(error)) from error
    return Plan(job, queue, dict(headers or {}))


def _rate(rate: float | None) -> float | None:
    if rate is None:
        return None
    if (
        isinstance(rate, bool)
        or not isinstance(rate, int | float)
        or not SLOWEST <= rate < float("inf")
    ):
        raise SetupError(
            f"rate must be a number of messages a second, {SLOWEST} or more, got {rate!r}"
        )
    return rate


def _started(writer: Writer, *, spread: bool) -> Writer:
    """The writer with the database's clock, if times are spread from it; its tables are there.

    Raises:
        SetupError: a table is missing, or may not be read.
        StoreError: the database cannot be reached.
    """
    with writer.database.connect() as connection:
        now = writer.database.now(connection)
        _need_tables(writer, connection)
    return replace(writer, start=now if spread else None)


def _need_tables(writer: Writer, connection: Connection) -> None:
    for table in writer.tables().ours:
        try:
            connection.execute(select(*table.c).where(false()))
        except DBAPIError as error:
            raise SetupError(
                f"the table {table.fullname!r} cannot be read: create the broker's tables there, "
                f"or give table= and schema= ({refusal(error)})"
            ) from None


def replayed(df: DataFrame, number: int, *, dry_run: bool, current_only: bool = False) -> DataFrame:
    """Partition the rows for the tasks: all rows of an id in one, ids rising.

    Payloads are left out in a dry run.

    Args:
        df: What the user gave.
        number: Of partitions.
        dry_run: Whether nothing is written.
        current_only: Whether the rows get archived_us, archived_at in microseconds since 1970.

    Raises:
        SetupError: a column is missing or of a type that it cannot have, or the DataFrame is
            streaming.
    """
    missing = [name for name in NEEDED if name not in df.columns]
    if missing:
        raise SetupError(
            f"the DataFrame has no column {missing[0]!r}: replay needs {', '.join(NEEDED)}, as "
            "read_archive returns them"
        )
    if current_only and "archived_at" not in df.columns:
        raise SetupError(
            "current_only needs the column archived_at, as read_archive and read_export return it"
        )
    if df.isStreaming:
        raise SetupError(
            "replay takes no streaming DataFrame: call it in foreachBatch, with one job"
        )
    kept = [F.col(name) for name in NEEDED if name not in ("id", "headers", "payload")]
    # A payload that was changed in Spark is text (to_json); the databases take bytes.
    payload = _payload(df)
    length = F.octet_length(payload).cast("long").alias("bytes")
    # A message that was archived, retried and archived again has several rows in a lake: the last
    # one counts.
    newest = "archived_at" if "archived_at" in df.columns else "publish_count"
    last = F.col(newest).alias("_newest")
    at = [F.unix_micros("archived_at").alias("archived_us")] if current_only else []
    chosen = df.select(
        F.col("id").cast("long"),
        *kept,
        _headers(df),
        *([] if dry_run else [payload]),
        length,
        *at,
        last,
    )
    return (
        chosen.repartition(number, "id")
        .sortWithinPartitions("id", F.desc("_newest"))
        .drop("_newest")
    )


def _headers(df: DataFrame) -> Column:
    """As they are stored, or as JSON of what was made of them: Python sees a map as a list."""
    kind = df.schema["headers"].dataType
    if isinstance(kind, StructType | MapType | VariantType):
        return F.to_json("headers").alias("headers")
    if not isinstance(kind, StringType | BinaryType | NullType):
        raise SetupError(
            "the column headers must be a JSON object as a string, or a struct, map or variant, "
            f"got {kind.simpleString()}: turn it into the object's text, as by to_json"
        )
    return F.col("headers")


def _payload(df: DataFrame) -> Column:
    """Bytes: as they are, or a text's in UTF-8."""
    kind = df.schema["payload"].dataType.simpleString()
    if kind not in ("binary", "string"):
        raise SetupError(
            f"the column payload must be binary or string, got {kind}: turn it into the body's "
            "text, as by to_json"
        )
    return F.col("payload").cast("binary").alias("payload")


def _run(rows: DataFrame, writer: Writer) -> list[Any]:
    def work(batches: Iterable[Any]) -> Iterable[Any]:
        context = TaskContext.get()
        task = Task(writer, 0 if context is None else context.partitionId())
        given = (row for batch in batches for row in batch.to_pylist())
        yield _as_arrow(task.run(given))

    try:
        return rows.mapInArrow(work, _RESULT).collect()
    except PySparkException as error:
        raise _translated(error) from error


def _as_arrow(counts: Mapping[str, Count]) -> Any:
    rows = [
        asdict(count) | {"queue": queue, "sample": json.dumps(count.sample)}
        for queue, count in counts.items()
    ]
    return pa.RecordBatch.from_pylist(rows, schema=_ARROW_RESULT)


def _translated(error: PySparkException) -> BaseException:
    """The error that a task raised, without Java's text around it, if it is one of this package."""
    found = _OWN_ERROR.findall(str(error))
    if not found:
        return error
    name, said = found[-1]
    kind = getattr(exceptions, name, StoreError)
    return kind(f"{said}; what is committed stays: mend this and run the same job again")


def _summary(found: list[Any], job: str, *, dry_run: bool) -> ReplayResult:
    queues: dict[str, int] = {}
    for row in sorted(found, key=lambda row: row.queue):
        queues[row.queue] = queues.get(row.queue, 0) + row.fresh
    rows = sum(row.rows for row in found)
    redriven = sum(row.redriven for row in found)
    sample = sorted(
        (one for row in found for one in json.loads(row.sample)), key=lambda one: one["id"]
    )
    return ReplayResult(
        job,
        dry_run,
        rows,
        {queue: count for queue, count in queues.items() if count},
        rows - sum(queues.values()) - redriven,
        sum(row.bytes for row in found),
        tuple(sample[:SAMPLES]),
        redriven,
    )
