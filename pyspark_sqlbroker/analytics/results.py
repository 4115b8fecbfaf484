"""The columns of every result."""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.core.times import Duration, positive_seconds
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.load.columns import Field

MICROS = 1_000_000
"""Microseconds in a second."""


def _counts(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, "bigint", True, f"{name} messages") for name in names)


_QUEUE = Field("queue", "string", True, "name of the queue")
_BUCKET = Field("bucket", "timestamp", True, "first moment of the bucket")
_MESSAGES = Field("messages", "bigint", True, "messages")
_ENDS = _counts("completed", "failed", "discarded")
_KEY = Field("key", "string", True, "the key")

QUANTILES = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
"""Columns of latencies and the share of messages that were at most so slow."""

_LATENCY = (
    Field("phase", "string", True, "wait, work or total"),
    Field("messages", "bigint", True, "messages that have this phase"),
    Field("mean", "double", True, "seconds"),
    *(
        Field(name, "double", True, f"seconds; {share:.1%} took at most so long")
        for name, share in QUANTILES.items()
    ),
    Field("max", "double", True, "seconds"),
)

RESULTS: dict[str, tuple[Field, ...]] = {
    "throughput": (
        _BUCKET,
        _QUEUE,
        _MESSAGES,
        *_ENDS,
        Field("per_second", "double", True, "messages a second"),
        Field("payload_bytes", "bigint", True, "bytes of all payloads"),
    ),
    "latency": (_QUEUE, *_LATENCY),
    "latency_trend": (_BUCKET, _QUEUE, *_LATENCY),
    "retry_histogram": (
        _QUEUE,
        Field("attempts", "int", True, "attempts that ended"),
        _MESSAGES,
        *_ENDS,
    ),
    "failure_rate": (
        _QUEUE,
        *_ENDS,
        Field("moved", "bigint", True, "messages that failed and went to a dead letter queue"),
        Field(
            "rate",
            "double",
            False,
            "failed and moved, as a share of these and the completed; NULL without any",
        ),
    ),
    "top_errors": (
        _QUEUE,
        Field("reason", "string", False, "why it failed"),
        Field("error_type", "string", False, "class of the exception"),
        _MESSAGES,
        Field("share", "double", True, "of all failures in the frame"),
        Field("example", "string", False, "first line of the latest error"),
        Field("last_id", "bigint", True, "id of the latest message"),
        Field("last_at", "timestamp", True, "when that was archived"),
    ),
    "dlq_age": (
        _QUEUE,
        _MESSAGES,
        *(
            Field(name, "bigint", True, f"dead letters {name.replace('_', ' ')} old")
            for name in ("under_1h", "1h_to_1d", "1d_to_7d", "7d_to_30d", "over_30d")
        ),
        Field("oldest_at", "timestamp", True, "when the oldest died"),
        Field("oldest_age", "double", True, "seconds from then to as_of"),
    ),
    "duplicate_deliveries": (
        _QUEUE,
        _MESSAGES,
        Field("redelivered", "bigint", True, "messages with lost deliveries"),
        Field("lost_deliveries", "bigint", True, "deliveries whose end was never recorded"),
        Field("share", "double", True, "redelivered, of all messages of the queue"),
        Field("most", "int", True, "lost deliveries of the worst message"),
    ),
    "policy_effects": (
        _QUEUE,
        Field("effect", "string", True, "what became of the messages"),
        Field("state", "string", True, "DISCARDED or FAILED"),
        _MESSAGES,
        Field("share", "double", True, "of all messages of the queue"),
    ),
    "hot_keys": (
        _QUEUE,
        _KEY,
        _MESSAGES,
        Field("share", "double", True, "of all messages of the queue"),
        *_ENDS,
    ),
    "sessions": (
        _QUEUE,
        _KEY,
        Field("started_at", "timestamp", True, "when the first was published"),
        Field("ended_at", "timestamp", True, "when the last was published"),
        _MESSAGES,
        Field("seconds", "double", True, "from the first to the last"),
    ),
    "payload_schema": (
        _QUEUE,
        _MESSAGES,
        Field("decoded", "bigint", True, "messages whose payload could be read"),
        Field("schema", "string", True, "what fits all of them, as DDL; VOID if none was read"),
    ),
}
"""The columns of each function's result, in order."""


def shaped(frame: DataFrame, fields: Sequence[Field]) -> DataFrame:
    """Select exactly these columns, cast to these types."""
    return frame.select(*(F.col(f"`{f.name}`").cast(f.type).alias(f.name) for f in fields))


def grouped(name: str, by: Sequence[str], frame: DataFrame) -> tuple[Field, ...]:
    """The result's fields with the columns of `by` in the place of the queue."""
    types = dict(frame.dtypes)
    place = RESULTS[name].index(_QUEUE)
    own = tuple(Field(column, types[column], False, "as in the frame") for column in by)
    return (*RESULTS[name][:place], *own, *RESULTS[name][place + 1 :])


def need(frame: DataFrame, function: str, *columns: str) -> None:
    """Check that the frame has the columns.

    Raises:
        SetupError: it has not; names those that it lacks.
    """
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise SetupError(
            f"{function} needs the columns {', '.join(columns)}; this frame lacks "
            f"{', '.join(missing)}"
        )


def columns_of(by: str | Sequence[str]) -> tuple[str, ...]:
    """One name or several."""
    return (by,) if isinstance(by, str) else tuple(by)


def limited(frame: DataFrame, limit: int | None) -> DataFrame:
    """The first rows; None is all."""
    return frame if limit is None else frame.limit(whole_number("limit", limit, other=" or None"))


def width(every: Duration, name: str = "every") -> int:
    """The width of a bucket in microseconds.

    Raises:
        SetupError: no length of time, or shorter than a millisecond.
    """
    micros = round(positive_seconds(name, every) * MICROS)
    if micros < 1000:  # noqa: PLR2004 - a millisecond
        raise SetupError(f"{name} must be 1 millisecond or more, got {every!r}")
    return micros


def bucket(time: str, micros: int) -> Column:
    """The first moment of the bucket that `time` falls into, counted from 1970-01-01T00:00Z."""
    at = F.unix_micros(F.col(time))
    return F.timestamp_micros(F.try_subtract(at, F.pmod(at, F.lit(micros))))


def micros_between(start: Column, end: Column) -> Column:
    """From one number of microseconds to another, 0 at least; NULL if either is.

    NULL, too, where the difference is no number of 64 bits: PostgreSQL's infinity is read as a
    moment 292 000 years away.
    """
    between = F.try_subtract(end, start)
    # GREATEST ignores NULLs.
    return F.when(between.isNotNull(), F.greatest(between, F.lit(0)))


def seconds(start: Column, end: Column) -> Column:
    """From `start` to `end`, 0 at least; NULL if either is."""
    return micros_between(F.unix_micros(start), F.unix_micros(end)) / F.lit(float(MICROS))


def outcome_counts() -> tuple[Column, ...]:
    """How many messages were completed, failed and discarded: a column for each."""
    return tuple(
        F.count_if(F.col("state") == name.upper()).alias(name)
        for name in ("completed", "failed", "discarded")
    )
