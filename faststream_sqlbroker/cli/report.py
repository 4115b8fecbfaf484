"""`faststream-sqlbroker archive report …`: the archive as one HTML page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from faststream_sqlbroker import spark as lake
from faststream_sqlbroker.cli.exported import read_path
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.spark.address import parse_address
from faststream_sqlbroker.spark.selection import ARCHIVE, select_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_QUIET = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}


def report(
    out: Annotated[Path, typer.Option(help="The HTML file; it is replaced.")],
    url: Annotated[
        str | None,
        typer.Option(
            envvar="SQLBROKER_URL", show_default=False, help="SQLAlchemy URL of the database, if not --path."
        ),
    ] = None,
    path: Annotated[str | None, typer.Option(help="An export's path, in place of the database.")] = None,
    since: Annotated[str | None, typer.Option(help="Archived from this moment on: 2026-03-01.")] = None,
    to: Annotated[
        str | None, typer.Option(help="Archived before this moment: 2026-03-01T12:00+00:00.")
    ] = None,
    queue: Annotated[list[str] | None, typer.Option(help="Only this queue; may be given again.")] = None,
    every: Annotated[str | None, typer.Option(help='Width of the buckets of time, like "1h".')] = None,
    table: Annotated[str, typer.Option(help="The archive table.")] = "message_archive",
    schema: Annotated[str | None, typer.Option(help="Its schema; MySQL and MariaDB: its database.")] = None,
    title: Annotated[str, typer.Option(help="Of the page.")] = "Message archive",
    master: Annotated[str | None, typer.Option(help="Spark's master; local[*] where nothing says.")] = None,
    jar: Annotated[list[Path] | None, typer.Option(help="A JDBC driver's jar to look at first.")] = None,
) -> None:
    """Render the archive, or an export of it, to one HTML page with tables and plots.

    --path goes before the URL, which may come from SQLBROKER_URL.
    """
    if path is None and url is None:
        raise SetupError("give --url (or SQLBROKER_URL) for the database, or --path for an export of it")
    kinds = [parse_address(url).kind] if path is None and url is not None else []
    spark = lake.build_session(databases=kinds, master=master, jars=jar or (), config=_QUIET)
    if path is None and url is not None:
        frame = lake.read_archive(
            spark, url, table=table, schema=schema, since=since, until=to, queues=queue or None
        )
    else:
        frame = exported(spark, str(path), since, to, queue)
    written = lake.write_report(frame, out, every=every, title=title)
    Console().print(f"written: {written}", markup=False, highlight=False, soft_wrap=True)


def exported(
    spark: "SparkSession", path: str, since: str | None, to: str | None, queues: list[str] | None
) -> "DataFrame":
    """The rows of an export, within the limits."""
    chosen = select_rows(ARCHIVE, since=since, until=to, queues=queues or None)
    return read_path(spark, path, chosen).select(*lake.ARCHIVE_SCHEMA.names)
