"""Commands that say by their exit code what is wrong: check with the broker, verify with rows."""

from collections.abc import Iterator
from typing import Annotated

import typer

from faststream_sqlbroker.admin import Finding, Findings, Verification
from faststream_sqlbroker.cli.output import AsJson, print_json, print_line, print_table, row_of
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.retention import ArchiveSize
from faststream_sqlbroker.core.text import size_text
from faststream_sqlbroker.core.times import positive_seconds
from faststream_sqlbroker.core.verification import MEANINGS, NOTES


def check(
    context: typer.Context,
    max_age: Annotated[
        str, typer.Option(help="How long a due message may wait for a subscriber.")
    ] = "10m",
    old_transaction: Annotated[
        str, typer.Option(help="How long a transaction of any session may be open.")
    ] = "5m",
    as_json: AsJson = False,
) -> None:
    """Look at the database, queues, schedules and dead letters; exit code 1 for an error.

    Warnings are shown, and do not change the exit code.
    """
    longest = positive_seconds("max-age", max_age)
    oldest = positive_seconds("old-transaction", old_transaction)
    report = run(
        context,
        lambda broker: broker.admin.findings(max_age=longest, old_transaction=oldest),
    )
    rows = [*_fine(report), *(_row(finding) for finding in report.findings)]
    if as_json:
        named = [
            {"what": what, "ok": level != "WRONG", "level": level, "kind": kind, "text": text}
            for level, what, kind, text in rows
        ]
        print_json(named)
    else:
        lines = [(level, what, text) for level, what, _, text in rows]
        print_table("Check", ["", "what", "result"], lines, whole=True)
    if report.errors:
        raise typer.Exit(1)


Row = tuple[str, str, str, str]
"""The level, what was looked at, the kind of finding, and what was found."""


def _row(finding: Finding) -> Row:
    kind = finding.kind
    what = kind if finding.queue is None else f"queue {finding.queue}"
    return "WRONG" if finding.is_error else "warning", what, kind, str(finding)


def _fine(report: Findings) -> Iterator[Row]:
    """Say what was looked at and is well."""
    health = report.health
    database = health.database
    sessions = f"{len(database.transactions)} open"
    if database.hidden is not None:
        sessions += f"; hidden: {database.hidden}"
    dead = sum(table.dead_rows for table in database.tables)
    # This process has no subscribers, and hardly uses its pool.
    fine = {
        "database": database.version,
        "writes": "the database takes them",
        "tables": "as this version needs them",
        "clock": f"{abs(health.clock_difference):.1f} s from this machine's",
        "transactions": sessions,
        "dead rows": f"about {dead}" if database.tables else "not told by this database",
    }
    if not any((health.schema, health.lacks, health.writes)):
        fine |= {
            "rights": "all that operators need",
            "queues": f"{len(report.queues)} looked at",
            "overdue schedule": "none",
            "dead letters": "none since yesterday",
            "unknown outcomes": "none",
        }
        fine |= _archive_growth(report.archive)
        if health.drained:
            # No problem by itself, as a pause is none; a queue that waits for them is one.
            fine["drained"] = ", ".join(health.drained)
    wrong = {finding.kind for finding in report.findings}
    for what, text in fine.items():
        if what not in wrong:
            yield "ok", what, what, text


def _archive_growth(archive: ArchiveSize | None) -> dict[str, str]:
    if archive is None:
        return {}
    a_day = size_text(archive.bytes_per_day)
    return {"archive growth": f"{a_day} in the last 24 hours, to {size_text(archive.size)}"}


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
        _print_verification(found)
    if not found.ok:
        raise typer.Exit(DAMAGE)
    if not found.complete and not partial:
        raise typer.Exit(INCOMPLETE)


def _print_verification(found: Verification) -> None:
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
