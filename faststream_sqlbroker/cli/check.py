"""Commands that say by their exit code what is wrong: check with the broker, verify with rows."""

from typing import Annotated

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import Health, QueueOverview, Verification
from faststream_sqlbroker.cli.output import AsJson, print_json, print_line, print_table, row_of
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.times import length_text, positive_seconds
from faststream_sqlbroker.core.verification import MEANINGS, NOTES

Finding = tuple[str, bool, str]
"""What was looked at, whether it is well, and what was found."""


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
    """Look at database, tables, queues and unknown outcomes; exit code 1 if something is wrong."""
    longest = positive_seconds("max-age", max_age)
    oldest = positive_seconds("old-transaction", old_transaction)
    found = run(context, lambda broker: _findings(broker, longest, oldest))
    if as_json:
        print_json([{"what": what, "ok": ok, "text": text} for what, ok, text in found])
    else:
        rows = [("ok" if ok else "WRONG", what, text) for what, ok, text in found]
        print_table("Check", ["", "what", "found"], rows, whole=True)
    if not all(ok for _, ok, _ in found):
        raise typer.Exit(1)


async def _findings(broker: SqlBroker, longest: float, oldest: float) -> list[Finding]:
    health = await broker.admin.health(old_transaction=oldest)
    fine = _fine(health)
    found: list[Finding] = [("database", True, health.database.version)]
    for what, problems in health.findings().items():
        # This process has no subscribers, and hardly uses its pool.
        if problems or what in fine:
            found.append((what, not problems, "; ".join(problems) or fine[what]))
    if health.schema or health.lacks:
        # What follows reads the tables, and would fail with one of these problems.
        return found
    if health.drained:
        # No problem by itself, as a pause is none; a queue that waits for them is one.
        found.append(("drained", True, ", ".join(health.drained)))
    for queue in await broker.admin.queues():
        found += _queue(queue, longest)
    unknown = await broker.admin.unknown(limit=1_000)
    text = f"{len(unknown)} messages whose handler may or may not have run" if unknown else "none"
    found.append(("unknown outcomes", not unknown, text))
    return found


def _fine(health: Health) -> dict[str, str]:
    """What is said of each part that has no problem."""
    database = health.database
    sessions = f"{len(database.transactions)} open"
    if database.hidden is not None:
        sessions += f"; hidden: {database.hidden}"
    dead = sum(table.dead_rows for table in database.tables)
    return {
        "tables": "as this version needs them",
        "rights": "all that operators need",
        "clock": f"{abs(health.clock_difference):.1f} s from this machine's",
        "transactions": sessions,
        "dead rows": f"about {dead}" if database.tables else "not told by this database",
    }


def _queue(queue: QueueOverview, longest: float) -> list[Finding]:
    what = f"queue {queue.queue}"
    by = "" if queue.paused is None else f"paused by {queue.paused.by}"
    if queue.problem is not None:
        return [(what, False, queue.problem)]
    # A pause is no problem by itself, but what it holds up may be.
    late = queue.late_standing if queue.standing_overdue > longest else None
    if queue.oldest_due_age > longest:
        late = f"a due message has waited for {length_text(queue.oldest_due_age)}"
    if late is not None:
        return [(what, False, f"{late}; {by}" if by else late)]
    return [(what, True, by)] if by else []


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
