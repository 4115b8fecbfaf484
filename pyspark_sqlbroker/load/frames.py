"""The two tables as DataFrames: their schemas, and a selection as filters of rows from files."""

from collections.abc import Collection

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from faststream_sqlbroker.core.times import to_microseconds
from pyspark_sqlbroker.load.columns import ARCHIVE_FIELDS, MESSAGE_FIELDS, Field
from pyspark_sqlbroker.load.selection import Selection

_JSON = {"bigint": "long", "int": "integer"}
"""Names of types that Spark's JSON has otherwise than its SQL."""


def to_struct(fields: tuple[Field, ...]) -> StructType:
    """The fields as Spark's schema; every column is nullable, as all of a JDBC source are."""
    columns = [
        {"name": each.name, "type": _JSON.get(each.type, each.type), "nullable": True}
        for each in fields
    ]
    return StructType.fromJson({"fields": columns})


ARCHIVE_SCHEMA = to_struct(ARCHIVE_FIELDS)
"""Of `read_archive`; docs/howto/spark.md says what each column holds."""

MESSAGE_SCHEMA = to_struct(MESSAGE_FIELDS)
"""Of `read_messages`."""


def filter_rows(df: DataFrame, chosen: Selection, *, ids: Collection[int] = ()) -> DataFrame:
    """Those rows of `df` that belong to the selection; right in every time zone of the session.

    Args:
        df: The columns of the archive or of the live table, read from wherever.
        chosen: Of which only queues, states and times matter here.
        ids: Only these rows; none given means all.
    """
    for name, values in (("queue", chosen.queues), ("state", chosen.states)):
        if values is not None:
            df = df.where(F.col(name).isin(*values))
    time = F.unix_micros(chosen.time_column)
    if chosen.since is not None:
        df = df.where(time >= to_microseconds(chosen.since))
    if chosen.until is not None:
        df = df.where(time < to_microseconds(chosen.until))
    return df.where(F.col("id").isin(*ids)) if ids else df
