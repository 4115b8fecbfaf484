"""Publish what of one schedule is due: take it, make each message, and write it with the step of the schedule.

No transaction is open while a message is made, as a function of the user's may take long; the schedule is leased
meanwhile. The message and the mark that its fire time is done are committed together, by the holder of the lease only.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.schedules import Missed, ScheduleState
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.chain import due_queues
from faststream_sqlbroker.flow.cron import Cron
from faststream_sqlbroker.flow.loop import Log, cancelled
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from faststream_sqlbroker.store import Store

LEASE = 10.0
"""Seconds after which another process goes on with what a dead one has begun."""
LONGEST_PAUSE = 30.0
"""Most seconds between two tries of a fire time whose function fails; they begin with one and double."""
GIVE_BACK_TIMEOUT = 2.0

Make = Callable[[datetime], Awaitable[Sequence[NewMessage]]]
"""The messages of a fire time, which is aware and in the schedule's zone; called again if it fails."""


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
        """Share the broker's store and wake-ups."""
        self._schedules, self._wakeups, self._log = store.schedules, wakeups, log
        self._crons: dict[tuple[str, str], Cron] = {}

    def cron(self, definition: tuple[str, str]) -> Cron:
        """The expression and zone as the database has them.

        Raises:
            SetupError: this process cannot read them.
        """
        if definition not in self._crons:
            self._crons[definition] = Cron(*definition)
        return self._crons[definition]

    async def fire(self, planned: Planned) -> None:
        """Publish the fire times of `planned` that are due, one after the other, unless somebody else does.

        A fire time of which no message can be made stays due, and is put off.

        Raises:
            StoreError: the database failed; whoever comes next goes on where this ended.
        """
        token = uuid4()
        try:
            state = await self._schedules.hold(planned.name, token, LEASE)
            if state is None:
                return
            async with self._kept(planned.name, token):
                await self._publish(planned, state, token)
        except (asyncio.CancelledError, StoreError):
            # Nobody need wait for the lease, which may be held unanswered. What was published meanwhile stays so.
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(GIVE_BACK_TIMEOUT):
                    await self._schedules.give_back(planned.name, token)
            raise

    async def _publish(self, planned: Planned, state: ScheduleState, token: UUID) -> None:
        first, until = state.next_at, state.decided_at
        assert first is not None  # noqa: S101 - what is held is due
        assert until is not None  # noqa: S101 - and says what is
        try:
            cron = self.cron((state.expression, state.tz))
            following = self.cron(state.definition_to_come).after(until)
        except Exception as error:  # noqa: BLE001 - another version may have written it
            await self._failed(planned, state, token, error)
            return
        times = cron.due(first, until, planned.missed)
        if not state.failures_count:
            self._tell_missed(planned, first, until, times)
        for n, fire_at in enumerate(times, 1):
            try:
                rows = await planned.make(fire_at.astimezone(cron.zone))
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and cancelled():
                    raise
                await self._failed(planned, replace(state, next_at=fire_at), token, error)
                return
            last = n == len(times)
            state = state.ended(fire_at, following) if last else state.fired(fire_at, times[n])
            if not await self._write(planned, state, token, rows, ended=last):
                return
        if not times:
            await self._write(planned, state.ended(None, following), token, (), ended=True)

    async def _write(
        self,
        planned: Planned,
        state: ScheduleState,
        token: UUID,
        rows: Sequence[NewMessage],
        *,
        ended: bool,
    ) -> bool:
        lease = None if ended else LEASE
        if not await self._schedules.publish(planned.name, token, state, rows, lease):
            text = (
                f"the schedule {planned.name!r} was taken from this process, or redefined, before its message was "
                "written; whoever has it publishes it"
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
        pause = min(LONGEST_PAUSE, 2.0 ** min(state.failures_count, 10))
        text = (
            f"no message could be made for the schedule {planned.name!r} at {state.next_at} ({count} times in a row), "
            f"again in {pause:.0f} s: {error!r}"
        )
        self._log(logging.ERROR, text, exc_info=error)
        await self._schedules.put_off(
            planned.name, token, replace(state, failures_count=count), pause
        )

    def _tell_missed(
        self, planned: Planned, first: datetime, until: datetime, times: Sequence[datetime]
    ) -> None:
        if times and times[0] == first:
            return
        upto = f"before {times[0]}" if times else f"until {until}"
        level = logging.WARNING if planned.missed == "all" else logging.INFO
        text = f"the schedule {planned.name!r} leaves out its fire times from {first} {upto}, which nobody was there for"
        self._log(level, f'{text} (missed="{planned.missed}")')

    @asynccontextmanager
    async def _kept(self, name: str, token: UUID) -> "AsyncIterator[None]":
        """Renew the lease meanwhile."""
        keeper = asyncio.create_task(self._keep(name, token), name="sqlbroker-schedule-lease")
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.wait((keeper,))

    async def _keep(self, name: str, token: UUID) -> None:
        while True:
            await asyncio.sleep(LEASE / 3)
            try:
                if not await self._schedules.extend(name, token, LEASE):
                    return
            except StoreError as error:
                self._log(
                    logging.WARNING, f"the lease of the schedule {name!r} was not renewed: {error}"
                )
