"""Commands that report issues by their exit code: `check` for the broker, `verify` for the rows."""

from collections.abc import Iterator
from typing import Annotated

import typer

from faststream_sqlbroker.admin import Finding, Findings, Verification
from faststream_sqlbroker.cli.output import (
    AsJson,
    print_json,
    print_line,
    print_table,
    to_json_dict,
)
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.retention import ArchiveSize
from faststream_sqlbroker.core.text import format_size, pluralize
from faststream_sqlbroker.core.times import parse_positive
from faststream_sqlbroker.core.verification import MEANINGS, NOTES
from faststream_sqlbroker.database.constants import MAX_SESSIONS
from faststream_sqlbroker.database.parts.live_queues import MAX_QUEUES


def check(
    context: typer.Context,
    max_age: Annotated[str, typer.Option(help="Maximum time that a due message may wait.")] = "10m",
    old_transaction: Annotated[
        str, typer.Option(help="Maximum age of an open transaction of any session.")
    ] = "5m",
    as_json: AsJson = False,
) -> None:
    """Check the database, queues, schedules and dead letters; exit code 1 for an error.

    Warnings do not change the exit code.
    """
    max_age_seconds = parse_positive("max-age", max_age)
    max_transaction_seconds = parse_positive("old-transaction", old_transaction)
    report = run(
        context,
        lambda broker: broker.admin.findings(
            max_age=max_age_seconds, old_transaction=max_transaction_seconds
        ),
    )
    rows = [*_iter_passed_checks(report), *(_build_row(finding) for finding in report.findings)]
    if as_json:
        results = [
            {"what": subject, "ok": level != "WRONG", "level": level, "kind": kind, "text": text}
            for level, subject, kind, text in rows
        ]
        print_json(results)
    else:
        lines = [(level, subject, text) for level, subject, _, text in rows]
        print_table("Check", ["", "check", "result"], lines, full_text=True)
    if report.errors:
        raise typer.Exit(1)


Row = tuple[str, str, str, str]
"""Level, subject, kind of finding, and message."""


def _build_row(finding: Finding) -> Row:
    """Return the row of a problem: "WRONG" for an error, which sets the exit code, or "warning"."""
    kind = finding.kind
    subject = kind if finding.queue is None else f"queue {finding.queue}"
    return "WRONG" if finding.is_error else "warning", subject, kind, str(finding)


def _iter_passed_checks(report: Findings) -> Iterator[Row]:
    """Yield a row "ok" for each check without a finding, so that the user sees what was checked.

    The checks of the tables' contents are omitted if tables, rights or writes have a problem, or
    if a part could not be read, because they may not have run then.
    """
    health = report.health
    database = health.database
    count = len(database.transactions)
    sessions = f"{count} open{_mark_limit(count, MAX_SESSIONS, ' or more')}"
    if database.hidden is not None:
        sessions += f"; hidden: {database.hidden}"
    dead = sum(table.dead_rows for table in database.tables)
    # Subscribers and pool are left out: this process has none, and hardly uses its pool.
    passed = {
        "database": database.version,
        "writes": "accepted",
        "tables": "match this version",
        "clock": f"{abs(health.clock_difference):.1f} s from this machine's",
        "transactions": sessions,
        "dead rows": f"about {dead}" if database.tables else "not reported by this database",
    }
    failed_kinds = {finding.kind for finding in report.findings}
    if not any((health.schema, health.lacks, health.writes, "not read" in failed_kinds)):
        count = len(report.queues)
        passed |= {
            "rights": "complete",
            "queues": f"{count} checked{_mark_limit(count, MAX_QUEUES, ', not all')}",
            "overdue schedule": "none",
            "dead letters": "none since yesterday",
            "unknown outcomes": "none",
        }
        passed |= _format_archive_growth(report.archive)
        if health.drained:
            # Not an issue by itself, like a pause; a queue that waits for them is reported.
            passed["drained"] = ", ".join(health.drained)
    for subject, text in passed.items():
        if subject not in failed_kinds:
            yield "ok", subject, subject, text


def _mark_limit(count: int, limit: int, mark: str) -> str:
    """Return `mark` if a list of `count` items may have been cut at `limit`, else nothing."""
    return mark if count >= limit else ""


def _format_archive_growth(archive: ArchiveSize | None) -> dict[str, str]:
    """Return the row of the archive's growth; empty if the database does not report sizes."""
    if archive is None:
        return {}
    daily_bytes = format_size(archive.bytes_per_day)
    return {"archive growth": f"{daily_bytes} in the last 24 hours, to {format_size(archive.size)}"}


EXIT_DAMAGED = 1
"""Exit code if damage was found, even if the run was incomplete."""
EXIT_INCOMPLETE = 3
"""Exit code if the run ended early without finding damage; 2 is wrong usage."""


def verify(
    context: typer.Context,
    rows: Annotated[int, typer.Option(min=1, help="Stop after this many rows.")] = 1_000_000,
    time_limit: Annotated[str, typer.Option(help="Stop after this time.")] = "10m",
    after: Annotated[str | None, typer.Option(help="Continue after the previous run.")] = None,
    lease_over: Annotated[
        str, typer.Option(help="Report leases that expired at least this long ago.")
    ] = "10m",
    limit: Annotated[int, typer.Option(min=1, help="Maximum rows to show.")] = 100,
    partial: Annotated[
        bool, typer.Option("--partial", help="Exit with code 0 even if the run stops early.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Search the tables for inconsistent rows; exit code 1 if any are found.

    The exit code is 3 if --rows or --time-limit stopped the run early and no damage was found. The
    command writes nothing and can run while messages are handled.
    """
    verification = run(
        context,
        lambda broker: broker.admin.verify(
            after=after, rows=rows, time_limit=time_limit, lease_over=lease_over, limit=limit
        ),
    )
    if as_json:
        print_json(
            {"ok": verification.ok, "complete": verification.complete, **to_json_dict(verification)}
        )
    else:
        _print_verification(verification)
    if not verification.ok:
        raise typer.Exit(EXIT_DAMAGED)
    if not verification.complete and not partial:
        raise typer.Exit(EXIT_INCOMPLETE)


def _print_verification(verification: Verification) -> None:
    """Print the damage, the meaning of each kind, and how to continue an incomplete run."""
    if verification.damages:
        rows = [(d.kind, d.message_id, d.queue, d.name, d.found) for d in verification.damages]
        print_table("Damage", ["kind", "id", "queue", "name", "found"], rows)
    for kind, number in sorted(verification.counts.items()):
        print_line(f"{number:,} {kind}: {MEANINGS[kind]}")
    if verification.notes:
        print_table(
            "Notes",
            ["kind", "name", "found"],
            [(n.kind, n.name, n.found) for n in verification.notes],
        )
        for kind in sorted({n.kind for n in verification.notes}):
            print_line(f"{kind}: {NOTES[kind]}; no action is needed")
    print_line(
        f"{pluralize(verification.rows, 'rows')} checked"
        + ("" if verification.counts else ", no damage found")
    )
    if verification.after is not None:
        print_line(f"not all rows were checked: continue with --after {verification.after}")
