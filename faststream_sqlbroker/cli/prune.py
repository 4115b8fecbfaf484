"""`sqlbroker prune`: remove old messages from the archive."""

from typing import Annotated, Any

import typer

from faststream_sqlbroker import Retention, SqlBroker
from faststream_sqlbroker.cli.errors import database_errors
from faststream_sqlbroker.cli.options import By
from faststream_sqlbroker.cli.output import AsJson, Yes, ask, print_json, print_line
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.exceptions import SetupError

Completed = Annotated[
    str | None, typer.Option(help='Remove COMPLETED ones of this age, like "30d".')
]
Failed = Annotated[str | None, typer.Option(help='Remove FAILED ones of this age, like "90d".')]
Discarded = Annotated[
    str | None, typer.Option(help='Remove DISCARDED ones of this age, like "7d".')
]
LoadedBy = Annotated[
    str | None,
    typer.Option(help="Only what exports with --record-as of this name have verified in the lake."),
]
MaxRows = Annotated[int | None, typer.Option(help="Of more rows than that, remove the oldest.")]


def prune(
    context: typer.Context,
    completed: Completed = None,
    failed: Failed = None,
    discarded: Discarded = None,
    max_rows: MaxRows = None,
    unless_loaded_by: LoadedBy = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    by: By = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove old messages from the archive, a thousand in each transaction.

    What is not given is kept. Without --yes it shows first what would go, and asks.
    """
    if (completed, failed, discarded, max_rows) == (None,) * 4:
        raise SetupError(
            "prune would remove nothing: give --completed, --failed, --discarded or --max-rows"
        )
    with database_errors():
        retention = Retention(
            completed=completed,
            failed=failed,
            discarded=discarded,
            max_rows=max_rows,
            unless_loaded_by=unless_loaded_by,
        )

    async def look(broker: SqlBroker) -> Any:
        return await broker.admin.prune(retention, dry_run=True)

    async def work(broker: SqlBroker) -> Any:
        return await broker.admin.prune(retention, by=by)

    if dry_run or not yes:
        found = run(context, look)
        if dry_run:
            _show(found, "would be removed", as_json=as_json)
            return
        ask(f"prune: {_counts(found)} would be removed", as_json=as_json)
    _show(run(context, work), "removed", as_json=as_json)


def _show(pruned: Any, verb: str, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "completed": pruned.completed,
                "failed": pruned.failed,
                "discarded": pruned.discarded,
                "differing": pruned.differing,
                "partitions": pruned.partitions,
                "dry_run": verb != "removed",
            }
        )
    else:
        print_line(f"{_counts(pruned)} {verb}")
        for name in pruned.partitions:
            print_line(f"partition {name} dropped")
        for window in pruned.differing:
            print_line(f"nothing from window {window}, as the lake has recorded: export again")


def _counts(pruned: Any) -> str:
    return (
        f"{pruned.completed:,} completed, {pruned.failed:,} failed and {pruned.discarded:,} "
        "discarded messages"
    )
