"""The queues that there are, those that have a message or a live subscriber; and how many messages
of one are due.
"""

from collections import Counter
from typing import NamedTuple

from sqlalchemy import Connection

from faststream_sqlbroker.core.checks import REPLY_QUEUES
from faststream_sqlbroker.core.ended import summed
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers

MAX_QUEUES = 500
"""Queues that are looked at: more would be too many series for most collections of metrics."""


class LiveQueues(NamedTuple):
    """The queues that have a message or a live subscriber."""

    names: list[str]
    subscribers: Counter[str]
    """How many live subscribers each has."""
    ended: dict[str, float]
    """Messages that ended in each a minute, as its live subscribers tell; without the queues of
    which one does not tell."""
    drained: Counter[str]
    """How many of the live subscribers an operator has drained."""


def read_live_queues(
    connection: Connection, dialect: Operations, *, walk: bool = True
) -> LiveQueues:
    """Up to `MAX_QUEUES` queues; without the `walk`, those with a live subscriber only.

    Queues of replies to requests are left out.
    """
    living = read_subscribers(connection, dialect.tables.policy_state)
    subscribers = Counter(queue for each in living for queue in each.queues)
    names = set(subscribers) | (read_queue_names(connection, dialect) if walk else set())
    ended = summed((each.queues, each.ended_per_minute) for each in living)
    drained = Counter(queue for each in living if each.drained for queue in each.queues)
    return LiveQueues(sorted(names)[:MAX_QUEUES], subscribers, ended, drained)


def read_queue_names(connection: Connection, dialect: Operations, after: str = "") -> set[str]:
    """The first `MAX_QUEUES` queues behind `after` that have a message, by name; those of replies
    to requests are left out.
    """
    # A step from each name to the next, in an index: DISTINCT would read every message.
    names = set[str]()
    for walk in ("next_queue", "next_leased_queue"):
        if not dialect.sql.has(walk):
            continue
        place: str | None = after
        for _ in range(MAX_QUEUES):
            place = connection.execute(dialect.sql[walk], {"after": place}).scalar()
            # In SQLite another program may have stored bytes, which come last: no queue is theirs.
            if not isinstance(place, str):
                break
            if not place.startswith(REPLY_QUEUES):  # a series for each process
                names.add(place)
    return names


def due_messages(connection: Connection, dialect: Operations, queue: str, most: int) -> int:
    """How many messages of `queue` are due and not leased; `most` if there are more.

    Each range is one of an index, and is left as soon as the limit is reached.
    """
    found = 0
    for pair in dialect.ready_pairs(connection, [queue]):
        if pair.due_in > 0 or found >= most:
            continue
        binds = {"queue": queue, "priority": pair.priority, "most": most - found}
        found += int(connection.execute(dialect.sql["count_due"], binds).scalar_one())
    return found
