"""What operators see of the queues: counts that are exact up to a limit, estimates beyond, rates.

No statement counts a whole table. What is due and what is not are two ranges of an index, for each
queue and priority. A range that has more messages than are counted is estimated by the planner,
from its statistics (PostgreSQL) or by looks into the index (MySQL, MariaDB). SQLite has no
estimates, so it counts on.

What has ended is in the archive, by queue and time. Of a queue with more jobs there than are
counted, all are estimated; those that failed are counted if few have failed in all queues together.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy import Connection, Select, TextClause, case, func, literal_column, select, text

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.channels import queue_of
from faststream_sqlbroker.core.ended import per_minute
from faststream_sqlbroker.core.findings import MIN_FAILING
from faststream_sqlbroker.core.overview import Count, How, JobCounts, QueueOverview
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import PausedQueue
from faststream_sqlbroker.database.constants import SQLITE_COUNTS
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts import channels
from faststream_sqlbroker.database.parts.live_queues import (
    LiveQueues,
    read_live_queues,
    read_queue_names,
)
from faststream_sqlbroker.database.parts.live_subscribers import (
    MAX_SUBSCRIBERS,
    SUBSCRIBER,
    read_pause,
    select_pauses,
)
from faststream_sqlbroker.database.parts.message_walks import UNCOMPLETED_STATES, ended_as
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.schema.types import MYSQL, clock, later

MAX_QUEUES_TOGETHER = 16
"""Queues that are counted in one transaction, so that none lasts long."""
MAX_RANGES_TOGETHER = 20
"""Ranges that one statement counts."""
PAGE_SIZE = 1_000
"""Subscribers that one statement reads for the names of their queues."""
MAX_COUNTED = 1_000
"""Messages that are counted of a queue, of each kind."""
MAX_RATED = 10_000
"""Messages that are read at most for the rates of all queues together."""
MAX_DEAD = 5_000
"""Archived messages of each state that are read for the dead jobs of all queues together."""
WINDOW = 60.0
"""Seconds that rates are taken of."""
_MINUTE_AGO: Any = literal_column(str(-round(WINDOW * 1_000_000)))
_PLAN_ROWS = re.compile(r" rows=(\d+)")
_OF_RANGE = re.compile(r":(queue|priority)\b")
NONE = Count(0)
Ended = tuple[Count, Count]
"""Delivered and dead jobs."""


@dataclass
class QueueCounts:
    """What one queue has; the fields are those of `QueueOverview`."""

    ready: Count = NONE
    delayed: Count = NONE
    in_flight: Count = NONE
    retrying: Count = NONE
    suspects: Count = NONE
    oldest_due_age: float = 0.0
    standing: Count = NONE
    standing_overdue: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Return whether the queue has no message."""
        kinds = (self.ready, self.delayed, self.in_flight, self.standing)
        return not any(kind.value for kind in kinds)


@dataclass(slots=True)
class QueueRates:
    """Messages a minute, by queue."""

    came: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] | None = None
    """None: there is no archive."""
    failed: dict[str, float] = field(default_factory=dict)
    """Those of the ended ones that are FAILED; if fewer than `MIN_FAILING` were read, so many."""


@dataclass(frozen=True, slots=True)
class _Fleet:
    """What is known of all queues."""

    names: Sequence[str]
    live: LiveQueues
    paused: dict[str, PausedQueue]
    rates: QueueRates
    pulled: frozenset[str]
    """The queues whose messages are taken over HTTP."""

    def out_per_minute(self, queue: str) -> float | None:
        """What the subscribers of `queue` tell, else what is archived; None without both."""
        archived = self.rates.ended
        if queue in self.live.ended or archived is None:
            return self.live.ended.get(queue)
        return archived.get(queue, 0.0)


class QueueOverviews:
    """Reads them; the queues are read one after the other, in several transactions.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    async def read(self, queue: str | None = None) -> list[QueueOverview]:
        """The queues that have a message, a live subscriber or a pause, by name; or `queue`.

        At most 500 queues with a message or a subscriber.
        """
        walk = queue is None
        fleet = await self._database.run(
            lambda c: self._fleet(c, walk=walk), Activity.OPERATE, write=False
        )
        names = fleet.names if queue is None else [queue]
        overviews: list[QueueOverview] = []
        for part in chunks(names, MAX_QUEUES_TOGETHER):

            def look(connection: Connection, part: Sequence[str] = part) -> list[QueueOverview]:
                counts = count_messages(connection, self._dialect, part)
                return [self._overview(connection, fleet, name, counts[name]) for name in counts]

            overviews += await self._database.run(look, Activity.OPERATE, write=False)
        return overviews

    async def jobs(self, queues: Sequence[str]) -> list[JobCounts]:
        """The jobs by state in each of `queues`, which are those of pull consumers."""
        counts: list[JobCounts] = []
        for part in chunks(queues, MAX_QUEUES_TOGETHER):
            look = partial(count_jobs, dialect=self._dialect, queues=part)
            counts += await self._database.run(look, Activity.OPERATE, write=False)
        return counts

    async def names(self, like: str, *, paused: bool = True) -> list[str]:
        """Names that `like` may be a slip of: queues with a message, a live subscriber or, if
        `paused`, a pause.

        Of those with a message the first 500, and the first 500 behind the first half of `like`.
        The queues of at most 10 000 subscribers, a thousand in each transaction.
        """

        def begin(connection: Connection) -> set[str]:
            pauses = connection.execute(select_pauses(self._table)) if paused else ()
            names = {row.key for row in pauses}
            for after in sorted({"", like[: len(like) // 2]}):
                names |= read_queue_names(connection, self._dialect, after)
            return names

        names = await self._database.run(begin, Activity.OPERATE, write=False)
        after = ""
        for _ in range(MAX_SUBSCRIBERS // PAGE_SIZE):
            # A transaction for each: one for all would hold back vacuum of the rows that every
            # heartbeat rewrites.
            page = partial(self._subscribed_queues, after=after, limit=PAGE_SIZE)
            queues, last = await self._database.run(page, Activity.OPERATE, write=False)
            names |= queues
            if last is None:
                break
            after = last
        return sorted(names)

    def _subscribed_queues(
        self, connection: Connection, after: str, limit: int
    ) -> tuple[set[str], str | None]:
        """The queues of the first `limit` live subscribers behind `after`, by name; the last of
        these subscribers, or None if none is left.
        """
        c = self._table.c
        # Along the primary key: leases have no index, so an order by them would read all each time.
        page = select(c.key, c.info).where(c.scope == SUBSCRIBER, c.key > after)
        living = page.where(c.lease_expires_at > clock()).order_by(c.key).limit(limit)
        rows = connection.execute(living).all()
        queues = {queue for row in rows for queue in (row.info or {}).get("queues", ())}
        return queues, rows[-1].key if len(rows) == limit else None

    def _fleet(self, connection: Connection, *, walk: bool) -> _Fleet:
        # One look for all queues, so that their rates are those of the same minute.
        live = read_live_queues(connection, self._dialect, walk=walk)
        paused = connection.execute(select_pauses(self._table))
        pauses = {row.key: read_pause(row) for row in paused}
        rates = read_rates(connection, self._dialect)
        pulled = {queue_of(*each) for each in channels.pulled(connection, self._table)}
        pulled |= channels.consumed_over_http(connection, self._table)
        return _Fleet(sorted({*live.names, *pauses}), live, pauses, rates, frozenset(pulled))

    def _overview(
        self, connection: Connection, fleet: _Fleet, queue: str, counts: QueueCounts
    ) -> QueueOverview:
        return QueueOverview(
            queue=queue,
            **vars(counts),
            in_per_minute=fleet.rates.came.get(queue, 0.0),
            out_per_minute=fleet.out_per_minute(queue),
            failed_per_minute=fleet.rates.failed.get(queue, 0.0),
            live_subscribers=fleet.live.subscribers[queue],
            drained_subscribers=fleet.live.drained[queue],
            paused=fleet.paused.get(queue),
            pulled=queue in fleet.pulled,
            used=not counts.is_empty or self._is_archived(connection, queue),
        )

    def _is_archived(self, connection: Connection, queue: str) -> bool:
        """Whether a message of `queue` is in the archive."""
        archive = self._database.tables.archive
        if archive is None:
            return False
        statement: Select[Any] = select(literal_column("1")).select_from(archive)
        statement = statement.where(archive.c.queue == queue)
        statement = statement.order_by(archive.c.queue, archive.c.archived_at).limit(1)
        return connection.execute(statement).first() is not None


def count_messages(
    connection: Connection, dialect: Operations, queues: Sequence[str]
) -> dict[str, QueueCounts]:
    """The live messages of each of `queues`, by state."""
    by_queue = {queue: QueueCounts() for queue in queues}
    pairs = dialect.ready_pairs(connection, queues)
    ranges = [{"queue": pair.queue, "priority": pair.priority} for pair in pairs]
    dues = _count_ranges(connection, dialect, "due", ranges)
    laters = _count_ranges(connection, dialect, "later", ranges)
    for pair, (due, retried, suspects), (later_, again) in zip(pairs, dues, laters, strict=True):
        counts = by_queue[pair.queue]
        counts.suspects += suspects
        if pair.due_in <= 0:
            counts.oldest_due_age = max(counts.oldest_due_age, -pair.due_in)
        counts.ready += due
        counts.delayed += later_
        counts.retrying += retried + again
    standing = _sample(connection, dialect, "sample_standing", ranges)
    for pair, (count, overdue) in zip(pairs, standing, strict=True):
        counts = by_queue[pair.queue]
        number = min(count, MAX_COUNTED)
        counts.standing += Count(number, "exact" if number == count else "at least")
        counts.standing_overdue = max(counts.standing_overdue, float(overdue))
    leased = _count_ranges(connection, dialect, "held", [{"queue": queue} for queue in by_queue])
    for counts, (in_flight, again, suspects) in zip(by_queue.values(), leased, strict=True):
        counts.in_flight = in_flight
        counts.retrying += again
        counts.suspects += suspects
    return by_queue


def _count_ranges(
    connection: Connection, dialect: Operations, kind: str, ranges: Sequence[Mapping[str, Any]]
) -> list[tuple[Count, ...]]:
    """The messages of each range, and those of them that had an attempt, and suspects."""
    counts: list[tuple[Count, ...]] = []
    samples = _sample(connection, dialect, f"sample_{kind}", ranges)
    for binds, (count, *parts) in zip(ranges, samples, strict=True):
        if count <= MAX_COUNTED:
            counts.append((Count(count), *map(Count, parts)))
            continue
        answer = connection.execute(dialect.sql[f"estimate_{kind}"], binds).first()
        total = _read_estimate(dialect.name, answer, count)
        # The share of those that were read stands for all.
        shares = [Count(total.share(part, count), "about") for part in parts]
        counts.append((total, *shares))
    return counts


def _sample(
    connection: Connection, dialect: Operations, name: str, ranges: Sequence[Mapping[str, Any]]
) -> list[Sequence[int]]:
    """What the statement `name` counts in each of `ranges`, up to one more than `MAX_COUNTED`, and
    what else it tells.
    """
    samples: list[Sequence[int]] = []
    for part in chunks(ranges, MAX_RANGES_TOGETHER):
        binds: dict[str, Any] = {"most": MAX_COUNTED + 1}
        for number, of_range in enumerate(part):
            binds |= {f"{bind}{number}": value for bind, value in of_range.items()}
        rows = connection.execute(_together(dialect, name, len(part)), binds)
        samples += [row[1:] for row in sorted(rows)]
    return samples


def _together(dialect: Operations, name: str, count: int) -> TextClause:
    """The statement `name`, for so many ranges; each row begins with the number of its range."""

    def build() -> TextClause:
        single = dialect.sql[name].text.removeprefix("SELECT ")
        parts = [f"SELECT {n}, " + _OF_RANGE.sub(rf":\g<1>{n}", single) for n in range(count)]
        return text("\nUNION ALL\n".join(parts))

    return dialect.built(f"{name}_of_{count}", build)


def _read_estimate(database: str, answer: Any, counted: int) -> Count:
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


def read_rates(connection: Connection, dialect: Operations) -> QueueRates:
    """What came into each queue and what ended there, in the last minute.

    Of more than `MAX_RATED` messages the newest are read, and the rates are those of their time.
    """
    rates = QueueRates()
    c = dialect.tables.message.c
    # By id, of which there is an index: ids are drawn in the order of creation, nearly.
    newest = select(c.queue, c.created_at).order_by(c.id.desc()).limit(MAX_RATED).subquery()
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
    statement = select(a.queue, a.created_at, a.archived_at, a.state)
    statement = dialect.use_index(statement, archive, "archived_index")
    ended = (
        statement.where(a.archived_at > later(_MINUTE_AGO))
        .order_by(a.archived_at.desc(), a.id.desc())
        .limit(MAX_RATED)
        .subquery()
    )
    fresh = func.sum(case((ended.c.created_at > later(_MINUTE_AGO), 1), else_=0))
    failed = func.sum(case((ended.c.state == MessageState.FAILED.name, 1), else_=0))
    grouped = select(
        ended.c.queue, func.count(), func.min(ended.c.archived_at), clock(), fresh, failed
    ).group_by(ended.c.queue)
    rows = connection.execute(grouped).all()
    seconds = _seconds(rows)
    rates.ended = {queue: per_minute(count, seconds=seconds) for queue, count, *_ in rows}
    for queue, _, _, _, new, bad in rows:
        # Of few, the rate of a moment says nothing of a minute.
        window = seconds if bad >= MIN_FAILING else WINDOW
        rates.failed[queue] = per_minute(int(bad), seconds=window)
        came = rates.came.get(queue, 0.0) + per_minute(int(new), seconds=seconds)
        rates.came[queue] = round(came, 1)


def _seconds(rows: Sequence[Any]) -> float:
    """The time that `rows` (queue, count, first moment, now) cover: a minute, or less if there were
    more messages than are read.
    """
    if sum(row[1] for row in rows) < MAX_RATED:
        return WINDOW
    return float((rows[0][3] - min(row[2] for row in rows)).total_seconds())


def count_jobs(
    connection: Connection, dialect: Operations, queues: Sequence[str]
) -> list[JobCounts]:
    """The jobs of pull consumers in each of `queues`, by state."""
    live = count_messages(connection, dialect, queues)
    ended = _count_ended(connection, dialect, queues) if dialect.has_archive else {}
    counts: list[JobCounts] = []
    for queue in queues:
        delivered, dead = ended.get(queue, (None, None))
        counts.append(
            JobCounts(
                queue=queue,
                queued=live[queue].ready,
                delayed=live[queue].delayed,
                in_flight=live[queue].in_flight,
                delivered=delivered,
                dead=dead,
                oldest_due_age=live[queue].oldest_due_age,
            )
        )
    return counts


def _count_ended(
    connection: Connection, dialect: Operations, queues: Sequence[str]
) -> dict[str, Ended]:
    ended: dict[str, Ended] = {}
    many: dict[str, tuple[int, int]] = {}
    samples = _sample(connection, dialect, "sample_ended", [{"queue": q} for q in queues])
    for queue, (count, good) in zip(queues, samples, strict=True):
        if count <= MAX_COUNTED:
            ended[queue] = (Count(good), Count(count - good))
        else:
            many[queue] = (count, count - good)
    if many:
        dead, complete = _count_dead(connection, dialect, many)
        for queue, (count, bad) in many.items():
            answer = connection.execute(dialect.sql["estimate_ended"], {"queue": queue}).first()
            total = _read_estimate(dialect.name, answer, count)
            ended[queue] = _shares(total, count, bad, dead[queue], complete=complete)
    return ended


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


def _count_dead(
    connection: Connection, dialect: Operations, queues: Collection[str]
) -> tuple[dict[str, int], bool]:
    """How many of the last failed messages are of each of `queues`; whether these are all."""
    counts = dict.fromkeys(queues, 0)
    complete = True
    for state in sorted(UNCOMPLETED_STATES, key=lambda state: state.name):
        rows = connection.execute(_select_failed(dialect, state)).all()
        complete = complete and sum(row[1] for row in rows) <= MAX_DEAD
        for queue, count in rows:
            if queue in counts:
                counts[queue] += count
    return counts, complete


def _select_failed(dialect: Operations, state: MessageState) -> Select[Any]:
    archive = dialect.tables.archive
    assert archive is not None  # noqa: S101 - the caller has looked
    a = archive.c
    statement = select(a.queue).where(ended_as(dialect, state))
    statement = dialect.use_index(statement, archive, "uncompleted_index")
    newest = statement.order_by(a.archived_at.desc(), a.id.desc()).limit(MAX_DEAD + 1).subquery()
    return select(newest.c.queue, func.count()).group_by(newest.c.queue)
