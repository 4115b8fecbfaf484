"""The pages about queues and messages."""

from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.admin.findings import MAX_AGE
from faststream_sqlbroker.core.findings import explain_late, queue_findings
from faststream_sqlbroker.core.overview import Count, QueueOverview
from faststream_sqlbroker.core.status import error_text
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.dashboard.asked import (
    STATES,
    Asked,
    Shown,
    given_filter,
    is_archived,
    search_of,
)
from faststream_sqlbroker.http.dashboard.rendering import state_times

if TYPE_CHECKING:
    from faststream_sqlbroker.http.dashboard.live import Live

OF_ERROR = error_text("\0").partition("\0")[0]
"""What stands before an error at the end of a sentence."""
A_PAGE = 50
"""Messages of a page."""
LATELY = "1h"
"""How far back the overview looks for dead letters."""
MOST_FAILED = 100
"""Of these, it counts so many."""


async def overview(asked: Asked, _live: "Live") -> Shown:
    """Problems first, then rates and ages."""
    found = await asked.lately.findings.get()
    queues = list(found.queues)
    return Shown(
        "overview.html",
        {
            "queues": queues,
            "findings": found.findings,
            "health": found.health,
            "failed": await _failed_lately(asked),
            "totals": totals(queues),
        },
    )


async def _failed_lately(asked: Asked) -> Count:
    try:
        page = await asked.admin.messages(
            state="FAILED", archived=True, since=LATELY, limit=MOST_FAILED
        )
    except SetupError:
        return Count(0)  # There is no archive.
    return Count(len(page.messages), "exact" if page.after is None else "at least")


def totals(queues: list[QueueOverview]) -> dict[str, Any]:
    """Sums and worst values of all queues."""
    rates = [queue.out_per_minute for queue in queues if queue.out_per_minute is not None]
    return {
        "ready": sum(queue.ready.value for queue in queues),
        "in_flight": sum(queue.in_flight.value for queue in queues),
        "delayed": sum(queue.delayed.value for queue in queues),
        "in": round(sum(queue.in_per_minute for queue in queues), 1),
        "out": round(sum(rates), 1),
        "oldest": max((queue.oldest_due_age for queue in queues), default=0.0),
    }


async def queues(asked: Asked, live: "Live") -> Shown:
    """All queues, each with what is in it."""
    found = await asked.lately.queues.get()
    return Shown("queues.html", {"queues": found, "history": live.history})


async def queue(asked: Asked, live: "Live") -> Shown:
    """One queue."""
    name = _name(asked)
    found = (await asked.admin.queues(name))[0]
    subscribers = await asked.admin.subscribers(name)
    policies = await asked.admin.policies(name)
    findings = [
        explain_late(finding, found, policies[0], subscribers)
        if finding.kind == "late" and policies
        else finding
        for finding in queue_findings(found, MAX_AGE)
    ]
    values = {
        "queue": found,
        "findings": findings,
        "subscribers": subscribers[:A_PAGE],
        "policies": policies,
        "history": live.history,
    }
    return Shown("queue.html", values)


def _name(asked: Asked) -> str:
    name = asked.given("name")
    if name is None:
        raise Problem(400, "the address names no queue: add ?name= and its name")
    return name


async def messages(asked: Asked, _live: "Live") -> Shown:
    """A page of those that match the search."""
    fields = given_filter(asked.given)
    page = await asked.admin.messages(
        **search_of(fields, asked.settings),
        limit=A_PAGE,
        after=asked.given("after"),
        # A hook may need headers and body to decide.
        bodies=asked.settings.redact is not None,
        redact=asked.settings.shown,
    )
    return Shown(
        "messages.html",
        {
            "page": page,
            "search": fields,
            "states": STATES,
            "archived": is_archived(fields),
            "more": bool(fields.keys() - {"queue", "state", "error", "archived"}),
        },
    )


async def message(asked: Asked, _live: "Live") -> Shown:
    """One message with all that is known of it."""
    settings = asked.settings
    # A hook may need headers and body to decide, also where they are not shown.
    body = settings.bodies or settings.redact is not None
    detail = await asked.admin.message(asked.message, body=body, redact=settings.shown)
    if detail is None:
        text = (
            f"there is no message {asked.message}, live or archived: retention may have removed it"
        )
        raise Problem(404, text)
    # The reasons are made of the row, with the error at their end.
    reasons = [
        (each, each.text if settings.errors else each.text.partition(OF_ERROR)[0])
        for each in detail.explanation.reasons
    ]
    values = {"detail": detail, "message": detail.message, "reasons": reasons}
    return Shown("message.html", {**values, "times": state_times(detail.message)})
