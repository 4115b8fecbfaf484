"""The DataFrames' schemas."""

from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyspark_sqlbroker.load.columns import ARCHIVE_FIELDS, MESSAGE_FIELDS, Field

_TYPES: dict[str, DataType] = {
    "bigint": LongType(),
    "int": IntegerType(),
    "string": StringType(),
    "binary": BinaryType(),
    "timestamp": TimestampType(),
}


def to_struct(fields: tuple[Field, ...]) -> StructType:
    """The fields as Spark's schema; every column is nullable, as all of a JDBC source are."""
    return StructType([StructField(field.name, _TYPES[field.type]) for field in fields])


ARCHIVE_SCHEMA = to_struct(ARCHIVE_FIELDS)
"""Of `read_archive`; docs/howto/spark.md says what each column holds."""

MESSAGE_SCHEMA = to_struct(MESSAGE_FIELDS)
"""Of `read_messages`."""
