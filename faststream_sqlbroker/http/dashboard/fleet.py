"""The pages about dead letters, schedules, policies, locks, workers, jobs and channels."""

from typing import TYPE_CHECKING

from faststream_sqlbroker.core.jobs import Job
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.dashboard.asked import Asked, Shown, moment_or_age

if TYPE_CHECKING:
    from faststream_sqlbroker.http.dashboard.live import Live

A_PAGE = 100
"""Rows of a page."""
MOST_GROUPS = 50
"""Groups of dead letters on a page."""
CONSUMERS = 25
"""Pull consumers of a page: each takes some statements."""
_SEARCHED = ("queue", "key", "error", "reason", "since", "until")


async def dead_letters(asked: Asked, _live: "Live") -> Shown:
    """Failed messages by what they have in common."""
    fields = {name: value for name in _SEARCHED if (value := asked.given(name)) is not None}
    texts = {name: value for name, value in fields.items() if name not in {"since", "until"}}
    found = await asked.admin.dead_letters(
        **texts,
        since=moment_or_age(fields.get("since")),
        until=moment_or_age(fields.get("until")),
        limit=MOST_GROUPS,
    )
    # The hook changes messages, and an error of a group is none: then each message shows its own.
    errors = asked.settings.redact is None
    return Shown("dead_letters.html", {"found": found, "search": fields, "errors": errors})


async def schedules(asked: Asked, _live: "Live") -> Shown:
    """All schedules of the fleet."""
    return Shown("schedules.html", {"schedules": await asked.admin.schedules()})


async def policies(asked: Asked, _live: "Live") -> Shown:
    """What waits for which policy, until when."""
    found = await asked.admin.policies(
        asked.given("queue"), after=asked.given("after"), limit=A_PAGE
    )
    after = found[-1].queue if len(found) == A_PAGE else None
    return Shown("policies.html", {"policies": found, "after": after})


async def locks(asked: Asked, _live: "Live") -> Shown:
    """Locks that are held."""
    return Shown("locks.html", {"locks": await asked.admin.locks(limit=A_PAGE)})


async def workers(asked: Asked, _live: "Live") -> Shown:
    """The subscribers of all processes."""
    found = await asked.admin.subscribers(asked.given("queue"))
    found.sort(key=lambda each: (each.queues, each.worker))
    return Shown("workers.html", {"subscribers": found[:A_PAGE], "more": len(found) > A_PAGE})


async def jobs(asked: Asked, _live: "Live") -> Shown:
    """Bulk actions."""
    found = await asked.admin.audit(bulk=True, limit=A_PAGE, before=asked.given("before"))
    return Shown("jobs.html", {"jobs": found, "after": _last(found)})


async def job(asked: Asked, _live: "Live") -> Shown:
    """One action."""
    found = await asked.admin.job(asked.request.path_params["job"])
    if found is None:
        given = short(asked.request.path_params["job"])
        text = f"there is no bulk action {given}: it never was, or is older than a year"
        raise Problem(404, text)
    return Shown("job.html", {"job": found})


async def audit(asked: Asked, _live: "Live") -> Shown:
    """What operators did."""
    found = await asked.admin.audit(limit=A_PAGE, before=asked.given("before"))
    return Shown("audit.html", {"actions": found, "after": _last(found)})


def _last(found: list[Job]) -> str | None:
    return found[-1].id if len(found) == A_PAGE else None


async def channels(asked: Asked, _live: "Live") -> Shown:
    """The pull consumers, and their jobs by state."""
    after = asked.given("after") or ""
    names = sorted(name for name in await asked.pulled() if name > after)
    page = names[:CONSUMERS]
    return Shown(
        "channels.html",
        {
            "consumers": await asked.job_counts(page),
            "rates": {queue.queue: queue for queue in await asked.lately.queues.get()},
            "after": page[-1] if len(names) > len(page) else None,
        },
    )
