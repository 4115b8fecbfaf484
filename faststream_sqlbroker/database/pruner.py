"""One pass over the archive, in small steps: what is old goes, the oldest first."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import datetime

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.retention import Place, Pruned, Retention
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.loaded_pruner import LoadedPruner
from faststream_sqlbroker.database.retention import ArchiveRetention
from faststream_sqlbroker.exceptions import AccessError, TransientStoreError

REST = 4.0
"""Each step is followed by a rest so many times as long: the database does it a fifth of the
time, so consumers lose little."""
FROM_START = 3_600.0
"""Seconds after which a pass begins at the oldest row again. Others begin where the last one ended:
what is kept for longer is not read each time."""
ENDED = (MessageState.COMPLETED, MessageState.FAILED, MessageState.DISCARDED)


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
