"""Exchange of limits and rates between processes at a claim under policies.

Concurrency: if subscribers of a queue have different limits, the lowest holds; each process notes
its limit with its claims. For a limit over several queues, the budget lists the queues that have
leases. Throttle: the heartbeats of subscribers contain their rates. Each process reads limits and
rates once a second, less often where claims take long, and the limit of a shared budget at each
claim.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from sqlalchemy import Connection

from faststream_sqlbroker.core.policies import Concurrency, Throttle
from faststream_sqlbroker.core.policies.live_rates import LiveRates, SlotLogKey
from faststream_sqlbroker.core.policies.scopes import MEMBER_LIFETIME, update_members
from faststream_sqlbroker.core.policies.slot_log import Limit
from faststream_sqlbroker.core.policies.throttle import OTHER_LIMITS_LIFETIME
from faststream_sqlbroker.core.status import LiveSubscriber
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.policies.intake import Intake, get_slot_scope
from faststream_sqlbroker.database.policies.slot_use import SHARED_SLOTS

LIMITS = "limits"
"""Scope of the policy state; the key is the queue."""
KEY_LIMITS = "limits_of_keys"
"""Scope of the policy state for limits of each key; the key is the queue."""
SHARED_LEASES = "shared_leases"
"""Scope of the policy state; the key is the name of the budget."""
BUDGET_RETENTION = 365 * 24 * 60 * MEMBER_LIFETIME
"""Microseconds after which an unused budget is deleted: a year. Until then its row says where
leases may be.
"""


def exchange_limit(
    intake: Intake, policy: Concurrency, is_old: Callable[[float, float], bool]
) -> int:
    """Return the lowest limit of the subscribers that have claimed lately; needs the queue's lock.

    During a deployment, processes may have different limits for a queue. Each notes its own in the
    policy state and reads the others now and then; `is_old` says, by the time of the last read,
    whether it must read again. In between the last result holds.
    """
    by_key = bool(policy.per_key)
    limit_key = intake.queue, by_key
    now = intake.clock.monotonic()
    read_at, cached = intake.position.limits.get(limit_key, (float("-inf"), policy.limit))
    if not is_old(read_at, now):
        return cached
    scope = KEY_LIMITS if by_key else LIMITS
    info = intake.rows.load_states(scope, [intake.queue]).get(intake.queue)
    members = update_members(info, policy.limit, intake.now)
    if members.must_store:
        state = {"members": members.entries}, intake.now + MEMBER_LIFETIME
        intake.rows.save_states(scope, {intake.queue: state})
    intake.position.limits[limit_key] = now, members.min_limit
    return members.min_limit


def register_and_count_leases(intake: Intake, policy: Concurrency) -> tuple[int, int]:
    """Return the leases of the queues of the budget, and their maximum; needs the budget's lock.

    A budget is a limit that several queues share under a name. Its stored list says in which queues
    to count. A claim adds its queue before it leases anything, and a queue is removed only while it
    has no lease: so leases of a process that dies are counted.
    """
    rows = intake.rows
    now = intake.now
    name = str(policy.scope)
    info = rows.load_states(SHARED_LEASES, [name]).get(name)
    members = update_members(info, policy.limit, now)
    max_leases = members.min_limit
    listed_queues = {str(queue) for queue in (info or {}).get("queues", ())}
    leases_by_queue = {
        queue: rows.count_leases(queue, max_leases)
        for queue in sorted({*listed_queues, intake.queue})
    }
    leasing_queues = {
        queue for queue, count in leases_by_queue.items() if count or queue == intake.queue
    }
    if members.must_store or leasing_queues != listed_queues:
        state = {"queues": sorted(leasing_queues), "members": members.entries}
        rows.save_states(SHARED_LEASES, {name: (state, now + BUDGET_RETENTION)})
    return sum(leases_by_queue.values()), max_leases


def read_rates(dialect: Dialect, connection: Connection, now: int, read_at: float) -> LiveRates:
    """Read the rates from the heartbeats of live subscribers; `read_at` is this process's time.

    If processes run with different rates, the lowest applies. A subscriber whose lease runs on for
    more than a minute may have died since its heartbeat. Its rate is "uncertain": it counts only as
    long as the slots that it has taken lately.
    """
    limits: dict[SlotLogKey, set[Limit]] = defaultdict(set)
    rates = LiveRates(read_at=read_at)
    for subscriber in read_subscribers(connection, dialect.tables.policy_state):
        if subscriber.stopping:
            continue
        may_be_dead = to_microseconds(subscriber.lease_expires_at) > now + OTHER_LIMITS_LIFETIME
        for slot_key, throttle in _iter_throttles(subscriber):
            if may_be_dead:
                rates.uncertain.add(slot_key)
            else:
                limits[slot_key].add(throttle.limit)
    # If all heartbeats of a slot log are uncertain, it has no entry: then the limits that the log
    # itself names apply.
    rates.limits = dict(limits)
    return rates


def _iter_throttles(subscriber: LiveSubscriber) -> Iterator[tuple[SlotLogKey, Throttle]]:
    """Yield the throttles of a subscriber by queue, with the key of the log of each.

    A log of starts is named by scope and key; a throttle has one for each queue, or one for all
    queues of its budget.
    """
    throttles = [policy for policy in subscriber.rules if isinstance(policy, Throttle)]
    for queue in subscriber.queues:
        for n, throttle in enumerate(throttles):
            yield _get_slot_key(queue, n, throttle), throttle


def _get_slot_key(queue: str, number: int, throttle: Throttle) -> SlotLogKey:
    """Return scope and key of a throttle's slot log: the budget's or the queue's.

    `number` is the throttle's position among those of the subscriber.
    """
    if throttle.scope is not None:
        return SHARED_SLOTS, throttle.scope
    return get_slot_scope(queue, None if throttle.key else number), ""
