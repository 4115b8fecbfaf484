"""`sqlbroker archive report`: render the archive as one HTML page."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import pyspark_sqlbroker as lake
from faststream_sqlbroker.cli.error_messages import convert_database_errors
from faststream_sqlbroker.cli.output import print_result
from faststream_sqlbroker.cli.session import SparkOptions, check_folder_exists, read_rows
from faststream_sqlbroker.cli.shared_options import (
    ArchiveTable,
    Queues,
    Schema,
    Since,
    Until,
    UrlIfNeeded,
)
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.load.selection import ARCHIVE, select_rows
from pyspark_sqlbroker.moments import MIN_TIME, TimeInput, parse_time

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def report(
    out: Annotated[Path, typer.Option(help="HTML file to write; an existing file is replaced.")],
    options: SparkOptions,
    url: UrlIfNeeded = None,
    path: Annotated[
        str | None, typer.Option(help="Folder of an export to read instead of the database.")
    ] = None,
    since: Since = None,
    until: Until = None,
    queue: Queues = None,
    every: Annotated[
        str | None, typer.Option(help='Length of a time bucket in the plots, such as "1h".')
    ] = None,
    table: ArchiveTable = "message_archive",
    schema: Schema = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Message archive",
    before: Annotated[
        bool,
        typer.Option(
            help="With --since and --until: also show the preceding period of the same length."
        ),
    ] = True,
    message_url: Annotated[
        str | None,
        typer.Option(
            help='URL of a message page, such as "https://ops.example/{id}"; ids link to it.'
        ),
    ] = None,
) -> None:
    """Render the archive, or an export of it, to one HTML page with tables and plots.

    --path takes precedence over the URL, which may come from SQLBROKER_URL.
    """
    if path is None and url is None:
        raise SetupError(
            "no archive given: use --url or SQLBROKER_URL for the database, or --path for an export"
        )
    check_folder_exists(path)
    with convert_database_errors():
        spark = options.start_driver_session(url if path is None else None)
        replay_options = _build_table_options(table, schema) if path is None else ["--path", path]

        def read_period(start: TimeInput | None, end: TimeInput | None) -> "DataFrame":
            """Read the rows of a period, without the additional columns of an export."""
            selection = select_rows(
                ARCHIVE, table, schema, since=start, until=end, queues=queue or None
            )
            rows = read_rows(spark, url, path, selection)
            return rows.select(*lake.ARCHIVE_SCHEMA.names)

        previous_period = _find_previous_period(since, until) if before else None
        report_path = lake.write_report(
            read_period(since, until),
            out,
            every=every,
            title=title,
            before=None if previous_period is None else read_period(*previous_period),
            message_url=message_url,
            replay_options=replay_options,
        )
    print_result({"written": str(report_path)}, f"wrote {report_path}", as_json=options.as_json)


def _build_table_options(table: str, schema: str | None) -> list[str]:
    """Return the options that name the archive in the `archive replay` commands of the page.

    Each error on the page has a command that publishes its messages again.
    """
    options = [] if table == "message_archive" else ["--archive-table", table]
    return options if schema is None else [*options, "--schema", schema]


def _find_previous_period(since: str | None, until: str | None) -> tuple[datetime, datetime] | None:
    """Return the preceding period of the same length, to compare this period with.

    None if a bound is missing.
    """
    start = parse_time("since", since)
    end = parse_time("until", until)
    if start is None or end is None:
        return None
    # `datetime` ends at the year 1; a period that ends before it begins has no length.
    length = max(timedelta(0), min(end - start, start - MIN_TIME))
    return start - length, start
