"""Removes finished messages from the archive by their age and their number, the oldest first, a few
in each transaction; and adds and drops its partitions.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import (
    Connection,
    Select,
    and_,
    delete,
    literal_column,
    or_,
    select,
)

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.jobs import Job
from faststream_sqlbroker.core.retention import Place, Pruned, Retention, Step
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.loaded_windows import REST, LoadedPruner, LoadedWindows
from faststream_sqlbroker.database.parts import audit
from faststream_sqlbroker.database.parts.audit import note_action
from faststream_sqlbroker.database.parts.loaded_windows import archive_of, behind
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.exceptions import AccessError, TransientStoreError
from faststream_sqlbroker.schema import partitions
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.types import MYSQL, later


class ArchivePartitions:
    """Only for PostgreSQL's archives with partitions.

    Raises (from every operation):
        AccessError: the user is not the archive's owner.
        TransientStoreError: a lock was not free within 2 seconds, or as `Store`.
        StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._config = database.tables.config

    @property
    def there(self) -> bool:
        """Whether the archive has partitions."""
        return self._config.archive_partitions is not None

    async def add(self, by: str | None = None) -> str | None:
        """Make the next that is missing, and note who did unless `by` is None; its name, or None:
        none is missing.
        """
        return await self._run(lambda c: add_noted(c, self._dialect, self._config, by))

    async def drop(self, before: datetime, *, empty: bool) -> str | None:
        """Drop the oldest that ended by `before`, with `empty` one without rows; its name."""
        return await self._run(
            lambda c: partitions.drop_partition(c, self._config, before, empty=empty)
        )

    async def _run(self, work: Callable[[Connection], str | None]) -> str | None:
        # Who waits for a lock on the archive holds up all that comes later: rather try again.
        return await self._database.run(work, patient=False)


def add_noted(
    connection: Connection, dialect: Dialect, config: SqlBrokerSchemaConfig, by: str | None
) -> str | None:
    """Make the next partition that is missing; unless `by` is None, the audit names who did."""
    name = partitions.add_partition(connection, config)
    if name is not None and by is not None:
        note_action(connection, dialect, "add_partition", by, {"partition": name})
    return name


T = TypeVar("T")

BATCH = 1_000
"""Rows that one transaction removes: it locks them until it commits, some 20 ms."""
WALK = 20_000
"""Rows that one statement walks over to find the newest `max_rows`."""
FROM_START = 3_600.0
"""Seconds after which a pass begins at the oldest row again. Others begin where the last one ended:
what is kept for longer is not read each time."""
ENDED = (MessageState.COMPLETED, MessageState.FAILED, MessageState.DISCARDED)
UNENDED = "it has not ended, or was cut off; what it has removed until then is gone"
"""Of the entry in the audit while a prune runs."""


class ArchiveRetention:
    """Looks for old messages and removes them.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(
        self,
        database: Database,
        partitions: ArchivePartitions,
    ) -> None:
        self._database = database
        self.partitions = partitions
        self._dialect = database.dialect
        self._table = database.tables.policy_state
        self.loaded = LoadedWindows(database)
        """What exports have recorded."""

    async def cutoff(self, age: float) -> datetime:
        """The moment `age` seconds ago, by the database's clock."""
        ago = select(later(literal_column(str(-round(age * 1_000_000)))))
        return await self._read(lambda connection: connection.execute(ago).scalar_one())

    async def remove(self, state: MessageState, before: datetime, after: Place | None) -> Step:
        """Remove the first messages of `state` behind `after` that were archived before `before`.

        Repeated after an unknown outcome it goes on: what is gone is not found again.
        """

        def remove(connection: Connection) -> Step:
            rows = connection.execute(self._oldest(state, before, after).limit(BATCH)).all()
            if not rows:
                return Step(0, None)
            archive = archive_of(self._dialect)
            # A message that was brought back and has ended again since has another moment.
            old = delete(archive).where(
                archive.c.state == state.name, archive.c.archived_at < before
            )
            removed = 0
            for ids in chunks([row.id for row in rows]):
                removed += connection.execute(old.where(archive.c.id.in_(ids))).rowcount
            return Step(removed, Place(rows[-1].archived_at, rows[-1].id))

        return await self._database.run(remove, Activity.PRUNE)

    async def count(self, state: MessageState, before: datetime, after: Place | None) -> Step:
        """As `remove`, but only count, `WALK` at a time."""

        def count(connection: Connection) -> Step:
            rows = connection.execute(self._oldest(state, before, after).limit(WALK)).all()
            return Step(len(rows), Place(rows[-1].archived_at, rows[-1].id) if rows else None)

        return await self._read(count)

    def _oldest(
        self, state: MessageState, before: datetime, after: Place | None
    ) -> Select[tuple[datetime, int]]:
        c = archive_of(self._dialect).c
        # By age first: COMPLETED rows have no index of their own, and what is kept for longer lies
        # between them. A pass begins behind what it has seen, so it reads those once.
        statement = select(c.archived_at, c.id).where(c.archived_at < before)
        if state is MessageState.COMPLETED or self._dialect.name in MYSQL:
            statement = statement.where(c.state == state.name)
        else:
            # Written out, not bound: a partial index serves only conditions that imply its own.
            statement = statement.where(c.state == literal_column(f"'{state.name}'"))
        return statement.where(behind(self._dialect, after)).order_by(c.archived_at, c.id)

    async def before_newest(self, number: int) -> datetime | None:
        """The moment before which messages lie that are not among the `number` newest; None: there
        are none. Those of that very moment stay.
        """
        place: Place | None = None
        left = number
        while left > 0:
            part = min(left, WALK)
            place = await self._read(partial(self._walk, number=part, place=place))
            if place is None:
                return None
            left -= part
        return None if place is None else place.at

    def _walk(self, connection: Connection, *, number: int, place: Place | None) -> Place | None:
        """The row that `number` newer ones lie before, from `place` on; None: there are not so
        many.
        """
        c = archive_of(self._dialect).c
        statement = select(c.archived_at, c.id)
        if place is not None:
            statement = statement.where(
                or_(c.archived_at < place.at, and_(c.archived_at == place.at, c.id < place.id)),
                c.archived_at <= place.at,
            )
        newest = statement.order_by(c.archived_at.desc(), c.id.desc())
        row = connection.execute(newest.offset(number - 1).limit(1)).first()
        return None if row is None else Place(row.archived_at, row.id)

    async def note_prune(self, by: str, given: Mapping[str, Any]) -> Job:
        """An entry of the audit for a prune that begins; None in `given` is left out."""
        arguments = {name: value for name, value in given.items() if value is not None}
        job = Job(action="prune", by=by, arguments=arguments, note=UNENDED)

        def add_job(connection: Connection) -> Job:
            return audit.add(connection, self._table, job, self._dialect.now(connection))

        return await self._database.run(add_job, Activity.OPERATE)

    async def note_pruned(self, begun: Job, pruned: Pruned) -> None:
        """Complete the entry `begun`: what the prune has removed."""

        def end_job(connection: Connection) -> None:
            dropped = {"partitions": pruned.partitions} if pruned.partitions else {}
            ended = replace(
                begun,
                arguments={**begun.arguments, **dropped},
                state="ended",
                note=None,
                expected=pruned.rows,
                done=pruned.rows,
                ended_at=self._dialect.now(connection),
            )
            audit.save(connection, self._table, ended, None)

        await self._database.run(end_job, Activity.OPERATE)

    async def _read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.run(work, Activity.PRUNE, write=False)


class Pruner:
    """Removes what `Retention` says from the archive of one broker."""

    def __init__(self, rows: ArchiveRetention, retention: Retention, clock: Clock) -> None:
        """Nothing is removed before `prune`."""
        self._rows = rows
        self._retention = retention
        self._clock = clock
        self._ages = retention.ages
        self._reached: dict[MessageState, Place] = {}
        self._began_at = float("-inf")
        self._loaded: LoadedPruner | None = None
        if retention.unless_loaded_by is not None:
            self._loaded = LoadedPruner(rows.loaded, retention.unless_loaded_by, clock)

    async def prune(
        self, *, dry_run: bool = False, keep: Callable[[], Awaitable[bool]] | None = None
    ) -> Pruned:
        """Remove all that is old; of a dry run only count it.

        Args:
            dry_run: Remove nothing.
            keep: Asked before each step; false ends the pass.

        Raises:
            StoreError: the database failed; what was removed until then is gone.
        """
        pruned = Pruned()
        now = self._clock.monotonic()
        if dry_run or now - self._began_at >= FROM_START:
            self._forget()
            self._began_at = now
        limits = await self._limits()
        if self._loaded is not None:
            await self._loaded.prune(limits, pruned, dry_run=dry_run, keep=keep)
        # A row that goes with its partition costs no DELETE; one that a lake may lack never does.
        if not dry_run:
            await self._drop_partitions(limits, pruned, empty=self._loaded is not None)
        if self._loaded is None:
            for state, before in limits.items():
                await self._state(state, before, pruned, dry_run=dry_run, keep=keep)
        return pruned

    async def _drop_partitions(
        self, limits: Mapping[MessageState, datetime], pruned: Pruned, *, empty: bool
    ) -> None:
        """Drop the partitions in which every outcome is old."""
        if not self._rows.partitions.there or set(limits) != set(ENDED):
            return
        before = min(limits.values())
        # Rows are deleted one by one where the user is not the owner, or a reader holds the lock.
        with suppress(AccessError, TransientStoreError):
            while name := await self._rows.partitions.drop(before, empty=empty):
                pruned.partitions.append(name)

    def _forget(self) -> None:
        """Begin at the oldest row again."""
        self._reached.clear()
        if self._loaded is not None:
            self._loaded.forget()

    async def _limits(self) -> dict[MessageState, datetime]:
        """The moment before which messages of each state go."""
        found = {state: await self._rows.cutoff(age) for state, age in self._ages.items()}
        if self._retention.max_rows is not None:
            by_number = await self._rows.before_newest(self._retention.max_rows)
            if by_number is not None:
                for state in ENDED:
                    found[state] = max(found.get(state, by_number), by_number)
        return found

    async def _state(
        self,
        state: MessageState,
        before: datetime,
        pruned: Pruned,
        *,
        dry_run: bool,
        keep: Callable[[], Awaitable[bool]] | None,
    ) -> None:
        act = self._rows.count if dry_run else self._rows.remove
        place = self._reached.get(state)
        while keep is None or await keep():
            began = self._clock.monotonic()
            step = await act(state, before, place)
            pruned.add(state, step.rows)
            # No row was found. Fewer than a batch may mean that others removed some, so it is not
            # taken for the end.
            if step.last is None:
                return
            place = step.last
            if not dry_run:
                self._reached[state] = place
                await self._clock.sleep(REST * (self._clock.monotonic() - began))
