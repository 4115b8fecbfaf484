"""Pages about dead letters, schedules, policies, locks, workers, jobs, channels and the audit.

Verification, lookup values and the diagnosis are only queried on request.
"""

from typing import TYPE_CHECKING

from faststream_sqlbroker.core.bulk_jobs import Job
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.verification import MEANINGS, NOTES
from faststream_sqlbroker.http.dashboard.asked import (
    DashboardRequest,
    PageContent,
    to_search_arguments,
)
from faststream_sqlbroker.http.diagnosis import LIMIT
from faststream_sqlbroker.http.responses import Problem
from faststream_sqlbroker.http.users import Role

if TYPE_CHECKING:
    from faststream_sqlbroker.http.dashboard.live import LiveUpdates


PAGE_SIZE = 100
"""Rows per page."""
MAX_GROUPS = 50
"""Groups of dead letters per page."""
CONSUMER_PAGE_SIZE = 25
"""Pull consumers per page: each needs several statements."""
_SEARCH_FIELDS = ("queue", "key", "error", "reason", "since", "until")


async def load_dead_letters(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load failed messages, grouped by their errors."""
    fields = {
        name: value
        for name in _SEARCH_FIELDS
        if (value := page_request.get_field(name)) is not None
    }
    search = to_search_arguments(fields, page_request.settings)
    search.pop("archived", None)  # dead letters are always archived
    dead_letters = await page_request.admin.dead_letters(**search, limit=MAX_GROUPS)
    return PageContent("dead_letters.html", {"found": dead_letters, "search": fields})


async def load_schedules(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load all schedules of the fleet."""
    return PageContent("schedules.html", {"schedules": await page_request.admin.schedules()})


async def load_policies(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load the messages that wait for policies, and the end of each wait."""
    policies = await page_request.admin.policies(
        page_request.get_field("queue"), after=page_request.get_field("after"), limit=PAGE_SIZE
    )
    cursor = policies[-1].queue if len(policies) == PAGE_SIZE else None
    return PageContent("policies.html", {"policies": policies, "after": cursor})


async def load_locks(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load the locks that are held."""
    return PageContent("locks.html", {"locks": await page_request.admin.locks(limit=PAGE_SIZE)})


async def load_workers(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load the subscribers of all processes."""
    subscribers = await page_request.admin.subscribers(page_request.get_field("queue"))
    subscribers.sort(key=lambda subscriber: (subscriber.queues, subscriber.worker))
    return PageContent(
        "workers.html",
        {"subscribers": subscribers[:PAGE_SIZE], "more": len(subscribers) > PAGE_SIZE},
    )


async def load_jobs(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load a page of bulk actions, each of which is a job that visits many messages."""
    jobs = await page_request.admin.audit(
        bulk=True, limit=PAGE_SIZE, before=page_request.get_field("before")
    )
    return PageContent("jobs.html", {"jobs": jobs, "after": _get_next_cursor(jobs)})


async def load_job(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load a bulk action."""
    job = await page_request.admin.job(page_request.request.path_params["job"])
    if job is None:
        job_id = format_value(page_request.request.path_params["job"])
        text = f"job {job_id} does not exist, or is older than a year"
        raise Problem(404, text)
    return PageContent("job.html", {"job": job})


async def load_audit(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load the actions of operators."""
    actions = await page_request.admin.audit(
        limit=PAGE_SIZE, before=page_request.get_field("before")
    )
    return PageContent("audit.html", {"actions": actions, "after": _get_next_cursor(actions)})


def _get_next_cursor(jobs: list[Job]) -> str | None:
    """Return the id to continue a list of jobs before, or None on the last page."""
    return jobs[-1].id if len(jobs) == PAGE_SIZE else None


async def load_channels(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load the pull consumers, and their jobs by state."""
    cursor = page_request.get_field("after") or ""
    names = sorted(name for name in await page_request.list_pull_queues() if name > cursor)
    page = names[:CONSUMER_PAGE_SIZE]
    return PageContent(
        "channels.html",
        {
            "consumers": await page_request.count_jobs(page),
            "rates": {queue.queue: queue for queue in await page_request.shared.queues.get()},
            "after": page[-1] if len(names) > len(page) else None,
        },
    )


MAX_ROWS = 20_000
"""Rows per run of `load_verify`."""
MAX_RUN_SECONDS = 2.0
"""Seconds per run; the next run continues at its end."""
MAX_LINES = 100
"""Damaged rows, notes or records per page."""


async def load_verify(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Verify the tables, once the user requests a run."""
    cursor = page_request.get_field("after")
    verification = None
    if cursor is not None or page_request.get_field("run") is not None:
        # One run at a time per process: any viewer can start one, and it reads many rows.
        async with page_request.shared.check_lock:
            verification = await page_request.admin.verify(
                after=cursor, rows=MAX_ROWS, time_limit=MAX_RUN_SECONDS, limit=MAX_LINES
            )
    return PageContent("verify.html", {"found": verification, "meanings": MEANINGS, "notes": NOTES})


async def load_diagnosis(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Run the diagnosis, for administrators only: the result names hosts, tables and rights.

    Raises:
        Problem: the user is not an administrator (403).
    """
    if not page_request.user.may(Role.ADMIN):
        raise Problem(
            403, "only administrators see the diagnosis: it names hosts, tables and rights"
        )
    # One run at a time per process, because each takes several connections.
    async with page_request.shared.check_lock:
        diagnosis = await page_request.admin.diagnosis(timeout=LIMIT)
    return PageContent("diagnosis.html", {"found": diagnosis})


async def load_mirror(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load live messages with a lookup value: the count for viewers, the records for operators."""
    lookup = page_request.get_field("lookup")
    info = page_request.get_field("info")
    count = None
    records = None
    if lookup is not None:
        # `admin` raises ValueError for an invalid argument, which is user input here.
        try:
            count = await page_request.admin.count_mirrored(lookup=lookup, info=info)
            # As with /v1/mirror, records are for operators only.
            if page_request.user.may(Role.OPERATOR):
                records = await page_request.admin.mirrored(
                    lookup=lookup, info=info, limit=MAX_LINES
                )
        except ValueError as error:
            raise Problem(400, str(error)) from None
    values = {"lookup": lookup or "", "info": info or "", "count": count, "records": records}
    return PageContent("mirror.html", values)
