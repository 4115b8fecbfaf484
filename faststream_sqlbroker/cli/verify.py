"""`sqlbroker verify`: rows of the tables that cannot be, with an exit code for scripts."""

from typing import Annotated

import typer

from faststream_sqlbroker.admin import Verification
from faststream_sqlbroker.cli.shown import AsJson, print_json, print_line, print_table, row_of
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.verification import MEANINGS, NOTES

DAMAGE = 1
"""Exit code if something is wrong with what was looked at, whether that is all or not."""
INCOMPLETE = 3
"""Exit code if the run ended before the tables did, and found nothing wrong; 2 is wrong usage."""


def verify(
    context: typer.Context,
    rows: Annotated[int, typer.Option(min=1, help="End after so many rows.")] = 1_000_000,
    time_limit: Annotated[str, typer.Option(help="End after this time as well.")] = "10m",
    after: Annotated[str | None, typer.Option(help="Go on where it ended before.")] = None,
    lease_over: Annotated[
        str, typer.Option(help="A lease that ended so long ago has no owner.")
    ] = "10m",
    limit: Annotated[int, typer.Option(min=1, help="Most lines to show.")] = 100,
    partial: Annotated[
        bool, typer.Option("--partial", help="A run that ends early has the exit code 0, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Look through the tables for rows that cannot be; exit code 1 if there are some.

    The exit code is 3 if it ended by --rows or --time-limit before all was looked at, and found
    nothing wrong. It writes nothing, and may run while messages are handled.
    """
    found = run(
        context,
        lambda broker: broker.admin.verify(
            after=after, rows=rows, time_limit=time_limit, lease_over=lease_over, limit=limit
        ),
    )
    if as_json:
        print_json({"ok": found.ok, "complete": found.complete, **row_of(found)})
    else:
        _show(found)
    if not found.ok:
        raise typer.Exit(DAMAGE)
    if not found.complete and not partial:
        raise typer.Exit(INCOMPLETE)


def _show(found: Verification) -> None:
    if found.damages:
        lines = [(d.kind, d.message_id, d.queue, d.name, d.found) for d in found.damages]
        print_table("Damages", ["kind", "id", "queue", "name", "found"], lines)
    for kind, number in sorted(found.counts.items()):
        print_line(f"{number:,} {kind}: {MEANINGS[kind]}")
    if found.notes:
        print_table(
            "Notes", ["kind", "name", "found"], [(n.kind, n.name, n.found) for n in found.notes]
        )
        for kind in sorted({n.kind for n in found.notes}):
            print_line(f"{kind}: {NOTES[kind]}; nothing is to be done")
    print_line(f"{found.rows:,} rows looked at" + ("" if found.counts else ", nothing is wrong"))
    if found.after is not None:
        print_line(f"that is not all: go on with --after {found.after}")
