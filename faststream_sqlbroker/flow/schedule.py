"""Schedules of one broker: look when each is due, by the database's clock, and publish it then.

Processes look independently; which of them publishes is decided by the lease in the database (`flow.firing`).
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from faststream_sqlbroker.core.schedules import ScheduleState
from faststream_sqlbroker.exceptions import SetupError, StoreError
from faststream_sqlbroker.flow.firing import Firing, Planned
from faststream_sqlbroker.flow.loop import CANCEL_LIMIT, Log, Loop, backoff
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from faststream_sqlbroker.dialects.schedules import Seen
    from faststream_sqlbroker.store import Store

LONGEST_NAP = 30.0
"""Seconds after which it looks again: another process may have redefined a schedule."""
BUSY_NAP = 1.0
"""Seconds until a schedule that somebody else publishes is looked at again."""
SOON = 0.002
"""Seconds: clocks are read in milliseconds."""


class Scheduler:
    """Fires the schedules that were declared, as long as it runs."""

    def __init__(self, store: "Store", wakeups: Wakeups, log: Log) -> None:
        """Nothing runs before `start`."""
        self._store, self._log, self._outages = store, log, wakeups.outages
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
        if self._planned and self._loop is None:
            self._loop = Loop("schedule", self.tick, self._log)
            self._loop.start(self._outages)

    async def stop(self, timeout: float | None) -> None:
        """Begin nothing more; what runs ends within `timeout` seconds (None: whenever), or is left to others."""
        loop, self._loop = self._loop, None
        if loop is not None:
            await loop.stop(timeout)
        if running := list(self._tasks.values()):
            try:
                await asyncio.wait(running, timeout=timeout)
            finally:
                for task in running:
                    task.cancel()
            await asyncio.wait(running, timeout=CANCEL_LIMIT)
        for name in self._failures:
            self._outages.left((self, name))
        self._failures.clear()

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
            (self._look(p, seen.get(p.name), now) for p in self._planned.values()),
            default=LONGEST_NAP,
        )

    def _decide(
        self, planned: Planned, state: ScheduleState | None, now: datetime
    ) -> ScheduleState | None:
        """The state of `planned` when this process begins with it; None: as it is."""
        definition = planned.cron.definition
        if state is not None and state.definition_to_come == definition:
            return None
        if (
            state is not None
            and state.next_at is not None
            and state.next_at <= now
            and self._reads(planned, state)
        ):
            # What is due by the old definition is published first.
            return replace(state, decided_at=state.decided_at or now, becomes=definition)
        last_at = None if state is None else state.last_at
        return ScheduleState(*definition, planned.cron.after(now), last_at)

    def _look(self, planned: Planned, seen: "Seen | None", now: datetime) -> float:
        """Begin to fire `planned` if it is due and free; seconds until it is to be looked at again."""
        if planned.name in self._tasks:
            return LONGEST_NAP  # its end wakes the loop
        if seen is None or seen.state is None:
            self._defined.discard(planned.name)  # an operator has removed it
            return BUSY_NAP
        if seen.state.next_at is None or not self._reads(planned, seen.state):
            return LONGEST_NAP
        if seen.state.next_at > now:
            return min(LONGEST_NAP, (seen.state.next_at - now).total_seconds() + SOON)
        if seen.busy_for > 0:
            return min(BUSY_NAP, seen.busy_for + SOON)
        task = asyncio.create_task(self._fire(planned), name=f"sqlbroker-schedule-{planned.name}")
        self._tasks[planned.name] = task
        task.add_done_callback(partial(self._ended, planned.name))
        return LONGEST_NAP

    def _ended(self, name: str, _task: "asyncio.Task[None]") -> None:
        self._tasks.pop(name, None)
        if self._loop is not None:
            self._loop.wake()

    async def _fire(self, planned: Planned) -> None:
        name = planned.name
        try:
            await self._firing.fire(planned)
        except Exception as error:  # noqa: BLE001 - it goes on; `healthy` turns false
            failures = self._failures[name] = self._failures.get(name, 0) + 1
            pause = backoff(failures)
            if isinstance(error, StoreError):
                self._outages.failed((self, name), f"schedule {name!r}", error)
            else:
                text = f"the schedule {name!r} could not fire, again in {pause:.1f} s: {error!r}"
                self._log(logging.CRITICAL, text, exc_info=error)
            await asyncio.sleep(pause)
        else:
            self._failures.pop(name, None)
            self._outages.worked((self, name))

    def _reads(self, planned: Planned, state: ScheduleState) -> bool:
        """Whether this process can fire by what the database says, which another version may have written."""
        wanted, coming = planned.cron.definition, state.definition_to_come
        try:
            for definition in {(state.expression, state.tz), coming}:
                self._firing.cron(definition)
        except SetupError as error:
            text = f"the schedule {planned.name!r} is left to other processes, this one cannot read it: {error}"
            self._say_once(logging.WARNING, text)
            return False
        if coming != wanted:
            text = (
                f"the schedule {planned.name!r} fires by {coming}, as the process that was started last declares it; "
                f"here it is declared as {wanted}"
            )
            self._say_once(logging.INFO, text)
        return True

    def _say_once(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._log(level, text)
