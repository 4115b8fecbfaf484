"""A selection as filters of a DataFrame, for rows that come from files."""

from collections.abc import Collection

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from faststream_sqlbroker.core.times import to_microseconds
from pyspark_sqlbroker.load.selection import Selection


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
