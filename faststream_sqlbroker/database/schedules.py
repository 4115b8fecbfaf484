"""Schedules: rows of the policy state with scope "schedule"; each operation is one transaction.

The statements are the same on every database. The process that publishes what is due holds the
row's lease, with a token of its own, and each of its writes names the token. A process that
changes the schedule removes the lease. A row without a lease, or with one that has run out, is
free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    case,
    delete,
    null,
    select,
    update,
)

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.status import Schedule, ScheduleState, load_state
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts.audit import note_action
from faststream_sqlbroker.database.parts.live_subscribers import notify_state_changed
from faststream_sqlbroker.database.parts.mirror import insert_mirrored
from faststream_sqlbroker.database.parts.policy_state import from_now, upsert
from faststream_sqlbroker.schema.types import clock

SCHEDULE = "schedule"
"""The scope of all schedules; the key is the schedule's name."""
FIRING = (Activity.SCHEDULE, Activity.PUBLISH)
"""What a process with schedules does."""

Decide = Callable[[ScheduleState | None, datetime], ScheduleState | None]
"""Gets a state and the database's time, gives a new state; None changes nothing."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A schedule as it was read."""

    state: ScheduleState | None
    busy_for: float
    """Seconds for which another process holds it at most; 0 or less: it is free."""


class Schedules:
    """Reads and writes the state of schedules; the process that publishes is known by its token.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    async def define(self, name: str, decide: Decide) -> ScheduleState | None:
        """Let `decide` change the state of a schedule, new or not; the state after that."""

        def define(connection: Connection) -> ScheduleState | None:
            # Inserts the row, or locks the existing one: two processes that start together decide
            # one after the other, and the second sees what the first wrote.
            binds = [{"scope": SCHEDULE, "key": name}]
            upsert(connection, self._table, binds, replaced=("scope",), created_at=clock())
            was, state = self._change_state(connection, name, decide)
            return was if state is None else state

        return await self._database.run(define, *FIRING)

    async def read(self, names: Sequence[str]) -> tuple[datetime, dict[str, Seen]]:
        """The time by the database's clock, and those of the schedules `names` that exist."""
        c = self._table.c
        statement = select(c.key, c.info, c.lease_expires_at)
        statement = statement.where(c.scope == SCHEDULE, c.key.in_(names))

        def read(connection: Connection) -> tuple[datetime, dict[str, Seen]]:
            rows = connection.execute(statement).all()
            now = self._dialect.now(connection)
            return now, {
                key: Seen(load_state(info), 0.0 if ends is None else (ends - now).total_seconds())
                for key, info, ends in rows
            }

        return await self._database.run(read, *FIRING, write=False)

    async def hold(self, name: str, token: UUID, lease: float) -> ScheduleState | None:
        """Lease a schedule for `lease` seconds if it is due and free; its state, or None.

        It is due at its next fire time, or if an operator has asked for a run; never while paused.
        `decided_at` says until when fire times are to be published. It is kept when the schedule
        changes hands, so that a run is finished as it was begun.
        """

        def hold(connection: Connection) -> ScheduleState | None:
            row = self._lock(connection, name)
            now = self._dialect.now(connection)
            state = None if row is None else load_state(row.info)
            if state is None or state.due_at is None or state.due_at > now:
                return None
            ends = row.lease_expires_at
            if row.lease_token != token and ends is not None and ends > now:
                return None
            state = state.begun(now)
            self._write(connection, name, state, token, from_now(lease))
            return state

        return await self._database.run(hold, *FIRING)

    async def extend(self, name: str, token: UUID, lease: float) -> bool:
        """Extend the lease to `lease` seconds from now; false if `token` no longer has it."""
        return await self._update_held(name, token, lease_expires_at=from_now(lease))

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
        `lease` seconds from now; None releases it.
        """

        def publish(connection: Connection) -> bool:
            row = self._lock(connection, name)
            if row is None or row.lease_token != token:
                return False
            if rows:
                insert_mirrored(self._dialect, connection, rows)
            if lease is None:
                self._write(connection, name, state, None, null())
            else:
                self._write(connection, name, state, token, from_now(lease))
            return True

        return await self._database.run(publish, *FIRING)

    async def put_off(self, name: str, token: UUID, state: ScheduleState, pause: float) -> bool:
        """Release a schedule that `token` has; nothing can lease it for `pause` seconds."""
        return await self._update_held(
            name, token, info=state.dump(), lease_token=None, lease_expires_at=from_now(pause)
        )

    async def give_back(self, name: str, token: UUID) -> bool:
        """Release a schedule that `token` has; other processes can lease it now."""
        return await self._update_held(name, token, lease_token=None, lease_expires_at=None)

    async def forget(self, name: str, by: str) -> bool:
        """Remove a schedule, and note who did; whether it existed."""
        statement = delete(self._table).where(self._row(name))

        def forget(connection: Connection) -> bool:
            was = bool(connection.execute(statement).rowcount)
            if was:
                note_action(connection, self._dialect, "forget_schedule", by, {"name": name})
            return was

        return await self._database.run(forget, Activity.OPERATE)

    async def run(self, name: str, by: str) -> ScheduleState | None:
        """Ask for a run besides the fire times, unless it is paused; its state before, or None."""

        def ask(state: ScheduleState, now: datetime) -> ScheduleState | None:
            if state.paused_at is not None:
                return None
            return state if state.run_at is not None else replace(state, run_at=now)

        return await self._operate("run_schedule", name, by, ask)

    async def pause(self, name: str, by: str) -> ScheduleState | None:
        """Pause a schedule, and note who did; its state before, or None."""

        def pause(state: ScheduleState, now: datetime) -> ScheduleState | None:
            return None if state.paused_at is not None else state.paused(now, by)

        return await self._operate("pause_schedule", name, by, pause)

    async def resume(self, name: str, by: str) -> ScheduleState | None:
        """End the pause of a schedule, and note who did; its state before, or None."""

        def resume(state: ScheduleState, now: datetime) -> ScheduleState | None:
            return None if state.paused_at is None else state.resumed(now)

        return await self._operate("resume_schedule", name, by, resume)

    async def _operate(
        self,
        action: str,
        name: str,
        by: str,
        decide: Callable[[ScheduleState, datetime], ScheduleState | None],
    ) -> ScheduleState | None:
        """Let an operator change a schedule, and note who did unless `decide` gives None; its state
        before, or None: there is no such schedule.
        """

        def operate(connection: Connection) -> ScheduleState | None:
            was, state = self._change_state(
                connection, name, lambda was, now: None if was is None else decide(was, now)
            )
            if state is not None:
                note_action(connection, self._dialect, action, by, {"name": name})
            return was

        return await self._database.run(operate, Activity.OPERATE)

    async def listed(self, limit: int) -> list[Schedule]:
        """Up to `limit` schedules, sorted by name."""
        c = self._table.c
        running = case((c.lease_expires_at > clock(), 1), else_=0)
        statement = select(c.key, c.info, running).where(c.scope == SCHEDULE)
        statement = statement.order_by(c.key).limit(limit)

        def read(connection: Connection) -> list[Schedule]:
            rows = connection.execute(statement).all()
            states = [(name, load_state(info), runs) for name, info, runs in rows]
            return [
                replace(state.listed(name), running=bool(runs))
                for name, state, runs in states
                if state is not None
            ]

        return await self._database.run(read, Activity.OPERATE, write=False)

    def _lock(self, connection: Connection, name: str) -> Any:
        c = self._table.c
        statement = select(c.info, c.lease_token, c.lease_expires_at).where(self._row(name))
        return connection.execute(statement.with_for_update()).one_or_none()

    def _change_state(
        self, connection: Connection, name: str, decide: Decide
    ) -> tuple[ScheduleState | None, ScheduleState | None]:
        """Write the state that `decide` makes of the present one; both.

        A process that holds the schedule loses it, so that it cannot write over the change: a
        message that it is making is not published.
        """
        row = self._lock(connection, name)
        was = None if row is None else load_state(row.info)
        state = decide(was, self._dialect.now(connection))
        if state is not None and state != was:
            self._write(connection, name, state, None, null())
            if self._dialect.can_listen:
                # Processes that fire it may nap for long.
                notify_state_changed(connection, self._dialect.tables.config.channel)
        return was, state

    def _write(
        self,
        connection: Connection,
        name: str,
        state: ScheduleState,
        token: UUID | None,
        ends: Any,
    ) -> None:
        values = {"info": state.dump(), "lease_token": token, "lease_expires_at": ends}
        connection.execute(update(self._table).where(self._row(name)).values(values))

    def _row(self, name: str) -> ColumnElement[bool]:
        return and_(self._table.c.scope == SCHEDULE, self._table.c.key == name)

    async def _update_held(self, name: str, token: UUID, **values: Any) -> bool:
        """Set columns of a schedule's row that `token` has; whether it has."""
        held = update(self._table).where(self._row(name), self._table.c.lease_token == token)

        def update_held(connection: Connection) -> bool:
            return bool(connection.execute(held.values(values)).rowcount)

        return await self._database.run(update_held, *FIRING)
