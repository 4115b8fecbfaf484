"""Frames of plain rows, without Python workers: they come by Arrow and stay with the driver."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

_IN_UTC: dict[str, Any] = (
    {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
)
"""From 4.3 on Spark wants to be told."""


def plain_frame(
    spark: SparkSession, rows: Iterable[Sequence[Any]], schema: StructType | str
) -> DataFrame:
    """A DataFrame of `rows`; `createDataFrame` with the same would run each action in Python
    workers."""
    struct = schema if isinstance(schema, StructType) else StructType.fromDDL(schema)
    types = to_arrow_schema(struct, **_IN_UTC)
    columns = zip(*rows, strict=True) if (rows := list(rows)) else [[] for _ in types]
    arrays = [
        pa.array(list(values), field.type) for values, field in zip(columns, types, strict=True)
    ]
    return spark.createDataFrame(pa.Table.from_arrays(arrays, schema=types), struct)
