"""Schedules, each operation one transaction."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.status import Schedule, ScheduleState
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import schedules
from faststream_sqlbroker.database.parts.audit import note_action


class Schedules:
    """Reads and writes the state of schedules; the process that publishes is known by its token.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    async def define(self, name: str, decide: schedules.Decide) -> ScheduleState | None:
        """Let `decide` change the state of a schedule, new or not; the state after that."""
        return await self._database.run(
            lambda c: schedules.define(self._dialect, c, name, decide),
            Activity.SCHEDULE,
            Activity.PUBLISH,
        )

    async def read(self, names: Sequence[str]) -> tuple[datetime, dict[str, schedules.Seen]]:
        """The time by the database's clock, and those of the schedules `names` that exist."""
        return await self._database.run(
            lambda c: schedules.read(self._dialect, c, names),
            Activity.SCHEDULE,
            Activity.PUBLISH,
            write=False,
        )

    async def hold(self, name: str, token: UUID, lease: float) -> ScheduleState | None:
        """Lease a schedule for `lease` seconds if it is due and free; its state, or None."""
        return await self._database.run(
            lambda c: schedules.hold(self._dialect, c, name, token, lease),
            Activity.SCHEDULE,
            Activity.PUBLISH,
        )

    async def extend(self, name: str, token: UUID, lease: float) -> bool:
        """Extend the lease to `lease` seconds from now; false if `token` no longer has it."""
        return await self._database.run(
            lambda c: schedules.extend(c, self._table, name, token, lease),
            Activity.SCHEDULE,
            Activity.PUBLISH,
        )

    async def publish(
        self,
        name: str,
        token: UUID,
        state: ScheduleState,
        rows: Sequence[NewMessage],
        lease: float | None,
    ) -> bool:
        """Insert `rows` and write `state`, if `token` still has the schedule; whether it had.

        Both are one transaction, so each fire time is published once. The schedule stays leased for
        `lease` seconds; None releases it.
        """
        return await self._database.run(
            lambda c: schedules.publish(self._dialect, c, name, token, state, rows, lease),
            Activity.SCHEDULE,
            Activity.PUBLISH,
        )

    async def put_off(self, name: str, token: UUID, state: ScheduleState, pause: float) -> None:
        """Release a schedule, if `token` has it; it cannot be leased for `pause` seconds."""
        await self._database.run(
            lambda c: schedules.put_off(c, self._table, name, token, state, pause),
            Activity.SCHEDULE,
            Activity.PUBLISH,
        )

    async def give_back(self, name: str, token: UUID) -> None:
        """Release a schedule, if `token` has it; other processes can lease it now."""
        await self._database.run(
            lambda c: schedules.give_back(c, self._table, name, token),
            Activity.SCHEDULE,
            Activity.PUBLISH,
        )

    async def forget(self, name: str, by: str) -> bool:
        """Remove a schedule, and note who did; whether it existed."""

        def work(connection: Connection) -> bool:
            was = schedules.forget(connection, self._table, name)
            if was:
                note_action(connection, self._dialect, "forget_schedule", by, {"name": name})
            return was

        return await self._database.run(work, Activity.OPERATE)

    async def run(self, name: str, by: str) -> ScheduleState | None:
        """Ask for a run besides the fire times, unless it is paused; its state before, or None."""

        def asked(state: ScheduleState, now: datetime) -> ScheduleState:
            if state.paused_at is not None or state.run_at is not None:
                return state
            return replace(state, run_at=now)

        return await self._change("run_schedule", name, by, asked, lambda s: s.paused_at is None)

    async def pause(self, name: str, by: str) -> ScheduleState | None:
        """Pause a schedule, and note who did; its state before, or None."""

        def paused(state: ScheduleState, now: datetime) -> ScheduleState:
            return state if state.paused_at is not None else state.paused(now, by)

        return await self._change("pause_schedule", name, by, paused, lambda s: s.paused_at is None)

    async def resume(self, name: str, by: str) -> ScheduleState | None:
        """End the pause of a schedule, and note who did; its state before, or None."""

        def resumed(state: ScheduleState, now: datetime) -> ScheduleState:
            return state if state.paused_at is None else state.resumed(now)

        return await self._change(
            "resume_schedule", name, by, resumed, lambda s: s.paused_at is not None
        )

    async def _change(
        self,
        action: str,
        name: str,
        by: str,
        decide: Callable[[ScheduleState, datetime], ScheduleState],
        noted: Callable[[ScheduleState], bool],
    ) -> ScheduleState | None:
        """Change a schedule, and note who did if `noted` says so of its state before."""

        def work(connection: Connection) -> ScheduleState | None:
            was = schedules.change(self._dialect, connection, name, decide)
            if was is not None and noted(was):
                note_action(connection, self._dialect, action, by, {"name": name})
            return was

        return await self._database.run(work, Activity.OPERATE)

    async def listed(self, limit: int) -> list[Schedule]:
        """Up to `limit` schedules, sorted by name."""
        return await self._database.run(
            lambda c: schedules.listed(c, self._table, limit), Activity.OPERATE, write=False
        )
