"""What policies have put off comes in time though the database's clock was set back.

Claims note now and then when they put messages off (`removed.note_holds`). A note that is more than
a minute later than now proves a step, and its size. What was put off before the step would wait
until the clock has come to its due time again, so its due time is set back, too.

Times are microseconds since 1970.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies.flags import HELD, HELD_BURST, PUT_OFF
from faststream_sqlbroker.core.policies.options import CLOCK_STEP
from faststream_sqlbroker.dialects.base import Dialect
from faststream_sqlbroker.dialects.policy_holds import HOLDS, KEPT, Hold, read_holds
from faststream_sqlbroker.policies.bursts import BURST_WAIT_LIMIT
from faststream_sqlbroker.policies.rows import Later, PolicyRows

PAGE = 2_000
"""Messages that one statement reads."""


class ClockStep(NamedTuple):
    """What was mended of one queue."""

    back: int
    """By how much the clock was set back; 0: it was not."""
    moved: int
    """How many messages have another due time."""


def mend_clock_step(
    dialect: Dialect, clock: Clock, queue: str, connection: Connection
) -> ClockStep | None:
    """Set back the due times that policies have given messages of `queue` before such a step; None:
    a claim of the queue runs.

    All of it is one transaction, and it is done once, whichever process sees the step first.
    """
    if not dialect.lock_order(connection, [queue]):
        return None
    rows = PolicyRows(dialect)
    now = rows.now(connection, clock).now
    holds = read_holds(connection, dialect.tables.policy_state, [queue])
    back = max((hold.seen - now for hold in holds), default=0)
    if back <= CLOCK_STEP:
        return ClockStep(0, 0)
    moved = 0
    for pair in dialect.ready_pairs(connection, [queue]):
        # What waits from before the step is due later than its note, or about then.
        at = now + back - CLOCK_STEP
        size = PAGE
        while later := rows.later(connection, queue, pair.priority, now=at, size=size):
            due = {each.id: _due(each, back, now) for each in later if each.marks & HELD}
            rows.shift(connection, queue, due, 0)
            moved += len(due)
            if len(later) < size:
                break
            if later[-1].due - 1 > at:
                at = later[-1].due - 1
            else:
                size *= 2  # so many have the same due time
    rows.keep(connection, HOLDS + queue, {hold.name: _noted(hold, now) for hold in holds})
    return ClockStep(back, moved)


def _due(row: Later, back: int, now: int) -> int | None:
    if row.marks & PUT_OFF:
        return now  # a throttle may be asked at any time
    if row.created > now:
        return row.due - (row.created - now)
    # It was published when the clock was right, before it went ahead, or is right again. Only what
    # waits behind another of its key was then put off since, and for a minute at most.
    waits = row.marks & HELD_BURST and row.due <= now + back + BURST_WAIT_LIMIT + CLOCK_STEP
    return max(now, row.due - back) if waits else None


def _noted(hold: Hold, now: int) -> tuple[Mapping[str, Any], int]:
    info = {**hold.info, "seen": min(hold.seen, now)}
    return info, now + KEPT
