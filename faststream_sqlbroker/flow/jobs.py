"""Goes on with jobs of operators whose processes have ended, or did not wait for them."""

import asyncio
import logging
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.database.bulk.store import ALL, REFUSED_PAUSE
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError
from faststream_sqlbroker.flow.loop import Log

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store


LONGEST_PAUSE = 5.0
"""Seconds: while a slow job waits, another one may begin."""
BUSY_PAUSE = 1.0
"""Seconds until the next look, while other processes are at all jobs that are due."""


class JobRunner:
    """Runs what is due of all jobs, one batch after the other; one task a broker."""

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
        due_in = await self._store.jobs.due_in()
        if due_in is None or due_in > 0 or not await self._has_rights():
            return due_in if self._may is not False else None
        try:
            step = await self._store.jobs.step()
        except TransientStoreError:
            raise
        except StoreError as error:
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
            # Asked, not tried: a refused statement would make the whole process unhealthy.
            access = await self._store.access.find_lacks(ALL)
            self._may = not access.lacks
            if access.lacks:
                text = f"jobs of operators are left to others: {access.describe()}"
                self._log(logging.INFO, text)
        return self._may
