"""The commands: what `--help` lists, and the module of each, which is imported when it runs."""

from importlib import import_module
from typing import Annotated, Any, ClassVar

import rich  # noqa: F401 - commands print with it: main() says so if it is not installed
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

Table = dict[str, tuple[str, str]]
"""Names of commands, each with its module in this folder and the first lines of its docstring: the
module has a function or a group of the command's name."""
LOOK: Table = {
    "queues": ("look", "Show what waits in each queue, how fast it grows, and who takes from it."),
    "messages": ("look", "List or search messages, a page at a time."),
    "show": ("look", "Show one message, live or archived: its history, and why it is where it is."),
    "explain": ("look", "Tell why a message waits, or how it ended."),
    "dead": (
        "bulk",
        "Group the failed messages of the archive by their errors, the largest group first.",
    ),
    "subscribers": ("look", "List the live subscribers of all processes."),
    "unknown": ("look", "List messages whose handler may or may not have run."),
    "schedules": ("look", "List the schedules of all processes, with their last and next times."),
    "locks": ("look", "List the locks that have a holder."),
    "audit": (
        "bulk",
        "Show what operators did: who, when, on how many messages, with which filter.",
    ),
    "check": (
        "check",
        "Look at database, tables, queues and unknown outcomes; exit code 1 if something is wrong.",
    ),
    "verify": (
        "check",
        "Look through the tables for rows that cannot be; exit code 1 if there are some.",
    ),
    "top": ("follow", "Show the queues again and again; with --json one document a line."),
    "tail": (
        "follow",
        "Print messages as they end, in the archive's order; with --json one document a line.",
    ),
}
MEND: Table = {
    "pause": ("mend", "Stop all claims from a queue, in all processes, until it is resumed."),
    "resume": ("mend", "End the pause of a queue."),
    "drain": ("mend", "Let a worker claim nothing more: it ends what it runs, and stays alive."),
    "undrain": ("mend", "End the drain of a worker: it claims again."),
    "cancel": (
        "mend",
        "End messages as DISCARDED: these, also while they run, or all that match and wait.",
    ),
    "retry": (
        "mend",
        "Make messages due now, these or all that match, that wait for their time or an attempt.",
    ),
    "postpone": ("mend", "Make a message due later, or earlier, than it is."),
    "edit": ("mend", "Change the priority, the key or the due time of a message that waits."),
    "move": (
        "mend",
        "Move messages that wait, these or all that match, to another queue; they are due there.",
    ),
    "release": ("mend", "Release what a worker has leased that ended without a stop."),
    "publish": ("mend", "Publish one message; the audit names who did."),
    "prune": ("prune", "Remove old messages from the archive, a thousand in each transaction."),
}
SCHEDULES: Table = {
    "run-schedule": (
        "forget",
        "Publish a schedule's message once more, now, by a process that declares the schedule.",
    ),
    "pause-schedule": (
        "forget",
        "Publish nothing of a schedule, in all processes, until it is resumed.",
    ),
    "resume-schedule": (
        "forget",
        "End the pause of a schedule, which leaves out the fire times until now.",
    ),
}
FORGET: Table = {
    "release-lock": (
        "forget",
        "Take a lock from its holder, which learns of it at its next renewal and is not stopped.",
    ),
    "forget-schedule": (
        "forget",
        "Remove a schedule that no process declares any more, with the fire times that are due.",
    ),
    "forget-unknown": (
        "forget",
        "Take messages off the list of unknown outcomes, once their outcome was found out.",
    ),
}
BULK: Table = {
    "redrive": ("bulk", "Bring failed messages back to their queues, under their ids."),
    "replay": (
        "bulk",
        "Publish archived messages again as new ones; those in a lake: archive replay.",
    ),
}
TABLES: Table = {
    "sql": ("schema", "Print the migrations, or the functions, as SQL; nothing is connected to."),
    "migrate": (
        "schema",
        "Bring the tables to the version of this package, creating them if there are none.",
    ),
    "partitions": (
        "schema",
        "Add the partitions of the archive that are missing; PostgreSQL, as its owner.",
    ),
}
HTTP: Table = {
    "serve": ("serve", "Serve the broker over HTTP until it is interrupted."),
    "hash-password": (
        "serve",
        "Print the hash of a password, for the file of `serve --users` and for `Login`.",
    ),
}
GROUPS: Table = {
    "archive": (
        "app",
        "Export the archive to a Delta table, keep that, prune the archive, replay and report.",
    ),
    "spark": ("spark", "Check Java, Spark and the JDBC drivers."),
    "jobs": ("jobs", "Show bulk actions; stop, resume and undo them."),
    "config": ("config", "Check files that describe a service."),
}
ARCHIVE: Table = {
    "export": (
        "archive",
        "Write the closed windows that the export lacks, each compared with the database.",
    ),
    "compact": (
        "archive",
        "Merge the small files of an export, after their rows have been compared.",
    ),
    "prune": (
        "archive",
        (
            "Remove rows from the archive: those that an export holds, old ones, or those that are "
            "both."
        ),
    ),
    "status": (
        "lake",
        "Show what an export holds, and up to when; with --freshness how far it is behind.",
    ),
    "replay": ("replay", "Publish rows of the archive as new messages, each row once for a job."),
    "report": (
        "report",
        "Render the archive, or an export of it, to one HTML page with tables and plots.",
    ),
    "verify": ("lake", "Read the files of an export again and compare them with its log."),
    "repair": (
        "lake",
        "Export damaged windows again, as long as the database has their rows.",
    ),
    "erase": (
        "archive",
        "Erase messages by key or id from the live table, the archive and an export.",
    ),
}


class ListedCommand(TyperCommand):
    """A command by its name and a line of help, which is all that a list of commands shows."""

    def __init__(self, name: str, module: str, text: str) -> None:
        super().__init__(name, help=text)
        self.module = module

    def load(self) -> Any:
        """Import the module, and return the command with its options."""
        name = str(self.name)
        module = import_module(f"faststream_sqlbroker.cli.{self.module}")
        command = getattr(module, name.replace("-", "_"))
        holder = typer.Typer()
        if isinstance(command, typer.Typer):
            holder.add_typer(command, name=name)
        else:
            holder.command(name)(command)
        return get_group(holder).commands[name]


class ListedGroup(TyperGroup):
    """Commands of a table: help and completion read the table, and a command is loaded to run."""

    table: ClassVar[Table]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, (module, text) in self.table.items():
            self.add_command(ListedCommand(name, module, text))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command of the arguments, and load it."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, ListedCommand) else command, rest


class ArchiveGroup(ListedGroup):
    """The commands behind `archive`."""

    table = ARCHIVE


class AppGroup(ListedGroup):
    """All commands."""

    table = LOOK | MEND | SCHEDULES | FORGET | BULK | TABLES | HTTP | GROUPS


archive = typer.Typer(cls=ArchiveGroup, no_args_is_help=True)


@archive.callback(help=GROUPS["archive"][1])
def archive_options() -> None:
    """Make the commands a group without options."""


app = typer.Typer(
    cls=AppGroup,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # a local may be the database's URL, with its password
    help="See, mend and check what is in the tables of faststream_sqlbroker.",
)


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
    # No Target yet: its module imports the broker, which not every command needs.
    context.obj = (application, url, message_table, archive_table, schema)
