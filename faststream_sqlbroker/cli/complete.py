"""What the shell completes: names that the database has, within a limit of time, or nothing."""

import shlex
from collections.abc import Awaitable, Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from threading import Thread
from typing import TYPE_CHECKING, Any

import typer

from faststream_sqlbroker.core.states import MessageState

if TYPE_CHECKING:
    from faststream_sqlbroker.admin import Admin

    Read = Callable[[Admin, str], Awaitable[Iterable[str]]]

LONGEST_LOOK = 2.0
"""Seconds; the shell waits, and its user with it."""
MOST_NAMES = 1_000
"""Names of a kind that are read."""
Complete = Callable[..., list[str]]


def _names(read: "Read") -> Complete:
    """Complete the names that `read` returns; none, if they cannot be read in time."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        names: list[str] = []
        # A daemon: it neither holds this thread nor the end of the process.
        options = ctx.find_root().params
        look = Thread(target=_look, args=(options, read, incomplete, names), daemon=True)
        # What the application of --app prints is not for the shell.
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            look.start()
            look.join(LONGEST_LOOK)
        # Shells put a name into the line as it is: one that must be quoted could be a command.
        return sorted({name for name in names if name.startswith(incomplete) and _is_plain(name)})

    return complete


def _look(options: dict[str, Any], read: "Read", incomplete: str, names: list[str]) -> None:
    with suppress(Exception):
        # Not before: it imports the broker.
        from faststream_sqlbroker.cli.target import Target, run_on  # noqa: PLC0415

        tables = (options[name] for name in ("message_table", "archive_table", "schema"))
        target = Target(options["application"], options["url"], *tables)
        names += run_on(target, lambda broker: read(broker.admin, incomplete))


def _is_plain(name: str) -> bool:
    return shlex.quote(name) == name and not name.startswith("-")


async def _queues(admin: "Admin", incomplete: str) -> Iterable[str]:
    # It reads behind the first half of what it is given; nothing is counted, as `queues` does.
    return await admin._store.overviews.names(incomplete * 2)  # noqa: SLF001 - the same package


async def _workers(admin: "Admin", _incomplete: str) -> Iterable[str]:
    return [name for each in await admin.subscribers() for name in (each.worker, each.process)]


async def _schedules(admin: "Admin", _incomplete: str) -> Iterable[str]:
    return [each.name for each in await admin.schedules(limit=MOST_NAMES)]


async def _locks(admin: "Admin", _incomplete: str) -> Iterable[str]:
    return [each.key for each in await admin.locks(limit=MOST_NAMES)]


async def _jobs(admin: "Admin", _incomplete: str) -> Iterable[str]:
    return [each.id for each in await admin.audit(bulk=True)]


def _states(_ctx: typer.Context) -> list[str]:
    return list(MessageState.__members__)


complete_schedule = _names(_schedules)
complete_lock = _names(_locks)
BY_NAME: dict[str, Complete] = {
    "queue": _names(_queues),
    "to": _names(_queues),
    "worker": _names(_workers),
    "job_id": _names(_jobs),
    "state": _states,
}
"""Arguments and options of any command that have such a name."""
