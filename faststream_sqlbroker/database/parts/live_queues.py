"""Queues that have a message or a live subscriber, and the number of due messages of a queue."""

from collections import Counter
from typing import NamedTuple

from sqlalchemy import Connection

from faststream_sqlbroker.core.checks import REPLY_QUEUES
from faststream_sqlbroker.core.ended import sum_rates
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.live_subscribers import read_subscribers

MAX_QUEUES = 500
"""Maximum queues in the result: more would be too many series for most collections of metrics."""


class LiveQueues(NamedTuple):
    """The queues that have a message or a live subscriber."""

    names: list[str]
    subscribers: Counter[str]
    """Number of live subscribers by queue."""
    ended_per_minute: dict[str, float]
    """Ended messages a minute by queue, as reported by live subscribers. Queues with a subscriber
    that reports no rate are omitted.
    """
    drained: Counter[str]
    """Number of live subscribers by queue that an operator has drained."""


def read_live_queues(
    connection: Connection, dialect: DialectOperations, *, walk: bool = True
) -> LiveQueues:
    """Return up to `MAX_QUEUES` queues that have a message or a live subscriber.

    Without `walk`, only queues with a live subscriber: the search for other names takes a statement
    for each. Reply queues, one for each process, are omitted.
    """
    registered = read_subscribers(connection, dialect.tables.policy_state)
    subscribers = Counter(queue for subscriber in registered for queue in subscriber.queues)
    names = set(subscribers) | (read_queue_names(connection, dialect) if walk else set())
    ended_per_minute = sum_rates(
        (subscriber.queues, subscriber.ended_per_minute) for subscriber in registered
    )
    drained = Counter(
        queue for subscriber in registered if subscriber.drained for queue in subscriber.queues
    )
    return LiveQueues(sorted(names)[:MAX_QUEUES], subscribers, ended_per_minute, drained)


def read_queue_names(
    connection: Connection, dialect: DialectOperations, after: str = ""
) -> set[str]:
    """Return the first `MAX_QUEUES` queues after `after` that have a message, by name.

    Reply queues are omitted. Some databases have separate indexes for waiting and leased messages,
    and each is searched.
    """
    # Step from each name to the next in an index: DISTINCT would read every message.
    names = set[str]()
    for statement_name in ("next_queue", "next_leased_queue"):
        if not dialect.sql.has(statement_name):
            continue
        name: str | None = after
        for _ in range(MAX_QUEUES):
            name = connection.execute(dialect.sql[statement_name], {"after": name}).scalar()
            # In SQLite another program may have stored bytes, which sort last and name no queue.
            if not isinstance(name, str):
                break
            if not name.startswith(REPLY_QUEUES):  # would be a series for each process
                names.add(name)
    return names


def count_due(connection: Connection, dialect: DialectOperations, queue: str, maximum: int) -> int:
    """Count the messages of `queue` that are due and not leased, up to `maximum`.

    Each range is in an index, and the scan stops as soon as the limit is reached.
    """
    count = 0
    for pair in dialect.find_ready_pairs(connection, [queue]):
        if pair.due_in > 0 or count >= maximum:
            continue
        binds = {"queue": queue, "priority": pair.priority, "most": maximum - count}
        count += int(connection.execute(dialect.sql["count_due"], binds).scalar_one())
    return count
