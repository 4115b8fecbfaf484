"""How many jobs of pull consumers are in which state, without a count of a whole table.

What has ended is in the archive, by queue and time. Of a queue with more jobs there than are
counted, all are estimated; those that failed are counted if few have failed in all queues together.
"""

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from faststream_sqlbroker.core.overview import Count, JobCounts
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.message_walks import UNCOMPLETED_STATES, ended_as
from faststream_sqlbroker.database.parts.queue_counts import (
    EXACT,
    QueueCounts,
    queue_counts,
    read_estimate,
    sample_all,
)

MOST_DEAD = 5_000
"""Archived messages of each state that are read for the dead jobs of all queues together."""
Ended = tuple[Count, Count]


def job_counts(
    connection: Connection, dialect: Operations, queues: Sequence[str]
) -> list[JobCounts]:
    """Those of each of `queues`."""
    live = queue_counts(connection, dialect, queues)
    ended = _ended(connection, dialect, queues) if dialect.has_archive else {}
    return [_counts(queue, live[queue], ended.get(queue)) for queue in queues]


def _counts(queue: str, live: QueueCounts, ended: Ended | None) -> JobCounts:
    delivered, dead = (None, None) if ended is None else ended
    return JobCounts(
        queue=queue,
        queued=live.ready,
        delayed=live.delayed,
        in_flight=live.in_flight,
        delivered=delivered,
        dead=dead,
        oldest_due_age=live.oldest_due_age,
    )


def _ended(connection: Connection, dialect: Operations, queues: Sequence[str]) -> dict[str, Ended]:
    """Delivered and dead jobs."""
    found: dict[str, Ended] = {}
    many: dict[str, tuple[int, int]] = {}
    samples = sample_all(connection, dialect, "sample_ended", [{"queue": q} for q in queues])
    for queue, (count, good) in zip(queues, samples, strict=True):
        if count <= EXACT:
            found[queue] = (Count(good), Count(count - good))
        else:
            many[queue] = (count, count - good)
    if many:
        dead, complete = _dead(connection, dialect, many)
        for queue, (count, bad) in many.items():
            answer = connection.execute(dialect.sql["estimate_ended"], {"queue": queue}).first()
            total = read_estimate(dialect.name, answer, count)
            found[queue] = _shares(total, count, bad, dead[queue], complete=complete)
    return found


def _shares(total: Count, count: int, bad: int, counted: int, *, complete: bool) -> Ended:
    """Of `total` jobs, `count` were read, `bad` of which are dead; `counted` dead ones were found
    otherwise, which are all if `complete`.
    """
    # Those that were read last stand for all.
    value = counted if complete else max(counted, total.share(bad, count))
    dead = Count(value) if complete else Count(value, "about")
    # An estimate can be below what was counted.
    good = max(total.value - value, count - bad)
    return Count(good, total.how if complete else "about"), dead


def _dead(
    connection: Connection, dialect: Operations, queues: Collection[str]
) -> tuple[dict[str, int], bool]:
    """How many of the last failed messages are of each of `queues`; whether these are all."""
    counted = dict.fromkeys(queues, 0)
    complete = True
    for state in sorted(UNCOMPLETED_STATES, key=lambda each: each.name):
        rows = connection.execute(_failed(dialect, state)).all()
        complete = complete and sum(row[1] for row in rows) <= MOST_DEAD
        for queue, count in rows:
            if queue in counted:
                counted[queue] += count
    return counted, complete


def _failed(dialect: Operations, state: MessageState) -> Any:
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - the caller has looked
    a = archive.c
    statement = select(a.queue).where(ended_as(dialect, state))
    statement = dialect.use_index(statement, archive, "uncompleted_index")
    newest = statement.order_by(a.archived_at.desc(), a.id.desc()).limit(MOST_DEAD + 1).subquery()
    return select(newest.c.queue, func.count()).group_by(newest.c.queue)
