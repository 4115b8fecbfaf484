"""What operators see of a queue: counts that are exact up to a limit, estimates beyond, rates.

No statement counts a whole table. What is due and what is not are two ranges of an index, for each
queue and priority. A range that has more messages than are counted is estimated by the planner,
from its statistics (PostgreSQL) or by looks into the index (MySQL, MariaDB). SQLite has no
estimates, so it counts on.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    Connection,
    Select,
    TextClause,
    case,
    func,
    literal_column,
    select,
    text,
)

from faststream_sqlbroker.core.overview import Count, How
from faststream_sqlbroker.core.rates import per_minute
from faststream_sqlbroker.database.constants import SQLITE_COUNTS
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.schema.types import MYSQL, clock, later

EXACT = 1_000
"""Messages that are counted of a queue, of each kind."""
RATED = 10_000
"""Messages that are read at most for the rates of all queues together."""
TOGETHER = 20
"""Ranges that one statement counts."""
WINDOW = 60.0
"""Seconds that rates are taken of."""
_MINUTE_AGO: Any = literal_column(str(-round(WINDOW * 1_000_000)))
_PLAN_ROWS = re.compile(r" rows=(\d+)")
_OF_RANGE = re.compile(r":(queue|priority)\b")
NONE = Count(0)


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
    pairs = dialect.ready_pairs(connection, queues)
    ranges = [{"queue": pair.queue, "priority": pair.priority} for pair in pairs]
    dues = _counts(connection, dialect, "due", ranges)
    laters = _counts(connection, dialect, "later", ranges)
    for pair, (due, retried), (later_, again) in zip(pairs, dues, laters, strict=True):
        counts = found[pair.queue]
        if pair.due_in <= 0:
            counts.oldest_due_age = max(counts.oldest_due_age, -pair.due_in)
        counts.ready += due
        counts.delayed += later_
        counts.retrying += retried + again
    held = _counts(connection, dialect, "held", [{"queue": queue} for queue in found])
    for counts, (in_flight, _) in zip(found.values(), held, strict=True):
        counts.in_flight = in_flight
    return found


def _counts(
    connection: Connection, dialect: Operations, kind: str, ranges: Sequence[Mapping[str, Any]]
) -> list[tuple[Count, Count]]:
    """The messages of each range, and those of them that had an attempt."""
    found: list[tuple[Count, Count]] = []
    samples = sample_all(connection, dialect, f"sample_{kind}", ranges)
    for binds, (count, retried) in zip(ranges, samples, strict=True):
        if count <= EXACT:
            found.append((Count(count), Count(retried)))
            continue
        answer = connection.execute(dialect.sql[f"estimate_{kind}"], binds).first()
        total = read_estimate(dialect.name, answer, count)
        # The share of those that were read stands for all.
        found.append((total, Count(total.share(retried, count), "about")))
    return found


def sample_all(
    connection: Connection, dialect: Operations, name: str, ranges: Sequence[Mapping[str, Any]]
) -> list[tuple[int, int]]:
    """What the statement `name` counts in each of `ranges`, up to one more than `EXACT`."""
    found: list[tuple[int, int]] = []
    for part in chunks(ranges, TOGETHER):
        binds: dict[str, Any] = {"most": EXACT + 1}
        for number, of_range in enumerate(part):
            binds |= {f"{bind}{number}": value for bind, value in of_range.items()}
        rows = connection.execute(_together(dialect, name, len(part)), binds)
        found += [(row[1], row[2]) for row in sorted(rows)]
    return found


def _together(dialect: Operations, name: str, count: int) -> TextClause:
    """The statement `name`, for so many ranges; each row begins with the number of its range."""

    def build() -> TextClause:
        one = dialect.sql[name].text.removeprefix("SELECT ")
        parts = [f"SELECT {n}, " + _OF_RANGE.sub(rf":\g<1>{n}", one) for n in range(count)]
        return text("\nUNION ALL\n".join(parts))

    return dialect.built(f"{name}_of_{count}", build)


def read_estimate(database: str, answer: Any, counted: int) -> Count:
    """The number of rows in an `answer` to an estimate, of which `counted` were seen."""
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
        # As text: the driver would decode JSON with the engine's own `json_deserializer`.
        return int(_PLAN_ROWS.findall(value)[0])
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
    statement = dialect.use_index(statement, archive, "archived_index")
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
