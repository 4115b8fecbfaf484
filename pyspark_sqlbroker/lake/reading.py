"""Read a lake back, as a DataFrame or by a name that SQL knows."""

import re
from collections.abc import Mapping
from typing import Literal

from pyspark.sql import DataFrame, SparkSession

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.drivers import java_of
from pyspark_sqlbroker.lake.lake import Lake

_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_PARTS = 3
"""Of a name at most: catalog, schema, table."""


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


def register_export(
    spark: SparkSession,
    path: str,
    name: str,
    *,
    storage_options: Mapping[str, str] | None = None,
) -> Literal["table", "view"]:
    """Make a lake readable by SQL under a name.

    A session with Delta's jars gets a table: `CREATE TABLE IF NOT EXISTS … USING delta LOCATION`.
    It shows what is committed at each query, and stays in the catalog if that is kept on disk. No
    other session can read Delta, so it gets a temporary view over the files that are in the table
    now (`read_export`). It ends with the session; call this again to see later exports. A temporary
    view of that name is replaced. The lake itself is not changed.

    Args:
        spark: The session whose catalog gets the name; not Spark Connect.
        path: Of the lake.
        name: "messages"; of a table also "shop.messages" or "catalog.shop.messages".
        storage_options: As for `read_export`.

    Returns:
        What the name is now: "table" or "view".

    Raises:
        SetupError: the name is invalid, it has a schema and only a view can be made, or it is a
            table of another path; nothing was exported to `path`, or, for a view, a file is
            missing or has another size than the log says.
        NotSupportedError: Spark Connect.
    """
    parts = name.split(".")
    if len(parts) > _PARTS or not all(_PART.fullmatch(part) for part in parts):
        raise SetupError(
            f"name cannot be {name!r}: it is a name of letters, digits and underscores, such as "
            "messages, for a table with its schema before it, such as shop.messages"
        )
    if not has_delta(spark):
        if len(parts) > 1:
            raise SetupError(
                f"name cannot be {name!r}: this session has no jars of Delta, so it gets a "
                "temporary view, and that has no schema; give a name without a dot, or start the "
                "session with Delta's jars and its extension"
            )
        frame = read_export(spark, path, storage_options=storage_options)
        frame.createOrReplaceTempView(name)
        return "view"
    lake = Lake(spark, path, storage_options)
    lake.need_source()
    _create_table(spark, lake.folders.root, ".".join(f"`{part}`" for part in parts))
    return "table"


def _create_table(spark: SparkSession, root: str, quoted: str) -> None:
    # Never CREATE OR REPLACE: it would empty the table at this place.
    place = root.replace("'", "\\'")
    spark.sql(f"CREATE TABLE IF NOT EXISTS {quoted} USING delta LOCATION '{place}'")
    found = str(spark.sql(f"DESCRIBE DETAIL {quoted}").collect()[0]["location"])
    if _plain(found) != _plain(root):
        raise SetupError(
            f"{quoted} is a table of {found}, and not of {root}: give another name, or drop that "
            "table first"
        )


def _plain(place: str) -> str:
    """A path without the differences that mean nothing."""
    return re.sub(r"^file:/+", "/", place).rstrip("/")
