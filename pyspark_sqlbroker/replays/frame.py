"""The columns of a DataFrame that replay reads."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, MapType, NullType, StringType, StructType, VariantType

from faststream_sqlbroker.exceptions import SetupError

NEEDED = ("id", "queue", "priority", "key", "headers", "payload", "publish_count")
"""Columns that the DataFrame must have; others are not looked at."""


def replayed(df: DataFrame, number: int, *, dry_run: bool, current_only: bool = False) -> DataFrame:
    """Partition the rows for the tasks: all rows of an id in one, ids rising.

    Payloads are left out in a dry run.

    Args:
        df: What the user gave.
        number: Of partitions.
        dry_run: Whether nothing is written.
        current_only: Whether the rows get archived_us, archived_at in microseconds since 1970.

    Raises:
        SetupError: a column is missing or of a type that it cannot have, or the DataFrame is
            streaming.
    """
    missing = [name for name in NEEDED if name not in df.columns]
    if missing:
        raise SetupError(
            f"the DataFrame has no column {missing[0]!r}: replay needs {', '.join(NEEDED)}, as "
            "read_archive returns them"
        )
    if current_only and "archived_at" not in df.columns:
        raise SetupError(
            "current_only needs the column archived_at, as read_archive and read_export return it"
        )
    if df.isStreaming:
        raise SetupError(
            "replay takes no streaming DataFrame: call it in foreachBatch, with one job"
        )
    kept = [F.col(name) for name in NEEDED if name not in ("id", "headers", "payload")]
    # A payload that was changed in Spark is text (to_json); the databases take bytes.
    payload = _payload(df)
    length = F.octet_length(payload).cast("long").alias("bytes")
    # A message that was archived, retried and archived again has several rows in a lake: the last
    # one counts.
    newest = "archived_at" if "archived_at" in df.columns else "publish_count"
    last = F.col(newest).alias("_newest")
    at = [F.unix_micros("archived_at").alias("archived_us")] if current_only else []
    chosen = df.select(
        F.col("id").cast("long"),
        *kept,
        _headers(df),
        *([] if dry_run else [payload]),
        length,
        *at,
        last,
    )
    return (
        chosen.repartition(number, "id")
        .sortWithinPartitions("id", F.desc("_newest"))
        .drop("_newest")
    )


def _headers(df: DataFrame) -> Column:
    """As they are stored, or as JSON of what was made of them: Python sees a map as a list."""
    kind = df.schema["headers"].dataType
    if isinstance(kind, StructType | MapType | VariantType):
        return F.to_json("headers").alias("headers")
    if not isinstance(kind, StringType | BinaryType | NullType):
        raise SetupError(
            "the column headers must be a JSON object as a string, or a struct, map or variant, "
            f"got {kind.simpleString()}: turn it into the object's text, as by to_json"
        )
    return F.col("headers")


def _payload(df: DataFrame) -> Column:
    """Bytes: as they are, or a text's in UTF-8."""
    kind = df.schema["payload"].dataType.simpleString()
    if kind not in ("binary", "string"):
        raise SetupError(
            f"the column payload must be binary or string, got {kind}: turn it into the body's "
            "text, as by to_json"
        )
    return F.col("payload").cast("binary").alias("payload")
