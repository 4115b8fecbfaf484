"""Schedules: rows of the policy state with scope "schedule".

The statements are the same on every database. The process that publishes what is due holds the
row's lease, with a token of its own, and each of its writes names the token. A process that
changes the schedule removes the lease. A row without a lease, or with one that has run out, is
free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Table,
    and_,
    delete,
    literal,
    null,
    select,
    update,
)

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.core.status import Schedule, ScheduleState, load_state
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.parts.live_subscribers import notify_state_changed
from faststream_sqlbroker.database.parts.mirror import insert_mirrored
from faststream_sqlbroker.database.parts.policy_state import upsert
from faststream_sqlbroker.schema.types import clock, later

SCHEDULE = "schedule"
"""The scope of all schedules; the key is the schedule's name."""

Decide = Callable[[ScheduleState | None, datetime], ScheduleState | None]
"""Gets a state and the database's time, gives a new state; None changes nothing."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A schedule as it was read."""

    state: ScheduleState | None
    busy_for: float
    """Seconds for which another process holds it at most; 0 or less: it is free."""


def define(
    dialect: Dialect, connection: Connection, name: str, decide: Decide
) -> ScheduleState | None:
    """Lock the schedule, inserting it if it is new; write and return the state of `decide`."""
    table = dialect.tables.policy_state
    # Inserts the row, or locks the existing one: two processes that start together decide one
    # after the other, and the second sees what the first wrote.
    upsert(
        connection,
        table,
        [{"scope": SCHEDULE, "key": name}],
        replaced=("scope",),
        created_at=clock(),
    )
    row = _lock(connection, table, name)
    known = load_state(row.info)
    state = decide(known, dialect.now(connection))
    if state is None:
        return known
    _write(connection, table, name, state, None, null())
    if dialect.can_listen:
        # Processes that fire it may nap for long.
        notify_state_changed(connection, dialect.tables.config.channel)
    return state


def read(
    dialect: Dialect, connection: Connection, names: Sequence[str]
) -> tuple[datetime, dict[str, Seen]]:
    """The database's time, and those of the schedules `names` that exist."""
    c = dialect.tables.policy_state.c
    statement = select(c.key, c.info, c.lease_expires_at).where(
        c.scope == SCHEDULE, c.key.in_(names)
    )
    rows = connection.execute(statement).all()
    now = dialect.now(connection)
    return now, {
        row.key: Seen(
            load_state(row.info),
            0.0 if row.lease_expires_at is None else (row.lease_expires_at - now).total_seconds(),
        )
        for row in rows
    }


def hold(
    dialect: Dialect, connection: Connection, name: str, token: UUID, lease: float
) -> ScheduleState | None:
    """Take the schedule for `lease` seconds if it is due and free; returns its state, or None.

    It is due at its next fire time, or if an operator has asked for a run; never while paused.
    `decided_at` says until when fire times are to be published. It is kept when the schedule
    changes hands, so that a run is finished as it was begun.
    """
    table = dialect.tables.policy_state
    row = _lock(connection, table, name)
    now = dialect.now(connection)
    state = None if row is None else load_state(row.info)
    if state is None or state.due_at is None or state.due_at > now:
        return None
    if row.lease_token != token and row.lease_expires_at is not None and row.lease_expires_at > now:
        return None
    state = state.begun(now)
    _write(connection, table, name, state, token, _from_now(lease))
    return state


def extend(connection: Connection, table: Table, name: str, token: UUID, lease: float) -> bool:
    """Extend the lease of `token` to `lease` seconds from now; false if it was lost."""
    held = update(table).where(_of(table, name), table.c.lease_token == token)
    return bool(connection.execute(held.values(lease_expires_at=_from_now(lease))).rowcount)


def publish(
    dialect: Dialect,
    connection: Connection,
    name: str,
    token: UUID,
    state: ScheduleState,
    rows: Sequence[NewMessage],
    lease: float | None,
) -> bool:
    """Insert `rows` and write `state` if `token` holds the schedule; returns whether it does.

    The lease is extended to `lease` seconds from now; None gives the schedule back.
    """
    table = dialect.tables.policy_state
    row = _lock(connection, table, name)
    if row is None or row.lease_token != token:
        return False
    if rows:
        insert_mirrored(dialect, connection, rows)
    if lease is None:
        _write(connection, table, name, state, None, null())
    else:
        _write(connection, table, name, state, token, _from_now(lease))
    return True


def put_off(
    connection: Connection, table: Table, name: str, token: UUID, state: ScheduleState, pause: float
) -> None:
    """Give the schedule back with `state`; no process takes it for `pause` seconds."""
    row = _lock(connection, table, name)
    if row is not None and row.lease_token == token:
        _write(connection, table, name, state, None, _from_now(pause))


def give_back(connection: Connection, table: Table, name: str, token: UUID) -> None:
    """Give the schedule back if `token` holds it."""
    held = update(table).where(_of(table, name), table.c.lease_token == token)
    connection.execute(held.values(lease_token=None, lease_expires_at=None))


def forget(connection: Connection, table: Table, name: str) -> bool:
    """Remove a schedule; returns whether it existed."""
    return bool(connection.execute(delete(table).where(_of(table, name))).rowcount)


def change(
    dialect: Dialect,
    connection: Connection,
    name: str,
    decide: Callable[[ScheduleState, datetime], ScheduleState],
) -> ScheduleState | None:
    """Write the state that `decide` makes of the present one; returns that, None: there is none.

    A process that holds the schedule loses it, so that it cannot write over the change: a message
    that it is making is not published.
    """
    table = dialect.tables.policy_state
    row = _lock(connection, table, name)
    was = None if row is None else load_state(row.info)
    if was is None:
        return None
    state = decide(was, dialect.now(connection))
    if state != was:
        _write(connection, table, name, state, None, null())
        if dialect.can_listen:
            notify_state_changed(connection, dialect.tables.config.channel)
    return was


def listed(connection: Connection, table: Table, limit: int) -> list[Schedule]:
    """Up to `limit` schedules, by name."""
    statement = select(table.c.key, table.c.info).where(table.c.scope == SCHEDULE)
    rows = connection.execute(statement.order_by(table.c.key).limit(limit)).all()
    states = [(row.key, load_state(row.info)) for row in rows]
    return [state.listed(name) for name, state in states if state is not None]


def _lock(connection: Connection, table: Table, name: str) -> Any:
    c = table.c
    statement = select(c.info, c.lease_token, c.lease_expires_at).where(_of(table, name))
    return connection.execute(statement.with_for_update()).one_or_none()


def _write(
    connection: Connection,
    table: Table,
    name: str,
    state: ScheduleState,
    token: UUID | None,
    ends: Any,
) -> None:
    values = {"info": state.dump(), "lease_token": token, "lease_expires_at": ends}
    connection.execute(update(table).where(_of(table, name)).values(values))


def _of(table: Table, name: str) -> ColumnElement[bool]:
    return and_(table.c.scope == SCHEDULE, table.c.key == name)


def _from_now(seconds: float) -> Any:
    return later(literal(round(seconds * 1_000_000), BigInteger))
