"""The pages about dead letters, schedules, policies, locks, workers, jobs and channels; and those
that look only when they are asked: rows that cannot be, lookup values, the diagnosis.
"""

from typing import TYPE_CHECKING

from faststream_sqlbroker.core.jobs import Job
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.verification import MEANINGS, NOTES
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.dashboard.asked import Asked, Shown, search_of
from faststream_sqlbroker.http.diagnosis import LIMIT
from faststream_sqlbroker.http.users import Role

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
    search = search_of(fields, asked.settings)
    search.pop("archived", None)  # they always are
    found = await asked.admin.dead_letters(**search, limit=MOST_GROUPS)
    return Shown("dead_letters.html", {"found": found, "search": fields})


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


MOST_ROWS = 20_000
"""Rows that one look of `verify` reads."""
LONGEST_LOOK = 2.0
"""Seconds of one look; the next goes on where it ended."""
MOST_LINES = 100
"""Damages, notes or records on a page."""


async def verify(asked: Asked, _live: "Live") -> Shown:
    """Rows of the tables that cannot be; nothing is read before the user asks for it."""
    after = asked.given("after")
    found = None
    if after is not None or asked.given("run") is not None:
        # One at a time in a process: any viewer can ask, and a look reads many rows.
        async with asked.lately.verifying:
            found = await asked.admin.verify(
                after=after, rows=MOST_ROWS, time_limit=LONGEST_LOOK, limit=MOST_LINES
            )
    return Shown("verify.html", {"found": found, "meanings": MEANINGS, "notes": NOTES})


async def diagnosis(asked: Asked, _live: "Live") -> Shown:
    """What is around the broker; for administrators, as it names hosts, tables and rights.

    Raises:
        Problem: the user is no administrator (403).
    """
    if not asked.user.may(Role.ADMIN):
        raise Problem(403, "the diagnosis is for administrators: it names hosts, tables and rights")
    # One at a time in a process: each takes several connections.
    async with asked.lately.verifying:
        found = await asked.admin.diagnosis(timeout=LIMIT)
    return Shown("diagnosis.html", {"found": found})


async def mirror(asked: Asked, _live: "Live") -> Shown:
    """Live messages with a lookup value: how many for viewers, which ones for operators."""
    lookup = asked.given("lookup")
    info = asked.given("info")
    count = None
    records = None
    if lookup is not None:
        # A lookup value is an argument like any other, so `admin` raises ValueError.
        try:
            count = await asked.admin.count_mirrored(lookup=lookup, info=info)
            # As with /v1/mirror: what is stored is for operators.
            if asked.user.may(Role.OPERATOR):
                records = await asked.admin.mirrored(lookup=lookup, info=info, limit=MOST_LINES)
        except ValueError as error:
            raise Problem(400, str(error)) from None
    values = {"lookup": lookup or "", "info": info or "", "count": count, "records": records}
    return Shown("mirror.html", values)
