"""Periodic work that a process does for the whole fleet.

It ends dead database sessions, deletes expired rows, continues operators' jobs, and frees messages
that wait for removed policies.
"""

import asyncio
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError
from faststream_sqlbroker.flow.loop import Log

if TYPE_CHECKING:
    from faststream_sqlbroker.database.policies.policy_holds import Hold
    from faststream_sqlbroker.database.store import Store


MAX_PAUSE = 5.0
"""Maximum seconds between two steps: while a slow job waits, another one may start."""
BUSY_PAUSE = 1.0
"""Seconds until the next step while other processes work on all due jobs."""
RIGHTS_INTERVAL = 60.0
"""Seconds until a process without the rights for jobs looks for them again: a GRANT on the tables
needs no restart.
"""


class JobRunner:
    """Continues operators' jobs whose processes have ended or did not wait for the result.

    It runs one batch after the other, in one task per broker.
    """

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        """Run nothing before `start`; whether the database user may run jobs is not known yet."""
        self._store = store
        self._log = log
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._is_open = False
        self._is_allowed: bool | None = None
        self._next_check_at = float("-inf")

    def start(self) -> None:
        """Let `run_due` start jobs; check the necessary rights again before the first job."""
        self._is_open = True
        self._is_allowed = None
        self._next_check_at = float("-inf")

    async def stop(self) -> None:
        """Stop the task. Another process continues what the current batch has not committed.

        A task of another event loop has ended with that, and cannot be awaited.
        """
        self._is_open = False
        task, self._task = self._task, None
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def run_due(self) -> None:
        """Start a task that runs the due jobs of operators, and return at once.

        Called with each cleaning of the tables, and when another process may have started a job. Do
        nothing if a task runs already, or if `start` was not called.
        """
        # A running task handles all jobs, including those that were added after its start.
        if self._is_open and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="sqlbroker-jobs")

    async def _run(self) -> None:
        """Run due jobs batch by batch, until none is left or the database fails.

        After a failure the next cleaning of the tables starts another task.
        """
        try:
            while (pause := await self._run_step()) is not None:
                await self._clock.sleep(min(pause, MAX_PAUSE))
        except StoreError as error:
            # The loops that an outage stops log it once.
            is_transient = isinstance(error, TransientStoreError)
            text = f"operators' jobs pause until the next check: {error}"
            self._log(logging.DEBUG if is_transient else logging.WARNING, text)

    async def _run_step(self) -> float | None:
        """Run a batch of a due job; return the seconds until the next step, None without jobs.

        None, too, if the database user may not run jobs: then other processes run them. A job that
        the database refuses, or that has a bug, pauses and must not stop other jobs.
        """
        due_in = await self._store.get_seconds_to_next_job()
        if due_in is None or due_in > 0 or not await self._has_rights():
            return due_in if self._is_allowed is not False else None
        try:
            step = await self._store.jobs.run_step()
        except TransientStoreError:
            raise
        except StoreError as error:
            from faststream_sqlbroker.database.bulk.store import REFUSED_PAUSE  # noqa: PLC0415

            text = (
                f"a job pauses for {REFUSED_PAUSE:.0f} s, or fails if it has paused for an error "
                f"before; other jobs continue: {error}"
            )
            self._log(logging.WARNING, text)
            return MAX_PAUSE
        except Exception as error:  # noqa: BLE001 - a job that cannot be run must not end the others
            text = f"cannot run a job; other jobs continue: {error!r}"
            self._log(logging.CRITICAL, text, exc_info=error)
            return MAX_PAUSE
        # Other processes have locked all due jobs: polling again at once would be a thousand
        # statements a second.
        return step.pause if step.job is not None or step.pause != 0 else BUSY_PAUSE

    async def _has_rights(self) -> bool:
        """Return True if the database user may run jobs; checked before the first job.

        Jobs need more rights than a subscriber. A process without them leaves jobs to others, and
        checks again after `RIGHTS_INTERVAL`.
        """
        if not self._is_allowed and self._clock.monotonic() >= self._next_check_at:
            # Most processes never have a job to run.
            from faststream_sqlbroker.database.bulk.store import ALL_ACTIVITIES  # noqa: PLC0415

            # Checked, not tried: a refused statement would make the whole process unhealthy.
            access = await self._store.access.find_missing_rights(ALL_ACTIVITIES)
            self._next_check_at = self._clock.monotonic() + RIGHTS_INTERVAL
            was_allowed, self._is_allowed = self._is_allowed, not access.missing
            if access.missing and was_allowed is None:
                text = f"this process leaves operators' jobs to others: {access.describe()}"
                self._log(logging.INFO, text)
            elif was_allowed is False and not access.missing:
                self._log(logging.INFO, "this process has got the rights to run operators' jobs")
        return bool(self._is_allowed)


BATCH = 1_000
"""Maximum rows deleted in one transaction, which keeps them locked until it commits."""


class Housekeeping:
    """Cleaning of a broker's tables, called by the subscribers in turn."""

    def __init__(
        self, store: "Store", log: Log, clock: Clock, jobs: JobRunner | None = None
    ) -> None:
        """Clean at the first call of `clean`, which also starts due operators' `jobs`, if given."""
        self._jobs = jobs
        self._store = store
        self._log = log
        self._clock = clock
        self._cleaned_at = float("-inf")

    async def clean(self, interval: float) -> float:
        """Clean unless that was done less than `interval` seconds ago.

        All subscribers of the process call this, each with its own interval; the first due call
        does the work for all.

        Returns:
            Seconds until the next call is due by that interval.

        Raises:
            StoreError: the database failed; call again.
        """
        if (wait := self._cleaned_at + interval - self._clock.monotonic()) > 0:
            return wait
        previous = self._cleaned_at
        # Set before the work, so that no other subscriber starts it too.
        self._cleaned_at = self._clock.monotonic()
        try:
            if await self._clean():
                return interval
        except BaseException:
            self._cleaned_at = previous
            raise
        self._cleaned_at = previous
        return 0.0

    async def _clean(self) -> bool:
        """Start due jobs, end dead sessions and delete expired rows; return True if none is left.

        A dead session belongs to a client that is silent in the middle of a statement, and keeps
        rows locked. One call deletes a single batch.
        """
        if self._jobs is not None:
            self._jobs.run_due()
        if ended := await self._store.dead_sessions.end_dead_sessions():
            text = (
                f"ended database sessions {ended}: their clients were silent for long in the "
                "middle of a statement, and the sessions kept rows of the broker locked"
            )
            self._log(logging.WARNING, text)
        return await self._store.remove_expired_states(BATCH) < BATCH


CLOCK_INTERVAL = 60.0
"""Seconds between two checks for a database clock that was set back."""
REMOVED_INTERVAL = 300.0
"""Seconds between two checks for removed policies."""
REMOVED_START_INTERVAL = 60.0
"""Seconds between these checks after a start. A policy counts as removed a minute after the last
claim of a process that has it.
"""
START_PERIOD = 180.0
"""Seconds after a start during which `REMOVED_START_INTERVAL` applies."""
SLEEPING_INTERVAL = 3600.0
"""Seconds between two checks while all subscribers of the process poll only when notified."""


class RemovedPolicies:
    """Frees messages that wait for policies which no longer exist, in the queues of this process.

    It also frees messages that would wait too long because the database's clock was set back.
    """

    def __init__(self, store: "Store", log: Log, clock: Clock) -> None:
        """Check nothing before `start`: until then no check is ever due."""
        self._store = store
        self._log = log
        self._clock = clock
        self._next_check_at = float("inf")
        self._next_removal_at = float("inf")
        self._frequent_until = float("-inf")

    @property
    def due_in(self) -> float:
        """Seconds until the next check; 0 or less if due."""
        return self._next_check_at - self._clock.monotonic()

    def start(self, *, is_sleeping: bool) -> None:
        """Check soon, because a subscriber has started and the deployment may have changed.

        After a deployment, policies may have gone; checks are frequent for some minutes. A process
        is sleeping if its subscribers poll only when notified: it checks once now, then rarely.
        """
        now = self._clock.monotonic()
        self._frequent_until = float("-inf") if is_sleeping else now + START_PERIOD
        self._next_removal_at = (
            now if is_sleeping else min(self._next_removal_at, now + REMOVED_START_INTERVAL)
        )
        self._next_check_at = min(self._next_check_at, self._next_removal_at)

    async def free_waiting(self, queues: Collection[str], *, is_sleeping: bool) -> None:
        """Free messages of `queues` that wait for policies which no live subscriber has.

        A hold is the note that a policy has put messages off; a removed policy never lets them
        start. Also free messages that wait too long because the database's clock was set back.

        Raises:
            StoreError: the database failed; call again.
        """
        now = self._clock.monotonic()
        self._next_check_at = now + CLOCK_INTERVAL
        holds = await self._store.policy_holds.load_holds(sorted(queues))
        # False stands for a queue that was busy, and must be checked again soon.
        done = [
            await self._repair_clock_step(queue)
            for queue in {hold.queue for hold in holds if hold.is_ahead}
        ]
        if now >= self._next_removal_at:
            self._next_removal_at = now + REMOVED_START_INTERVAL
            freed = [
                await self._free(hold)
                for hold in await self._store.policy_holds.find_removed(holds)
            ]
            if all(freed) and now >= self._frequent_until:
                self._next_removal_at = now + REMOVED_INTERVAL
            done += freed
        if is_sleeping and all(done):
            self._next_check_at = self._next_removal_at = now + SLEEPING_INTERVAL
        elif not holds:
            self._next_check_at = self._next_removal_at  # no message of its queues has been put off

    async def _free(self, hold: "Hold") -> bool:
        """Free the messages that the removed policy of `hold` has put off.

        These may start now, or as the policies of live subscribers say. Return False if a claim of
        the queue is running, so that the search must be repeated soon.
        """
        freed = await self._store.policy_holds.free_removed(hold)
        if freed:
            text = (
                f"freed {freed} messages of queue {hold.queue!r} that waited for policies which no "
                f"live subscriber has any more ({hold.name})"
            )
            self._log(logging.INFO, text)
        return freed is not None

    async def _repair_clock_step(self, queue: str) -> bool:
        """Free messages of `queue` that would wait too long because the clock was set back.

        Policies had put them off until a time that is now too far away. Return False if a claim of
        the queue is running, so that the search must be repeated soon.
        """
        step = await self._store.policy_holds.repair_clock_step(queue)
        if step is not None and step.back:
            text = (
                f"the database's clock was set back by about {step.back / MICROSECONDS:.0f} s: "
                f"{step.freed} messages of queue {queue!r} that policies had postponed no longer "
                "wait for their old due times; delayed publishes, retries and messages published "
                "before keep theirs"
            )
            self._log(logging.WARNING, text)
        return step is not None
