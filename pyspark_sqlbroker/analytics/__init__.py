"""Analysis of the archive: functions from a frame of `ARCHIVE_SCHEMA` to a documented result.

The frame may come from `read_archive`, from exported Parquet or from `format("sqlbroker")`; columns
that a function does not need may be missing. All functions are lazy, and aggregate in Spark; an
empty frame gives an empty result of the same columns. A row with a NULL time is left out only of
values that need that time. Durations are in seconds. Time buckets are counted from
1970-01-01T00:00Z, whatever the session's zone: days begin at midnight UTC.

`RESULTS` has the columns of each: name, Spark SQL type, description.
"""

from pyspark_sqlbroker.analytics.contents import hot_keys, payload_schema, sessions
from pyspark_sqlbroker.analytics.outcomes import (
    dlq_age,
    duplicate_deliveries,
    failure_rate,
    policy_effects,
    retry_histogram,
    top_errors,
)
from pyspark_sqlbroker.analytics.results import RESULTS
from pyspark_sqlbroker.analytics.speed import latency, latency_trend, throughput

__all__ = (
    "RESULTS",
    "dlq_age",
    "duplicate_deliveries",
    "failure_rate",
    "hot_keys",
    "latency",
    "latency_trend",
    "payload_schema",
    "policy_effects",
    "retry_histogram",
    "sessions",
    "throughput",
    "top_errors",
)
