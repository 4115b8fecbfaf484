"""A Spark task of `replay`: each batch of copies and their marks in one transaction.

A mark is a row of the policy state table: scope "replay:<job>", key the id of the row that was
copied. The task that inserts the mark publishes the copy, in the same transaction. So a task that
runs twice, at the same time or after a crash, publishes nothing twice.

A lake keeps the row of a dead letter that was redriven after the export. A message was redriven
since if the live table has it again, or if the archive has a newer row of it.
"""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby, islice
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, and_, func, insert, select
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from faststream_sqlbroker.core.replays import REPLAY_SCOPE, ReplayCopy, ReplayPlan, copy_row
from faststream_sqlbroker.core.routing import MAX_DUE_TIME
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.exceptions import PublishError, StoreError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import Tables, build_tables
from pyspark_sqlbroker.databases import ArchiveDatabase

T = TypeVar("T")

Row = dict[str, Any]

FindLatest = Callable[[Sequence[int]], dict[int, int | None]]

TRANSACTION_BYTES = 4 << 20
"""Bytes of payloads in a transaction: below MySQL's max_allowed_packet even if each is escaped."""

MAX_TRIES = 6
"""Tries of one transaction: with RETRY_PAUSE doubled each time, 1.55 s of pauses in all."""

RETRY_PAUSE = 0.05
"""Seconds before a transaction is tried again; doubled each time."""

MAX_SAMPLES = 10
"""Maximum number of sample messages in a result."""

LOOKUP_CHUNK = 500
"""Number of rows whose ids are in one statement."""


@dataclass(frozen=True)
class ReplayWriter:
    """The parameters of a task; pickled and sent to the workers.

    Attributes:
        database: The database that receives the messages.
        config: The tables' names.
        plan: How each row is copied.
        run: Id of this call of `replay`.
        start: Time from which rows are due, by the database's clock; None is the time of each
            write.
        spacing: Time between two due rows of one task.
        shift: Delay of each further task's first due row.
        delay: Delay of rows after `start`, or after their write.
        remember: Retention of a mark; None is for ever.
        batch_size: Rows of a transaction.
        dry_run: True if nothing is written.
        current_only: True if rows of messages that were redriven since are left out.
    """

    database: ArchiveDatabase
    config: SqlBrokerSchemaConfig
    plan: ReplayPlan
    run: str
    start: datetime | None
    spacing: timedelta
    shift: timedelta
    delay: timedelta
    remember: timedelta | None
    batch_size: int
    dry_run: bool
    current_only: bool = False

    def build_tables(self) -> Tables:
        """Return the database's tables, with the archive only if queried."""
        return build_tables(self.config, dialect_name=self.database.kind)

    @property
    def scope(self) -> str:
        """Scope of the job's marks."""
        return REPLAY_SCOPE + self.plan.job


@dataclass
class QueueReplayCount:
    """Counts of a task for a queue.

    Attributes:
        rows: All rows, without repetitions of an id.
        fresh: Rows that no earlier run of the job has published.
        bytes: Total size of their payloads.
        redriven: Rows that are left out because their messages were redriven.
        sample: Messages of `fresh` among the task's first few, for display.
    """

    rows: int = 0
    fresh: int = 0
    bytes: int = 0
    redriven: int = 0
    sample: list[dict[str, Any]] = field(default_factory=list)

    def add(self, copy: ReplayCopy, *, is_new: bool, in_sample: bool) -> None:
        """Count a row; a new row in the sample is also kept for display."""
        self.rows += 1
        if is_new:
            self.fresh += 1
            self.bytes += copy.bytes
            if in_sample:
                values = {
                    name: copy.values[name] for name in ("queue", "priority", "key", "headers")
                }
                self.sample.append({"id": copy.origin, **values, "bytes": copy.bytes})


class ReplayTask:
    """The work of a partition."""

    def __init__(self, writer: ReplayWriter, partition: int) -> None:
        """Prepare the task of a partition; the connection is opened on first use.

        With a rate the due times of the tasks interleave: each task begins one step later than the
        one before, and then takes every n-th step, n being the number of tasks.
        """
        self._writer = writer
        self._database = writer.database
        tables = writer.build_tables()
        self._message = tables.message
        self._archive = tables.archive
        self._state = tables.policy_state
        self._start = None if writer.start is None else writer.start + writer.shift * partition
        self._slots = self._sample_count = 0
        self._engine = self._database.address.create_engine()
        self._connection: Connection | None = None
        self.counts: dict[str, QueueReplayCount] = {}

    def run(self, rows: Iterable[dict[str, Any]]) -> dict[str, QueueReplayCount]:
        """Publish `rows`, which are in order of ids, or only count in a dry run; return the
        counts.

        A copy is the new message made of a row. Rows with the same id follow each other, the newest
        first, and only the first is published.

        Raises:
            PublishError: a row cannot be published; batches before it are committed.
            StoreError: the database refused, or could not be reached, several times.
        """
        rows = refuse_shared_ids(rows)
        if self._writer.current_only:
            rows = filter_current_rows(rows, self._find_latest, self._count_redriven)
        copies = (copy_row(row, self._writer.plan) for row in rows)
        unique_copies = (next(group) for _, group in groupby(copies, key=lambda copy: copy.origin))
        try:
            for batch in split_batches(unique_copies, self._writer.batch_size, TRANSACTION_BYTES):
                published = (
                    self._find_published(batch) if self._writer.dry_run else self._publish(batch)
                )
                self._count(batch, published)
        finally:
            self.close()
        return self.counts

    def _find_latest(self, ids: Sequence[int]) -> dict[int, int | None]:
        """Return the current state of some messages, with retries; see `find_latest`.

        Tells if a message was redriven, that is, brought back to its queue, since it was archived.
        """
        return self._retry(
            lambda connection: find_latest(connection, self._message, self._archive, ids)
        )

    def _count_redriven(self, row: dict[str, Any]) -> None:
        """Count a skipped row, whose message was redriven."""
        count = self.counts.setdefault(row["queue"], QueueReplayCount())
        count.rows += 1
        count.redriven += 1

    def _count(self, batch: Sequence[ReplayCopy], published: set[int]) -> None:
        """Count a batch; the first copies that are new become the sample.

        `published` has the ids that other runs of the job have published, now or earlier.
        """
        for copy in batch:
            count = self.counts.setdefault(copy.queue, QueueReplayCount())
            count.add(
                copy,
                is_new=copy.origin not in published,
                in_sample=self._sample_count < MAX_SAMPLES,
            )
            self._sample_count += copy.origin not in published

    def _find_published(self, batch: Sequence[ReplayCopy]) -> set[int]:
        """Return the ids that earlier runs of the job have published, for a dry run.

        Each published id has a mark, a row in the policy state.
        """

        def find_marks(connection: Connection) -> set[int]:
            """Return the ids of the batch that have a mark."""
            return {int(mark.key) for mark in self._read_marks(connection, batch)}

        return self._retry(find_marks)

    def _publish(self, batch: Sequence[ReplayCopy]) -> set[int]:
        """Publish the copies without a mark; return the ids that another run published.

        A mark is a row of the policy state that records a published id of the job. Marks and
        messages are committed together. Then subscribers are notified of queues with due messages.
        """

        def publish(connection: Connection) -> tuple[set[int], set[str]]:
            """Write marks and messages in one transaction; called again after a temporary failure,
            such as a lost connection or a deadlock.
            """
            # Race: each attempt has its own token. If the answer to COMMIT was lost, the marks of
            # that attempt may exist; only copies whose marks have this attempt's token may be
            # published now.
            token = uuid.uuid4()
            with self._database.transaction(connection):
                return self._write(connection, batch, token)

        published, due_queues = self._retry(publish)
        self._slots += len(batch) - len(published)
        if due_queues:
            self._notify(due_queues)
        return published

    def _write(
        self, connection: Connection, batch: Sequence[ReplayCopy], token: uuid.UUID
    ) -> tuple[set[int], set[str]]:
        """Insert marks and messages in the open transaction.

        A mark with another run's id shows that another run has published the row. A mark of this
        run with another token was committed by an earlier attempt, and its message too: it is
        counted but not published again. A slot is the position of a copy in the task's sequence of
        due times.

        Returns:
            The ids that other runs published, and the queues with messages that are due now.
        """
        now = self._database.get_time(connection)
        # Race: all tasks insert marks in the order of ids, so two tasks with the same rows may wait
        # for each other, but never deadlock.
        insert_marks = self._database.build_insert_if_absent(self._state)
        connection.execute(insert_marks, [self._build_mark(copy, token, now) for copy in batch])
        marks = {int(mark.key): mark for mark in self._read_marks(connection, batch)}
        own_copies = [
            copy
            for copy in batch
            if copy.origin in marks and marks[copy.origin].info["run"] == self._writer.run
        ]
        # Also copies that an earlier attempt has committed: their positions are taken.
        slots = {copy.origin: number for number, copy in enumerate(own_copies, self._slots)}
        rows = [
            {
                **copy.values,
                "created_at": now,
                "next_attempt_at": self._compute_due_time(slots[copy.origin], now),
            }
            for copy in own_copies
            if marks[copy.origin].lease_token == token
        ]
        if rows:
            connection.execute(insert(self._message), rows)
        due_queues = {str(row["queue"]) for row in rows if row["next_attempt_at"] <= now}
        return {copy.origin for copy in batch} - set(slots), due_queues

    def _compute_due_time(self, slot: int, now: datetime) -> datetime:
        """Return the due time of the copy at position `slot` of this task.

        With a rate the copies are still written as fast as possible, and become due one after the
        other. A time out of range becomes the latest possible time.
        """
        with contextlib.suppress(OverflowError):
            since = now if self._start is None else self._start
            return min(since + self._writer.delay + self._writer.spacing * slot, MAX_DUE_TIME)
        return MAX_DUE_TIME

    def _build_mark(self, copy: ReplayCopy, token: uuid.UUID, now: datetime) -> dict[str, Any]:
        """Return the mark of a published copy, which stops other runs from publishing the row.

        `token` is of this attempt of the transaction, and `run` of this call of `replay`: so an
        attempt can tell its own marks from those of an earlier attempt, and of another run.
        """
        remember = self._writer.remember
        return {
            "scope": self._writer.scope,
            "key": str(copy.origin),
            "created_at": now,
            "lease_token": token,
            "info": {"run": self._writer.run, "queue": copy.queue},
            "expires_at": None if remember is None else now + remember,
        }

    def _read_marks(self, connection: Connection, batch: Sequence[ReplayCopy]) -> Sequence[Any]:
        """Return the existing marks of a batch, from any run of the job.

        A mark is a row of the policy state that shows that the job has published a row.
        """
        c = self._state.c
        condition = and_(
            c.scope == self._writer.scope, c.key.in_([str(copy.origin) for copy in batch])
        )
        return connection.execute(select(c.key, c.lease_token, c.info).where(condition)).all()

    def _notify(self, queues: set[str]) -> None:
        """Wake the subscribers of the queues, in a database that can notify.

        Subscribers also poll from time to time, so a lost wake-up costs only time.
        """
        if self._connection is not None:
            try:
                self._database.notify(self._connection, self._writer.config.channel, queues)
            except DBAPIError:  # a lost wake-up must not fail the task
                self.close()

    def _retry(self, function: Callable[[Connection], T]) -> T:
        """Call `function` with a connection, and again if the database fails for a moment.

        Each failure closes the connection, and the pause doubles. After `MAX_TRIES`, or
        immediately after an error of the statement, StoreError is raised without the statement.
        """
        for pause in (*(RETRY_PAUSE * 2**n for n in range(MAX_TRIES - 1)), None):
            try:
                if self._connection is None:
                    self._connection = self._engine.connect()
                return function(self._connection)
            except (OperationalError, InterfaceError) as error:
                self.close()
                if pause is None:
                    raise StoreError(format_refusal(error)) from None
                time.sleep(pause)
            except DBAPIError as error:
                raise StoreError(format_refusal(error)) from None
        raise AssertionError

    def close(self) -> None:
        """Close the connection, if open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(DBAPIError):
                connection.close()


def refuse_shared_ids(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield `rows`, and refuse two messages with the same id, of which a single message would be
    published.

    Args:
        rows: Sorted by id; with `created`, the time of the publish, if known.

    Raises:
        PublishError: two rows with the same id differ in the time of their publish.
    """
    last: Row = {"id": None}
    for row in rows:
        id_ = row["id"]
        if id_ is not None and id_ == last["id"] and row.get("created") != last.get("created"):
            raise PublishError(
                f"row {id_}: two messages have this id, created at {row.get('created')} and "
                f"{last.get('created')}: select one of them by created_at, and replay the other "
                "as another job"
            )
        last = row
        yield row


def filter_current_rows(
    rows: Iterable[Row], find_latest: FindLatest, on_redriven: Callable[[Row], None]
) -> Iterator[Row]:
    """Yield the newest row of each message, unless the message was redriven since.

    A lake has a row for each time that a message was archived, so older rows are skipped.

    Args:
        rows: Sorted by id, the newest row of an id first; each with archived_us.
        find_latest: Returns the database's state of some ids, like the function `find_latest`.
        on_redriven: Called once for each message that is skipped.
    """
    remaining_rows = iter(rows)
    last_id: int | None = None
    while chunk := list(islice(remaining_rows, LOOKUP_CHUNK)):
        latest = find_latest([row["id"] for row in chunk if row["id"] is not None])
        for row in chunk:
            id_ = row["id"]
            if id_ is not None and id_ == last_id:
                continue  # an older row of the previous message
            last_id = id_
            if id_ not in latest or _is_current(row, latest[id_]):
                yield row
            else:
                on_redriven(row)


def _is_current(row: Row, latest: int | None) -> bool:
    """Return True if the archive's newest row of the message is not newer than `row`.

    A newer row, or `latest` of None for a message in the live table, shows that the message was
    redriven after `row` was archived.
    """
    archived_at = row["archived_us"]
    return latest is not None and archived_at is not None and latest <= archived_at


def find_latest(
    connection: Connection, message: Table, archive: Table | None, ids: Sequence[int]
) -> dict[int, int | None]:
    """Return the database's current state of the given messages.

    Returns:
        By id: None for a message of the live table, else archived_at of its newest row in the
        archive, in microseconds since 1970. Ids that the database does not have are missing.
    """
    latest: dict[int, int | None] = {}
    if archive is not None:
        c = archive.c
        query = select(c.id, func.max(c.archived_at)).where(c.id.in_(ids)).group_by(c.id)
        latest.update(
            (int(id_), to_microseconds(archived_at))
            for id_, archived_at in connection.execute(query)
        )
    # Race: read second, so that None wins if a message is redriven between the two queries.
    live_query = select(message.c.id).where(message.c.id.in_(ids))
    latest.update((int(id_), None) for id_ in connection.execute(live_query).scalars())
    return latest


def format_refusal(error: DBAPIError) -> str:
    """Format the driver's error without the statement, whose values are payloads."""
    return f"the database refused: {type(error.orig).__name__}: {error.orig}"


def split_batches(
    copies: Iterable[ReplayCopy], size: int, max_bytes: int
) -> Iterator[list[ReplayCopy]]:
    """Split `copies` into batches of at most `size`, and of about `max_bytes` of payloads.

    Each batch becomes a transaction. A copy larger than `max_bytes` becomes a batch of its own.
    """
    batch: list[ReplayCopy] = []
    total = 0
    for copy in copies:
        if batch and (len(batch) == size or total + copy.bytes > max_bytes):
            yield batch
            batch = []
            total = 0
        batch.append(copy)
        total += copy.bytes
    if batch:
        yield batch
