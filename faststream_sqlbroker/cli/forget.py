"""Commands for locks, schedules and unknown outcomes; those that take something away ask first."""

from typing import Annotated

import typer

from faststream_sqlbroker.admin import Admin
from faststream_sqlbroker.cli.options import Act, Change
from faststream_sqlbroker.cli.target import run, run_confirmed
from faststream_sqlbroker.core.overview import nearest_name
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError

MOST_LOOKED_AT = 100_000
"""Schedules, locks or messages among which one is looked for."""
ScheduleName = Annotated[str, typer.Argument(help="The schedule's name, as schedules lists it.")]


def release_lock(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="The lock's key, as locks lists it.")],
    how: Change,
) -> None:
    """Take a lock from its holder, which learns of it at its next renewal and is not stopped."""
    # It cannot be taken back: the holder works on for up to a third of its lease, next to another.

    async def is_held(admin: Admin) -> bool:
        return key in [lock.key for lock in await admin.locks(limit=MOST_LOOKED_AT)]

    question = f"take the lock {key} from its holder"
    had = run_confirmed(context, how, question, lambda a: a.release_lock(key, by=how.by), is_held)
    text = f"{key} is released" if had else f"{key} had no holder"
    how.tell({"key": key, "had_holder": had}, text)


def forget_schedule(context: typer.Context, name: ScheduleName, how: Change) -> None:
    """Remove a schedule that no process declares any more, with the fire times that are due."""
    # Fire times that are due go with it, and no later command brings them back.
    if not how.yes:
        _refuse_unknown(context, name)
    question = f"forget the schedule {name}"
    was = run_confirmed(context, how, question, lambda a: a.forget_schedule(name, by=how.by))
    text = f"{name} is forgotten" if was else f"there is no schedule {name}"
    how.tell({"name": name, "was_known": was}, text)


def run_schedule(context: typer.Context, name: ScheduleName, how: Act) -> None:
    """Publish a schedule's message once more, now, by a process that declares the schedule."""
    is_known = run(context, lambda broker: broker.admin.run_schedule(name, by=how.by))
    text = f"{name} is asked to run" if is_known else f"there is no schedule {name}"
    how.tell({"name": name, "is_known": is_known}, text)
    if not is_known:
        raise typer.Exit(1)


def pause_schedule(context: typer.Context, name: ScheduleName, how: Change) -> None:
    """Publish nothing of a schedule, in all processes, until it is resumed."""
    # Fire times during the pause are left out, and no later command brings them back.
    _refuse_unknown(context, name)
    question = f"pause the schedule {name}"
    paused = run_confirmed(context, how, question, lambda a: a.pause_schedule(name, by=how.by))
    text = f"{name} {'is' if paused else 'was'} paused until it is resumed"
    how.tell({"name": name, "paused": paused}, text)


def resume_schedule(context: typer.Context, name: ScheduleName, how: Act) -> None:
    """End the pause of a schedule, which leaves out the fire times until now."""
    was = run(context, lambda broker: broker.admin.resume_schedule(name, by=how.by))
    if not was:
        _refuse_unknown(context, name)
    text = f"{name} is resumed" if was else f"{name} was not paused"
    how.tell({"name": name, "was_paused": was}, text)


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
    how: Change,
) -> None:
    """Take messages off the list of unknown outcomes, once their outcome was found out."""

    async def listed(admin: Admin) -> int:
        outcomes = await admin.unknown(limit=MOST_LOOKED_AT)
        return sum(each.message_id in message_ids for each in outcomes)

    question = f"take {len(message_ids)} messages off the list"
    count = run_confirmed(
        context, how, question, lambda a: a.forget_unknown(*message_ids, by=how.by), listed
    )
    hint = "" if count == len(message_ids) else "; `sqlbroker unknown` shows what is on it"
    how.tell({"forgotten": count}, f"{count} messages are off the list{hint}")
