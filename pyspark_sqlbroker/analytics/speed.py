"""Throughput over time, and how long messages waited, worked and took in total."""

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from faststream_sqlbroker.core.checks import validate_integer
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.analytics.results import (
    MICROSECONDS,
    QUANTILES,
    RESULTS,
    build_bucket,
    build_microseconds_between,
    build_outcome_counts,
    group_fields,
    parse_width,
    require_columns,
    to_columns,
    to_result,
)

ACCURACY = 10_000
"""Spark's own default for percentile_approx: ranks are wrong by at most 1 / ACCURACY."""

MAX_ACCURACY = 2**31 - 1
"""Maximum value that percentile_approx accepts, a Java int."""

_TIME_COLUMNS = ("created_at", "next_attempt_at", "acquired_at", "last_attempt_at", "archived_at")


def throughput(df: DataFrame, every: Duration = "1m") -> DataFrame:
    """Count settled messages by queue and time (`archived_at`).

    Args:
        df: A frame with archived_at, queue, state and payload (or its length as `payload_bytes`).
        every: Width of a bucket: seconds, a timedelta or text like "1h", at least a millisecond.

    Returns:
        A row for each bucket and queue with settled messages: bucket TIMESTAMP (its start), queue
        STRING, messages, completed, failed, discarded BIGINT, per_second DOUBLE (messages a second
        over the whole bucket, even if the frame covers only a part of it), payload_bytes BIGINT.

    Raises:
        SetupError: `every` is no such duration, or columns are missing.
    """
    micros = parse_width(every)
    size = "payload_bytes" if "payload_bytes" in df.columns else "payload"
    require_columns(df, "throughput", "archived_at", "queue", "state", size)
    payload_length = F.col(size) if size == "payload_bytes" else F.octet_length(size)
    counts = (
        df.where(build_bucket("archived_at", micros).isNotNull())
        .groupBy(build_bucket("archived_at", micros).alias("bucket"), "queue")
        .agg(
            F.count("*").alias("messages"),
            *build_outcome_counts(),
            (F.count("*") / F.lit(micros / MICROSECONDS)).alias("per_second"),
            F.coalesce(F.sum(payload_length), F.lit(0)).alias("payload_bytes"),
        )
    )
    return to_result(counts, RESULTS["throughput"])


def latency(
    df: DataFrame, by: str | Sequence[str] = "queue", *, accuracy: int = ACCURACY
) -> DataFrame:
    """Compute how long messages took, in three phases; all times are the database's.

    * `wait`: from the message's last due time to its last claim: acquired_at − the later of
      next_attempt_at and created_at. It includes the time behind other messages, and the lease of a
      process that died with the message. It does not include a delay requested by the publisher,
      the pause before a retry, or a delay by a policy (Delay, Debounce, a Throttle's slot). A
      created_at after the claim (of a producer whose clock is ahead) is ignored. Only messages that
      were claimed have this phase.
    * `work`: from the last claim to the end of the handler: last_attempt_at − acquired_at. It
      includes the time in which the process held the message before a worker was free. Only
      messages whose last claim led to an attempt have this phase. With AckPolicy.ACK_FIRST the
      attempt ends where the handler starts.
    * `total`: from publishing to the archive, with every delay, retry and pause: archived_at −
      created_at. Only COMPLETED and FAILED messages have this phase.

    A negative duration counts as 0. A duration of more than 64 bits of microseconds, as with
    PostgreSQL's infinity, is left out.

    Args:
        df: A frame with the five columns above, state, and the columns of `by`.
        by: Names of the columns to group by; () takes all messages as one group.
        accuracy: A percentile is the time of a message whose rank is wrong by at most 1 / accuracy
            of the number of messages; up to so many messages it is exact. Memory use grows with it.

    Returns:
        A row for each existing group and phase: the columns of `by` (queue STRING), phase STRING,
        messages BIGINT, mean, p50, p75, p90, p95, p99, p999 (99.9 %), max DOUBLE. All columns but
        `messages` are seconds; a percentile is the smallest time that so many messages took at
        most, never a value between two messages.

    Raises:
        SetupError: columns are missing, `by` names a column of the result, or `accuracy` is no
            whole number from 1 to 2 147 483 647.
    """
    columns = to_columns(by)
    require_columns(df, "latency", *_TIME_COLUMNS, "state", *columns)
    _check_group_columns("latency", columns)
    return to_result(_measure_latency(df, columns, accuracy), group_fields("latency", columns, df))


def latency_trend(
    df: DataFrame,
    every: Duration = "1h",
    by: str | Sequence[str] = "queue",
    *,
    accuracy: int = ACCURACY,
) -> DataFrame:
    """Compute `latency` over time, by the bucket in which messages were archived.

    Args:
        df: As for `latency`.
        every: Width of a bucket: seconds, a timedelta or text like "1h", at least a millisecond.
        by: As for `latency`.
        accuracy: As for `latency`.

    Returns:
        bucket TIMESTAMP (its start), then the columns of `latency`: the columns of `by` (queue
        STRING), phase STRING, messages BIGINT, mean, p50, p75, p90, p95, p99, p999, max DOUBLE in
        seconds.

    Raises:
        SetupError: `every` is no such duration, or as for `latency`.
    """
    columns = to_columns(by)
    require_columns(df, "latency_trend", *_TIME_COLUMNS, "state", *columns)
    _check_group_columns("latency_trend", columns)
    bucket_start = build_bucket("archived_at", parse_width(every))
    with_bucket = df.where(bucket_start.isNotNull()).withColumn("bucket", bucket_start)
    return to_result(
        _measure_latency(with_bucket, ("bucket", *columns), accuracy),
        group_fields("latency_trend", columns, df),
    )


def _check_group_columns(result: str, by: Sequence[str]) -> None:
    """Check that no grouping column is a column of the result; Spark ignores case.

    The result would have two columns of one name. `result` is the function's name in `RESULTS`.
    """
    result_columns = [field.name for field in RESULTS[result] if field.name != "queue"]
    for name in by:
        if name.lower() in result_columns:
            raise SetupError(
                f"by contains {name!r}, which is also a column of the result "
                f"({', '.join(result_columns)}): rename the column of the frame, for example with "
                "withColumnRenamed"
            )


def _measure_latency(df: DataFrame, by: Sequence[str], accuracy: int) -> DataFrame:
    """Compute the statistics of each phase, grouped by the columns of `by` and the phase.

    Each message becomes three rows, one for each phase of `latency`. A phase that the message does
    not have is NULL there and is dropped.
    """
    validate_integer("accuracy", accuracy, maximum=MAX_ACCURACY)
    microseconds = {name: F.unix_micros(F.col(name)) for name in _TIME_COLUMNS}
    # A producer whose clock is ahead may have written a created_at later than the other times.
    created = F.when(
        microseconds["created_at"] <= microseconds["acquired_at"], microseconds["created_at"]
    )
    due_at = F.greatest(microseconds["next_attempt_at"], created)
    was_attempted = microseconds["last_attempt_at"] >= microseconds["acquired_at"]
    is_settled = F.col("state").isin("COMPLETED", "FAILED")
    phases = {
        "wait": build_microseconds_between(due_at, microseconds["acquired_at"]),
        "work": F.when(
            was_attempted,
            build_microseconds_between(
                microseconds["acquired_at"], microseconds["last_attempt_at"]
            ),
        ),
        "total": F.when(
            is_settled,
            build_microseconds_between(microseconds["created_at"], microseconds["archived_at"]),
        ),
    }
    pairs = F.array(
        *(
            F.struct(F.lit(name).alias("phase"), duration.alias("_duration"))
            for name, duration in phases.items()
        )
    )
    by_phase = df.select(*by, F.explode(pairs).alias("_pair")).select(
        *by, "_pair.phase", "_pair._duration"
    )
    quantiles = F.percentile_approx("_duration", list(QUANTILES.values()), accuracy)
    statistics = (
        by_phase.where(F.col("_duration").isNotNull())
        .groupBy(*by, "phase")
        .agg(
            F.count("*").alias("messages"),
            (F.avg("_duration") / MICROSECONDS).alias("mean"),
            quantiles.alias("_quantiles"),
            (F.max("_duration") / MICROSECONDS).alias("max"),
        )
    )
    quantile_columns = (
        (F.col("_quantiles")[index] / MICROSECONDS).alias(name)
        for index, name in enumerate(QUANTILES)
    )
    return statistics.select(*by, "phase", "messages", "mean", *quantile_columns, "max")
