"""Compute a report's figures in Spark from one read; the driver receives only small results."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from faststream_sqlbroker.core.times import Duration, from_microseconds
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker import analytics
from pyspark_sqlbroker.analytics.outcomes import build_failure_rate, list_failures
from pyspark_sqlbroker.analytics.results import (
    MICROSECONDS,
    build_outcome_counts,
    parse_width,
    require_columns,
)
from pyspark_sqlbroker.load.decode import get_header
from pyspark_sqlbroker.load.frames import ARCHIVE_SCHEMA
from pyspark_sqlbroker.moments import TimeInput, parse_time

MAX_QUEUES = 12
"""Number of queues shown by name, as a plot has as many colours; smaller queues are shown together.

"""

MAX_ROWS = 15
"""Rows of the rankings of errors and keys."""

MAX_MESSAGES = 5
"""Number of messages shown for an error."""

MAX_ERROR_LENGTH = 500
"""Maximum number of characters of an error's first line."""

MAX_ATTEMPTS = 20
"""Messages with more attempts are counted under this number."""

MAX_BUCKETS = 2000
"""Maximum number of buckets of time if the user chooses their width."""

DEFAULT_MAX_BUCKETS = 150
"""Maximum number of buckets of time if the width is chosen automatically."""

BUCKET_WIDTHS = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600, 43_200, 86_400)
"""Widths of buckets to choose from, in seconds."""

Row = dict[str, Any]

_MIN_TIME = -62_135_510_400_000_000
"""Microseconds from 1970 to the second day of the year 1, the first day that an axis can show."""

_MAX_TIME = 253_402_300_799_000_000
"""Microseconds from 1970 to the last second of the year 9999."""


@dataclass
class ReportFigures:
    """The figures of a period.

    Attributes:
        totals: One row about all messages: messages, completed, failed, discarded, queues, first,
            last (aware datetimes in UTC, or None), bytes.
        every: Width of a bucket in seconds.
        queues: Names of the queues, the largest first; then the name for all smaller queues, even
            if there are none.
        tables: Rows of the results of `spark.analytics`, by function; errors also have an `error`,
            which identifies them.
        failures: The latest messages of each error in the table of errors.
        before: The previous period, with `totals` and some tables, whose errors are those of this
            period; None without a previous period.
    """

    totals: Row
    every: float
    queues: list[str]
    tables: dict[str, list[Row]] = field(default_factory=dict)
    failures: list[Row] = field(default_factory=list)
    before: "ReportFigures | None" = None


def compute_figures(
    frame: DataFrame,
    *,
    live: DataFrame | None = None,
    every: Duration | None = None,
    as_of: TimeInput | None = None,
    before: DataFrame | None = None,
) -> ReportFigures:
    """Compute all figures of a report; each frame is read only once, and cached as `slim`.

    `before` is the previous period, for comparison: of its errors only those of this period are
    kept.
    """
    require_columns(frame, "the report", *ARCHIVE_SCHEMA.names)
    if before is not None:
        require_columns(before, "the report (before)", *ARCHIVE_SCHEMA.names)
    # Check all options before anything is read, which may take minutes.
    as_of_time = parse_time("as_of", as_of)
    _choose_width({"first": None}, every)
    with _cache(frame) as slim:
        totals = _compute_totals(slim)
        figures = ReportFigures(
            totals, _choose_width(totals, every), _rank_queues(slim, totals["queues"])
        )
        results = _compute_results(slim, figures, live, as_of_time)
        figures.tables = {name: collect_rows(result) for name, result in results.items()}
        errors = [row["error"] for row in figures.tables["top_errors"]]
        figures.failures = collect_latest_failures(slim, errors)
    if before is not None:
        with _cache(before) as slim:
            results = _compute_comparable_results(slim, figures.queues)
            top_errors = analytics.top_errors(slim, None).withColumn("error", _build_error_id())
            results["top_errors"] = top_errors.where(F.col("error").isin(errors))
            tables = {name: collect_rows(result) for name, result in results.items()}
            figures.before = ReportFigures(
                _compute_totals(slim), figures.every, figures.queues, tables
            )
    return figures


@contextmanager
def _cache(frame: DataFrame) -> Iterator[DataFrame]:
    """Cache the columns that a report needs; the frame is then read only once.

    Payloads are replaced by their length. Of headers and errors only the used parts are kept.
    """
    columns = {
        "payload_bytes": F.octet_length("payload"),
        "payload": F.lit(None).cast("binary"),
        "headers": F.when(get_header("['dead-letter']").isNotNull(), F.col("headers")),
        "last_error": F.substring(F.substring_index("last_error", "\n", 1), 1, MAX_ERROR_LENGTH),
    }
    slim = frame.select(*ARCHIVE_SCHEMA.names).withColumns(columns).cache()
    try:
        yield slim
    finally:
        slim.unpersist()


def _compute_totals(slim: DataFrame) -> Row:
    """Compute the figures of all messages together, as one row.

    Its first and last time decide the width of the buckets; both are None without messages.
    """
    totals = slim.agg(
        F.count("*").alias("messages"),
        *build_outcome_counts(),
        F.count_distinct("queue").alias("queues"),
        F.min("archived_at").alias("first"),
        F.max("archived_at").alias("last"),
        F.coalesce(F.sum("payload_bytes"), F.lit(0)).alias("bytes"),
    )
    return collect_rows(totals)[0]


def _rank_queues(slim: DataFrame, count: int) -> list[str]:
    """Return the largest queues, and last a name for the sum of all smaller queues.

    `count` is the number of all queues. A chart has colours for `MAX_QUEUES` names.
    """
    limit = count if count <= MAX_QUEUES else MAX_QUEUES - 1
    counts = slim.groupBy("queue").count().orderBy(F.desc("count"), "queue").limit(limit)
    return [*(row["queue"] for row in counts.collect()), f"{count - limit:,} other queues"]


def _build_display_name(queues: Sequence[str], small: Column) -> Column:
    """Return the queue's name, or the last of `queues` for a small queue without a name.

    `queues` has the names to show, then a name for all other queues. Only where `small` is true may
    a queue be counted among these others.
    """
    unnamed = small & ~F.col("queue").isin(*queues[:-1])
    return F.when(unnamed, queues[-1]).otherwise(F.col("queue")).alias("queue")


def _build_has_archived() -> Column:
    """Return a condition on queues that have archived messages themselves.

    A queue may appear only as the origin of dead letters.
    """
    return F.col("completed") + F.col("failed") + F.col("discarded") > 0


def _choose_width(totals: Row, every: Duration | None) -> float:
    """Return the width of a bucket in seconds: `every`, or the smallest that gives few buckets.

    `totals` has the first and last time of the period.
    """
    span = 0.0 if totals["first"] is None else (totals["last"] - totals["first"]).total_seconds()
    if every is None:
        # Whole days, for a span that is too long for every width of the list.
        days = 86_400 * math.ceil(span / DEFAULT_MAX_BUCKETS / 86_400)
        return float(
            next(
                (
                    candidate
                    for candidate in BUCKET_WIDTHS
                    if span / candidate <= DEFAULT_MAX_BUCKETS
                ),
                days,
            )
        )
    seconds = parse_width(every) / MICROSECONDS
    if span / seconds > MAX_BUCKETS:
        raise SetupError(
            f"every={every!r} gives {math.ceil(span / seconds):,} buckets, more than "
            f"{MAX_BUCKETS:,}: set every to {math.ceil(span / MAX_BUCKETS)} seconds or more, or "
            "use a shorter period"
        )
    return seconds


def _compute_comparable_results(slim: DataFrame, queues: Sequence[str]) -> dict[str, DataFrame]:
    """Compute the results that a report also shows for the previous period.

    `queues` are the names of this period, so that both periods show the same queues by name.
    """
    # Rates are computed for each queue first, then added up: a dead letter counts for its original
    # queue, which only its header names.
    sums = (F.sum(name).alias(name) for name in ("completed", "failed", "discarded", "moved"))
    rates = (
        analytics.failure_rate(slim)
        .groupBy(_build_display_name(queues, _build_has_archived()))
        .agg(*sums)
    )
    named = slim.withColumn("queue", _build_display_name(queues, F.lit(True)))
    return {
        "latency_all": analytics.latency(slim, by=()),
        "failure_rate": rates.withColumn("rate", build_failure_rate()),
        "duplicate_deliveries": analytics.duplicate_deliveries(named),
    }


def _compute_results(
    slim: DataFrame, figures: ReportFigures, live: DataFrame | None, as_of: datetime | None
) -> dict[str, DataFrame]:
    """Compute the results of a period, limited to the rows that fit on a page.

    Small queues are shown together under the last name of `figures.queues`. The results are still
    frames of Spark; `compute_figures` collects them.
    """
    results = _compute_comparable_results(slim, figures.queues)
    # The worst queues first, and not too many: sources of dead letters are queues too. A queue with
    # archived messages is in the table of queues, and needs its rate there.
    by_failures = F.desc(F.col("failed") + F.col("moved"))
    rates = results["failure_rate"].where("rate IS NOT NULL")
    rates = rates.orderBy(F.desc(_build_has_archived()), by_failures, "queue")
    named = slim.withColumn("queue", _build_display_name(figures.queues, F.lit(True)))
    with_capped_attempts = named.withColumn(
        "attempts_count", F.least("attempts_count", F.lit(MAX_ATTEMPTS))
    )
    ages = analytics.dlq_age(named, as_of, live=live).orderBy(F.desc("messages"), "queue")
    return results | {
        "throughput": analytics.throughput(named, figures.every),
        "latency": analytics.latency(named),
        "latency_trend": analytics.latency_trend(slim, figures.every, by=()),
        "failure_rate": rates.limit(2 * MAX_QUEUES).orderBy(by_failures, "queue"),
        # Errors include the name of their queue, which a replay needs.
        "top_errors": analytics.top_errors(slim, MAX_ROWS).withColumn("error", _build_error_id()),
        "retry_histogram": analytics.retry_histogram(with_capped_attempts),
        "dlq_age": ages.limit(MAX_QUEUES),
        "hot_keys": analytics.hot_keys(named, MAX_ROWS),
        "policy_effects": analytics.policy_effects(named),
    }


def collect_latest_failures(slim: DataFrame, errors: list[str]) -> list[Row]:
    """Collect the latest messages of each error, the newest first.

    A row has the columns of `list_failures`, with the message's own queue as `archived_from`, its
    key, attempts and time of publishing.
    """
    messages = slim.withColumn("archived_from", F.col("queue"))
    failures = list_failures(messages, "archived_from", "key", "attempts_count", "created_at")
    failures = failures.withColumn("error", _build_error_id()).where(F.col("error").isin(errors))
    latest_first = Window.partitionBy("error").orderBy(F.desc("archived_at"), F.desc("id"))
    ranked = failures.withColumn("_rank", F.row_number().over(latest_first))
    rows = collect_rows(ranked.where(F.col("_rank") <= MAX_MESSAGES))
    return sorted(rows, key=lambda row: (errors.index(row["error"]), row["_rank"]))


def _build_error_id() -> Column:
    """Return queue, reason and class of the exception as a JSON text, which skips NULLs.

    The text identifies an error in the tables of a report, and when two periods are compared.
    """
    return F.to_json(F.struct("queue", "reason", "error_type"))


def collect_rows(frame: DataFrame) -> list[Row]:
    """Collect rows with aware datetimes in UTC, for any time zone of Python and the session."""
    times = {
        name: F.unix_micros(name) for name, type_name in frame.dtypes if type_name == "timestamp"
    }
    rows = [row.asDict() for row in frame.withColumns(times).collect()]
    return [row | {name: to_datetime(row[name]) for name in times} for row in rows]


def to_datetime(micros: int | None) -> datetime | None:
    """Return the time, or the nearest time that an axis can show; None stays None.

    Databases have times that Python lacks, such as PostgreSQL's infinity.
    """
    return None if micros is None else from_microseconds(min(max(micros, _MIN_TIME), _MAX_TIME))
