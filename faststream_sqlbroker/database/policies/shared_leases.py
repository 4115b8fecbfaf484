"""Concurrency over several queues: which queues have leases of a budget, and how many."""

from sqlalchemy import Connection

from faststream_sqlbroker.core.policies import Concurrency
from faststream_sqlbroker.core.policies.scopes import MEMBER_LIVES, Members, lowest_limit
from faststream_sqlbroker.database.policies.rows import PolicyRows

SHARED_LEASES = "shared_leases"
"""Scope of the policy state; the key is the name of the budget."""
FORGOTTEN = 365 * 24 * 60 * MEMBER_LIVES
"""Microseconds: a budget from which nothing was claimed for a year is forgotten. Until then the row
says where leases may be."""


def shared_leases(
    rows: PolicyRows, connection: Connection, policy: Concurrency, queue: str, now: int
) -> tuple[int, int]:
    """How many leases the queues of the budget have, and how many they may have.

    Under the budget's lock. A claim writes its queue down before it leases anything, and a queue
    is taken off the list only while it has no lease: so a process that dies leaves none uncounted.
    """
    name = str(policy.scope)
    info = rows.states(connection, SHARED_LEASES, [name]).get(name)
    members = Members.load(info)
    own = str(policy.limit)
    most = lowest_limit(members.live(own, now))
    listed = {str(each) for each in (info or {}).get("queues", ())}
    counts = {each: rows.running(connection, each, most) for each in sorted(listed | {queue})}
    holding = {each for each, count in counts.items() if count or each == queue}
    if members.register(own, now) or holding != listed:
        kept = {"queues": sorted(holding), "members": members.dump(now)}
        rows.keep(connection, SHARED_LEASES, {name: (kept, now + FORGOTTEN)})
    return sum(counts.values()), most
