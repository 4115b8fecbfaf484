"""Concurrency without a scope: of subscribers of a queue with different limits the lowest holds.

Each process notes its limit with its claims, and reads those of the others once a second.
"""

from collections.abc import Callable

from sqlalchemy import Connection

from faststream_sqlbroker.core.policies import Concurrency
from faststream_sqlbroker.core.policies.scopes import MEMBER_LIVES, Members, lowest_limit
from faststream_sqlbroker.database.policies.intake import Intake
from faststream_sqlbroker.database.policies.rows import PolicyRows

LIMITS = "limits"
"""Scope of the policy state; the key is the queue."""
OF_KEYS = "limits_of_keys"
"""The same for limits of each key."""


def lowest(
    rows: PolicyRows,
    connection: Connection,
    intake: Intake,
    policy: Concurrency,
    is_old: Callable[[float, float], bool],
) -> int:
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
    info = rows.states(connection, scope, [intake.queue]).get(intake.queue)
    members = Members.load(info)
    own = str(policy.limit)
    found = lowest_limit(members.live(own, intake.now))
    if members.register(own, intake.now):
        kept = {"members": members.dump(intake.now)}
        rows.keep(connection, scope, {intake.queue: (kept, intake.now + MEMBER_LIVES)})
    intake.position.limits[place] = asked, found
    return found
