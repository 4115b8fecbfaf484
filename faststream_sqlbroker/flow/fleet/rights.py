"""Whether the database user may do what this process does: asked at the start, and again after a
refusal.

While something that a subscriber's outcomes need is missing, the subscriber claims nothing and
gives back what has not started: a handler whose outcome cannot be written would run again later.
"""

import asyncio
import contextlib
import logging
from math import inf
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.access import Access, Activities, Activity
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.database.connections import LoopSemaphore
from faststream_sqlbroker.exceptions import RightsError, StoreError
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.flow.loop import Log, Outages, backoff
from faststream_sqlbroker.flow.settings import ConsumerSettings

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

LONGEST_RIGHTS_INTERVAL = 5.0
"""Most seconds between two questions while something is missing."""
ONE_OFF = 60.0
"""Seconds for which a refusal counts of what is not declared: who needs it does it again, and
others never may."""
_COUNTS = {Activity.PUBLISH: inf}
"""Who has published once will do so again, maybe much later."""
REMEMBERED = 0.1
"""Seconds for which errors name what was found missing without asking again: many statements may be
refused at a time."""
RIGHTS_TIMEOUT = 3.0
"""Most seconds for which the error of a refused statement waits for what is missing."""


class Rights:
    """Those of one broker in this process."""

    def __init__(
        self,
        store: "Store",
        log: Log,
        outages: Outages | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Nothing is asked before `check`; `outages` is told when the database cannot be asked."""
        self._store = store
        self._log = log
        self._clock = clock or Clock()
        self._outages = Outages(log, self._clock) if outages is None else outages
        self._checked: Activities = frozenset()
        self._registrations: dict[Registration, Activities] = {}
        self._is_fine = True
        """Whether nothing was refused since it was asked last, and nothing is missing."""
        self._access = Access("")
        self._doubted: dict[Activity, float] = {}
        """What was refused without being declared, and until when it counts (monotonic seconds)."""
        self._turn = LoopSemaphore()
        """One question at a time."""
        self._answered_at = -inf
        self._asked_for: Activities = frozenset()
        self._task: asyncio.Task[None] | None = None
        store.access.on_denied(self.doubt, self.find_lacks)

    @property
    def healthy(self) -> bool:
        """Whether nothing is missing, as far as is known; what is doubted is asked for."""
        if not self._is_fine:
            self._start()
        return self._is_fine

    @property
    def activities(self) -> Activities:
        """What this process does, as far as it was checked."""
        return self._checked

    async def check(self, activities: Activities) -> None:
        """Ask for `activities`, unless they were checked before; missing tables are left to the
        schema's validation.

        Raises:
            RightsError: rights are missing; all of them are named, each with its GRANT.
            StoreError: the database could not be asked.
        """
        if activities <= self._checked:
            return
        access = await self._store.access.find_lacks(activities)
        if access.denied:
            raise RightsError(access.describe(access.denied))
        self._checked |= activities

    def join(self, registration: Registration, activities: Activities) -> None:
        """`registration` may claim while nothing of `activities` is missing."""
        self._registrations[registration] = activities
        self._hold()

    def leave(self, registration: Registration) -> None:
        """`registration` has ended."""
        self._registrations.pop(registration, None)

    def doubt(self, activities: Activities) -> None:
        """The database has refused a statement of `activities` because a right or a table is
        missing: ask which.

        What is not declared counts until nothing is missing for it, but no longer than `ONE_OFF`
        seconds from its last refusal, except for publishing.
        """
        for activity in activities - self._checked:
            self._doubted[activity] = self._clock.monotonic() + _COUNTS.get(activity, ONE_OFF)
        self._is_fine = False
        with contextlib.suppress(RuntimeError):  # synchronous code publishes without an event loop
            self._start()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        task = self._task
        if task is None or task.done() or task.get_loop() is not loop:
            self._task = loop.create_task(self._ask(), name="sqlbroker-rights")

    async def stop(self) -> None:
        """Ask no more, and forget what was checked."""
        task, self._task = self._task, None
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait((task,))
        self._outages.left(self)
        self._is_fine = True
        self._access = Access("")
        self._checked = frozenset()
        self._doubted.clear()

    async def _ask(self) -> None:
        """Ask until nothing is missing."""
        failures = 0
        while not self._is_fine:
            async with self._turn:
                await self._asked()
            failures += 1
            if not self._is_fine:
                await self._clock.sleep(
                    min(LONGEST_RIGHTS_INTERVAL, backoff(failures, self._clock))
                )

    async def _asked(self) -> None:
        asked = self._wanted()
        try:
            access = await self._store.access.find_lacks(asked)
        except StoreError as error:
            self._outages.failed(self, "question which right or table is missing", error)
            return
        except Exception as error:  # noqa: BLE001 - a bug, but no reason to stay unhealthy for good
            text = f"it cannot be asked which right or table is missing: {error!r}"
            self._log(logging.CRITICAL, text, exc_info=error)
            return
        self._outages.worked(self)
        self._answered_at = self._clock.monotonic()
        self._asked_for = asked
        if access.lacks:
            if access != self._access:
                held = any(
                    access.of(activities).lacks for activities in self._registrations.values()
                )
                end = "\nsubscribers that need it claim nothing until it is there" if held else ""
                self._log(logging.ERROR, access.describe() + end)
        elif self._access.lacks:
            self._log(logging.WARNING, "the database user lacks nothing any more: all goes on")
        if not access.lacks and asked >= self._wanted():  # else more was refused in the meantime
            self._is_fine = True
            self._doubted.clear()
        self._access = access
        self._hold()

    async def find_lacks(self, activities: Activities) -> Access:
        """What is missing for `activities`, which were just doubted; what was found a moment ago is
        not asked for again.

        Raises:
            StoreError: the database could not be asked in time.
        """
        try:
            async with asyncio.timeout(RIGHTS_TIMEOUT), self._turn:
                is_fresh = (
                    activities <= self._asked_for
                    and self._clock.monotonic() - self._answered_at < REMEMBERED
                )
                if not (is_fresh and self._access.of(activities).lacks):
                    await self._asked()
        except TimeoutError as error:
            msg = f"no answer within {RIGHTS_TIMEOUT} seconds"
            raise StoreError(msg) from error
        return self._access.of(activities)

    def _wanted(self) -> Activities:
        """What is declared, and what was refused all the same."""
        now = self._clock.monotonic()
        self._doubted = {
            activity: until for activity, until in self._doubted.items() if until > now
        }
        return self._checked | self._doubted.keys()

    def _hold(self) -> None:
        lacked = self._access.stopped
        for registration, activities in self._registrations.items():
            registration.hold("lacks", bool(lacked & activities))


def activities_of(settings: ConsumerSettings, *, ack_first: bool, archive: bool) -> Activities:
    """What a subscriber with `settings` does; `archive` is whether there is one."""
    return outcomes_of(settings, ack_first=ack_first, archive=archive) | {Activity.STATE}


def outcomes_of(settings: ConsumerSettings, *, ack_first: bool, archive: bool) -> Activities:
    """What of it its claims and outcomes cannot do without: a plain subscriber goes on without
    signs of life.
    """
    done = {Activity.CONSUME}
    if archive and (settings.retain_in_archive_on_ack or settings.retain_in_archive_on_reject):
        done.add(Activity.ARCHIVE)
    if ack_first or settings.ordered or settings.policies:
        done.add(Activity.STATE)
    return frozenset(done)
