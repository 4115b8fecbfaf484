"""Commands for locks, schedules and unknown outcomes; those that take something away ask first."""

from typing import Annotated

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli.options import By
from faststream_sqlbroker.cli.output import AsJson, Yes, ask, print_json, print_line
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.overview import nearest_name
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError

MOST_LOOKED_AT = 100_000
"""Schedules among which a name is looked for."""
ScheduleName = Annotated[str, typer.Argument(help="The schedule's name, as schedules lists it.")]


def release_lock(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="The lock's key, as locks lists it.")],
    by: By = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Take a lock from its holder, which learns of it at its next renewal and is not stopped."""
    # It cannot be taken back: the holder works on for up to a third of its lease, next to another.
    if not yes:
        ask(f"take the lock {key} from its holder", as_json=as_json)
    had = run(context, lambda broker: broker.admin.release_lock(key, by=by))
    if as_json:
        print_json({"key": key, "had_holder": had})
    else:
        print_line(f"{key} is released" if had else f"{key} had no holder")


def forget_schedule(
    context: typer.Context,
    name: ScheduleName,
    by: By = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove a schedule that no process declares any more, with the fire times that are due."""
    # Fire times that are due go with it, and no later command brings them back.
    if not yes:
        ask(f"forget the schedule {name}", as_json=as_json)
    was = run(context, lambda broker: broker.admin.forget_schedule(name, by=by))
    if as_json:
        print_json({"name": name, "was_known": was})
    else:
        print_line(f"{name} is forgotten" if was else f"there is no schedule {name}")


def run_schedule(
    context: typer.Context, name: ScheduleName, by: By = None, as_json: AsJson = False
) -> None:
    """Publish a schedule's message once more, now, by a process that declares the schedule."""
    known = run(context, lambda broker: broker.admin.run_schedule(name, by=by))
    if as_json:
        print_json({"name": name, "is_known": known})
    else:
        print_line(f"{name} is asked to run" if known else f"there is no schedule {name}")
    if not known:
        raise typer.Exit(1)


def pause_schedule(
    context: typer.Context,
    name: ScheduleName,
    by: By = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Publish nothing of a schedule, in all processes, until it is resumed."""
    # Fire times during the pause are left out, and no later command brings them back.
    if not yes:
        ask(f"pause the schedule {name}", as_json=as_json)
    paused = run(context, lambda broker: broker.admin.pause_schedule(name, by=by))
    if not paused:
        _refuse_unknown(context, name)
    if as_json:
        print_json({"name": name, "paused": paused})
    else:
        print_line(f"{name} {'is' if paused else 'was'} paused until it is resumed")


def resume_schedule(
    context: typer.Context, name: ScheduleName, by: By = None, as_json: AsJson = False
) -> None:
    """End the pause of a schedule, which leaves out the fire times until now."""
    was = run(context, lambda broker: broker.admin.resume_schedule(name, by=by))
    if not was:
        _refuse_unknown(context, name)
    if as_json:
        print_json({"name": name, "was_paused": was})
    else:
        print_line(f"{name} is resumed" if was else f"{name} was not paused")


def _refuse_unknown(context: typer.Context, name: str) -> None:
    """A name that is misspelt must not look like a schedule that is paused, or is not.

    Raises:
        SetupError: there is no schedule of this name; the nearest one is named.
    """
    found = run(context, lambda broker: broker.admin.schedules(limit=MOST_LOOKED_AT))
    names = [each.name for each in found]
    if name not in names:
        near = nearest_name(name, names)
        hint = "`sqlbroker schedules` lists them" if near is None else f"is {near!r} meant?"
        raise SetupError(f"there is no schedule {short(name)}: {hint}")


def forget_unknown(
    context: typer.Context,
    message_ids: Annotated[list[int], typer.Argument(help="Ids, as unknown lists them.")],
    by: By = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Take messages off the list of unknown outcomes, once their outcome was found out."""
    if not yes:
        ask(f"take {len(message_ids)} messages off the list", as_json=as_json)

    async def work(broker: SqlBroker) -> int:
        return await broker.admin.forget_unknown(*message_ids, by=by)

    count = run(context, work)
    if as_json:
        print_json({"forgotten": count})
    else:
        print_line(f"{count} messages are off the list")
