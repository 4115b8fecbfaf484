"""How much was settled, over time."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from faststream_sqlbroker.core.times import Duration
from pyspark_sqlbroker.analytics.results import (
    MICROS,
    RESULTS,
    bucket,
    need,
    outcome_counts,
    shaped,
    width,
)


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
