"""Commands for locks, schedules and unknown outcomes; commands that remove something ask first."""

from typing import Annotated

import typer

from faststream_sqlbroker.admin import Admin
from faststream_sqlbroker.cli.shared_options import ActionOptions, ChangeOptions
from faststream_sqlbroker.cli.target import run, run_confirmed
from faststream_sqlbroker.core.overview import find_similar_name
from faststream_sqlbroker.core.text import format_value, pluralize
from faststream_sqlbroker.exceptions import SetupError

MAX_LISTED = 100_000
"""Maximum schedules, locks or messages to search for a name or id."""
ScheduleName = Annotated[str, typer.Argument(help="Schedule's name, as listed by schedules.")]


def release_lock(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="Lock's key, as listed by locks.")],
    options: ChangeOptions,
) -> None:
    """Release a lock by force; its holder continues, and learns of it at its next renewal."""
    # Not revertible: the old holder may run next to a new one for up to a third of its lease.

    async def is_held(admin: Admin) -> bool:
        """Return True if there is a lock to release, so that the question makes sense."""
        return key in [lock.key for lock in await admin.locks(limit=MAX_LISTED)]

    question = f"release the lock {key} by force"
    had_holder = run_confirmed(
        context, options, question, lambda a: a.release_lock(key, by=options.by), is_held
    )
    text = f"{key} is released" if had_holder else f"{key} had no holder"
    options.print_result({"key": key, "had_holder": had_holder}, text)


def forget_schedule(context: typer.Context, name: ScheduleName, options: ChangeOptions) -> None:
    """Remove a schedule that no process declares any more, including its due fire times."""
    # Due fire times are removed as well, and no later command restores them.
    if not options.yes:
        _check_schedule_exists(context, name)
    question = f"forget the schedule {name}"
    was_known = run_confirmed(
        context, options, question, lambda a: a.forget_schedule(name, by=options.by)
    )
    text = f"{name} is forgotten" if was_known else f"schedule {name} does not exist"
    options.print_result({"name": name, "was_known": was_known}, text)


def run_schedule(context: typer.Context, name: ScheduleName, options: ActionOptions) -> None:
    """Request an extra run of a schedule now, from a process that declares the schedule."""
    is_known = run(context, lambda broker: broker.admin.run_schedule(name, by=options.by))
    text = f"requested a run of {name}" if is_known else f"schedule {name} does not exist"
    options.print_result({"name": name, "is_known": is_known}, text)
    if not is_known:
        raise typer.Exit(1)


def pause_schedule(context: typer.Context, name: ScheduleName, options: ChangeOptions) -> None:
    """Stop publishing the messages of a schedule, in all processes, until it is resumed."""
    # Fire times during the pause are skipped, and no later command restores them.
    _check_schedule_exists(context, name)
    question = f"pause the schedule {name}"
    was_changed = run_confirmed(
        context, options, question, lambda a: a.pause_schedule(name, by=options.by)
    )
    text = f"{name} is {'' if was_changed else 'already '}paused until it is resumed"
    options.print_result({"name": name, "paused": was_changed}, text)


def resume_schedule(context: typer.Context, name: ScheduleName, options: ActionOptions) -> None:
    """End the pause of a schedule; fire times during the pause are skipped."""
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
        hint = "see `sqlbroker schedules`" if nearest is None else f"did you mean {nearest!r}?"
        raise SetupError(f"schedule {format_value(name)} does not exist: {hint}")


def forget_unknown(
    context: typer.Context,
    message_ids: Annotated[list[int], typer.Argument(help="Message ids, as listed by unknown.")],
    options: ChangeOptions,
) -> None:
    """Remove messages from the list of unknown outcomes, once you know the outcome."""

    async def count_listed(admin: Admin) -> int:
        """Count the given messages that are on the list; without any, nothing is asked."""
        outcomes = await admin.unknown(limit=MAX_LISTED)
        return sum(outcome.message_id in message_ids for outcome in outcomes)

    question = f"remove {pluralize(len(message_ids), 'messages')} from the list"
    count = run_confirmed(
        context,
        options,
        question,
        lambda a: a.forget_unknown(*message_ids, by=options.by),
        count_listed,
    )
    hint = "" if count == len(message_ids) else "; `sqlbroker unknown` shows the list"
    text = f"removed {pluralize(count, 'messages')} from the list{hint}"
    options.print_result({"forgotten": count}, text)
