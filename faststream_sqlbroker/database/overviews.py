"""The queues as operators see them: counts that are exact up to a limit, estimates above it, rates.

No statement counts a whole table. Due and later messages are two ranges of an index, for each
queue and priority. A range with more messages than are counted is estimated by the planner,
from its statistics (PostgreSQL) or by index dives (MySQL, MariaDB). SQLite has no estimates, so it
counts on.

Finished messages are in the archive, by queue and time. Of a queue with more jobs there than are
counted, all are estimated; failed jobs are counted if few have failed in all queues together.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy import Connection, Select, TextClause, case, func, literal_column, select, text

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.channels import build_queue_name
from faststream_sqlbroker.core.ended import compute_rate
from faststream_sqlbroker.core.findings import MIN_FAILING
from faststream_sqlbroker.core.overview import Count, CountKind, JobCounts, QueueOverview
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import PausedQueue
from faststream_sqlbroker.database.constants import MAX_SQLITE_COUNT
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts import channel_rows
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
from faststream_sqlbroker.database.parts.message_walks import UNCOMPLETED_STATES, match_ended_state
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.schema.types import MYSQL, clock, later

MAX_QUEUES_TOGETHER = 16
"""Queues that are counted in one transaction, so that none lasts long."""
MAX_RANGES_TOGETHER = 20
"""Ranges that one statement counts."""
PAGE_SIZE = 1_000
"""Subscribers that one statement reads for the names of their queues."""
MAX_COUNTED = 1_000
"""Messages of each state that are counted in a queue."""
MAX_RATED = 10_000
"""Maximum messages that are read for the rates of all queues together."""
MAX_DEAD = 5_000
"""Archived messages of each state that are read for the dead jobs of all queues together."""
WINDOW = 60.0
"""Seconds that rates are measured over."""
_MINUTE_AGO: Any = literal_column(str(-round(WINDOW * 1_000_000)))
_PLAN_ROWS = re.compile(r" rows=(\d+)")
_RANGE_BINDS = re.compile(r":(queue|priority)\b")
ZERO = Count(0)
FinishedJobCounts = tuple[Count, Count]
"""Delivered and dead jobs."""


@dataclass
class QueueCounts:
    """The message counts of a queue, with the field names of `QueueOverview`."""

    ready: Count = ZERO
    delayed: Count = ZERO
    in_flight: Count = ZERO
    retrying: Count = ZERO
    suspects: Count = ZERO
    oldest_due_age: float = 0.0
    standing: Count = ZERO
    standing_overdue: float = 0.0

    @property
    def is_empty(self) -> bool:
        """True if the queue has no message."""
        counts = (self.ready, self.delayed, self.in_flight, self.standing)
        return not any(count.value for count in counts)


@dataclass(slots=True)
class QueueRates:
    """Messages a minute, by queue."""

    published: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] | None = None
    """None if there is no archive."""
    failed: dict[str, float] = field(default_factory=dict)
    """Ended messages that are FAILED; their number if fewer than `MIN_FAILING` were read."""


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The state read once for all queues of an overview."""

    names: Sequence[str]
    live: LiveQueues
    paused: dict[str, PausedQueue]
    rates: QueueRates
    pulled: frozenset[str]
    """The queues whose messages are fetched over HTTP."""

    def get_out_per_minute(self, queue: str) -> float | None:
        """Return how many messages of `queue` ended in the last minute; None if unknown.

        Subscribers report their own rate. Without them the archive's is used, which is less exact.
        """
        ended_rates = self.rates.ended
        if queue in self.live.ended_per_minute or ended_rates is None:
            return self.live.ended_per_minute.get(queue)
        return ended_rates.get(queue, 0.0)


class QueueOverviews(StoreSubject):
    """Overviews of queues, which are read in several transactions.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    async def read_overviews(self, queue: str | None = None) -> list[QueueOverview]:
        """Read the queues with a message, a live subscriber or a pause, by name; or only `queue`.

        At most 500 queues with a message or a subscriber.
        """
        list_queues = queue is None
        fleet = await self._database.run(
            lambda c: self._read_fleet(c, list_queues=list_queues), Activity.OPERATE, write=False
        )
        names = fleet.names if queue is None else [queue]
        overviews: list[QueueOverview] = []
        for part in iter_chunks(names, MAX_QUEUES_TOGETHER):
            # The default value keeps this round's `part`.
            def read_part(
                connection: Connection, part: Sequence[str] = part
            ) -> list[QueueOverview]:
                counts = count_messages(connection, self._dialect, part)
                return [
                    self._build_overview(connection, fleet, name, counts[name]) for name in counts
                ]

            overviews += await self._database.run(read_part, Activity.OPERATE, write=False)
        return overviews

    async def count_jobs(self, queues: Sequence[str]) -> list[JobCounts]:
        """Count the jobs by state in each of `queues` of pull consumers.

        Several transactions of a few queues each, so that none lasts long.
        """
        counts: list[JobCounts] = []
        for part in iter_chunks(queues, MAX_QUEUES_TOGETHER):
            count_part = partial(count_jobs, dialect=self._dialect, queues=part)
            counts += await self._database.run(count_part, Activity.OPERATE, write=False)
        return counts

    async def find_names(self, like: str, *, paused: bool = True) -> list[str]:
        """Find queue names that `like` may be a misspelling of.

        These are queues with a message, a live subscriber or, if `paused`, a pause. Of the queues
        with a message the first 500 are read, and the first 500 after the first half of `like`; of
        subscribers the first 10 000, a thousand in each transaction.
        """

        def read_known_names(connection: Connection) -> set[str]:
            pauses = connection.execute(select_pauses(self._table)) if paused else ()
            names = {row.key for row in pauses}
            for start in sorted({"", like[: len(like) // 2]}):
                names |= read_queue_names(connection, self._dialect, start)
            return names

        names = await self._database.run(read_known_names, Activity.OPERATE, write=False)
        last_key = ""
        for _ in range(MAX_SUBSCRIBERS // PAGE_SIZE):
            # Use a transaction for each page: a long transaction would hold back vacuum of the rows
            # that every heartbeat rewrites.
            page = partial(self._read_subscribed_queues, after=last_key, limit=PAGE_SIZE)
            queues, last = await self._database.run(page, Activity.OPERATE, write=False)
            names |= queues
            if last is None:
                break
            last_key = last
        return sorted(names)

    def _read_subscribed_queues(
        self, connection: Connection, after: str, limit: int
    ) -> tuple[set[str], str | None]:
        """Read the queues of the first `limit` live subscribers after `after`, by name.

        Returns:
            The queues, and the name to continue after, None if this was the last page.
        """
        c = self._table.c
        # Read in the order of the primary key: leases have no index, so sorting by them would read
        # all rows each time.
        page = select(c.key, c.info).where(c.scope == SUBSCRIBER, c.key > after)
        live = page.where(c.lease_expires_at > clock()).order_by(c.key).limit(limit)
        rows = connection.execute(live).all()
        queues = {queue for row in rows for queue in (row.info or {}).get("queues", ())}
        return queues, rows[-1].key if len(rows) == limit else None

    def _read_fleet(self, connection: Connection, *, list_queues: bool) -> _Fleet:
        """Read the state that the overviews of all queues share, in a single transaction.

        `pulled` are queues read over HTTP, whose readers are no live subscribers. Without
        `list_queues`, the queues that have messages are not searched.
        """
        # Read all queues at once, so that their rates are those of the same minute.
        live = read_live_queues(connection, self._dialect, walk=list_queues)
        paused = connection.execute(select_pauses(self._table))
        pauses = {row.key: read_pause(row) for row in paused}
        rates = read_rates(connection, self._dialect)
        pulled = {
            build_queue_name(*consumer)
            for consumer in channel_rows.list_pull_consumers(connection, self._table)
        }
        pulled |= channel_rows.list_http_queues(connection, self._table)
        return _Fleet(sorted({*live.names, *pauses}), live, pauses, rates, frozenset(pulled))

    def _build_overview(
        self, connection: Connection, fleet: _Fleet, queue: str, counts: QueueCounts
    ) -> QueueOverview:
        """Combine the message counts of `queue` with the rates, subscribers and pause.

        `fleet` was read once for all queues.
        """
        return QueueOverview(
            queue=queue,
            **vars(counts),
            in_per_minute=fleet.rates.published.get(queue, 0.0),
            out_per_minute=fleet.get_out_per_minute(queue),
            failed_per_minute=fleet.rates.failed.get(queue, 0.0),
            live_subscribers=fleet.live.subscribers[queue],
            drained_subscribers=fleet.live.drained[queue],
            paused=fleet.paused.get(queue),
            pulled=queue in fleet.pulled,
            used=not counts.is_empty or self._is_archived(connection, queue),
        )

    def _is_archived(self, connection: Connection, queue: str) -> bool:
        """Return True if a message of `queue` is in the archive.

        Shows that an empty queue was used, and is not a misspelling.
        """
        archive = self._database.tables.archive
        if archive is None:
            return False
        statement: Select[Any] = select(literal_column("1")).select_from(archive)
        statement = statement.where(archive.c.queue == queue)
        statement = statement.order_by(archive.c.queue, archive.c.archived_at).limit(1)
        return connection.execute(statement).first() is not None


def count_messages(
    connection: Connection, dialect: DialectOperations, queues: Sequence[str]
) -> dict[str, QueueCounts]:
    """Count the live messages of each of `queues`, by state.

    Each count is exact up to `MAX_COUNTED` messages of a queue and priority, and estimated above.
    Standby messages are counted apart: another message of their key is to be delivered in their
    place.
    """
    by_queue = {queue: QueueCounts() for queue in queues}
    pairs = dialect.find_ready_pairs(connection, queues)
    ranges = [{"queue": pair.queue, "priority": pair.priority} for pair in pairs]
    due_counts = _count_ranges(connection, dialect, "due", ranges)
    later_counts = _count_ranges(connection, dialect, "later", ranges)
    for pair, (due, retried, suspects), (delayed, retried_later) in zip(
        pairs, due_counts, later_counts, strict=True
    ):
        counts = by_queue[pair.queue]
        counts.suspects += suspects
        if pair.due_in <= 0:
            counts.oldest_due_age = max(counts.oldest_due_age, -pair.due_in)
        counts.ready += due
        counts.delayed += delayed
        counts.retrying += retried + retried_later
    standing = _sample_ranges(connection, dialect, "sample_standing", ranges)
    for pair, (count, overdue) in zip(pairs, standing, strict=True):
        counts = by_queue[pair.queue]
        number = min(count, MAX_COUNTED)
        counts.standing += Count(number, "exact" if number == count else "at least")
        counts.standing_overdue = max(counts.standing_overdue, float(overdue))
    leased = _count_ranges(connection, dialect, "held", [{"queue": queue} for queue in by_queue])
    for counts, (in_flight, retried_later, suspects) in zip(by_queue.values(), leased, strict=True):
        counts.in_flight = in_flight
        counts.retrying += retried_later
        counts.suspects += suspects
    return by_queue


def _count_ranges(
    connection: Connection,
    dialect: DialectOperations,
    kind: str,
    ranges: Sequence[Mapping[str, Any]],
) -> list[tuple[Count, ...]]:
    """Count the messages in each of `ranges`, and some parts of each range.

    A range is a queue and a priority, or a queue. The parts are, for example, the retried messages
    and the suspects (messages that may have killed their process). A range of more than
    `MAX_COUNTED` messages is estimated by the planner, and its parts are extrapolated from the
    messages read.
    """
    counts: list[tuple[Count, ...]] = []
    samples = _sample_ranges(connection, dialect, f"sample_{kind}", ranges)
    for binds, (count, *parts) in zip(ranges, samples, strict=True):
        if count <= MAX_COUNTED:
            counts.append((Count(count), *map(Count, parts)))
            continue
        estimate = connection.execute(dialect.sql[f"estimate_{kind}"], binds).first()
        total = _read_estimate(dialect.name, estimate, count)
        # Extrapolate from the share among the messages that were read.
        shares = [Count(total.share(part, count), "about") for part in parts]
        counts.append((total, *shares))
    return counts


def _sample_ranges(
    connection: Connection,
    dialect: DialectOperations,
    name: str,
    ranges: Sequence[Mapping[str, Any]],
) -> list[Sequence[int]]:
    """Run the counting statement `name` on each of `ranges`; a count stops at `MAX_COUNTED` + 1.

    Several ranges share a statement. Returns a row of counts for each range, in their order.
    """
    samples: list[Sequence[int]] = []
    for part in iter_chunks(ranges, MAX_RANGES_TOGETHER):
        binds: dict[str, Any] = {"most": MAX_COUNTED + 1}
        for number, values in enumerate(part):
            binds |= {f"{bind}{number}": value for bind, value in values.items()}
        rows = connection.execute(_build_union(dialect, name, len(part)), binds)
        samples += [row[1:] for row in sorted(rows)]
    return samples


def _build_union(dialect: DialectOperations, name: str, count: int) -> TextClause:
    """Build a statement that runs the counting statement `name` on `count` ranges.

    Each row begins with the range's number, because UNION ALL keeps no order.
    """

    def build() -> TextClause:
        single = dialect.sql[name].text.removeprefix("SELECT ")
        parts = [f"SELECT {n}, " + _RANGE_BINDS.sub(rf":\g<1>{n}", single) for n in range(count)]
        return text("\nUNION ALL\n".join(parts))

    return dialect.get_or_build(f"{name}_of_{count}", build)


def _read_estimate(database: str, row: Any, min_count: int) -> Count:
    """Return the number of rows that the `row` of an estimate says, but at least `min_count`.

    Statistics may be old, and `min_count` rows were seen. SQLite counts instead, up to a limit.
    """
    value = max(min_count, _parse_row_count(database, row))
    precision: CountKind = "about"
    if database == "sqlite":
        precision = "exact" if value < MAX_SQLITE_COUNT else "at least"
    return Count(value, precision)


def _parse_row_count(database: str, row: Any) -> int:
    """Return the planner's number of rows from an EXPLAIN; from SQLite, the counted number."""
    if database in MYSQL:
        return int(row._mapping["rows"] or 0)  # noqa: SLF001 - the column's name is a method's
    value = row[0]
    if database == "postgresql":
        # Parse the plan as text: the driver would decode JSON with the engine's own
        # `json_deserializer`.
        return int(_PLAN_ROWS.findall(value)[0])
    return int(value)


def read_rates(connection: Connection, dialect: DialectOperations) -> QueueRates:
    """Read the rates of messages published and ended in each queue, in the last minute.

    For overviews of all queues, without a count of whole tables: only the newest `MAX_RATED`
    messages are read. If these cover less than a minute, the rates (per minute) are those of that
    shorter time.
    """
    rates = QueueRates()
    c = dialect.tables.message.c
    # Sort by id, which has an index: ids are drawn nearly in the order of creation.
    latest = select(c.queue, c.created_at).order_by(c.id.desc()).limit(MAX_RATED).subquery()
    created_at = latest.c.created_at
    statement = select(latest.c.queue, func.count(), func.min(created_at), clock())
    rows = connection.execute(
        statement.where(created_at > later(_MINUTE_AGO)).group_by(latest.c.queue)
    ).all()
    seconds = _compute_window(rows)
    rates.published = {queue: compute_rate(count, seconds=seconds) for queue, count, *_ in rows}
    if dialect.tables.archive is not None:
        _add_ended_rates(connection, dialect, rates)
    return rates


def _add_ended_rates(connection: Connection, dialect: DialectOperations, rates: QueueRates) -> None:
    """Add the rates of messages that ended in the last minute, from the archive.

    Messages that were published and ended within the minute are no longer in the message table, so
    they are added to the published rate, too.
    """
    archive = dialect.archive
    a = archive.c
    statement = select(a.queue, a.created_at, a.archived_at, a.state)
    statement = dialect.add_index_hint(statement, archive, "archived_index")
    recent = (
        statement.where(a.archived_at > later(_MINUTE_AGO))
        .order_by(a.archived_at.desc(), a.id.desc())
        .limit(MAX_RATED)
        .subquery()
    )
    new_count = func.sum(case((recent.c.created_at > later(_MINUTE_AGO), 1), else_=0))
    failed_count = func.sum(case((recent.c.state == MessageState.FAILED.name, 1), else_=0))
    grouped = select(
        recent.c.queue,
        func.count(),
        func.min(recent.c.archived_at),
        clock(),
        new_count,
        failed_count,
    ).group_by(recent.c.queue)
    rows = connection.execute(grouped).all()
    seconds = _compute_window(rows)
    rates.ended = {queue: compute_rate(count, seconds=seconds) for queue, count, *_ in rows}
    for queue, _, _, _, new_rows, failed_rows in rows:
        # A rate over a short time means little for few messages, so use the whole minute.
        window = seconds if failed_rows >= MIN_FAILING else WINDOW
        rates.failed[queue] = compute_rate(int(failed_rows), seconds=window)
        publish_rate = rates.published.get(queue, 0.0) + compute_rate(
            int(new_rows), seconds=seconds
        )
        rates.published[queue] = round(publish_rate, 1)


def _compute_window(rows: Sequence[Any]) -> float:
    """Return the seconds that `rows` (queue, count, first time, now) cover: a minute, or less.

    It is less if the read stopped at `MAX_RATED` messages before it reached the beginning of the
    minute.
    """
    if sum(row[1] for row in rows) < MAX_RATED:
        return WINDOW
    return float((rows[0][3] - min(row[2] for row in rows)).total_seconds())


def count_jobs(
    connection: Connection, dialect: DialectOperations, queues: Sequence[str]
) -> list[JobCounts]:
    """Count the jobs of pull consumers in each of `queues`, by state.

    Delivered and dead jobs are in the archive; without one they are unknown.
    """
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
    connection: Connection, dialect: DialectOperations, queues: Sequence[str]
) -> dict[str, FinishedJobCounts]:
    """Count the finished jobs in each of `queues`: delivered, and dead.

    Exact for queues with up to `MAX_COUNTED` jobs in the archive; larger queues are estimated.
    """
    ended: dict[str, FinishedJobCounts] = {}
    large_queues: dict[str, tuple[int, int]] = {}
    samples = _sample_ranges(connection, dialect, "sample_ended", [{"queue": q} for q in queues])
    for queue, (count, delivered) in zip(queues, samples, strict=True):
        if count <= MAX_COUNTED:
            ended[queue] = (Count(delivered), Count(count - delivered))
        else:
            large_queues[queue] = (count, count - delivered)
    if large_queues:
        dead, complete = _count_dead(connection, dialect, large_queues)
        for queue, (count, dead_sample) in large_queues.items():
            row = connection.execute(dialect.sql["estimate_ended"], {"queue": queue}).first()
            total = _read_estimate(dialect.name, row, count)
            ended[queue] = _split_total(total, count, dead_sample, dead[queue], complete=complete)
    return ended


def _split_total(
    total: Count, sampled: int, dead_sampled: int, dead_counted: int, *, complete: bool
) -> FinishedJobCounts:
    """Split an estimated `total` of finished jobs into delivered and dead jobs.

    For a queue with too many jobs to count. The share of dead jobs comes from a search of failed
    messages or, if that was cut off, from the newest jobs.

    Args:
        total: The estimated number of jobs.
        sampled: Number of the newest jobs that were read.
        dead_sampled: Number of dead jobs among these.
        dead_counted: Number of dead jobs that a separate search of failed messages found.
        complete: True if that search found all dead jobs.
    """
    value = dead_counted if complete else max(dead_counted, total.share(dead_sampled, sampled))
    dead = Count(value) if complete else Count(value, "about")
    # An estimate can be below the number counted.
    delivered = max(total.value - value, sampled - dead_sampled)
    return Count(delivered, total.how if complete else "about"), dead


def _count_dead(
    connection: Connection, dialect: DialectOperations, queues: Collection[str]
) -> tuple[dict[str, int], bool]:
    """Count the failed messages of each of `queues` among the last of all queues.

    Failed messages are few, and have an index of their own. Up to `MAX_DEAD` of each state are
    read. The second value is True if there are no others, so the counts are complete.
    """
    counts = dict.fromkeys(queues, 0)
    complete = True
    for state in sorted(UNCOMPLETED_STATES, key=lambda state: state.name):
        rows = connection.execute(_select_failed(dialect, state)).all()
        complete = complete and sum(row[1] for row in rows) <= MAX_DEAD
        for queue, count in rows:
            if queue in counts:
                counts[queue] += count
    return counts, complete


def _select_failed(dialect: DialectOperations, state: MessageState) -> Select[Any]:
    """Select the number of messages in `state` by queue, among the last `MAX_DEAD` + 1.

    The additional message shows that older messages were not counted.
    """
    archive = dialect.archive
    a = archive.c
    statement = select(a.queue).where(match_ended_state(dialect, state))
    statement = dialect.add_index_hint(statement, archive, "uncompleted_index")
    latest = statement.order_by(a.archived_at.desc(), a.id.desc()).limit(MAX_DEAD + 1).subquery()
    return select(latest.c.queue, func.count()).group_by(latest.c.queue)
