"""A report's figures: computed in Spark from one read; the driver gets only small results."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker import analytics
from pyspark_sqlbroker.analytics.failures import rate
from pyspark_sqlbroker.analytics.results import MICROS, need, outcome_counts, width
from pyspark_sqlbroker.load.decode import header
from pyspark_sqlbroker.load.frames import ARCHIVE_SCHEMA
from pyspark_sqlbroker.moments import Moment, parse_moment
from pyspark_sqlbroker.report import errors
from pyspark_sqlbroker.report.rows import Row, collect_rows, moment_of

MOST_QUEUES = 12
"""Queues shown by name; a plot has as many colours. The rest are shown together."""

MOST_ROWS = 15
"""Rows of the rankings of errors and keys."""

MOST_ATTEMPTS = 20
"""Messages with more attempts are counted under this number."""

MOST_BUCKETS = 2000
"""Buckets of time that a plot may have when the user chooses their width."""

GOOD_BUCKETS = 150
"""Buckets of time that a plot has at most when the width is chosen here."""

WIDTHS = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600, 43_200, 86_400)
"""Seconds: the widths of buckets to choose from."""

LONGEST_ERROR = 500
"""Characters of an error's first line."""


@dataclass
class Before:
    """What a report shows of the period before.

    Attributes:
        totals: As `Figures.totals`.
        p99: Seconds that 99 % took at most, by phase.
        lost: Lost deliveries.
        rates: Failures by queue, as `failure_rate` has them.
        errors: Messages of those errors of this period that were there before, by their identity.
    """

    totals: Row
    p99: dict[str, float]
    lost: int
    rates: dict[str, Row]
    errors: dict[errors.Identity, int]


@dataclass
class Figures:
    """What a report shows.

    Attributes:
        totals: One row about all messages: messages, completed, failed, discarded, queues, first,
            last (aware datetimes in UTC, or None), bytes.
        every: Width of a bucket in seconds.
        others: The name under which the smaller queues are put together; None if there are none.
        tables: Rows of the results of `spark.analytics`, by function.
        failures: The latest messages of each error in the table of errors.
        before: The period before; None if the report was not given it.
    """

    totals: Row
    every: float
    others: str | None
    tables: dict[str, list[Row]] = field(default_factory=dict)
    failures: list[Row] = field(default_factory=list)
    before: Before | None = None


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
    moment = parse_moment("as_of", as_of)
    if every is not None:
        width(every)
    slim = _slim(frame).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        totals = _totals(slim)
        kept, others = _shown_queues(slim, totals)
        named = _with_names(slim, kept, others)
        rates = _rates(slim, kept, others)
        figures = Figures(totals, _width(totals, every), others)
        found = _results(named, _worst(rates), figures.every, live, moment)
        figures.tables = {name: collect_rows(result) for name, result in found.items()}
        # Errors are named with the queue that they belong to, which a replay must be given.
        figures.tables["top_errors"] = collect_rows(analytics.top_errors(slim, MOST_ROWS))
        identities = [errors.identity(row) for row in figures.tables["top_errors"]]
        figures.failures = errors.latest(slim, identities)
    finally:
        slim.unpersist()
    if before is not None:
        figures.before = _gather_before(before, identities, kept, others)
    return figures


def _gather_before(
    frame: DataFrame,
    identities: Sequence[errors.Identity],
    kept: Sequence[str] | None,
    others: str | None,
) -> Before:
    slim = _slim(frame).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        speeds = collect_rows(analytics.latency(slim, by=()))
        again = collect_rows(analytics.duplicate_deliveries(slim))
        return Before(
            totals=_totals(slim),
            p99={row["phase"]: row["p99"] for row in speeds},
            lost=sum(row["lost_deliveries"] for row in again),
            rates={row["queue"]: row for row in collect_rows(_rates(slim, kept, others))},
            errors=errors.counts(slim, identities),
        )
    finally:
        slim.unpersist()


def _shown_queues(slim: DataFrame, totals: Row) -> tuple[list[str] | None, str | None]:
    """The queues that are shown by themselves, None for all, and the name of the others."""
    if totals["queues"] <= MOST_QUEUES:
        return None, None
    kept = [row["queue"] for row in collect_rows(_largest(slim))]
    return kept, f"{totals['queues'] - len(kept):,} other queues"


def _with_names(slim: DataFrame, kept: Sequence[str] | None, others: str | None) -> DataFrame:
    if kept is None or others is None:
        return slim
    return slim.withColumn("queue", _renamed(~F.col("queue").isin(*kept), others))


def _rates(slim: DataFrame, kept: Sequence[str] | None, others: str | None) -> DataFrame:
    rates = analytics.failure_rate(slim)
    if kept is None or others is None:
        return rates
    return _together(rates, ~F.col("queue").isin(*kept), others)


def _slim(frame: DataFrame) -> DataFrame:
    """Without payloads, and of headers and errors only what is looked at."""
    return frame.select(*ARCHIVE_SCHEMA.names).withColumns(
        {
            "payload_bytes": F.octet_length("payload"),
            "payload": F.lit(None).cast("binary"),
            "headers": F.when(header("['dead-letter']").isNotNull(), F.col("headers")),
            "last_error": F.substring(F.substring_index("last_error", "\n", 1), 1, LONGEST_ERROR),
        }
    )


def _totals(slim: DataFrame) -> Row:
    row = slim.agg(
        F.count("*").alias("messages"),
        *outcome_counts(),
        F.count_distinct("queue").alias("queues"),
        F.unix_micros(F.min("archived_at")).alias("first"),
        F.unix_micros(F.max("archived_at")).alias("last"),
        F.coalesce(F.sum("payload_bytes"), F.lit(0)).alias("bytes"),
    ).collect()[0]
    totals = row.asDict()
    return totals | {name: moment_of(totals[name]) for name in ("first", "last")}


def _largest(slim: DataFrame) -> DataFrame:
    """The queues that are shown by themselves when there are too many."""
    counted = slim.groupBy("queue").agg(F.count("*").alias("messages"))
    return counted.orderBy(F.desc("messages"), "queue").limit(MOST_QUEUES - 1)


def _renamed(small: Column, others: str) -> Column:
    return F.when(small, others).otherwise(F.col("queue"))


def _together(rates: DataFrame, small: Column, others: str) -> DataFrame:
    """Failure rates with those of the small queues as one.

    Rates are computed for each queue first, then added up: a dead letter counts for the queue that
    it came from, which only its header tells.
    """
    known = rates.withColumn("queue", _renamed(small & _archived(), others))
    sums = (F.sum(name).alias(name) for name in ("completed", "failed", "discarded", "moved"))
    return known.groupBy("queue").agg(*sums).withColumn("rate", rate())


def _archived() -> Column:
    """Whether messages were archived from a queue; of others only dead letters are known."""
    return F.col("completed") + F.col("failed") + F.col("discarded") > 0


def _worst(rates: DataFrame) -> DataFrame:
    """The worst first, and not too many: where dead letters come from are names of queues too."""
    worst = F.desc(F.col("failed") + F.col("moved"))
    # A queue that messages were archived from is in the table of queues, and needs its rate there.
    return (
        rates.orderBy(F.desc(_archived()), worst, "queue")
        .limit(2 * MOST_QUEUES)
        .orderBy(worst, "queue")
    )


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


def _results(
    slim: DataFrame, rates: DataFrame, every: float, live: DataFrame | None, as_of: datetime | None
) -> dict[str, DataFrame]:
    tried = slim.withColumn("attempts_count", F.least("attempts_count", F.lit(MOST_ATTEMPTS)))
    ages = analytics.dlq_age(slim, as_of, live=live)
    return {
        "throughput": analytics.throughput(slim, every),
        "latency": analytics.latency(slim),
        "latency_all": analytics.latency(slim, by=()),
        "latency_trend": analytics.latency_trend(slim, every, by=()),
        "failure_rate": rates,
        "retry_histogram": analytics.retry_histogram(tried),
        "dlq_age": ages.orderBy(F.desc("messages"), "queue").limit(MOST_QUEUES),
        "hot_keys": analytics.hot_keys(slim, MOST_ROWS),
        "policy_effects": analytics.policy_effects(slim),
        "duplicate_deliveries": analytics.duplicate_deliveries(slim),
    }
