"""`sqlbroker jobs`: show the progress of bulk actions; stop, resume and undo them."""

from typing import Annotated

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import Job
from faststream_sqlbroker.cli.bulk import show_jobs, to_job_dict, watch_job
from faststream_sqlbroker.cli.output import AsJson, print_json, print_table, refuse_json
from faststream_sqlbroker.cli.shared_options import ActionOptions, ChangeOptions, NoWait
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.exceptions import SetupError

JobId = Annotated[str, typer.Argument(help="The job's id.")]


def newest(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Maximum jobs to show.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the newest bulk actions."""
    page = run(context, lambda broker: broker.admin.audit(bulk=True, limit=limit))
    show_jobs("Jobs", page, limit, as_json=as_json)


def show(context: typer.Context, job_id: JobId, as_json: AsJson = False) -> None:
    """Show the progress of a job."""
    job = _get_job(context, job_id)
    if as_json:
        print_json(to_job_dict(job))
        return
    rows = [(name, value) for name, value in to_job_dict(job).items() if value is not None]
    print_table(f"Job {job.id}", ["field", "value"], rows)


def stop(context: typer.Context, job_id: JobId, options: ActionOptions) -> None:
    """Stop a job until it is resumed; completed changes stay."""
    job = run(context, lambda broker: broker.admin.stop_job(job_id, by=options.by))
    options.print_result(to_job_dict(job), str(job))


def resume(
    context: typer.Context, job_id: JobId, options: ActionOptions, no_wait: NoWait = False
) -> None:
    """Resume a job that was stopped or has failed."""

    async def work(broker: SqlBroker) -> Job:
        """Resume the job; without `--no-wait` also run the batches here until the end."""
        job = await broker.admin.resume_job(job_id, wait=False, by=options.by)
        return job if no_wait else await watch_job(broker, job)

    _print_end(run(context, work), options)


def undo(
    context: typer.Context, job_id: JobId, options: ChangeOptions, no_wait: NoWait = False
) -> None:
    """Undo a job's changes to messages that have not changed since."""
    if not options.yes:
        refuse_json(options.as_json)
        job = _get_job(context, job_id)
        if not job.can_be_undone:
            raise SetupError(
                f"cannot undo {job}: it must be a bulk action that has ended or is stopped, and "
                "neither an undo nor already undone"
            )
        options.confirm(f"undo {job}")

    async def work(broker: SqlBroker) -> Job:
        """Start the undo; without `--no-wait` also run the batches here until the end."""
        undo_job = await broker.admin.undo(job_id, wait=False, by=options.by)
        return undo_job if no_wait else await watch_job(broker, undo_job)

    _print_end(run(context, work), options)


def _get_job(context: typer.Context, job_id: str) -> Job:
    """Return a job, or raise the error that says how to list the jobs."""
    job = run(context, lambda broker: broker.admin.job(job_id))
    if job is None:
        raise SetupError(f"job {job_id!r} does not exist: `sqlbroker jobs` lists the jobs")
    return job


def _print_end(job: Job, options: ActionOptions) -> None:
    """Print a job; exit with code 1 if the job failed or the database refused messages."""
    options.print_result(to_job_dict(job), str(job))
    if job.failed or job.state == "failed":
        raise typer.Exit(1)
