"""Both tables as DataFrames: their schemas, and a selection as filters of rows from files."""

from collections.abc import Collection

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from faststream_sqlbroker.core.times import to_microseconds
from pyspark_sqlbroker.load.columns import ARCHIVE_FIELDS, MESSAGE_FIELDS, Field
from pyspark_sqlbroker.load.selection import Selection

_JSON_TYPES = {"bigint": "long", "int": "integer"}
"""Names of types in Spark's JSON, where they differ from Spark's SQL."""


def to_struct(fields: tuple[Field, ...]) -> StructType:
    """Convert fields to Spark's schema; every column is nullable, as in all JDBC sources."""
    columns = [
        {"name": field.name, "type": _JSON_TYPES.get(field.type, field.type), "nullable": True}
        for field in fields
    ]
    return StructType.fromJson({"fields": columns})


ARCHIVE_SCHEMA = to_struct(ARCHIVE_FIELDS)
"""Schema of `read_archive`; docs/howto/spark.md describes each column."""

MESSAGE_SCHEMA = to_struct(MESSAGE_FIELDS)
"""Schema of `read_messages`."""


def filter_rows(df: DataFrame, selection: Selection, *, ids: Collection[int] = ()) -> DataFrame:
    """Filter the rows of `df` by the selection; correct in every time zone of the session.

    The selection usually becomes SQL; here it is applied to any frame: to rows from files, or with
    an empty selection to choose rows of the database by id.

    Args:
        df: A DataFrame with the columns of the archive or of the live table, from any source.
        selection: Only its queues, states and times are used.
        ids: Only these rows; an empty collection takes all.
    """
    for name, values in (("queue", selection.queues), ("state", selection.states)):
        if values is not None:
            df = df.where(F.col(name).isin(*values))
    time = F.unix_micros(selection.time_column)
    if selection.since is not None:
        df = df.where(time >= to_microseconds(selection.since))
    if selection.until is not None:
        df = df.where(time < to_microseconds(selection.until))
    return df.where(F.col("id").isin(*ids)) if ids else df
