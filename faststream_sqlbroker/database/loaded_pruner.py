"""One pass over the windows that a lake has loaded: what is old goes, if the lake has all of it."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import datetime
from typing import TypeVar

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.loaded_windows import LoadedWindow, RowSum
from faststream_sqlbroker.core.retention import Place, Pruned
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import loaded_windows as rows
from faststream_sqlbroker.database.parts.loaded_windows import Page

T = TypeVar("T")
Keep = Callable[[], Awaitable[bool]]
REST = 4.0
"""As of a pass without a lake: each step is followed by a rest so many times as long."""
SHOWN = 20
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
        """The next windows of which rows are left."""
        return await self._read(lambda c: rows.windows(c, self._table, lake, until, after))

    async def has_any(self, window: LoadedWindow, states: Collection[MessageState]) -> bool:
        """Whether rows of the window are in one of `states`."""
        return await self._read(lambda c: rows.has_any(c, self._dialect, window, states))

    async def page(self, window: LoadedWindow, after: Place | None) -> Page:
        """The window's next rows."""
        return await self._read(lambda c: rows.read_page(c, self._dialect, window, after))

    async def remove(
        self, lake: str, window: LoadedWindow, page: Page, states: Collection[MessageState]
    ) -> LoadedWindow | None:
        """Remove rows of a page; None: it is no longer what was compared."""
        return await self._write(
            lambda c: rows.remove_page(c, self._dialect, lake, window, page, states)
        )

    async def set_apart(self, lake: str, window: LoadedWindow, found: RowSum) -> bool:
        """Note that a window differs; whether this was the first to see it."""
        return await self._write(lambda c: rows.set_apart(c, self._table, lake, window, found))

    async def differing(self) -> list[tuple[str, str]]:
        """Lake and window of those that differ, `SHOWN` at most."""
        return await self._read(lambda c: rows.differing(c, self._table, SHOWN))

    async def _read(self, work: Callable[[Connection], T]) -> T:
        return await self._database.run(work, Activity.PRUNE, write=False)

    async def _write(self, work: Callable[[Connection], T]) -> T:
        return await self._database.run(work, Activity.PRUNE)


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
