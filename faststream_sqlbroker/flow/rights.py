"""Whether the database user may do what this process does: asked at the start, and again after a refusal.

While something that a subscriber's outcomes need is missing, the subscriber claims nothing and gives back what has not
started: a handler whose outcome cannot be written would run again later.
"""

import asyncio
import contextlib
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.core.access import Access, Activities, Activity
from faststream_sqlbroker.exceptions import RightsError, StoreError
from faststream_sqlbroker.flow.loop import Log, backoff
from faststream_sqlbroker.flow.member import Member

if TYPE_CHECKING:
    from faststream_sqlbroker.store import Store

LONGEST_PAUSE = 5.0
"""Most seconds between two questions while something is missing."""


class Mode(Enum):
    """What is known."""

    FINE = "nothing was refused since it was asked last"
    DOUBTED = "something was refused, and it is being asked why"
    LACKING = "something is missing"


class Rights:
    """Those of one broker in this process."""

    def __init__(self, store: "Store", log: Log) -> None:
        """Nothing is asked before `check`."""
        self._store, self._log = store, log
        self._checked: Activities = frozenset()
        self._members: dict[Member, Activities] = {}
        self._mode = Mode.FINE
        self._access = Access("")
        self._task: asyncio.Task[None] | None = None
        store.on_denied(self.doubt)

    @property
    def healthy(self) -> bool:
        """Whether nothing is missing, as far as is known; what is doubted is asked for."""
        if self._mode is not Mode.FINE:
            self._start()
        return self._mode is Mode.FINE

    @property
    def activities(self) -> Activities:
        """What this process does, as far as it was checked."""
        return self._checked

    async def check(self, activities: Activities) -> None:
        """Ask for `activities`, unless they were checked before; missing tables are left to the schema's validation.

        Raises:
            RightsError: rights are missing; all of them are named, each with its GRANT.
            StoreError: the database could not be asked.
        """
        if activities <= self._checked:
            return
        access = await self._store.find_lacks(activities)
        if access.denied:
            raise RightsError(access.describe(access.denied))
        self._checked |= activities

    def join(self, member: Member, activities: Activities) -> None:
        """`member` may claim while nothing of `activities` is missing."""
        self._members[member] = activities
        self._hold()

    def leave(self, member: Member) -> None:
        """`member` has ended."""
        self._members.pop(member, None)

    def doubt(self) -> None:
        """The database has refused a statement because a right or a table is missing: ask which."""
        if self._mode is Mode.FINE:
            self._mode = Mode.DOUBTED
        with contextlib.suppress(RuntimeError):  # synchronous code publishes without an event loop
            self._start()

    def _start(self) -> None:
        loop, task = asyncio.get_running_loop(), self._task
        if task is None or task.done() or task.get_loop() is not loop:
            self._task = loop.create_task(self._ask(), name="sqlbroker-rights")

    async def stop(self) -> None:
        """Ask no more, and forget what was checked."""
        task, self._task = self._task, None
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait((task,))
        self._mode, self._access, self._checked = Mode.FINE, Access(""), frozenset()

    async def _ask(self) -> None:
        """Ask until nothing is missing."""
        failures = 0
        while not await self._asked():
            failures += 1
            await asyncio.sleep(min(LONGEST_PAUSE, backoff(failures)))

    async def _asked(self) -> bool:
        """Whether nothing is missing."""
        try:
            # Who was not started publishes, as far as is known.
            access = await self._store.find_lacks(self._checked or frozenset({Activity.PUBLISH}))
        except StoreError as error:
            self._log(logging.WARNING, f"it cannot be asked which right or table is missing: {error}")
            return False
        except Exception as error:  # noqa: BLE001 - a bug, but no reason to stay unhealthy for good
            text = f"it cannot be asked which right or table is missing: {error!r}"
            self._log(logging.CRITICAL, text, exc_info=error)
            return False
        if access.lacks:
            if access != self._access:
                text = f"{access.describe()}\nsubscribers that need it claim nothing until it is there"
                self._log(logging.ERROR, text)
            self._mode = Mode.LACKING
        else:
            if self._mode is Mode.LACKING:
                self._log(logging.WARNING, "the database user lacks nothing any more: all goes on")
            self._mode = Mode.FINE
        self._access = access
        self._hold()
        return not access.lacks

    def _hold(self) -> None:
        lacked = frozenset[Activity]().union(*(lack.activities for lack in self._access.lacks))
        for member, activities in self._members.items():
            member.hold("lacks", bool(lacked & activities))


def activities_of(settings: Any, *, ack_first: bool, archive: bool) -> Activities:
    """What a subscriber with `settings` does; `archive` is whether there is one."""
    return outcomes_of(settings, ack_first=ack_first, archive=archive) | {Activity.STATE}


def outcomes_of(settings: Any, *, ack_first: bool, archive: bool) -> Activities:
    """What of it its claims and outcomes cannot do without: a plain subscriber goes on without signs of life."""
    done = {Activity.CONSUME}
    if archive and (settings.retain_in_archive_on_ack or settings.retain_in_archive_on_reject):
        done.add(Activity.ARCHIVE)
    if ack_first or settings.ordered or settings.policies:
        done.add(Activity.STATE)
    return frozenset(done)
