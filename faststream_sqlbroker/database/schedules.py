"""Schedules: rows of the policy state with scope "schedule"; each operation is one transaction.

The statements are the same on every database. The process that publishes due messages holds the
row's lease, with a token of its own, and each of its writes names the token. A process that
changes the schedule removes the lease. A row without a lease, or with an expired lease, is
free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, and_, case, delete, null, select, update

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.status import Schedule, ScheduleState, load_state
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.parts.audit import record_action
from faststream_sqlbroker.database.parts.live_subscribers import notify_state_changed
from faststream_sqlbroker.database.parts.mirror_rows import insert_mirrored
from faststream_sqlbroker.database.parts.policy_state import get_future_time, upsert
from faststream_sqlbroker.schema.types import clock

SCHEDULE = "schedule"
"""The scope of all schedules; the key is the schedule's name."""
FIRING = (Activity.SCHEDULE, Activity.PUBLISH)
"""The database activities of a process with schedules."""

ChangeState = Callable[[ScheduleState | None, datetime], ScheduleState | None]
"""Returns the new state for a state and the database's time; None changes nothing."""


@dataclass(frozen=True, slots=True)
class ScheduleSnapshot:
    """The state of a schedule at the time of a read."""

    state: ScheduleState | None
    busy_for: float
    """Maximum seconds for which another process holds the schedule; 0 or less if it is free."""


class ScheduleStore(StoreSubject):
    """The stored state of schedules; the process that publishes is identified by a token.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    async def define(self, name: str, change_state: ChangeState) -> ScheduleState | None:
        """Create or change the schedule `name` by `change_state`; return the resulting state.

        Called by each process that declares the schedule, when it starts.
        """

        def define(connection: Connection) -> ScheduleState | None:
            # Insert the row, or lock the existing row: two processes that start together decide one
            # after the other, and the second sees what the first wrote.
            binds = [{"scope": SCHEDULE, "key": name}]
            upsert(connection, self._table, binds, replaced=("scope",), created_at=clock())
            old_state, state = self._change_state(connection, name, change_state)
            return old_state if state is None else state

        return await self._database.run(define, *FIRING)

    async def read_snapshots(
        self, names: Sequence[str]
    ) -> tuple[datetime, dict[str, ScheduleSnapshot]]:
        """Return the database's time, and the existing schedules among `names`.

        Read before a claim: the states show if a schedule is due, or how long to sleep.
        """
        c = self._table.c
        statement = select(c.key, c.info, c.lease_expires_at)
        statement = statement.where(c.scope == SCHEDULE, c.key.in_(names))

        def read_rows(connection: Connection) -> tuple[datetime, dict[str, ScheduleSnapshot]]:
            rows = connection.execute(statement).all()
            now = self._dialect.now(connection)
            return now, {
                key: ScheduleSnapshot(
                    load_state(info),
                    0.0 if lease_ends_at is None else (lease_ends_at - now).total_seconds(),
                )
                for key, info, lease_ends_at in rows
            }

        return await self._database.run(read_rows, *FIRING, write=False)

    async def claim(self, name: str, token: UUID, lease: float) -> ScheduleState | None:
        """Lease a schedule for `lease` seconds if due and free; return the state, or None.

        A schedule is due at its next fire time, or if an operator has requested a run; never while
        paused. The state's `decided_at` says until when fire times are to be published. It is kept
        when another process takes over the schedule, so a run is finished as it was begun.
        """

        def claim(connection: Connection) -> ScheduleState | None:
            row = self._lock_row(connection, name)
            now = self._dialect.now(connection)
            state = None if row is None else load_state(row.info)
            if state is None or state.due_at is None or state.due_at > now:
                return None
            lease_ends_at = row.lease_expires_at
            if row.lease_token != token and lease_ends_at is not None and lease_ends_at > now:
                return None
            state = state.start_run(now)
            self._write(connection, name, state, token, get_future_time(lease))
            return state

        return await self._database.run(claim, *FIRING)

    async def extend(self, name: str, token: UUID, lease: float) -> bool:
        """Extend the lease to `lease` seconds from now; return False if `token` lost the lease."""
        return await self._update_held(name, token, lease_expires_at=get_future_time(lease))

    async def publish(
        self,
        name: str,
        token: UUID,
        state: ScheduleState,
        rows: Sequence[NewMessage],
        lease: float | None,
    ) -> bool:
        """Insert `rows` and write `state`; return False, unchanged, if `token` lost the schedule.

        Both are one transaction, so each fire time is published once. The schedule stays leased for
        `lease` seconds from now; None releases it.
        """

        def publish(connection: Connection) -> bool:
            row = self._lock_row(connection, name)
            if row is None or row.lease_token != token:
                return False
            if rows:
                insert_mirrored(self._dialect, connection, rows)
            if lease is None:
                self._write(connection, name, state, None, null())
            else:
                self._write(connection, name, state, token, get_future_time(lease))
            return True

        return await self._database.run(publish, *FIRING)

    async def postpone(self, name: str, token: UUID, state: ScheduleState, pause: float) -> bool:
        """Release a schedule that `token` holds, and block new leases for `pause` seconds.

        Writes `state`, and returns False, without a change, if `token` lost the schedule.
        """
        return await self._update_held(
            name,
            token,
            info=state.dump(),
            lease_token=None,
            lease_expires_at=get_future_time(pause),
        )

    async def release(self, name: str, token: UUID) -> bool:
        """Release a schedule that `token` holds, so that other processes can claim now."""
        return await self._update_held(name, token, lease_token=None, lease_expires_at=None)

    async def remove(self, name: str, by: str) -> bool:
        """Remove a schedule, and record the operator; return False if there was none."""
        statement = delete(self._table).where(self._match_name(name))

        def remove(connection: Connection) -> bool:
            existed = bool(connection.execute(statement).rowcount)
            if existed:
                record_action(connection, self._dialect, "forget_schedule", by, {"name": name})
            return existed

        return await self._database.run(remove, Activity.OPERATE)

    async def request_run(self, name: str, by: str) -> ScheduleState | None:
        """Request an extra run unless the schedule is paused; return the state before.

        None if the schedule does not exist. An earlier request that still waits is kept.
        """

        def request(state: ScheduleState, now: datetime) -> ScheduleState | None:
            if state.paused_at is not None:
                return None
            return state if state.run_at is not None else replace(state, run_at=now)

        return await self._change_by_operator("run_schedule", name, by, request)

    async def pause(self, name: str, by: str) -> ScheduleState | None:
        """Pause a schedule, and record the operator; return the state before.

        None if the schedule does not exist. A schedule that is paused already keeps its pause.
        """

        def pause(state: ScheduleState, now: datetime) -> ScheduleState | None:
            return None if state.paused_at is not None else state.pause(now, by)

        return await self._change_by_operator("pause_schedule", name, by, pause)

    async def resume(self, name: str, by: str) -> ScheduleState | None:
        """Resume a paused schedule, and record the operator; return the state before.

        None if the schedule does not exist. A schedule that is not paused stays unchanged.
        """

        def resume(state: ScheduleState, now: datetime) -> ScheduleState | None:
            return None if state.paused_at is None else state.resume(now)

        return await self._change_by_operator("resume_schedule", name, by, resume)

    async def _change_by_operator(
        self,
        action: str,
        name: str,
        by: str,
        change_state: Callable[[ScheduleState, datetime], ScheduleState | None],
    ) -> ScheduleState | None:
        """Let an operator change a schedule; return the state before, None without a schedule.

        The action is recorded in the audit, unless `change_state` returns None and so changes
        nothing.
        """

        def change(connection: Connection) -> ScheduleState | None:
            old_state, state = self._change_state(
                connection,
                name,
                lambda old_state, now: None if old_state is None else change_state(old_state, now),
            )
            if state is not None:
                record_action(connection, self._dialect, action, by, {"name": name})
            return old_state

        return await self._database.run(change, Activity.OPERATE)

    async def list_schedules(self, limit: int) -> list[Schedule]:
        """List up to `limit` schedules, sorted by name."""
        c = self._table.c
        running = case((c.lease_expires_at > clock(), 1), else_=0)
        statement = select(c.key, c.info, running).where(c.scope == SCHEDULE)
        statement = statement.order_by(c.key).limit(limit)

        def read_rows(connection: Connection) -> list[Schedule]:
            rows = connection.execute(statement).all()
            states = [(name, load_state(info), is_running) for name, info, is_running in rows]
            return [
                replace(state.to_schedule(name), running=bool(is_running))
                for name, state, is_running in states
                if state is not None
            ]

        return await self._database.run(read_rows, Activity.OPERATE, write=False)

    def _lock_row(self, connection: Connection, name: str) -> Any:
        """Lock and return the schedule's row; None if the schedule does not exist."""
        c = self._table.c
        statement = select(c.info, c.lease_token, c.lease_expires_at).where(self._match_name(name))
        return connection.execute(statement.with_for_update()).one_or_none()

    def _change_state(
        self, connection: Connection, name: str, change_state: ChangeState
    ) -> tuple[ScheduleState | None, ScheduleState | None]:
        """Write the state that `change_state` returns; return the old and the new state.

        The row is locked first. The new state is None if nothing is to change. A process that holds
        the schedule loses its lease, so that it cannot write over the change: a message that it is
        making is not published.
        """
        row = self._lock_row(connection, name)
        old_state = None if row is None else load_state(row.info)
        state = change_state(old_state, self._dialect.now(connection))
        if state is not None and state != old_state:
            self._write(connection, name, state, None, null())
            if self._dialect.can_listen:
                # Processes that fire the schedule may be asleep for long.
                notify_state_changed(connection, self._dialect.tables.config.channel)
        return old_state, state

    def _write(
        self,
        connection: Connection,
        name: str,
        state: ScheduleState,
        token: UUID | None,
        lease_ends_at: Any,
    ) -> None:
        """Write the state and the lease of a schedule whose row the transaction has locked.

        A token of None releases the schedule: a process that is still making a message cannot
        publish it.
        """
        values = {"info": state.dump(), "lease_token": token, "lease_expires_at": lease_ends_at}
        connection.execute(update(self._table).where(self._match_name(name)).values(values))

    def _match_name(self, name: str) -> ColumnElement[bool]:
        return and_(self._table.c.scope == SCHEDULE, self._table.c.key == name)

    async def _update_held(self, name: str, token: UUID, **values: Any) -> bool:
        """Set columns of the row; return False, without a change, if `token` lost the schedule.

        `token` is that of this process's claim. Another claim replaces it; a change by an operator
        or by a starting process removes it.
        """
        held_row = update(self._table).where(
            self._match_name(name), self._table.c.lease_token == token
        )

        def update_held(connection: Connection) -> bool:
            return bool(connection.execute(held_row.values(values)).rowcount)

        return await self._database.run(update_held, *FIRING)
