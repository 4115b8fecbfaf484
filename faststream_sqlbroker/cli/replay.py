"""`sqlbroker archive replay`: publish rows of the archive, or of an export, again."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

import pyspark_sqlbroker as our
from faststream_sqlbroker.cli.errors import database_errors
from faststream_sqlbroker.cli.look import headers_of
from faststream_sqlbroker.cli.options import ArchiveTable, Queues, Since, Until, Url
from faststream_sqlbroker.cli.output import print_json, print_line, print_table, refuse_json, row_of
from faststream_sqlbroker.cli.session import SparkRun, need_folder, read_rows
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.load.selection import ARCHIVE, select_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pyspark_sqlbroker import ReplayResult


def replay(
    url: Url,
    job: Annotated[
        str, typer.Option(help="Name of the replay. Under one name each row is published once.")
    ],
    how: SparkRun,
    path: Annotated[
        str | None,
        typer.Option(help="Read Parquet from this path, such as an export, in place of the table."),
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
            help="Only rows that failed in this queue, also those that a dead letter queue took "
            "over, unless they completed there since."
        ),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(help='With --failed-in: only this reason; "" is those without one.'),
    ] = None,
    error_type: Annotated[
        str | None,
        typer.Option(help='With --failed-in: only this class of exception; "" is none.'),
    ] = None,
    into: Annotated[
        str | None, typer.Option(help="Queue to publish to. Default: the queue of each row.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="How many messages become due in a second.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(help='Messages become due this much later, like "10m".')
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help="A header to set on each message, name=value; repeat for several."),
    ] = None,
    redriven: Annotated[
        bool,
        typer.Option(
            "--redriven",
            help="With --path: also messages that went on since, redriven or completed.",
        ),
    ] = False,
    table: Annotated[str, typer.Option(help="Name of the message table.")] = "message",
    archive_table: ArchiveTable = "message_archive",
    schema: Annotated[str | None, typer.Option(help="Schema of both tables.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Publish without asking.")] = False,
) -> None:
    """Publish rows of the archive as new messages, each row once for a job.

    It shows what it would publish, then asks. After a crash repeat the same command: it leaves out
    what the job has published. The rows stay in the archive. With --path it leaves out messages of
    which the lake, the archive or the live table has something newer. The exit code is 1 if the
    answer is no.
    """
    chosen = select_rows(
        ARCHIVE, archive_table, schema, since=since, until=until, queues=queue, states=states
    )
    options: dict[str, Any] = {
        "job": job,
        "queue": into,
        "rate": rate,
        "delay": delay,
        "headers": headers_of(header),
        "table": table,
        "schema": schema,
        "current_only": path is not None and not redriven,
        "archive_table": archive_table,
    }
    _check_error(failed_in, reason, error_type)
    if not yes:
        refuse_json(how.as_json)
    need_folder(path)
    with database_errors():
        session = how.session_of(None if path else url)
        frame = read_rows(session, url, path, chosen, id_ or [], last_only=not redriven)
        frame = _of_error(frame, failed_in, reason, error_type)
        if how.as_json:
            done = our.replay(frame, url, dry_run=False, **options)
            print_json({"messages": done.messages, **row_of(done)})
        else:
            _shown_first(frame, url, options, yes=yes)


def _shown_first(frame: "DataFrame", url: str, options: dict[str, Any], *, yes: bool) -> None:
    """Show what would be published, ask, and publish."""
    found = our.replay(frame, url, **options)
    _show(found)
    if not found.messages:
        print_line("There is nothing to publish.")
        return
    if not yes and not typer.confirm(f"Publish {found.messages} messages?"):
        raise typer.Exit(1)
    _show(our.replay(frame, url, dry_run=False, **options))


def _check_error(failed_in: str | None, reason: str | None, error_type: str | None) -> None:
    if failed_in is None and not (reason is None and error_type is None):
        raise SetupError("--reason and --error-type need --failed-in: name the queue as well")


def _of_error(
    frame: "DataFrame", failed_in: str | None, reason: str | None, error_type: str | None
) -> "DataFrame":
    if failed_in is None:
        return frame
    from pyspark_sqlbroker.analytics.outcomes import failed_with  # noqa: PLC0415 - pyspark is an extra

    return frame.where(failed_with(failed_in, reason, error_type))


def _show(result: "ReplayResult") -> None:
    """Print what a replay did or would do."""
    done = "would be published" if result.dry_run else "published"
    rows = [
        *result.queues.items(),
        ("published before", result.already),
        *([("went on since, left out", result.redriven)] if result.redriven else []),
        ("bytes of payloads", result.bytes),
    ]
    print_table(f"replay {result.job}: {result.rows} rows", ["queue", done], rows)
    if result.dry_run and result.sample:
        sample = [
            (one["id"], one["queue"], one["key"], one["bytes"], short(one["headers"]))
            for one in result.sample
        ]
        print_table("the first of them", ["id", "queue", "key", "bytes", "headers"], sample)
