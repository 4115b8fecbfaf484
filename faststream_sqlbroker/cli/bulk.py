"""Commands over all messages that match: each counts first, asks, and runs as a job."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import Admin, DeadLetterGroup, Job
from faststream_sqlbroker.cli.look import warn_of_queue
from faststream_sqlbroker.cli.options import BulkRun, MessageIds, To, WhichEnded
from faststream_sqlbroker.cli.output import (
    AsJson,
    print_json,
    print_line,
    print_table,
    progress,
    refuse_json,
    row_of,
)
from faststream_sqlbroker.cli.target import run


def dead(
    context: typer.Context,
    which: WhichEnded,
    limit: Annotated[int, typer.Option(help="Most groups to show.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Group the failed messages of the archive by their errors, the largest group first."""
    found = run(context, lambda broker: broker.admin.dead_letters(limit=limit, **which.filters))
    if as_json:
        groups = [{**row_of(group), "count": group.count} for group in found.groups]
        print_json({"groups": groups, "scanned_until": found.scanned_until})
        return
    columns = ["count", "fingerprint", "queues", "reason", "last", "error"]
    print_table("Dead letters", columns, [_group(group) for group in found.groups])
    if not found.groups:
        warn_of_queue(context, which.queue)
    if found.scanned_until is not None:
        print_line(f"looked at messages until {found.scanned_until:%Y-%m-%d %H:%M:%S} UTC")


def _group(group: DeadLetterGroup) -> list[Any]:
    queues = ", ".join(group.queues)
    reasons = ", ".join(str(reason) for reason in group.reasons)
    return [group.count, group.fingerprint, queues, reasons, group.last_at, group.error]


def redrive(
    context: typer.Context,
    which: WhichEnded,
    how: BulkRun,
    message_ids: MessageIds = None,
    state: Annotated[str, typer.Option(help="FAILED or DISCARDED.")] = "FAILED",
    to: To = None,
) -> None:
    """Bring failed messages back to their queues, under their ids."""
    warn_of_queue(context, to)
    options = how.options(which, message_ids)
    do_bulk(context, how, lambda a: a.redrive(state=state, to=to, **options))


def replay(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Of the replay: each message once for it.")],
    which: WhichEnded,
    how: BulkRun,
    message_ids: MessageIds = None,
    state: Annotated[
        str | None, typer.Option(help="COMPLETED, FAILED or DISCARDED; default: all.")
    ] = None,
    to: To = None,
) -> None:
    """Publish archived messages again as new ones; those in a lake: archive replay."""
    warn_of_queue(context, to)
    options = how.options(which, message_ids)
    do_bulk(context, how, lambda a: a.replay(name, state=state, to=to, **options))


def audit(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Most actions to show.")] = 50,
    before: Annotated[str | None, typer.Option(help="Only before the one with this id.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what operators did: who, when, on how many messages, with which filter."""
    found = run(context, lambda broker: broker.admin.audit(limit=limit, before=before))
    show_jobs("Audit", found, as_json=as_json)


def do_bulk(context: typer.Context, how: BulkRun, plan: Callable[[Admin], Awaitable[Job]]) -> None:
    """Show the dry run, ask unless `--yes`, and run the job; exit code 1 if it was stopped, has
    failed, if the database refused messages, or if it does not take one whose id was given.
    """
    if not (how.yes or how.dry_run):
        refuse_json(how.as_json)
    planned = run(context, lambda broker: plan(broker.admin))
    is_all = how.dry_run or not planned.expected
    if is_all or not how.as_json:
        _show_plan(context, planned, as_json=how.as_json)
    if is_all:
        raise typer.Exit(0 if how.dry_run else _exit_code(planned))
    how.confirm("")
    # What was shown is what is run: up to the last message that there was then.
    job = run(context, lambda broker: _run(broker, planned, wait=not how.no_wait))
    how.tell(job_row(job), str(job), *_hints(job))
    raise typer.Exit(_exit_code(job))


def _exit_code(job: Job) -> int:
    return int(job.state in ("stopped", "failed") or bool(job.failed or job.note))


def _show_plan(context: typer.Context, planned: Job, *, as_json: bool) -> None:
    if as_json:
        print_json(job_row(planned))
        return
    print_table("These match", ["queue", "messages"], planned.queues.items())
    which = ", the oldest" if planned.expected == planned.limit else ""
    print_line(f"{planned.action}: {planned.expected} messages{which}")
    print_line((planned.note or "").replace("; ", "\n"))
    if not planned.expected and planned.filters is not None:
        warn_of_queue(context, planned.filters.queue)


def _hints(job: Job) -> list[str]:
    more = f"it goes on in other processes: sqlbroker jobs show {job.id}"
    return [more] if job.state == "running" else []


async def _run(broker: SqlBroker, planned: Job, *, wait: bool) -> Job:
    begun = await broker.admin.run_job(planned, wait=False)
    return await watched(broker, begun) if wait else begun


async def watched(broker: SqlBroker, begun: Job) -> Job:
    """Work on the job until its end, with a progress bar on a terminal."""
    try:
        with progress(f"{begun.action} {begun.id}", begun.expected) as move:
            return await broker.admin.wait_for_job(
                begun.id, progress=lambda now: move(completed=now.visited)
            )
    except asyncio.CancelledError:
        # By Ctrl-C, which must not look as if it had ended the job.
        text = f"the job goes on in other processes: sqlbroker jobs stop {begun.id} stops it"
        typer.echo(text, err=True)
        raise


def job_row(job: Job) -> dict[str, Any]:
    """A job as JSON shows it: without its position, with its filter as it was given."""
    fields = row_of(job)
    del fields["bound"]
    del fields["cursor"]
    given = fields["filters"]
    fields["filters"] = given and {name: value for name, value in given.items() if value}
    return fields


def show_jobs(title: str, found: list[Job], *, as_json: bool) -> None:
    """A table of jobs, or JSON."""
    if as_json:
        print_json([job_row(job) for job in found])
        return
    columns = ["id", "action", "by", "state", "expected", "done", "skipped", "failed"]
    rows = [[getattr(job, name) for name in columns] + [_what(job)] for job in found]
    print_table(title, [*columns, "of"], rows)


def _what(job: Job) -> str:
    """The filter and the arguments in one line."""
    filters = job_row(job)["filters"] or {}
    filters.pop("archived", None)
    if job.limit is not None:
        filters["limit"] = job.limit
    given = {**filters, **{k: v for k, v in job.arguments.items() if k not in ("scope", "text")}}
    return ", ".join(f"{name}={value}" for name, value in given.items())
