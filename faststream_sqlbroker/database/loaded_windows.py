"""Compares the archive's rows with what an export has recorded of them, and removes only those.

A window is compared once, page by page. Each page is removed in a transaction of its own, which
locks the window's record first and looks at the page again. So neither a row that has come since
nor a record that an export has renewed goes unnoticed.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Connection, and_, delete, null, or_, select, update

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.loaded_windows import (
    DIFFERS,
    LOADED,
    LoadedWindow,
    RowSum,
    window_of,
)
from faststream_sqlbroker.core.retention import Place, Pruned
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts.loaded_windows import (
    Page,
    archive_of,
    read_page,
    rows_between,
    sum_of,
)
from faststream_sqlbroker.database.parts.sizes import chunks
from faststream_sqlbroker.schema.types import clock

T = TypeVar("T")
Keep = Callable[[], Awaitable[bool]]
REST = 4.0
"""Each step is followed by a rest so many times as long: the database does it a fifth of the
time, so consumers lose little."""
LISTED = 100
"""Windows that are listed at a time."""
MAX_DIFFERING = 20
"""Windows that `differing` lists."""


class LoadedWindows:
    """Reads the records of exports, and removes rows under them; each step is one transaction.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    async def windows(
        self, lake: str, until: datetime, after: tuple[datetime, str] | None
    ) -> list[LoadedWindow]:
        """The next windows that have ended by `until` and of which rows are left, the oldest
        first.
        """
        c = self._table.c
        statement = select(c.key, c.info, c.counter).where(
            c.scope == LOADED + lake, c.due_at.is_not(None), c.due_at <= until
        )
        if after is not None:
            end, name = after
            statement = statement.where(
                or_(c.due_at > end, and_(c.due_at == end, c.key > name)), c.due_at >= end
            )
        statement = statement.order_by(c.due_at, c.key).limit(LISTED)
        rows = await self._read(lambda connection: connection.execute(statement).all())
        return [window_of(*row) for row in rows]

    async def has_any(self, window: LoadedWindow, states: Collection[MessageState]) -> bool:
        """Whether the archive has a row of the window in one of `states`."""
        c = archive_of(self._dialect).c
        names = [state.name for state in states]
        statement = select(c.id).where(
            c.archived_at >= window.start, c.archived_at < window.end, c.state.in_(names)
        )
        ordered = statement.order_by(c.archived_at, c.id).limit(1)
        return await self._read(lambda connection: connection.execute(ordered).first() is not None)

    async def page(self, window: LoadedWindow, after: Place | None) -> Page:
        """The window's next rows."""
        return await self._read(lambda c: read_page(c, self._dialect, window, after))

    async def remove(
        self, lake: str, window: LoadedWindow, page: Page, states: Collection[MessageState]
    ) -> LoadedWindow | None:
        """Remove the page's rows in one of `states`, and lower the window's record.

        Returns:
            The window's new record; None, and nothing was removed: the record, or the page, is no
            longer what was compared.
        """

        def remove(connection: Connection) -> LoadedWindow | None:
            if not self._lock(connection, lake, window):
                return None
            between = rows_between(self._dialect, window, page.after, page.last)
            rows = connection.execute(between).all()
            if sum_of(rows) != page.rows:
                return None
            removed = [row for row in rows if MessageState[row.state] in states]
            # A row that was brought back since the look has left the window as if it were removed
            # here. If it has ended again, it has another moment.
            archive = archive_of(self._dialect)
            old = delete(archive).where(
                archive.c.archived_at >= window.start, archive.c.archived_at < window.end
            )
            for ids in chunks([row.id for row in removed]):
                connection.execute(old.where(archive.c.id.in_(ids)))
            left = window.left - sum_of(removed)
            lowered = replace(window, left=left, version=window.version + 1)
            values: dict[str, Any] = {"info": lowered.info(), "counter": lowered.version}
            if not lowered.left.rows:
                values["due_at"] = null()
            connection.execute(self._record(lake, window).values(**values))
            return lowered

        return await self._database.run(remove, Activity.PRUNE)

    async def set_apart(self, lake: str, window: LoadedWindow, found: RowSum) -> bool:
        """Note that the window has other rows than were recorded; whether this was the first to
        see.

        False also if the record has changed since it was compared.
        """

        def note(connection: Connection) -> bool:
            if not self._lock(connection, lake, window):
                return False
            info = {**window.info(), "found_rows": found.rows, "found_ids": str(found.ids)}
            values = {"info": info, "counter": window.version + 1, "created_at": clock()}
            record = self._record(lake, window)
            connection.execute(record.values(scope=DIFFERS + lake, due_at=null(), **values))
            return True

        return await self._database.run(note, Activity.PRUNE)

    async def differing(self) -> list[tuple[str, str]]:
        """Lake and window of those that have other rows than were recorded, `MAX_DIFFERING` at
        most.
        """
        c = self._table.c
        # The next character, so that the primary key serves; names of lakes follow the colon.
        end = DIFFERS[:-1] + chr(ord(DIFFERS[-1]) + 1)
        statement = select(c.scope, c.key).where(c.scope >= DIFFERS, c.scope < end)
        statement = statement.order_by(c.scope, c.key).limit(MAX_DIFFERING)
        rows = await self._read(lambda connection: connection.execute(statement).all())
        return [(row.scope.removeprefix(DIFFERS), row.key) for row in rows]

    def _record(self, lake: str, window: LoadedWindow) -> Any:
        c = self._table.c
        return update(self._table).where(c.scope == LOADED + lake, c.key == window.name)

    def _lock(self, connection: Connection, lake: str, window: LoadedWindow) -> bool:
        """Lock the window's record; whether it is still that of `window`."""
        c = self._table.c
        record = select(c.counter).where(c.scope == LOADED + lake, c.key == window.name)
        return connection.execute(record.with_for_update()).scalar() == window.version

    async def _read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.run(work, Activity.PRUNE, write=False)


class LoadedPruner:
    """Removes what is old of the windows of one lake, whole windows only."""

    def __init__(self, loaded: LoadedWindows, lake: str, clock: Clock) -> None:
        """Nothing is removed before `prune`."""
        self._loaded = loaded
        self._lake = lake
        self._clock = clock
        self._done: dict[str, set[MessageState]] = {}

    def forget(self) -> None:
        """Look at each window again, also where nothing old was left."""
        self._done.clear()

    async def prune(
        self,
        limits: Mapping[MessageState, datetime],
        pruned: Pruned,
        *,
        dry_run: bool,
        keep: Keep | None,
    ) -> None:
        """Remove the messages of each state that ended before its limit, in windows that ended by
        then; add them to `pruned`.
        """
        if not limits:
            return
        until = max(limits.values())
        after: tuple[datetime, str] | None = None
        while listed := await self._loaded.windows(self._lake, until, after):
            for window in listed:
                after = window.end, window.name
                due = {state for state, before in limits.items() if window.end <= before}
                due -= self._done.get(window.name, set())
                if due and not await self._window(window, due, pruned, dry_run=dry_run, keep=keep):
                    return

    async def _window(
        self,
        window: LoadedWindow,
        due: set[MessageState],
        pruned: Pruned,
        *,
        dry_run: bool,
        keep: Keep | None,
    ) -> bool:
        """One window; false: this process is to stop."""
        if await self._loaded.has_any(window, due):
            pages = await self._compare(window, keep)
            if pages is None:
                return False
            found = sum((page.rows for page in pages), RowSum())
            if found != window.left:
                if dry_run or await self._loaded.set_apart(self._lake, window, found):
                    pruned.differing.append(f"{window.name}: {found}, not {window.left}")
                return True
            if not await self._act(window, pages, due, pruned, dry_run=dry_run, keep=keep):
                return False
        if not dry_run:
            self._done.setdefault(window.name, set()).update(due)
        return True

    async def _compare(self, window: LoadedWindow, keep: Keep | None) -> list[Page] | None:
        """The window's rows, page by page; None: this process is to stop."""
        pages: list[Page] = []
        while not pages or pages[-1].last is not None:
            if keep is not None and not await keep():
                return None
            began = self._clock.monotonic()
            pages.append(await self._loaded.page(window, pages[-1].last if pages else None))
            await self._rest(began)
        return pages

    async def _act(
        self,
        window: LoadedWindow,
        pages: list[Page],
        due: set[MessageState],
        pruned: Pruned,
        *,
        dry_run: bool,
        keep: Keep | None,
    ) -> bool:
        """Remove all pages, or count them; false: the process is to stop, or to compare anew."""
        for page in pages:
            if due & page.states.keys() and not dry_run:
                if keep is not None and not await keep():
                    return False
                began = self._clock.monotonic()
                lowered = await self._loaded.remove(self._lake, window, page, due)
                if lowered is None:
                    return False
                window = lowered
                await self._rest(began)
            for state in due:
                pruned.add(state, page.states[state])
        return True

    async def _rest(self, began: float) -> None:
        await self._clock.sleep(REST * (self._clock.monotonic() - began))
