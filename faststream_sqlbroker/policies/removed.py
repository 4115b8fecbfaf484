"""What waited for a policy that no live subscriber of its queue has is freed.

Delay, bursts and throttles that refuse give messages a later due time. It says nothing any more
when a deployment has taken the policy away. Which policies may have put messages off is noted by
their claims, once in each process; the marks of a message say whose its due time is.

Times are microseconds since 1970.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.policies.holds import freed_at, holds_of, mark_of
from faststream_sqlbroker.core.policies.options import CLOCK_STEP
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.dialects.base import Dialect
from faststream_sqlbroker.dialects.live_subscribers import read_subscribers
from faststream_sqlbroker.dialects.policy_holds import (
    HOLDS,
    KEPT,
    Hold,
    forget_hold,
    read_holds,
)
from faststream_sqlbroker.policies.intake import Intake
from faststream_sqlbroker.policies.rows import PolicyRows

RENEWED = 15.0
"""Seconds after which a claim notes it again."""
LIVES = 60 * 1_000_000
"""So long after such a note a policy is not gone (microseconds), though no subscriber tells of it:
its heartbeat may have failed."""
STEP = 2_000
"""Messages that one transaction looks at."""


@dataclass
class Freeing:
    """How far one search has come, and what it has found."""

    at: dict[int, int] = field(default_factory=dict)
    """By priority, the due time after which messages have not been looked at."""
    size: int = STEP
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
    ahead = {name for name in known if known[name].get("seen", 0) > intake.now + CLOCK_STEP}
    found = {
        name: ({**info, "seen": intake.now}, intake.now + KEPT)
        for name, info in holds.items()
        if name not in ahead
    }
    intake.rows.keep(intake.connection, scope, found)


def holds_to_end(dialect: Dialect, queues: Sequence[str], connection: Connection) -> list[Hold]:
    """What may have put messages of `queues` off, and no live subscriber has any more; and what did
    so before the database's clock was set back (`Hold.ahead`).
    """
    found = read_holds(connection, dialect.tables.policy_state, queues)
    ahead = [hold for hold in found if hold.ahead]
    old = [hold for hold in found if hold.seen + LIVES < to_microseconds(hold.now)]
    if not old:
        return ahead
    live = _live(dialect, connection)
    return ahead + [hold for hold in old if hold.name not in holds_of(live.get(hold.queue, ()))]


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
    found = replace(search, at=dict(search.at), done=True)
    rows = PolicyRows(dialect)
    now = rows.now(connection, clock).now
    mark = mark_of(hold.name)
    for pair in dialect.ready_pairs(connection, [hold.queue]):
        at = found.at.setdefault(pair.priority, now)
        later = rows.later(connection, hold.queue, pair.priority, now=at, size=search.size)
        held = [each for each in later if each.marks & mark]
        due = {each.id: freed_at(hold.name, hold.info, live, each.due, now) for each in held}
        freed = {message: moment for message, moment in due.items() if moment is not None}
        rows.shift(connection, hold.queue, freed, 0, ~mark)
        found.freed += len(freed)
        if len(later) == search.size:
            found.done = False
            if later[-1].due - 1 > at:
                found.at[pair.priority] = later[-1].due - 1
            else:
                found.size *= 2  # so many have the same due time
    if found.done:
        forget_hold(connection, dialect.tables.policy_state, hold)
    return found
