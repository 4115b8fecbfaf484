"""Small results of Spark as rows of the driver."""

from datetime import datetime, timedelta, timezone
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

Row = dict[str, Any]

_FIRST = datetime.min.replace(tzinfo=timezone.utc)
_LAST = datetime.max.replace(tzinfo=timezone.utc)


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
        return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=micros)
    except OverflowError:
        return _FIRST if micros < 0 else _LAST
