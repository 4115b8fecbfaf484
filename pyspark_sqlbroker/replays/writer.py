"""A Spark task of `replay`: each batch of copies and their marks in one transaction.

A mark is a row of the policy state table: scope "replay:<job>", key the id of the row that was
copied. The task that inserts the mark publishes the copy, in the same transaction. So a task that
runs twice, at the same time or after a crash, publishes nothing twice.

A lake keeps the row of a dead letter that was redriven after the export. Whether the message went
on since is known from the live table, which has it again, or from a newer row of the archive.
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
from sqlalchemy.exc import DBAPIError, InterfaceError, InvalidRequestError, OperationalError

from faststream_sqlbroker.core.replays import SCOPE, Copy, Plan, copy_row
from faststream_sqlbroker.core.routing import LATEST
from faststream_sqlbroker.core.times import to_microseconds
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import Tables, build_tables
from pyspark_sqlbroker.databases import ArchiveDatabase

T = TypeVar("T")

Row = dict[str, Any]

Find = Callable[[Sequence[int]], dict[int, int | None]]

BATCH_BYTES = 4 << 20
"""Bytes of payloads in a transaction: below MySQL's max_allowed_packet even if each is escaped."""

ATTEMPTS = 6
"""Tries of one transaction: with FIRST_PAUSE doubled each time, 1.55 s of pauses in all."""

FIRST_PAUSE = 0.05
"""Seconds before a transaction is tried again; doubled each time."""

SAMPLES = 10
"""Messages that a result shows as a sample."""

LOOKED_UP = 500
"""Rows whose ids one statement names."""


@dataclass(frozen=True)
class Writer:
    """Everything that a task must know; it is pickled and sent to the workers.

    Attributes:
        database: Where the messages go.
        config: The tables' names.
        plan: What is done with every row.
        run: This call of `replay`.
        start: The moment from which rows are due, by the database's clock; None is when each is
            written.
        spacing: Time between two due rows of one task.
        shift: How much later the first row of each further task is due.
        delay: Rows are due so much later than `start`, or than they are written.
        remember: How long a mark is kept; None is for ever.
        batch_size: Rows of a transaction.
        dry_run: Whether nothing is written.
        current_only: Whether rows of messages that went on since are left out.
    """

    database: ArchiveDatabase
    config: SqlBrokerSchemaConfig
    plan: Plan
    run: str
    start: datetime | None
    spacing: timedelta
    shift: timedelta
    delay: timedelta
    remember: timedelta | None
    batch_size: int
    dry_run: bool
    current_only: bool = False

    def tables(self) -> Tables:
        """The database's tables: the archive only if it is looked at."""
        return build_tables(self.config, dialect_name=self.database.kind)

    @property
    def scope(self) -> str:
        """Of the job's marks."""
        return SCOPE + self.plan.job


@dataclass
class Count:
    """What a task saw of one queue.

    Attributes:
        rows: All, without repetitions of an id.
        fresh: Those that no earlier run of the job has published.
        bytes: Of their payloads.
        redriven: Rows that are left out, as their messages went on since.
        sample: Those among the task's first few, as people want to see them.
    """

    rows: int = 0
    fresh: int = 0
    bytes: int = 0
    redriven: int = 0
    sample: list[dict[str, Any]] = field(default_factory=list)

    def add(self, copy: Copy, *, fresh: bool, shown: bool) -> None:
        """Count a row."""
        self.rows += 1
        if fresh:
            self.fresh += 1
            self.bytes += copy.bytes
            if shown:
                kept = {name: copy.values[name] for name in ("queue", "priority", "key", "headers")}
                self.sample.append({"id": copy.origin, **kept, "bytes": copy.bytes})


class Task:
    """One partition's work."""

    def __init__(self, writer: Writer, partition: int) -> None:
        self._writer = writer
        self._database = writer.database
        tables = writer.tables()
        self._message = tables.message
        self._archive = tables.archive
        self._state = tables.policy_state
        self._start = None if writer.start is None else writer.start + writer.shift * partition
        self._slots = self._shown = 0
        self._engine = self._database.address.engine()
        self._connection: Connection | None = None
        self.counts: dict[str, Count] = {}

    def run(self, rows: Iterable[dict[str, Any]]) -> dict[str, Count]:
        """Publish all `rows`, whose ids rise, or only look at them in a dry run; counts by queue.

        Raises:
            PublishError: a row that cannot be published; batches before it are committed.
            StoreError: the database refused, or could not be reached, several times.
        """
        if self._writer.current_only:
            rows = current_rows(rows, self._last_known, self._leave_out)
        copies = (copy_row(row, self._writer.plan) for row in rows)
        once = (next(same) for _, same in groupby(copies, key=lambda copy: copy.origin))
        try:
            for batch in batches(once, self._writer.batch_size, BATCH_BYTES):
                earlier = (
                    self._find_earlier(batch) if self._writer.dry_run else self._publish(batch)
                )
                self._count(batch, earlier)
        finally:
            self.close()
        return self.counts

    def _last_known(self, ids: Sequence[int]) -> dict[int, int | None]:
        return self._repeat(
            lambda connection: last_known(connection, self._message, self._archive, ids)
        )

    def _leave_out(self, row: dict[str, Any]) -> None:
        count = self.counts.setdefault(row["queue"], Count())
        count.rows += 1
        count.redriven += 1

    def _count(self, batch: Sequence[Copy], earlier: set[int]) -> None:
        for copy in batch:
            count = self.counts.setdefault(copy.queue, Count())
            count.add(copy, fresh=copy.origin not in earlier, shown=self._shown < SAMPLES)
            self._shown += copy.origin not in earlier

    def _find_earlier(self, batch: Sequence[Copy]) -> set[int]:
        def look(connection: Connection) -> set[int]:
            return {int(mark.key) for mark in self._marks(connection, batch)}

        return self._repeat(look)

    def _publish(self, batch: Sequence[Copy]) -> set[int]:
        """Write those that are not marked; the ids that an earlier run has written."""
        attempts: set[uuid.UUID] = set()

        def publish(connection: Connection) -> tuple[set[int], set[str]]:
            # Each attempt has its own token. If the answer to COMMIT was lost, the marks of that
            # attempt may be there; only marks with this attempt's token may be published now.
            attempts.add(token := uuid.uuid4())
            self._database.begin(connection)
            try:
                found = self._write(connection, batch, token)
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                # On a broken connection SQLAlchemy raises InvalidRequestError here, which must not
                # hide the first error.
                with contextlib.suppress(DBAPIError, InvalidRequestError):
                    connection.exec_driver_sql("ROLLBACK")
                raise
            return found

        earlier, due = self._repeat(publish)
        self._slots += len(batch) - len(earlier)
        if due:
            self._wake(due)
        return earlier

    def _write(
        self, connection: Connection, batch: Sequence[Copy], token: uuid.UUID
    ) -> tuple[set[int], set[str]]:
        """Mark and insert; returns the ids of earlier runs, and the queues with rows due now."""
        now = self._database.now(connection)
        # Marks are inserted in the order of ids by all tasks: two tasks with the same rows may wait
        # for each other, but never deadlock.
        marking = self._database.insert_new(self._state)
        connection.execute(marking, [self._mark(copy, token, now) for copy in batch])
        marks = {int(mark.key): mark for mark in self._marks(connection, batch)}
        ours = [
            c
            for c in batch
            if c.origin in marks and marks[c.origin].info["run"] == self._writer.run
        ]
        slot = {copy.origin: number for number, copy in enumerate(ours, self._slots)}
        rows = [
            {**copy.values, "created_at": now, "next_attempt_at": self._due(slot[copy.origin], now)}
            for copy in ours
            if marks[copy.origin].lease_token == token
        ]
        if rows:
            connection.execute(insert(self._message), rows)
        due = {str(row["queue"]) for row in rows if row["next_attempt_at"] <= now}
        return {copy.origin for copy in batch} - set(slot), due

    def _due(self, slot: int, now: datetime) -> datetime:
        with contextlib.suppress(OverflowError):
            since = now if self._start is None else self._start
            return min(since + self._writer.delay + self._writer.spacing * slot, LATEST)
        return LATEST

    def _mark(self, copy: Copy, token: uuid.UUID, now: datetime) -> dict[str, Any]:
        remember = self._writer.remember
        return {
            "scope": self._writer.scope,
            "key": str(copy.origin),
            "created_at": now,
            "lease_token": token,
            "info": {"run": self._writer.run, "queue": copy.queue},
            "expires_at": None if remember is None else now + remember,
        }

    def _marks(self, connection: Connection, batch: Sequence[Copy]) -> Sequence[Any]:
        c = self._state.c
        ours = and_(c.scope == self._writer.scope, c.key.in_([str(copy.origin) for copy in batch]))
        return connection.execute(select(c.key, c.lease_token, c.info).where(ours)).all()

    def _wake(self, queues: set[str]) -> None:
        """Wake subscribers where the database can notify them; elsewhere they poll."""
        if self._connection is not None:
            try:
                self._database.wake(self._connection, self._writer.config.channel, queues)
            except DBAPIError:  # a lost wake-up must not fail the task
                self.close()

    def _repeat(self, work: Callable[[Connection], T]) -> T:
        """Do `work` until the database takes it, on a new connection after each failure."""
        for pause in (*(FIRST_PAUSE * 2**n for n in range(ATTEMPTS - 1)), None):
            try:
                if self._connection is None:
                    self._connection = self._engine.connect()
                return work(self._connection)
            except (OperationalError, InterfaceError) as error:
                self.close()
                if pause is None:
                    raise StoreError(refusal(error)) from None
                time.sleep(pause)
            except DBAPIError as error:
                raise StoreError(refusal(error)) from None
        raise AssertionError

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(DBAPIError):
                connection.close()


def current_rows(
    rows: Iterable[Row], find: Find, on_redriven: Callable[[Row], None]
) -> Iterator[Row]:
    """The newest rows, where they are still the last of their message.

    Args:
        rows: Sorted by id, the newest of an id first; each with archived_us.
        find: What the database has of some ids, as `last_known` returns it.
        on_redriven: Is called for each message that is left out, once.
    """
    given = iter(rows)
    judged: int | None = None
    while chunk := list(islice(given, LOOKED_UP)):
        known = find([row["id"] for row in chunk if row["id"] is not None])
        for row in chunk:
            id_ = row["id"]
            if id_ is not None and id_ == judged:
                continue  # an older row of a message whose newest was judged
            judged = id_
            if id_ not in known or _is_last(row, known[id_]):
                yield row
            else:
                on_redriven(row)


def _is_last(row: Row, known: int | None) -> bool:
    at = row["archived_us"]
    return known is not None and at is not None and known <= at


def last_known(
    connection: Connection, message: Table, archive: Table | None, ids: Sequence[int]
) -> dict[int, int | None]:
    """What the database has of these messages now.

    Returns:
        By id: None for a message of the live table, else archived_at of its newest row in the
        archive, in microseconds since 1970. Ids that the database does not have are missing.
    """
    found: dict[int, int | None] = {}
    if archive is not None:
        c = archive.c
        newest = select(c.id, func.max(c.archived_at)).where(c.id.in_(ids)).group_by(c.id)
        found.update((int(id_), to_microseconds(at)) for id_, at in connection.execute(newest))
    live = select(message.c.id).where(message.c.id.in_(ids))
    found.update((int(id_), None) for id_ in connection.execute(live).scalars())
    return found


def refusal(error: DBAPIError) -> str:
    """The driver's words without the statement, whose values are payloads."""
    return f"the database refused: {type(error.orig).__name__}: {error.orig}"


def batches(copies: Iterable[Copy], size: int, bytes_: int) -> Iterator[list[Copy]]:
    """`copies` in lists of at most `size`, and of about `bytes_` of payloads."""
    batch: list[Copy] = []
    total = 0
    for copy in copies:
        if batch and (len(batch) == size or total + copy.bytes > bytes_):
            yield batch
            batch = []
            total = 0
        batch.append(copy)
        total += copy.bytes
    if batch:
        yield batch
