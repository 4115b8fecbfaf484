"""The commands, put together."""

from collections.abc import Callable
from typing import Annotated, cast

import typer

from faststream_sqlbroker.cli.archive import app as archive
from faststream_sqlbroker.cli.bulk import audit, dead, redrive
from faststream_sqlbroker.cli.bulk import replay as replay_here
from faststream_sqlbroker.cli.check import check
from faststream_sqlbroker.cli.config import app as config
from faststream_sqlbroker.cli.erase import erase
from faststream_sqlbroker.cli.follow import tail, top
from faststream_sqlbroker.cli.forget import (
    forget_schedule,
    forget_unknown,
    pause_schedule,
    release_lock,
    resume_schedule,
    run_schedule,
)
from faststream_sqlbroker.cli.jobs import app as jobs
from faststream_sqlbroker.cli.lake import repair
from faststream_sqlbroker.cli.lake import verify as verify_lake
from faststream_sqlbroker.cli.lake_status import status as lake_status
from faststream_sqlbroker.cli.listing import locks, schedules, unknown
from faststream_sqlbroker.cli.look import explain, messages, queues, show, subscribers
from faststream_sqlbroker.cli.mend import (
    cancel,
    drain,
    edit,
    move,
    pause,
    postpone,
    publish,
    release,
    resume,
    retry,
    undrain,
)
from faststream_sqlbroker.cli.partitions import partitions
from faststream_sqlbroker.cli.prune import prune
from faststream_sqlbroker.cli.replay import replay
from faststream_sqlbroker.cli.report import report
from faststream_sqlbroker.cli.schema import migrate, sql
from faststream_sqlbroker.cli.serve import hash_password, serve
from faststream_sqlbroker.cli.spark import app as spark
from faststream_sqlbroker.cli.target import Target
from faststream_sqlbroker.cli.verify import verify

archive.command(name="status")(lake_status)
archive.command()(replay)
archive.command()(report)
archive.command()(verify_lake)
archive.command()(repair)
archive.command()(erase)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # a local may be the database's URL, with its password
    help="See, mend and check what is in the tables of faststream_sqlbroker.",
)
app.add_typer(archive, name="archive")
app.add_typer(spark, name="spark")
app.add_typer(jobs, name="jobs")
app.add_typer(config, name="config")
LOOK = (
    queues,
    messages,
    show,
    explain,
    dead,
    subscribers,
    unknown,
    schedules,
    locks,
    audit,
    check,
    verify,
    top,
    tail,
)
BULK = (redrive, replay_here)
MEND = (
    pause,
    resume,
    drain,
    undrain,
    cancel,
    retry,
    postpone,
    edit,
    move,
    release,
    publish,
    prune,
)
SCHEDULES = (run_schedule, pause_schedule, resume_schedule)
FORGET = (release_lock, forget_schedule, forget_unknown)
TABLES = (sql, migrate, partitions)
HTTP = (serve, hash_password)
for command in (*LOOK, *MEND, *SCHEDULES, *FORGET, *BULK, *TABLES, *HTTP):
    app.command()(cast("Callable[..., None]", command))


@app.callback()
def options(
    context: typer.Context,
    application: Annotated[
        str | None,
        typer.Option(
            "--app", help="A SqlBroker or an application with one, as module:name: its tables."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="SQLBROKER_URL",
            show_default=False,
            help=(
                "SQLAlchemy URL of the database, with an asynchronous driver, unless --app is "
                "given. Give it by the variable to keep its password out of the list of processes."
            ),
        ),
    ] = None,
    message_table: Annotated[str, typer.Option(help="Name of the message table.")] = "message",
    archive_table: Annotated[
        str, typer.Option(help="Name of the archive table.")
    ] = "message_archive",
    schema: Annotated[str | None, typer.Option(help="Schema of the tables.")] = None,
) -> None:
    """See, mend and check what is in the tables of faststream_sqlbroker."""
    context.obj = Target(application, url, message_table, archive_table, schema)
