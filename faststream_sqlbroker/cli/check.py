"""`sqlbroker check`: what is wrong, with an exit code for scripts."""

from typing import Annotated

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import Health, QueueOverview
from faststream_sqlbroker.cli.shown import AsJson, age, print_json, print_table
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.times import positive_seconds

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
        print_table("Check", ["", "what", "found"], rows)
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
    if queue.oldest_due_age > longest:
        late = f"a due message has waited for {age(queue.oldest_due_age)}"
        return [(what, False, f"{late}; {by}" if by else late)]
    return [(what, True, by)] if by else []
