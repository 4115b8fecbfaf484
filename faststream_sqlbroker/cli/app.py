"""The commands: what `--help` lists, and the module of each, which is imported when it runs."""

import ast
from importlib import import_module
from importlib.util import find_spec
from inspect import cleandoc
from typing import Annotated, Any, NamedTuple

import rich  # noqa: F401 - commands print with it: main() says so if it is not installed
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group


class Place(NamedTuple):
    """Where a command is."""

    module: str
    """In this folder."""
    function: str


class Group(NamedTuple):
    """Commands that share a first word. The one named `list` runs if no other one is named."""

    help: str
    commands: dict[str, Place]


Table = dict[str, Place | Group]


def _table(words: str) -> dict[str, Place]:
    """Commands as "module.function", or as "name=module.function" with a name of their own."""
    table = {}
    for word in words.split():
        name, _, place = word.rpartition("=")
        module, _, function = place.partition(".")
        table[name or function.replace("_", "-")] = Place(module, function)
    return table


OPERATIONS = {
    "queues": Group(
        "Show queues and what waits for policies; pause and resume queues.",
        _table("list=look.queues look.policies follow.top mend.pause mend.resume"),
    ),
    "messages": Group(
        "Find messages; publish, change and end them.",
        _table(
            "list=look.messages look.show look.explain look.unknown follow.tail mend.publish "
            "mend.retry mend.postpone mend.edit mend.move mend.cancel bulk.replay "
            "forget.forget_unknown"
        ),
    ),
    "dead-letters": Group(
        "Group failed messages by their errors, and bring them back.",
        _table("list=bulk.dead bulk.redrive"),
    ),
    "subscribers": Group(
        "List live subscribers; drain them, and release what dead ones hold.",
        _table("list=look.subscribers mend.drain mend.undrain mend.release"),
    ),
    "schedules": Group(
        "List schedules; run, pause, resume and forget them.",
        _table(
            "list=look.schedules run=forget.run_schedule pause=forget.pause_schedule "
            "resume=forget.resume_schedule forget=forget.forget_schedule"
        ),
    ),
    "locks": Group(
        "List locks, and take them from their holders.",
        _table("list=look.locks release=forget.release_lock"),
    ),
    "tables": Group(
        "Make and migrate the tables, look through them, prune the archive.",
        _table("schema.migrate schema.sql schema.partitions check.verify prune.prune"),
    ),
}
"""Groups whose commands have their function's name, too, without the group."""
COMMANDS: Table = {
    **_table("check.check"),
    **OPERATIONS,
    "jobs": Group(
        "Show bulk actions; stop, resume and undo them.",
        _table("list=jobs.newest jobs.show jobs.stop jobs.resume jobs.undo"),
    ),
    **_table("bulk.audit"),
    "archive": Group(
        "Export the archive to a Delta table, keep that, prune the archive, replay and report.",
        _table(
            "archive.export archive.prune archive.erase lake.status lake.verify lake.repair "
            "replay.replay report.report"
        ),
    ),
    **_table("serve.serve serve.hash_password"),
    "config": Group("Check files that describe a service.", _table("config.check config.schema")),
    "spark": Group("Check Java, Spark and the JDBC drivers.", _table("spark.check")),
}
"""What `--help` lists, in this order."""
SHORT: Table = {
    place.function.replace("_", "-"): place
    for group in OPERATIONS.values()
    for place in group.commands.values()
    if place.function not in COMMANDS
}
"""Names that work and are not listed, as a group has each of these commands."""


def help_of(place: Place | Group) -> str:
    """Return the help of a group or a command: the first paragraph of its docstring, read from the
    source, as importing all modules takes long.
    """
    if isinstance(place, Group):
        return place.help
    loader: Any = getattr(find_spec(f"faststream_sqlbroker.cli.{place.module}"), "loader", None)
    for node in ast.parse(loader.get_source(loader.name) or "").body:
        if isinstance(node, ast.FunctionDef) and node.name == place.function:
            text = cleandoc(ast.get_docstring(node) or "").partition("\n\n")[0]
            return " ".join(text.split())
    return ""


class ListedCommand(TyperCommand):
    """A command by its name, and a line of help where commands are listed."""

    def __init__(self, name: str, place: Place, *, hidden: bool = False) -> None:
        super().__init__(name, hidden=hidden)
        self.place = place

    def load(self) -> Any:
        """Import the module, and return the command with its options."""
        # Not before: they import FastStream's errors, which `--help` does without.
        from faststream_sqlbroker.cli.complete import completed  # noqa: PLC0415
        from faststream_sqlbroker.cli.options import grouped  # noqa: PLC0415

        name = str(self.name)
        module = import_module(f"faststream_sqlbroker.cli.{self.place.module}")
        holder = typer.Typer(rich_markup_mode=None)
        holder.command(name)(completed(grouped(getattr(module, self.place.function))))
        return get_group(holder).commands[name]


class ListedGroup(TyperGroup):
    """Commands of a table: help and completion read the table, and a command is loaded to run."""

    def __init__(self, table: Table, **options: Any) -> None:
        super().__init__(**options)
        for name, place in table.items():
            self.add_command(_listed(name, place))

    def list_commands(self, ctx: Any) -> list[str]:
        """Name the commands, each with its help from now on."""
        for command in self.commands.values():
            if isinstance(command, ListedCommand):
                # The short one is not cut where it is listed.
                command.help = command.short_help = help_of(command.place)
        return super().list_commands(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `list` before the arguments if they are for that."""
        return super().parse_args(ctx, ["list", *args] if self._is_for_list(ctx, args) else args)

    def _is_for_list(self, ctx: Any, args: list[str]) -> bool:
        if "list" not in self.commands or args[:1] == ["--help"]:
            return False
        if not args or args[0].startswith("-"):
            # Without arguments the shell may be about to complete the name of a command.
            return bool(args) or not ctx.resilient_parsing
        # With a second word the first one was a command, misspelt.
        is_alone = len(args) == 1 or args[1].startswith("-")
        return is_alone and args[0] not in self.commands and bool(_arguments(self._list()))

    def _list(self) -> Any:
        command: Any = self.commands["list"]
        return command.load()

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command of the arguments, and load it."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, ListedCommand) else command, rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the options of `list`, too."""
        if "list" in self.commands:
            self.params = self._list().params
            self.subcommand_metavar = "| COMMAND [ARGS]..."
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the names of commands, and what `list` takes in their place."""
        items = super().shell_complete(ctx, incomplete)
        if "list" in self.commands:
            command = self._list()
            with command.make_context("list", [], parent=ctx, resilient_parsing=True) as inner:
                for each in [command] if incomplete.startswith("-") else _arguments(command):
                    items += each.shell_complete(inner, incomplete)
        return list({item.value: item for item in items}.values())


def _arguments(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "argument"]


def _listed(name: str, place: Place | Group, *, hidden: bool = False) -> Any:
    if isinstance(place, Place):
        return ListedCommand(name, place, hidden=hidden)
    return ListedGroup(
        {**place.commands},
        name=name,
        help=place.help,
        short_help=place.help,
        no_args_is_help="list" not in place.commands,
        rich_markup_mode=None,
    )


class AppGroup(ListedGroup):
    """All commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(COMMANDS, **options)
        for name, place in SHORT.items():
            self.add_command(_listed(name, place, hidden=True))


app = typer.Typer(
    cls=AppGroup,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # a local may be the database's URL, with its password
    rich_markup_mode=None,  # its panels cut words in a narrow terminal
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
