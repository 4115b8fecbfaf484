"""`sqlbroker jobs`: the progress of bulk actions; stop, resume and undo them."""

from typing import Annotated

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import Job
from faststream_sqlbroker.cli.bulk import job_row, show_jobs, watched
from faststream_sqlbroker.cli.options import By, NoWait
from faststream_sqlbroker.cli.output import AsJson, Yes, ask, print_json, print_line, print_table
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.exceptions import SetupError

JobId = Annotated[str, typer.Argument(help="The job's id.")]

jobs = typer.Typer(
    invoke_without_command=True, help="Show bulk actions; stop, resume and undo them."
)


@jobs.callback()
def newest(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Most jobs to show.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the newest bulk actions."""
    if context.invoked_subcommand is None:
        found = run(context, lambda broker: broker.admin.audit(bulk=True, limit=limit))
        show_jobs("Jobs", found, as_json=as_json)


@jobs.command()
def show(context: typer.Context, job_id: JobId, as_json: AsJson = False) -> None:
    """Show how far a job has come."""
    job = _job(context, job_id)
    if as_json:
        print_json(job_row(job))
        return
    rows = [(name, value) for name, value in job_row(job).items() if value is not None]
    print_table(f"Job {job.id}", ["field", "value"], rows)


@jobs.command()
def stop(context: typer.Context, job_id: JobId, by: By = None, as_json: AsJson = False) -> None:
    """Let a job rest; what is done stays done."""
    _tell(run(context, lambda broker: broker.admin.stop_job(job_id, by=by)), as_json=as_json)


@jobs.command()
def resume(
    context: typer.Context,
    job_id: JobId,
    no_wait: NoWait = False,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Let a job go on that was stopped or has failed."""

    async def work(broker: SqlBroker) -> Job:
        job = await broker.admin.resume_job(job_id, wait=False, by=by)
        return job if no_wait else await watched(broker, job)

    _tell_all(run(context, work), as_json=as_json)


@jobs.command()
def undo(
    context: typer.Context,
    job_id: JobId,
    no_wait: NoWait = False,
    by: By = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Take back what a job has done to messages that nothing has touched since."""
    if not yes:
        ask(f"undo {_job(context, job_id)}", as_json=as_json)

    async def work(broker: SqlBroker) -> Job:
        undone = await broker.admin.undo(job_id, wait=False, by=by)
        return undone if no_wait else await watched(broker, undone)

    _tell_all(run(context, work), as_json=as_json)


def _job(context: typer.Context, job_id: str) -> Job:
    job = run(context, lambda broker: broker.admin.job(job_id))
    if job is None:
        raise SetupError(f"there is no job {job_id!r}: sqlbroker jobs lists them")
    return job


def _tell(job: Job, *, as_json: bool) -> None:
    if as_json:
        print_json(job_row(job))
    else:
        print_line(str(job))


def _tell_all(job: Job, *, as_json: bool) -> None:
    """As `_tell`; exit code 1 if it has failed, or the database refused messages."""
    _tell(job, as_json=as_json)
    if job.failed or job.state == "failed":
        raise typer.Exit(1)
