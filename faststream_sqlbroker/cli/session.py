"""Spark sessions of commands, and the rows of an export."""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark_sqlbroker as spark
from faststream_sqlbroker.cli.output import AsJson
from faststream_sqlbroker.cli.shared_options import Jars, Master
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.load.selection import Selection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPARK_SETTINGS = {"HADOOP_CONF_DIR", "SPARK_CONF_DIR", "SPARK_HOME", "SPARK_REMOTE"} | {
    "PYSPARK_GATEWAY_PORT",
    "PYSPARK_SUBMIT_ARGS",
}
"""Variables that configure Spark. With one of them, a path without a scheme may not be local."""
QUIET_CONFIG = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


@dataclass(frozen=True, slots=True)
class LakeOptions:
    """Options of a command that reads a lake with Spark."""

    as_json: AsJson = False
    master: Master = None

    def start_session(
        self, jars: Sequence[Path] | None = None, url: str | None = None
    ) -> "SparkSession":
        """Start a session that logs only errors, with the JDBC driver for `url`.

        Without `url` only files are read, which needs no driver.
        """
        kinds = [] if url is None else [parse_address(url).kind]
        return spark.build_session(
            databases=kinds, master=self.master, jars=jars or (), config=QUIET_CONFIG
        )


@dataclass(frozen=True, slots=True)
class SparkOptions(LakeOptions):
    """Options of a command that reads the database with Spark."""

    jar: Jars = None

    def start_driver_session(self, url: str | None) -> "SparkSession":
        """Start a session with the JDBC driver for `url`."""
        return self.start_session(self.jar, url)


def check_folder_exists(path: str | None) -> None:
    """Check that a local folder exists, before Spark takes seconds to start.

    Other paths are left to Spark: remote paths, and paths without a scheme if variables configure
    Spark, because they may then be on another file system.

    Raises:
        SetupError: there is no such folder.
    """
    scheme, _, location = (path or "").rpartition(":")
    # Spark's configuration decides where a path without a scheme is.
    is_local = scheme == "file" or (not scheme and SPARK_SETTINGS.isdisjoint(os.environ))
    if location and is_local and not Path(re.sub("^//+", "/", location)).exists():
        raise SetupError(f"folder {path} does not exist: give the path of an export")


def read_rows(
    session: "SparkSession",
    url: str | None,
    path: str | None,
    selection: Selection,
    ids: Collection[int] = (),
    *,
    last_only: bool = False,
) -> "DataFrame":
    """Read the selected rows from the database, an export, or other Parquet with the same columns.

    Only the committed files of an export are read. A message that was redriven has a row for each
    time that it was archived; `last_only` skips all but the last (of an export; the database keeps
    one row).
    """
    from pyspark_sqlbroker.load.frames import filter_rows  # noqa: PLC0415 - pyspark is an extra

    if path is None:
        rows = spark.read_archive(
            session,
            str(url),
            table=selection.table,
            schema=selection.schema,
            since=selection.since,
            until=selection.until,
            queues=selection.queues,
            states=selection.states,
        )
        unfiltered = Selection(
            selection.table, selection.schema, selection.fields, selection.time_column
        )
        return filter_rows(rows, unfiltered, ids=ids)
    frame = (
        spark.read_export(session, path)
        if _has_delta_log(session, path)
        else session.read.parquet(path)
    )
    selected = filter_rows(frame, selection, ids=ids)
    if not last_only:
        return selected
    # Search all rows: the later row of a redriven message may be outside of the selection.
    later_rows = frame.selectExpr("id AS later_id", "archived_at AS later_at")
    is_superseded = (selected["id"] == later_rows["later_id"]) & (
        selected["archived_at"] < later_rows["later_at"]
    )
    return selected.join(later_rows, is_superseded, "left_anti")


def _has_delta_log(session: "SparkSession", path: str) -> bool:
    """Return True if the path has a Delta log; other Parquet can be read without deltalake."""
    from pyspark_sqlbroker.lake.s3 import open_folders  # noqa: PLC0415 - as above

    return bool(open_folders(session, path, None).list_names("_delta_log"))
