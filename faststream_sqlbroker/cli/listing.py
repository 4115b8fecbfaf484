"""Commands that list what is not a message: unknown outcomes, locks, schedules."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from faststream_sqlbroker.cli.shown import AsJson, print_json, print_table, row_of
from faststream_sqlbroker.cli.target import run

Limit = Annotated[int, typer.Option(min=1, help="Most lines to show.")]


def unknown(
    context: typer.Context,
    queue: Annotated[str | None, typer.Argument(help="Only messages of this queue.")] = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List messages whose handler may or may not have run."""
    found = run(context, lambda broker: broker.admin.unknown(queue, limit=limit))
    _print("Unknown outcomes", "message_id queue key started_at worker", found, as_json=as_json)


def locks(context: typer.Context, limit: Limit = 100, as_json: AsJson = False) -> None:
    """List the locks that have a holder."""
    found = run(context, lambda broker: broker.admin.locks(limit=limit))
    _print("Locks", "key fence acquired_at held_until worker", found, as_json=as_json)


def schedules(context: typer.Context, limit: Limit = 1_000, as_json: AsJson = False) -> None:
    """List the schedules of all processes, with their last and next times."""
    found = run(context, lambda broker: broker.admin.schedules(limit=limit))
    columns = "name expression tz last_fire_at next_fire_at failures_count paused_by"
    _print("Schedules", columns, found, as_json=as_json)


def _print(title: str, columns: str, found: Sequence[Any], *, as_json: bool) -> None:
    if as_json:
        print_json([row_of(each) for each in found])
        return
    names = columns.split()
    print_table(title, names, [[getattr(each, name) for name in names] for each in found])
