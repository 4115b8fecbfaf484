"""A report's figures: computed in Spark from one read; the driver gets only small results."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import reduce
from operator import or_
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.storagelevel import StorageLevel

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

ErrorIdentity = tuple[str, str | None, str | None]
"""Queue, reason and class of the exception."""

_IDENTITY = ("queue", "reason", "error_type")

_FIRST = datetime.min.replace(tzinfo=timezone.utc)

_LAST = datetime.max.replace(tzinfo=timezone.utc)


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
    errors: dict[ErrorIdentity, int]


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
        identities = [error_of(row) for row in figures.tables["top_errors"]]
        figures.failures = latest_failures(slim, identities)
    finally:
        slim.unpersist()
    if before is not None:
        figures.before = _gather_before(before, identities, kept, others)
    return figures


def _gather_before(
    frame: DataFrame,
    identities: Sequence[ErrorIdentity],
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
            errors=count_errors(slim, identities),
        )
    finally:
        slim.unpersist()


def _shown_queues(slim: DataFrame, totals: Row) -> tuple[list[str] | None, str | None]:
    """The queues that are shown by themselves, None for all, and the name of the others."""
    if totals["queues"] <= MOST_QUEUES:
        return None, None
    counted = slim.groupBy("queue").agg(F.count("*").alias("messages"))
    largest = counted.orderBy(F.desc("messages"), "queue").limit(MOST_QUEUES - 1)
    kept = [row["queue"] for row in collect_rows(largest)]
    return kept, f"{totals['queues'] - len(kept):,} other queues"


def _with_names(slim: DataFrame, kept: Sequence[str] | None, others: str | None) -> DataFrame:
    if kept is None or others is None:
        return slim
    return slim.withColumn("queue", _renamed(~F.col("queue").isin(*kept), others))


def _rates(slim: DataFrame, kept: Sequence[str] | None, others: str | None) -> DataFrame:
    """Failure rates, with those of the small queues as one."""
    rates = analytics.failure_rate(slim)
    if kept is None or others is None:
        return rates
    # Rates are computed for each queue first, then added up: a dead letter counts for the queue
    # that it came from, which only its header tells.
    small = ~F.col("queue").isin(*kept) & _archived()
    sums = (F.sum(name).alias(name) for name in ("completed", "failed", "discarded", "moved"))
    known = rates.withColumn("queue", _renamed(small, others)).groupBy("queue").agg(*sums)
    return known.withColumn("rate", rate())


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


def _renamed(small: Column, others: str) -> Column:
    return F.when(small, others).otherwise(F.col("queue"))


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


def latest_failures(slim: DataFrame, shown: Sequence[ErrorIdentity]) -> list[Row]:
    """The latest messages of each error, the newest first: what `single_failures` has, with the
    message's own queue as `archived_from`, its key, attempts and time of publishing.
    """
    if not shown:
        return []
    own = slim.withColumn("archived_from", F.col("queue"))
    each = single_failures(own, "archived_from", "key", "attempts_count", "created_at")
    newest = Window.partitionBy(*_IDENTITY).orderBy(F.desc("archived_at"), F.desc("id"))
    ranked = each.where(_one_of(shown)).withColumn("_rank", F.row_number().over(newest))
    rows = collect_rows(ranked.where(F.col("_rank") <= MOST_MESSAGES))
    order = {error: place for place, error in enumerate(shown)}
    return sorted(rows, key=lambda row: (order[error_of(row)], row["_rank"]))


def count_errors(slim: DataFrame, shown: Sequence[ErrorIdentity]) -> dict[ErrorIdentity, int]:
    """How many messages had each error; those that none had are left out."""
    if not shown:
        return {}
    each = single_failures(slim).where(_one_of(shown))
    counted = each.groupBy(*_IDENTITY).agg(F.count("*").alias("messages"))
    return {error_of(row): row["messages"] for row in collect_rows(counted)}


def _one_of(shown: Sequence[ErrorIdentity]) -> Column:
    same = (
        F.col("queue").eqNullSafe(F.lit(queue))
        & F.col("reason").eqNullSafe(F.lit(reason))
        & F.col("error_type").eqNullSafe(F.lit(error_type))
        for queue, reason, error_type in shown
    )
    return reduce(or_, same)


def error_of(row: Row) -> ErrorIdentity:
    """What tells the error of a row from others."""
    return row["queue"], row["reason"], row["error_type"]


def collect_rows(frame: DataFrame) -> list[Row]:
    """The rows, with aware datetimes in UTC for any time zone of Python and of the session."""
    times = [name for name, kind in frame.dtypes if kind == "timestamp"]
    plain = frame.select(
        *(
            F.unix_micros(f"`{n}`").alias(n) if n in times else F.col(f"`{n}`")
            for n in frame.columns
        )
    )
    return [
        row.asDict() | {name: moment_of(row[name]) for name in times} for row in plain.collect()
    ]


def moment_of(micros: int | None) -> datetime | None:
    """The moment; the first or the last that Python has for one before or after these."""
    if micros is None:
        return None
    try:
        return from_microseconds(micros)
    except OverflowError:
        return _FIRST if micros < 0 else _LAST
