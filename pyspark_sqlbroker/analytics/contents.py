"""What is in messages: their keys, and what payloads look like."""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from faststream_sqlbroker.core.times import Duration
from pyspark_sqlbroker.analytics.results import (
    RESULTS,
    limited,
    need,
    outcome_counts,
    seconds,
    shaped,
    width,
)
from pyspark_sqlbroker.load.decode import decode_payload


def hot_keys(df: DataFrame, limit: int | None = 20, *, key: str | Column = "key") -> DataFrame:
    """The keys with the most messages.

    Args:
        df: With queue, state, and the column of the key.
        limit: How many rows, over all queues; None is all.
        key: A column's name or an expression, such as `F.get_json_object("headers", "$.tenant")`.

    Returns:
        queue, key STRING, messages BIGINT, share DOUBLE (of all messages of the queue, those
        without a key among them), completed, failed, discarded BIGINT. The most messages first,
        then by queue and key; messages without a key have no row.

    Raises:
        SetupError: columns are missing, or `limit` is no whole number above 0.
    """
    need(df, "hot_keys", "queue", "state", *([key] if isinstance(key, str) else []))
    keyed = df.withColumn("key", (F.col(key) if isinstance(key, str) else key).cast("string"))
    counted = keyed.groupBy("queue", "key").agg(F.count("*").alias("messages"), *outcome_counts())
    whole = keyed.groupBy("queue").agg(F.count("*").alias("whole"))
    shares = (
        counted.where(F.col("key").isNotNull())
        .join(whole, "queue")
        .withColumn("share", F.col("messages") / F.col("whole"))
    )
    ordered = shares.orderBy(F.desc("messages"), "queue", "key")
    return shaped(limited(ordered, limit), RESULTS["hot_keys"])


def sessions(df: DataFrame, gap: Duration = "30m", *, key: str | Column = "key") -> DataFrame:
    """Runs of messages of a key, as they were published: one ends where none came for `gap`.

    Args:
        df: With queue, created_at, and the column of the key.
        gap: Seconds, a timedelta or text like "30m", at least a millisecond. Two messages that are
            exactly `gap` apart are in two sessions.
        key: A column's name or an expression.

    Returns:
        queue, key STRING, started_at, ended_at TIMESTAMP (created_at of the first and the last
        message), messages BIGINT, seconds DOUBLE (from the first to the last; 0 for a single
        message).

    Raises:
        SetupError: `gap` is no such length, or columns are missing.
    """
    need(df, "sessions", "queue", "created_at", *([key] if isinstance(key, str) else []))
    micros = width(gap, "gap")
    keyed = df.withColumn("key", (F.col(key) if isinstance(key, str) else key).cast("string"))
    known = keyed.where(F.col("key").isNotNull() & F.col("created_at").isNotNull())
    # Spark's own session_window joins two messages that are exactly the gap apart.
    in_order = Window.partitionBy("queue", "key").orderBy("created_at")
    at = F.unix_micros("created_at")
    pause = at - F.lag(at).over(in_order)
    begins = F.when(pause < micros, 0).otherwise(1)
    numbered = known.select("queue", "key", "created_at", begins.alias("begins")).withColumn(
        "number", F.sum("begins").over(in_order)
    )
    found = numbered.groupBy("queue", "key", "number").agg(
        F.min("created_at").alias("started_at"),
        F.max("created_at").alias("ended_at"),
        F.count("*").alias("messages"),
    )
    timed = found.withColumn("seconds", seconds(F.col("started_at"), F.col("ended_at")))
    return shaped(timed, RESULTS["sessions"])


def payload_schema(df: DataFrame) -> DataFrame:
    """The type that fits all readable payloads of a queue: what to give to `decode_payload` as a
    schema.

    Args:
        df: With queue, headers and payload. All payloads are read: give it a sample of a large
            archive.

    Returns:
        queue STRING, messages, decoded BIGINT (all, and those that `decode_payload` can read),
        schema STRING such as "STRUCT<amount: DECIMAL(4,2), user: BIGINT>" (VOID where none was
        read, or what is always null; VARIANT where they have nothing in common).

    Raises:
        SetupError: columns are missing.
    """
    need(df, "payload_schema", "queue", "headers", "payload")
    decoded = decode_payload(df.select("queue", "headers", "payload"))
    counted = decoded.groupBy("queue").agg(
        F.count("*").alias("messages"),
        F.count("body").alias("decoded"),
        _as_ddl(F.schema_of_variant_agg("body")).alias("schema"),
    )
    return shaped(counted, RESULTS["payload_schema"])


def _as_ddl(schema: Column) -> Column:
    """A VARIANT's schema as DDL, which knows no OBJECT."""

    # Every second part is a field's name; a backquote in a name is doubled, which keeps the count.
    def struct(part: Column, place: Column) -> Column:
        return F.when(
            place % 2 == 0, F.replace(part, F.lit("OBJECT<"), F.lit("STRUCT<"))
        ).otherwise(part)

    return F.array_join(F.transform(F.split(schema, "`"), struct), "`")
