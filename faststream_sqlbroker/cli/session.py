"""What commands read by Spark: a quiet session, and the rows of an export."""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark_sqlbroker as spark
from faststream_sqlbroker.cli.options import Jars, Master
from faststream_sqlbroker.cli.output import AsJson
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.load.selection import Selection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPARK_SETTINGS = {"HADOOP_CONF_DIR", "SPARK_CONF_DIR", "SPARK_HOME", "SPARK_REMOTE"} | {
    "PYSPARK_GATEWAY_PORT",
    "PYSPARK_SUBMIT_ARGS",
}
"""Variables that bring a configuration, by which a path without a scheme may be elsewhere."""
QUIET = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


@dataclass(frozen=True, slots=True)
class LakeRun:
    """Options of a command that reads a lake by Spark."""

    as_json: AsJson = False
    master: Master = None

    def session(self, jars: Sequence[Path] | None = None, url: str | None = None) -> "SparkSession":
        """Start a session without Spark's INFO and WARN lines, with the JDBC driver of the URL's
        database.
        """
        kinds = [] if url is None else [parse_address(url).kind]
        return spark.build_session(
            databases=kinds, master=self.master, jars=jars or (), config=QUIET
        )


@dataclass(frozen=True, slots=True)
class SparkRun(LakeRun):
    """Options of a command that reads the database by Spark."""

    jar: Jars = None

    def session_of(self, url: str | None) -> "SparkSession":
        """Start a session with the JDBC driver of the URL's database."""
        return self.session(self.jar, url)


def need_folder(path: str | None) -> None:
    """Refuse a missing folder of this machine, without the seconds in which Java starts.

    What is elsewhere, or may be by Spark's configuration, is for Spark to find.

    Raises:
        SetupError: there is no such folder.
    """
    scheme, _, place = (path or "").rpartition(":")
    # A path without a scheme is where Spark's configuration says.
    is_local = scheme == "file" or (not scheme and SPARK_SETTINGS.isdisjoint(os.environ))
    if place and is_local and not Path(re.sub("^//+", "/", place)).exists():
        raise SetupError(f"there is no folder {path}: give the path of an export")


def read_rows(
    session: "SparkSession",
    url: str | None,
    path: str | None,
    chosen: Selection,
    ids: Collection[int] = (),
    *,
    last_only: bool = False,
) -> "DataFrame":
    """Read the selected rows of the database; or, of an export at `path`, whose files are counted,
    or of any other Parquet with these columns. With `last_only` no row there is of a message that
    was archived again later.
    """
    from pyspark_sqlbroker.load.frames import filter_rows  # noqa: PLC0415 - pyspark is an extra

    if path is None:
        found = spark.read_archive(
            session,
            str(url),
            table=chosen.table,
            schema=chosen.schema,
            since=chosen.since,
            until=chosen.until,
            queues=chosen.queues,
            states=chosen.states,
        )
        whole = Selection(chosen.table, chosen.schema, chosen.fields, chosen.time_column)
        return filter_rows(found, whole, ids=ids)
    frame = (
        spark.read_export(session, path) if _is_ours(session, path) else session.read.parquet(path)
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
