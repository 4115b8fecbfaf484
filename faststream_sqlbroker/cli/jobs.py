"""`sqlbroker jobs`: the progress of bulk actions; stop, resume and undo them."""

from typing import Annotated

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import Job
from faststream_sqlbroker.cli.bulk import job_row, show_jobs, watched
from faststream_sqlbroker.cli.options import Act, Change, NoWait
from faststream_sqlbroker.cli.output import AsJson, print_json, print_table, refuse_json
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.exceptions import SetupError

JobId = Annotated[str, typer.Argument(help="The job's id.")]


def newest(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Most jobs to show.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the newest bulk actions."""
    page = run(context, lambda broker: broker.admin.audit(bulk=True, limit=limit))
    show_jobs("Jobs", page, as_json=as_json)


def show(context: typer.Context, job_id: JobId, as_json: AsJson = False) -> None:
    """Show how far a job has come."""
    job = _job(context, job_id)
    if as_json:
        print_json(job_row(job))
        return
    rows = [(name, value) for name, value in job_row(job).items() if value is not None]
    print_table(f"Job {job.id}", ["field", "value"], rows)


def stop(context: typer.Context, job_id: JobId, how: Act) -> None:
    """Let a job rest; what is done stays done."""
    job = run(context, lambda broker: broker.admin.stop_job(job_id, by=how.by))
    how.tell(job_row(job), str(job))


def resume(context: typer.Context, job_id: JobId, how: Act, no_wait: NoWait = False) -> None:
    """Let a job go on that was stopped or has failed."""

    async def work(broker: SqlBroker) -> Job:
        job = await broker.admin.resume_job(job_id, wait=False, by=how.by)
        return job if no_wait else await watched(broker, job)

    _tell_end(run(context, work), how)


def undo(context: typer.Context, job_id: JobId, how: Change, no_wait: NoWait = False) -> None:
    """Take back what a job has done to messages that nothing has touched since."""
    if not how.yes:
        refuse_json(how.as_json)
        job = _job(context, job_id)
        if not job.can_be_undone:
            raise SetupError(
                f"the job cannot be undone, got {job}: it must be a bulk action that has ended or "
                "is stopped, and neither an undo nor undone"
            )
        how.confirm(f"undo {job}")

    async def work(broker: SqlBroker) -> Job:
        undone = await broker.admin.undo(job_id, wait=False, by=how.by)
        return undone if no_wait else await watched(broker, undone)

    _tell_end(run(context, work), how)


def _job(context: typer.Context, job_id: str) -> Job:
    job = run(context, lambda broker: broker.admin.job(job_id))
    if job is None:
        raise SetupError(f"there is no job {job_id!r}: sqlbroker jobs lists them")
    return job


def _tell_end(job: Job, how: Act) -> None:
    """Tell of a job; exit code 1 if it has failed, or the database refused messages."""
    how.tell(job_row(job), str(job))
    if job.failed or job.state == "failed":
        raise typer.Exit(1)
