"""Give a lake a name that SQL knows."""

import re
from collections.abc import Mapping
from typing import Literal

from pyspark.sql import SparkSession

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.lake.lake import Lake
from pyspark_sqlbroker.lake.reading import has_delta, read_export

_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PARTS = 3
"""Of a name at most: catalog, schema, table."""


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
