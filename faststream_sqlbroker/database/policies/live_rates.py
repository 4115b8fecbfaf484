"""What the signs of life of subscribers tell of their throttles; each process reads them once a
second.
"""

from collections import defaultdict
from collections.abc import Iterator

from sqlalchemy import Connection

from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.core.policies.live_rates import LiveRates, Place
from faststream_sqlbroker.core.policies.slot_log import Limit
from faststream_sqlbroker.core.policies.throttle import OTHERS_LIVE
from faststream_sqlbroker.core.status import LiveSubscriber
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers
from faststream_sqlbroker.database.policies.gates import SHARED_SLOTS
from faststream_sqlbroker.database.policies.intake import slot_scope


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
