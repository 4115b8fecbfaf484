"""Schedules of one broker: they are published when due, by the database's clock.

Processes check independently; the lease in the database decides which one publishes
(`database.schedules`).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.status import MissedRuns, ScheduleState
from faststream_sqlbroker.exceptions import SetupError, StoreError
from faststream_sqlbroker.flow.loop import CANCEL_LIMIT, Log, Loop, backoff, is_task_cancelled
from faststream_sqlbroker.flow.own_context import abandon_task
from faststream_sqlbroker.flow.publish_on_ack import get_due_queues
from faststream_sqlbroker.flow.tasks.cron import Cron
from faststream_sqlbroker.flow.threads import find_thread_function
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from faststream_sqlbroker.database.schedules import ScheduleSnapshot
    from faststream_sqlbroker.database.store import Store


# Publish the due fire times of one schedule: claim it, create each message, and write the message
# together with the schedule's next state.
#
# No transaction is open while a message is made, as a function of the user's may take long; the
# schedule is leased while it runs. The message and the mark that its fire time is done are
# committed together, by the holder of the lease only.

LEASE = 10.0
"""Seconds after which another process continues the work of a dead one."""
MAX_RETRY_INTERVAL = 30.0
"""Maximum seconds between two tries of a fire time whose function fails; they begin with one second
and double.
"""
RELEASE_TIMEOUT = 2.0
"""Seconds to release a schedule's lease; after that the lease expires."""

MakeMessages = Callable[[datetime], Coroutine[Any, Any, Sequence[NewMessage]]]
"""Creates the messages of a fire time, which is aware and in the schedule's zone; called again if
it fails.
"""


@dataclass(frozen=True, slots=True)
class DeclaredSchedule:
    """A schedule that the application declares."""

    name: str
    cron: Cron
    missed: MissedRuns
    make: MakeMessages


class ScheduleRunner:
    """Publishes due fire times, once in the whole fleet."""

    def __init__(self, store: "Store", wakeups: Wakeups, log: Log) -> None:
        self._store = store
        self._wakeups = wakeups
        self._log = log
        self._clock = wakeups.clock
        self._crons: dict[tuple[str, str], Cron] = {}
        self.calls: dict[str, tuple[asyncio.Task[Any], float]] = {}
        """Running functions and their start times (monotonic seconds)."""

    def get_cron(self, definition: tuple[str, str]) -> Cron:
        """Return the parsed expression and zone that the database stores.

        Another process, or another version, may have declared them.

        Raises:
            SetupError: this process cannot parse them.
        """
        if definition not in self._crons:
            self._crons[definition] = Cron(*definition)
        return self._crons[definition]

    async def fire(self, schedule: DeclaredSchedule) -> None:
        """Publish the run that an operator has requested, and the due fire times of `schedule`.

        A lease on the schedule keeps other processes from doing the same; if another one has it,
        nothing happens here. A fire time whose messages cannot be created stays due, and is put
        off.

        Raises:
            StoreError: the database failed; the next process continues at that fire time.
        """
        token = uuid4()
        try:
            state = await self._store.schedules.claim(schedule.name, token, LEASE)
            if state is None:
                return
            async with self._hold_lease(schedule.name, token):
                if state.run_at is not None:
                    # A requested run changes no fire time.
                    next_state = replace(state, run_at=None, failures_count=0)
                    if not await self._publish_one(
                        schedule, state, state.run_at, next_state, token
                    ):
                        return
                    state = next_state
                if state.decided_at is not None:
                    await self._publish(schedule, state, token)
        except (asyncio.CancelledError, StoreError):
            # Release the lease, so that other processes need not wait for its end; it may be held
            # even if the answer was lost. What was published stays published.
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(RELEASE_TIMEOUT):
                    await self._store.schedules.release(schedule.name, token)
            raise

    async def _publish(self, schedule: DeclaredSchedule, state: ScheduleState, token: UUID) -> None:
        """Publish the due fire times of the claimed schedule, from `next_at` to `decided_at`.

        `decided_at` is the time of the run's first claim. Each fire time is written together with
        the schedule's next state, so that another process can continue after a crash. The run ends
        if a message cannot be created or the lease is lost.
        """
        first = state.next_at
        until = state.decided_at
        assert first is not None  # noqa: S101 - a held schedule is due
        assert until is not None  # noqa: S101 - and has a decision time
        try:
            cron = self.get_cron((state.expression, state.tz))
            # A new definition applies after the fire times that are due by the old one.
            following = self.get_cron(state.next_definition).find_next(until)
            first = _skip_pause(cron, state, first, until)
            state = replace(state, skipped_until=None, next_at=first)
        except Exception as error:  # noqa: BLE001 - another version may have written it
            await self._put_off(schedule, state, token, error)
            return
        times = cron.find_due(first, until, schedule.missed) if first <= until else []
        if first <= until and not state.failures_count:
            self._log_missed(schedule, first, until, times)
        for number, fire_at in enumerate(times, 1):
            state = replace(state, next_at=fire_at)
            is_last = number == len(times)
            next_state = (
                state.end_run(fire_at, following)
                if is_last
                else state.record_fire(fire_at, times[number])
            )
            if not await self._publish_one(schedule, state, fire_at, next_state, token):
                return
            state = next_state
        if not times:
            await self._write(schedule, state.end_run(None, following), token, ())

    async def _publish_one(
        self,
        schedule: DeclaredSchedule,
        state: ScheduleState,
        at: datetime,
        next_state: ScheduleState,
        token: UUID,
    ) -> bool:
        """Publish the messages of the fire time `at` together with `next_state`.

        `next_state` marks the fire time as done: one transaction writes both, so nothing is
        published twice. Return False if the messages could not be created or the lease is lost; the
        run then ends.
        """
        rows = await self._make_messages(schedule, state, at, token)
        return rows is not None and await self._write(schedule, next_state, token, rows)

    async def _make_messages(
        self, planned: DeclaredSchedule, state: ScheduleState, at: datetime, token: UUID
    ) -> Sequence[NewMessage] | None:
        """Create the messages of a fire time; None if that failed, and `state` was put off.

        A CancelledError that the application's function raises by itself is a failure like others;
        a cancellation of this task is raised.
        """
        try:
            zone = self.get_cron((state.expression, state.tz)).zone
            return await self._call(planned, at.astimezone(zone))
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_task_cancelled():
                raise
            await self._put_off(planned, state, token, error)
            return None

    async def _call(self, schedule: DeclaredSchedule, at: datetime) -> Sequence[NewMessage]:
        """Call the application's function for the fire time `at`; return the messages.

        The call is kept in `calls` while it runs, so that a stop can name and abandon it.
        """
        # A task of its own: the function may cancel the task that it runs in.
        call = asyncio.create_task(schedule.make(at))
        self.calls[schedule.name] = (call, self._clock.monotonic())
        try:
            messages: Sequence[NewMessage] = await call
        finally:
            del self.calls[schedule.name]
        if is_task_cancelled():  # which the function has swallowed
            raise asyncio.CancelledError
        return messages

    async def _write(
        self,
        schedule: DeclaredSchedule,
        state: ScheduleState,
        token: UUID,
        rows: Sequence[NewMessage],
    ) -> bool:
        """Write the messages `rows` with the new `state`; return False if the lease is lost.

        Then nothing is written: the holder of the lease publishes the fire time, or the schedule
        was paused. After a success, subscribers of the queues get a hint to poll.
        """
        # Without further due fire times, release the lease with the same statement.
        lease = None if state.decided_at is None else LEASE
        if not await self._store.schedules.publish(schedule.name, token, state, rows, lease):
            text = (
                f"schedule {schedule.name!r} was claimed by another process, redefined, paused or "
                "requested to run before its message was written; unless it is paused, the process "
                "that holds its lease publishes the message"
            )
            self._log(logging.WARNING, text)
            return False
        if queues := get_due_queues(rows):
            self._wakeups.notify_published(queues)
        return True

    async def _put_off(
        self, schedule: DeclaredSchedule, state: ScheduleState, token: UUID, error: BaseException
    ) -> None:
        """Postpone a run whose messages could not be created; the pause doubles each time.

        Its fire time stays due. The lease is released with the pause, so that any process, in which
        the function may work, can make the next try.
        """
        count = state.failures_count + 1
        pause = min(MAX_RETRY_INTERVAL, 2.0 ** min(state.failures_count, 10))
        text = (
            f"could not create the messages of schedule {schedule.name!r} for "
            f"{state.run_at or state.next_at} "
            f"({count} times in a row), trying again in {pause:.0f} s: {error!r}"
        )
        self._log(logging.ERROR, text, exc_info=error)
        await self._store.schedules.postpone(
            schedule.name, token, replace(state, failures_count=count), pause
        )

    def _log_missed(
        self,
        schedule: DeclaredSchedule,
        first: datetime,
        until: datetime,
        times: Sequence[datetime],
    ) -> None:
        """Log fire times that are skipped, because no process ran when due.

        `first` is the first due fire time, `times` are those that are published. Even a schedule
        with missed="all" publishes a limited number, so that the rest is a warning.
        """
        if times and times[0] == first:
            return
        end = f"before {times[0]}" if times else f"until {until}"
        level = logging.WARNING if schedule.missed == "all" else logging.INFO
        text = (
            f"schedule {schedule.name!r} skips its fire times from {first} {end}, because no "
            "process ran then"
        )
        self._log(level, f'{text} (missed="{schedule.missed}")')

    @asynccontextmanager
    async def _hold_lease(self, name: str, token: UUID) -> "AsyncIterator[None]":
        """Renew the schedule's lease inside of the block, whose function may take long.

        No transaction is open in the block, so only the lease keeps other processes from calling
        the function, too.
        """
        keeper = asyncio.create_task(
            self._renew_lease(name, token), name="sqlbroker-schedule-lease"
        )
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.wait((keeper,))

    async def _renew_lease(self, name: str, token: UUID) -> None:
        """Renew the lease after each third, until cancelled or until the lease is lost.

        A loss needs no report here: the next write names the lease, and finds it gone.
        """
        while True:
            await self._clock.sleep(LEASE / 3)
            try:
                if not await self._store.schedules.extend(name, token, LEASE):
                    return
            except StoreError as error:
                self._log(
                    logging.WARNING, f"could not renew the lease of schedule {name!r}: {error}"
                )


def _skip_pause(cron: Cron, state: ScheduleState, first: datetime, until: datetime) -> datetime:
    """Return `first`, or the first fire time after a pause; later than `until` if there is none.

    Fire times during an operator's pause (up to `skipped_until`) are not made up for. A result
    after `until` says that nothing is to be published now.
    """
    if state.skipped_until is None:
        return first
    # An interrupted run may have got further than the end of the pause.
    return max(first, cron.find_next(state.skipped_until) or until + timedelta(seconds=1))


MAX_CHECK_INTERVAL = 30.0
"""Seconds after which schedules are read again: another process may have redefined one."""
MAX_NOTIFIED_CHECK_INTERVAL = 3600.0
"""Seconds instead, where subscribers poll only when notified: redefinitions are notified, too."""
BUSY_CHECK_INTERVAL = 1.0
"""Seconds until a schedule that another process publishes is checked again."""
CLOCK_MARGIN = 0.002
"""Seconds: clocks are read in milliseconds."""


class Scheduler:
    """Fires the declared schedules."""

    def __init__(self, store: "Store", wakeups: Wakeups, log: Log) -> None:
        """Fire nothing before `set_schedules` and `start`."""
        self._store = store
        self._log = log
        self._wakeups = wakeups
        self._outages = wakeups.outages
        self._clock = wakeups.clock
        self._runner = ScheduleRunner(store, wakeups, log)
        self._schedules: dict[str, DeclaredSchedule] = {}
        self._defined: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, int] = {}
        self._logged: set[str] = set()
        self._loop: Loop | None = None

    @property
    def healthy(self) -> bool:
        """True if the database answers. A function that raises is the application's business."""
        return (self._loop is None or self._loop.healthy) and not self._failures

    def set_schedules(self, schedules: Iterable[DeclaredSchedule]) -> None:
        """Set the schedules to fire from the next `start` on.

        Raises:
            SetupError: two have the same name.
        """
        declared: dict[str, DeclaredSchedule] = {}
        for schedule in schedules:
            if schedule.name in declared:
                raise SetupError(
                    f"the schedule {schedule.name!r} is declared twice: give each its own name"
                )
            declared[schedule.name] = schedule
        self._schedules = declared

    def start(self) -> None:
        """Start the loop if there are schedules; no effect while running."""
        # Define all schedules again: another process may have changed them since.
        self._defined.clear()
        if self._schedules and (self._loop is None or self._loop.is_orphaned):
            self._loop = Loop("schedule", self.tick, self._log, self._clock)
            self._loop.start(self._outages)

    async def stop(self, timeout: float | None) -> None:
        """Stop firing; running functions get `timeout` seconds (None: no limit).

        Unfinished work is left to other processes. A function that cannot be cancelled, as it runs
        in a thread or swallows the cancellation, is abandoned: the stop does not wait for it.
        """
        loop, self._loop = self._loop, None
        if loop is not None:
            # Both at once: a database that does not answer must not use up the functions' time.
            _, stopped_names = await asyncio.gather(
                loop.stop(timeout), self._end_functions(timeout)
            )
            await self._end_functions(
                0.0, stopped_names
            )  # functions that the last tick has started
        else:
            await self._end_functions(timeout)
        for name in self._failures:
            self._outages.remove_part((self, name))
        self._failures.clear()

    async def _end_functions(
        self, timeout: float | None, stopped_names: Iterable[str] = ()
    ) -> "Iterable[str]":
        """Stop the running functions, except `stopped_names`; return the names of the stopped.

        First wait for `timeout` seconds, then cancel, then abandon what goes on. The phases after
        the wait have a limit; with a `timeout` of None the wait itself has none, and a function
        that never ends blocks the stop.
        """
        running = {
            name: task for name, task in self._tasks.items() if name not in set(stopped_names)
        }
        if not running:
            return ()
        try:
            await asyncio.wait(running.values(), timeout=timeout)
        finally:
            calls = dict(self._runner.calls)
            for name, task in running.items():
                if name in calls and find_thread_function(calls[name][0]) is not None:
                    self._log_abandoned(name, calls[name][1], "runs in a thread")
                task.cancel()
        await asyncio.wait(running.values(), timeout=CANCEL_LIMIT)
        tasks = {name: task for name, task in running.items() if not task.done()}
        calls = self._runner.calls
        for name in tasks.keys() & calls.keys():
            self._log_abandoned(name, calls[name][1], "swallows its cancellation")
            abandon_task(calls[name][0])
        if tasks:
            await asyncio.wait(tasks.values(), timeout=RELEASE_TIMEOUT)
        return running.keys()

    def _log_abandoned(self, name: str, started_at: float, reason: str) -> None:
        """Log that a stop no longer waits for the function of schedule `name`.

        What the function returns is lost. The fire time stays due, so another process takes over.
        """
        elapsed = self._clock.monotonic() - started_at
        self._log(
            logging.ERROR,
            f"the function of schedule {name!r} is abandoned after {elapsed:.1f} s: it {reason}; "
            "another process will call it again",
        )

    def wake(self) -> None:
        """Read the schedules at once, because another process may have changed a schedule."""
        if self._loop is not None:
            self._loop.wake()

    async def tick(self) -> float:
        """Start to fire due schedules; return the seconds until the next tick.

        To fire is to publish the messages of a fire time. A schedule that the database does not
        have yet is defined there first.

        Raises:
            StoreError: the state is unknown; call again.
        """
        for name in self._schedules.keys() - self._defined:
            await self._store.schedules.define(name, partial(self._decide, self._schedules[name]))
            self._defined.add(name)
        now, seen = await self._store.schedules.read_snapshots(list(self._schedules))
        return min(
            (self._check(p, seen.get(p.name), now) for p in self._schedules.values()),
            default=self._max_interval,
        )

    @property
    def _max_interval(self) -> float:
        """Maximum seconds between two checks; long while changes of schedules are notified."""
        is_notified = self._wakeups.notify_only and self._wakeups.is_listening
        return MAX_NOTIFIED_CHECK_INTERVAL if is_notified else MAX_CHECK_INTERVAL

    async def fire_due(self) -> datetime | None:
        """Fire all due schedules and wait for their end, without `start`.

        For tests, which call this after each advance of their clock.

        Returns:
            The time of the next check, by the database's clock; None without any.

        Raises:
            StoreError: the state is unknown; call again.
        """
        await self.tick()
        while running := list(self._tasks.values()):
            await asyncio.wait(running)
            await self.tick()
        now, seen = await self._store.schedules.read_snapshots(list(self._schedules))
        times = [
            max(schedule.state.due_at, now + timedelta(seconds=max(0.0, schedule.busy_for)))
            for schedule in seen.values()
            if schedule.state is not None and schedule.state.due_at is not None
        ]
        return min(times, default=None)

    def _decide(
        self, schedule: DeclaredSchedule, state: ScheduleState | None, now: datetime
    ) -> ScheduleState | None:
        """Return the state of `schedule` to store at the start of this process; None for no change.

        `state` is the stored state, None without any. The definition (expression and zone) of the
        process that started last counts. Fire times that are due by the old definition are still
        published: `becomes` then holds the new one until they are.
        """
        definition = schedule.cron.definition
        if state is not None and state.next_definition == definition:
            return None
        if (
            state is not None
            and state.paused_at is None
            and state.next_at is not None
            and state.next_at <= now
            and self._can_read(schedule, state)
        ):
            # Fire times that are due by the old definition are published first.
            return replace(state, decided_at=state.decided_at or now, becomes=definition)
        new_state = ScheduleState(*definition, schedule.cron.find_next(now))
        if state is None:
            return new_state
        return replace(
            new_state,
            last_at=state.last_at,
            paused_at=state.paused_at,
            paused_by=state.paused_by,
            run_at=state.run_at,
        )

    def _check(
        self, schedule: DeclaredSchedule, seen: "ScheduleSnapshot | None", now: datetime
    ) -> float:
        """Start to fire `schedule` if due and free; return the seconds until the next check.

        It is free if no other process has its lease (`busy_for` are the seconds until that ends).
        `seen` is its row in the database, and `now` the database's time.
        """
        if schedule.name in self._tasks:
            return self._max_interval  # the end of the task wakes the loop
        if seen is None or seen.state is None:
            self._defined.discard(schedule.name)  # an operator has removed the schedule
            return BUSY_CHECK_INTERVAL
        due_at = seen.state.due_at
        if due_at is None or not self._can_read(schedule, seen.state):
            return self._max_interval
        if due_at > now:
            return min(self._max_interval, (due_at - now).total_seconds() + CLOCK_MARGIN)
        if seen.busy_for > 0:
            return min(BUSY_CHECK_INTERVAL, seen.busy_for + CLOCK_MARGIN)
        task = asyncio.create_task(self._fire(schedule), name=f"sqlbroker-schedule-{schedule.name}")
        self._tasks[schedule.name] = task
        task.add_done_callback(partial(self._on_task_done, schedule.name))
        return self._max_interval

    def _on_task_done(self, name: str, _task: "asyncio.Task[None]") -> None:
        """Remove the ended task of schedule `name` and check for the next fire time.

        A schedule with a running task is not checked, so the loop must be woken now.
        """
        self._tasks.pop(name, None)
        if self._loop is not None:
            self._loop.wake()

    async def _fire(self, schedule: DeclaredSchedule) -> None:
        """Fire `schedule` in its task; after a failure, pause before the task ends.

        No schedule is fired again while its task runs, so the pause delays the next try of this one
        only. Failures of the database are logged with those of the loops.
        """
        name = schedule.name
        started_at = self._clock.monotonic()
        try:
            await self._runner.fire(schedule)
        except Exception as error:  # noqa: BLE001 - it goes on; `healthy` turns false
            failures = self._failures[name] = self._failures.get(name, 0) + 1
            pause = backoff(failures, self._clock)
            if isinstance(error, StoreError):
                self._outages.record_failure((self, name), f"schedule {name!r}", error, started_at)
            else:
                text = f"schedule {name!r} could not fire, trying again in {pause:.1f} s: {error!r}"
                self._log(logging.CRITICAL, text, exc_info=error)
            await self._outages.pause(pause, started_at)
        else:
            self._failures.pop(name, None)
            self._outages.record_success((self, name))

    def _can_read(self, schedule: DeclaredSchedule, state: ScheduleState) -> bool:
        """Return True if this process can parse the stored definition of the schedule.

        Another version may have written it; then the schedule is left to other processes. Also log
        if the stored definition differs from the one that this process declares.
        """
        declared = schedule.cron.definition
        next_definition = state.next_definition
        try:
            for definition in {(state.expression, state.tz), next_definition}:
                self._runner.get_cron(definition)
        except SetupError as error:
            text = (
                f"this process leaves schedule {schedule.name!r} to other processes, because it "
                f"cannot parse the stored definition: {error}"
            )
            self._log_once(logging.WARNING, text)
            return False
        if next_definition != declared:
            text = (
                f"schedule {schedule.name!r} fires by {next_definition}, the definition of the "
                f"process that started last; this process declares {declared}"
            )
            self._log_once(logging.INFO, text)
        return True

    def _log_once(self, level: int, text: str) -> None:
        """Log `text` once: the checks of a scheduler repeat the same texts."""
        if text not in self._logged:
            self._logged.add(text)
            self._log(level, text)
