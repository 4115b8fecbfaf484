"""What waits in each queue, for metrics.

No statement counts a whole table. The names of the queues are found by a step from each to the
next. The messages of a queue and a priority are two ranges of an index, those that are due and
those that are not; each is counted up to a limit.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection

from faststream_sqlbroker.core.checks import REPLY_QUEUES
from faststream_sqlbroker.core.metrics import QueueState
from faststream_sqlbroker.core.rates import summed
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers

MOST_COUNTED = 100_000
"""Messages that are counted of a queue, of each kind: some 20 ms each."""
MOST_QUEUES = 500
"""Queues that are looked at: more would be too many series for most collections of metrics."""


class LiveQueues(NamedTuple):
    """The queues that have a message or a live subscriber."""

    names: list[str]
    live: Counter[str]
    """How many live subscribers each has."""
    ended: dict[str, float]
    """Messages that ended in each a minute, as its live subscribers tell; without the queues of
    which one does not tell."""
    drained: Counter[str]
    """How many of the live subscribers an operator has drained."""


def live_queues(connection: Connection, dialect: Operations, *, walk: bool = True) -> LiveQueues:
    """Up to `MOST_QUEUES` queues; without the `walk`, those with a live subscriber only.

    Queues of replies to requests are left out.
    """
    living = read_subscribers(connection, dialect.tables.policy_state)
    live = Counter(queue for each in living for queue in each.queues)
    names = set(live) | (queues_with_messages(connection, dialect) if walk else set())
    ended = summed((each.queues, each.ended_per_minute) for each in living)
    drained = Counter(queue for each in living if each.drained for queue in each.queues)
    return LiveQueues(sorted(names)[:MOST_QUEUES], live, ended, drained)


def queues_with_messages(connection: Connection, dialect: Operations, after: str = "") -> set[str]:
    """The first `MOST_QUEUES` queues behind `after` that have a message, by name; those of replies
    to requests are left out.
    """
    # A step from each name to the next, in an index: DISTINCT would read every message.
    names = set[str]()
    for walk in ("next_queue", "next_leased_queue"):
        if not dialect.sql.has(walk):
            continue
        place: str | None = after
        for _ in range(MOST_QUEUES):
            place = connection.execute(dialect.sql[walk], {"after": place}).scalar()
            # In SQLite another program may have stored bytes, which come last: no queue is theirs.
            if not isinstance(place, str):
                break
            if not place.startswith(REPLY_QUEUES):  # a series for each process
                names.add(place)
    return names


def queue_states(
    connection: Connection, dialect: Operations, queues: Sequence[str], live: Counter[str]
) -> list[QueueState]:
    """The state of each of `queues`, whose live subscribers are counted in `live`."""
    ready = Counter[str]()
    delayed = Counter[str]()
    oldest = dict[str, float]()
    for pair in dialect.ready_pairs(connection, queues):
        queue = pair.queue
        if pair.due_in <= 0:
            oldest[queue] = max(oldest.get(queue, 0.0), -pair.due_in)
        binds = {
            "queue": queue,
            "priority": pair.priority,
            "most_due": MOST_COUNTED - ready[queue],
            "most_later": MOST_COUNTED - delayed[queue],
        }
        due, later = connection.execute(dialect.sql["count_waiting"], binds).one()
        ready[queue] += due
        delayed[queue] += later
    states = []
    for queue in queues:
        binds = {"queue": queue, "most": MOST_COUNTED}
        held = connection.execute(dialect.sql["count_leased"], binds).scalar_one()
        age = oldest.get(queue, 0.0)
        states.append(QueueState(queue, ready[queue], delayed[queue], held, age, live[queue]))
    return states
