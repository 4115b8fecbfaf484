"""What payloads look like."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pyspark_sqlbroker.analytics.results import RESULTS, need, shaped
from pyspark_sqlbroker.load.decode import decode_payload


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
