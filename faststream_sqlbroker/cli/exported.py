"""What commands read from files in place of the database."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from faststream_sqlbroker import spark as our
from faststream_sqlbroker.spark.load.selection import Selection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_path(
    session: "SparkSession", path: str, chosen: Selection, ids: Collection[int] = ()
) -> "DataFrame":
    """The selected rows of an export, whose files are counted, or of any other Parquet with these
    columns.
    """
    from faststream_sqlbroker.spark.lake.files import read_json  # noqa: PLC0415 - pyspark is an extra
    from faststream_sqlbroker.spark.lake.lake import STATE  # noqa: PLC0415 - as above
    from faststream_sqlbroker.spark.load.filters import filter_rows  # noqa: PLC0415 - as above

    ours = read_json(session, f"{path}/{STATE}") is not None
    frame = our.read_export(session, path) if ours else session.read.parquet(path)
    return filter_rows(frame, chosen, ids=ids)
