"""Options that several commands share; a command takes a group of options as one argument."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from faststream_sqlbroker.cli.output import AsJson, Yes, confirm_or_abort, print_result
from faststream_sqlbroker.exceptions import SetupError

_URL: Any = typer.Option(
    envvar="SQLBROKER_URL",
    show_default=False,
    help=(
        "SQLAlchemy URL of the database. Set the variable instead to keep the password out of the "
        "process list."
    ),
)
Url = Annotated[str, _URL]
UrlIfNeeded = Annotated[str | None, _URL]
Master = Annotated[
    str | None,
    typer.Option(help="Spark master. Default: spark.master of your Spark settings, else local[*]."),
]
Jars = Annotated[
    list[Path] | None,
    typer.Option("--jar", help="JAR of a JDBC driver, preferred to JARs found automatically."),
]
Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", help="Only this queue; repeat the option for several."),
]
Since = Annotated[
    str | None, typer.Option(help="Only rows archived at or after this time, such as 2026-03-01.")
]
Until = Annotated[
    str | None,
    typer.Option(help="Only rows archived before this time, such as 2026-03-01T12:00+00:00."),
]
ArchiveTable = Annotated[str, typer.Option(help="Name of the archive table.")]
Source = Annotated[
    str | None,
    typer.Option(help="Name of the database in the export, if the database has several addresses."),
]
Schema = Annotated[
    str | None, typer.Option(help="Schema of the table; on MySQL and MariaDB, the database.")
]
SafetyLag = Annotated[
    str,
    typer.Option(
        help="Assumed longest transaction, if the database does not show open transactions."
    ),
]
Primary = Annotated[
    str | None,
    typer.Option(
        envvar="SQLBROKER_PRIMARY_URL",
        show_default=False,
        help="URL of the primary, if --url is a standby.",
    ),
]


MessageIds = Annotated[
    list[str] | None,
    typer.Argument(help="Message ids; default: all messages that match the options."),
]
By = Annotated[str | None, typer.Option(help="Your name in the audit; default: user and host.")]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Do not wait: processes with subscribers run the job.")
]
To = Annotated[str | None, typer.Option(help="Target queue; default: each message's own queue.")]


@dataclass(frozen=True, slots=True)
class MessageFilterOptions:
    """Options that select messages; a message must match all options."""

    queue: Annotated[str | None, typer.Option(help="Only messages of this queue.")] = None
    key: Annotated[str | None, typer.Option(help="Only messages with this key.")] = None
    error: Annotated[
        str | None, typer.Option(help="Only messages whose last error contains this text.")
    ] = None
    since: Annotated[str | None, typer.Option(help='Maximum age, such as "1h".')] = None
    until: Annotated[str | None, typer.Option(help='Minimum age, such as "5m".')] = None

    @property
    def filters(self) -> dict[str, Any]:
        """The options that were set, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ArchivedMessageFilter(MessageFilterOptions):
    """Options that select archived messages."""

    reason: Annotated[str | None, typer.Option(help="Only messages with exactly this reason.")] = (
        None
    )
    fingerprint: Annotated[str | None, typer.Option(help="Only this fingerprint, see dead.")] = None


@dataclass(frozen=True, slots=True)
class ActionOptions:
    """Options of a command that changes something."""

    by: By = None
    as_json: AsJson = False

    def print_result(self, value: Any, *lines: str) -> None:
        """Print `value` as JSON with `--json`, or else `lines`."""
        print_result(value, *lines, as_json=self.as_json)


@dataclass(frozen=True, slots=True)
class ChangeOptions(ActionOptions):
    """Options of a command that asks for confirmation."""

    yes: Yes = False

    def confirm(self, text: str) -> None:
        """Show `text` and continue only after a yes, unless `--yes` was given.

        Raises:
            SetupError: `--json` was given, so a question would corrupt the output.
        """
        if not self.yes:
            confirm_or_abort(text, as_json=self.as_json)


@dataclass(frozen=True, slots=True)
class BulkCommandOptions(ChangeOptions):
    """Options of a command that changes many messages."""

    rate: Annotated[
        float | None, typer.Option(help="Maximum messages per second; default: no limit.")
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum messages, oldest first; default: all.")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count; change nothing.")] = False
    no_wait: NoWait = False

    @property
    def has_job_options(self) -> bool:
        """True if an option is set that only applies to a job."""
        return self.no_wait or (self.rate, self.limit) != (None, None)

    def to_arguments(
        self, message_filter: MessageFilterOptions, message_ids: MessageIds = None
    ) -> dict[str, Any]:
        """Return the arguments of `broker.admin` for matching messages, or for `message_ids`.

        `dry_run` is left out: a command always counts first, and then runs what it has shown.
        """
        limits = {"rate": self.rate, "limit": self.limit, "by": self.by}
        return {"ids": message_ids or None, **limits, **message_filter.filters}


@dataclass(frozen=True, slots=True)
class Targets:
    """Options that select messages by id, or all waiting messages."""

    message_ids: MessageIds = None
    every: Annotated[bool, typer.Option("--all", help="Select all waiting messages.")] = False


def is_for_all(
    targets: Targets, message_filter: MessageFilterOptions, options: BulkCommandOptions
) -> bool:
    """Return True if a command is for all matching messages, and False for message ids.

    Raises:
        SetupError: the options select neither, or both.
    """
    if targets.message_ids and (message_filter.filters or targets.every):
        raise SetupError("give message ids or filter options, not both")
    if targets.message_ids and options.has_job_options:
        raise SetupError(
            "--rate, --limit and --no-wait need filter options: they do not apply to message ids"
        )
    if not targets.message_ids and not message_filter.filters and not targets.every:
        raise SetupError(
            "no messages selected: give message ids, or --queue, --key, --error, --since or "
            "--until, or --all for all waiting messages"
        )
    return not targets.message_ids


def flatten_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with the fields of option groups as separate options.

    Commands take a dataclass for options that several share; Typer only knows single options. The
    returned function takes these, and calls `command` with the dataclasses made of them.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = groups.get(parameter.name)
        if kind is None:
            parameters.append(
                parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY)
            )
            continue
        types = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=types[field.name],
            )
            for field in fields(kind)
        ]

    @wraps(command)
    def run(**arguments: Any) -> None:
        for name, kind in groups.items():
            values = {field.name: arguments.pop(field.name) for field in fields(kind)}
            arguments[name] = kind(**values)
        command(**arguments)

    # Typer reads both attributes.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
