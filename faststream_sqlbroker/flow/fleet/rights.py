"""Rights of the database user: checked at the start, and again after a refused statement.

While a right that a subscriber's outcomes need is missing, the subscriber claims nothing and
releases what has not started. A handler whose outcome cannot be written would run again later.
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

MAX_RIGHTS_INTERVAL = 5.0
"""Maximum seconds between two checks while something is missing."""
DENIAL_TTL = 60.0
"""Seconds for which a refusal of an undeclared activity counts. Code that needs the activity tries
it again; other code may never do so.
"""
_DENIAL_TTLS = {Activity.PUBLISH: inf}
"""Exceptions to `DENIAL_TTL`: code that has published once will publish again, maybe much later."""
RESULT_TTL = 0.1
"""Seconds for which errors reuse what was missing: many statements may be refused at a time."""
RIGHTS_TIMEOUT = 3.0
"""Maximum seconds that the error of a refused statement waits for the list of missing rights."""


class Rights:
    """The rights of a broker's database user in this process."""

    def __init__(
        self,
        store: "Store",
        log: Log,
        outages: Outages | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Check nothing before `check`. Failed queries are reported to `outages`."""
        self._store = store
        self._log = log
        self._clock = clock or Clock()
        self._outages = Outages(log, self._clock) if outages is None else outages
        self._checked: Activities = frozenset()
        self._registrations: dict[Registration, Activities] = {}
        self._is_healthy = True
        """True if nothing was refused since the last check, and nothing is missing."""
        self._access = Access("")
        self._denied: dict[Activity, float] = {}
        """Undeclared activities that were refused, and until when each counts (monotonic seconds).
        """
        self._check_lock = LoopSemaphore()
        """One check at a time."""
        self._checked_at = -inf
        self._last_checked: Activities = frozenset()
        self._task: asyncio.Task[None] | None = None
        store.access.on_denied(self.report_denied, self.find_missing_rights)

    @property
    def healthy(self) -> bool:
        """True if nothing is known to be missing. Starts a check if a statement was refused."""
        if not self._is_healthy:
            self._start_check()
        return self._is_healthy

    @property
    def activities(self) -> Activities:
        """Activities of this process that were checked so far."""
        return self._checked

    async def check(self, activities: Activities) -> None:
        """Check the rights for `activities`, unless checked before.

        An activity is a kind of statements that need the same rights, such as to publish. These
        count as declared from now on. Missing tables are left to the schema's validation.

        Raises:
            RightsError: rights are missing; the error names all of them, each with its GRANT.
            StoreError: the database could not be queried.
        """
        if activities <= self._checked:
            return
        access = await self._store.access.find_missing_rights(activities)
        if access.missing_grants:
            raise RightsError(access.describe(access.missing_grants))
        self._checked |= activities

    def join(self, registration: Registration, activities: Activities) -> None:
        """Let `registration` claim while nothing of `activities` is missing.

        `activities` are the kinds of statements that its claims and outcomes need.
        """
        self._registrations[registration] = activities
        self._update_holds()

    def leave(self, registration: Registration) -> None:
        """Remove `registration`, which has ended."""
        self._registrations.pop(registration, None)

    def report_denied(self, activities: Activities) -> None:
        """Find out what is missing after the database has refused a statement of `activities`.

        An activity that `check` was not given beforehand is undeclared. It makes the process
        unhealthy until nothing is missing for it, but no longer than `DENIAL_TTL` seconds after its
        last refusal, because nothing may need it again. Publishing counts without a limit.
        """
        for activity in activities - self._checked:
            self._denied[activity] = self._clock.monotonic() + _DENIAL_TTLS.get(
                activity, DENIAL_TTL
            )
        self._is_healthy = False
        with contextlib.suppress(RuntimeError):  # synchronous code publishes without an event loop
            self._start_check()

    def _start_check(self) -> None:
        """Start a task that checks until nothing is missing, unless such a task runs.

        A task of another event loop, which may be closed, does not count.
        """
        loop = asyncio.get_running_loop()
        task = self._task
        if task is None or task.done() or task.get_loop() is not loop:
            self._task = loop.create_task(self._check_until_granted(), name="sqlbroker-rights")

    async def stop(self) -> None:
        """Stop checking, and forget earlier results: rights may change before the next start."""
        task, self._task = self._task, None
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait((task,))
        self._outages.remove_part(self)
        self._is_healthy = True
        self._access = Access("")
        self._checked = frozenset()
        self._denied.clear()

    async def _check_until_granted(self) -> None:
        """Repeat the check, with growing pauses of up to 5 seconds, until nothing is missing.

        So claims resume soon after an administrator has granted the missing rights.
        """
        failures = 0
        while not self._is_healthy:
            async with self._check_lock:
                await self._check_once()
            failures += 1
            if not self._is_healthy:
                await self._outages.pause(min(MAX_RIGHTS_INTERVAL, backoff(failures, self._clock)))

    async def _check_once(self) -> None:
        """Query what is missing, log a change, and update which subscribers may claim.

        A failed query changes nothing: `_check_until_granted` repeats it. A subscriber without the
        rights for its outcomes is held: it claims nothing.
        """
        activities = self._find_activities()
        try:
            access = await self._store.access.find_missing_rights(activities)
        except StoreError as error:
            self._outages.record_failure(self, "check for missing rights", error)
            return
        except Exception as error:  # noqa: BLE001 - a bug, but no reason to stay unhealthy for good
            text = f"could not check which rights or tables are missing: {error!r}"
            self._log(logging.CRITICAL, text, exc_info=error)
            return
        self._outages.record_success(self)
        self._checked_at = self._clock.monotonic()
        self._last_checked = activities
        if access.missing:
            if access != self._access:
                is_held = any(
                    access.restrict_to(activities).missing
                    for activities in self._registrations.values()
                )
                end = "\nsubscribers that need them claim no messages now" if is_held else ""
                self._log(logging.ERROR, access.describe() + end)
        elif self._access.missing:
            self._log(
                logging.WARNING, "the database user has all rights and tables again; claims resume"
            )
        if (
            not access.missing and activities >= self._find_activities()
        ):  # otherwise more was refused since then
            self._is_healthy = True
            self._denied.clear()
        self._access = access
        self._update_holds()

    async def find_missing_rights(self, activities: Activities) -> Access:
        """Return what is missing for `activities`, which the database has just refused.

        The error of the refused statement then names the missing rights. Many statements may be
        refused at a time, so a recent result is used again if something was missing in it.

        Raises:
            StoreError: the database did not answer in time.
        """
        try:
            async with asyncio.timeout(RIGHTS_TIMEOUT), self._check_lock:
                is_fresh = (
                    activities <= self._last_checked
                    and self._clock.monotonic() - self._checked_at < RESULT_TTL
                )
                if not (is_fresh and self._access.restrict_to(activities).missing):
                    await self._check_once()
        except TimeoutError as error:
            msg = f"no answer within {RIGHTS_TIMEOUT} seconds"
            raise StoreError(msg) from error
        return self._access.restrict_to(activities)

    def _find_activities(self) -> Activities:
        """Return the activities to check: all declared, and undeclared after a refusal.

        Refusals that are too old to count are dropped.
        """
        now = self._clock.monotonic()
        self._denied = {activity: until for activity, until in self._denied.items() if until > now}
        return self._checked | self._denied.keys()

    def _update_holds(self) -> None:
        """Let a registration claim only if nothing is missing for the declared activities.

        A handler whose outcome cannot be written would only run again later.
        """
        lacked = self._access.impossible_activities
        for registration, activities in self._registrations.items():
            # "lacks" names this reason: the subscriber claims while no reason is active.
            registration.hold("lacks", bool(lacked & activities))


def get_activities(settings: ConsumerSettings, *, ack_first: bool, archive: bool) -> Activities:
    """Return the activities of a subscriber with `settings`, with or without an `archive`.

    Unlike `get_required_activities`, they include heartbeats (STATE), which a plain subscriber
    can do without.
    """
    return get_required_activities(settings, ack_first=ack_first, archive=archive) | {
        Activity.STATE
    }


def get_required_activities(
    settings: ConsumerSettings, *, ack_first: bool, archive: bool
) -> Activities:
    """Return the activities that a subscriber's claims and outcomes require.

    Without the rights for these it claims nothing. Heartbeats are not among them: a subscriber
    without policies, order and ACK_FIRST goes on without.
    """
    activities = {Activity.CONSUME}
    if archive and (settings.retain_in_archive_on_ack or settings.retain_in_archive_on_reject):
        activities.add(Activity.ARCHIVE)
    if ack_first or settings.ordered or settings.policies:
        activities.add(Activity.STATE)
    return frozenset(activities)
