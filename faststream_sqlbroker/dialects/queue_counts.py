"""What operators see of a queue: counts that are exact up to a limit, estimates beyond, rates.

No statement counts a whole table. What is due and what is not are two ranges of an index, for each
queue and priority. A range that has more messages than are counted is estimated by the planner,
from its statistics (PostgreSQL) or by looks into the index (MySQL, MariaDB). SQLite has no
estimates, so it counts on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Select, case, func, literal_column, select

from faststream_sqlbroker.core.overview import Count, How
from faststream_sqlbroker.core.rates import per_minute
from faststream_sqlbroker.core.states import CLAIMABLE_STATES, MessageState
from faststream_sqlbroker.dialects.operations import Operations
from faststream_sqlbroker.schema.types import MYSQL, clock, later

EXACT = 1_000
"""Messages that are counted of a queue, of each kind."""
SQLITE_COUNTS = 500_000
"""Where SQLite stops to count: some 100 ms."""
RATED = 10_000
"""Messages that are read at most for the rates of all queues together."""
WINDOW = 60.0
"""Seconds that rates are taken of."""
_MINUTE_AGO: Any = literal_column(str(-round(WINDOW * 1_000_000)))
_SAMPLE = (
    "SELECT count(*), count(CASE WHEN state = 'RETRYABLE' THEN 1 END)\n"
    "FROM (SELECT state FROM {message}{hint} WHERE {of} ORDER BY {order} LIMIT :most) AS found"
)
# In the order of the index: else PostgreSQL may read the table from its begin, in the hope of many
# messages of the queue, and so messages of other queues without a limit.
ESTIMATE = {
    "postgresql": "EXPLAIN (FORMAT JSON) SELECT 1 FROM {table} WHERE {of}",
    "sqlite": "SELECT count(*) FROM (SELECT 1 FROM {table} WHERE {of} LIMIT "
    f"{SQLITE_COUNTS}) AS found",
    # Without a hint: with one, MySQL does not look into the index.
    **dict.fromkeys(MYSQL, "EXPLAIN FORMAT=TRADITIONAL SELECT 1 FROM {table} WHERE {of}"),
}
"""By database, of the rows `{of}` in `{table}`; `estimated` reads the answer."""
NONE = Count(0)
KINDS = ("due", "later", "held")


def add_queue_counts(dialect: Operations, now: str) -> None:
    """Add the statements to `dialect`; `now` is its clock."""
    states = ", ".join(f"'{s.name}'" for s in MessageState if s in CLAIMABLE_STATES)
    # Written out, not bound: partial indexes serve only conditions that name their own.
    claimable = f"state IN ({states})"
    leased = f"state = '{MessageState.PROCESSING.name}'"
    ready_hint = leased_hint = ""
    if dialect.name in MYSQL:
        ready_hint = " FORCE INDEX ({ready_index})".format(**dialect.names)
        leased_hint = " FORCE INDEX ({leased_index})".format(**dialect.names)
        claimable = "claimable = 1"
        leased = "lease_expires_at IS NOT NULL"
    pair = f"{claimable} AND queue = :queue AND priority = :priority AND next_attempt_at"
    ranges = (
        (ready_hint, f"{pair} <= {now}", "next_attempt_at"),
        (ready_hint, f"{pair} > {now}", "next_attempt_at"),
        (leased_hint, f"queue = :queue AND {leased}", "lease_expires_at"),
    )
    for kind, (hint, of, order) in zip(KINDS, ranges, strict=True):
        dialect.add_statement(f"sample_{kind}", _SAMPLE, hint=hint, of=of, order=order)
        table = dialect.names["message"]
        dialect.add_statement(f"estimate_{kind}", ESTIMATE[dialect.name], table=table, of=of)


@dataclass(slots=True)
class QueueCounts:
    """What one queue has."""

    ready: Count = NONE
    delayed: Count = NONE
    in_flight: Count = NONE
    retrying: Count = NONE
    oldest_due_age: float = 0.0


def queue_counts(
    connection: Connection, dialect: Operations, queues: Sequence[str]
) -> dict[str, QueueCounts]:
    """The counts of each of `queues`."""
    found = {queue: QueueCounts() for queue in queues}
    for pair in dialect.ready_pairs(connection, queues):
        counts = found[pair.queue]
        if pair.due_in <= 0:
            counts.oldest_due_age = max(counts.oldest_due_age, -pair.due_in)
        binds = {"queue": pair.queue, "priority": pair.priority}
        due, retried = _count(connection, dialect, "due", binds)
        later_, again = _count(connection, dialect, "later", binds)
        counts.ready += due
        counts.delayed += later_
        counts.retrying += retried + again
    for queue, counts in found.items():
        counts.in_flight, _ = _count(connection, dialect, "held", {"queue": queue})
    return found


def _count(
    connection: Connection, dialect: Operations, kind: str, binds: dict[str, Any]
) -> tuple[Count, Count]:
    """The messages of a range, and those of them that had an attempt."""
    sample = connection.execute(dialect.sql[f"sample_{kind}"], {**binds, "most": EXACT + 1}).one()
    count, retried = sample
    if count <= EXACT:
        return Count(count), Count(retried)
    answer = connection.execute(dialect.sql[f"estimate_{kind}"], binds).one()
    total = estimated(dialect.name, answer, count)
    # The share of those that were read stands for all.
    return total, Count(total.share(retried, count), "about")


def estimated(database: str, answer: Any, counted: int) -> Count:
    """The number of rows in an `answer` to `ESTIMATE`, of which `counted` were seen."""
    # Statistics may be old: there are at least those that were counted.
    value = max(counted, _rows_of(database, answer))
    how: How = "about"
    if database == "sqlite":
        how = "exact" if value < SQLITE_COUNTS else "at least"
    return Count(value, how)


def _rows_of(database: str, answer: Any) -> int:
    """The number of rows in an answer to EXPLAIN."""
    if database in MYSQL:
        return int(answer._mapping["rows"] or 0)  # noqa: SLF001 - the column's name is a method's
    value = answer[0]
    if database == "postgresql":
        plan = json.loads(value) if isinstance(value, str) else value
        return int(plan[0]["Plan"]["Plan Rows"])
    return int(value)


@dataclass(slots=True)
class QueueRates:
    """Messages a minute, by queue."""

    came: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] | None = None
    """None: there is no archive."""


def queue_rates(connection: Connection, dialect: Operations) -> QueueRates:
    """What came into each queue and what ended there, in the last minute.

    Of more than `RATED` messages the newest are read, and the rates are those of their time.
    """
    rates = QueueRates()
    c = dialect.tables.message.c
    # By id, of which there is an index: ids are drawn in the order of creation, nearly.
    newest = select(c.queue, c.created_at).order_by(c.id.desc()).limit(RATED).subquery()
    since = newest.c.created_at
    statement = select(newest.c.queue, func.count(), func.min(since), clock())
    rows = connection.execute(
        statement.where(since > later(_MINUTE_AGO)).group_by(newest.c.queue)
    ).all()
    seconds = _seconds(rows)
    rates.came = {queue: per_minute(count, seconds=seconds) for queue, count, *_ in rows}
    if dialect.tables.archive is not None:
        _add_ended(connection, dialect, rates)
    return rates


def _add_ended(connection: Connection, dialect: Operations, rates: QueueRates) -> None:
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - the caller has looked
    a = archive.c
    statement = select(a.queue, a.created_at, a.archived_at)
    for database in MYSQL:
        index = dialect.names["archived_index"]
        statement = statement.with_hint(archive, f"FORCE INDEX ({index})", database)
    ended = (
        statement.where(a.archived_at > later(_MINUTE_AGO))
        .order_by(a.archived_at.desc(), a.id.desc())
        .limit(RATED)
        .subquery()
    )
    fresh = func.sum(case((ended.c.created_at > later(_MINUTE_AGO), 1), else_=0))
    grouped = select(
        ended.c.queue, func.count(), func.min(ended.c.archived_at), clock(), fresh
    ).group_by(ended.c.queue)
    rows = connection.execute(grouped).all()
    seconds = _seconds(rows)
    rates.ended = {queue: per_minute(count, seconds=seconds) for queue, count, *_ in rows}
    for queue, _, _, _, new in rows:
        came = rates.came.get(queue, 0.0) + per_minute(int(new), seconds=seconds)
        rates.came[queue] = round(came, 1)


def _seconds(rows: Sequence[Any]) -> float:
    """The time that `rows` (queue, count, first moment, now) cover: a minute, or less if there were
    more messages than are read.
    """
    if sum(row[1] for row in rows) < RATED:
        return WINDOW
    return float((rows[0][3] - min(row[2] for row in rows)).total_seconds())


def ever_used(connection: Connection, dialect: Operations, queue: str) -> bool:
    """Whether a message of `queue` is archived; the caller knows of live ones."""
    archive = dialect.tables.archive
    if archive is None:
        return False
    statement: Select[Any] = select(literal_column("1")).select_from(archive)
    statement = statement.where(archive.c.queue == queue)
    statement = statement.order_by(archive.c.queue, archive.c.archived_at).limit(1)
    return connection.execute(statement).first() is not None
