"""`sqlbroker archive replay`: publish rows of the archive or of an export again."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

import pyspark_sqlbroker as spark
from faststream_sqlbroker.cli.error_messages import convert_database_errors
from faststream_sqlbroker.cli.look import parse_headers
from faststream_sqlbroker.cli.output import (
    print_json,
    print_line,
    print_table,
    refuse_json,
    to_json_dict,
)
from faststream_sqlbroker.cli.session import SparkOptions, check_folder_exists, read_rows
from faststream_sqlbroker.cli.shared_options import ArchiveTable, Queues, Since, Until, Url
from faststream_sqlbroker.core.text import format_value, pluralize
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.load.selection import ARCHIVE, select_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pyspark_sqlbroker import ReplayResult


def replay(
    url: Url,
    job: Annotated[
        str, typer.Option(help="Name of the replay. Each row is published once per name.")
    ],
    options: SparkOptions,
    path: Annotated[
        str | None,
        typer.Option(help="Read Parquet from this path, such as an export, instead of the table."),
    ] = None,
    queue: Queues = None,
    states: Annotated[
        list[str] | None,
        typer.Option(
            help="Only rows in this state: failed, completed or discarded; repeat for several."
        ),
    ] = None,
    since: Since = None,
    until: Until = None,
    id_: Annotated[
        list[int] | None,
        typer.Option("--id", help="Only the row with this id; repeat the option for several."),
    ] = None,
    failed_in: Annotated[
        str | None,
        typer.Option(
            help="Only rows that failed in this queue, also if moved to a dead letter queue since; "
            "rows that have completed in this queue since are skipped."
        ),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(help='With --failed-in: only this reason; "" selects rows without a reason.'),
    ] = None,
    error_type: Annotated[
        str | None,
        typer.Option(
            help='With --failed-in: only this exception class; "" selects rows without one.'
        ),
    ] = None,
    into: Annotated[
        str | None, typer.Option(help="Queue to publish to. Default: the queue of each row.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Number of messages that become due per second.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(help='Time until the messages become due, such as "10m".')
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help="Header to set on each message, as name=value; repeat for several."),
    ] = None,
    redriven: Annotated[
        bool,
        typer.Option(
            "--redriven",
            help="With --path: also publish messages that were redriven or completed since.",
        ),
    ] = False,
    table: Annotated[str, typer.Option(help="Name of the message table.")] = "message",
    archive_table: ArchiveTable = "message_archive",
    schema: Annotated[str | None, typer.Option(help="Schema of both tables.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation.")] = False,
) -> None:
    """Publish rows of the archive as new messages, each row once per job.

    The command shows a preview and asks for confirmation. After a crash, repeat the same command:
    it skips rows that the job has already published. The rows stay in the archive. With --path, it
    skips messages that have a newer row in the lake, the archive or the live table. The exit code
    is 1 if you decline.
    """
    selection = select_rows(
        ARCHIVE, archive_table, schema, since=since, until=until, queues=queue, states=states
    )
    arguments: dict[str, Any] = {
        "job": job,
        "queue": into,
        "rate": rate,
        "delay": delay,
        "headers": parse_headers(header),
        "table": table,
        "schema": schema,
        "current_only": path is not None and not redriven,
        "archive_table": archive_table,
    }
    _check_error(failed_in, reason, error_type)
    if not yes:
        refuse_json(options.as_json)
    check_folder_exists(path)
    with convert_database_errors():
        session = options.start_driver_session(None if path else url)
        frame = read_rows(session, url, path, selection, id_ or [], last_only=not redriven)
        frame = _filter_by_error(frame, failed_in, reason, error_type)
        if options.as_json:
            result = spark.replay(frame, url, dry_run=False, **arguments)
            print_json({"messages": result.messages, **to_json_dict(result)})
        else:
            _confirm_and_publish(frame, url, arguments, yes=yes)


def _confirm_and_publish(
    frame: "DataFrame", url: str, arguments: dict[str, Any], *, yes: bool
) -> None:
    """Show a dry run of the replay, ask unless `yes`, and publish.

    A dry run without rows to publish ends the command without a question.
    """
    preview = spark.replay(frame, url, **arguments)
    _print_replay(preview)
    if not preview.messages:
        print_line("No rows to publish.")
        return
    if not yes and not typer.confirm(f"Publish {pluralize(preview.messages, 'messages')}?"):
        raise typer.Exit(1)
    _print_replay(spark.replay(frame, url, dry_run=False, **arguments))


def _check_error(failed_in: str | None, reason: str | None, error_type: str | None) -> None:
    """Refuse `--reason` and `--error-type` without the queue in which the messages failed."""
    if failed_in is None and not (reason is None and error_type is None):
        raise SetupError("--reason and --error-type need --failed-in: give the queue as well")


def _filter_by_error(
    frame: "DataFrame", failed_in: str | None, reason: str | None, error_type: str | None
) -> "DataFrame":
    """Keep the rows that `--failed-in`, `--reason` and `--error-type` select; None: all rows.

    A report's page contains such a command for each error.
    """
    if failed_in is None:
        return frame
    from pyspark_sqlbroker.analytics.outcomes import build_failure_condition  # noqa: PLC0415 - pyspark is an extra

    return frame.where(build_failure_condition(failed_in, reason, error_type))


def _print_replay(result: "ReplayResult") -> None:
    """Print the result of a replay or of a dry run."""
    verb = "would be published" if result.dry_run else "published"
    rows = [
        *result.queues.items(),
        ("already published", result.already),
        *([("redriven or completed since, skipped", result.redriven)] if result.redriven else []),
        ("payload bytes", result.bytes),
    ]
    title = f"replay {result.job}: {pluralize(result.rows, 'rows')}"
    print_table(title, ["queue", verb], rows)
    if result.dry_run and result.sample:
        sample = [
            (row["id"], row["queue"], row["key"], row["bytes"], format_value(row["headers"]))
            for row in result.sample
        ]
        print_table("first messages", ["id", "queue", "key", "bytes", "headers"], sample)
