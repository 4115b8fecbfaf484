"""`sqlbroker archive report …`: the archive as one HTML page."""

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import pyspark_sqlbroker as lake
from faststream_sqlbroker.cli.errors import database_errors
from faststream_sqlbroker.cli.options import (
    ArchiveTable,
    Queues,
    Schema,
    Since,
    Until,
    UrlIfNeeded,
)
from faststream_sqlbroker.cli.output import tell
from faststream_sqlbroker.cli.session import SparkRun, need_folder, read_rows
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.load.selection import ARCHIVE, select_rows
from pyspark_sqlbroker.moments import Moment, parse_moment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def report(
    out: Annotated[Path, typer.Option(help="The HTML file to write; an existing one is replaced.")],
    how: SparkRun,
    url: UrlIfNeeded = None,
    path: Annotated[
        str | None, typer.Option(help="Folder of an export to read in place of the database.")
    ] = None,
    since: Since = None,
    until: Until = None,
    queue: Queues = None,
    every: Annotated[
        str | None, typer.Option(help='Length of a time bucket in the plots, like "1h".')
    ] = None,
    table: ArchiveTable = "message_archive",
    schema: Schema = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Message archive",
    before: Annotated[
        bool,
        typer.Option(
            help="With --since and --until: show the period of the same length before, next to "
            "this one."
        ),
    ] = True,
    message_url: Annotated[
        str | None,
        typer.Option(
            help='Address of a message\'s page, like "https://ops.example/{id}": ids become links '
            "to it."
        ),
    ] = None,
) -> None:
    """Render the archive, or an export of it, to one HTML page with tables and plots.

    --path wins over the URL, which may come from SQLBROKER_URL.
    """
    if path is None and url is None:
        raise SetupError(
            "give --url (or SQLBROKER_URL) for the database, or --path for an export of it"
        )
    need_folder(path)
    with database_errors():
        spark = how.session_of(url if path is None else None)
        where = _table_options(table, schema) if path is None else ["--path", path]

        def read(first: Moment | None, last: Moment | None) -> "DataFrame":
            chosen = select_rows(
                ARCHIVE, table, schema, since=first, until=last, queues=queue or None
            )
            found = read_rows(spark, url, path, chosen)
            return found.select(*lake.ARCHIVE_SCHEMA.names)

        earlier = _period_before(since, until) if before else None
        written = lake.write_report(
            read(since, until),
            out,
            every=every,
            title=title,
            before=None if earlier is None else read(*earlier),
            message_url=message_url,
            replay_options=where,
        )
    tell({"written": str(written)}, f"written: {written}", as_json=how.as_json)


def _table_options(table: str, schema: str | None) -> list[str]:
    named = [] if table == "message_archive" else ["--archive-table", table]
    return named if schema is None else [*named, "--schema", schema]


def _period_before(since: str | None, until: str | None) -> tuple[datetime, datetime] | None:
    """The period of the same length that ends where this one begins."""
    first = parse_moment("since", since)
    last = parse_moment("until", until)
    if first is None or last is None:
        return None
    # Nothing was archived before the year 1; a period that ends before it begins has no length.
    length = max(timedelta(0), min(last - first, first - _FIRST))
    return first - length, first


_FIRST = datetime.min.replace(tzinfo=timezone.utc)
