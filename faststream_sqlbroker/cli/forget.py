"""Commands for locks, schedules and unknown outcomes; commands that remove something ask first."""

from typing import Annotated

import typer

from faststream_sqlbroker.admin import Admin
from faststream_sqlbroker.cli.shared_options import ActionOptions, ChangeOptions
from faststream_sqlbroker.cli.target import run, run_confirmed
from faststream_sqlbroker.core.overview import find_similar_name
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import SetupError

MAX_LISTED = 100_000
"""Maximum schedules, locks or messages to search for a name or id."""
ScheduleName = Annotated[str, typer.Argument(help="The schedule's name, as schedules lists it.")]


def release_lock(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="The lock's key, as locks lists it.")],
    options: ChangeOptions,
) -> None:
    """Take a lock from its holder, which learns of it at its next renewal and is not stopped."""
    # Not revertible: the old holder may run next to a new one for up to a third of its lease.

    async def is_held(admin: Admin) -> bool:
        return key in [lock.key for lock in await admin.locks(limit=MAX_LISTED)]

    question = f"take the lock {key} from its holder"
    had_holder = run_confirmed(
        context, options, question, lambda a: a.release_lock(key, by=options.by), is_held
    )
    text = f"{key} is released" if had_holder else f"{key} had no holder"
    options.print_result({"key": key, "had_holder": had_holder}, text)


def forget_schedule(context: typer.Context, name: ScheduleName, options: ChangeOptions) -> None:
    """Remove a schedule that no process declares any more, with the fire times that are due."""
    # Due fire times are removed as well, and no later command restores them.
    if not options.yes:
        _check_schedule_exists(context, name)
    question = f"forget the schedule {name}"
    was_known = run_confirmed(
        context, options, question, lambda a: a.forget_schedule(name, by=options.by)
    )
    text = f"{name} is forgotten" if was_known else f"there is no schedule {name}"
    options.print_result({"name": name, "was_known": was_known}, text)


def run_schedule(context: typer.Context, name: ScheduleName, options: ActionOptions) -> None:
    """Publish a schedule's message once more, now, by a process that declares the schedule."""
    is_known = run(context, lambda broker: broker.admin.run_schedule(name, by=options.by))
    text = f"{name} is asked to run" if is_known else f"there is no schedule {name}"
    options.print_result({"name": name, "is_known": is_known}, text)
    if not is_known:
        raise typer.Exit(1)


def pause_schedule(context: typer.Context, name: ScheduleName, options: ChangeOptions) -> None:
    """Publish nothing of a schedule, in all processes, until it is resumed."""
    # Fire times during the pause are skipped, and no later command restores them.
    _check_schedule_exists(context, name)
    question = f"pause the schedule {name}"
    was_changed = run_confirmed(
        context, options, question, lambda a: a.pause_schedule(name, by=options.by)
    )
    text = f"{name} {'is' if was_changed else 'was'} paused until it is resumed"
    options.print_result({"name": name, "paused": was_changed}, text)


def resume_schedule(context: typer.Context, name: ScheduleName, options: ActionOptions) -> None:
    """End the pause of a schedule, which leaves out the fire times until now."""
    was_paused = run(context, lambda broker: broker.admin.resume_schedule(name, by=options.by))
    if not was_paused:
        _check_schedule_exists(context, name)
    text = f"{name} is resumed" if was_paused else f"{name} was not paused"
    options.print_result({"name": name, "was_paused": was_paused}, text)


def _check_schedule_exists(context: typer.Context, name: str) -> None:
    """Refuse a misspelt name, instead of reporting that the schedule is or was paused.

    Raises:
        SetupError: there is no schedule of this name; the message suggests the nearest name.
    """
    schedules = run(context, lambda broker: broker.admin.schedules(limit=MAX_LISTED))
    names = [schedule.name for schedule in schedules]
    if name not in names:
        nearest = find_similar_name(name, names)
        hint = "`sqlbroker schedules` lists them" if nearest is None else f"is {nearest!r} meant?"
        raise SetupError(f"there is no schedule {format_value(name)}: {hint}")


def forget_unknown(
    context: typer.Context,
    message_ids: Annotated[list[int], typer.Argument(help="Ids, as unknown lists them.")],
    options: ChangeOptions,
) -> None:
    """Take messages off the list of unknown outcomes, once their outcome was found out."""

    async def count_listed(admin: Admin) -> int:
        outcomes = await admin.unknown(limit=MAX_LISTED)
        return sum(outcome.message_id in message_ids for outcome in outcomes)

    question = f"take {len(message_ids)} messages off the list"
    count = run_confirmed(
        context,
        options,
        question,
        lambda a: a.forget_unknown(*message_ids, by=options.by),
        count_listed,
    )
    hint = "" if count == len(message_ids) else "; `sqlbroker unknown` shows what is on it"
    options.print_result({"forgotten": count}, f"{count} messages are off the list{hint}")
