"""How much was settled over time, and how long messages waited, worked and took in all."""

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.analytics.results import (
    MICROS,
    QUANTILES,
    RESULTS,
    bucket,
    columns_of,
    grouped,
    micros_between,
    need,
    outcome_counts,
    shaped,
    width,
)

ACCURACY = 10_000
"""Spark's own default for percentile_approx: ranks are wrong by at most 1 / ACCURACY."""

MOST_ACCURACY = 2**31 - 1
"""The largest value that percentile_approx takes, a Java int."""

_TIMES = ("created_at", "next_attempt_at", "acquired_at", "last_attempt_at", "archived_at")


def throughput(df: DataFrame, every: Duration = "1m") -> DataFrame:
    """Messages that were settled, by queue and time (`archived_at`).

    Args:
        df: With archived_at, queue, state and payload (or its length as `payload_bytes`).
        every: Width of a bucket: seconds, a timedelta or text like "1h", at least a millisecond.

    Returns:
        A row for each bucket and queue in which anything was settled: bucket TIMESTAMP (its first
        moment), queue STRING, messages, completed, failed, discarded BIGINT, per_second DOUBLE
        (messages a second over the whole bucket, also where the frame covers a part of it),
        payload_bytes BIGINT.

    Raises:
        SetupError: `every` is no such length, or columns are missing.
    """
    micros = width(every)
    size = "payload_bytes" if "payload_bytes" in df.columns else "payload"
    need(df, "throughput", "archived_at", "queue", "state", size)
    length = F.col(size) if size == "payload_bytes" else F.octet_length(size)
    counted = (
        df.where(bucket("archived_at", micros).isNotNull())
        .groupBy(bucket("archived_at", micros).alias("bucket"), "queue")
        .agg(
            F.count("*").alias("messages"),
            *outcome_counts(),
            (F.count("*") / F.lit(micros / MICROS)).alias("per_second"),
            F.coalesce(F.sum(length), F.lit(0)).alias("payload_bytes"),
        )
    )
    return shaped(counted, RESULTS["throughput"])


def latency(
    df: DataFrame, by: str | Sequence[str] = "queue", *, accuracy: int = ACCURACY
) -> DataFrame:
    """How long messages took, in three phases; all times are the database's.

    * `wait`: from the message's last due time to its last claim: acquired_at − the later of
      next_attempt_at and created_at. It includes the time behind other messages, and the lease of
      a process that died with the message. It does not include a delay that the publisher asked
      for, the pause before a retry, or a delay by a policy (Delay, Debounce, a Throttle's slot). A
      created_at after the claim (of a producer whose clock is ahead) is ignored. Only messages that
      were claimed have this phase.
    * `work`: from the last claim to the end of the handler: last_attempt_at − acquired_at. It
      includes the time in which the process held the message before a worker was free. Only
      messages whose last claim led to an attempt have this phase. With AckPolicy.ACK_FIRST the
      attempt ends where the handler starts.
    * `total`: from publishing to the archive, with every delay, retry and pause: archived_at −
      created_at. Only COMPLETED and FAILED messages have this phase.

    A length that would be negative is 0. One between moments that are further apart than 64 bits of
    microseconds, as PostgreSQL's infinity is, is left out.

    Args:
        df: With the five columns above, state and those of `by`.
        by: Names of the columns to group by; () takes all messages as one group.
        accuracy: A percentile is the time of a message whose rank is wrong by at most 1 / accuracy
            of the number of messages; up to so many messages it is exact. Memory grows with it.

    Returns:
        A row for each group and phase that any message has: the columns of `by` (queue STRING),
        phase STRING, messages BIGINT, mean, p50, p75, p90, p95, p99, p999 (99.9 %), max DOUBLE. All
        but `messages` are seconds; a percentile is the smallest time that so many messages took at
        most, never one between two messages.

    Raises:
        SetupError: columns are missing, `by` names a column that the result has anyway, or
            `accuracy` is no whole number from 1 to 2 147 483 647.
    """
    columns = columns_of(by)
    need(df, "latency", *_TIMES, "state", *columns)
    _refuse_own_names("latency", columns)
    return shaped(_measured(df, columns, accuracy), grouped("latency", columns, df))


def latency_trend(
    df: DataFrame,
    every: Duration = "1h",
    by: str | Sequence[str] = "queue",
    *,
    accuracy: int = ACCURACY,
) -> DataFrame:
    """`latency` over time: by the bucket in which messages were archived.

    Args:
        df: As for `latency`.
        every: Width of a bucket: seconds, a timedelta or text like "1h", at least a millisecond.
        by: As for `latency`.
        accuracy: As for `latency`.

    Returns:
        bucket TIMESTAMP (its first moment), then the columns of `latency`: those of `by` (queue
        STRING), phase STRING, messages BIGINT, mean, p50, p75, p90, p95, p99, p999, max DOUBLE in
        seconds.

    Raises:
        SetupError: `every` is no such length, or as for `latency`.
    """
    columns = columns_of(by)
    need(df, "latency_trend", *_TIMES, "state", *columns)
    _refuse_own_names("latency_trend", columns)
    started = bucket("archived_at", width(every))
    timed = df.where(started.isNotNull()).withColumn("bucket", started)
    return shaped(
        _measured(timed, ("bucket", *columns), accuracy), grouped("latency_trend", columns, df)
    )


def _refuse_own_names(result: str, by: Sequence[str]) -> None:
    """Refuse to group by a column that the result has too; Spark ignores the case of letters."""
    own = [field.name for field in RESULTS[result] if field.name != "queue"]
    for name in by:
        if name.lower() in own:
            raise SetupError(
                f"by has {name!r}, and the result has a column of that name ({', '.join(own)}): "
                "rename the frame's, as by withColumnRenamed"
            )


def _measured(df: DataFrame, by: Sequence[str], accuracy: int) -> DataFrame:
    whole_number("accuracy", accuracy, most=MOST_ACCURACY)
    at = {name: F.unix_micros(F.col(name)) for name in _TIMES}
    # A producer whose clock is ahead may have written a created_at after all that followed.
    known = F.when(at["created_at"] <= at["acquired_at"], at["created_at"])
    due = F.greatest(at["next_attempt_at"], known)
    attempted = at["last_attempt_at"] >= at["acquired_at"]
    ended = F.col("state").isin("COMPLETED", "FAILED")
    phases = {
        "wait": micros_between(due, at["acquired_at"]),
        "work": F.when(attempted, micros_between(at["acquired_at"], at["last_attempt_at"])),
        "total": F.when(ended, micros_between(at["created_at"], at["archived_at"])),
    }
    pairs = F.array(
        *(
            F.struct(F.lit(name).alias("phase"), took.alias("_took"))
            for name, took in phases.items()
        )
    )
    long = df.select(*by, F.explode(pairs).alias("_pair")).select(*by, "_pair.phase", "_pair._took")
    found = F.percentile_approx("_took", list(QUANTILES.values()), accuracy)
    measured = (
        long.where(F.col("_took").isNotNull())
        .groupBy(*by, "phase")
        .agg(
            F.count("*").alias("messages"),
            (F.avg("_took") / MICROS).alias("mean"),
            found.alias("_found"),
            (F.max("_took") / MICROS).alias("max"),
        )
    )
    each = ((F.col("_found")[place] / MICROS).alias(name) for place, name in enumerate(QUANTILES))
    return measured.select(*by, "phase", "messages", "mean", *each, "max")
