"""Retention of the archive: remove finished messages by age and number, and manage partitions.

The oldest messages are removed first, a few in each transaction.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, and_, delete, literal_column, or_, select

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.bulk_jobs import Job
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.retention import Pruned, PrunePosition, PruneStep, Retention
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.database.engine import Database, StoreSubject
from faststream_sqlbroker.database.parts import audit
from faststream_sqlbroker.database.parts.audit import record_action
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.database.parts.window_rows import build_after, get_archive
from faststream_sqlbroker.database.verified_prune import (
    KeepGoing,
    LoadedPruner,
    LoadedWindows,
    PrunePass,
)
from faststream_sqlbroker.exceptions import AccessError, TransientStoreError
from faststream_sqlbroker.schema import partitions
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.types import MYSQL, later


class ArchivePartitions(StoreSubject):
    """Partitions of an archive in PostgreSQL.

    Raises (from every operation):
        AccessError: the user is not the archive's owner.
        TransientStoreError: a lock was not free within 2 seconds, or as `Store`.
        StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._config = database.tables.config

    @property
    def is_partitioned(self) -> bool:
        """True if the archive has partitions."""
        return self._config.archive_partitions is not None

    async def add(self, by: str | None = None) -> str | None:
        """Add the next missing partition, and record the operator unless `by` is None.

        Returns:
            The partition's name, None if none is missing.
        """
        return await self._run(lambda c: add_partition(c, self._dialect, self._config, by))

    async def drop(self, before: datetime, *, empty: bool) -> str | None:
        """Drop the oldest partition that ended by `before`; return the name.

        With `empty`, only a partition without rows.
        """
        return await self._run(
            lambda c: partitions.drop_partition(c, self._config, before, empty=empty)
        )

    async def _run(self, work: Callable[[Connection], str | None]) -> str | None:
        """Run `work` once; after a lock timeout the next check tries again."""
        # A statement that waits for a lock on the archive blocks all later statements, so do not
        # repeat it here.
        return await self._database.run(work, retry_lock_timeout=False)


def add_partition(
    connection: Connection, dialect: Dialect, config: SqlBrokerSchemaConfig, by: str | None
) -> str | None:
    """Add the next missing partition; unless `by` is None, the audit names the operator.

    Returns the name, None if no partition is missing.
    """
    name = partitions.add_partition(connection, config)
    if name is not None and by is not None:
        record_action(connection, dialect, "add_partition", by, {"partition": name})
    return name


T = TypeVar("T")

BATCH = 1_000
"""Rows that one transaction removes: it locks them until it commits, some 20 ms."""
MAX_SCANNED_ROWS = 20_000
"""Rows that one statement scans to find the newest `max_rows`."""
FULL_SCAN_INTERVAL = 3_600.0
"""Seconds after which a pass starts at the oldest row again. Other passes start where the last pass
ended, so rows with a longer retention are not read each time.
"""
ENDED_STATES = (MessageState.COMPLETED, MessageState.FAILED, MessageState.DISCARDED)
UNFINISHED_NOTE = "it has not ended, or was cut off; what it has removed until then is gone"
"""The note of the audit entry while a prune runs."""


class ArchiveRetention(StoreSubject):
    """The removal of old messages from the archive.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database, partitions: ArchivePartitions) -> None:
        super().__init__(database)
        self.partitions = partitions
        self.loaded_windows = LoadedWindows(database)
        """The records of exports."""

    async def read_cutoff(self, age: float) -> datetime:
        """Return the time `age` seconds ago, by the database's clock."""
        ago = select(later(literal_column(str(-round(age * 1_000_000)))))
        return await self._run_read(lambda connection: connection.execute(ago).scalar_one())

    async def remove(
        self, state: MessageState, before: datetime, after: PrunePosition | None
    ) -> PruneStep:
        """Remove the next messages of `state` after `after` that were archived before `before`.

        One short transaction of up to `BATCH` messages, oldest first. The result has the position
        of the last message, from which the next call continues. A repeat after an unknown outcome
        goes on: removed messages are not found again.
        """

        def remove(connection: Connection) -> PruneStep:
            rows = connection.execute(self._select_oldest(state, before, after).limit(BATCH)).all()
            if not rows:
                return PruneStep(0, None)
            archive = get_archive(self._dialect)
            # A message that was brought back and has ended again since has a later time, which this
            # condition does not match.
            delete_old = delete(archive).where(
                archive.c.state == state.name, archive.c.archived_at < before
            )
            removed = 0
            for ids in iter_chunks([row.id for row in rows]):
                removed += connection.execute(delete_old.where(archive.c.id.in_(ids))).rowcount
            return PruneStep(removed, PrunePosition(rows[-1].archived_at, rows[-1].id))

        return await self._database.run(remove, Activity.PRUNE)

    async def count(
        self, state: MessageState, before: datetime, after: PrunePosition | None
    ) -> PruneStep:
        """Count up to `MAX_SCANNED_ROWS` messages that `remove` would remove, for a dry run.

        The result has the position of the last message, from which the next call continues.
        """

        def count(connection: Connection) -> PruneStep:
            rows = connection.execute(
                self._select_oldest(state, before, after).limit(MAX_SCANNED_ROWS)
            ).all()
            return PruneStep(
                len(rows), PrunePosition(rows[-1].archived_at, rows[-1].id) if rows else None
            )

        return await self._run_read(count)

    def _select_oldest(
        self, state: MessageState, before: datetime, after: PrunePosition | None
    ) -> Select[tuple[datetime, int]]:
        """Select messages of `state` archived before `before`, after `after`, oldest first."""
        c = get_archive(self._dialect).c
        # Filter by age first: COMPLETED rows have no index of their own, and rows with a longer
        # retention lie between them. A pass continues after the last row it has seen, so it reads
        # those once.
        statement = select(c.archived_at, c.id).where(c.archived_at < before)
        if state is MessageState.COMPLETED or self._dialect.name in MYSQL:
            statement = statement.where(c.state == state.name)
        else:
            # Use a literal instead of a bind: a partial index serves only conditions that imply its
            # own condition.
            statement = statement.where(c.state == literal_column(f"'{state.name}'"))
        return statement.where(build_after(self._dialect, after)).order_by(c.archived_at, c.id)

    async def find_time_before_newest(self, number: int) -> datetime | None:
        """Find the time before which messages are beyond the `number` newest (`max_rows`).

        Skips `MAX_SCANNED_ROWS` rows in each transaction. None if there are no such messages.
        Messages of exactly that time stay.
        """
        position: PrunePosition | None = None
        remaining = number
        while remaining > 0:
            step = min(remaining, MAX_SCANNED_ROWS)
            position = await self._run_read(
                partial(self._skip_newest, number=step, position=position)
            )
            if position is None:
                return None
            remaining -= step
        return None if position is None else position.at

    def _skip_newest(
        self, connection: Connection, *, number: int, position: PrunePosition | None
    ) -> PrunePosition | None:
        """Find the last of the `number` newest rows before `position`; None if fewer exist.

        The next step continues there, so that no statement skips too many rows.
        """
        c = get_archive(self._dialect).c
        statement = select(c.archived_at, c.id)
        if position is not None:
            statement = statement.where(
                or_(
                    c.archived_at < position.at,
                    and_(c.archived_at == position.at, c.id < position.id),
                ),
                # Implied by the OR, but a range that the index can use.
                c.archived_at <= position.at,
            )
        latest = statement.order_by(c.archived_at.desc(), c.id.desc())
        row = connection.execute(latest.offset(number - 1).limit(1)).first()
        return None if row is None else PrunePosition(row.archived_at, row.id)

    async def record_prune_start(self, by: str, options: Mapping[str, Any]) -> Job:
        """Add an audit entry for a prune that starts; options that are None are omitted.

        Until `record_prune_end` its note says that the prune has not ended, in case the process
        dies.
        """
        arguments = {name: value for name, value in options.items() if value is not None}
        job = Job(action="prune", by=by, arguments=arguments, note=UNFINISHED_NOTE)

        def add_job(connection: Connection) -> Job:
            return audit.add_job(connection, self._table, job, self._dialect.now(connection))

        return await self._database.run(add_job, Activity.OPERATE)

    async def record_prune_end(self, job: Job, result: Pruned) -> None:
        """Complete the audit entry `job` with the number of removed messages.

        Without this the entry says that the prune has not ended. Dropped partitions are named.
        """

        def end_job(connection: Connection) -> None:
            dropped = {"partitions": result.partitions} if result.partitions else {}
            ended = replace(
                job,
                arguments={**job.arguments, **dropped},
                state="ended",
                note=None,
                expected=result.rows,
                done=result.rows,
                ended_at=self._dialect.now(connection),
            )
            audit.save_job(connection, self._table, ended, None)

        await self._database.run(end_job, Activity.OPERATE)

    async def _run_read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.run(work, Activity.PRUNE, write=False)


class Pruner:
    """Removes messages from the archive of a broker by the rules of `Retention`."""

    def __init__(self, rows: ArchiveRetention, retention: Retention, clock: Clock) -> None:
        """Store the rules; nothing is removed before `prune`."""
        self._rows = rows
        self._retention = retention
        self._clock = clock
        self._ages = retention.ages
        self._positions: dict[MessageState, PrunePosition] = {}
        self._started_at = float("-inf")
        self._loaded_pruner: LoadedPruner | None = None
        if retention.unless_loaded_by is not None:
            self._loaded_pruner = LoadedPruner(rows.loaded_windows, retention.unless_loaded_by)

    async def prune(self, *, dry_run: bool = False, keep: KeepGoing | None = None) -> Pruned:
        """Remove all messages past their limits, or only count in a dry run.

        Called regularly. With a lake, only messages that an export has loaded into it are removed.

        Args:
            dry_run: Remove nothing.
            keep: Called before each step; False ends the pass.

        Raises:
            StoreError: the database failed; earlier steps stay removed.
        """
        prune_pass = PrunePass(self._clock, dry_run, keep)
        now = self._clock.monotonic()
        if dry_run or now - self._started_at >= FULL_SCAN_INTERVAL:
            self._reset()
            self._started_at = now
        limits = await self._find_limits()
        if self._loaded_pruner is not None:
            await self._loaded_pruner.prune(limits, prune_pass)
        # A row that is dropped with its partition costs no DELETE. With a lake, only empty
        # partitions are dropped, because a row may be missing in the lake.
        if not dry_run:
            partitions = prune_pass.result.partitions
            await self._drop_partitions(limits, partitions, empty=self._loaded_pruner is not None)
        if self._loaded_pruner is None:
            for state, cutoff in limits.items():
                await self._prune_state(state, cutoff, prune_pass)
        return prune_pass.result

    async def _drop_partitions(
        self, limits: Mapping[MessageState, datetime], dropped: list[str], *, empty: bool
    ) -> None:
        """Drop the partitions whose messages of every state are past their age limit.

        Their names are added to `dropped`. Dropping costs much less than deleting the rows. Skipped
        if a state is kept for ever. With `empty`, only partitions without rows are dropped.
        """
        if not self._rows.partitions.is_partitioned or set(limits) != set(ENDED_STATES):
            return
        cutoff = min(limits.values())
        # If the user is not the owner, or a reader holds the lock, the rows are deleted one by one.
        with suppress(AccessError, TransientStoreError):
            while name := await self._rows.partitions.drop(cutoff, empty=empty):
                dropped.append(name)

    def _reset(self) -> None:
        """Start at the oldest row again, to find rows that earlier passes have missed.

        A pass misses a row whose transaction commits after the pass has read later rows.
        """
        self._positions.clear()
        if self._loaded_pruner is not None:
            self._loaded_pruner.reset()

    async def _find_limits(self) -> dict[MessageState, datetime]:
        """Return the time before which messages of each state are removed.

        That is the age limit of the state, or the time of the `max_rows` newest messages, whichever
        is later. A state without a limit is missing.
        """
        limits = {state: await self._rows.read_cutoff(age) for state, age in self._ages.items()}
        if self._retention.max_rows is not None:
            by_number = await self._rows.find_time_before_newest(self._retention.max_rows)
            if by_number is not None:
                for state in ENDED_STATES:
                    limits[state] = max(limits.get(state, by_number), by_number)
        return limits

    async def _prune_state(
        self, state: MessageState, before: datetime, prune_pass: PrunePass
    ) -> None:
        """Remove the messages of `state` archived before `before`, in steps; a dry run counts.

        Continues after the last row of the previous pass, so that rows of other states in between
        are read once. Rests after each step that removes rows.
        """
        run_step = self._rows.count if prune_pass.dry_run else self._rows.remove
        position = self._positions.get(state)
        while await prune_pass.may_continue():
            started_at = self._clock.monotonic()
            step = await run_step(state, before, position)
            prune_pass.result.add(state, step.rows)
            # No row was found. A batch that is not full is not the end: other processes may have
            # removed some of its rows.
            if step.last is None:
                return
            position = step.last
            if not prune_pass.dry_run:
                self._positions[state] = position
                await prune_pass.rest(started_at)
