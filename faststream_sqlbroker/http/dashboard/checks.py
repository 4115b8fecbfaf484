"""The pages that look only when they are asked: rows that cannot be, lookup values, diagnosis."""

from typing import TYPE_CHECKING

from faststream_sqlbroker.core.verification import MEANINGS, NOTES
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.dashboard.asked import Asked, Shown
from faststream_sqlbroker.http.diagnosis import LIMIT
from faststream_sqlbroker.http.users import Role

if TYPE_CHECKING:
    from faststream_sqlbroker.http.dashboard.live import Live

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
