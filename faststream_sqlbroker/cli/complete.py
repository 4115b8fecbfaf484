"""Shell completion: names of queues, read within a time limit."""

import inspect
import shlex
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from threading import Thread

import typer

from faststream_sqlbroker.core.states import MessageState

QUERY_TIMEOUT = 2.0
"""Seconds to wait for the database; the shell blocks for that time."""


def complete_queue(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a queue; return nothing if the database cannot be read in time.

    The shell waits for the answer while the user types, so the query runs in a thread that is left
    behind after `QUERY_TIMEOUT`.
    """
    names: list[str] = []
    # A daemon thread blocks neither this thread nor the end of the process.
    thread = Thread(target=_read_queue_names, args=(ctx, incomplete, names), daemon=True)
    # The output of the --app application must not reach the shell.
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        thread.start()
        thread.join(QUERY_TIMEOUT)
    # Shells insert a name unquoted, so a name that needs quotes could run a command.
    safe_names = [name for name in names if shlex.quote(name) == name and not name.startswith("-")]
    return [name for name in safe_names if name.startswith(incomplete)]


def _read_queue_names(ctx: typer.Context, incomplete: str, names: list[str]) -> None:
    """Append queue names from the database to `names`; the body of the completion's thread.

    `names` is shared with the waiting thread, which takes what is there when its time is up. All
    errors are suppressed, because the shell would show them in the middle of a command line.
    """
    with suppress(Exception):
        # Imported late, because it imports the broker.
        from faststream_sqlbroker.cli.target import get_target, run  # noqa: PLC0415

        options = ("application", "url", "message_table", "archive_table", "schema")
        # The callback that does this is not called during completion.
        ctx.obj = [ctx.find_root().params[name] for name in options]
        # The query returns names after the first half of the text, that is after `incomplete`.
        cursor = incomplete * 2
        url = get_target(ctx).load_broker().engine.url
        # SQLite would create an empty file if there is none.
        if url.get_backend_name() != "sqlite" or Path(url.database or "").exists():
            names += run(ctx, lambda broker: broker._store.overviews.find_names(cursor))  # noqa: SLF001 - the same package


def complete_state() -> list[str]:
    """Complete the state of a message."""
    return list(MessageState.__members__)


COMPLETERS = {"queue": complete_queue, "to": complete_queue, "state": complete_state}
"""Completion functions by the name of an argument or option, for all commands."""


def add_completion(command: Callable[..., None]) -> Callable[..., None]:
    """Add completion to the arguments and options of `command` that are in `COMPLETERS`.

    By name, so that no command needs to declare it. The shell then suggests queues and states.
    """
    for parameter in inspect.signature(command).parameters.values():
        # Only arguments and options have metadata.
        for info in getattr(parameter.annotation, "__metadata__", ()):
            info.autocompletion = COMPLETERS.get(parameter.name)
    return command
