"""Options that several commands take, declared once; a command takes a group of them as one
argument.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from faststream_sqlbroker.cli.output import AsJson, Yes, ask, tell
from faststream_sqlbroker.exceptions import SetupError

_URL: Any = typer.Option(
    envvar="SQLBROKER_URL",
    show_default=False,
    help=(
        "SQLAlchemy URL of the database. Give it by the variable to keep its password out of the "
        "list of processes."
    ),
)
Url = Annotated[str, _URL]
UrlIfNeeded = Annotated[str | None, _URL]
Master = Annotated[
    str | None,
    typer.Option(help="Spark's master. Default: spark.master as set elsewhere, else local[*]."),
]
Jars = Annotated[
    list[Path] | None,
    typer.Option("--jar", help="A JDBC driver's jar, preferred to those that are found."),
]
Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", help="Only this queue; repeat the option for several."),
]
Since = Annotated[
    str | None, typer.Option(help="Only rows archived at or after this moment, like 2026-03-01.")
]
Until = Annotated[
    str | None,
    typer.Option(help="Only rows archived before this moment, like 2026-03-01T12:00+00:00."),
]
ArchiveTable = Annotated[str, typer.Option(help="Name of the archive table.")]
Source = Annotated[
    str | None,
    typer.Option(help="Name of the database in the export, if it has several addresses."),
]
Schema = Annotated[
    str | None, typer.Option(help="Schema of the table; on MySQL and MariaDB its database.")
]
SafetyLag = Annotated[
    str,
    typer.Option(help="How long a transaction may last if the database does not show open ones."),
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
    list[str] | None, typer.Argument(help="Ids of messages; else all that match the options.")
]
By = Annotated[str | None, typer.Option(help="Who does it; default user and host.")]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Leave the work to the processes with subscribers.")
]
To = Annotated[str | None, typer.Option(help="Another queue for all of them.")]


@dataclass(frozen=True, slots=True)
class Which:
    """Which messages; all that is given must match."""

    queue: Annotated[str | None, typer.Option(help="Messages of this queue.")] = None
    key: Annotated[str | None, typer.Option(help="Messages of this key.")] = None
    error: Annotated[str | None, typer.Option(help="A part of the last error.")] = None
    since: Annotated[str | None, typer.Option(help='How long ago at most, like "1h".')] = None
    until: Annotated[str | None, typer.Option(help='How long ago at least, like "5m".')] = None

    @property
    def filters(self) -> dict[str, Any]:
        """What was given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class WhichEnded(Which):
    """Which archived messages."""

    reason: Annotated[str | None, typer.Option(help="Why they ended; all of it.")] = None
    fingerprint: Annotated[str | None, typer.Option(help="Of their error, as dead shows it.")] = (
        None
    )


@dataclass(frozen=True, slots=True)
class Act:
    """Options of a command that changes something."""

    by: By = None
    as_json: AsJson = False

    def tell(self, value: Any, *lines: str) -> None:
        """Print JSON for programs, or lines for people."""
        tell(value, *lines, as_json=self.as_json)


@dataclass(frozen=True, slots=True)
class Change(Act):
    """Options of a command that asks before it changes something."""

    yes: Yes = False

    def confirm(self, text: str) -> None:
        """Show the text and go on only if the answer is yes, unless `--yes` was given.

        Raises:
            SetupError: with JSON the answer would be in the output.
        """
        if not self.yes:
            ask(text, as_json=self.as_json)


@dataclass(frozen=True, slots=True)
class BulkRun(Change):
    """How a command over many messages is run."""

    rate: Annotated[
        float | None, typer.Option(help="Most messages a second; default: no limit.")
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most messages, the oldest first; default: all.")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count only, and change nothing.")] = (
        False
    )
    no_wait: NoWait = False

    @property
    def is_of_job(self) -> bool:
        """Whether an option is given that only a job has."""
        return self.no_wait or (self.rate, self.limit) != (None, None)

    def options(self, which: Which, message_ids: MessageIds = None) -> dict[str, Any]:
        """Return the arguments of `broker.admin` for `which` messages, or those with the ids."""
        how = {"rate": self.rate, "limit": self.limit, "by": self.by}
        return {"ids": message_ids or None, **how, **which.filters}


@dataclass(frozen=True, slots=True)
class Targets:
    """Messages with ids, or all that wait."""

    message_ids: MessageIds = None
    every: Annotated[bool, typer.Option("--all", help="All messages that wait.")] = False


def means_all(targets: Targets, which: Which, run: BulkRun) -> bool:
    """Whether a command is for all messages that match, not for those with ids.

    Raises:
        SetupError: it is for neither, or for both.
    """
    if targets.message_ids and (which.filters or targets.every):
        raise SetupError("give ids of messages, or options that say which, not both")
    if targets.message_ids and run.is_of_job:
        raise SetupError(
            "--rate, --limit and --no-wait are for all messages that match, not for ids"
        )
    if not targets.message_ids and not which.filters and not targets.every:
        raise SetupError(
            "which messages? give their ids, or --queue, --key, --error, --since or --until; "
            "--all means all messages that wait"
        )
    return not targets.message_ids


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of each argument that is a group as options of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    shown: list[inspect.Parameter] = []
    for each in inspect.signature(command).parameters.values():
        kind = groups.get(each.name)
        if kind is None:
            shown.append(each.replace(annotation=hints[each.name], kind=each.KEYWORD_ONLY))
            continue
        types = get_type_hints(kind, include_extras=True)
        shown += [
            inspect.Parameter(
                field.name, each.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
            )
            for field in fields(kind)
        ]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            own = {field.name: given.pop(field.name) for field in fields(kind)}
            given[name] = kind(**own)
        command(**given)

    # Typer reads both.
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in shown}
    return run
