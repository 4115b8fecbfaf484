"""A report's figures: computed in Spark from one read; the driver gets only small results."""

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
from pyspark_sqlbroker.analytics.outcomes import rate, single_failures
from pyspark_sqlbroker.analytics.results import MICROS, need, outcome_counts, width
from pyspark_sqlbroker.load.decode import header
from pyspark_sqlbroker.load.frames import ARCHIVE_SCHEMA
from pyspark_sqlbroker.moments import Moment, parse_moment

MOST_QUEUES = 12
"""Queues shown by name; a plot has as many colours. The rest are shown together."""

MOST_ROWS = 15
"""Rows of the rankings of errors and keys."""

MOST_MESSAGES = 5
"""Messages of an error that are shown."""

LONGEST_ERROR = 500
"""Characters of an error's first line."""

MOST_ATTEMPTS = 20
"""Messages with more attempts are counted under this number."""

MOST_BUCKETS = 2000
"""Buckets of time that a plot may have when the user chooses their width."""

GOOD_BUCKETS = 150
"""Buckets of time that a plot has at most when the width is chosen here."""

WIDTHS = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600, 43_200, 86_400)
"""Seconds: the widths of buckets to choose from."""

Row = dict[str, Any]

_FIRST = -62_135_510_400_000_000
"""Microseconds from 1970 to the second day of the year 1, the first that an axis can show."""

_LAST = 253_402_300_799_000_000
"""To the last second of the year 9999."""


@dataclass
class Figures:
    """The figures of a period.

    Attributes:
        totals: One row about all messages: messages, completed, failed, discarded, queues, first,
            last (aware datetimes in UTC, or None), bytes.
        every: Width of a bucket in seconds.
        queues: Names of the queues, the largest first; then the name under which the smaller ones
            are put together, whether there are any or not.
        tables: Rows of the results of `spark.analytics`, by function; errors have an `error` too,
            which tells them from others.
        failures: The latest messages of each error in the table of errors.
        before: The period before, with `totals` and some tables, of which the errors are those of
            this period; None if the report was not given it.
    """

    totals: Row
    every: float
    queues: list[str]
    tables: dict[str, list[Row]] = field(default_factory=dict)
    failures: list[Row] = field(default_factory=list)
    before: "Figures | None" = None


def gather(
    frame: DataFrame,
    *,
    live: DataFrame | None = None,
    every: Duration | None = None,
    as_of: Moment | None = None,
    before: DataFrame | None = None,
) -> Figures:
    """Compute all figures; each frame is read once."""
    need(frame, "the report", *ARCHIVE_SCHEMA.names)
    if before is not None:
        need(before, "the report (before)", *ARCHIVE_SCHEMA.names)
    # What is wrong is told before anything is read.
    moment = parse_moment("as_of", as_of)
    _width({"first": None}, every)
    with _cache(frame) as slim:
        totals = _totals(slim)
        figures = Figures(totals, _width(totals, every), _queues(slim, totals["queues"]))
        results = _results(slim, figures, live, moment)
        figures.tables = {name: collect_rows(result) for name, result in results.items()}
        errors = [row["error"] for row in figures.tables["top_errors"]]
        figures.failures = latest_failures(slim, errors)
    if before is not None:
        with _cache(before) as slim:
            results = _comparable_results(slim, figures.queues)
            top_errors = analytics.top_errors(slim, None).withColumn("error", _error())
            results["top_errors"] = top_errors.where(F.col("error").isin(errors))
            tables = {name: collect_rows(result) for name, result in results.items()}
            figures.before = Figures(_totals(slim), figures.every, figures.queues, tables)
    return figures


@contextmanager
def _cache(frame: DataFrame) -> Iterator[DataFrame]:
    """Cache the columns of a report: no payloads, and the parts of headers and errors it needs."""
    columns = {
        "payload_bytes": F.octet_length("payload"),
        "payload": F.lit(None).cast("binary"),
        "headers": F.when(header("['dead-letter']").isNotNull(), F.col("headers")),
        "last_error": F.substring(F.substring_index("last_error", "\n", 1), 1, LONGEST_ERROR),
    }
    slim = frame.select(*ARCHIVE_SCHEMA.names).withColumns(columns).cache()
    try:
        yield slim
    finally:
        slim.unpersist()


def _totals(slim: DataFrame) -> Row:
    totals = slim.agg(
        F.count("*").alias("messages"),
        *outcome_counts(),
        F.count_distinct("queue").alias("queues"),
        F.min("archived_at").alias("first"),
        F.max("archived_at").alias("last"),
        F.coalesce(F.sum("payload_bytes"), F.lit(0)).alias("bytes"),
    )
    return collect_rows(totals)[0]


def _queues(slim: DataFrame, count: int) -> list[str]:
    limit = MOST_QUEUES if count <= MOST_QUEUES else MOST_QUEUES - 1
    counts = slim.groupBy("queue").count().orderBy(F.desc("count"), "queue").limit(limit)
    return [*(row["queue"] for row in counts.collect()), f"{count - limit:,} other queues"]


def _shown_name(queues: Sequence[str], small: Column) -> Column:
    """Return the queue's name, or the last of `queues` for a small queue without its own name."""
    unnamed = small & ~F.col("queue").isin(*queues[:-1])
    return F.when(unnamed, queues[-1]).otherwise(F.col("queue")).alias("queue")


def _archived() -> Column:
    """Tell the queues with archived messages from the sources of dead letters."""
    return F.col("completed") + F.col("failed") + F.col("discarded") > 0


def _width(totals: Row, every: Duration | None) -> float:
    """Seconds of a bucket."""
    span = 0.0 if totals["first"] is None else (totals["last"] - totals["first"]).total_seconds()
    if every is None:
        days = 86_400 * math.ceil(span / GOOD_BUCKETS / 86_400)
        return float(next((good for good in WIDTHS if span / good <= GOOD_BUCKETS), days))
    seconds = width(every) / MICROS
    if span / seconds > MOST_BUCKETS:
        raise SetupError(
            f"every={every!r} gives {math.ceil(span / seconds):,} buckets, at most "
            f"{MOST_BUCKETS:,} are drawn: give {math.ceil(span / MOST_BUCKETS)} seconds or more, "
            "or a shorter period"
        )
    return seconds


def _comparable_results(slim: DataFrame, queues: Sequence[str]) -> dict[str, DataFrame]:
    """Compute the results that a report compares with those of the period before."""
    # Rates are computed for each queue first, then added up: a dead letter counts for the queue
    # that it came from, which only its header tells.
    sums = (F.sum(name).alias(name) for name in ("completed", "failed", "discarded", "moved"))
    rates = analytics.failure_rate(slim).groupBy(_shown_name(queues, _archived())).agg(*sums)
    named = slim.withColumn("queue", _shown_name(queues, F.lit(True)))
    return {
        "latency_all": analytics.latency(slim, by=()),
        "failure_rate": rates.withColumn("rate", rate()),
        "duplicate_deliveries": analytics.duplicate_deliveries(named),
    }


def _results(
    slim: DataFrame, figures: Figures, live: DataFrame | None, as_of: datetime | None
) -> dict[str, DataFrame]:
    results = _comparable_results(slim, figures.queues)
    # The worst first, and not too many: where dead letters come from are names of queues too. A
    # queue that messages were archived from is in the table of queues, and needs its rate there.
    worst = F.desc(F.col("failed") + F.col("moved"))
    rates = results["failure_rate"].where("rate IS NOT NULL")
    rates = rates.orderBy(F.desc(_archived()), worst, "queue")
    named = slim.withColumn("queue", _shown_name(figures.queues, F.lit(True)))
    tried = named.withColumn("attempts_count", F.least("attempts_count", F.lit(MOST_ATTEMPTS)))
    ages = analytics.dlq_age(named, as_of, live=live).orderBy(F.desc("messages"), "queue")
    return results | {
        "throughput": analytics.throughput(named, figures.every),
        "latency": analytics.latency(named),
        "latency_trend": analytics.latency_trend(slim, figures.every, by=()),
        "failure_rate": rates.limit(2 * MOST_QUEUES).orderBy(worst, "queue"),
        # Errors are named with the queue that they belong to, which a replay must be given.
        "top_errors": analytics.top_errors(slim, MOST_ROWS).withColumn("error", _error()),
        "retry_histogram": analytics.retry_histogram(tried),
        "dlq_age": ages.limit(MOST_QUEUES),
        "hot_keys": analytics.hot_keys(named, MOST_ROWS),
        "policy_effects": analytics.policy_effects(named),
    }


def latest_failures(slim: DataFrame, errors: list[str]) -> list[Row]:
    """Collect the latest messages of each error, the newest first: what `single_failures` has, with
    the message's own queue as `archived_from`, its key, attempts and time of publishing.
    """
    messages = slim.withColumn("archived_from", F.col("queue"))
    failures = single_failures(messages, "archived_from", "key", "attempts_count", "created_at")
    failures = failures.withColumn("error", _error()).where(F.col("error").isin(errors))
    newest = Window.partitionBy("error").orderBy(F.desc("archived_at"), F.desc("id"))
    ranked = failures.withColumn("_rank", F.row_number().over(newest))
    rows = collect_rows(ranked.where(F.col("_rank") <= MOST_MESSAGES))
    return sorted(rows, key=lambda row: (errors.index(row["error"]), row["_rank"]))


def _error() -> Column:
    """Return queue, reason and class of the exception as a JSON text, which skips NULLs."""
    return F.to_json(F.struct("queue", "reason", "error_type"))


def collect_rows(frame: DataFrame) -> list[Row]:
    """Collect rows with aware datetimes in UTC, for any time zone of Python and the session."""
    times = {name: F.unix_micros(name) for name, kind in frame.dtypes if kind == "timestamp"}
    rows = [row.asDict() for row in frame.withColumns(times).collect()]
    return [row | {name: moment_of(row[name]) for name in times} for row in rows]


def moment_of(micros: int | None) -> datetime | None:
    """Return the moment, or the nearest that an axis can show."""
    return None if micros is None else from_microseconds(min(max(micros, _FIRST), _LAST))
