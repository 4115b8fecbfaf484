"""What operators do on the pages; each goes to the audit under the user's name."""

from typing import Any

from faststream_sqlbroker.core.repairs import Repair
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.dashboard.asked import Asked, Done, decimal, moment_or_age, whole
from faststream_sqlbroker.http.dashboard.rendering import query_text


async def pause(asked: Asked) -> Done:
    """Stop all claims from a queue."""
    queue = asked.needed("queue")
    until = moment_or_age(asked.sent("until"))
    reason = asked.sent("reason")
    await asked.admin.pause(queue, reason=reason, until=until, by=asked.user.name)
    return _queue(queue, "paused")


async def resume(asked: Asked) -> Done:
    """Let processes claim again."""
    queue = asked.needed("queue")
    was = await asked.admin.resume(queue, by=asked.user.name)
    return _queue(queue, "resumed" if was else "not_paused")


def _queue(name: str, note: str) -> Done:
    return Done(f"/ui/queue?{query_text({'name': name})}", note)


async def cancel(asked: Asked) -> Done:
    """End a message."""
    reason = asked.sent("reason")
    return _message(await asked.admin.cancel(asked.message, reason=reason, by=asked.user.name))


async def retry(asked: Asked) -> Done:
    """Make a message due now."""
    return _message(await asked.admin.retry_now(asked.message, by=asked.user.name))


async def move(asked: Asked) -> Done:
    """Move a message to another queue."""
    to = asked.needed("to")
    return _message(await asked.admin.move(asked.message, to, by=asked.user.name))


async def edit(asked: Asked) -> Done:
    """Change priority, key or due time; what is left empty stays."""
    fields: dict[str, Any] = {}
    priority = whole(asked.sent("priority"), "priority")
    if priority is not None:
        fields["priority"] = priority
    if asked.sent("no_key") is not None:
        fields["key"] = None
    elif (key := asked.sent("key")) is not None:
        fields["key"] = key
    if (due := moment_or_age(asked.sent("due"))) is not None:
        fields["due"] = due
    return _message(await asked.admin.edit(asked.message, **fields, by=asked.user.name))


def _message(found: Repair) -> Done:
    return Done(f"/ui/messages/{found.message_id}", found.verdict)


async def release(asked: Asked) -> Done:
    """Make due what a dead worker has leased."""
    worker = asked.needed("worker")
    force = asked.sent("force") is not None
    count = await asked.admin.release(worker, force=force, by=asked.user.name)
    return Done("/ui/workers", "released" if count else "nothing_released")


async def drain(asked: Asked) -> Done:
    """Let a worker claim nothing more."""
    changed = await asked.admin.drain(asked.needed("worker"), by=asked.user.name)
    return Done("/ui/workers", "drained" if changed else "drain_unchanged")


async def undrain(asked: Asked) -> Done:
    """Let a worker claim again."""
    changed = await asked.admin.undrain(asked.needed("worker"), by=asked.user.name)
    return Done("/ui/workers", "undrained" if changed else "drain_unchanged")


async def release_lock(asked: Asked) -> Done:
    """Take a lock from its holder."""
    # A key is an argument like any other, so `admin` raises ValueError: here it is the user's.
    try:
        had = await asked.admin.release_lock(asked.needed("key"), by=asked.user.name)
    except ValueError as error:
        raise Problem(400, str(error)) from None
    return Done("/ui/locks", "lock_released" if had else "lock_free")


async def run_schedule(asked: Asked) -> Done:
    """Publish a schedule's message once more, now."""
    known = await asked.admin.run_schedule(asked.needed("name"), by=asked.user.name)
    return Done("/ui/schedules", "schedule_asked" if known else "no_schedule")


async def pause_schedule(asked: Asked) -> Done:
    """Publish nothing of a schedule."""
    paused = await asked.admin.pause_schedule(asked.needed("name"), by=asked.user.name)
    return Done("/ui/schedules", "schedule_paused" if paused else "schedule_unchanged")


async def resume_schedule(asked: Asked) -> Done:
    """Let a schedule go on."""
    was = await asked.admin.resume_schedule(asked.needed("name"), by=asked.user.name)
    return Done("/ui/schedules", "schedule_resumed" if was else "schedule_unchanged")


async def forget_schedule(asked: Asked) -> Done:
    """Remove a schedule that no process declares any more."""
    was = await asked.admin.forget_schedule(asked.needed("name"), by=asked.user.name)
    return Done("/ui/schedules", "schedule_forgotten" if was else "no_schedule")


def rate_of(asked: Asked) -> float | None:
    """Most messages a second of a bulk action."""
    return decimal(asked.sent("rate"), "rate")
