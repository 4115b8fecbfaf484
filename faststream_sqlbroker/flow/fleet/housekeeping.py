"""What a process does for all from time to time: end dead sessions, forget what has expired, go on
with operators' jobs, free what waits for policies that are gone.
"""

import asyncio
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError
from faststream_sqlbroker.flow.loop import Log

if TYPE_CHECKING:
    from faststream_sqlbroker.database.policies.policy_holds import Hold
    from faststream_sqlbroker.database.store import Store


LONGEST_PAUSE = 5.0
"""Seconds: while a slow job waits, another one may begin."""
BUSY_PAUSE = 1.0
"""Seconds until the next look, while other processes are at all jobs that are due."""


class JobRunner:
    """Runs what is due of operators' jobs whose processes have ended, or did not wait for them.

    One batch after the other, in one task a broker.
    """

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        """It rests until `start`."""
        self._store = store
        self._log = log
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._open = False
        self._may: bool | None = None

    def start(self) -> None:
        """Let `look` begin with what it finds."""
        self._open = True
        self._may = None

    async def stop(self) -> None:
        """End; what the running batch has not committed is done by another process."""
        self._open = False
        task, self._task = self._task, None
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def look(self) -> None:
        """Look whether a job is due, and run it; at once, in a task of its own."""
        # The task that runs looks for all jobs, also for those that began after it.
        if self._open and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="sqlbroker-jobs")

    async def _run(self) -> None:
        try:
            while (pause := await self._step()) is not None:
                await self._clock.sleep(min(pause, LONGEST_PAUSE))
        except StoreError as error:
            # An outage is told once, by the loops that it stops.
            passing = isinstance(error, TransientStoreError)
            text = f"jobs of operators rest until the next look, at most a minute: {error}"
            self._log(logging.DEBUG if passing else logging.WARNING, text)

    async def _step(self) -> float | None:
        """Seconds until the next look at the jobs; None: none is left."""
        due_in = await self._store.job_due_in()
        if due_in is None or due_in > 0 or not await self._has_rights():
            return due_in if self._may is not False else None
        try:
            step = await self._store.jobs.step()
        except TransientStoreError:
            raise
        except StoreError as error:
            from faststream_sqlbroker.database.bulk.store import REFUSED_PAUSE  # noqa: PLC0415

            text = f"a job of an operator rests for {REFUSED_PAUSE:.0f} s, others go on: {error}"
            self._log(logging.WARNING, text)
            return LONGEST_PAUSE
        except Exception as error:  # noqa: BLE001 - a job that cannot be run must not end the others
            text = f"a job of an operator cannot be run, others go on: {error!r}"
            self._log(logging.CRITICAL, text, exc_info=error)
            return LONGEST_PAUSE
        # Other processes have locked all jobs that are due: asking them again at once would be a
        # thousand statements a second.
        return step.pause if step.job is not None or step.pause != 0 else BUSY_PAUSE

    async def _has_rights(self) -> bool:
        """Whether this process may do what jobs do; asked once, before the first one."""
        if self._may is None:
            # Most processes never have a job to run.
            from faststream_sqlbroker.database.bulk.store import ALL  # noqa: PLC0415

            # Asked, not tried: a refused statement would make the whole process unhealthy.
            access = await self._store.access.find_lacks(ALL)
            self._may = not access.lacks
            if access.lacks:
                text = f"jobs of operators are left to others: {access.describe()}"
                self._log(logging.INFO, text)
        return self._may


BATCH = 1_000
"""Rows that one transaction forgets: it locks them until it commits."""


class Housekeeping:
    """Cleans the tables of one broker; subscribers call it in turn."""

    def __init__(
        self, store: "Store", log: Log, clock: Clock, jobs: JobRunner | None = None
    ) -> None:
        self._jobs = jobs
        self._store = store
        self._log = log
        self._clock = clock
        self._cleaned_at = float("-inf")

    async def clean(self, interval: float) -> float:
        """Clean, unless that was done less than `interval` seconds ago; seconds until the next
        time by that interval.

        Raises:
            StoreError: the database failed; call again.
        """
        if (wait := self._cleaned_at + interval - self._clock.monotonic()) > 0:
            return wait
        before = self._cleaned_at
        # No other subscriber begins while it runs.
        self._cleaned_at = self._clock.monotonic()
        try:
            if await self._clean():
                return interval
        except BaseException:
            self._cleaned_at = before
            raise
        self._cleaned_at = before
        return 0.0

    async def _clean(self) -> bool:
        """Whether all is clean."""
        if self._jobs is not None:
            self._jobs.look()
        if ended := await self._store.silent.end():
            text = (
                f"database sessions {ended} were ended: their clients had been silent for long in "
                "the middle of a statement, and they kept rows of the broker locked"
            )
            self._log(logging.WARNING, text)
        return await self._store.forget_expired(BATCH) < BATCH


CLOCK_INTERVAL = 60.0
"""Seconds between two looks for a clock that was set back."""
REMOVED_INTERVAL = 300.0
"""Seconds between two looks for removed policies."""
REMOVED_SOON = 60.0
"""Seconds between those after a start: a policy counts as removed a minute after the last claim of
a process that has it."""
STARTING = 180.0
"""Seconds after a start for which that is so."""
SLEEPING = 3600.0
"""Seconds between two looks while all subscribers of the process look only when they are told."""


class RemovedPolicies:
    """Frees what waits for policies that a deployment has removed, or because the database's clock
    was set back, in the queues that this process takes from.
    """

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        self._store = store
        self._log = log
        self._clock = clock
        self._next = float("inf")
        self._removed_at = float("inf")
        self._often_until = float("-inf")

    @property
    def due_in(self) -> float:
        """Seconds until the next look; 0 or less: it is due."""
        return self._next - self._clock.monotonic()

    def begin(self, *, sleeps: bool) -> None:
        """A subscriber has started: the deployment may be another."""
        now = self._clock.monotonic()
        self._often_until = float("-inf") if sleeps else now + STARTING
        self._removed_at = now if sleeps else min(self._removed_at, now + REMOVED_SOON)
        self._next = min(self._next, self._removed_at)

    async def look(self, queues: Collection[str], *, sleeps: bool) -> None:
        """Free what waits for policies that no live subscriber of `queues` has, or longer than it
        should as the database's clock was set back.

        Raises:
            StoreError: the database failed; call again.
        """
        now = self._clock.monotonic()
        self._next = now + CLOCK_INTERVAL
        holds = await self._store.policy_holds.read(sorted(queues))
        done = [await self._mend(queue) for queue in {hold.queue for hold in holds if hold.ahead}]
        if now >= self._removed_at:
            self._removed_at = now + REMOVED_SOON
            freed = [
                await self._free(hold) for hold in await self._store.policy_holds.removed(holds)
            ]
            if all(freed) and now >= self._often_until:
                self._removed_at = now + REMOVED_INTERVAL
            done += freed
        if sleeps and all(done):
            self._next = self._removed_at = now + SLEEPING
        elif not holds:
            self._next = self._removed_at  # nothing of its queues has been put off

    async def _free(self, hold: "Hold") -> bool:
        freed = await self._store.policy_holds.free_removed(hold)
        if freed:
            text = (
                f"{freed} messages of queue {hold.queue!r} waited for policies that no live "
                f"subscriber has any more ({hold.name}): they are freed"
            )
            self._log(logging.INFO, text)
        return freed is not None

    async def _mend(self, queue: str) -> bool:
        step = await self._store.policy_holds.mend_clock_step(queue)
        if step is not None and step.back:
            text = (
                f"the database's clock was set back by about {step.back / MICROSECONDS:.0f} s: "
                f"{step.freed} messages of queue {queue!r} that policies had put off do not wait "
                "for it to come there again; delayed publishes, retries, and what was published "
                "before, are due as written"
            )
            self._log(logging.WARNING, text)
        return step is not None
