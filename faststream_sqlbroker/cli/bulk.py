"""Commands that change all matching messages: count first, ask, and run as a job."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import Admin, DeadLetterGroup, Job
from faststream_sqlbroker.cli.look import warn_if_queue_is_empty
from faststream_sqlbroker.cli.output import (
    AsJson,
    print_json,
    print_line,
    print_table,
    refuse_json,
    show_progress,
    to_json_dict,
    warn_if_cut,
)
from faststream_sqlbroker.cli.shared_options import (
    ArchivedMessageFilter,
    BulkCommandOptions,
    MessageIds,
    To,
)
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.text import pluralize


def dead(
    context: typer.Context,
    message_filter: ArchivedMessageFilter,
    limit: Annotated[int, typer.Option(help="Maximum groups to show.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Group the failed messages of the archive by error, largest group first."""
    dead_letters = run(
        context, lambda broker: broker.admin.dead_letters(limit=limit, **message_filter.filters)
    )
    groups = dead_letters.groups
    if as_json:
        documents = [{**to_json_dict(group), "count": group.count} for group in groups]
        print_json({"groups": documents, "scanned_until": dead_letters.scanned_until})
    else:
        columns = ["count", "fingerprint", "queues", "reason", "last", "error"]
        print_table("Dead letters", columns, [_build_group_row(group) for group in groups])
        if not groups:
            warn_if_queue_is_empty(context, message_filter.queue)
        if dead_letters.scanned_until is not None:
            print_line(
                f"searched messages back to {dead_letters.scanned_until:%Y-%m-%d %H:%M:%S} UTC; "
                "older messages are not counted"
            )
    warn_if_cut(groups, limit)


def _build_group_row(group: DeadLetterGroup) -> list[Any]:
    """Return the cells of a group of dead letters, in the order of the columns of `dead`."""
    queues = ", ".join(group.queues)
    reasons = ", ".join(str(reason) for reason in group.reasons)
    return [group.count, group.fingerprint, queues, reasons, group.last_at, group.error]


def redrive(
    context: typer.Context,
    message_filter: ArchivedMessageFilter,
    options: BulkCommandOptions,
    message_ids: MessageIds = None,
    state: Annotated[str, typer.Option(help="FAILED or DISCARDED.")] = "FAILED",
    to: To = None,
) -> None:
    """Move failed messages back to their queues, under their ids."""
    warn_if_queue_is_empty(context, to)
    arguments = options.to_arguments(message_filter, message_ids)
    run_bulk_action(context, options, lambda a: a.redrive(state=state, to=to, **arguments))


def replay(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the replay; publishes each message once.")],
    message_filter: ArchivedMessageFilter,
    options: BulkCommandOptions,
    message_ids: MessageIds = None,
    state: Annotated[
        str | None, typer.Option(help="COMPLETED, FAILED or DISCARDED; default: all.")
    ] = None,
    to: To = None,
) -> None:
    """Publish archived messages again as new messages; for an export, use archive replay."""
    warn_if_queue_is_empty(context, to)
    arguments = options.to_arguments(message_filter, message_ids)
    run_bulk_action(context, options, lambda a: a.replay(name, state=state, to=to, **arguments))


def audit(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Maximum actions to show.")] = 50,
    before: Annotated[str | None, typer.Option(help="Only actions before this id.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the actions of operators: who, when, how many messages, which filter."""
    jobs = run(context, lambda broker: broker.admin.audit(limit=limit, before=before))
    show_jobs("Audit", jobs, limit, as_json=as_json)


def run_bulk_action(
    context: typer.Context, options: BulkCommandOptions, plan: Callable[[Admin], Awaitable[Job]]
) -> None:
    """Show the dry run, ask unless `--yes`, and run the job that `plan` returns.

    The exit code is 1 if the job was stopped or failed, if the database refused messages, or if a
    given id was not accepted.
    """
    if not (options.yes or options.dry_run):
        refuse_json(options.as_json)
    planned_job = run(context, lambda broker: plan(broker.admin))
    is_done = options.dry_run or not planned_job.expected
    if is_done or not options.as_json:
        _show_plan(context, planned_job, as_json=options.as_json)
    if is_done:
        raise typer.Exit(0 if options.dry_run else _get_exit_code(planned_job))
    options.confirm("")
    # Run exactly what was shown, up to the last message at that time.
    job = run(context, lambda broker: _run_job(broker, planned_job, wait=not options.no_wait))
    options.print_result(to_job_dict(job), str(job), *_build_hints(job))
    raise typer.Exit(_get_exit_code(job))


def _get_exit_code(job: Job) -> int:
    """Return 1 if the job may have missed messages: see `run_bulk_action`."""
    return int(job.state in ("stopped", "failed") or bool(job.failed or job.note))


def _show_plan(context: typer.Context, planned_job: Job, *, as_json: bool) -> None:
    """Show the counts of a dry run per queue, and its note on ids that are skipped.

    Without messages a misspelt queue may be the reason, so a warning suggests similar names.
    """
    if as_json:
        print_json(to_job_dict(planned_job))
        return
    print_table("Matching messages", ["queue", "messages"], planned_job.queues.items())
    limit_note = " (the oldest)" if planned_job.expected == planned_job.limit else ""
    count = pluralize(planned_job.expected, "messages")
    print_line(f"{planned_job.action}: {count}{limit_note}")
    print_line((planned_job.note or "").replace("; ", "\n"))
    if not planned_job.expected and planned_job.filters is not None:
        warn_if_queue_is_empty(context, planned_job.filters.queue)


def _build_hints(job: Job) -> list[str]:
    """Return a line that names the command for a job that is still running, after `--no-wait`."""
    hint = f"other processes run the job: see sqlbroker jobs show {job.id}"
    return [hint] if job.state == "running" else []


async def _run_job(broker: SqlBroker, planned_job: Job, *, wait: bool) -> Job:
    """Store a planned job, and run its batches here if `wait` is set.

    A stored job can be run by any process that has a subscriber and the rights, so waiting is not
    needed.
    """
    job = await broker.admin.run_job(planned_job, wait=False)
    return await watch_job(broker, job) if wait else job


async def watch_job(broker: SqlBroker, job: Job) -> Job:
    """Run batches until the job ends, with a progress bar on a terminal.

    Other processes may run batches of the same job at the same time, and continue it after Ctrl-C.
    """
    try:
        with show_progress(f"{job.action} {job.id}", job.expected) as update_progress:
            return await broker.admin.wait_for_job(
                job.id, progress=lambda current: update_progress(completed=current.visited)
            )
    except asyncio.CancelledError:
        # Ctrl-C ends only this command, not the job.
        text = f"the job continues in other processes: sqlbroker jobs stop {job.id} stops it"
        typer.echo(text, err=True)
        raise


def to_job_dict(job: Job) -> dict[str, Any]:
    """Convert a job to a JSON object, without unset filters and the internal position.

    The position is `cursor`, the last visited row, and `bound`, the last row to visit.
    """
    fields = to_json_dict(job)
    del fields["bound"]
    del fields["cursor"]
    filters = fields["filters"]
    fields["filters"] = filters and {name: value for name, value in filters.items() if value}
    return fields


def show_jobs(title: str, jobs: list[Job], limit: int, *, as_json: bool) -> None:
    """Print jobs as a table or as JSON; `limit` is the number at which the list was cut."""
    if as_json:
        print_json([to_job_dict(job) for job in jobs])
    else:
        columns = ["id", "action", "by", "state", "expected", "done", "skipped", "failed"]
        rows = [[getattr(job, name) for name in columns] + [_format_details(job)] for job in jobs]
        print_table(title, [*columns, "of"], rows)
    warn_if_cut(jobs, limit)


def _format_details(job: Job) -> str:
    """Format the filters and the arguments of a job in a line, for the table's last column.

    Internal arguments are left out.
    """
    filters = to_job_dict(job)["filters"] or {}
    filters.pop("archived", None)
    if job.limit is not None:
        filters["limit"] = job.limit
    details = {**filters, **{k: v for k, v in job.arguments.items() if k not in ("scope", "text")}}
    return ", ".join(f"{name}={value}" for name, value in details.items())
