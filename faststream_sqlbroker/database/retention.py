"""Removes finished messages by their age and their number; each step is one transaction."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.jobs import Job
from faststream_sqlbroker.core.retention import Growth, Place, Pruned, Step
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.loaded_pruner import LoadedWindows
from faststream_sqlbroker.database.partitions import ArchivePartitions
from faststream_sqlbroker.database.parts import jobs
from faststream_sqlbroker.database.parts import retention as rows

T = TypeVar("T")

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
        return await self._read(lambda c: rows.cutoff(c, age))

    async def remove(self, state: MessageState, before: datetime, after: Place | None) -> Step:
        """Remove the first messages of `state` behind `after` that were archived before `before`.

        Repeated after an unknown outcome it goes on: what is gone is not found again.
        """
        return await self._database.run(
            lambda c: rows.remove(c, self._dialect, state, before, after), Activity.PRUNE
        )

    async def count(self, state: MessageState, before: datetime, after: Place | None) -> Step:
        """As `remove`, but nothing is removed."""
        return await self._read(lambda c: rows.count(c, self._dialect, state, before, after))

    async def before_newest(self, number: int) -> datetime | None:
        """The moment before which messages lie that are not among the `number` newest; None: there
        are none. Those of that very moment stay.
        """
        place: Place | None = None
        left = number
        while left > 0:
            part = min(left, rows.WALK)
            place = await self._read(partial(self._walk, number=part, place=place))
            if place is None:
                return None
            left -= part
        return None if place is None else place.at

    def _walk(self, connection: Connection, *, number: int, place: Place | None) -> Place | None:
        return rows.before_newest(connection, self._dialect, number, place)

    async def note_prune(self, by: str, given: Mapping[str, Any]) -> Job:
        """An entry of the audit for a prune that begins; None in `given` is left out."""
        arguments = {name: value for name, value in given.items() if value is not None}
        job = Job(action="prune", by=by, arguments=arguments, note=UNENDED)

        def work(connection: Connection) -> Job:
            return jobs.add(connection, self._table, job, self._dialect.now(connection))

        return await self._database.run(work, Activity.OPERATE)

    async def note_pruned(self, begun: Job, pruned: Pruned) -> None:
        """Complete the entry `begun`: what the prune has removed."""

        def work(connection: Connection) -> None:
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
            jobs.save(connection, self._table, ended, None)

        await self._database.run(work, Activity.OPERATE)

    async def growth(self) -> Growth:
        """How fast the archive grows."""
        return await self._read(lambda c: rows.growth(c, self._dialect))

    async def _read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.run(work, Activity.PRUNE, write=False)
