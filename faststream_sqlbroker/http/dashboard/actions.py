"""What operators do on the pages; each goes to the audit under the user's name. Actions on many
messages are first a dry run, then what it has counted, by a job.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import time
from typing import Any

from faststream_sqlbroker.core.jobs import Job, job_info, job_of
from faststream_sqlbroker.core.orders import Repair
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.exceptions import SqlBrokerError
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.csrf import Csrf
from faststream_sqlbroker.http.dashboard.asked import (
    Asked,
    Done,
    Shown,
    given_filter,
    moment_or_age,
    number,
    search_of,
)
from faststream_sqlbroker.http.dashboard.rendering import query_text

Action = Callable[[Asked], Awaitable[Done | Shown]]


async def pause(asked: Asked) -> Done:
    """Stop all claims from a queue."""
    queue = asked.needed("queue")
    until = moment_or_age(asked.given("until"))
    reason = asked.given("reason")
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
    reason = asked.given("reason")
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
    if (priority := number(asked, "priority", int)) is not None:
        fields["priority"] = priority
    if asked.given("no_key") is not None:
        fields["key"] = None
    elif (key := asked.given("key")) is not None:
        fields["key"] = key
    if (due := moment_or_age(asked.given("due"))) is not None:
        fields["due"] = due
    return _message(await asked.admin.edit(asked.message, **fields, by=asked.user.name))


def _message(found: Repair) -> Done:
    return Done(f"/ui/messages/{found.message_id}", found.verdict)


async def release(asked: Asked) -> Done:
    """Make due what a dead worker has leased."""
    worker = asked.needed("worker")
    force = asked.given("force") is not None
    count = await asked.admin.release(worker, force=force, by=asked.user.name)
    return Done("/ui/workers", "released" if count else "nothing_released")


def named(page: str, field: str, operation: str, changed: str, same: str) -> Action:
    """Make an action of an operation of `broker.admin` on a name, which `field` of the form has;
    the page that follows says whether something has changed.
    """

    async def act(asked: Asked) -> Done:
        name = asked.needed(field)
        try:
            found = await getattr(asked.admin, operation)(name, by=asked.user.name)
        except ValueError as error:
            # A name is an argument like any other for `admin`: here it is the user's.
            raise Problem(400, str(error)) from None
        return Done(f"/ui/{page}", changed if found else same)

    return act


_MESSAGE = "/ui/messages/{message}"
ACTIONS: dict[str, Action] = {
    "/ui/pause": pause,
    "/ui/resume": resume,
    f"{_MESSAGE}/cancel": cancel,
    f"{_MESSAGE}/retry": retry,
    f"{_MESSAGE}/move": move,
    f"{_MESSAGE}/edit": edit,
    "/ui/drain": named("workers", "worker", "drain", "drained", "drain_unchanged"),
    "/ui/undrain": named("workers", "worker", "undrain", "undrained", "drain_unchanged"),
    "/ui/release": release,
    "/ui/release-lock": named("locks", "key", "release_lock", "lock_released", "lock_free"),
} | {
    f"/ui/{path}": named("schedules", "name", path.replace("-", "_"), *notes)
    for path, *notes in (
        ("run-schedule", "schedule_asked", "no_schedule"),
        ("pause-schedule", "schedule_paused", "schedule_unchanged"),
        ("resume-schedule", "schedule_resumed", "schedule_unchanged"),
        ("forget-schedule", "schedule_forgotten", "no_schedule"),
    )
}
"""By path; those of jobs are `Bulk`'s."""


LIFE = 900.0
"""Seconds for which a dry run can be confirmed."""
Log = Callable[..., None]


class Bulk:
    """Plans, begins and follows jobs."""

    def __init__(self, csrf: Csrf, log: Log) -> None:
        """Plans are signed by `csrf`: they come back from the browser."""
        self._csrf = csrf
        self._log = log
        self._running: set[asyncio.Task[Any]] = set()
        self._used: dict[str, float] = {}
        """The signatures of plans that were begun here, each with the time when it expires."""

    @property
    def actions(self) -> dict[str, Action]:
        """Return the actions by path."""
        job = "/ui/jobs/{job}"
        return {
            "/ui/plan": self.plan,
            "/ui/begin": self.begin,
            f"{job}/stop": self.stop,
            f"{job}/resume": self.resume,
            f"{job}/undo": self.undo,
        }

    async def plan(self, asked: Asked) -> Shown:
        """Count what an action would change; nothing is changed."""
        fields = given_filter(asked.given)
        job = await _planned(asked, asked.needed("action"), search_of(fields, asked.settings))
        text = json.dumps({"job": job_info(job), "made_at": time()}, sort_keys=True)
        values = {"job": job, "plan": text, "signature": self._signature(asked, text)}
        return Shown("plan.html", {**values, "search": fields})

    async def begin(self, asked: Asked) -> Done:
        """Run what a dry run of this user has counted.

        Raises:
            Problem: it is not what the dry run has made (400), is older than 15 minutes, or was
                begun in this process before (409).
        """
        text = asked.needed("plan")
        signature = asked.needed("signature")
        if not self._csrf.is_signed(signature, asked.user.name, text):
            raise Problem(400, "this is not a plan that a dry run has made here: do it again")
        plan = json.loads(text)
        self._use(signature, plan["made_at"])
        # What comes back is what was counted, up to the last message that was there then.
        job = replace(job_of("", from_microseconds(0), plan["job"]), created_at=None)
        begun = await asked.admin.run_job(job, wait=False)
        return self._followed(asked, begun.id, "begun")

    async def stop(self, asked: Asked) -> Done:
        """Let a job rest."""
        found = await asked.admin.stop_job(_id(asked), by=asked.user.name)
        return Done(f"/ui/jobs/{found.id}", "stopped")

    async def resume(self, asked: Asked) -> Done:
        """Let it go on."""
        found = await asked.admin.resume_job(_id(asked), wait=False, by=asked.user.name)
        return self._followed(asked, found.id, "goes_on")

    async def undo(self, asked: Asked) -> Done:
        """Take back what it has done."""
        found = await asked.admin.undo(_id(asked), wait=False, by=asked.user.name)
        return self._followed(asked, found.id, "undoing")

    def _use(self, signature: str, made_at: float) -> None:
        """Refuse a second click, and a page that was left open."""
        now = time()
        if now - made_at > LIFE:
            raise Problem(409, "the dry run is older than 15 minutes: do it again")
        if signature in self._used:
            raise Problem(409, "this dry run was confirmed before: its job is in the list of jobs")
        # Before anything is awaited: two requests at once must not both pass. Also if the job then
        # fails to begin: it may be stored all the same.
        self._used = {each: end for each, end in self._used.items() if end > now}
        self._used[signature] = made_at + LIFE

    def _signature(self, asked: Asked, text: str) -> str:
        return self._csrf.signature(asked.user.name, text)

    def _followed(self, asked: Asked, job_id: str, note: str) -> Done:
        """Work on the job here, too: it may be that no other process has a subscriber."""
        # The event loop holds tasks weakly: without the set it could vanish half-way.
        task = asyncio.create_task(self._work(asked.admin.wait_for_job(job_id)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return Done(f"/ui/jobs/{job_id}", note)

    async def _work(self, work: Awaitable[Job]) -> None:
        try:
            await work
        except SqlBrokerError as error:
            # It is stored: other processes go on with it.
            self._log(logging.WARNING, f"HTTP: a job does not go on in this process: {error}")


async def _planned(asked: Asked, action: str, search: dict[str, Any]) -> Job:
    admin = asked.admin
    to = asked.given("to")
    options: dict[str, Any] = {
        "rate": number(asked, "rate", float),
        "limit": number(asked, "limit", int),
        "by": asked.user.name,
        "dry_run": True,
    }
    if (ids := asked.given("ids")) is not None:
        search["ids"] = ids.split(",")
    if action == "redrive":
        # It looks into the archive anyway, and takes no such argument.
        search.pop("archived", None)
        return await admin.redrive(**search, to=to, **options)
    if "archived" in search:
        raise Problem(400, "only a redrive takes archived messages: search without the archive")
    if action == "cancel":
        return await admin.bulk_cancel(reason=asked.given("why"), **search, **options)
    if action == "retry":
        return await admin.bulk_retry(**search, **options)
    if action == "move":
        return await admin.bulk_move(asked.needed("to"), **search, **options)
    raise Problem(400, f"action must be redrive, cancel, retry or move, got {short(action)}")


def _id(asked: Asked) -> str:
    job_id: str = asked.request.path_params["job"]
    return job_id
