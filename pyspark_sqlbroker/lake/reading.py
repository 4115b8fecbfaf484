"""Read a lake back as a DataFrame."""

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.store_errors import convert_store_errors


@convert_store_errors(OSError)
def read_export(
    spark: SparkSession, path: str, *, storage_options: Mapping[str, str] | None = None
) -> DataFrame:
    """Read the rows of a lake that `export_archive` wrote, as committed now.

    Spark reads the files that the log names, and the DataFrame stays with these files: make it anew
    after a vacuum of the table has removed some. A session with Delta's own jars can also read the
    path by `spark.read.format("delta")`.

    Returns:
        A DataFrame of `ARCHIVE_SCHEMA`, then `date` (date) and, in a lake of hours, `hour` (int),
        both UTC. A dead letter that was exported and retried later appears once for each time it
        was archived.

    Raises:
        SetupError: nothing was exported to this path, or a file is missing or has another size than
            the log says: `sqlbroker archive repair` exports its windows again.
        NotSupportedError: Spark Connect.
    """
    lake = Lake(spark, path, storage_options)
    lake.require_source()
    if issues := lake.find_altered_files(lake.files, checked_bytes=0):
        name, issue = next(iter(issues.items()))
        raise SetupError(
            f"{lake.folders.get_full_path(name)}: {issue}; restore it from a copy, or run "
            "sqlbroker archive repair if the database still has its windows"
        )
    schema = lake.table.get_schema()
    paths = [file.path for file in lake.files]
    if not paths:
        return spark.createDataFrame([], schema)
    return lake.folders.read(spark, schema, paths)
