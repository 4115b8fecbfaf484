"""What commands read from files in place of the database."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import pyspark_sqlbroker as our
from pyspark_sqlbroker.load.selection import Selection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_path(
    session: "SparkSession",
    path: str,
    chosen: Selection,
    ids: Collection[int] = (),
    *,
    last_only: bool = False,
) -> "DataFrame":
    """The selected rows of an export, whose files are counted, or of any other Parquet with these
    columns; with `last_only` no row of a message that was archived again later.
    """
    from pyspark_sqlbroker.load.frames import filter_rows  # noqa: PLC0415 - pyspark is an extra

    frame = (
        our.read_export(session, path) if _is_ours(session, path) else session.read.parquet(path)
    )
    selected = filter_rows(frame, chosen, ids=ids)
    if not last_only:
        return selected
    # A message that was redriven may have its later row outside of the selection.
    later = frame.selectExpr("id AS later_id", "archived_at AS later_at")
    newer = (selected["id"] == later["later_id"]) & (selected["archived_at"] < later["later_at"])
    return selected.join(later, newer, "left_anti")


def _is_ours(session: "SparkSession", path: str) -> bool:
    """Whether there is the log of a Delta table; other Parquet needs no deltalake."""
    from pyspark_sqlbroker.lake.s3 import open_folders  # noqa: PLC0415 - as above

    return bool(open_folders(session, path, None).names("_delta_log"))
