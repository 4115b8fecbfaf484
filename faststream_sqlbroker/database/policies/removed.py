"""What waited for a policy that no live subscriber of its queue has is freed, and so is what waits
for a clock that was set back.

Delay, bursts and throttles that refuse give messages a later due time. It says nothing any more
when a deployment has taken the policy away. Which policies may have put messages off is noted by
their claims, now and then; the marks of a message say whose its due time is.

A note that is more than a minute later than now proves that the database's clock was set back, and
by about how much. Until the clock has come there again, due times that were given before say
nothing, either.

Times are microseconds since 1970.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.policies.flags import BURST, HELD_BURST, HELD_DELAY, PUT_OFF
from faststream_sqlbroker.core.policies.holds import freed_at, holds_of, mark_of
from faststream_sqlbroker.core.policies.options import CLOCK_STEP
from faststream_sqlbroker.core.policies.standby import STANDBY, stands_by
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.parts.policy_holds import (
    HOLDS,
    KEPT,
    Hold,
    forget_hold,
    read_holds,
)
from faststream_sqlbroker.database.policies.bursts import BURST_WAIT_LIMIT
from faststream_sqlbroker.database.policies.intake import Intake
from faststream_sqlbroker.database.policies.rows import Later, PolicyRows

RENEWED = 15.0
"""Seconds after which a claim notes it again."""
LIVES = 60 * 1_000_000
"""So long after such a note a policy is not gone (microseconds), though no subscriber tells of it:
its heartbeat may have failed."""
STEP = 2_000
"""Messages that one transaction looks at."""
EARLIER = 1_000
"""A step begins this long before the last due time of the one before (microseconds): others have
the same."""


@dataclass
class Freeing:
    """How far one search has come, and what it has found."""

    at: dict[int, int] = field(default_factory=dict)
    """By priority, the due time after which messages have not been looked at."""
    size: int = STEP
    back: int = 0
    """By how much the database's clock was set back (microseconds)."""
    freed: int = 0
    done: bool = False


def note_holds(intake: Intake, policies: Sequence[Policy]) -> None:
    """`policies` may put messages of the queue off; under its lock, noted now and then."""
    noted = intake.position.noted
    asked = intake.clock.monotonic()
    holds = holds_of(policies)
    if not holds or asked < noted.get(intake.queue, float("-inf")) + RENEWED:
        return
    noted[intake.queue] = asked
    scope = HOLDS + intake.queue
    known = intake.rows.states(intake.connection, scope, holds)
    # A note that is later than now says that the clock was set back: it stays until that is mended.
    found = {}
    for name, info in holds.items():
        before = known.get(name) or {}
        if before.get("seen", 0) <= intake.now + CLOCK_STEP:
            length = max(info.get("length", 0), before.get("length", 0))
            found[name] = {"length": length, "seen": intake.now}, intake.now + KEPT
    intake.rows.keep(intake.connection, scope, found)


def removed(dialect: Dialect, holds: Sequence[Hold], connection: Connection) -> list[Hold]:
    """Those of `holds` that no live subscriber has any more."""
    old = [hold for hold in holds if hold.seen + LIVES < to_microseconds(hold.now)]
    if not old:
        return []
    live = _live(dialect, connection)
    return [hold for hold in old if hold.name not in holds_of(live.get(hold.queue, ()))]


def _live(dialect: Dialect, connection: Connection) -> dict[str, list[Policy]]:
    """By queue, the policies of subscribers that claim."""
    found: dict[str, list[Policy]] = {}
    for subscriber in read_subscribers(connection, dialect.tables.policy_state):
        if not subscriber.stopping:
            for queue in subscriber.queues:
                found.setdefault(queue, []).extend(subscriber.rules)
    return found


def free(
    dialect: Dialect, clock: Clock, hold: Hold, search: Freeing, connection: Connection
) -> Freeing:
    """Free some of what waits for `hold`, from where `search` has come to; how far that is now.

    Nothing is done while a claim of the queue runs, or if a subscriber has the policy again.
    """
    if not dialect.lock_order(connection, [hold.queue]):
        return search
    live = _live(dialect, connection).get(hold.queue, [])
    if hold.name in holds_of(live):
        return replace(search, done=True)
    rows = PolicyRows(dialect)
    now = rows.now(connection, clock).now
    mark = mark_of(hold.name)

    def due_of(row: Later) -> int | None:
        return freed_at(hold.name, hold.info, live, row.due, now) if row.marks & mark else None

    # With the policy back, it takes part anew.
    gone = mark | BURST if mark == HELD_BURST else mark
    found = _shift(dialect, rows, connection, hold.queue, search, now, due_of, ~gone)
    if found.done:
        forget_hold(connection, dialect.tables.policy_state, hold)
    return found


def mend_clock_step(
    dialect: Dialect, clock: Clock, queue: str, search: Freeing, connection: Connection
) -> Freeing:
    """Set back some of the due times that policies have given before the clock was, from where
    `search` has come to; how far that is now.

    Nothing is done while a claim of the queue runs, or if the step was mended. To do it again, as
    after a crash, changes nothing more.
    """
    if not dialect.lock_order(connection, [queue]):
        return search
    rows = PolicyRows(dialect)
    now = rows.now(connection, clock).now
    holds = read_holds(connection, dialect.tables.policy_state, [queue])
    back = max((hold.seen - now for hold in holds), default=0)
    if back <= CLOCK_STEP:
        return replace(search, done=True)
    longest = max(BURST_WAIT_LIMIT, *(int(hold.info.get("length", 0)) for hold in holds))

    def due_of(row: Later) -> int | None:
        if row.marks & PUT_OFF:
            return now  # a throttle may be asked at any time
        # What stands by is to be looked at then.
        base = STANDBY if stands_by(row.due, row.marks) else 0
        # By the clock of today, nothing puts a message off for so long.
        late = row.marks & (HELD_BURST | HELD_DELAY) and row.due - base - longest > now + CLOCK_STEP
        return max(base + now, row.due - back) if late else None

    found = _shift(dialect, rows, connection, queue, search, now, due_of, ~0)
    found.back = max(search.back, back)
    if found.done:
        notes = {
            hold.name: ({**hold.info, "seen": min(hold.seen, now)}, now + KEPT) for hold in holds
        }
        rows.keep(connection, HOLDS + queue, notes)
    return found


def _shift(
    dialect: Dialect,
    rows: PolicyRows,
    connection: Connection,
    queue: str,
    search: Freeing,
    now: int,
    due_of: Callable[[Later], int | None],
    kept: int,
) -> Freeing:
    """Give some of what is due later than `now` the due times `due_of` it, unless they are None;
    leave of its marks those `kept`. How far that is.
    """
    found = replace(search, at=dict(search.at), done=True)
    for pair in dialect.ready_pairs(connection, [queue]):
        at = found.at.setdefault(pair.priority, now)
        later = rows.later(connection, queue, pair.priority, now=at, size=search.size)
        due = {row.id: moment for row in later if (moment := due_of(row)) is not None}
        rows.shift(connection, queue, due, 0, kept)
        found.freed += len(due)
        if len(later) == search.size:
            found.done = False
            # PostgreSQL 13 tells times of what stands by as a double: some microseconds off.
            if later[-1].due - EARLIER > at:
                found.at[pair.priority] = later[-1].due - EARLIER
            else:
                found.size *= 2  # so many have the same due time
    return found
