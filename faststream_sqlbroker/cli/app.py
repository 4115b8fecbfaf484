"""The commands: what `--help` lists, and the module of each, which is imported when it runs."""

import ast
from importlib import import_module
from importlib.util import find_spec
from inspect import cleandoc
from typing import Annotated, Any, ClassVar

import rich  # noqa: F401 - commands print with it: main() says so if it is not installed
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

Table = dict[str, str]
"""Names of commands, each with its module in this folder, which has a function or a group of the
command's name."""


def _table(**modules: str) -> Table:
    """The names of the commands of each module."""
    return {name: module for module, names in modules.items() for name in names.split()}


LOOK = _table(
    look="queues messages show explain subscribers policies unknown schedules locks",
    bulk="dead audit",
    check="check verify",
    follow="top tail",
)
MEND = _table(
    mend="pause resume drain undrain cancel retry postpone edit move release publish",
    prune="prune",
)
SCHEDULES = _table(forget="run-schedule pause-schedule resume-schedule")
FORGET = _table(forget="release-lock forget-schedule forget-unknown")
BULK = _table(bulk="redrive replay")
TABLES = _table(schema="sql migrate partitions")
HTTP = _table(serve="serve hash-password")
ARCHIVE = _table(
    archive="export prune erase",
    lake="status verify repair",
    replay="replay",
    report="report",
)
GROUPS = {
    "archive": (
        "Export the archive to a Delta table, keep that, prune the archive, replay and report."
    ),
    "spark": "Check Java, Spark and the JDBC drivers.",
    "jobs": "Show bulk actions; stop, resume and undo them.",
    "config": "Check files that describe a service.",
}
"""Names of groups, each with its help; a group has a module of its name."""


def help_of(name: str, module: str) -> str:
    """Return the help of a group or a command: the first paragraph of its docstring, read from the
    source, as importing all modules takes long.
    """
    if name in GROUPS:
        return GROUPS[name]
    loader: Any = getattr(find_spec(f"faststream_sqlbroker.cli.{module}"), "loader", None)
    for node in ast.parse(loader.get_source(loader.name) or "").body:
        if isinstance(node, ast.FunctionDef) and node.name == name.replace("-", "_"):
            text = cleandoc(ast.get_docstring(node) or "").partition("\n\n")[0]
            return " ".join(text.split())
    return ""


class ListedCommand(TyperCommand):
    """A command by its name, and a line of help where commands are listed."""

    def __init__(self, name: str, module: str) -> None:
        super().__init__(name)
        self.module = module

    def load(self) -> Any:
        """Import the module, and return the command with its options."""
        name = str(self.name)
        module = import_module(f"faststream_sqlbroker.cli.{self.module}")
        command = getattr(module, name.replace("-", "_"))
        holder = typer.Typer()
        if isinstance(command, typer.Typer):
            holder.add_typer(command, name=name, help=GROUPS[name])
        else:
            # Not before: it imports FastStream's errors, which `--help` does without.
            from faststream_sqlbroker.cli.options import grouped  # noqa: PLC0415

            holder.command(name)(grouped(command))
        return get_group(holder).commands[name]


class ListedGroup(TyperGroup):
    """Commands of a table: help and completion read the table, and a command is loaded to run."""

    table: ClassVar[Table]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, module in self.table.items():
            self.add_command(ListedCommand(name, module))

    def list_commands(self, ctx: Any) -> list[str]:
        """Name the commands, each with its help from now on."""
        for command in self.commands.values():
            if isinstance(command, ListedCommand):
                command.help = help_of(str(command.name), command.module)
        return super().list_commands(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command of the arguments, and load it."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, ListedCommand) else command, rest


class ArchiveGroup(ListedGroup):
    """The commands behind `archive`."""

    table = ARCHIVE


class AppGroup(ListedGroup):
    """All commands."""

    table = (
        LOOK
        | MEND
        | SCHEDULES
        | FORGET
        | BULK
        | TABLES
        | HTTP
        | {n: n for n in GROUPS}
        | {"archive": "app"}
    )


archive = typer.Typer(cls=ArchiveGroup, no_args_is_help=True)


@archive.callback(help=GROUPS["archive"])
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
