"""What a claim under policies hears of other processes, and tells them.

Concurrency: of subscribers of a queue with different limits the lowest holds; each process notes
its limit with its claims. Over several queues, a budget knows which queues have leases of it.
Throttle: the signs of life of subscribers tell of their rates. Each process reads limits and rates
once a second.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from sqlalchemy import Connection

from faststream_sqlbroker.core.policies import Concurrency, Throttle
from faststream_sqlbroker.core.policies.live_rates import LiveRates, Place
from faststream_sqlbroker.core.policies.scopes import MEMBER_LIVES, members_of
from faststream_sqlbroker.core.policies.slot_log import Limit
from faststream_sqlbroker.core.policies.throttle import OTHERS_LIVE
from faststream_sqlbroker.core.status import LiveSubscriber
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.policies.intake import Intake, slot_scope
from faststream_sqlbroker.database.policies.slot_use import SHARED_SLOTS

LIMITS = "limits"
"""Scope of the policy state; the key is the queue."""
OF_KEYS = "limits_of_keys"
"""The same for limits of each key."""
SHARED_LEASES = "shared_leases"
"""Scope of the policy state; the key is the name of the budget."""
FORGOTTEN = 365 * 24 * 60 * MEMBER_LIVES
"""Microseconds: a budget from which nothing was claimed for a year is forgotten. Until then the row
says where leases may be."""


def lowest(intake: Intake, policy: Concurrency, is_old: Callable[[float, float], bool]) -> int:
    """The lowest limit of the subscribers that have claimed lately; under the queue's lock.

    `is_old` tells of what was read at a time, by now, whether it is to be read again.
    """
    by_key = bool(policy.per_key)
    place = intake.queue, by_key
    asked = intake.clock.monotonic()
    read_at, known = intake.position.limits.get(place, (float("-inf"), policy.limit))
    if not is_old(read_at, asked):
        return known
    scope = OF_KEYS if by_key else LIMITS
    info = intake.rows.states(scope, [intake.queue]).get(intake.queue)
    members = members_of(info, policy.limit, intake.now)
    if members.must_keep:
        state = {"members": members.kept}, intake.now + MEMBER_LIVES
        intake.rows.keep(scope, {intake.queue: state})
    intake.position.limits[place] = asked, members.lowest
    return members.lowest


def shared_leases(intake: Intake, policy: Concurrency) -> tuple[int, int]:
    """How many leases the queues of the budget have, and how many they may have.

    Under the budget's lock. A claim writes its queue down before it leases anything, and a queue
    is taken off the list only while it has no lease: so a process that dies leaves none uncounted.
    """
    rows = intake.rows
    now = intake.now
    name = str(policy.scope)
    info = rows.states(SHARED_LEASES, [name]).get(name)
    members = members_of(info, policy.limit, now)
    most = members.lowest
    listed = {str(each) for each in (info or {}).get("queues", ())}
    counts = {each: rows.running(each, most) for each in sorted({*listed, intake.queue})}
    holding = {each for each, count in counts.items() if count or each == intake.queue}
    if members.must_keep or holding != listed:
        kept = {"queues": sorted(holding), "members": members.kept}
        rows.keep(SHARED_LEASES, {name: (kept, now + FORGOTTEN)})
    return sum(counts.values()), most


def read_rates(dialect: Dialect, connection: Connection, now: int, asked: float) -> LiveRates:
    """What the signs of life tell now; `asked` is this process's time."""
    found: dict[Place, set[Limit]] = defaultdict(set)
    rates = LiveRates(read_at=asked)
    for subscriber in read_subscribers(connection, dialect.tables.policy_state):
        if subscriber.stopping:
            continue
        old = to_microseconds(subscriber.lease_expires_at) > now + OTHERS_LIVE
        for place, throttle in _places(subscriber):
            if old:
                rates.unsure.add(place)
            else:
                found[place].add(throttle.limit)
    # Where only old signs are, slots tell as much.
    rates.known = dict(found)
    return rates


def _places(subscriber: LiveSubscriber) -> Iterator[tuple[Place, Throttle]]:
    throttles = [policy for policy in subscriber.rules if isinstance(policy, Throttle)]
    for queue in subscriber.queues:
        for n, throttle in enumerate(throttles):
            yield _place(queue, n, throttle), throttle


def _place(queue: str, number: int, throttle: Throttle) -> Place:
    if throttle.scope is not None:
        return SHARED_SLOTS, throttle.scope
    return slot_scope(queue, None if throttle.key else number), ""
