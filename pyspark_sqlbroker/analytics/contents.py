"""Contents of messages: their keys, and the schemas of payloads."""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from faststream_sqlbroker.core.times import Duration
from pyspark_sqlbroker.analytics.results import (
    RESULTS,
    build_outcome_counts,
    build_seconds_between,
    limit_rows,
    parse_width,
    require_columns,
    to_result,
)
from pyspark_sqlbroker.load.decode import decode_payload


def hot_keys(df: DataFrame, limit: int | None = 20, *, key: str | Column = "key") -> DataFrame:
    """Return the keys with the most messages.

    Args:
        df: A frame with queue, state, and the column of the key.
        limit: Maximum number of rows, over all queues; None is all.
        key: A column's name or an expression, such as `F.get_json_object("headers", "$.tenant")`.

    Returns:
        queue, key STRING, messages BIGINT, share DOUBLE (of all messages of the queue, including
        messages without a key), completed, failed, discarded BIGINT. Ordered by the most messages,
        then by queue and key; messages without a key have no row.

    Raises:
        SetupError: columns are missing, or `limit` is no whole number above 0.
    """
    require_columns(df, "hot_keys", "queue", "state", *([key] if isinstance(key, str) else []))
    with_key = df.withColumn("key", (F.col(key) if isinstance(key, str) else key).cast("string"))
    counts = with_key.groupBy("queue", "key").agg(
        F.count("*").alias("messages"), *build_outcome_counts()
    )
    totals = with_key.groupBy("queue").agg(F.count("*").alias("whole"))
    shares = (
        counts.where(F.col("key").isNotNull())
        .join(totals, "queue")
        .withColumn("share", F.col("messages") / F.col("whole"))
    )
    ordered = shares.orderBy(F.desc("messages"), "queue", "key")
    return to_result(limit_rows(ordered, limit), RESULTS["hot_keys"])


def sessions(df: DataFrame, gap: Duration = "30m", *, key: str | Column = "key") -> DataFrame:
    """Return runs of messages of a key, by publishing time; a run ends where no message came for
    `gap`.

    Args:
        df: A frame with queue, created_at, and the column of the key.
        gap: Seconds, a timedelta or text like "30m", at least a millisecond. Two messages that are
            exactly `gap` apart are in two sessions.
        key: A column's name or an expression.

    Returns:
        queue, key STRING, started_at, ended_at TIMESTAMP (created_at of the first and the last
        message), messages BIGINT, seconds DOUBLE (from the first to the last; 0 for a single
        message).

    Raises:
        SetupError: `gap` is no such duration, or columns are missing.
    """
    require_columns(df, "sessions", "queue", "created_at", *([key] if isinstance(key, str) else []))
    micros = parse_width(gap, "gap")
    with_key = df.withColumn("key", (F.col(key) if isinstance(key, str) else key).cast("string"))
    dated = with_key.where(F.col("key").isNotNull() & F.col("created_at").isNotNull())
    # Spark's own session_window puts two messages that are exactly the gap apart into one session.
    in_order = Window.partitionBy("queue", "key").orderBy("created_at")
    published_at = F.unix_micros("created_at")
    pause = published_at - F.lag(published_at).over(in_order)
    session_start = F.when(pause < micros, 0).otherwise(1)
    numbered = dated.select("queue", "key", "created_at", session_start.alias("begins")).withColumn(
        "number", F.sum("begins").over(in_order)
    )
    runs = numbered.groupBy("queue", "key", "number").agg(
        F.min("created_at").alias("started_at"),
        F.max("created_at").alias("ended_at"),
        F.count("*").alias("messages"),
    )
    timed = runs.withColumn(
        "seconds", build_seconds_between(F.col("started_at"), F.col("ended_at"))
    )
    return to_result(timed, RESULTS["sessions"])


def payload_schema(df: DataFrame) -> DataFrame:
    """Return the type that fits all readable payloads of a queue, as a schema for `decode_payload`.

    Args:
        df: A frame with queue, headers and payload. All payloads are read, so pass a sample of a
            large archive.

    Returns:
        queue STRING, messages, decoded BIGINT (all messages, and the messages that `decode_payload`
        can read), schema STRING such as "STRUCT<amount: DECIMAL(4,2), user: BIGINT>" (VOID if none
        was read, or for a value that is always null; VARIANT if they have nothing in common).

    Raises:
        SetupError: columns are missing.
    """
    require_columns(df, "payload_schema", "queue", "headers", "payload")
    decoded = decode_payload(df.select("queue", "headers", "payload"))
    counts = decoded.groupBy("queue").agg(
        F.count("*").alias("messages"),
        F.count("body").alias("decoded"),
        _to_ddl(F.schema_of_variant_agg("body")).alias("schema"),
    )
    return to_result(counts, RESULTS["payload_schema"])


def _to_ddl(schema: Column) -> Column:
    """Convert the schema of VARIANT values to DDL for `decode_payload`.

    Spark names objects OBJECT<…> there, which DDL does not know. Only the types are replaced, not
    quoted names of fields.
    """

    # Every second part is the name of a field; a backquote in a name is doubled, so the parity
    # stays.
    def replace_object(part: Column, index: Column) -> Column:
        """Rename OBJECT to STRUCT, except within the quoted names of fields (odd `index`)."""
        return F.when(
            index % 2 == 0, F.replace(part, F.lit("OBJECT<"), F.lit("STRUCT<"))
        ).otherwise(part)

    return F.array_join(F.transform(F.split(schema, "`"), replace_object), "`")
