"""`sqlbroker archive report …`: the archive as one HTML page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from faststream_sqlbroker import spark as lake
from faststream_sqlbroker.cli.console import PlainConsole
from faststream_sqlbroker.cli.exported import read_path
from faststream_sqlbroker.cli.options import ArchiveTable, Jars, Master, Queues, Schema, Since, To
from faststream_sqlbroker.cli.session import database_errors, quiet_session
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.spark.load.selection import ARCHIVE, select_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def report(
    out: Annotated[Path, typer.Option(help="The HTML file to write; an existing one is replaced.")],
    url: Annotated[
        str | None,
        typer.Option(
            envvar="SQLBROKER_URL",
            show_default=False,
            help="SQLAlchemy URL of the database, unless --path is given.",
        ),
    ] = None,
    path: Annotated[
        str | None, typer.Option(help="Folder of an export to read in place of the database.")
    ] = None,
    since: Since = None,
    to: To = None,
    queue: Queues = None,
    every: Annotated[
        str | None, typer.Option(help='Length of a time bucket in the plots, like "1h".')
    ] = None,
    table: ArchiveTable = "message_archive",
    schema: Schema = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Message archive",
    master: Master = None,
    jar: Jars = None,
) -> None:
    """Render the archive, or an export of it, to one HTML page with tables and plots.

    --path wins over the URL, which may come from SQLBROKER_URL.
    """
    if path is None and url is None:
        raise SetupError(
            "give --url (or SQLBROKER_URL) for the database, or --path for an export of it"
        )
    with database_errors():
        if path is None and url is not None:
            spark = quiet_session(master, jar, url)
            frame = lake.read_archive(
                spark, url, table=table, schema=schema, since=since, until=to, queues=queue or None
            )
        else:
            frame = exported(quiet_session(master, jar), str(path), since, to, queue)
        written = lake.write_report(frame, out, every=every, title=title)
    PlainConsole().print(f"written: {written}", soft_wrap=True)


def exported(
    spark: "SparkSession", path: str, since: str | None, to: str | None, queues: list[str] | None
) -> "DataFrame":
    """The rows of an export, within the limits."""
    chosen = select_rows(ARCHIVE, since=since, until=to, queues=queues or None)
    return read_path(spark, path, chosen).select(*lake.ARCHIVE_SCHEMA.names)
