"""Read a lake back as a DataFrame."""

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.store_errors import store_errors


@store_errors(OSError)
def read_export(
    spark: SparkSession, path: str, *, storage_options: Mapping[str, str] | None = None
) -> DataFrame:
    """The rows of a lake that `export_archive` wrote, as they are committed now.

    Spark reads the files that the log names, and the DataFrame stays with these: after a vacuum of
    the table has removed them, make it anew. A session with Delta's own jars can
    also read the path by `spark.read.format("delta")`.

    Returns:
        A DataFrame of `ARCHIVE_SCHEMA`, then `date` (date) and, of a lake of hours, `hour` (int),
        both UTC. A dead letter that was exported and retried later is in it once for each time it
        was archived.

    Raises:
        SetupError: nothing was exported to this path, or a file is missing or has another size than
            the log says: `sqlbroker archive repair` exports its windows again.
        NotSupportedError: Spark Connect.
    """
    lake = Lake(spark, path, storage_options)
    lake.need_source()
    if problems := lake.altered(lake.files, checked_bytes=0):
        name, problem = next(iter(problems.items()))
        raise SetupError(
            f"{lake.folders.path(name)}: {problem}; put it back from a copy, or export its windows "
            "again with sqlbroker archive repair, if the database still has them"
        )
    schema = lake.table.schema()
    places = [one.path for one in lake.files]
    if not places:
        return spark.createDataFrame([], schema)
    return lake.folders.read(spark, schema, places)
