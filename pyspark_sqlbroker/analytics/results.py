"""The columns of every result, and helpers to compute them."""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from faststream_sqlbroker.core.checks import validate_integer
from faststream_sqlbroker.core.times import Duration, parse_positive
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.load.columns import Field

MICROSECONDS = 1_000_000
"""Microseconds in a second."""


def _build_count_fields(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, "bigint", True, f"{name} messages") for name in names)


_QUEUE = Field("queue", "string", True, "name of the queue")
_BUCKET = Field("bucket", "timestamp", True, "start of the bucket")
_MESSAGES = Field("messages", "bigint", True, "messages")
_OUTCOMES = _build_count_fields("completed", "failed", "discarded")
_KEY = Field("key", "string", True, "the key")

QUANTILES = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
"""Columns of latencies, with the share of messages that were at most so slow."""

_LATENCY = (
    Field("phase", "string", True, "wait, work or total"),
    Field("messages", "bigint", True, "messages that have this phase"),
    Field("mean", "double", True, "seconds"),
    *(
        Field(name, "double", True, f"seconds; {share:.1%} of the messages took at most this long")
        for name, share in QUANTILES.items()
    ),
    Field("max", "double", True, "seconds"),
)

RESULTS: dict[str, tuple[Field, ...]] = {
    "throughput": (
        _BUCKET,
        _QUEUE,
        _MESSAGES,
        *_OUTCOMES,
        Field("per_second", "double", True, "messages a second"),
        Field("payload_bytes", "bigint", True, "bytes of all payloads"),
    ),
    "latency": (_QUEUE, *_LATENCY),
    "latency_trend": (_BUCKET, _QUEUE, *_LATENCY),
    "retry_histogram": (
        _QUEUE,
        Field("attempts", "int", True, "attempts that ended"),
        _MESSAGES,
        *_OUTCOMES,
    ),
    "failure_rate": (
        _QUEUE,
        *_OUTCOMES,
        Field("moved", "bigint", True, "messages that failed and went to a dead letter queue"),
        Field(
            "rate",
            "double",
            False,
            "(failed + moved) / (completed + failed + moved); NULL if all are 0",
        ),
    ),
    "top_errors": (
        _QUEUE,
        Field("reason", "string", False, "why the messages failed"),
        Field("error_type", "string", False, "class of the exception"),
        _MESSAGES,
        Field("share", "double", True, "share of all failures in the frame"),
        Field("example", "string", False, "first line of the latest error"),
        Field("last_id", "bigint", True, "id of the latest message"),
        Field("last_at", "timestamp", True, "when the latest message was archived"),
    ),
    "dlq_age": (
        _QUEUE,
        _MESSAGES,
        *(
            Field(name, "bigint", True, f"dead letters {name.replace('_', ' ')} old")
            for name in ("under_1h", "1h_to_1d", "1d_to_7d", "7d_to_30d", "over_30d")
        ),
        Field("oldest_at", "timestamp", True, "when the oldest message failed"),
        Field("oldest_age", "double", True, "seconds from oldest_at to as_of"),
    ),
    "duplicate_deliveries": (
        _QUEUE,
        _MESSAGES,
        Field("redelivered", "bigint", True, "messages with lost deliveries"),
        Field("lost_deliveries", "bigint", True, "deliveries without a recorded outcome"),
        Field("share", "double", True, "redelivered / messages"),
        Field("most", "int", True, "most lost deliveries of a single message"),
    ),
    "policy_effects": (
        _QUEUE,
        Field("effect", "string", True, "cause of the end, such as superseded or expired"),
        Field("state", "string", True, "DISCARDED or FAILED"),
        _MESSAGES,
        Field("share", "double", True, "share of all messages of the queue"),
    ),
    "hot_keys": (
        _QUEUE,
        _KEY,
        _MESSAGES,
        Field("share", "double", True, "share of all messages of the queue"),
        *_OUTCOMES,
    ),
    "sessions": (
        _QUEUE,
        _KEY,
        Field("started_at", "timestamp", True, "when the first message was published"),
        Field("ended_at", "timestamp", True, "when the last message was published"),
        _MESSAGES,
        Field("seconds", "double", True, "seconds from the first message to the last"),
    ),
    "payload_schema": (
        _QUEUE,
        _MESSAGES,
        Field("decoded", "bigint", True, "messages with a readable payload"),
        Field(
            "schema",
            "string",
            True,
            "type that fits all payloads, as DDL; VOID if none is readable",
        ),
    ),
}
"""The columns of each function's result, in order."""


def to_result(frame: DataFrame, fields: Sequence[Field]) -> DataFrame:
    """Select exactly the given columns, and cast to the given types.

    Every result then has the columns that the documentation lists, whatever the input's types.
    """
    return frame.select(
        *(F.col(f"`{field.name}`").cast(field.type).alias(field.name) for field in fields)
    )


def group_fields(name: str, by: Sequence[str], frame: DataFrame) -> tuple[Field, ...]:
    """Return the result's fields, with the columns of `by` in place of the queue.

    `name` is the function whose result it is; columns of `by` keep the types of the frame.
    """
    types = dict(frame.dtypes)
    index = RESULTS[name].index(_QUEUE)
    group_columns = tuple(Field(column, types[column], False, "as in the frame") for column in by)
    return (*RESULTS[name][:index], *group_columns, *RESULTS[name][index + 1 :])


def require_columns(frame: DataFrame, function: str, *columns: str) -> None:
    """Check that the frame has the columns.

    Raises:
        SetupError: columns are missing; the message names them.
    """
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise SetupError(
            f"{function} needs the columns {', '.join(columns)}; this frame lacks "
            f"{', '.join(missing)}"
        )


def to_columns(by: str | Sequence[str]) -> tuple[str, ...]:
    """Convert a name or several names to a tuple."""
    return (by,) if isinstance(by, str) else tuple(by)


def limit_rows(frame: DataFrame, limit: int | None) -> DataFrame:
    """Return the first rows; None is all."""
    return (
        frame if limit is None else frame.limit(validate_integer("limit", limit, other=" or None"))
    )


def parse_width(every: Duration, name: str = "every") -> int:
    """Parse the width of a bucket, in microseconds.

    Raises:
        SetupError: it is no duration, or shorter than a millisecond.
    """
    micros = round(parse_positive(name, every) * MICROSECONDS)
    if micros < 1000:  # noqa: PLR2004 - a millisecond
        raise SetupError(f"{name} must be 1 millisecond or more, got {every!r}")
    return micros


def build_bucket(time: str, width: int) -> Column:
    """Return the start of the bucket that contains `time`, counted from 1970-01-01T00:00Z.

    `width` is in microseconds. NULL for a time whose bucket starts before the first time of Spark.
    """
    time_microseconds = F.unix_micros(F.col(time))
    return F.timestamp_micros(
        F.try_subtract(time_microseconds, F.pmod(time_microseconds, F.lit(width)))
    )


def build_microseconds_between(start: Column, end: Column) -> Column:
    """Return the difference of two numbers of microseconds, at least 0; NULL if either is NULL.

    NULL, too, if the difference exceeds 64 bits: PostgreSQL's infinity is read as a time 292 000
    years away.
    """
    between = F.try_subtract(end, start)
    # GREATEST ignores NULLs.
    return F.when(between.isNotNull(), F.greatest(between, F.lit(0)))


def build_seconds_between(start: Column, end: Column) -> Column:
    """Return the seconds from `start` to `end`, at least 0; NULL if either is NULL."""
    return build_microseconds_between(F.unix_micros(start), F.unix_micros(end)) / F.lit(
        float(MICROSECONDS)
    )


def build_outcome_counts() -> tuple[Column, ...]:
    """Return the numbers of completed, failed and discarded messages, a column for each."""
    return tuple(
        F.count_if(F.col("state") == name.upper()).alias(name)
        for name in ("completed", "failed", "discarded")
    )
