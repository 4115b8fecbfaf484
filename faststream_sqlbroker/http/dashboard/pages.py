"""Pages about queues and messages."""

from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.admin.findings import MAX_AGE
from faststream_sqlbroker.core.findings import explain_late, find_queue_problems
from faststream_sqlbroker.core.overview import Count, QueueOverview
from faststream_sqlbroker.core.status import format_error
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.http.dashboard.asked import (
    STATES,
    DashboardRequest,
    PageContent,
    is_archived,
    read_search_fields,
    to_search_arguments,
)
from faststream_sqlbroker.http.dashboard.rendering import get_state_times
from faststream_sqlbroker.http.responses import Problem

if TYPE_CHECKING:
    from faststream_sqlbroker.http.dashboard.live import LiveUpdates

ERROR_PREFIX = format_error("\0").partition("\0")[0]
"""Text before an error at the end of a sentence."""
PAGE_SIZE = 50
"""Messages per page."""
RECENT_PERIOD = "1h"
"""Period in which the overview counts dead letters."""
MAX_FAILED = 100
"""Maximum dead letters that the overview counts."""


async def load_overview(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load findings, rates and ages."""
    result = await page_request.shared.findings.get()
    queues = list(result.queues)
    return PageContent(
        "overview.html",
        {
            "queues": queues,
            "findings": result.findings,
            "health": result.health,
            "failed": await _count_recent_failures(page_request),
            "totals": compute_totals(queues),
        },
    )


async def _count_recent_failures(page_request: DashboardRequest) -> Count:
    """Count the messages that failed in the last hour, up to `MAX_FAILED`; 0 without an archive."""
    try:
        page = await page_request.admin.messages(
            state="FAILED", archived=True, since=RECENT_PERIOD, limit=MAX_FAILED
        )
    except SetupError:
        return Count(0)  # `admin` refuses the search if there is no archive.
    return Count(len(page.messages), "exact" if page.after is None else "at least")


def compute_totals(queues: list[QueueOverview]) -> dict[str, Any]:
    """Return the sums of all queues, and the age of the oldest due message."""
    rates = [queue.out_per_minute for queue in queues if queue.out_per_minute is not None]
    return {
        "ready": sum(queue.ready.value for queue in queues),
        "in_flight": sum(queue.in_flight.value for queue in queues),
        "delayed": sum(queue.delayed.value for queue in queues),
        "in": round(sum(queue.in_per_minute for queue in queues), 1),
        "out": round(sum(rates), 1),
        "oldest": max((queue.oldest_due_age for queue in queues), default=0.0),
    }


async def load_queues(page_request: DashboardRequest, live: "LiveUpdates") -> PageContent:
    """Load all queues with their counts."""
    overviews = await page_request.shared.queues.get()
    return PageContent("queues.html", {"queues": overviews, "history": live.history})


async def load_queue(page_request: DashboardRequest, live: "LiveUpdates") -> PageContent:
    """Load the page of a queue: its counts, problems, subscribers and policies."""
    name = _get_queue_name(page_request)
    overview = (await page_request.admin.queues(name))[0]
    subscribers = await page_request.admin.subscribers(name)
    policies = await page_request.admin.policies(name)
    # On its own page, a late queue is explained by its policies if these make the messages wait.
    findings = [
        explain_late(finding, overview, policies[0], subscribers)
        if finding.kind == "late" and policies
        else finding
        for finding in find_queue_problems(overview, MAX_AGE)
    ]
    values = {
        "queue": overview,
        "findings": findings,
        "subscribers": subscribers[:PAGE_SIZE],
        "policies": policies,
        "history": live.history,
    }
    return PageContent("queue.html", values)


def _get_queue_name(page_request: DashboardRequest) -> str:
    name = page_request.get_field("name")
    if name is None:
        raise Problem(400, "the address has no queue name: add ?name= and the name of the queue")
    return name


async def load_messages(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load a page of messages that match the search, without their bodies."""
    fields = read_search_fields(page_request.get_field)
    page = await page_request.admin.messages(
        **to_search_arguments(fields, page_request.settings),
        limit=PAGE_SIZE,
        after=page_request.get_field("after"),
        # A redact hook may need headers and body to decide.
        bodies=page_request.settings.redact is not None,
        redact=page_request.settings.redact_message,
    )
    return PageContent(
        "messages.html",
        {
            "page": page,
            "search": fields,
            "states": STATES,
            "archived": is_archived(fields),
            "more": bool(fields.keys() - {"queue", "state", "error", "archived"}),
        },
    )


async def load_message(page_request: DashboardRequest, _live: "LiveUpdates") -> PageContent:
    """Load a message with all details, as far as the dashboard's settings show them.

    A redact hook is a function of the application that changes a message before it is shown.
    """
    settings = page_request.settings
    # A redact hook may need headers and body to decide, even if they are not shown.
    body = settings.bodies or settings.redact is not None
    detail = await page_request.admin.message(
        page_request.message_id, body=body, redact=settings.redact_message
    )
    if detail is None:
        text = (
            f"message {page_request.message_id} does not exist, live or archived: "
            "retention may have removed it"
        )
        raise Problem(404, text)
    # Reasons come from the row, and may end with its error.
    reasons = [
        (reason, reason.text if settings.errors else reason.text.partition(ERROR_PREFIX)[0])
        for reason in detail.explanation.reasons
    ]
    values = {"detail": detail, "message": detail.message, "reasons": reasons}
    return PageContent("message.html", {**values, "times": get_state_times(detail.message)})
