"""Read a lake back."""

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.drivers import java_of
from pyspark_sqlbroker.lake.lake import Lake


def read_export(
    spark: SparkSession, path: str, *, storage_options: Mapping[str, str] | None = None
) -> DataFrame:
    """The rows of a lake that `export_archive` wrote, as they are committed now.

    A session with Delta's own jars reads the table by them. Else Spark reads the files that the log
    names, and the DataFrame stays with these: after `compact_export` has removed them
    (`keep=`), make it anew.

    Returns:
        A DataFrame of `ARCHIVE_SCHEMA`, then `date` (date) and, of a lake of hours, `hour` (int),
        both UTC. A dead letter that was exported and retried later is in it once for each time it
        was archived.

    Raises:
        SetupError: nothing was exported to this path, or a file is missing or has another size than
            the log says: `sqlbroker archive repair` reads its windows again.
        NotSupportedError: Spark Connect.
    """
    lake = Lake(spark, path, storage_options)
    lake.need_source()
    if problems := lake.altered():
        name, problem = next(iter(problems.items()))
        raise SetupError(
            f"{lake.folders.path(name)}: {problem}; put it back from a copy, or read its windows "
            "again from the database with sqlbroker archive repair"
        )
    if has_delta(spark):
        return spark.read.format("delta").load(lake.folders.root)
    schema = lake.table.schema()
    places = [one.path for one in lake.files]
    if not places:
        return spark.createDataFrame([], schema)
    return lake.folders.read(spark, schema, places)


def has_delta(spark: SparkSession) -> bool:
    """Whether the session was started with Delta's jars and its extension."""
    if "io.delta" not in str(spark.conf.get("spark.sql.extensions", "") or ""):
        return False
    java = java_of(spark)
    try:
        getattr(java, "java.lang.Class").forName("io.delta.sql.DeltaSparkSessionExtension")
    except Exception:  # noqa: BLE001 - py4j wraps whatever Java raises
        return False
    return True
