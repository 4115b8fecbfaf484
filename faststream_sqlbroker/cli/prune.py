"""`sqlbroker prune`: remove old messages from the archive."""

from typing import Annotated, Any

import typer

from faststream_sqlbroker import Retention
from faststream_sqlbroker.cli.error_messages import convert_database_errors
from faststream_sqlbroker.cli.output import refuse_json
from faststream_sqlbroker.cli.shared_options import ChangeOptions
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.exceptions import SetupError

Completed = Annotated[
    str | None, typer.Option(help='Remove COMPLETED messages older than this, such as "30d".')
]
Failed = Annotated[
    str | None, typer.Option(help='Remove FAILED messages older than this, such as "90d".')
]
Discarded = Annotated[
    str | None, typer.Option(help='Remove DISCARDED messages older than this, such as "7d".')
]
LoadedBy = Annotated[
    str | None,
    typer.Option(
        help="Only rows that an export with --record-as of this name has verified in the lake."
    ),
]
MaxRows = Annotated[int | None, typer.Option(help="Maximum rows to keep; older rows are removed.")]


def prune(
    context: typer.Context,
    options: ChangeOptions,
    completed: Completed = None,
    failed: Failed = None,
    discarded: Discarded = None,
    max_rows: MaxRows = None,
    unless_loaded_by: LoadedBy = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
) -> None:
    """Remove old messages from the archive, a thousand in each transaction.

    Only messages that an option selects are removed. Without --yes, the command shows a preview and
    asks for confirmation.
    """
    if (completed, failed, discarded, max_rows) == (None,) * 4:
        raise SetupError(
            "no messages selected: give --completed, --failed, --discarded or --max-rows"
        )
    with convert_database_errors():
        retention = Retention(
            completed=completed,
            failed=failed,
            discarded=discarded,
            max_rows=max_rows,
            unless_loaded_by=unless_loaded_by,
        )

    if not (dry_run or options.yes):
        refuse_json(options.as_json)
    if dry_run or not options.yes:
        preview = run(context, lambda broker: broker.admin.prune(retention, dry_run=True))
        if dry_run:
            _print_pruned(preview, "would be removed", options)
            return
        options.confirm(f"prune: {_format_counts(preview)} would be removed")
    _print_pruned(
        run(context, lambda broker: broker.admin.prune(retention, by=options.by)),
        "removed",
        options,
    )


def _print_pruned(result: Any, verb: str, options: ChangeOptions) -> None:
    """Print the counts, dropped partitions, and windows that differ from the lake's record."""
    names = ("completed", "failed", "discarded", "differing", "partitions")
    fields = {name: getattr(result, name) for name in names} | {"dry_run": verb != "removed"}
    lines = [
        f"{_format_counts(result)} {verb}",
        *(f"partition {name} dropped" for name in result.partitions),
        *(
            f"kept window {window} as the lake has recorded: export it again"
            for window in result.differing
        ),
    ]
    options.print_result(fields, *lines)


def _format_counts(result: Any) -> str:
    """Format the number of removed messages by their states."""
    return (
        f"{result.completed:,} completed, {result.failed:,} failed and {result.discarded:,} "
        "discarded messages"
    )
