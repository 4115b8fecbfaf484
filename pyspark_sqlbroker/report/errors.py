"""Of the errors that a report shows: their latest messages, and how often they were before."""

from collections.abc import Sequence
from functools import reduce
from operator import or_

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from pyspark_sqlbroker.analytics.failures import single_failures
from pyspark_sqlbroker.report.rows import Row, collect_rows

MOST_MESSAGES = 5
"""Messages of an error that are shown."""

Identity = tuple[str, str | None, str | None]
"""Queue, reason and class of the exception."""

_NAMES = ("queue", "reason", "error_type")


def identity(row: Row) -> Identity:
    """What tells the error of a row from others."""
    return row["queue"], row["reason"], row["error_type"]


def latest(slim: DataFrame, shown: Sequence[Identity]) -> list[Row]:
    """The latest messages of each error, the newest first: what `single_failures` has, with the
    message's own queue as `archived_from`, its key, attempts and time of publishing.
    """
    if not shown:
        return []
    own = slim.withColumn("archived_from", F.col("queue"))
    each = single_failures(own, "archived_from", "key", "attempts_count", "created_at")
    newest = Window.partitionBy(*_NAMES).orderBy(F.desc("archived_at"), F.desc("id"))
    ranked = each.where(_one_of(shown)).withColumn("_rank", F.row_number().over(newest))
    rows = collect_rows(ranked.where(F.col("_rank") <= MOST_MESSAGES))
    order = {error: place for place, error in enumerate(shown)}
    return sorted(rows, key=lambda row: (order[identity(row)], row["_rank"]))


def counts(slim: DataFrame, shown: Sequence[Identity]) -> dict[Identity, int]:
    """How many messages had each error; those that none had are left out."""
    if not shown:
        return {}
    each = single_failures(slim).where(_one_of(shown))
    counted = each.groupBy(*_NAMES).agg(F.count("*").alias("messages"))
    return {identity(row): row["messages"] for row in collect_rows(counted)}


def _one_of(shown: Sequence[Identity]) -> Column:
    same = (
        F.col("queue").eqNullSafe(F.lit(queue))
        & F.col("reason").eqNullSafe(F.lit(reason))
        & F.col("error_type").eqNullSafe(F.lit(error_type))
        for queue, reason, error_type in shown
    )
    return reduce(or_, same)
