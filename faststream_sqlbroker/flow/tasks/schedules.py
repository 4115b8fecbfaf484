"""Schedules of one broker: look when each is due, by the database's clock, and publish it then.

Processes look independently; which of them publishes is decided by the lease in the database
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
from faststream_sqlbroker.core.status import Missed, ScheduleState
from faststream_sqlbroker.exceptions import SetupError, StoreError
from faststream_sqlbroker.flow.loop import CANCEL_LIMIT, Log, Loop, backoff, cancelled
from faststream_sqlbroker.flow.own_context import give_up
from faststream_sqlbroker.flow.publish_on_ack import due_queues
from faststream_sqlbroker.flow.tasks.cron import Cron
from faststream_sqlbroker.flow.threads import own_of
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from faststream_sqlbroker.database.schedules import Seen
    from faststream_sqlbroker.database.store import Store


# Publish what of one schedule is due: take it, make each message, and write it with the step of the
# schedule.
#
# No transaction is open while a message is made, as a function of the user's may take long; the
# schedule is leased while it runs. The message and the mark that its fire time is done are
# committed together, by the holder of the lease only.

LEASE = 10.0
"""Seconds after which another process goes on with what a dead one has begun."""
LONGEST_RETRY_INTERVAL = 30.0
"""Most seconds between two tries of a fire time whose function fails; they begin with one and
double."""
GIVE_BACK_TIMEOUT = 2.0
"""Seconds for the lease of a schedule to be given back; then it runs out by itself."""

Make = Callable[[datetime], Coroutine[Any, Any, Sequence[NewMessage]]]
"""The messages of a fire time, which is aware and in the schedule's zone; called again if it fails.
"""


@dataclass(frozen=True, slots=True)
class Planned:
    """A schedule as the application declares it."""

    name: str
    cron: Cron
    missed: Missed
    make: Make


class Firing:
    """Publishes what is due, once in the whole fleet."""

    def __init__(self, store: "Store", wakeups: Wakeups, log: Log) -> None:
        self._store = store
        self._wakeups = wakeups
        self._log = log
        self._clock = wakeups.clock
        self._crons: dict[tuple[str, str], Cron] = {}
        self.calls: dict[str, tuple[asyncio.Task[Any], float]] = {}
        """The functions that run now, and since when (monotonic seconds)."""

    def cron(self, definition: tuple[str, str]) -> Cron:
        """The expression and zone as the database has them.

        Raises:
            SetupError: this process cannot read them.
        """
        if definition not in self._crons:
            self._crons[definition] = Cron(*definition)
        return self._crons[definition]

    async def fire(self, planned: Planned) -> None:
        """Publish the run that an operator has asked for, and the fire times of `planned` that are
        due, one after the other, unless another process does.

        A fire time of which no message can be made stays due, and is put off.

        Raises:
            StoreError: the database failed; the next process goes on where this ended.
        """
        token = uuid4()
        try:
            state = await self._store.schedules.hold(planned.name, token, LEASE)
            if state is None:
                return
            async with self._kept(planned.name, token):
                if state.run_at is not None:
                    # It moves no fire time.
                    after = replace(state, run_at=None, failures_count=0)
                    if not await self._step(planned, state, state.run_at, after, token):
                        return
                    state = after
                if state.decided_at is not None:
                    await self._publish(planned, state, token)
        except (asyncio.CancelledError, StoreError):
            # Other processes need not wait until the lease ends, which may be held even if the
            # answer was lost. What was published until now stays published.
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(GIVE_BACK_TIMEOUT):
                    await self._store.schedules.give_back(planned.name, token)
            raise

    async def _publish(self, planned: Planned, state: ScheduleState, token: UUID) -> None:
        first = state.next_at
        until = state.decided_at
        assert first is not None  # noqa: S101 - what is held is due
        assert until is not None  # noqa: S101 - and says what is
        try:
            cron = self.cron((state.expression, state.tz))
            following = self.cron(state.definition_to_come).after(until)
            first = _behind_the_pause(cron, state, first, until)
            state = replace(state, skipped_until=None, next_at=first)
        except Exception as error:  # noqa: BLE001 - another version may have written it
            await self._failed(planned, state, token, error)
            return
        times = cron.due(first, until, planned.missed) if first <= until else []
        if first <= until and not state.failures_count:
            self._tell_missed(planned, first, until, times)
        for n, fire_at in enumerate(times, 1):
            state = replace(state, next_at=fire_at)
            last = n == len(times)
            after = state.ended(fire_at, following) if last else state.fired(fire_at, times[n])
            if not await self._step(planned, state, fire_at, after, token):
                return
            state = after
        if not times:
            await self._write(planned, state.ended(None, following), token, ())

    async def _step(
        self,
        planned: Planned,
        state: ScheduleState,
        at: datetime,
        after: ScheduleState,
        token: UUID,
    ) -> bool:
        """Publish the message of one time, after which the state is `after`; whether that was
        done.
        """
        rows = await self._made(planned, state, at, token)
        return rows is not None and await self._write(planned, after, token, rows)

    async def _made(
        self, planned: Planned, state: ScheduleState, at: datetime, token: UUID
    ) -> Sequence[NewMessage] | None:
        """The messages of a time; None if they cannot be made, and `state` was put off."""
        try:
            zone = self.cron((state.expression, state.tz)).zone
            return await self._call(planned, at.astimezone(zone))
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and cancelled():
                raise
            await self._failed(planned, state, token, error)
            return None

    async def _call(self, planned: Planned, at: datetime) -> Sequence[NewMessage]:
        # A task of its own: a function may cancel the one that it runs in.
        call = asyncio.create_task(planned.make(at))
        self.calls[planned.name] = (call, self._clock.monotonic())
        try:
            made: Sequence[NewMessage] = await call
        finally:
            del self.calls[planned.name]
        if cancelled():  # which the function has swallowed
            raise asyncio.CancelledError
        return made

    async def _write(
        self,
        planned: Planned,
        state: ScheduleState,
        token: UUID,
        rows: Sequence[NewMessage],
    ) -> bool:
        # Once nothing more is due of what was begun, others may have it.
        lease = None if state.decided_at is None else LEASE
        if not await self._store.schedules.publish(planned.name, token, state, rows, lease):
            text = (
                f"the schedule {planned.name!r} was taken from this process, redefined, paused or "
                "asked to run before its message was written; unless it is paused, the process "
                "that has it publishes it"
            )
            self._log(logging.WARNING, text)
            return False
        if queues := due_queues(rows):
            self._wakeups.published(queues)
        return True

    async def _failed(
        self, planned: Planned, state: ScheduleState, token: UUID, error: BaseException
    ) -> None:
        count = state.failures_count + 1
        pause = min(LONGEST_RETRY_INTERVAL, 2.0 ** min(state.failures_count, 10))
        text = (
            f"no message could be made for the schedule {planned.name!r} at "
            f"{state.run_at or state.next_at} "
            f"({count} times in a row), again in {pause:.0f} s: {error!r}"
        )
        self._log(logging.ERROR, text, exc_info=error)
        await self._store.schedules.put_off(
            planned.name, token, replace(state, failures_count=count), pause
        )

    def _tell_missed(
        self, planned: Planned, first: datetime, until: datetime, times: Sequence[datetime]
    ) -> None:
        if times and times[0] == first:
            return
        upto = f"before {times[0]}" if times else f"until {until}"
        level = logging.WARNING if planned.missed == "all" else logging.INFO
        text = (
            f"the schedule {planned.name!r} leaves out its fire times from {first} {upto}, when "
            "no process ran"
        )
        self._log(level, f'{text} (missed="{planned.missed}")')

    @asynccontextmanager
    async def _kept(self, name: str, token: UUID) -> "AsyncIterator[None]":
        """Renew the lease inside of the block."""
        keeper = asyncio.create_task(self._keep(name, token), name="sqlbroker-schedule-lease")
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.wait((keeper,))

    async def _keep(self, name: str, token: UUID) -> None:
        while True:
            await self._clock.sleep(LEASE / 3)
            try:
                if not await self._store.schedules.extend(name, token, LEASE):
                    return
            except StoreError as error:
                self._log(
                    logging.WARNING, f"the lease of the schedule {name!r} was not renewed: {error}"
                )


def _behind_the_pause(
    cron: Cron, state: ScheduleState, first: datetime, until: datetime
) -> datetime:
    """`first`, or the first fire time after a pause; beyond `until` if there is none."""
    if state.skipped_until is None:
        return first
    # A run that was interrupted may have come further than that.
    return max(first, cron.after(state.skipped_until) or until + timedelta(seconds=1))


LONGEST_NAP = 30.0
"""Seconds after which it looks again: another process may have redefined a schedule."""
LONGEST_NAP_WHEN_TOLD = 3600.0
"""The same where subscribers look only when they are told: that is told, too."""
BUSY_NAP = 1.0
"""Seconds until a schedule that another process publishes is looked at again."""
SOON = 0.002
"""Seconds: clocks are read in milliseconds."""


class Scheduler:
    """Fires the schedules that were declared, as long as it runs."""

    def __init__(self, store: "Store", wakeups: Wakeups, log: Log) -> None:
        self._store = store
        self._log = log
        self._wakeups = wakeups
        self._outages = wakeups.outages
        self._clock = wakeups.clock
        self._firing = Firing(store, wakeups, log)
        self._planned: dict[str, Planned] = {}
        self._defined: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, int] = {}
        self._said: set[str] = set()
        self._loop: Loop | None = None

    @property
    def healthy(self) -> bool:
        """Whether the database answers; a function that raises is the application's business."""
        return (self._loop is None or self._loop.healthy) and not self._failures

    def plan(self, schedules: Iterable[Planned]) -> None:
        """These are to be fired from the next `start` on.

        Raises:
            SetupError: two have the same name.
        """
        planned: dict[str, Planned] = {}
        for schedule in schedules:
            if schedule.name in planned:
                raise SetupError(
                    f"the schedule {schedule.name!r} is declared twice: give each its own name"
                )
            planned[schedule.name] = schedule
        self._planned = planned

    def start(self) -> None:
        """Start the loop, if there are schedules; without effect if it runs."""
        self._defined.clear()
        if self._planned and (self._loop is None or self._loop.orphaned):
            self._loop = Loop("schedule", self.tick, self._log, self._clock)
            self._loop.start(self._outages)

    async def stop(self, timeout: float | None) -> None:
        """Begin nothing more; what runs ends within `timeout` seconds (None: whenever), or is left
        to others. A function that cannot be cancelled is abandoned.
        """
        loop, self._loop = self._loop, None
        if loop is not None:
            # Both at once: a database that does not answer takes none of the functions' time.
            _, ended = await asyncio.gather(loop.stop(timeout), self._end_functions(timeout))
            await self._end_functions(0.0, ended)  # what the last tick has begun
        else:
            await self._end_functions(timeout)
        for name in self._failures:
            self._outages.left((self, name))
        self._failures.clear()

    async def _end_functions(
        self, timeout: float | None, ended: Iterable[str] = ()
    ) -> "Iterable[str]":
        """Those that run, but for `ended`; which ones."""
        running = {name: task for name, task in self._tasks.items() if name not in set(ended)}
        if not running:
            return ()
        try:
            await asyncio.wait(running.values(), timeout=timeout)
        finally:
            calls = dict(self._firing.calls)
            for name, task in running.items():
                if name in calls and own_of(calls[name][0]) is not None:
                    self._tell_abandoned(name, calls[name][1], "runs in a thread")
                task.cancel()
        await asyncio.wait(running.values(), timeout=CANCEL_LIMIT)
        stuck = {name: task for name, task in running.items() if not task.done()}
        calls = self._firing.calls
        for name in stuck.keys() & calls.keys():
            self._tell_abandoned(name, calls[name][1], "swallows its cancellation")
            give_up(calls[name][0])
        if stuck:
            await asyncio.wait(stuck.values(), timeout=GIVE_BACK_TIMEOUT)
        return running.keys()

    def _tell_abandoned(self, name: str, began: float, why: str) -> None:
        took = self._clock.monotonic() - began
        self._log(
            logging.ERROR,
            f"the function of schedule {name!r} is abandoned after {took:.1f} s: it {why}; another "
            "process calls it again",
        )

    def wake(self) -> None:
        """Another process may have redefined a schedule: look at once."""
        if self._loop is not None:
            self._loop.wake()

    async def tick(self) -> float:
        """Begin to fire what is due; seconds until the next look.

        Raises:
            StoreError: nothing is known; call again.
        """
        for name in self._planned.keys() - self._defined:
            await self._store.schedules.define(name, partial(self._decide, self._planned[name]))
            self._defined.add(name)
        now, seen = await self._store.schedules.read(list(self._planned))
        return min(
            (self._check(p, seen.get(p.name), now) for p in self._planned.values()),
            default=self._longest_nap,
        )

    @property
    def _longest_nap(self) -> float:
        told = self._wakeups.told_only and self._wakeups.listening
        return LONGEST_NAP_WHEN_TOLD if told else LONGEST_NAP

    async def fire_due(self) -> datetime | None:
        """Without `start`: fire what is due and wait for its end; when the next look is needed, by
        the database's clock.

        Raises:
            StoreError: nothing is known; call again.
        """
        await self.tick()
        while running := list(self._tasks.values()):
            await asyncio.wait(running)
            await self.tick()
        now, seen = await self._store.schedules.read(list(self._planned))
        times = [
            max(one.state.due_at, now + timedelta(seconds=max(0.0, one.busy_for)))
            for one in seen.values()
            if one.state is not None and one.state.due_at is not None
        ]
        return min(times, default=None)

    def _decide(
        self, planned: Planned, state: ScheduleState | None, now: datetime
    ) -> ScheduleState | None:
        """The state of `planned` when this process begins with it; None: as it is."""
        definition = planned.cron.definition
        if state is not None and state.definition_to_come == definition:
            return None
        if (
            state is not None
            and state.paused_at is None
            and state.next_at is not None
            and state.next_at <= now
            and self._reads(planned, state)
        ):
            # What is due by the old definition is published first.
            return replace(state, decided_at=state.decided_at or now, becomes=definition)
        made = ScheduleState(*definition, planned.cron.after(now))
        if state is None:
            return made
        return replace(
            made,
            last_at=state.last_at,
            paused_at=state.paused_at,
            paused_by=state.paused_by,
            run_at=state.run_at,
        )

    def _check(self, planned: Planned, seen: "Seen | None", now: datetime) -> float:
        """Begin to fire `planned` if it is due and free; seconds until the next look at it."""
        if planned.name in self._tasks:
            return self._longest_nap  # its end wakes the loop
        if seen is None or seen.state is None:
            self._defined.discard(planned.name)  # an operator has removed it
            return BUSY_NAP
        due_at = seen.state.due_at
        if due_at is None or not self._reads(planned, seen.state):
            return self._longest_nap
        if due_at > now:
            return min(self._longest_nap, (due_at - now).total_seconds() + SOON)
        if seen.busy_for > 0:
            return min(BUSY_NAP, seen.busy_for + SOON)
        task = asyncio.create_task(self._fire(planned), name=f"sqlbroker-schedule-{planned.name}")
        self._tasks[planned.name] = task
        task.add_done_callback(partial(self._ended, planned.name))
        return self._longest_nap

    def _ended(self, name: str, _task: "asyncio.Task[None]") -> None:
        self._tasks.pop(name, None)
        if self._loop is not None:
            self._loop.wake()

    async def _fire(self, planned: Planned) -> None:
        name = planned.name
        began = self._clock.monotonic()
        try:
            await self._firing.fire(planned)
        except Exception as error:  # noqa: BLE001 - it goes on; `healthy` turns false
            failures = self._failures[name] = self._failures.get(name, 0) + 1
            pause = backoff(failures, self._clock)
            if isinstance(error, StoreError):
                self._outages.failed((self, name), f"schedule {name!r}", error, began)
            else:
                text = f"the schedule {name!r} could not fire, again in {pause:.1f} s: {error!r}"
                self._log(logging.CRITICAL, text, exc_info=error)
            await self._clock.sleep(pause)
        else:
            self._failures.pop(name, None)
            self._outages.worked((self, name))

    def _reads(self, planned: Planned, state: ScheduleState) -> bool:
        """Whether this process can fire by what the database says, which another version may have
        written.
        """
        wanted = planned.cron.definition
        coming = state.definition_to_come
        try:
            for definition in {(state.expression, state.tz), coming}:
                self._firing.cron(definition)
        except SetupError as error:
            text = (
                f"the schedule {planned.name!r} is left to other processes, this one cannot read "
                f"it: {error}"
            )
            self._say_once(logging.WARNING, text)
            return False
        if coming != wanted:
            text = (
                f"the schedule {planned.name!r} fires by {coming}, as the process that was "
                f"started last declares it; here it is declared as {wanted}"
            )
            self._say_once(logging.INFO, text)
        return True

    def _say_once(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._log(level, text)
