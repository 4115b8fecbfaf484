"""Compare the archive's rows with the records of an export, and remove only rows that match.

A window is compared once, page by page. Each page is removed in a transaction of its own, which
locks the window's record first and checks the page again. So a new row or a record that an export
has renewed is always noticed.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, and_, delete, null, or_, select, update

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.loaded_windows import (
    DIFFERING_SCOPE,
    LOADED_SCOPE,
    LoadedWindow,
    RowSum,
    parse_window,
)
from faststream_sqlbroker.core.retention import Pruned, PrunePosition
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.parts.sizes import iter_chunks
from faststream_sqlbroker.database.parts.window_rows import (
    WindowPage,
    get_archive,
    read_page,
    select_rows,
    sum_rows,
)
from faststream_sqlbroker.schema.types import clock

T = TypeVar("T")
KeepGoing = Callable[[], Awaitable[bool]]
REST_FACTOR = 4.0
"""Each step is followed by a rest of so many times its length: the database is busy for a fifth of
the time, so consumers lose little.
"""
WINDOWS_PER_PAGE = 100
"""Windows that are listed at a time."""
MAX_DIFFERING = 20
"""Maximum number of windows that `list_differing` returns."""


class LoadedWindows(StoreSubject):
    """The records of exports, and the covered rows.

    Each step is one transaction.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    async def list_windows(
        self, lake: str, until: datetime, after: tuple[datetime, str] | None
    ) -> list[LoadedWindow]:
        """List the next windows that ended by `until` and still have rows, oldest first.

        A window is an hour or a day of `archived_at` that an export has loaded into the lake.
        `after` is the end and the name of the last window of the page before.
        """
        c = self._table.c
        statement = select(c.key, c.info, c.counter).where(
            c.scope == LOADED_SCOPE + lake, c.due_at.is_not(None), c.due_at <= until
        )
        if after is not None:
            end, name = after
            # The second condition is implied, but a range that the index can use.
            statement = statement.where(
                or_(c.due_at > end, and_(c.due_at == end, c.key > name)), c.due_at >= end
            )
        statement = statement.order_by(c.due_at, c.key).limit(WINDOWS_PER_PAGE)
        rows = await self._run_read(lambda connection: connection.execute(statement).all())
        return [parse_window(*row) for row in rows]

    async def has_any(self, window: LoadedWindow, states: Collection[MessageState]) -> bool:
        """Return True if the archive has a row of the window in any of `states`.

        A quick check before all rows of the window are summed.
        """
        c = get_archive(self._dialect).c
        names = [state.name for state in states]
        statement = select(c.id).where(
            c.archived_at >= window.start, c.archived_at < window.end, c.state.in_(names)
        )
        ordered = statement.order_by(c.archived_at, c.id).limit(1)
        return await self._run_read(
            lambda connection: connection.execute(ordered).first() is not None
        )

    async def read_next_page(self, window: LoadedWindow, after: PrunePosition | None) -> WindowPage:
        """Read the window's next rows, their number and the sum of their ids.

        The sums of all pages must equal the export's record before a row is removed.
        """
        return await self._run_read(lambda c: read_page(c, self._dialect, window, after))

    async def remove(
        self, lake: str, window: LoadedWindow, page: WindowPage, states: Collection[MessageState]
    ) -> LoadedWindow | None:
        """Remove the page's rows in `states`, and lower the counts in the window's record.

        A window is an hour or a day of `archived_at`; its record says how many rows an export has
        loaded. Both are one transaction, which locks the record first and reads the page again: it
        was compared in another transaction, and must still be the same.

        Returns:
            The window's new record. None, and nothing is removed, if the record or the page has
            changed
            since it was compared.
        """

        def remove(connection: Connection) -> LoadedWindow | None:
            if not self._lock(connection, lake, window):
                return None
            page_rows = select_rows(self._dialect, window, page.after, page.last)
            rows = connection.execute(page_rows).all()
            if sum_rows(rows) != page.rows:
                return None
            removed = [row for row in rows if MessageState[row.state] in states]
            # A row that was brought back since the read has left the window as if it were removed
            # here. If it has ended again, its time differs and this condition does not match it.
            archive = get_archive(self._dialect)
            delete_rows = delete(archive).where(
                archive.c.archived_at >= window.start, archive.c.archived_at < window.end
            )
            for ids in iter_chunks([row.id for row in removed]):
                connection.execute(delete_rows.where(archive.c.id.in_(ids)))
            remaining = window.remaining - sum_rows(removed)
            updated = replace(window, remaining=remaining, version=window.version + 1)
            values: dict[str, Any] = {"info": updated.to_json(), "counter": updated.version}
            if not updated.remaining.rows:
                values["due_at"] = null()
            connection.execute(self._update_record(lake, window).values(**values))
            return updated

        return await self._database.run(remove, Activity.PRUNE)

    async def quarantine(self, lake: str, window: LoadedWindow, actual: RowSum) -> bool:
        """Record that the window's rows differ from the export; return True the first time.

        The record moves to another scope, where prunes do not find it. No row of the window is
        removed until an export has recorded it again. False also if the record has changed since it
        was compared.
        """

        def note(connection: Connection) -> bool:
            if not self._lock(connection, lake, window):
                return False
            info = {**window.to_json(), "found_rows": actual.rows, "found_ids": str(actual.ids)}
            values = {"info": info, "counter": window.version + 1, "created_at": clock()}
            record = self._update_record(lake, window)
            connection.execute(record.values(scope=DIFFERING_SCOPE + lake, due_at=null(), **values))
            return True

        return await self._database.run(note, Activity.PRUNE)

    async def list_differing(self) -> list[tuple[str, str]]:
        """List up to `MAX_DIFFERING` quarantined windows, each with the lake."""
        c = self._table.c
        # Compare with the next character, so that the primary key is used; names of lakes follow
        # the colon.
        end = DIFFERING_SCOPE[:-1] + chr(ord(DIFFERING_SCOPE[-1]) + 1)
        statement = select(c.scope, c.key).where(c.scope >= DIFFERING_SCOPE, c.scope < end)
        statement = statement.order_by(c.scope, c.key).limit(MAX_DIFFERING)
        rows = await self._run_read(lambda connection: connection.execute(statement).all())
        return [(row.scope.removeprefix(DIFFERING_SCOPE), row.key) for row in rows]

    def _update_record(self, lake: str, window: LoadedWindow) -> Any:
        """Start an UPDATE of the window's record in the policy state."""
        c = self._table.c
        return update(self._table).where(c.scope == LOADED_SCOPE + lake, c.key == window.name)

    def _lock(self, connection: Connection, lake: str, window: LoadedWindow) -> bool:
        """Lock the window's record; return True if the record still matches `window`.

        Each change raises the version: an export, a prune or a redrive may have changed the record.
        """
        c = self._table.c
        record = select(c.counter).where(c.scope == LOADED_SCOPE + lake, c.key == window.name)
        return connection.execute(record.with_for_update()).scalar() == window.version

    async def _run_read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.run(work, Activity.PRUNE, write=False)


@dataclass(slots=True)
class PrunePass:
    """A pass over the archive, which removes rows in steps."""

    clock: Clock
    dry_run: bool
    """True to remove nothing."""
    keep: KeepGoing | None
    """Called before each step; False ends the pass, for example because another process has taken
    the lock of the prune."""
    result: Pruned = field(default_factory=Pruned)

    async def may_continue(self) -> bool:
        """Return True if the next step may be done."""
        return self.keep is None or await self.keep()

    async def rest(self, started_at: float) -> None:
        """Sleep `REST_FACTOR` times as long as the step took, for the sake of consumers."""
        await self.clock.sleep(REST_FACTOR * (self.clock.monotonic() - started_at))


class LoadedPruner:
    """A pruner of the windows of a lake, each as a unit."""

    def __init__(self, loaded: LoadedWindows, lake: str) -> None:
        """Store the options; nothing is removed before `prune`."""
        self._loaded = loaded
        self._lake = lake
        self._pruned_states: dict[str, set[MessageState]] = {}

    def reset(self) -> None:
        """Check each window again, also windows whose old rows an earlier pass has removed."""
        self._pruned_states.clear()

    async def prune(self, limits: Mapping[MessageState, datetime], prune_pass: PrunePass) -> None:
        """Remove the messages of each state that ended before the state's limit.

        Works through the windows that an export has loaded into the lake, oldest first. A window
        counts only as a whole, once it has ended before the limit. Its rows are removed only if
        they equal the export's record of them.
        """
        if not limits:
            return
        until = max(limits.values())
        position: tuple[datetime, str] | None = None
        while windows := await self._loaded.list_windows(self._lake, until, position):
            for window in windows:
                position = window.end, window.name
                due_states = {state for state, limit in limits.items() if window.end <= limit}
                # An earlier pass of this process has dealt with the rows in these states.
                due_states -= self._pruned_states.get(window.name, set())
                if due_states and not await self._prune_window(window, due_states, prune_pass):
                    return

    async def _prune_window(
        self, window: LoadedWindow, due_states: set[MessageState], prune_pass: PrunePass
    ) -> bool:
        """Compare a window with the record, then remove the rows in `due_states`.

        A window that differs is quarantined: nothing of it is removed until an export records it
        again. Returns False if this process must stop, or if a page has changed in the meantime;
        the next pass compares the window again.
        """
        if await self._loaded.has_any(window, due_states):
            pages = await self._read_pages(window, prune_pass)
            if pages is None:
                return False
            actual = sum((page.rows for page in pages), RowSum())
            if actual != window.remaining:
                if prune_pass.dry_run or await self._loaded.quarantine(self._lake, window, actual):
                    difference = f"{window.name}: {actual}, not {window.remaining}"
                    prune_pass.result.differing.append(difference)
                return True
            if not await self._remove_pages(window, pages, due_states, prune_pass):
                return False
        if not prune_pass.dry_run:
            self._pruned_states.setdefault(window.name, set()).update(due_states)
        return True

    async def _read_pages(
        self, window: LoadedWindow, prune_pass: PrunePass
    ) -> list[WindowPage] | None:
        """Sum the window's rows page by page, with a rest after each; return None to stop.

        A window is all rows archived in an hour or a day. Each page is a short transaction, because
        a window may have millions of rows.
        """
        pages: list[WindowPage] = []
        while not pages or pages[-1].last is not None:
            if not await prune_pass.may_continue():
                return None
            started_at = prune_pass.clock.monotonic()
            pages.append(
                await self._loaded.read_next_page(window, pages[-1].last if pages else None)
            )
            await prune_pass.rest(started_at)
        return pages

    async def _remove_pages(
        self,
        window: LoadedWindow,
        pages: list[WindowPage],
        due_states: set[MessageState],
        prune_pass: PrunePass,
    ) -> bool:
        """Remove the rows in `due_states` of all pages, or only count in a dry run.

        Returns False if this process must stop, or if a page has changed since it was compared.
        """
        for page in pages:
            if due_states & page.states.keys() and not prune_pass.dry_run:
                if not await prune_pass.may_continue():
                    return False
                started_at = prune_pass.clock.monotonic()
                updated = await self._loaded.remove(self._lake, window, page, due_states)
                if updated is None:
                    return False
                window = updated
                await prune_pass.rest(started_at)
            for state in due_states:
                prune_pass.result.add(state, page.states[state])
        return True
