"""Actions of operators, which the audit records with the user's name.

Bulk actions start with a dry run; a job then changes the messages that it counted.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import time
from typing import Any

from faststream_sqlbroker.core.bulk_jobs import Job, dump_job, parse_job
from faststream_sqlbroker.core.orders import Repair
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.exceptions import SqlBrokerError
from faststream_sqlbroker.http.csrf import Csrf
from faststream_sqlbroker.http.dashboard.asked import (
    ActionResult,
    DashboardRequest,
    PageContent,
    parse_number,
    parse_time_or_age,
    read_search_fields,
    to_search_arguments,
)
from faststream_sqlbroker.http.dashboard.rendering import format_query
from faststream_sqlbroker.http.responses import Problem

Action = Callable[[DashboardRequest], Awaitable[ActionResult | PageContent]]


async def pause(page_request: DashboardRequest) -> ActionResult:
    """Stop all claims from a queue."""
    queue = page_request.get_required_field("queue")
    until = parse_time_or_age(page_request.get_field("until"))
    reason = page_request.get_field("reason")
    await page_request.admin.pause(queue, reason=reason, until=until, by=page_request.user.name)
    return _create_queue_result(queue, "paused")


async def resume(page_request: DashboardRequest) -> ActionResult:
    """Let processes claim from a queue again."""
    queue = page_request.get_required_field("queue")
    was_paused = await page_request.admin.resume(queue, by=page_request.user.name)
    return _create_queue_result(queue, "resumed" if was_paused else "not_paused")


def _create_queue_result(name: str, note: str) -> ActionResult:
    return ActionResult(f"/ui/queue?{format_query({'name': name})}", note)


async def cancel(page_request: DashboardRequest) -> ActionResult:
    """End a message."""
    reason = page_request.get_field("reason")
    return _create_message_result(
        await page_request.admin.cancel(
            page_request.message_id, reason=reason, by=page_request.user.name
        )
    )


async def retry(page_request: DashboardRequest) -> ActionResult:
    """Make a message due now."""
    return _create_message_result(
        await page_request.admin.retry_now(page_request.message_id, by=page_request.user.name)
    )


async def move(page_request: DashboardRequest) -> ActionResult:
    """Move a message to another queue."""
    to = page_request.get_required_field("to")
    return _create_message_result(
        await page_request.admin.move(page_request.message_id, to, by=page_request.user.name)
    )


async def edit(page_request: DashboardRequest) -> ActionResult:
    """Change priority, key or due time; empty fields stay unchanged."""
    fields: dict[str, Any] = {}
    if (priority := parse_number(page_request, "priority", int)) is not None:
        fields["priority"] = priority
    if page_request.get_field("no_key") is not None:
        fields["key"] = None
    elif (key := page_request.get_field("key")) is not None:
        fields["key"] = key
    if (due := parse_time_or_age(page_request.get_field("due"))) is not None:
        fields["due"] = due
    return _create_message_result(
        await page_request.admin.edit(page_request.message_id, **fields, by=page_request.user.name)
    )


def _create_message_result(repair: Repair) -> ActionResult:
    return ActionResult(f"/ui/messages/{repair.message_id}", repair.verdict)


async def release(page_request: DashboardRequest) -> ActionResult:
    """Make messages due that a dead worker has leased."""
    worker = page_request.get_required_field("worker")
    force = page_request.get_field("force") is not None
    count = await page_request.admin.release(worker, force=force, by=page_request.user.name)
    return ActionResult("/ui/workers", "released" if count else "nothing_released")


def create_action(page: str, field: str, operation: str, changed: str, unchanged: str) -> Action:
    """Create an action that runs an operation of `broker.admin` on the name in a form field.

    The next page has the note `changed` or `unchanged`.
    """

    async def run_action(page_request: DashboardRequest) -> ActionResult:
        name = page_request.get_required_field(field)
        try:
            is_changed = await getattr(page_request.admin, operation)(
                name, by=page_request.user.name
            )
        except ValueError as error:
            # `admin` raises ValueError for an invalid argument, which is user input here.
            raise Problem(400, str(error)) from None
        return ActionResult(f"/ui/{page}", changed if is_changed else unchanged)

    return run_action


_MESSAGE = "/ui/messages/{message}"
ACTIONS: dict[str, Action] = {
    "/ui/pause": pause,
    "/ui/resume": resume,
    f"{_MESSAGE}/cancel": cancel,
    f"{_MESSAGE}/retry": retry,
    f"{_MESSAGE}/move": move,
    f"{_MESSAGE}/edit": edit,
    "/ui/drain": create_action("workers", "worker", "drain", "drained", "drain_unchanged"),
    "/ui/undrain": create_action("workers", "worker", "undrain", "undrained", "drain_unchanged"),
    "/ui/release": release,
    "/ui/release-lock": create_action("locks", "key", "release_lock", "lock_released", "lock_free"),
} | {
    f"/ui/{path}": create_action("schedules", "name", path.replace("-", "_"), *notes)
    for path, *notes in (
        ("run-schedule", "schedule_asked", "no_schedule"),
        ("pause-schedule", "schedule_paused", "schedule_unchanged"),
        ("resume-schedule", "schedule_resumed", "schedule_unchanged"),
        ("forget-schedule", "schedule_forgotten", "no_schedule"),
    )
}
"""Actions by path; `BulkJobs` has the actions on jobs."""


PLAN_LIFETIME = 900.0
"""Seconds for which a dry run can be confirmed."""
Log = Callable[..., None]


class BulkJobs:
    """Plans, starts and follows bulk jobs."""

    def __init__(self, csrf: Csrf, log: Log) -> None:
        """Sign plans with `csrf`, because plans come back from the browser."""
        self._csrf = csrf
        self._log = log
        self._running: set[asyncio.Task[Any]] = set()
        self._used: dict[str, float] = {}
        """Signatures of plans that were started here, each with its expiry time."""

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

    async def plan(self, page_request: DashboardRequest) -> PageContent:
        """Count what an action would change; nothing is changed.

        A plan is the job that the dry run would start, as text in the page. Its signature proves to
        `begin` that it comes from here.
        """
        fields = read_search_fields(page_request.get_field)
        job = await _plan_action(
            page_request,
            page_request.get_required_field("action"),
            to_search_arguments(fields, page_request.settings),
        )
        text = json.dumps({"job": dump_job(job), "made_at": time()}, sort_keys=True)
        values = {"job": job, "plan": text, "signature": self._sign(page_request, text)}
        return PageContent("plan.html", {**values, "search": fields})

    async def begin(self, page_request: DashboardRequest) -> ActionResult:
        """Run the action that a dry run of this user has counted.

        Raises:
            Problem: the plan is not from a dry run here (400), is older than 15 minutes, or was
                started in this process before (409).
        """
        text = page_request.get_required_field("plan")
        signature = page_request.get_required_field("signature")
        if not self._csrf.is_signed(signature, page_request.user.name, text):
            raise Problem(400, "the plan is not from a dry run of yours on this server: repeat it")
        plan = json.loads(text)
        self._mark_used(signature, plan["made_at"])
        # The plan contains the counted selection, up to the last message at that time.
        job = replace(parse_job("", from_microseconds(0), plan["job"]), created_at=None)
        started_job = await page_request.admin.run_job(job, wait=False)
        return self._follow_job(page_request, started_job.id, "begun")

    async def stop(self, page_request: DashboardRequest) -> ActionResult:
        """Stop a job."""
        job = await page_request.admin.stop_job(
            _get_job_id(page_request), by=page_request.user.name
        )
        return ActionResult(f"/ui/jobs/{job.id}", "stopped")

    async def resume(self, page_request: DashboardRequest) -> ActionResult:
        """Resume a job."""
        job = await page_request.admin.resume_job(
            _get_job_id(page_request), wait=False, by=page_request.user.name
        )
        return self._follow_job(page_request, job.id, "goes_on")

    async def undo(self, page_request: DashboardRequest) -> ActionResult:
        """Undo the changes of a job."""
        job = await page_request.admin.undo(
            _get_job_id(page_request), wait=False, by=page_request.user.name
        )
        return self._follow_job(page_request, job.id, "undoing")

    def _mark_used(self, signature: str, made_at: float) -> None:
        """Mark a plan as started, and refuse a plan that is old or was started before.

        This prevents a second click from starting the same job twice. The signature identifies the
        plan; only this process remembers it.

        Raises:
            Problem: the plan is older than 15 minutes, or was started in this process (409).
        """
        now = time()
        if now - made_at > PLAN_LIFETIME:
            raise Problem(409, "the dry run is older than 15 minutes: repeat it")
        if signature in self._used:
            raise Problem(
                409, "this dry run was already confirmed: find its job in the list of jobs"
            )
        # Before the first await, so that of two concurrent requests only one passes. The plan stays
        # used even if the job fails to start, because the job may have been stored.
        self._used = {
            used_signature: expires_at
            for used_signature, expires_at in self._used.items()
            if expires_at > now
        }
        self._used[signature] = made_at + PLAN_LIFETIME

    def _sign(self, page_request: DashboardRequest, text: str) -> str:
        return self._csrf.sign(page_request.user.name, text)

    def _follow_job(self, page_request: DashboardRequest, job_id: str, note: str) -> ActionResult:
        """Work on the job in this process as well: no other process may have a subscriber.

        Processes with subscribers run the jobs of the fleet. `note` is shown on the page of the
        job.
        """
        # The event loop references tasks weakly: without the set this task could be collected.
        task = asyncio.create_task(self._run_work(page_request.admin.wait_for_job(job_id)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return ActionResult(f"/ui/jobs/{job_id}", note)

    async def _run_work(self, work: Awaitable[Job]) -> None:
        """Work on a job until the end; errors are logged and not raised.

        The task has no caller. The job is stored, so another process can continue it.
        """
        try:
            await work
        except SqlBrokerError as error:
            self._log(
                logging.WARNING, f"HTTP: a bulk job stopped here, others may continue it: {error}"
            )


async def _plan_action(page_request: DashboardRequest, action: str, search: dict[str, Any]) -> Job:
    """Run the dry run of a bulk action, and return the planned job.

    `search` selects the messages, by the arguments of `admin.messages`.

    Raises:
        Problem: the action does not exist, or cannot change archived messages (400).
    """
    admin = page_request.admin
    to = page_request.get_field("to")
    options: dict[str, Any] = {
        "rate": parse_number(page_request, "rate", float),
        "limit": parse_number(page_request, "limit", int),
        "by": page_request.user.name,
        "dry_run": True,
    }
    if (ids := page_request.get_field("ids")) is not None:
        search["ids"] = ids.split(",")
    if action == "redrive":
        # A redrive always searches the archive, and takes no such argument.
        search.pop("archived", None)
        return await admin.redrive(**search, to=to, **options)
    if "archived" in search:
        raise Problem(400, "only redrive accepts archived messages: search the live messages")
    if action == "cancel":
        return await admin.bulk_cancel(reason=page_request.get_field("why"), **search, **options)
    if action == "retry":
        return await admin.bulk_retry(**search, **options)
    if action == "move":
        return await admin.bulk_move(page_request.get_required_field("to"), **search, **options)
    raise Problem(400, f"action must be redrive, cancel, retry or move, got {format_value(action)}")


def _get_job_id(page_request: DashboardRequest) -> str:
    job_id: str = page_request.request.path_params["job"]
    return job_id
