"""What the shell completes: names of queues, read within a limit of time, or none."""

import inspect
import shlex
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from threading import Thread

import typer

from faststream_sqlbroker.core.states import MessageState

LONGEST_LOOK = 2.0
"""Seconds; the shell waits, and its user with it."""


def complete_queue(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a queue; nothing, if the database cannot be read in time."""
    names: list[str] = []
    # A daemon: it neither holds this thread nor the end of the process.
    look = Thread(target=_look, args=(ctx, incomplete, names), daemon=True)
    # What the application of --app prints is not for the shell.
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        look.start()
        look.join(LONGEST_LOOK)
    # Shells put a name into the line as it is: one that must be quoted could be a command.
    plain = [name for name in names if shlex.quote(name) == name and not name.startswith("-")]
    return [name for name in plain if name.startswith(incomplete)]


def _look(ctx: typer.Context, incomplete: str, names: list[str]) -> None:
    with suppress(Exception):
        # Not before: it imports the broker.
        from faststream_sqlbroker.cli.target import run, target_of  # noqa: PLC0415

        options = ("application", "url", "message_table", "archive_table", "schema")
        # The function of these options, which does this, is not called while the shell completes.
        ctx.obj = [ctx.find_root().params[name] for name in options]
        # Names behind the first half of a text are read, so this begins at `incomplete`.
        like = incomplete * 2
        url = target_of(ctx).broker().engine.url
        # SQLite would make an empty file where there is none.
        if url.get_backend_name() != "sqlite" or Path(url.database or "").exists():
            names += run(ctx, lambda broker: broker._store.overviews.names(like))  # noqa: SLF001 - the same package


def complete_state() -> list[str]:
    """Complete the state of a message."""
    return list(MessageState.__members__)


BY_NAME = {"queue": complete_queue, "to": complete_queue, "state": complete_state}
"""Arguments and options of any command that have such a name."""


def completed(command: Callable[..., None]) -> Callable[..., None]:
    """The command with completion of what is in `BY_NAME`."""
    for parameter in inspect.signature(command).parameters.values():
        # Only arguments and options are annotated.
        for info in getattr(parameter.annotation, "__metadata__", ()):
            info.autocompletion = BY_NAME.get(parameter.name)
    return command
