"""The command tree, built from a table; a command's module is imported when the command runs."""

import ast
from importlib import import_module
from importlib.util import find_spec
from inspect import cleandoc
from typing import Annotated, Any, NamedTuple

import rich  # noqa: F401 - commands print with it: main() says so if it is not installed
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group


class CommandRef(NamedTuple):
    """The module and the function of a command."""

    module: str
    """Module name within `faststream_sqlbroker.cli`."""
    function: str


class CommandGroup(NamedTuple):
    """Commands that share a first word.

    The command named `list` runs if the second word names no command.
    """

    help: str
    commands: dict[str, CommandRef]


CommandTable = dict[str, CommandRef | CommandGroup]


def _parse_commands(spec: str) -> dict[str, CommandRef]:
    """Parse the commands of a group from entries separated by spaces.

    An entry is "module.function", or "name=module.function" if the command has another name.
    """
    commands = {}
    for entry in spec.split():
        name, _, location = entry.rpartition("=")
        module, _, function = location.partition(".")
        commands[name or function.replace("_", "-")] = CommandRef(module, function)
    return commands


OPERATIONS = {
    "queues": CommandGroup(
        "Show queues and messages that wait for policies; pause and resume queues.",
        _parse_commands("list=look.queues look.policies follow.top mend.pause mend.resume"),
    ),
    "messages": CommandGroup(
        "Find, publish, change and cancel messages.",
        _parse_commands(
            "list=look.messages look.show look.explain look.unknown follow.tail mend.publish "
            "mend.retry mend.postpone mend.edit mend.move mend.cancel bulk.replay "
            "forget.forget_unknown"
        ),
    ),
    "dead-letters": CommandGroup(
        "Group failed messages by error, and redrive them.",
        _parse_commands("list=bulk.dead bulk.redrive"),
    ),
    "subscribers": CommandGroup(
        "List and drain live subscribers; release messages of dead subscribers.",
        _parse_commands("list=look.subscribers mend.drain mend.undrain mend.release"),
    ),
    "schedules": CommandGroup(
        "List schedules; run, pause, resume and forget them.",
        _parse_commands(
            "list=look.schedules run=forget.run_schedule pause=forget.pause_schedule "
            "resume=forget.resume_schedule forget=forget.forget_schedule"
        ),
    ),
    "locks": CommandGroup(
        "List held locks, and release them by force.",
        _parse_commands("list=look.locks release=forget.release_lock"),
    ),
    "tables": CommandGroup(
        "Create, migrate and verify the tables; prune the archive.",
        _parse_commands("schema.migrate schema.sql schema.partitions check.verify prune.prune"),
    ),
}
"""Groups whose commands also work without the name of the group."""
COMMANDS: CommandTable = {
    **_parse_commands("check.check"),
    **OPERATIONS,
    "jobs": CommandGroup(
        "List jobs (bulk actions); stop, resume and undo them.",
        _parse_commands(
            "list=job_commands.newest job_commands.show job_commands.stop job_commands.resume "
            "job_commands.undo"
        ),
    ),
    **_parse_commands("bulk.audit"),
    "archive": CommandGroup(
        "Export the archive to a Delta table and maintain it; prune, erase, replay and report.",
        _parse_commands(
            "archive_commands.export archive_commands.prune archive_commands.erase lake.status "
            "lake.verify lake.repair replay_command.replay report.report"
        ),
    ),
    **_parse_commands("serve.serve serve.hash_password"),
    "config": CommandGroup(
        "Check YAML files that describe a service.", _parse_commands("config.check config.schema")
    ),
    "spark": CommandGroup(
        "Check Java, Spark and the JDBC drivers.", _parse_commands("spark.check")
    ),
}
"""Commands that `--help` lists, in this order."""
SHORT_COMMANDS: CommandTable = {
    ref.function.replace("_", "-"): ref
    for group in OPERATIONS.values()
    for ref in group.commands.values()
    if ref.function not in COMMANDS
}
"""Short names that work but are not listed, because a group lists each of these commands."""


def find_help(ref: CommandRef | CommandGroup) -> str:
    """Return the help of a group or a command.

    The help of a command is the first paragraph of its docstring. It is parsed from the source,
    because importing all command modules is slow.
    """
    if isinstance(ref, CommandGroup):
        return ref.help
    loader: Any = getattr(find_spec(f"faststream_sqlbroker.cli.{ref.module}"), "loader", None)
    for node in ast.parse(loader.get_source(loader.name) or "").body:
        if isinstance(node, ast.FunctionDef) and node.name == ref.function:
            text = cleandoc(ast.get_docstring(node) or "").partition("\n\n")[0]
            return " ".join(text.split())
    return ""


class LazyCommand(TyperCommand):
    """A command whose module is imported only to run the command."""

    def __init__(self, name: str, ref: CommandRef, *, hidden: bool = False) -> None:
        super().__init__(name, hidden=hidden)
        self.ref = ref

    def load(self) -> Any:
        """Import the module, and return the command with all options.

        The lazy command has no options, so the group calls this before it runs, completes or
        describes the command.
        """
        # Imported late: they import FastStream's errors, which `--help` does not need.
        from faststream_sqlbroker.cli.complete import add_completion  # noqa: PLC0415
        from faststream_sqlbroker.cli.shared_options import flatten_options  # noqa: PLC0415

        # Typer builds commands only of an application, so build one with this command alone.
        name = str(self.name)
        module = import_module(f"faststream_sqlbroker.cli.{self.ref.module}")
        holder = typer.Typer(rich_markup_mode=None)
        holder.command(name)(add_completion(flatten_options(getattr(module, self.ref.function))))
        return get_group(holder).commands[name]


class LazyGroup(TyperGroup):
    """A group that lists and completes commands from a table, and loads a command to run."""

    def __init__(self, table: CommandTable, **options: Any) -> None:
        super().__init__(**options)
        for name, ref in table.items():
            self.add_command(_create_command(name, ref))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, after setting the help of each command.

        Click calls this for `--help`. The help is set only here, because it must be read from the
        commands' source files.
        """
        for command in self.commands.values():
            if isinstance(command, LazyCommand):
                # Click does not shorten an explicit short help.
                command.help = command.short_help = find_help(command.ref)
        return super().list_commands(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `list` before arguments that name no command.

        The command `list` of a group is its default.
        """
        return super().parse_args(ctx, ["list", *args] if self.is_for_list(ctx, args) else args)

    def is_for_list(self, ctx: Any, args: list[str]) -> bool:
        """Return True if `args` belong to the group's default command `list`.

        So `sqlbroker queues orders` shows the queue "orders", as `sqlbroker queues list orders`.
        """
        if "list" not in self.commands or args[:1] == ["--help"]:
            return False
        if not args or args[0].startswith("-"):
            # Without arguments the shell may be completing the name of a command.
            return bool(args) or not ctx.resilient_parsing
        # With a second word the first word was a misspelt command.
        is_alone = len(args) == 1 or args[1].startswith("-")
        return (
            is_alone
            and args[0] not in self.commands
            and bool(_get_arguments(self._load_list_command()))
        )

    def _load_list_command(self) -> Any:
        """Return the default command of this group, with all options."""
        command: Any = self.commands["list"]
        return command.load()

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find and load the command that the arguments name.

        Until then the command has no options: its module is imported only to run it.
        """
        name, command, remaining = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, LazyCommand) else command, remaining

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the group, including the options of `list`.

        These options may be given to the group itself, as `list` is its default command.
        """
        if "list" in self.commands:
            self.params = self._load_list_command().params
            self.subcommand_metavar = "| COMMAND [ARGS]..."
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the names of commands and the arguments of `list`.

        Both may follow the name of the group, as `list` is its default command. An item that is
        found twice is returned once.
        """
        items = super().shell_complete(ctx, incomplete)
        if "list" in self.commands:
            command = self._load_list_command()
            with command.make_context(
                "list", [], parent=ctx, resilient_parsing=True
            ) as list_context:
                for param in [command] if incomplete.startswith("-") else _get_arguments(command):
                    items += param.shell_complete(list_context, incomplete)
        return list({item.value: item for item in items}.values())


def _get_arguments(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "argument"]


def _create_command(name: str, ref: CommandRef | CommandGroup, *, hidden: bool = False) -> Any:
    """Create Click's object for a table entry; a hidden command works but is not listed.

    Without a command `list`, a group called alone shows its help.
    """
    if isinstance(ref, CommandRef):
        return LazyCommand(name, ref, hidden=hidden)
    return LazyGroup(
        {**ref.commands},
        name=name,
        help=ref.help,
        short_help=ref.help,
        no_args_is_help="list" not in ref.commands,
        rich_markup_mode=None,
    )


class AppGroup(LazyGroup):
    """The root group, with all commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(COMMANDS, **options)
        for name, ref in SHORT_COMMANDS.items():
            self.add_command(_create_command(name, ref, hidden=True))


app = typer.Typer(
    cls=AppGroup,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # a local may be the database's URL, with its password
    rich_markup_mode=None,  # its panels cut words in a narrow terminal
    help="Inspect and change the queues, messages and tables of faststream_sqlbroker.",
)


def has_json_option(args: list[str]) -> bool:
    """Return True if `args` have the option `--json`, and not only a value `--json`.

    An unknown command has unknown options, so there any `--json` counts.
    """
    command: Any = get_group(app)
    context = None
    # Nothing runs, and wrong arguments are passed over.
    lenient = {"resilient_parsing": True, "ignore_unknown_options": True}
    while "--json" in args and command is not None:
        context = command.context_class(command, parent=context, **lenient)
        is_group = isinstance(command, LazyGroup)
        words = ["list", *args] if is_group and command.is_for_list(context, args) else [*args]
        options, args, _ = command.make_parser(context).parse_args(words)
        if not is_group:
            return bool(options.get("as_json"))
        if args:
            _, command, args = command.resolve_command(context, args)
    return command is None


@app.callback()
def store_global_options(
    context: typer.Context,
    application: Annotated[
        str | None,
        typer.Option("--app", help="SqlBroker, or application with a broker, as module:name."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="SQLBROKER_URL",
            show_default=False,
            help=(
                "SQLAlchemy URL of the database, with an asynchronous driver; not needed with "
                "--app. Set the variable instead to keep the password out of the process list."
            ),
        ),
    ] = None,
    message_table: Annotated[str, typer.Option(help="Name of the message table.")] = "message",
    archive_table: Annotated[
        str, typer.Option(help="Name of the archive table.")
    ] = "message_archive",
    schema: Annotated[str | None, typer.Option(help="Schema of the tables.")] = None,
) -> None:
    """Inspect and change the queues, messages and tables of faststream_sqlbroker."""
    # Not a Target yet, because its module imports the broker, which not every command needs.
    context.obj = (application, url, message_table, archive_table, schema)
